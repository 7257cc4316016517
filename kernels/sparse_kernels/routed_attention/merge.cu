// The output of one query head from the pieces of its context, in one order whatever the launch that made them.
#include "attend.cuh"

constexpr int OUTPUT = SK_OUTPUT, GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE, SPLITS = SK_SPLITS;
// Threads that share an element of the output.
constexpr int PARTS = SK_PARTS;

extern "C" __global__ void __launch_bounds__(PARTS* HEAD_SIZE)
merge_pieces(const float* piece_values, const float2* piece_weights, const int* piece_counts, int splits,
             const float* value_scale, u16* output, i64 output_token_stride) {
    __shared__ float weights[SPLITS];
    __shared__ float sums[PARTS][HEAD_SIZE];
    depend_on_previous();
    release_next();
    int h = blockIdx.x, head = blockIdx.y, token = blockIdx.z;
    i64 row = token * gridDim.y + head, first = row * splits;
    int part = threadIdx.x / HEAD_SIZE, d = threadIdx.x % HEAD_SIZE, pieces = piece_counts[row];
    u16* out = output + token * output_token_stride + ((i64)head * GROUP + h) * HEAD_SIZE;
    if (pieces == 0) {
        if (part == 0) out[d] = 0;
        return;
    }
    if (threadIdx.x < WARP) {
        constexpr int PER_LANE = ceil_div(SPLITS, WARP);
        float2 own[PER_LANE];
        float base = -INFINITY_F, sum = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            int piece = threadIdx.x + i * WARP;
            own[i] = piece < pieces ? piece_weights[(first + piece) * GROUP + h] : float2{-INFINITY_F, 0};
            base = fmaxf(base, own[i].x);
        }
        base = warp_max(base);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            own[i].x = base == -INFINITY_F ? 0.0f : fast_exp2(own[i].x - base);
            sum = fmaf(own[i].x, own[i].y, sum);
        }
        sum = warp_sum(sum);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            int piece = threadIdx.x + i * WARP;
            if (piece < pieces) weights[piece] = own[i].x / sum * (value_scale ? *value_scale : 1.0f);
        }
    }
    __syncthreads();
    float sum = 0;
#pragma unroll 8
    for (int piece = part; piece < pieces; piece += PARTS)
        sum = fmaf(weights[piece], piece_values[((first + piece) * GROUP + h) * HEAD_SIZE + d], sum);
    sums[part][d] = sum;
    __syncthreads();
    if (part > 0) return;
#pragma unroll
    for (int other = 1; other < PARTS; other++) sum += sums[other][d];
    out[d] = (u16)pack_pair<OUTPUT>(sum, 0);
}
