// Thread blocks compute the attention of one query token and KV head over pieces of the context, unless the group is
// skipped. The length of a context alone decides its cut, at any number of thread blocks. The bits of the sum therefore
// do not depend on the launch. Under a stop rule a piece is a test interval, in reading order, and pieces beyond the
// stop are discarded. A selection is cut like a context of its pages.
#include "merge.cuh"
#include "pieces.cuh"
#include "route.cuh"
#include "scan.cuh"

constexpr int QUERY = SK_QUERY, KV = SK_KV, GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE, PAGE_SIZE = SK_PAGE_SIZE;
constexpr int BLOCK_TOKENS = SK_BLOCK_TOKENS, LEAST_TOKENS = SK_LEAST_TOKENS;
constexpr int WARPS = SK_WARPS, BLOCKS_PER_SM = SK_BLOCKS_PER_SM, THREADS = WARPS * WARP;
// Tokens of a piece under a stop rule; 0 without a stop rule.
constexpr int STOP_TOKENS = SK_STOP_TOKENS;
// The pages of long contexts are selected; then there is no stop rule.
constexpr bool SELECTED = SK_SELECTED;
constexpr int TILES_PER_PAGE = PAGE_SIZE / 8;

using Chained = ChainedAttention<1, WARPS, KV, GROUP, HEAD_SIZE>;
using Attend = typename Chained::Attend;
using WarpValues = float[GROUP * HEAD_SIZE];

struct SplitParams {
    QueryParams query;
    CacheParams cache;
    ContextParams contexts;
    RoutingParams routing;
    SoftmaxParams softmax;
    StopParams stop;
    OutputParams output;
    PieceParams pieces;
    ScanParams scan;
    const u8* skipped;  // [rows], 1 for a group that is skipped; null where `routing` decides.
    const int* pages;   // [rows, selection.k] of contexts above their budget; null: the sink pages and the
                        // newest.
    SelectionParams selection;
};

// The place of a thread block: it shares the pieces of one row with `shares - 1` others. Under a stop rule, thread
// blocks start with the first pieces of all rows, so that few pieces of a row are in work when it stops.
struct Place {
    int head, token, share, shares;
    i64 row;

    DEVICE Place() {
        head = STOP_TOKENS ? blockIdx.x : blockIdx.y, token = STOP_TOKENS ? blockIdx.y : blockIdx.z;
        share = STOP_TOKENS ? blockIdx.z : blockIdx.x, shares = STOP_TOKENS ? gridDim.z : gridDim.x;
        row = (i64)token * (STOP_TOKENS ? gridDim.x : gridDim.y) + head;
    }
};

// A context that is cut into the test intervals of a stop rule: sink pages, then the other pages, newest first. The
// incomplete page belongs to the first piece, and so to every test.
template <int TOKENS>
struct Cut {
    static constexpr int PIECE_PAGES = TOKENS / PAGE_SIZE;
    // A thread block gets neighbouring pieces. With strides, the next pieces to test would wait for thread blocks that
    // start late.
    static constexpr int step = 1;
    int context, num_pages, tail, least, pieces, first_piece, end_piece;

    DEVICE Cut(const SplitParams& p, const QueryToken& at, const Place& place) : context(at.context) {
        num_pages = context / PAGE_SIZE, tail = context % PAGE_SIZE, least = min(p.scan.sink_pages, num_pages);
        pieces = context > 0 ? max(1, ceil_div(num_pages, PIECE_PAGES)) : 0;
        int share = ceil_div(pieces, place.shares);
        first_piece = place.share * share, end_piece = min(first_piece + share, pieces);
    }

    DEVICE int page_tiles(int piece) const { return min(PIECE_PAGES, num_pages - piece * PIECE_PAGES) * TILES_PER_PAGE; }
    DEVICE int tiles(int piece) const { return page_tiles(piece) + (piece == 0 ? ceil_div(tail, 8) : 0); }

    DEVICE TokenTile tile(int piece, int i, const int* table) const {
        int in_tail = i - page_tiles(piece), slot = piece * PIECE_PAGES + i / TILES_PER_PAGE;
        int page = slot < least ? slot : num_pages - 1 - (slot - least);
        int first = in_tail >= 0 ? num_pages * PAGE_SIZE + 8 * in_tail : page * PAGE_SIZE + i % TILES_PER_PAGE * 8;
        return TokenTile{table[first / BLOCK_TOKENS], first % BLOCK_TOKENS, min(8, context - first)};
    }
};

