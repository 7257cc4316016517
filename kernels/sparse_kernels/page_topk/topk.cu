// The k best pages of a row of scores, or of a segment of it, by one block.
#include "select.cuh"

constexpr int WARPS = SK_WARPS, THREADS = WARPS * WARP;

extern "C" __global__ void __launch_bounds__(THREADS)
page_topk(const u16* scores, i64 scores_stride, const int* num_pages, int rows_per_length, int k, int sink_pages,
          int recent_pages, int segment,                      // pages of a segment, a multiple of eight
          const int* candidates, int num_candidates,          // of each row, ascending; instead of all pages
          const int* block_table, i64 table_stride, int pages_per_block,  // to give pages by their place in the cache
          int* pages, i64 row_stride, i64 segment_stride, int* counts) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ __align__(16) typename Select<WARPS>::Shared shared;
    u16* keys = (u16*)memory;
    int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, row = blockIdx.y;
    int length = num_pages[row / rows_per_length];
    int begin = blockIdx.x * segment;
    int count = candidates ? num_candidates : max(0, min(segment, length - begin));
    if (candidates) candidates += row * (i64)num_candidates;
    int padded = ceil_div(count, 8) * 8;
    const u16* row_scores = scores + row * scores_stride;
    shared.clear(thread);
    if (candidates) {
#pragma unroll 1
        for (int i = thread; i < padded; i += THREADS) {
            int page = i < count ? candidates[i] : -1;
            bool always = page < sink_pages || page >= length - recent_pages;
            keys[i] = (u16)(page < 0 ? KEY_ABSENT : always ? KEY_ALWAYS : ordered_key(row_scores[page]));
        }
    } else {
        load_keys(row_scores + begin, count, keys, thread, THREADS);
        __syncthreads();
#pragma unroll 1
        for (int i = thread; i < sink_pages + recent_pages; i += THREADS) {
            int at = (i < sink_pages ? i : length - recent_pages - sink_pages + i) - begin;
            if (at >= 0 && at < count) keys[at] = KEY_ALWAYS;
        }
    }
    __syncthreads();
    int* out = pages + row * row_stride + blockIdx.x * segment_stride;
    const int* table = block_table ? block_table + row / rows_per_length * table_stride : nullptr;
    auto put = [&](int slot, int page) {
        out[slot] = table ? table[page / pages_per_block] * pages_per_block + page % pages_per_block : page;
    };
    if (count <= k) {
#pragma unroll 1
        for (int i = thread; i < k; i += THREADS) {
            int page = i >= count ? -1 : candidates ? candidates[i] : begin + i;
            if (page < 0) out[i] = -1;
            else put(i, page);
        }
    } else {
        Select<WARPS>{shared, keys, padded, min(k, length), warp, lane}.run([&](int slot, int i) {
            put(slot, candidates ? candidates[i] : begin + i);
        });
#pragma unroll 1
        for (int i = length + thread; i < k; i += THREADS) out[i] = -1;
    }
    if (counts && thread == 0) counts[row] = min(k, length);
}
