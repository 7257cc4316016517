// What pages weigh for the query heads of a group: the logits of their best summary keys, and sums of exponentials.
#pragma once
#include "params.cuh"

// It is below all logits, and finite: sums may start from it.
constexpr float LOWEST = -1.0e30f;

// What a launch of scores leaves of single heads.
struct HeadParams {
    float* logits;     // [rows, heads, scores_stride] of every page, scaled by log2(e); null if nobody asks.
    float2* sums;      // [rows, heads, blocks of a row]: the largest logit of a block's pages, and the sum relative to it.
    i64 row_stride;    // From one row of `logits` to the next, in elements; rows of `sums` have as many heads.
    int group;         // Heads of a row, of which the launch may have a part: the pointers are to its first one.
    int sink_pages;    // These and the newest are not in the sums.
    int recent_pages;
    float scale;       // Of a product; it includes log2(e) unless there is a softcap.
    float softcap;     // 0 for none.
};

// A sum of exponentials, relative to the largest. Logits have been scaled by log2(e).
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

// Makes logits, scaled by log2(e), of products.
struct HeadLogits {
    float scale, softcap;

    DEVICE explicit HeadLogits(const HeadParams& p) : scale(p.scale), softcap(p.softcap) {}

    DEVICE float operator()(float product) const {
        float x = product * scale;
        // tanh(y) = 1 - 2 / (1 + exp(2 y)), which saturates where the exponential does.
        return softcap > 0 ? softcap * LOG2E * (1.0f - 2.0f / (1.0f + fast_exp2(2.0f * LOG2E / softcap * x))) : x;
    }
};
