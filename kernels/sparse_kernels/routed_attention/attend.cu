// Attention of one query token and KV head over pieces of the context, unless the group is skipped. How a context is cut
// follows from its length alone, whatever the number of blocks that share the pieces, and so do the bits of the sum.
#include "merge.cuh"
#include "route.cuh"

constexpr int QUERY = SK_QUERY, KV = SK_KV, GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE;
constexpr int BLOCK_TOKENS = SK_BLOCK_TOKENS, LEAST_TOKENS = SK_LEAST_TOKENS;
constexpr int WARPS = SK_WARPS, BLOCKS_PER_SM = SK_BLOCKS_PER_SM, THREADS = WARPS * WARP;

using Chained = ChainedAttention<1, WARPS, KV, GROUP, HEAD_SIZE>;
using Attend = typename Chained::Attend;

struct Shared {
    typename Attend::Query query;
    float largest[WARPS][GROUP];
    float total_weight[WARPS][GROUP];
    float cosines[GROUP];
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
                 int* piece_counts) {    // [rows], 0 for an output of zero
    extern __shared__ __align__(16) u8 memory[];
    Shared& shared = *(Shared*)memory;
    auto* warp_values = (float(*)[GROUP * HEAD_SIZE])(memory + (sizeof(Shared) + 15) / 16 * 16);

    depend_on_previous();
    release_next();
    int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    int head = blockIdx.y, token = blockIdx.z;
    i64 row = token * gridDim.y + head;
    int request = tokens_per_request == 1 ? token : token / tokens_per_request;
    int context = seq_lens[request] - (tokens_per_request - 1 - (token - request * tokens_per_request));
    int length = max(LEAST_TOKENS, ceil_div(ceil_div(context, splits), 64) * 64);
    int pieces = context > 0 ? ceil_div(context, length) : 0;
    bool first_thread = blockIdx.x == 0 && thread == 0;
    if (pieces == 0 && first_thread) piece_counts[row] = 0;
    if (blockIdx.x >= pieces) return;

    const int* table = block_table + request * table_stride;
    bool routed = thresholds && context > dense_tokens && !(dense_requests && dense_requests[request]);
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
    __syncthreads();
    bool skipped = routed && routing.skips<GROUP>(shared.cosines, threshold);
    if (first_thread) {
        piece_counts[row] = skipped ? 0 : pieces;
        if (routed) routing.count(head, skipped);
    }
    if (skipped) return;

    TokenRows rows{keys + head * cache_head_stride, values + head * cache_head_stride, cache_block_stride, token_stride};
    float logit_scale = scale * (query_scale ? *query_scale : 1.0f) * (key_scale ? *key_scale : 1.0f) * (softcap > 0 ? 1.0f : LOG2E);
#pragma unroll 1
    for (int piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
        int begin = piece * length, end = min(begin + length, context);
        Attend attention;
        attention.clear();
        Chained::add_tiles(attention, shared.query, rows, warp, WARPS, ceil_div(end - begin, 8), logit_scale, softcap,
                           lane, [&](int i) {
            int first = begin + 8 * i;
            return TokenTile{table[first / BLOCK_TOKENS], first % BLOCK_TOKENS, min(8, end - first)};
        });
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
    }
}
