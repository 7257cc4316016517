// One decode step of sparse attention, a cluster of blocks to each query token and KV head: route, score, select and
// attend in one launch, or route, select and attend with scores from memory. No block waits for another row's.
#include "merge.cuh"
#include "route.cuh"
#include "score.cuh"
#include "select.cuh"
#if SK_STOP_TILES > 0
#include "stop.cuh"
#endif

constexpr int QUERY = SK_QUERY, KV = SK_KV, MEAN = SK_MEAN, OUTPUT = SK_OUTPUT;
constexpr int GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE, PAGE_SIZE = SK_PAGE_SIZE;
constexpr int PAGES_PER_BLOCK = SK_PAGES_PER_BLOCK;
constexpr int CLUSTER = SK_CLUSTER, WARPS = SK_WARPS, BLOCKS_PER_SM = SK_BLOCKS_PER_SM;
constexpr bool FUSED = SK_FUSED;

constexpr int THREADS = WARPS * WARP;
constexpr int TILES_PER_PAGE = PAGE_SIZE / 8;

using Score = ScoreQuery<MEAN, GROUP, HEAD_SIZE>;
using Chained = ChainedAttention<CLUSTER, WARPS, KV, GROUP, HEAD_SIZE>;
#if SK_STOP_TILES > 0
// Tiles of pages between two looks at the output.
constexpr int STOP_TILES = SK_STOP_TILES;
using Stopping = StoppingAttention<CLUSTER, WARPS, KV, GROUP, HEAD_SIZE, STOP_TILES>;
#endif
using Peers = Cluster<CLUSTER>;

struct Shared {
    typename Chained::Shared attention;
    typename Select<WARPS>::Shared select;
    typename Score::Shared score;
#if SK_STOP_TILES > 0
    typename Stopping::Looks looks;
#endif
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
#if SK_CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
sparse_decode(const void* query, i64 query_token_stride, i64 query_head_stride,  // in elements
              const u8* keys, const u8* values, i64 cache_block_stride, i64 cache_head_stride, int token_stride,  // bytes
              const u8* mean, const u16* mean_scale, const u16* mean_std, i64 statistics_block_stride,
              i64 statistics_head_stride,              // bytes; no mean: the newest pages are selected
              const u16* scores, i64 scores_stride,    // of a row of scores, in elements; unless fused
              const int* block_table, i64 table_stride, const int* seq_lens, const u8* dense_requests,
              int tokens_per_request, int k, int sink_pages, int recent_pages, int dense_tokens,
              const float4* thresholds, int group_score, float threshold_first, float threshold_step, u64* counts,
              float std_weight, float scale, float softcap, const float* sinks, const float* query_scale,
              const float* key_scale, const float* value_scale, u16* output, i64 output_token_stride
#if SK_STOP_TILES > 0
              // Per token and head the pages visited; per head the rows, blocks visited, tokens read and tokens of the
              // contexts of all stoppable rows so far.
              , float scale_tolerance, float direction_tolerance, int patience, int least_pages, int* visited_pages,
              u64* counters
#endif
) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& shared = *(Shared*)memory;
    auto& attended = *(typename Chained::Values*)(memory + (sizeof(Shared) + 15) / 16 * 16);
    // Alone, a block has done with the keys when it attends; in a cluster its peers may not have.
    u16* row_keys = (u16*)(CLUSTER == 1 ? &attended : &attended + 1);

    depend_on_previous();
    release_next();
    int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, rank = Peers::rank();
    int head = blockIdx.y, token = blockIdx.z, row = token * gridDim.y + head;
    int request = tokens_per_request == 1 ? token : token / tokens_per_request;
    int context = seq_lens[request] - (tokens_per_request - 1 - (token - request * tokens_per_request));
    u16* out = output + token * output_token_stride + (i64)head * GROUP * HEAD_SIZE;

