// Routing: decides which KV groups are skipped, by the cosines of their queries with the key of token 0.
#pragma once
#include "params.cuh"

// Numbers of the group scores, as on the host; the third is the smallest cosine.
#define SCORE_MEAN 0
#define SCORE_MAX 1

// Routes groups by the thresholds of one layer.
struct Routing {
    const RoutingParams& p;

    DEVICE float threshold(int head, int context) const {
        float x = fminf(fmaxf((log2f((float)context) - p.first) * p.step, 0.0f), 1.0f);
        float4 c = p.coefficients[head];
        return fmaf(fmaf(fmaf(c.w, x, c.z), x, c.y), x, c.x);
    }

    DEVICE void count(int head, bool skipped) const {
        if (!p.counts) return;
        if (skipped) atomicAdd(p.counts + 2 * head, 1ull);
        atomicAdd(p.counts + 2 * head + 1, 1ull);
    }

    // Returns whether a group is skipped, by the cosines of its heads. Every thread gets the same answer.
    template <int GROUP>
    DEVICE bool skips(const float* cosines, float threshold) const {
        float total = 0, largest = -2, least = 2;
#pragma unroll
        for (int h = 0; h < GROUP; h++) {
            total += cosines[h];
            largest = fmaxf(largest, cosines[h]);
            least = fminf(least, cosines[h]);
        }
        // Unlike fmaxf and fminf, the sum keeps a NaN, which skips nothing.
        if (total != total) return false;
        return (p.score == SCORE_MEAN ? total / GROUP : p.score == SCORE_MAX ? largest : least) >= threshold;
    }
};

// Returns the cosine of a query head with a key. The head is spread over a warp: `x` are the lane's consecutive
// elements.
template <int KV, int HEAD_SIZE>
DEVICE float cosine(const u8* key, const float (&x)[padded(HEAD_SIZE) / WARP], int lane) {
    constexpr int PER_LANE = padded(HEAD_SIZE) / WARP;
    float dot = 0, query_square = 0, key_square = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        int d = lane * PER_LANE + i;
        float k = in_head<HEAD_SIZE>(d) ? load_float<KV>(key, d) : 0.0f;
        dot = fmaf(x[i], k, dot);
        query_square = fmaf(x[i], x[i], query_square);
        key_square = fmaf(k, k, key_square);
    }
    dot = warp_sum(dot);
    float norms = sqrtf(warp_sum(query_square)) * sqrtf(warp_sum(key_square));
    return dot / fmaxf(norms, 1e-30f);
}
