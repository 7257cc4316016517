// Counts the pages of a coverage: one block decides for one query token and KV head how many of its best pages carry the
// share of the attention weight that is asked for.
//
// The block adds up what all pages have under each query head, as `page_score` has left it, and what the tokens have that
// are read whatever the query. A page's share of that is its mass, the mean over the heads. The least key is bisected
// that the pages from it on reach the target with, and of those that have this key the first are taken. Masses are
// integers, so that no sum depends on its order; threads keep to their pages, and read them near.
#include "params.cuh"
#include "select.cuh"

constexpr int QUERY = SK_QUERY, KV = SK_KV, GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE;
constexpr int WARPS = SK_WARPS, THREADS = WARPS * WARP;
static_assert(WARPS <= WARP, "a warp adds up what the warps have found");
// Pages that a thread reads together.
constexpr int RUN = 4;
// A key is bisected by so many bits at a time.
constexpr int BITS = 2, TRIED = (1 << BITS) - 1;
// All of a row's weight. Its masses round to twice as much at most.
constexpr float WHOLE = 2147483648.0f;
// It is below all logits, and finite: sums may start from it.
constexpr float LOWEST = -1.0e30f;

struct CountParams {
    QueryParams query;
    CacheParams cache;
    ContextParams contexts;
    SoftmaxParams softmax;
    const u16* scores;     // [rows, scores_stride], which orders pages.
    const float* by_head;  // [rows, GROUP, width]: products of query heads with the best summary key of each page.
    u32* masses;           // [rows, width], for the blocks' own use.
    const float* share;    // Of each request: the target, and how many pages it reads at least and at most.
    const i64* least;
    const i64* most;
    int* counts;           // [rows]
    u64* counters;         // Per KV head: rows, blocks, tokens read and tokens of contexts, see `stopping`; null for none.
    i64 scores_stride;
    int width;             // A multiple of RUN, like `scores_stride`.
    int sink_pages;
    int recent_pages;
    int page_size;
    int pages_per_block;
};

// A sum of exponentials, relative to the largest.
struct Sum {
    float largest = LOWEST, total = 0;

    // Adds numbers that have been scaled by log2(e).
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

    // Adds up the sums of a warp, for all of its lanes.
    DEVICE void merge() {
        float base = warp_max(largest);
        total = warp_sum(total * fast_exp2(largest - base));
        largest = base;
    }
};

struct Logits {
    float scale;  // It includes log2(e) unless there is a softcap.
    float softcap;

    DEVICE float operator()(float product) const {
        float x = product * scale;
        // tanh(y) = 1 - 2 / (1 + exp(2 y)), which saturates where the exponential does.
        return softcap > 0 ? softcap * LOG2E * (1.0f - 2.0f / (1.0f + fast_exp2(2.0f * LOG2E / softcap * x))) : x;
    }
};

struct Shared {
    // Those of one head, or of one count, are still read while the next are written.
    Sum known[2][WARPS], pages[2][WARPS];
    u32 found[2][TRIED][WARPS];
    float base[GROUP];
};

