// Weights of pages for the query heads of a group: the logits of their best summary keys, and sums of exponentials.
#pragma once
#include "params.cuh"

// Below all logits, but finite, so that sums may start from it.
constexpr float LOWEST = -1.0e30f;

// Results of single heads, from a launch of scores.
struct HeadParams {
    float* logits;     // [rows, heads, scores_stride] of every page, scaled by log2(e); null: not written.
    float2* sums;      // [rows, heads, thread blocks of a row]: largest logit of the pages, sum relative to it.
    i64 row_stride;    // Between two rows of `logits`, in elements; rows of `sums` have as many heads.
    int group;         // Heads of a row. The launch may have a part of them; the pointers are to its first head.
    int sink_pages;    // The sums leave out these and the newest pages.
    int recent_pages;
    float scale;       // Factor of a product; it includes log2(e) unless there is a softcap.
    float softcap;     // 0 for none.
};

// A sum of exponentials, relative to the largest. Logits are scaled by log2(e).
struct Sum {
    float largest, total;

    DEVICE Sum() : largest(LOWEST), total(0) {}
    DEVICE explicit Sum(float2 pair) : largest(pair.x), total(pair.y) {}
    DEVICE float2 pair() const { return {largest, total}; }

    template <int N>
    DEVICE void add(const float (&x)[N]) {
        float base = largest;
#pragma unroll
        for (int i = 0; i < N; i++) base = fmaxf(base, x[i]);
        total *= fast_exp2(largest - base);
#pragma unroll
        for (int i = 0; i < N; i++) total += fast_exp2(x[i] - base);
        largest = base;
    }

    DEVICE void add(const Sum& other) {
        float base = fmaxf(largest, other.largest);
        total = total * fast_exp2(largest - base) + other.total * fast_exp2(other.largest - base);
        largest = base;
    }

    // Adds up the sums of LANES neighbouring lanes, for all of them.
    template <int LANES = WARP>
    DEVICE void merge() {
        float base = largest;
#pragma unroll
        for (int offset = LANES / 2; offset; offset /= 2) base = fmaxf(base, __shfl_xor_sync(FULL, base, offset));
        total *= fast_exp2(largest - base);
#pragma unroll
        for (int offset = LANES / 2; offset; offset /= 2) total += __shfl_xor_sync(FULL, total, offset);
        largest = base;
    }
};

// Turns products into logits, scaled by log2(e).
struct HeadLogits {
    float scale, softcap;

    DEVICE explicit HeadLogits(const HeadParams& p) : scale(p.scale), softcap(p.softcap) {}

    DEVICE float operator()(float product) const {
        float x = product * scale;
        // tanh(y) = 1 - 2 / (1 + exp(2 y)), which saturates together with the exponential.
        return softcap > 0 ? softcap * LOG2E * (1.0f - 2.0f / (1.0f + fast_exp2(2.0f * LOG2E / softcap * x))) : x;
    }
};