    constexpr int PER_WARP = ceil_div(Score::ROWS, WARPS);
    float x[PER_WARP][HEAD_SIZE / WARP];
    i64 first_query = token * query_token_stride + (i64)head * GROUP * query_head_stride;
#pragma unroll
    for (int n = 0; n < PER_WARP; n++)
        load_row<QUERY, GROUP, HEAD_SIZE>(query, first_query, query_head_stride, warp + n * WARPS, lane, x[n]);
    const int* table = block_table + request * table_stride;
    bool whole = context <= dense_tokens || (dense_requests && dense_requests[request]);
    bool skipped = false;
    if (thresholds && context > 0 && !whole) {
        // The blocks of a row decide alike, so none waits for one that has left.
        Routing routing{thresholds, group_score, threshold_first, threshold_step, counts};
        float threshold = routing.threshold(head, context);
        const u8* anchor = keys + head * cache_head_stride + table[0] * cache_block_stride;
        float* cosines = shared.attention.largest[0];
#pragma unroll
        for (int n = 0; n < PER_WARP; n++) {
            int r = warp + n * WARPS;
            if (r >= GROUP) break;
            float c = cosine<KV, HEAD_SIZE>(anchor, x[n], lane);
            if (lane == 0) cosines[r] = c;
        }
        __syncthreads();
        skipped = routing.skips<GROUP>(cosines, threshold);
        if (rank == 0 && thread == 0) routing.count(head, skipped);
    }
    if (context <= 0 || skipped) {
#pragma unroll 1
        for (int i = rank * THREADS + thread; i < GROUP * HEAD_SIZE; i += CLUSTER * THREADS) out[i] = 0;
#if SK_STOP_TILES > 0
        if (visited_pages && rank == 0 && thread == 0) visited_pages[row] = 0;
#endif
        return;
    }
    int num_pages = context / PAGE_SIZE, tail = context % PAGE_SIZE;
    bool dense = whole || num_pages <= k;
    bool selecting = !dense && (FUSED ? mean != nullptr : scores != nullptr);
    int* selected = (int*)(memory + dynamic_shared_bytes()) - k;
    int padded = ceil_div(num_pages, 8) * 8;
    int share = FUSED ? ceil_div(padded, 8 * CLUSTER) * 8 : padded;
    int first = FUSED ? min(rank * share, num_pages) : 0, last = min(first + share, num_pages);
    if (FUSED && CLUSTER == 8 && selecting) {
        // Few rows: waiting for memory is all there is to do, so all of it waits at once.
        constexpr int LINES = ceil_div(PAGES_PER_BLOCK * Score::RECORD_BYTES, 128);
        int block = first / PAGES_PER_BLOCK, lines = (ceil_div(last, PAGES_PER_BLOCK) - block) * LINES;
#pragma unroll 2
        for (int i = thread; i < lines; i += THREADS)
            prefetch(mean + head * statistics_head_stride + table[block + i / LINES] * statistics_block_stride +
                     i % LINES * 128);
    }
#pragma unroll
    for (int n = 0; n < PER_WARP; n++) {
        int r = warp + n * WARPS;
        if (r >= Score::ROWS) break;
        shared.attention.query.prepare(r, x[n], lane);
        if (FUSED) Score::prepare(shared.score, r, x[n], std_weight, lane);
    }

