// Attention of one query token and KV head over pieces of the context, unless the group is skipped. How a context is cut
// follows from its length alone, whatever the number of blocks that share the pieces, and so do the bits of the sum.
// Under a rule a piece is a block of it, in the order of the visit, and pieces beyond the stop count for nothing.
#include "merge.cuh"
#include "route.cuh"
#if SK_STOP_TOKENS > 0
#include "scan.cuh"
#endif

constexpr int QUERY = SK_QUERY, KV = SK_KV, GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE;
constexpr int BLOCK_TOKENS = SK_BLOCK_TOKENS, LEAST_TOKENS = SK_LEAST_TOKENS;
constexpr int WARPS = SK_WARPS, BLOCKS_PER_SM = SK_BLOCKS_PER_SM, THREADS = WARPS * WARP;

using Chained = ChainedAttention<1, WARPS, KV, GROUP, HEAD_SIZE>;
using Attend = typename Chained::Attend;
#if SK_STOP_TOKENS > 0
constexpr int PAGE_SIZE = SK_PAGE_SIZE, TILES_PER_PAGE = PAGE_SIZE / 8, PIECE_PAGES = SK_STOP_TOKENS / PAGE_SIZE;
using RowScan = Scan<WARPS, GROUP, HEAD_SIZE>;
#endif

struct Shared {
    typename Attend::Query query;
    float largest[WARPS][GROUP];
    float total_weight[WARPS][GROUP];
    float cosines[GROUP];
#if SK_STOP_TOKENS > 0
    typename RowScan::Shared scan;
    int stop;     // what the row's mark said
    int reached;  // whether the scan of the row has come to this block's piece
#endif
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
routed_attention(const void* query, i64 query_token_stride, i64 query_head_stride,  // in elements
                 const u8* keys, const u8* values, i64 cache_block_stride, i64 cache_head_stride, int token_stride,  // bytes
                 const int* block_table, i64 table_stride, const int* seq_lens, const u8* dense_requests,
                 int tokens_per_request, int dense_tokens, const float4* thresholds, int group_score,
                 float threshold_first, float threshold_step, u64* counts, float scale, float softcap,
                 const float* query_scale, const float* key_scale, int splits,
                 float* piece_values,    // [rows, pieces at most, GROUP, HEAD_SIZE], not normalised
                 float2* piece_weights,  // [rows, pieces at most, GROUP], largest logit (base 2) and sum of weights
                 int* piece_counts       // [rows], 0 for an output of zero
#if SK_STOP_TOKENS > 0
                 // Per row the pages visited; per head the rows, pieces visited, tokens read and tokens of the contexts
                 // of all stoppable rows so far.
                 , float scale_tolerance, float direction_tolerance, int patience, int least_pages, int sink_pages,
                 int pieces_per_look, const float* sinks, const float* value_scale, int* marks, float4* scan_states, int* scan_consecutive,
                 int* visited_pages, u64* counters
#endif
) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& shared = *(Shared*)memory;
    auto* warp_values = (float(*)[GROUP * HEAD_SIZE])(memory + (sizeof(Shared) + 15) / 16 * 16);

    depend_on_previous();
    release_next();
    int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
#if SK_STOP_TOKENS > 0
    // Blocks start in the order of their numbers: with the first pieces of all rows, so that few of a row's are under
    // way when it stops.
    int head = blockIdx.x, token = blockIdx.y;
    i64 row = token * gridDim.x + head;
    RowMarks row_marks{marks + row * RowMarks::stride(splits)};
    // A hint, whose age decides how much is read in vain and nothing else. One thread's, for all must go the same way.
    int stop = thread == 0 ? load_shared(row_marks.stop()) : 0;
#else
    int head = blockIdx.y, token = blockIdx.z;
    i64 row = token * gridDim.y + head;
#endif
    int request = tokens_per_request == 1 ? token : token / tokens_per_request;
    int context = seq_lens[request] - (tokens_per_request - 1 - (token - request * tokens_per_request));
#if SK_STOP_TOKENS > 0
    int num_pages = context / PAGE_SIZE, tail = context % PAGE_SIZE, least = min(sink_pages, num_pages);
    int pieces = context > 0 ? max(1, ceil_div(num_pages, PIECE_PAGES)) : 0;
    // Neighbouring pieces to a block: strides would leave pieces that are due to blocks that start late.
    int share = ceil_div(pieces, gridDim.z), first_piece = blockIdx.z * share, step = 1;
    int end_piece = min(first_piece + share, pieces);
    bool first_thread = blockIdx.z == 0 && thread == 0;
    if (pieces == 0 && first_thread && visited_pages) visited_pages[row] = 0;
    auto first_token = [&](int slot) { return (slot < least ? slot : num_pages - 1 - (slot - least)) * PAGE_SIZE; };
#else
    int length = max(LEAST_TOKENS, ceil_div(ceil_div(context, splits), 64) * 64);
    int pieces = context > 0 ? ceil_div(context, length) : 0;
    int first_piece = blockIdx.x, step = gridDim.x, end_piece = pieces;
    bool first_thread = blockIdx.x == 0 && thread == 0;
#endif
    if (pieces == 0 && first_thread) piece_counts[row] = 0;
    if (first_piece >= pieces) return;

