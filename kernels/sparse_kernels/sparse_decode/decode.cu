// One decode step of sparse attention in one launch. A cluster of thread blocks takes each query token and KV head
// through routing, scoring (or reads scores), selection (or reads a selection) and attention. No thread block waits for
// those of another row.
#include "hot.cuh"
#include "levels.cuh"
#include "merge.cuh"
#include "route.cuh"
#include "score.cuh"
#include "select.cuh"
#include "stop.cuh"
#include "whole.cuh"

constexpr int QUERY = SK_QUERY, KV = SK_KV, RECORD = SK_RECORD, OUTPUT = SK_OUTPUT;
constexpr int GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE, PAGE_SIZE = SK_PAGE_SIZE;
constexpr int PAGES_PER_BLOCK = SK_PAGES_PER_BLOCK;
constexpr int CLUSTER = SK_CLUSTER, WARPS = SK_WARPS, BLOCKS_PER_SM = SK_BLOCKS_PER_SM;
constexpr bool FUSED = SK_FUSED;
// The selection comes from memory, and nothing is scored.
constexpr bool LISTED = SK_LISTED;
static_assert(!(FUSED && LISTED), "who selects?");
// The caller made the list. It may have entries that are not pages.
constexpr bool GIVEN = SK_GIVEN;
// The selection is written to memory.
constexpr bool WRITTEN = SK_WRITTEN;
static_assert(!GIVEN || (LISTED && !WRITTEN), "a given selection is a list, which the caller has");
// Tiles of pages between two stop tests; 0 without a stop rule.
constexpr int STOP_TILES = SK_STOP_TILES;
// Pages may have copies.
constexpr bool HOT = SK_HOT;
static_assert(!(HOT && STOP_TILES), "a stop rule locates pages otherwise");

constexpr int THREADS = WARPS * WARP;
constexpr int TILES_PER_PAGE = PAGE_SIZE / 8;

using Score = ScoreQuery<RECORD, GROUP, HEAD_SIZE>;
// Records are scored in two levels. A thread block then has every CLUSTER-th block of the context.
constexpr bool IN_LEVELS = FUSED && RECORD == LEVELED;
using Leveled = Levels<RECORD, CLUSTER, WARPS, PAGES_PER_BLOCK, GROUP, HEAD_SIZE>;
using Chained = ChainedAttention<CLUSTER, WARPS, KV, GROUP, HEAD_SIZE>;
using Peers = Cluster<CLUSTER>;
constexpr int PAGE_BYTES = PAGE_SIZE * 2 * HEAD_SIZE * Chained::Attend::KV_BYTES;
using Hot = HotPages<PAGE_BYTES, WARPS>;
// Pages of a round of the chains, and those of a round that one thread block attends.
constexpr int PER_ROUND = TILES_PER_PAGE < CHAINS ? CHAINS / TILES_PER_PAGE : 1;
constexpr bool SHARED_PAGES = TILES_PER_PAGE > Chained::PER_BLOCK;
constexpr int OWN_PER_ROUND = SHARED_PAGES ? 1 : Chained::PER_BLOCK / TILES_PER_PAGE;

struct DecodeParams {
    QueryParams query;
    CacheParams cache;
    StatisticsParams statistics;
    const u16* scores;  // Of every page, unless FUSED or LISTED; null: no scores.
    i64 scores_stride;  // Between two rows of scores, in elements.
    ContextParams contexts;
    SelectionParams selection;
    RoutingParams routing;
    SoftmaxParams softmax;
    StopParams stop;
    OutputParams output;
    const int* pages;   // [rows, selection.k] if LISTED, best first or as GIVEN; null: the sink pages and the newest.
    int* chosen;        // [rows, selection.k] if WRITTEN: the selection in reading order, then -1.
    WholeParams whole;
    int num_tokens;     // Query tokens. Thread blocks with a larger z only share dense contexts.
    CandidateParams candidates;  // If FUSED.
    HotParams hot;      // If HOT.
};

struct StageMemory {
    typename Chained::Shared attention;
    typename Select<WARPS>::Shared select;
    typename Score::Shared score;
};

// Attends to the tiles of the selected pages until the output is stable.
template <int TILES>
struct Attending {
    using Stopping = StoppingAttention<CLUSTER, WARPS, KV, GROUP, HEAD_SIZE, TILES>;
    struct Shared : StageMemory {
        typename Stopping::Probes probes;
    };