extern "C" __global__ void __launch_bounds__(THREADS) count_pages(const __grid_constant__ CountParams p) {
    __shared__ Shared shared;
    depend_on_previous();
    release_next();
    int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    int head = blockIdx.x, token = blockIdx.y;
    i64 row = (i64)token * gridDim.x + head;
    QueryToken at(p.contexts, token);
    int context = max(at.context, 0), num_pages = context / p.page_size;
    int least = (int)p.least[at.request], most = (int)min(p.most[at.request], (i64)num_pages);
    float share = p.share[at.request];
    bool counts = num_pages > least && least < p.most[at.request] && share < 1;
    int first = p.sink_pages, last = num_pages - p.recent_pages;
    int found = share < 1 ? 0 : num_pages;
    if (counts) {
        Logits logits{logit_scale(p.softmax, p.query, p.cache), p.softmax.softcap};
        // The tokens of the sink pages, of the newest ones and of the incomplete one.
        int of_sinks = first * p.page_size, num_known = of_sinks + context - last * p.page_size;
        TokenRows rows(p.cache, head);
        i64 first_query = first_query_element(p.query, token, head, GROUP);
        const float* by_head = p.by_head + row * GROUP * p.width;
        // Pages that are not chosen by their scores have no weight here.
        auto read = [&](const float* products, int page, float (&x)[RUN]) {
            float4 four = *(const float4*)(products + page);
            x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
#pragma unroll
            for (int i = 0; i < RUN; i++) x[i] = page + i >= first && page + i < last ? logits(x[i]) : -INFINITY_F;
        };
        float page_weight = (float)p.page_size, missing = share;
#pragma unroll 1
        for (int h = 0; h < GROUP; h++) {
            Sum known, pages;
            float x[padded(HEAD_SIZE) / WARP];
            load_row<QUERY, GROUP, HEAD_SIZE>(p.query.heads, first_query, p.query.head_stride, h, lane, x);
#pragma unroll 1
            for (int i = warp; i < num_known; i += WARPS) {
                int place = i < of_sinks ? i : last * p.page_size + i - of_sinks, page = place / p.page_size;
                int in_block = page % p.pages_per_block * p.page_size + place % p.page_size;
                const u8* key = rows.keys + at.table[page / p.pages_per_block] * rows.block_stride +
                                (i64)in_block * rows.token_stride;
                float product = 0;
#pragma unroll
                for (int j = 0; j < padded(HEAD_SIZE) / WARP; j++) {
                    int d = lane * (padded(HEAD_SIZE) / WARP) + j;
                    if (in_head<HEAD_SIZE>(d)) product = fmaf(x[j], load_float<KV>(key, d), product);
                }
                float logit[1] = {logits(warp_sum(product))};
                known.add(logit);
            }
#pragma unroll 4
            for (int page = RUN * thread; page < last; page += RUN * THREADS) {
                float logit[RUN];
                read(by_head + (i64)h * p.width, page, logit);
                pages.add(logit);
            }
            pages.merge();
            if (lane == 0) shared.known[h % 2][warp] = known, shared.pages[h % 2][warp] = pages;
            __syncthreads();
            known = pages = Sum();
            if (lane < WARPS) known = shared.known[h % 2][lane], pages = shared.pages[h % 2][lane];
            known.merge(), pages.merge();
            float largest = fmaxf(known.largest, pages.largest);
            float of_known = known.total * fast_exp2(known.largest - largest);
            float total = of_known + page_weight * pages.total * fast_exp2(pages.largest - largest);
            missing -= of_known / total / GROUP;
            // A page with this logit has a mass of one.
            if (thread == 0) shared.base[h] = largest + log2f(total * GROUP / page_weight / WHOLE);
        }
        __syncthreads();
        if (missing > 0) {
            u32* masses = p.masses + row * p.width;
            const u16* scores = p.scores + row * p.scores_stride;
#pragma unroll 2
            for (int page = RUN * thread; page < last; page += RUN * THREADS) {
                float mass[RUN] = {0, 0, 0, 0};
#pragma unroll 4
                for (int h = 0; h < GROUP; h++) {
                    float logit[RUN];
                    read(by_head + (i64)h * p.width, page, logit);
#pragma unroll
                    for (int i = 0; i < RUN; i++) mass[i] += fast_exp2(logit[i] - shared.base[h]);
                }
                *(uint4*)(masses + page) = {__float2uint_rn(mass[0]), __float2uint_rn(mass[1]), __float2uint_rn(mass[2]),
                                            __float2uint_rn(mass[3])};
            }
            // Calls `f(keys, masses)` for pages from `from` on; `f` may meet pages that are not chosen.
            auto with_run = [&](int from, auto f) {
                u32 keys[RUN], of_pages[RUN];
                uint2 pairs = *(const uint2*)(scores + from);
                uint4 four = *(const uint4*)(masses + from);
#pragma unroll
                for (int i = 0; i < RUN; i++) {
                    u32 pair = ordered_pair(word(pairs, i / 2));
                    keys[i] = i % 2 ? pair >> 16 : pair & 0xffff, of_pages[i] = word(four, i);
                }
                f(keys, of_pages);
            };
            // Adds up the numbers of all threads.
            auto sums = [&](u32 (&numbers)[TRIED], int turn) {
#pragma unroll
                for (int i = 0; i < TRIED; i++) {
                    u32 sum = __reduce_add_sync(FULL, numbers[i]);
                    if (lane == 0) shared.found[turn % 2][i][warp] = sum;
                }
                __syncthreads();
#pragma unroll
                for (int i = 0; i < TRIED; i++)
                    numbers[i] = __reduce_add_sync(FULL, lane < WARPS ? shared.found[turn % 2][i][lane] : 0u);
            };
            u32 target = max(__float2uint_rn(missing * WHOLE), 1u), threshold = 0;
            int turn = 0;
#pragma unroll 1
            for (int shift = 16 - BITS; shift >= 0; shift -= BITS, turn++) {
                u32 reached[TRIED] = {0, 0, 0};
#pragma unroll 4
                for (int page = RUN * thread; page < last; page += RUN * THREADS)
                    with_run(page, [&](const u32(&keys)[RUN], const u32(&of_pages)[RUN]) {
#pragma unroll
                        for (int i = 0; i < RUN; i++)
#pragma unroll
                            for (int t = 0; t < TRIED; t++)
                                reached[t] += keys[i] >= (threshold | (u32)(t + 1) << shift) ? of_pages[i] : 0;
                    });
                sums(reached, turn);
                int digit = 0;
#pragma unroll
                for (int t = 0; t < TRIED; t++) digit += reached[t] >= target;
                threshold |= (u32)digit << shift;
            }
            auto chosen = [&](int page) { return page >= first && page < last; };
            u32 above[TRIED] = {0, 0, 0};
#pragma unroll 4
            for (int page = RUN * thread; page < last; page += RUN * THREADS)
                with_run(page, [&](const u32(&keys)[RUN], const u32(&of_pages)[RUN]) {
#pragma unroll
                    for (int i = 0; i < RUN; i++)
                        if (chosen(page + i)) {
                            above[0] += keys[i] > threshold ? of_pages[i] : 0;
                            above[1] += keys[i] > threshold;
                            above[2] += keys[i] == threshold;
                        }
                });
            sums(above, turn++);
            // Of the pages with this key the first, until the target is reached.
            u32 before = above[0], short_of[TRIED] = {0, 0, 0};
#pragma unroll 1
            for (int from = 0; from < last; from += RUN * THREADS) {
                int page = from + RUN * thread;
                u32 equal[RUN] = {0, 0, 0, 0}, sum = 0;
                bool ties[RUN] = {false, false, false, false};
                if (page < last)
                    with_run(page, [&](const u32(&keys)[RUN], const u32(&of_pages)[RUN]) {
#pragma unroll
                        for (int i = 0; i < RUN; i++) {
                            ties[i] = chosen(page + i) && keys[i] == threshold;
                            equal[i] = ties[i] ? of_pages[i] : 0;
                            sum += equal[i];
                        }
                    });
                u32 inclusive = sum;
#pragma unroll
                for (int offset = 1; offset < WARP; offset *= 2) {
                    u32 below = __shfl_up_sync(FULL, inclusive, offset);
                    if (lane >= offset) inclusive += below;
                }
                if (lane == WARP - 1) shared.found[turn % 2][0][warp] = inclusive;
                __syncthreads();
                u32 of_warp = lane < WARPS ? shared.found[turn % 2][0][lane] : 0u;
                u32 reached = before + __reduce_add_sync(FULL, lane < warp ? of_warp : 0u) + inclusive - sum;
                before += __reduce_add_sync(FULL, of_warp);
                turn++;
#pragma unroll
                for (int i = 0; i < RUN; i++) {
                    reached += equal[i];
                    short_of[0] += ties[i] && reached < target;
                }
            }
            sums(short_of, turn);
            found = above[1] + min(short_of[0] + 1, above[2]) + p.sink_pages + p.recent_pages;
        }
    }
    if (thread > 0) return;
    int reads = max(least, min(found, most));
    p.counts[row] = reads;
    if (p.counters && !at.whole && num_pages > least) {
        u64* of_head = p.counters + head * 4;
        atomicAdd(of_head, 1ull);
        atomicAdd(of_head + 1, (u64)reads);
        atomicAdd(of_head + 2, (u64)reads * p.page_size + context % p.page_size);
        atomicAdd(of_head + 3, (u64)context);
    }
}
