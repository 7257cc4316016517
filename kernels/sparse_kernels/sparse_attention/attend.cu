// The thread blocks of a cluster compute the attention of one query token and KV head over the selected pages and the
// incomplete last page.
#include "merge.cuh"

constexpr int QUERY = SK_QUERY, KV = SK_KV, OUTPUT = SK_OUTPUT, GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE;
constexpr int PAGE_SIZE = SK_PAGE_SIZE, PAGES_PER_BLOCK = SK_PAGES_PER_BLOCK;
constexpr int CLUSTER = SK_CLUSTER, WARPS = SK_WARPS, BLOCKS_PER_SM = SK_BLOCKS_PER_SM;
constexpr int TILES_PER_PAGE = PAGE_SIZE / 8;

using Chained = ChainedAttention<CLUSTER, WARPS, KV, GROUP, HEAD_SIZE>;

struct AttendParams {
    QueryParams query;
    CacheParams cache;
    ContextParams contexts;
    const int* pages;  // [rows, k], -1 for none.
    int k;
    SoftmaxParams softmax;
    OutputParams output;
};

static_assert(sizeof(typename Chained::Values) + sizeof(typename Chained::Shared) == SK_SHARED_BYTES,
              "the host counts the shared memory of a block otherwise");

extern "C" __global__ void __launch_bounds__(WARPS* WARP, BLOCKS_PER_SM)
#if SK_CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
sparse_attention(const __grid_constant__ AttendParams p) {
    extern __shared__ __align__(16) u8 memory[];
    auto& attended = *(typename Chained::Values*)memory;
    auto& shared = *(typename Chained::Shared*)(&attended + 1);
    depend_on_previous();
    release_next();
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, rank = Cluster<CLUSTER>::rank();
    int head = blockIdx.y, token = blockIdx.z, row = token * gridDim.y + head;
    QueryToken at(p.contexts, token);
    u16* out = p.output.heads + token * p.output.token_stride + (i64)head * GROUP * HEAD_SIZE;
    if (at.context <= 0) {
#pragma unroll 1
        for (int i = rank * WARPS * WARP + threadIdx.x; i < GROUP * HEAD_SIZE; i += CLUSTER * WARPS * WARP) out[i] = 0;
        return;
    }
    shared.query.template prepare_all<QUERY, WARPS>(p.query, token, head, warp, lane);
    Cluster<CLUSTER>::arrive();
    __syncthreads();
    Cluster<CLUSTER>::wait();
    const int* selected = p.pages + row * (i64)p.k;
    int num_pages = at.context / PAGE_SIZE, tail = at.context % PAGE_SIZE, page_tiles = p.k * TILES_PER_PAGE;
    Chained::run<OUTPUT>(shared, attended, TokenRows(p.cache, head), page_tiles + ceil_div(tail, 8),
                         logit_scale(p.softmax, p.query, p.cache), p.softmax.softcap, SinkLogits(p.softmax, head, GROUP),
                         value_scale(p.cache), out, rank, warp, lane, [&](int i) {
        int in_tail = i - page_tiles;
        int page = in_tail >= 0 ? num_pages : selected[i / TILES_PER_PAGE];
        int tile = in_tail >= 0 ? in_tail : i % TILES_PER_PAGE;
        int valid = in_tail >= 0 ? min(8, tail - 8 * in_tail) : page < 0 ? 0 : 8;
        page = max(page, 0);
        return TokenTile{at.table[page / PAGES_PER_BLOCK], page % PAGES_PER_BLOCK * PAGE_SIZE + 8 * tile, valid};
    });
}
