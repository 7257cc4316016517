// A thread block adds up the output of one query head from the pieces of its context, in a fixed order.
#include "attend.cuh"
#include "pieces.cuh"

constexpr int OUTPUT = SK_OUTPUT, GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE;
// The most pieces of a row. 0 is no limit, under a stop rule: weights are then computed when needed, and the marks of
// the pieces are cleared.
constexpr int SPLITS = SK_SPLITS;
// Threads that share an element of the output.
constexpr int PARTS = SK_PARTS;

struct MergeParams {
    PieceParams pieces;
    ScanParams scan;
    SoftmaxParams softmax;
    CacheParams cache;
    OutputParams output;
};

extern "C" __global__ void __launch_bounds__(PARTS* HEAD_SIZE) merge_pieces(const __grid_constant__ MergeParams p) {
    __shared__ float weights[SPLITS ? SPLITS : 2];
    __shared__ float sums[PARTS][HEAD_SIZE];
    depend_on_previous();
    release_next();
    int h = blockIdx.x, head = blockIdx.y, token = blockIdx.z;
    i64 row = token * gridDim.y + head, first = row * p.pieces.most;
    int part = threadIdx.x / HEAD_SIZE, d = threadIdx.x % HEAD_SIZE, pieces = p.pieces.counts[row];
    u16* out = p.output.heads + token * p.output.token_stride + ((i64)head * GROUP + h) * HEAD_SIZE;
    if (pieces == 0) {
        if (part == 0) out[d] = 0;
        return;
    }
#if SK_SPLITS == 0
    // The row's next launch waits for the end of this one. One thread block clears the marks. Their count stays until
    // all its threads have read it.
    RowMarks row_marks{p.scan.marks + row * RowMarks::stride(p.pieces.most)};
    int used = h == 0 ? *row_marks.used() : 0;
    for (int i = threadIdx.x; i < used; i += PARTS * HEAD_SIZE) *row_marks.mark(i) = 0;
    const float2* of_head = p.pieces.weights + first * GROUP + h;
    if (threadIdx.x < WARP) {
        SinkLogits sink_logits(p.softmax, head, GROUP);
        float sink = sink_logits && threadIdx.x == 0 ? sink_logits[h] * LOG2E : -INFINITY_F;
        float largest = sink, sum = sink == -INFINITY_F ? 0.0f : 1.0f;
#pragma unroll 4
        for (int piece = threadIdx.x; piece < pieces; piece += WARP) {
            float2 piece_weight = of_head[piece * GROUP];
            float base = fmaxf(largest, piece_weight.x);
            if (base == -INFINITY_F) continue;
            sum = fmaf(fast_exp2(piece_weight.x - base), piece_weight.y, fast_exp2(largest - base) * sum);
            largest = base;
        }
        float base = warp_max(largest);
        sum = warp_sum(base == -INFINITY_F ? 0.0f : fast_exp2(largest - base) * sum);
        if (threadIdx.x == 0) weights[0] = base, weights[1] = value_scale(p.cache) / sum;
    }
    __syncthreads();
    if (h == 0 && threadIdx.x == 0) *row_marks.stop() = *row_marks.used() = 0;
    float base = weights[0], share = weights[1];
    auto weight_of = [&](int piece) {
        return (base == -INFINITY_F ? 0.0f : fast_exp2(of_head[piece * GROUP].x - base)) * share;
    };
#else
    if (threadIdx.x < WARP) {
        constexpr int PER_LANE = ceil_div(SPLITS, WARP);
        float2 lane_weights[PER_LANE];
        float base = -INFINITY_F, sum = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            int piece = threadIdx.x + i * WARP;
            lane_weights[i] = piece < pieces ? p.pieces.weights[(first + piece) * GROUP + h] : float2{-INFINITY_F, 0};
            base = fmaxf(base, lane_weights[i].x);
        }
        SinkLogits sink_logits(p.softmax, head, GROUP);
        float sink = sink_logits ? sink_logits[h] * LOG2E : -INFINITY_F;
        base = fmaxf(warp_max(base), sink);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            lane_weights[i].x = base == -INFINITY_F ? 0.0f : fast_exp2(lane_weights[i].x - base);
            sum = fmaf(lane_weights[i].x, lane_weights[i].y, sum);
        }
        sum = warp_sum(sum);
        if (base != -INFINITY_F) sum += fast_exp2(sink - base);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            int piece = threadIdx.x + i * WARP;
            if (piece < pieces) weights[piece] = lane_weights[i].x / sum * value_scale(p.cache);
        }
    }
    __syncthreads();
    auto weight_of = [&](int piece) { return weights[piece]; };
#endif
    float sum = 0;
#pragma unroll 8
    for (int piece = part; piece < pieces; piece += PARTS)
        sum = fmaf(weight_of(piece), p.pieces.values[((first + piece) * GROUP + h) * HEAD_SIZE + d], sum);
    sums[part][d] = sum;
    __syncthreads();
    if (part > 0) return;
#pragma unroll
    for (int i = 1; i < PARTS; i++) sum += sums[i][d];
    out[d] = (u16)pack_pair<OUTPUT>(sum, 0);
}
