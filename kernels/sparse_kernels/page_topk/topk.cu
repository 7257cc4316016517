// One block selects the k best pages of a row of scores, or of a segment of it. Every thread holds some of the keys.
#include "params.cuh"
#include "select.cuh"

constexpr int WARPS = SK_WARPS, THREADS = WARPS * WARP;
constexpr int PER_THREAD = SK_PER_THREAD;
// True where a row is given as candidates: pages that an earlier launch chose from its segments.
constexpr bool CANDIDATES = SK_CANDIDATES;

// Keys in registers: run r of a thread lies at `RUN * (r * THREADS + thread)`.
struct RegisterKeys {
    static constexpr int RUN = PER_THREAD < 8 ? 4 : 8;
    static constexpr int RUNS = PER_THREAD / RUN;
    u32 pairs[RUNS][RUN / 2];
    u16* shared;
    int padded;
    int thread;

    template <typename F>
    DEVICE void for_each_run(F f) const {
#pragma unroll
        for (int r = 0; r < RUNS; r++) f(pairs[r], RUN * (r * THREADS + thread));
    }

    DEVICE const u16* spilled() const {
        for_each_run([&](const auto& run, int first) {
#pragma unroll
            for (int j = 0; j < RUN / 2; j++)
                if (first < padded) *(u32*)(shared + first + 2 * j) = run[j];
        });
        return shared;
    }
};

struct TopkParams {
    const u16* scores;
    const int* num_pages;
    const int* candidates;  // [rows, num_candidates], ascending; null where a row is given as scores.
    int* pages;
    int* counts;
    i64 scores_stride, row_stride, segment_stride;
    SelectionParams selection;
    int segment;            // Columns of a segment, a multiple of eight.
    int width;              // Columns of a row that exist, a multiple of eight.
    int num_candidates;     // Of each row.
};

extern "C" __global__ void __launch_bounds__(THREADS) page_topk(const __grid_constant__ TopkParams p) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ __align__(16) typename Select<WARPS>::Shared shared;
    int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    int token = blockIdx.z, row = token * gridDim.y + blockIdx.y;
    int segment = p.segment, sink_pages = p.selection.sink_pages;
    int recent_pages = p.selection.recent_pages, begin = blockIdx.x * segment;
    const u16* row_scores = p.scores + row * p.scores_stride;
    shared.clear(thread);
    depend_on_previous();
    release_next();

    constexpr int RUN = RegisterKeys::RUN, RUNS = RegisterKeys::RUNS;
    RegisterKeys keys{{}, (u16*)memory, 0, thread};
    int length = __ldg(p.num_pages + token), k = p.selection.pages_of(token, row);
    if constexpr (!CANDIDATES) {
        // The length is not known yet, but all that exists of a row may be read.
#pragma unroll
        for (int r = 0; r < RUNS; r++) {
            int i = begin + RUN * (r * THREADS + thread);
            if (i >= min(begin + segment, p.width)) continue;
            if constexpr (RUN == 8) {
                uint4 v = load16(row_scores + i);
#pragma unroll
                for (int j = 0; j < 4; j++) keys.pairs[r][j] = word(v, j);
            } else {
                uint2 v = load8(row_scores + i);
                keys.pairs[r][0] = v.x, keys.pairs[r][1] = v.y;
            }
        }
    }
    int count = CANDIDATES ? p.num_candidates : max(0, min(segment, length - begin));
    keys.padded = ceil_div(count, 8) * 8;
    const int* candidates = p.candidates + row * (i64)p.num_candidates;
#pragma unroll
    for (int r = 0; r < RUNS; r++) {
        int first = RUN * (r * THREADS + thread);
#pragma unroll
        for (int j = 0; j < RUN / 2; j++) keys.pairs[r][j] = ordered_pair(keys.pairs[r][j]);
        int page = begin + first;
        bool plain = !CANDIDATES && first + RUN <= count && page >= sink_pages && page + RUN <= length - recent_pages;
        if (plain) continue;
#pragma unroll
        for (int j = 0; j < RUN; j++) {
            int page = begin + first + j;
            u32 key = j % 2 ? keys.pairs[r][j / 2] >> 16 : keys.pairs[r][j / 2] & 0xffff;
            if constexpr (CANDIDATES) {
                page = first + j < count ? candidates[first + j] : -1;
                key = page < 0 ? KEY_ABSENT : ordered_pair(row_scores[page]) & 0xffff;
            } else if (first + j >= count) {
                page = -1;
                key = KEY_ABSENT;
            }
            if (page >= 0 && (page < sink_pages || page >= length - recent_pages)) key = KEY_ALWAYS;
            keys.pairs[r][j / 2] = j % 2 ? keys.pairs[r][j / 2] & 0xffff | key << 16 : keys.pairs[r][j / 2] & 0xffff0000u | key;
        }
    }
    __syncthreads();
    int* out = p.pages + row * p.row_stride + blockIdx.x * p.segment_stride;
    auto put = [&](int slot, int i) { out[slot] = CANDIDATES ? candidates[i] : begin + i; };
    // Of candidates there may be more than pages. Those of a row with few pages come from its first segment, which lists
    // all of them in order.
    int present = min(count, length), selected = min(k, present);
    if (present <= k) {
#pragma unroll 1
        for (int i = thread; i < selected; i += THREADS) put(i, i);
    } else {
        Select<WARPS>{shared, selected, warp, lane}.run(keys, put);
    }
#pragma unroll 1
    for (int i = selected + thread; i < p.selection.k; i += THREADS) out[i] = -1;
    if (p.counts && thread == 0) p.counts[row] = min(k, length);
}