// A context that is cut into at most `pieces.most` equal pieces, in text order.
template <>
struct Cut<0> {
    int context, length, pieces, first_piece, end_piece, step;

    DEVICE Cut(const SplitParams& p, const QueryToken& at, const Place& place) : Cut(p, at.context, place) {}
    DEVICE Cut(const SplitParams& p, int context, const Place& place) : context(context) {
        length = max(LEAST_TOKENS, ceil_div(ceil_div(context, p.pieces.most), 64) * 64);
        pieces = context > 0 ? ceil_div(context, length) : 0;
        first_piece = place.share, end_piece = pieces, step = place.shares;
    }

    DEVICE int end(int piece) const { return min((piece + 1) * length, context); }
    DEVICE int tiles(int piece) const { return ceil_div(end(piece) - piece * length, 8); }

    DEVICE TokenTile tile(int piece, int i, const int* table) const {
        int first = piece * length + 8 * i;
        return TokenTile{table[first / BLOCK_TOKENS], first % BLOCK_TOKENS, min(8, end(piece) - first)};
    }
};

// A selection that is cut like a context: its pages in order, then the incomplete page.
struct SelectedCut : Cut<0> {
    const int* pages;
    int k, sink_pages, num_pages;
    bool selected;

    DEVICE SelectedCut(const SplitParams& p, const QueryToken& at, const Place& place)
        : SelectedCut(p, at, place, p.selection.pages_of(at.request, place.row)) {}
    DEVICE SelectedCut(const SplitParams& p, const QueryToken& at, const Place& place, int k)
        : SelectedCut(p, at, place, k, !at.whole && at.context / PAGE_SIZE > k) {}
    DEVICE SelectedCut(const SplitParams& p, const QueryToken& at, const Place& place, int k, bool selected)
        : Cut<0>(p, selected ? k * PAGE_SIZE + at.context % PAGE_SIZE : at.context, place),
          pages(p.pages ? p.pages + place.row * p.selection.k : nullptr), k(k),
          sink_pages(p.selection.sink_pages), num_pages(at.context / PAGE_SIZE), selected(selected) {}

    DEVICE int page(int slot) const {
        if (!selected) return slot;
        if (slot == k) return num_pages;
        return pages ? pages[slot] : slot < sink_pages ? slot : num_pages - k + slot;
    }

    DEVICE TokenTile tile(int piece, int i, const int* table) const {
        int first = piece * length + 8 * i, token = page(first / PAGE_SIZE) * PAGE_SIZE + first % PAGE_SIZE;
        return TokenTile{table[token / BLOCK_TOKENS], token % BLOCK_TOKENS, min(8, end(piece) - first)};
    }
};

template <bool>
struct Cutting {
    using type = Cut<STOP_TOKENS>;
};
template <>
struct Cutting<true> {
    using type = SelectedCut;
};
using RowCut = typename Cutting<SELECTED>::type;

struct PieceMemory {
    typename Attend::Query query;
    float largest[WARPS][GROUP];
    float total_weight[WARPS][GROUP];
    float cosines[GROUP];
};

// A row ends when its outputs are stable.
template <int TOKENS>
struct Ending {
    using RowScan = Scan<WARPS, GROUP, HEAD_SIZE>;
    // The warps' sums and the probes of a scan use the same memory at different times.
    static constexpr int VALUES_BYTES = sizeof(WarpValues) * WARPS;
    static constexpr int PROBES_BYTES = sizeof(typename RowScan::Probes) * (WARPS < GROUP ? WARPS : GROUP);
    static constexpr int SCRATCH_BYTES = VALUES_BYTES > PROBES_BYTES ? VALUES_BYTES : PROBES_BYTES;
    struct Shared : PieceMemory {
        typename RowScan::Shared scan;
        int stop;     // The row's stop, as last read.
        int reached;  // Whether the scan of the row has reached this thread block's piece.
    };

    const SplitParams& p;
    const Cut<TOKENS>& cut;
    const Place& place;
    RowMarks marks;
    // A hint: its age only changes how many pieces are read and discarded. One thread reads it, because all threads
    // must decide alike.
    int stop;
    bool may_stop, testing;