    // Returns how many of the `page_tiles` were read. `locate` is that of `StoppingAttention::run`.
    template <typename Locate>
    static DEVICE int run(Shared& shared, typename Chained::Values& values, const DecodeParams& p, const TokenRows& rows,
                          int head, bool may_stop, int page_tiles, int tail_tiles, u16* out, int rank, int warp, int lane,
                          Locate locate) {
        StopRule rule(p.stop, TILES_PER_PAGE);
        return Stopping::template run<OUTPUT>(shared.attention, values, shared.probes, rows, may_stop, page_tiles,
                                              tail_tiles, rule, logit_scale(p.softmax, p.query, p.cache),
                                              p.softmax.softcap, SinkLogits(p.softmax, head, GROUP),
                                              value_scale(p.cache), out, rank, warp, lane, locate);
    }
};

// Attends to all of them.
template <>
struct Attending<0> {
    struct Shared : StageMemory {};

    template <typename Locate>
    static DEVICE int run(Shared& shared, typename Chained::Values& values, const DecodeParams& p, const TokenRows& rows,
                          int head, bool, int page_tiles, int tail_tiles, u16* out, int rank, int warp, int lane,
                          Locate locate) {
        Chained::template run<OUTPUT>(shared.attention, values, rows, page_tiles + tail_tiles,
                                      logit_scale(p.softmax, p.query, p.cache), p.softmax.softcap,
                                      SinkLogits(p.softmax, head, GROUP), value_scale(p.cache), out, rank, warp, lane,
                                      [&](int i) { return locate(i, page_tiles); });
        return page_tiles;
    }
};

using Shared = typename Attending<STOP_TILES>::Shared;
using Whole = WholeAttention<QUERY, OUTPUT, KV, GROUP, HEAD_SIZE, PAGES_PER_BLOCK * PAGE_SIZE, WARPS, DecodeParams>;
static_assert(2 * sizeof(typename Whole::Piece) <= sizeof(typename Chained::Values), "two pieces find no room");
constexpr int FIXED_BYTES = (sizeof(Shared) + 15) / 16 * 16;
static_assert(FIXED_BYTES == SK_FIXED_BYTES, "the host counts the shared memory of a block otherwise");
static_assert(sizeof(typename Leveled::Scratch) <= sizeof(Shared::select.candidates), "scratch finds no room");
static_assert(sizeof(typename Chained::Values) == SK_VALUES_BYTES, "the host counts the values of the chains otherwise");

// One query token and KV head, for one thread block of its cluster.
struct Row {
    const DecodeParams& p;
    Shared& shared;
    typename Chained::Values& values;
    u16* keys;      // Of the row's pages, in shared memory, unless LISTED.
    int* selected;  // The selected pages, in shared memory, with room for `p.selection.k`.
    int thread, lane, warp, rank, head, token, row;
    QueryToken at;
    int k;          // Number of selected pages.
    TokenRows rows;
    u16* out;

    // The most rows of the matrix tiles of a query that one warp prepares.
    static constexpr int PER_WARP = ceil_div(Score::ROWS, WARPS);
    using QueryRows = float[PER_WARP][padded(HEAD_SIZE) / WARP];

    DEVICE Row(const DecodeParams& params, u8* memory)
        : p(params), shared(*(Shared*)memory), values(*(typename Chained::Values*)(memory + FIXED_BYTES)),
          // A single thread block no longer needs the keys when it attends. In a cluster, its peers may still read
          // them.
          keys((u16*)(CLUSTER == 1 ? &values : &values + 1)),
          selected((int*)(memory + dynamic_shared_bytes()) - params.selection.k), thread(threadIdx.x),
          lane(threadIdx.x % WARP), warp(threadIdx.x / WARP), rank(Peers::rank()), head(blockIdx.y), token(blockIdx.z),
          row(blockIdx.z * gridDim.y + blockIdx.y), at(params.contexts, blockIdx.z),
          k(params.selection.pages_of(at.request, row)), rows(params.cache, blockIdx.y),
          out(params.output.heads + blockIdx.z * params.output.token_stride + (i64)blockIdx.y * GROUP * HEAD_SIZE) {}

