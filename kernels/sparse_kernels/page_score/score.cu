// Scores of a chunk of pages of one query token and KV head by one block.
#include "score.cuh"

constexpr int QUERY = SK_QUERY, MEAN = SK_MEAN, GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE;
constexpr int PAGES_PER_BLOCK = SK_PAGES_PER_BLOCK, CHUNK = SK_CHUNK;
constexpr int WARPS = SK_WARPS, BLOCKS_PER_SM = SK_BLOCKS_PER_SM;

using Score = ScoreQuery<MEAN, GROUP, HEAD_SIZE>;

extern "C" __global__ void __launch_bounds__(WARPS* WARP, BLOCKS_PER_SM)
page_score(const void* query, i64 query_token_stride, i64 query_head_stride,  // in elements
           const u8* mean, const u16* mean_scale, const u16* mean_std, i64 statistics_block_stride,
           i64 statistics_head_stride,  // bytes
           const int* block_table, i64 table_stride, const int* num_pages, int tokens_per_request, int page_size,
           float std_weight, const u8* skipped, u16* scores, i64 scores_stride) {
    __shared__ typename Score::Shared shared;
    depend_on_previous();
    release_next();
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int head = blockIdx.y, token = blockIdx.z, row = token * gridDim.y + head, request = token / tokens_per_request;
    // With a page size, lengths are those of contexts, and the tokens of a request are the last of it.
    int count = num_pages[request];
    if (page_size) count = (count - (tokens_per_request - 1 - token % tokens_per_request)) / page_size;
    int first = blockIdx.x * CHUNK, last = min(first + CHUNK, count);
    if (first >= last || (skipped && skipped[row])) return;
    i64 first_query = token * query_token_stride + (i64)head * GROUP * query_head_stride;
#pragma unroll 1
    for (int r = warp; r < Score::ROWS; r += WARPS) {
        float x[HEAD_SIZE / WARP];
        load_row<QUERY, GROUP, HEAD_SIZE>(query, first_query, query_head_stride, r, lane, x);
        Score::prepare(shared, r, x, std_weight, lane);
    }
    __syncthreads();
    Score score;
    score.load(shared, lane);
    i64 offset = head * statistics_head_stride;
    Statistics statistics{mean + offset, (const u16*)((const u8*)mean_scale + offset),
                          (const u16*)((const u8*)mean_std + offset), statistics_block_stride};
    u16* out = scores + row * scores_stride;
    score_range<SK_PIPELINED, PAGES_PER_BLOCK>(score, statistics, block_table + request * table_stride, first, last, warp,
                                               WARPS, lane, [&](int page, u16 bits) { out[page] = bits; });
}