    DEVICE Ending(const SplitParams& params, const Place& where, const Cut<TOKENS>& of)
        : p(params), cut(of), place(where), marks{params.scan.marks + where.row * RowMarks::stride(params.pieces.most)} {
        stop = threadIdx.x == 0 ? load_shared(marks.stop()) : 0;
    }

    DEVICE void tell(Shared& shared) const { if (threadIdx.x == 0) shared.stop = stop; }

    // Writes how much of the row counts. One thread calls it: of the first thread block if nothing is tested, otherwise
    // of the thread block that finds the end.
    DEVICE void conclude(int count) const {
        int pages = min(count * Cut<TOKENS>::PIECE_PAGES, cut.num_pages);
        p.pieces.counts[place.row] = count;
        if (p.output.pages_read) p.output.pages_read[place.row] = count ? pages : 0;
        if (!p.output.counters || !may_stop || count == 0) return;
        u64* of_head = p.output.counters + 4 * place.head;
        atomicAdd(of_head, (u64)1);
        atomicAdd(of_head + 1, (u64)count);
        atomicAdd(of_head + 2, (u64)(pages * PAGE_SIZE + cut.tail));
        atomicAdd(of_head + 3, (u64)cut.context);
    }

    // Returns whether the thread block has nothing to attend to, because its row has stopped.
    DEVICE bool begin(const Shared& shared, bool whole, bool skipped, bool first_thread) {
        may_stop = !whole && cut.num_pages > 0;
        // The first piece is never stable, and a stop after the last piece has no effect.
        testing = may_stop && p.stop.patience > 0 && p.stop.patience <= cut.pieces - 2;
        if (first_thread) {
            if (skipped || !testing) conclude(skipped ? 0 : cut.pieces);
            else *marks.used() = ceil_div(cut.pieces - 1, p.scan.pieces_per_test);
        }
        return shared.stop && cut.first_piece >= shared.stop;
    }

    // Called after a piece is written. Returns whether the row has stopped; the thread block then skips its other
    // pieces.
    DEVICE bool after(Shared& shared, u8* scratch, int piece) {
        if (!testing || piece == cut.pieces - 1) return false;
        int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
        i64 first = place.row * p.pieces.most * GROUP;
        RowScan scan{p.pieces.values + first * HEAD_SIZE, p.pieces.weights + first,
                     p.scan.states + place.row * GROUP * WARP, p.scan.consecutive + place.row, marks,
                     StopRule(p.stop, TILES_PER_PAGE), Cut<TOKENS>::PIECE_PAGES * TILES_PER_PAGE, cut.pieces - 1,
                     p.scan.pieces_per_test, SinkLogits(p.softmax, place.head, GROUP), value_scale(p.cache)};
        if (thread == 0) {
            stop = load_shared(marks.stop());
            shared.reached = scan.arrives(piece);
            shared.stop = stop;
        }
        __syncthreads();
        if (shared.reached) {
            int count = scan.run(shared.scan, (typename RowScan::Probes*)scratch, piece, warp, lane);
            if (count && thread == 0) conclude(count);
            if (count && count < cut.pieces) {
                if (thread == 0) store_shared(marks.stop(), count);
                return true;
            }
        }
        return shared.stop && piece + cut.step >= shared.stop;
    }
};

// Without a stop rule every piece counts.
template <>
struct Ending<0> {
    static constexpr int SCRATCH_BYTES = sizeof(WarpValues) * WARPS;
    struct Shared : PieceMemory {};

    const SplitParams& p;
    const Cut<0>& cut;
    const Place& place;

    DEVICE Ending(const SplitParams& params, const Place& where, const Cut<0>& of) : p(params), cut(of), place(where) {}
    DEVICE void tell(Shared&) const {}
    DEVICE void conclude(int count) const { p.pieces.counts[place.row] = count; }
    DEVICE bool begin(const Shared&, bool, bool skipped, bool first_thread) {
        if (first_thread) conclude(skipped ? 0 : cut.pieces);
        return false;
    }
    DEVICE bool after(Shared&, u8*, int) { return false; }
};