    if (selecting) {
        shared.select.clear(thread);
        if (thread < padded - num_pages) row_keys[num_pages + thread] = KEY_ABSENT;
        __syncthreads();
        if constexpr (FUSED) {
            Score score;
            score.load(shared.score, lane);
            i64 offset = head * statistics_head_stride;
            Statistics statistics{mean + offset, (const u16*)((const u8*)mean_scale + offset),
                                  (const u16*)((const u8*)mean_std + offset), statistics_block_stride};
            score_range<true, PAGES_PER_BLOCK>(score, statistics, table, first, last, warp, WARPS, lane,
                                               [&](int page, u16 bits) {
                bool always = page < sink_pages || page >= num_pages - recent_pages;
                row_keys[page] = (u16)(always ? KEY_ALWAYS : ordered_key(bits));
            });
        } else {
            load_keys(scores + row * scores_stride, num_pages, row_keys, thread, THREADS);
        }
        if constexpr (FUSED && CLUSTER > 1) {
            // Every block takes over its peers' keys, and selects from the whole row by itself.
            Peers::sync();
#pragma unroll 1
            for (int i = 8 * thread; i < padded; i += 8 * THREADS)
                if (i < first || i >= first + share) *(uint4*)(row_keys + i) = Peers::load((const uint4*)(row_keys + i), i / share);
        } else {
            Peers::arrive();
        }
        __syncthreads();
        if constexpr (!FUSED) {
            mark_always(row_keys, num_pages, sink_pages, recent_pages, thread, THREADS);
            __syncthreads();
        }
        Select<WARPS>{shared.select, k, warp, lane}.run(SharedKeys<WARPS>{row_keys, padded, thread}, [&](int slot, int page) {
            if (TILES_PER_PAGE > Chained::PER_BLOCK || Chained::block_of(slot * TILES_PER_PAGE) == rank) selected[slot] = page;
        });
    } else {
        Peers::arrive();
#pragma unroll 1
        for (int slot = thread; slot < k; slot += THREADS)
            selected[slot] = slot < sink_pages ? slot : SK_STOP_TILES ? num_pages - 1 - (slot - sink_pages) : num_pages - k + slot;
    }
    __syncthreads();
    if (!(FUSED && selecting)) Peers::wait();

    TokenRows rows{keys + head * cache_head_stride, values + head * cache_head_stride, cache_block_stride, token_stride};
    float logit_scale = scale * (query_scale ? *query_scale : 1.0f) * (key_scale ? *key_scale : 1.0f) * (softcap > 0 ? 1.0f : LOG2E);
    int page_tiles = (dense ? num_pages : k) * TILES_PER_PAGE;
#if SK_STOP_TILES > 0
    StopRule rule{scale_tolerance, direction_tolerance, patience, least_pages * TILES_PER_PAGE};
    int visited = Stopping::run<OUTPUT>(shared.attention, attended, shared.looks, rows, !dense, page_tiles,
                                        ceil_div(tail, 8), rule, logit_scale, softcap, sinks ? sinks + head * GROUP : nullptr,
                                        value_scale ? *value_scale : 1.0f, out, rank, warp, lane, [&](int i, int visited) {
        int in_tail = i - visited, slot = i / TILES_PER_PAGE;
        int page = in_tail >= 0 ? num_pages : dense ? slot : selected[slot];
        int tile = in_tail >= 0 ? in_tail : i % TILES_PER_PAGE;
        return TokenTile{table[page / PAGES_PER_BLOCK], page % PAGES_PER_BLOCK * PAGE_SIZE + 8 * tile,
                         in_tail >= 0 ? min(8, tail - 8 * in_tail) : 8};
    });
    if (rank == 0 && thread == 0) {
        if (visited_pages) visited_pages[row] = visited / TILES_PER_PAGE;
        if (counters && !dense) {
            u64* of_head = counters + 4 * head;
            atomicAdd(of_head, (u64)1);
            atomicAdd(of_head + 1, (u64)ceil_div(visited, STOP_TILES));
            atomicAdd(of_head + 2, (u64)(8 * visited + tail));
            atomicAdd(of_head + 3, (u64)context);
        }
    }
#else
    Chained::run<OUTPUT>(shared.attention, attended, rows, page_tiles + ceil_div(tail, 8), logit_scale, softcap,
                         sinks ? sinks + head * GROUP : nullptr, value_scale ? *value_scale : 1.0f, out,
                         rank, warp, lane, [&](int i) {
        int in_tail = i - page_tiles, slot = i / TILES_PER_PAGE;
        int page = in_tail >= 0 ? num_pages : dense ? slot : selected[slot];
        int tile = in_tail >= 0 ? in_tail : i % TILES_PER_PAGE;
        return TokenTile{table[page / PAGES_PER_BLOCK], page % PAGES_PER_BLOCK * PAGE_SIZE + 8 * tile,
                         in_tail >= 0 ? min(8, tail - 8 * in_tail) : 8};
    });
#endif
}
