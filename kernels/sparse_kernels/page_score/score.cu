// One block scores a chunk of pages of one query token and KV head.
#include "score.cuh"
#include "weights.cuh"

constexpr int QUERY = SK_QUERY, RECORD = SK_RECORD, GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE;
constexpr int PAGES_PER_BLOCK = SK_PAGES_PER_BLOCK, CHUNK = SK_CHUNK;
constexpr int WARPS = SK_WARPS, BLOCKS_PER_SM = SK_BLOCKS_PER_SM;
// What single query heads have of each page is asked for.
constexpr bool BY_HEAD = SK_BY_HEAD;

using Score = ScoreQuery<RECORD, GROUP, HEAD_SIZE>;

struct ScoreParams {
    QueryParams query;
    StatisticsParams statistics;
    ContextParams contexts;
    const u8* skipped;  // [rows], 1 for a row that needs no scores; null for none.
    u16* scores;
    i64 scores_stride;  // From one row of scores to the next, in elements; even if BY_HEAD.
    HeadParams heads;
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
    if constexpr (BY_HEAD) {
        __shared__ float2 sums[WARPS][Score::ROWS];
        HeadLogits logits(p.heads);
        Sum of_lane[Score::TILES];
        float* out_heads = p.heads.logits ? p.heads.logits + row * p.heads.row_stride : nullptr;
        int newest = count - p.heads.recent_pages;
        auto of_head = [&](int page, int tile, const float(&scores)[2]) {
            int h = 8 * tile + lane / 4;
            float x[2] = {logits(scores[0]), logits(scores[1])};
            // A row has an even number of places, so the page behind an odd last one has one.
            if (out_heads && h < GROUP && page < last) *(float2*)(out_heads + h * p.scores_stride + page) = {x[0], x[1]};
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (page + i < p.heads.sink_pages || page + i >= min(last, newest)) x[i] = -INFINITY_F;
            of_lane[tile].add(x);
        };
        score_range<SK_PIPELINED, PAGES_PER_BLOCK>(score, statistics, at.table, first, last, warp, WARPS, lane, emit, of_head);
#pragma unroll
        for (int tile = 0; tile < Score::TILES; tile++) {
            // Four lanes have pages of the same head.
            of_lane[tile].merge<4>();
            if (lane % 4 == 0) sums[warp][8 * tile + lane / 4] = of_lane[tile].pair();
        }
        __syncthreads();
        if (threadIdx.x < GROUP) {
            Sum sum;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum.add(Sum(sums[w][threadIdx.x]));
            p.heads.sums[(row * p.heads.group + threadIdx.x) * gridDim.x + blockIdx.x] = sum.pair();
        }
    } else {
        score_range<SK_PIPELINED, PAGES_PER_BLOCK>(score, statistics, at.table, first, last, warp, WARPS, lane, emit);
    }
}