using RowEnding = Ending<STOP_TOKENS>;
using Shared = typename RowEnding::Shared;
constexpr int FIXED_BYTES = (sizeof(Shared) + 15) / 16 * 16;
static_assert(FIXED_BYTES + RowEnding::SCRATCH_BYTES == SK_SHARED_BYTES, "the host counts the shared memory otherwise");

// Adds up the warps' sums of a piece, and stores the result for the merging launch.
DEVICE void store_piece(const PieceParams& pieces, const Shared& shared, const WarpValues* warp_values, i64 place) {
#pragma unroll 1
    for (int i = threadIdx.x; i < GROUP * HEAD_SIZE; i += THREADS) {
        int h = i / HEAD_SIZE;
        float base = -INFINITY_F, sum = 0, total_weight = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) base = fmaxf(base, shared.largest[w][h]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float weight = base == -INFINITY_F ? 0.0f : fast_exp2(shared.largest[w][h] - base);
            sum = fmaf(weight, warp_values[w][i], sum);
            total_weight = fmaf(weight, shared.total_weight[w][h], total_weight);
        }
        pieces.values[place * GROUP * HEAD_SIZE + i] = sum;
        if (i % HEAD_SIZE == 0) pieces.weights[place * GROUP + h] = float2{base, total_weight};
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
split_attention(const __grid_constant__ SplitParams p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& shared = *(Shared*)memory;
    auto* warp_values = (WarpValues*)(memory + FIXED_BYTES);

    depend_on_previous();
    release_next();
    int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    Place place;
    QueryToken at(p.contexts, place.token);
    RowCut cut(p, at, place);
    bool first_thread = place.share == 0 && thread == 0;
    RowEnding ending(p, place, cut);
    if (cut.pieces == 0 && first_thread) {
        p.pieces.counts[place.row] = 0;
        if (STOP_TOKENS && p.output.pages_read) p.output.pages_read[place.row] = 0;
    }
    if (cut.first_piece >= cut.pieces) return;

    TokenRows rows(p.cache, place.head);
    bool routed = p.routing.coefficients && !at.whole;
    Routing routing{p.routing};
    float threshold = routed ? routing.threshold(place.head, at.context) : 0.0f;
    const u8* anchor = routed ? rows.first_key(at.table) : rows.keys;
    i64 first_query = first_query_element(p.query, place.token, place.head, GROUP);
#pragma unroll 1
    for (int r = warp; r < Attend::Query::ROWS; r += WARPS) {
        float x[padded(HEAD_SIZE) / WARP];
        load_row<QUERY, GROUP, HEAD_SIZE>(p.query.heads, first_query, p.query.head_stride, r, lane, x);
        shared.query.prepare(r, x, lane);
        if (routed && r < GROUP) {
            float c = cosine<KV, HEAD_SIZE>(anchor, x, lane);
            if (lane == 0) shared.cosines[r] = c;
        }
    }
    ending.tell(shared);
    __syncthreads();
    bool skipped = p.skipped ? p.skipped[place.row] != 0 : routed && routing.skips<GROUP>(shared.cosines, threshold);
    bool over = ending.begin(shared, at.whole, skipped, first_thread);
    if (first_thread && routed) routing.count(place.head, skipped);
    if (skipped || over) return;

    float scale = logit_scale(p.softmax, p.query, p.cache);
#pragma unroll 1
    for (int piece = cut.first_piece; piece < cut.end_piece; piece += cut.step) {
        Attend attention;
        attention.clear();
        Chained::add_tiles(attention, shared.query, rows, warp, WARPS, cut.tiles(piece), scale, p.softmax.softcap, lane,
                           [&](int i) { return cut.tile(piece, i, at.table); });
#pragma unroll
        for (int tile = 0; tile < Attend::TILES; tile++) {
            int h = 8 * tile + lane / 4;
            float total_weight = attention.total_weight(tile);
            if (lane % 4 == 0 && h < GROUP) {
                shared.largest[warp][h] = attention.largest[tile];
                shared.total_weight[warp][h] = total_weight;
            }
        }
        attention.for_each_four(lane, [&](int h, int d, float4 four) {
            *(float4*)&warp_values[warp][h * HEAD_SIZE + d] = four;
        });
        __syncthreads();
        store_piece(p.pieces, shared, warp_values, place.row * p.pieces.most + piece);
        __syncthreads();
        if (ending.after(shared, memory + FIXED_BYTES, piece)) return;
    }
}
