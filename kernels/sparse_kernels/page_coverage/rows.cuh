// What both ways to count the pages of a coverage share: a row, and the weights of its heads.
//
// `page_score` has written the sums of the pages' weights of each query head. The weights of the tokens that are always
// read are added here. The mass of a page is its share of the total, the mean over the heads, as an integer: sums of
// masses do not depend on their order.
#pragma once
#include "weights.cuh"

constexpr int QUERY = SK_QUERY, KV = SK_KV, GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE;
constexpr int WARPS = SK_WARPS, THREADS = WARPS * WARP;
// The tokens that are always read go to this many sums, whatever the number of warps.
constexpr int SUMS = 16;
static_assert(SUMS % WARPS == 0, "a sum belongs to one warp");
// The integer weight of a row. Rounding can at most double the sum of its masses.
constexpr float WHOLE = 2147483648.0f;

struct CountParams {
    QueryParams query;
    CacheParams cache;
    StatisticsParams statistics;  // Of `count_best`.
    ContextParams contexts;
    HeadParams heads;
    const u16* scores;  // [rows, scores_stride], the order of the pages.
    u32* masses;        // Of `count_pages`: [rows, scores_stride], scratch if the masses of a row do not fit shared memory.
    const float* share; // Per request: the target, and the smallest and largest number of pages.
    const i64* least;
    const i64* most;
    int* counts;        // [rows]
    u64* counters;      // Per KV head: rows, blocks, tokens read and tokens of contexts, see `stopping`; null for none.
    i64 scores_stride;  // A multiple of eight.
    int kept_pages;     // Of `count_pages`: pages of a row that a thread block keeps in shared memory, a multiple of 8; 0
                        // if they do not fit.
    int sums_of_head;   // Sums per head; only those of the row's pages are written.
    int chunk;          // Pages per sum.
    int page_size;
    int pages_per_block;
};

// The weights of the heads of a row. A thread block has one.
struct HeadShares {
    float2 known[GROUP][SUMS];
    float base[GROUP];
    float known_share[GROUP];
};

// A query token and KV head. Pages [first, last) are ranked by score.
struct CountedRow {
    const CountParams& p;
    HeadShares& shared;
    int thread, lane, warp, head, token;
    i64 row;
    QueryToken at;
    int context, num_pages, least, most, first, last;
    float share;

    DEVICE CountedRow(const CountParams& params, HeadShares& memory)
        : p(params), shared(memory), thread(threadIdx.x), lane(threadIdx.x % WARP), warp(threadIdx.x / WARP),
          head(blockIdx.y), token(blockIdx.z), row((i64)blockIdx.z * gridDim.y + blockIdx.y), at(params.contexts, blockIdx.z),
          context(max(at.context, 0)), num_pages(context / params.page_size), least((int)params.least[at.request]),
          most((int)min(params.most[at.request], (i64)num_pages)), first(params.heads.sink_pages),
          last(num_pages - params.heads.recent_pages), share(params.share[at.request]) {}

    // Writes the number of pages. One thread calls it.
    DEVICE void finish(int found) const {
        int reads = max(least, min(found, most));
        p.counts[row] = reads;
        if (!p.counters || at.whole || num_pages <= least) return;
        u64* of_head = p.counters + head * 4;
        atomicAdd(of_head, 1ull);
        atomicAdd(of_head + 1, (u64)reads);
        atomicAdd(of_head + 2, (u64)reads * p.page_size + context % p.page_size);
        atomicAdd(of_head + 3, (u64)context);
    }

    // Returns whether there is nothing to count; `finish(uncounted())` then.
    DEVICE bool is_settled() const { return num_pages <= least || least >= p.most[at.request] || share >= 1; }
    DEVICE int uncounted() const { return share < 1 ? 0 : num_pages; }

    // Returns the share that the pages lack beyond the tokens that are always read. All threads call it.
    DEVICE float missing() const {
        // The tokens of the sink pages, the newest pages and the incomplete page, one token per warp at a time.
        int of_sinks = first * p.page_size, num_known = of_sinks + context - last * p.page_size;
        TokenRows rows(p.cache, head);
        HeadLogits logits(p.heads);
        i64 first_query = first_query_element(p.query, token, head, GROUP);
        constexpr int PER_LANE = padded(HEAD_SIZE) / WARP;
#pragma unroll 1
        for (int i = thread; i < GROUP * SUMS; i += THREADS) shared.known[i / SUMS][i % SUMS] = Sum().pair();
        __syncthreads();
#pragma unroll 1
        for (int i = warp; i < num_known; i += WARPS) {
            int place = i < of_sinks ? i : last * p.page_size + i - of_sinks, page = place / p.page_size;
            int in_block = page % p.pages_per_block * p.page_size + place % p.page_size;
            const u8* stored = rows.keys + at.table[page / p.pages_per_block] * rows.block_stride + (i64)in_block * rows.token_stride;
            float key[PER_LANE];
#pragma unroll
            for (int j = 0; j < PER_LANE; j++) {
                int d = lane * PER_LANE + j;
                key[j] = in_head<HEAD_SIZE>(d) ? load_float<KV>(stored, d) : 0.0f;
            }
#pragma unroll 4
            for (int h = 0; h < GROUP; h++) {
                float x[PER_LANE], product = 0;
                load_row<QUERY, GROUP, HEAD_SIZE>(p.query.heads, first_query, p.query.head_stride, h, lane, x);
#pragma unroll
                for (int j = 0; j < PER_LANE; j++) product = fmaf(x[j], key[j], product);
                float logit[1] = {logits(warp_sum(product))};
                // Only one lane reads and writes the sum.
                if (lane > 0) continue;
                Sum sum(shared.known[h][i % SUMS]);
                sum.add(logit);
                shared.known[h][i % SUMS] = sum.pair();
            }
        }
        __syncthreads();
        const float2* sums = p.heads.sums + row * GROUP * p.sums_of_head;
        int num_sums = ceil_div(num_pages, p.chunk);
#pragma unroll 1
        for (int h = warp; h < GROUP; h += WARPS) {
            Sum known, pages;
            if (lane < SUMS) known = Sum(shared.known[h][lane]);
#pragma unroll 1
            for (int i = lane; i < num_sums; i += WARP) pages.add(Sum(sums[h * p.sums_of_head + i]));
            known.merge(), pages.merge();
            pages.total *= (float)p.page_size;
            Sum both = known;
            both.add(pages);
            if (lane == 0) {
                shared.known_share[h] = known.total * fast_exp2(known.largest - both.largest) / both.total;
                // A page with this logit has a mass of 1.
                shared.base[h] = both.largest + log2f(both.total * GROUP / (float)p.page_size / WHOLE);
            }
        }
        __syncthreads();
        float missing = share;
#pragma unroll 1
        for (int h = 0; h < GROUP; h++) missing -= shared.known_share[h] / GROUP;
        return missing;
    }
};