    const int* table = block_table + request * table_stride;
    bool whole = context <= dense_tokens || (dense_requests && dense_requests[request]), routed = thresholds && !whole;
    Routing routing{thresholds, group_score, threshold_first, threshold_step, counts};
    float threshold = routed ? routing.threshold(head, context) : 0.0f;
    const u8* anchor = keys + head * cache_head_stride + (routed ? table[0] * cache_block_stride : 0);
    i64 first_query = token * query_token_stride + (i64)head * GROUP * query_head_stride;
#pragma unroll 1
    for (int r = warp; r < Attend::Query::ROWS; r += WARPS) {
        float x[HEAD_SIZE / WARP];
        load_row<QUERY, GROUP, HEAD_SIZE>(query, first_query, query_head_stride, r, lane, x);
        shared.query.prepare(r, x, lane);
        if (routed && r < GROUP) {
            float c = cosine<KV, HEAD_SIZE>(anchor, x, lane);
            if (lane == 0) shared.cosines[r] = c;
        }
    }
#if SK_STOP_TOKENS > 0
    if (thread == 0) shared.stop = stop;
#endif
    __syncthreads();
    bool skipped = routed && routing.skips<GROUP>(shared.cosines, threshold);
#if SK_STOP_TOKENS > 0
    bool stopping = !whole && num_pages > 0;
    // The first piece is not stable, and stopping after the last is not stopping.
    bool looking = stopping && patience > 0 && patience <= pieces - 2;
    // By one thread of a row's blocks: of the first if nothing is looked at, else of the block that finds out.
    auto conclude = [&](int count) {
        int pages = min(count * PIECE_PAGES, num_pages);
        piece_counts[row] = count;
        if (visited_pages) visited_pages[row] = count ? pages : 0;
        if (!counters || !stopping || count == 0) return;
        u64* of_head = counters + 4 * head;
        atomicAdd(of_head, (u64)1);
        atomicAdd(of_head + 1, (u64)count);
        atomicAdd(of_head + 2, (u64)(pages * PAGE_SIZE + tail));
        atomicAdd(of_head + 3, (u64)context);
    };
    if (first_thread) {
        if (skipped || !looking) conclude(skipped ? 0 : pieces);
        else *row_marks.used() = ceil_div(pieces - 1, pieces_per_look);
        if (routed) routing.count(head, skipped);
    }
    if (skipped || (shared.stop && first_piece >= shared.stop)) return;
#else
    if (first_thread) {
        piece_counts[row] = skipped ? 0 : pieces;
        if (routed) routing.count(head, skipped);
    }
    if (skipped) return;
#endif

    TokenRows rows{keys + head * cache_head_stride, values + head * cache_head_stride, cache_block_stride, token_stride};
    float logit_scale = scale * (query_scale ? *query_scale : 1.0f) * (key_scale ? *key_scale : 1.0f) * (softcap > 0 ? 1.0f : LOG2E);
#pragma unroll 1
    for (int piece = first_piece; piece < end_piece; piece += step) {
#if SK_STOP_TOKENS > 0
        int first_slot = piece * PIECE_PAGES, page_tiles = min(PIECE_PAGES, num_pages - first_slot) * TILES_PER_PAGE;
        // The incomplete page is a part of the first piece, and so of every look.
        int tiles = page_tiles + (piece == 0 ? ceil_div(tail, 8) : 0);
        auto locate = [&](int i) {
            int in_tail = i - page_tiles;
            int first = in_tail >= 0 ? num_pages * PAGE_SIZE + 8 * in_tail
                                     : first_token(first_slot + i / TILES_PER_PAGE) + i % TILES_PER_PAGE * 8;
            return TokenTile{table[first / BLOCK_TOKENS], first % BLOCK_TOKENS, min(8, context - first)};
        };
#else
        int begin = piece * length, end = min(begin + length, context), tiles = ceil_div(end - begin, 8);
        auto locate = [&](int i) {
            int first = begin + 8 * i;
            return TokenTile{table[first / BLOCK_TOKENS], first % BLOCK_TOKENS, min(8, end - first)};
        };
#endif
        Attend attention;
        attention.clear();
        Chained::add_tiles(attention, shared.query, rows, warp, WARPS, tiles, logit_scale, softcap, lane, locate);
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
        i64 place = row * splits + piece;
#pragma unroll 1
        for (int i = thread; i < GROUP * HEAD_SIZE; i += THREADS) {
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
            piece_values[place * GROUP * HEAD_SIZE + i] = sum;
            if (i % HEAD_SIZE == 0) piece_weights[place * GROUP + h] = float2{base, total_weight};
        }
        __syncthreads();
#if SK_STOP_TOKENS > 0
        if (!looking || piece == pieces - 1) continue;
        i64 first = row * splits * GROUP;
        RowScan scan{piece_values + first * HEAD_SIZE, piece_weights + first, scan_states + row * GROUP * WARP,
                     scan_consecutive + row, row_marks,
                     StopRule{scale_tolerance, direction_tolerance, patience, least_pages * TILES_PER_PAGE},
                     PIECE_PAGES * TILES_PER_PAGE, pieces - 1, pieces_per_look, sinks ? sinks + head * GROUP : nullptr,
                     value_scale ? *value_scale : 1.0f};
        if (thread == 0) {
            stop = load_shared(row_marks.stop());
            shared.reached = scan.arrives(piece);
            shared.stop = stop;
        }
        __syncthreads();
        if (shared.reached) {
            // Where the sums of the warps were.
            int found = scan.run(shared.scan, (typename RowScan::Probes*)warp_values, piece, warp, lane);
            if (found && thread == 0) conclude(found);
            if (found && found < pieces) {
                if (thread == 0) store_shared(row_marks.stop(), found);
                return;
            }
        }
        if (shared.stop && piece + step >= shared.stop) return;
#endif
    }
}
