// One block scores a chunk of pages of one query token and KV head.
#include "score.cuh"

constexpr int QUERY = SK_QUERY, RECORD = SK_RECORD, GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE;
constexpr int PAGES_PER_BLOCK = SK_PAGES_PER_BLOCK, CHUNK = SK_CHUNK;
constexpr int WARPS = SK_WARPS, BLOCKS_PER_SM = SK_BLOCKS_PER_SM;

using Score = ScoreQuery<RECORD, GROUP, HEAD_SIZE>;

struct ScoreParams {
    QueryParams query;
    StatisticsParams statistics;
    ContextParams contexts;
    const u8* skipped;  // [rows], 1 for a row that needs no scores; null for none.
    u16* scores;
    i64 scores_stride;  // From one row of scores to the next, in elements.
    int page_size;      // 0: the lengths of contexts are complete pages, not tokens.
};

extern "C" __global__ void __launch_bounds__(WARPS* WARP, BLOCKS_PER_SM)
page_score(const __grid_constant__ ScoreParams p) {
    __shared__ typename Score::Shared shared;
    depend_on_previous();
    release_next();
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int head = blockIdx.y, token = blockIdx.z, row = token * gridDim.y + head;
    QueryToken at(p.contexts, token);
    int count = p.page_size ? at.context / p.page_size : at.context;
    int first = blockIdx.x * CHUNK, last = min(first + CHUNK, count);
    if (first >= last || (p.skipped && p.skipped[row])) return;
    Score::prepare_all<QUERY, WARPS>(shared, p.query, token, head, p.statistics.std_weight, warp, lane);
    __syncthreads();
    Score score;
    score.load(shared, lane);
    Statistics statistics(p.statistics, head);
    u16* out = p.scores + row * p.scores_stride;
    auto emit = [&](int page, u16 bits) { out[page] = bits; };
    score_range<SK_PIPELINED, PAGES_PER_BLOCK>(score, statistics, at.table, first, last, warp, WARPS, lane, emit);
}