    DEVICE void load_query(QueryRows& x) const {
        i64 first = first_query_element(p.query, token, head, GROUP);
#pragma unroll
        for (int n = 0; n < PER_WARP; n++)
            load_row<QUERY, GROUP, HEAD_SIZE>(p.query.heads, first, p.query.head_stride, warp + n * WARPS, lane, x[n]);
    }

    // Returns whether the group is skipped. All thread blocks of a row decide alike, so none waits for one that has
    // left.
    DEVICE bool is_skipped(const QueryRows& x) const {
        if (!p.routing.coefficients || at.context <= 0 || at.whole) return false;
        Routing routing{p.routing};
        float threshold = routing.threshold(head, at.context);
        const u8* anchor = rows.first_key(at.table);
        float* cosines = shared.attention.largest[0];
#pragma unroll
        for (int n = 0; n < PER_WARP; n++) {
            int r = warp + n * WARPS;
            if (r >= GROUP) break;
            float c = cosine<KV, HEAD_SIZE>(anchor, x[n], lane);
            if (lane == 0) cosines[r] = c;
        }
        __syncthreads();
        bool skipped = routing.skips<GROUP>(cosines, threshold);
        if (rank == 0 && thread == 0) routing.count(head, skipped);
        return skipped;
    }

    DEVICE void write_zeros() const {
#pragma unroll 1
        for (int i = rank * THREADS + thread; i < GROUP * HEAD_SIZE; i += CLUSTER * THREADS) out[i] = 0;
        if (STOP_TILES && p.output.pages_read && rank == 0 && thread == 0) p.output.pages_read[row] = 0;
        if constexpr (WRITTEN) write_selection(0);
    }

    // Prefetches the statistics of pages [first, last). A launch with few rows waits for memory most of the time, and
    // one wait for all pages is shorter than several.
    DEVICE void prefetch_statistics(int num_pages, int first, int last) const {
        if constexpr (IN_LEVELS) {
            Leveled::prefetch_records(p.statistics, head, at.table, num_pages, rank, thread, THREADS);
            return;
        }
        constexpr int LINES = ceil_div(PAGES_PER_BLOCK * Score::RECORD_BYTES, 128);
        int block = first / PAGES_PER_BLOCK, lines = (ceil_div(last, PAGES_PER_BLOCK) - block) * LINES;
#pragma unroll 2
        for (int i = thread; i < lines; i += THREADS)
            prefetch(p.statistics.vectors + head * p.statistics.head_stride +
                     at.table[block + i / LINES] * p.statistics.block_stride + i % LINES * 128);
    }

    DEVICE void prepare_query(const QueryRows& x, bool scoring) const {
#pragma unroll
        for (int n = 0; n < PER_WARP; n++) {
            int r = warp + n * WARPS;
            if (r >= Score::ROWS) break;
            shared.attention.query.prepare(r, x[n], lane);
            if (FUSED && scoring) Score::prepare(shared.score, r, x[n], p.statistics.std_weight, lane);
        }
    }

    // Scores this thread block's pages [first, last) into `keys`, or its blocks if IN_LEVELS. Each thread block of the
    // cluster has `share` pages.
    DEVICE void score_pages(int num_pages, int padded, int first, int last, int share) const {
        auto key_of = [&](int page, u16 bits) {
            bool always = page < p.selection.sink_pages || page >= num_pages - p.selection.recent_pages;
            return always ? KEY_ALWAYS : ordered_key(bits);
        };
        if constexpr (IN_LEVELS) {
            auto& scratch = *(typename Leveled::Scratch*)shared.select.candidates;
            Leveled::run(scratch, shared.score, p.statistics, head, at.table, num_pages, keys, rank, warp, lane, key_of);
        } else {
            Score score;
            score.load(shared.score, lane);
            score_range<true, PAGES_PER_BLOCK>(score, Statistics(p.statistics, head), at.table, first, last, warp, WARPS,
                                               lane, [&](int page, u16 bits) { keys[page] = (u16)key_of(page, bits); });
        }
        if constexpr (IN_LEVELS && CLUSTER > 1) {
            Peers::sync();
            copy_blocks_of_peers(num_pages);
        } else if constexpr (CLUSTER > 1) {
            // Each thread block copies its peers' keys and selects from the whole row.
            Peers::sync();
#pragma unroll 1
            for (int i = 8 * thread; i < padded; i += 8 * THREADS)
                if (i < first || i >= first + share)
                    *(uint4*)(keys + i) = Peers::load((const uint4*)(keys + i), i / share);
        } else {
            Peers::arrive();
        }
        __syncthreads();
    }

