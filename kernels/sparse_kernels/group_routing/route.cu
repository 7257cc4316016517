// Which KV groups are skipped, one block to a query token and KV head: for launches that need not score those.
#include "route.cuh"

constexpr int QUERY = SK_QUERY, KV = SK_KV, GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE, WARPS = SK_WARPS;

extern "C" __global__ void __launch_bounds__(WARPS* WARP)
route_groups(const void* query, i64 query_token_stride, i64 query_head_stride,           // in elements
             const u8* keys, i64 cache_block_stride, i64 cache_head_stride,              // bytes
             const int* block_table, i64 table_stride, const int* seq_lens, const u8* dense_requests,
             int tokens_per_request, int dense_tokens, const float4* thresholds, int group_score, float threshold_first,
             float threshold_step, u64* counts, u8* skipped) {
    __shared__ float cosines[GROUP];
    depend_on_previous();
    release_next();
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int head = blockIdx.x, token = blockIdx.y, request = token / tokens_per_request;
    int context = seq_lens[request] - (tokens_per_request - 1 - token % tokens_per_request);
    bool whole = context <= dense_tokens || (dense_requests && dense_requests[request]), routed = context > 0 && !whole;
    if (routed) {
        const u8* anchor = keys + head * cache_head_stride + block_table[request * table_stride] * cache_block_stride;
        i64 first_query = token * query_token_stride + (i64)head * GROUP * query_head_stride;
#pragma unroll 1
        for (int h = warp; h < GROUP; h += WARPS) {
            float x[HEAD_SIZE / WARP];
            load_row<QUERY, GROUP, HEAD_SIZE>(query, first_query, query_head_stride, h, lane, x);
            float c = cosine<KV, HEAD_SIZE>(anchor, x, lane);
            if (lane == 0) cosines[h] = c;
        }
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    // Counted where the group is attended.
    Routing routing{thresholds, group_score, threshold_first, threshold_step, nullptr};
    skipped[token * gridDim.x + head] = routed && routing.skips<GROUP>(cosines, routing.threshold(head, context));
}
