// One block scores a chunk of pages of one query token and KV head.
#include "score.cuh"

constexpr int QUERY = SK_QUERY, RECORD = SK_RECORD, GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE;
constexpr int PAGES_PER_BLOCK = SK_PAGES_PER_BLOCK, CHUNK = SK_CHUNK;
constexpr int WARPS = SK_WARPS, BLOCKS_PER_SM = SK_BLOCKS_PER_SM;
constexpr bool BY_HEAD = SK_BY_HEAD;

using Score = ScoreQuery<RECORD, GROUP, HEAD_SIZE>;

struct ScoreParams {
    QueryParams query;
    StatisticsParams statistics;
    ContextParams contexts;
    const u8* skipped;  // [rows], 1 for a row that needs no scores; null for none.
    u16* scores;
    float* by_head;     // [rows, heads of a group, scores_stride]: what single heads have, if BY_HEAD.
    i64 scores_stride;  // From one row of scores to the next, in elements; even if BY_HEAD.
    i64 heads_stride;   // From one row of `by_head` to the next, in elements.
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
    i64 first_query = first_query_element(p.query, token, head, GROUP);
#pragma unroll 1
    for (int r = warp; r < Score::ROWS; r += WARPS) {
        float x[padded(HEAD_SIZE) / WARP];
        load_row<QUERY, GROUP, HEAD_SIZE>(p.query.heads, first_query, p.query.head_stride, r, lane, x);
        Score::prepare(shared, r, x, p.statistics.std_weight, lane);
    }
    __syncthreads();
    Score score;
    score.load(shared, lane);
    Statistics statistics(p.statistics, head);
    u16* out = p.scores + row * p.scores_stride;
    auto emit = [&](int page, u16 bits) { out[page] = bits; };
    if constexpr (BY_HEAD) {
        float* heads = p.by_head + row * p.heads_stride;
        // A row has an even number of places, so the page behind an odd last one has one.
        auto of_head = [&](int page, int h, const float(&scores)[2]) {
            if (h < GROUP && page < last) *(float2*)(heads + h * p.scores_stride + page) = {scores[0], scores[1]};
        };
        score_range<SK_PIPELINED, PAGES_PER_BLOCK>(score, statistics, at.table, first, last, warp, WARPS, lane, emit, of_head);
    } else {
        score_range<SK_PIPELINED, PAGES_PER_BLOCK>(score, statistics, at.table, first, last, warp, WARPS, lane, emit);
    }
}