    // Copies the keys of the blocks of all peers, and what the owner of the last page has behind it: KEY_ABSENT.
    DEVICE void copy_blocks_of_peers(int num_pages) const {
        // As many keys are copied at once as are in one block.
        constexpr int AT_ONCE = PAGES_PER_BLOCK % 8 == 0 ? 8 : PAGES_PER_BLOCK % 2 == 0 ? 2 : 1;
#pragma unroll 1
        for (int page = AT_ONCE * thread; page < num_pages; page += AT_ONCE * THREADS) {
            int peer = page / PAGES_PER_BLOCK % CLUSTER;
            if (peer == rank) continue;
            if constexpr (AT_ONCE == 8) *(uint4*)(keys + page) = Peers::load((const uint4*)(keys + page), peer);
            else if constexpr (AT_ONCE == 2) *(u32*)(keys + page) = Peers::load((const u32*)(keys + page), peer);
            else keys[page] = Peers::load(keys + page, peer);
        }
    }

    // Reads the row's scores into `keys`.
    DEVICE void read_scores(int num_pages) const {
        load_keys(p.scores + row * p.scores_stride, num_pages, keys, thread, THREADS);
        Peers::arrive();
        __syncthreads();
        mark_always(keys, num_pages, p.selection.sink_pages, p.selection.recent_pages, thread, THREADS);
        __syncthreads();
    }

    // Reads the keys of the row's candidates.
    DEVICE void read_candidates(int count) const {
        const u16* from = p.candidates.keys + row * p.candidates.stride;
        // The array has room beyond the last key; what is read there is not a key.
#pragma unroll 1
        for (int i = 8 * thread; i < count; i += 8 * THREADS) *(uint4*)(keys + i) = load16(from + i);
        Peers::arrive();
        __syncthreads();
        if (thread < ceil_div(count, 8) * 8 - count) keys[count + thread] = KEY_ABSENT;
        __syncthreads();
    }

    // Fills `selected` with the best pages, best first.
    DEVICE void select_best(int num_pages, int padded, int first, int last, int share) const {
        if constexpr (!IN_LEVELS) shared.select.clear(thread);
        if (thread < padded - num_pages) keys[num_pages + thread] = KEY_ABSENT;
        __syncthreads();
        if constexpr (FUSED) score_pages(num_pages, padded, first, last, share);
        else read_scores(num_pages);
        if constexpr (IN_LEVELS) {
            // Until here its memory was scratch.
            shared.select.clear(thread);
            __syncthreads();
        }
        select(padded, [](int page) { return page; });
    }

    // The same for a context with candidates.
    DEVICE void select_candidates(int num_pages) const {
        int count = Chunks(p.candidates, num_pages, k).candidates(num_pages);
        const int* pages = p.candidates.pages + row * p.candidates.stride;
        shared.select.clear(thread);
        read_candidates(count);
        select(ceil_div(count, 8) * 8, [&](int i) { return pages[i]; });
    }

    // Fills `selected` from `keys`; `page_of` returns the page of a key.
    template <typename PageOf>
    DEVICE void select(int padded, PageOf page_of) const {
        Select<WARPS>{shared.select, k, warp, lane}.run(SharedKeys<WARPS>{keys, padded, thread}, [&](int slot, int i) {
            if (SHARED_PAGES || Chained::block_of(slot * TILES_PER_PAGE) == rank)
                selected[slot] = page_of(i);
        });
    }

    // Fills `selected` from memory.
    DEVICE void read_selection() const {
        const int* listed = p.pages + row * (i64)p.selection.k;
        Peers::arrive();
#pragma unroll 1
        for (int slot = thread; slot < k; slot += THREADS) selected[slot] = listed[slot];
    }

