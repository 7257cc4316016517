// Attention of one query token and KV head over the selected pages and the incomplete last one by one block.
#include "merge.cuh"

constexpr int QUERY = SK_QUERY, KV = SK_KV, OUTPUT = SK_OUTPUT, GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE;
constexpr int PAGE_SIZE = SK_PAGE_SIZE, PAGES_PER_BLOCK = SK_PAGES_PER_BLOCK;
constexpr int CLUSTER = SK_CLUSTER, WARPS = SK_WARPS, BLOCKS_PER_SM = SK_BLOCKS_PER_SM;
constexpr int TILES_PER_PAGE = PAGE_SIZE / 8;

using Chained = ChainedAttention<CLUSTER, WARPS, KV, GROUP, HEAD_SIZE>;

extern "C" __global__ void __launch_bounds__(WARPS* WARP, BLOCKS_PER_SM)
#if SK_CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
sparse_attention(const void* query, i64 query_token_stride, i64 query_head_stride,  // in elements
                 const u8* keys, const u8* values, i64 cache_block_stride, i64 cache_head_stride, int token_stride,  // bytes
                 const int* block_table, i64 table_stride, const int* context_lens, const int* pages, int k,
                 float scale, float softcap, const float* sinks, u16* output, i64 output_token_stride) {
    extern __shared__ __align__(16) u8 memory[];
    auto& attended = *(typename Chained::Values*)memory;
    auto& shared = *(typename Chained::Shared*)(&attended + 1);
    depend_on_previous();
    release_next();
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, rank = Cluster<CLUSTER>::rank();
    int head = blockIdx.y, token = blockIdx.z, row = token * gridDim.y + head, context = context_lens[token];
    u16* out = output + token * output_token_stride + (i64)head * GROUP * HEAD_SIZE;
    if (context <= 0) {
#pragma unroll 1
        for (int i = rank * WARPS * WARP + threadIdx.x; i < GROUP * HEAD_SIZE; i += CLUSTER * WARPS * WARP) out[i] = 0;
        return;
    }
    i64 first_query = token * query_token_stride + (i64)head * GROUP * query_head_stride;
#pragma unroll 1
    for (int r = warp; r < Chained::Attend::Query::ROWS; r += WARPS) {
        float x[HEAD_SIZE / WARP];
        load_row<QUERY, GROUP, HEAD_SIZE>(query, first_query, query_head_stride, r, lane, x);
        shared.query.prepare(r, x, lane);
    }
    Cluster<CLUSTER>::arrive();
    __syncthreads();
    Cluster<CLUSTER>::wait();
    const int* table = block_table + token * table_stride;
    const int* selected = pages + row * (i64)k;
    int num_pages = context / PAGE_SIZE, tail = context % PAGE_SIZE, page_tiles = k * TILES_PER_PAGE;
    TokenRows rows{keys + head * cache_head_stride, values + head * cache_head_stride, cache_block_stride, token_stride};
    Chained::run<OUTPUT>(shared, attended, rows, page_tiles + ceil_div(tail, 8), scale * (softcap > 0 ? 1.0f : LOG2E),
                         softcap, sinks ? sinks + head * GROUP : nullptr, 1.0f, out, rank, warp, lane, [&](int i) {
        int in_tail = i - page_tiles;
        int page = in_tail >= 0 ? num_pages : selected[i / TILES_PER_PAGE];
        int tile = in_tail >= 0 ? in_tail : i % TILES_PER_PAGE;
        int valid = in_tail >= 0 ? min(8, tail - 8 * in_tail) : page < 0 ? 0 : 8;
        page = max(page, 0);
        return TokenTile{table[page / PAGES_PER_BLOCK], page % PAGES_PER_BLOCK * PAGE_SIZE + 8 * tile, valid};
    });
}
