// Decides which KV groups are skipped, so that a launch of scores can omit them. One thread block decides for one query
// token and KV head. It counts its decisions unless the attention kernel decides again and counts.
#include "route.cuh"

constexpr int QUERY = SK_QUERY, KV = SK_KV, GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE, WARPS = SK_WARPS;
constexpr bool COUNTS = SK_COUNTS;

struct RouteParams {
    QueryParams query;
    CacheParams cache;
    ContextParams contexts;
    RoutingParams routing;
    u8* skipped;  // [rows], 1 for a skipped group.
};

extern "C" __global__ void __launch_bounds__(WARPS* WARP) route_groups(const __grid_constant__ RouteParams p) {
    __shared__ float cosines[GROUP];
    depend_on_previous();
    release_next();
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, head = blockIdx.x, token = blockIdx.y;
    QueryToken at(p.contexts, token);
    bool routed = at.context > 0 && !at.whole;
    if (routed) {
        const u8* anchor = TokenRows(p.cache, head).first_key(at.table);
        i64 first_query = first_query_element(p.query, token, head, GROUP);
#pragma unroll 1
        for (int h = warp; h < GROUP; h += WARPS) {
            float x[padded(HEAD_SIZE) / WARP];
            load_row<QUERY, GROUP, HEAD_SIZE>(p.query.heads, first_query, p.query.head_stride, h, lane, x);
            float c = cosine<KV, HEAD_SIZE>(anchor, x, lane);
            if (lane == 0) cosines[h] = c;
        }
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    Routing routing{p.routing};
    bool skipped = routed && routing.skips<GROUP>(cosines, routing.threshold(head, at.context));
    p.skipped[token * gridDim.x + head] = skipped;
    if (COUNTS && routed) routing.count(head, skipped);
}