    // Fills `selected` with the entries of the given list that are complete pages of the context, in list order.
    // Returns their number. Each thread block of a cluster does this separately.
    DEVICE int read_given(int num_pages) const {
        const int* given = p.pages + row * (i64)p.selection.k;
        auto exists = [&](int page) { return (u32)page < (u32)num_pages; };
        bool gaps = false;
#pragma unroll 1
        for (int slot = thread; slot < k; slot += THREADS) {
            selected[slot] = given[slot];
            gaps |= !exists(selected[slot]);
        }
        if (!__syncthreads_or(gaps)) return k;
        if (warp == 0) {
            int count = 0;
#pragma unroll 1
            for (int first = 0; first < k; first += WARP) {
                int page = first + lane < k ? selected[first + lane] : -1;
                u32 listed = __ballot_sync(FULL, exists(page));
                // Writes never go beyond the entries that all lanes have read.
                __syncwarp();
                if (exists(page)) selected[count + __popc(listed & ((1u << lane) - 1))] = page;
                count += __popc(listed);
                __syncwarp();
            }
            if (lane == 0) shared.select.num_candidates = count;
        }
        __syncthreads();
        return shared.select.num_candidates;
    }

    // Writes the first `count` pages of the selection, then -1. Each thread block writes the pages that it has
    // selected.
    DEVICE void write_selection(int count) const {
        int* chosen = p.chosen + row * (i64)p.selection.k;
#pragma unroll 1
        for (int slot = thread; slot < p.selection.k; slot += THREADS)
            if ((SHARED_PAGES ? 0 : Chained::block_of(slot * TILES_PER_PAGE)) == rank)
                chosen[slot] = slot < count ? selected[slot] : -1;
    }

    // Fills `selected` with the sink pages and the newest pages; with a stop rule the newest first.
    DEVICE void select_newest(int num_pages) const {
        int sink_pages = p.selection.sink_pages;
        Peers::arrive();
#pragma unroll 1
        for (int slot = thread; slot < k; slot += THREADS)
            selected[slot] = slot < sink_pages ? slot : STOP_TILES ? num_pages - 1 - (slot - sink_pages) : num_pages - k + slot;
    }

    // Attends densely to a long context, unless the thread blocks of the launch share it.
    DEVICE void attend_long(const QueryRows& x, int num_pages) const {
        if constexpr (WRITTEN) write_selection(0);
        if (STOP_TILES && p.output.pages_read && rank == 0 && thread == 0) p.output.pages_read[row] = num_pages;
        Whole whole(p, shared.attention.query, &values, dynamic_shared_bytes() - FIXED_BYTES);
        if (whole.find_listed(at.request) || rank > 0) return;
        prepare_query(x, false);
        __syncthreads();
        whole.attend_alone(at, token, head);
    }

    // Replaces pages that this thread block attends by the places of their copies: place p is stored as -1 - p. A dense
    // context has copies if its pages fit `selected`. Returns whether `selected` has the pages.
    DEVICE bool find_copies(bool dense, int num_pages) const {
        if (dense && num_pages > p.selection.k) return false;
        int count = dense ? num_pages : k;
        if (dense) {
#pragma unroll 1
            for (int slot = thread; slot < count; slot += THREADS) selected[slot] = slot;
            __syncthreads();
        }
        Hot hot(p.hot, head);
        int rounds = count / PER_ROUND, rest = count % PER_ROUND - rank * OWN_PER_ROUND;
        int own = SHARED_PAGES ? count : rounds * OWN_PER_ROUND + min(max(rest, 0), OWN_PER_ROUND);
        auto slot_of = [&](int i) {
            return SHARED_PAGES ? i : i / OWN_PER_ROUND * PER_ROUND + rank * OWN_PER_ROUND + i % OWN_PER_ROUND;
        };
        hot.find(own, warp, lane, [&](int i) {
            int page = selected[slot_of(i)];
            return (u32)(at.table[page / PAGES_PER_BLOCK] * PAGES_PER_BLOCK + page % PAGES_PER_BLOCK);
        }, [&](u32 page) {
            return rows.keys + page / PAGES_PER_BLOCK * rows.block_stride +
                   (i64)(page % PAGES_PER_BLOCK * PAGE_SIZE) * rows.token_stride;
        }, [&](int i, u32 place) { selected[slot_of(i)] = -1 - (int)place; });
        if (rank == 0 && thread == 0) atomicAdd(hot.counters, (u64)count);
        __syncthreads();
        return true;
    }

    // Attends to the selected pages, or to all pages of a dense context, and to the incomplete page.
    DEVICE void attend(bool dense, int num_pages, int tail) const {
        int page_tiles = (dense ? num_pages : k) * TILES_PER_PAGE;
        bool listed = !dense;
        if constexpr (HOT) listed = find_copies(dense, num_pages);
        i64 beside = HOT ? p.hot.rows + head * (i64)p.hot.sets * Hot::WAYS * PAGE_BYTES - rows.keys : 0;
        auto locate = [&](int i, int end_of_pages) {
            int in_tail = i - end_of_pages, slot = i / TILES_PER_PAGE;
            int page = in_tail >= 0 ? num_pages : listed ? selected[slot] : slot;
            int tile = in_tail >= 0 ? in_tail : i % TILES_PER_PAGE;
            if (HOT && page < 0)
                return TokenTile{0, 8 * tile, 8, beside + (i64)(-1 - page) * PAGE_BYTES};
            return TokenTile{at.table[page / PAGES_PER_BLOCK], page % PAGES_PER_BLOCK * PAGE_SIZE + 8 * tile,
                             in_tail >= 0 ? min(8, tail - 8 * in_tail) : 8};
        };
        int tiles_read = Attending<STOP_TILES>::run(shared, values, p, rows, head, !dense, page_tiles, ceil_div(tail, 8),
                                                    out, rank, warp, lane, locate);
        if (STOP_TILES == 0 || rank > 0 || thread > 0) return;
        if (p.output.pages_read) p.output.pages_read[row] = tiles_read / TILES_PER_PAGE;
        if (p.output.counters && !dense) {
            u64* of_head = p.output.counters + 4 * head;
            atomicAdd(of_head, (u64)1);
            atomicAdd(of_head + 1, (u64)ceil_div(tiles_read, max(STOP_TILES, 1)));
            atomicAdd(of_head + 2, (u64)(8 * tiles_read + tail));
            atomicAdd(of_head + 3, (u64)at.context);
        }
    }
};

// Attends with one query token and KV head.
DEVICE void attend_row(const DecodeParams& p, u8* memory) {
    Row row(p, memory);
    typename Row::QueryRows x;
    row.load_query(x);
    if (row.is_skipped(x) || row.at.context <= 0) {
        row.write_zeros();
        return;
    }
    int num_pages = row.at.context / PAGE_SIZE, tail = row.at.context % PAGE_SIZE;
    if (is_long_and_whole(row.at)) {
        row.attend_long(x, num_pages);
        return;
    }
    bool dense = row.at.whole || num_pages <= row.k;
    bool selecting = !LISTED && !dense && (FUSED ? p.statistics.vectors != nullptr : p.scores != nullptr);
    bool scoring = FUSED && selecting && !p.candidates.has(num_pages);
    int padded = ceil_div(num_pages, 8) * 8;
    int share = FUSED ? ceil_div(padded, 8 * CLUSTER) * 8 : padded;
    int first = FUSED ? min(row.rank * share, num_pages) : 0, last = min(first + share, num_pages);
    if (CLUSTER == 8 && scoring) row.prefetch_statistics(num_pages, first, last);
    row.prepare_query(x, scoring);
    if constexpr (GIVEN) {
        if (!dense) row.k = row.read_given(num_pages);
        // All thread blocks of a row decide alike.
        if (!dense && row.k == 0 && tail == 0) {
            row.write_zeros();
            return;
        }
        Peers::arrive();
    } else if (FUSED && selecting && !scoring) row.select_candidates(num_pages);
    else if (selecting) row.select_best(num_pages, padded, first, last, share);
    else if (LISTED && !dense && p.pages) row.read_selection();
    else row.select_newest(num_pages);
    __syncthreads();
    if constexpr (WRITTEN) row.write_selection(dense ? 0 : row.k);
    if constexpr (WRITTEN && HOT) __syncthreads();
    if (!scoring) Peers::wait();
    row.attend(dense, num_pages, tail);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
#if SK_CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
sparse_decode(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(16) u8 memory[];
    depend_on_previous();
    release_next();
    int listed = p.whole.requests ? p.whole.requests[0] : 0;
    if (blockIdx.z < p.num_tokens) attend_row(p, memory);
    if (listed == 0) return;
    // Peers no longer access this thread block's shared memory: they have merged, or the row had nothing to merge.
    Whole whole(p, ((Shared*)memory)->attention.query, memory + FIXED_BYTES, dynamic_shared_bytes() - FIXED_BYTES);
    whole.share(gridDim.y, p.num_tokens / p.contexts.tokens_per_request, gridDim.x * gridDim.y * gridDim.z);
}
