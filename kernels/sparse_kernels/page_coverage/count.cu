// Counts the pages of a coverage. The thread blocks of a cluster handle one query token and KV head. They find how many of
// its best pages carry the target share of the attention weight.
//
// `page_score` has already written the pages' logits of each query head and sums of them. The weights of the tokens that
// are always read are added here. The mass of a page is its share of the total, the mean over the heads. Bisection finds
// the lowest key such that the pages with at least this key reach the target. Of the pages with exactly this key, the
// first are taken. Masses are integers, so sums and counts do not depend on the number of thread blocks per row.
#include "select.cuh"
#include "weights.cuh"

constexpr int QUERY = SK_QUERY, KV = SK_KV, GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE;
constexpr int CLUSTER = SK_CLUSTER, WARPS = SK_WARPS, THREADS = WARPS * WARP;
static_assert(WARPS <= WARP, "a warp adds up what the warps have found");
// Pages that a thread reads together.
constexpr int RUN = 4;
// Bits of a key that one bisection step decides.
constexpr int BITS = 2, TRIED = (1 << BITS) - 1;
// The integer weight of a row. Rounding can at most double the sum of its masses.
constexpr float WHOLE = 2147483648.0f;

using Peers = Cluster<CLUSTER>;

struct CountParams {
    QueryParams query;
    CacheParams cache;
    ContextParams contexts;
    HeadParams heads;
    const u16* scores;  // [rows, scores_stride], the order of the pages.
    u32* masses;        // [rows, scores_stride], scratch if the masses of a row do not fit shared memory.
    const float* share; // Per request: the target, and the smallest and largest number of pages.
    const i64* least;
    const i64* most;
    int* counts;        // [rows]
    u64* counters;      // Per KV head: rows, blocks, tokens read and tokens of contexts, see `stopping`; null for none.
    i64 scores_stride;  // A multiple of RUN.
    int kept_pages;     // Pages of a row that a thread block keeps in shared memory, a multiple of 8; 0 if they do not fit.
    int sums_of_head;   // Sums per head; only those of the row's pages are written.
    int chunk;          // Pages per sum.
    int page_size;
    int pages_per_block;
};

struct Shared {
    float2 known[GROUP][WARPS];
    float base[GROUP];
    float known_share[GROUP];
    // Numbers of all warps of the cluster, two sets: one count's numbers are read while the next count's are written.
    u32 found[2][TRIED + 1][CLUSTER * WARPS];
    u32 ties[2][WARPS];
};
static_assert(sizeof(Shared) == SK_SHARED_BYTES, "the host counts the shared memory of a block otherwise");

// Four consecutive pages. Pages that are not ranked by score have no mass.
struct Pages {
    u32 keys[RUN], masses[RUN];

    DEVICE Pages(uint2 pairs, uint4 four) {
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            u32 pair = ordered_pair(word(pairs, i / 2));
            keys[i] = i % 2 ? pair >> 16 : pair & 0xffff, masses[i] = word(four, i);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
#if SK_CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
count_pages(const __grid_constant__ CountParams p) {
    __shared__ Shared shared;
    extern __shared__ __align__(16) u8 kept[];
    depend_on_previous();
    release_next();
    int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, rank = Peers::rank();
    int head = blockIdx.y, token = blockIdx.z;
    i64 row = (i64)token * gridDim.y + head;
    QueryToken at(p.contexts, token);
    int context = max(at.context, 0), num_pages = context / p.page_size;
    int least = (int)p.least[at.request], most = (int)min(p.most[at.request], (i64)num_pages);
    float share = p.share[at.request];
    auto finish = [&](int found) {
        if (rank > 0 || thread > 0) return;
        int reads = max(least, min(found, most));
        p.counts[row] = reads;
        if (!p.counters || at.whole || num_pages <= least) return;
        u64* of_head = p.counters + head * 4;
        atomicAdd(of_head, 1ull);
        atomicAdd(of_head + 1, (u64)reads);
        atomicAdd(of_head + 2, (u64)reads * p.page_size + context % p.page_size);
        atomicAdd(of_head + 3, (u64)context);
    };
    // All thread blocks of a row return together.
    if (num_pages <= least || least >= p.most[at.request] || share >= 1) {
        finish(share < 1 ? 0 : num_pages);
        return;
    }
    // All thread blocks of the cluster must run before one of them writes to another.
    Peers::arrive();
    int first = p.heads.sink_pages, last = num_pages - p.heads.recent_pages;

    // The tokens of the sink pages, the newest pages and the incomplete page, one token per warp.
    int of_sinks = first * p.page_size, num_known = of_sinks + context - last * p.page_size;
    TokenRows rows(p.cache, head);
    HeadLogits logits(p.heads);
    i64 first_query = first_query_element(p.query, token, head, GROUP);
    constexpr int PER_LANE = padded(HEAD_SIZE) / WARP;
#pragma unroll 1
    for (int h = lane; h < GROUP; h += WARP) shared.known[h][warp] = Sum().pair();
    __syncwarp();
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
            Sum sum(shared.known[h][warp]);
            sum.add(logit);
            shared.known[h][warp] = sum.pair();
        }
    }
    __syncthreads();
    const float2* sums = p.heads.sums + row * GROUP * p.sums_of_head;
    int num_sums = ceil_div(num_pages, p.chunk);
#pragma unroll 1
    for (int h = warp; h < GROUP; h += WARPS) {
        Sum known, pages;
        if (lane < WARPS) known = Sum(shared.known[h][lane]);
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
    if (!(missing > 0)) {
        Peers::wait();
        finish(0);
        return;
    }

    // Each thread block of the cluster handles a range of the row, and each thread a range of its pages.
    int block_share = ceil_div(ceil_div(last, CLUSTER), RUN) * RUN;
    int begin = min(rank * block_share, last), end = min(begin + block_share, last);
    // A thread block keeps its range in shared memory if it fits: it is read many times.
    u32* masses = p.masses + row * p.scores_stride;
    const u16* scores = p.scores + row * p.scores_stride;
    u32* kept_masses = (u32*)kept;
    u16* kept_scores = (u16*)(kept_masses + p.kept_pages);
    auto read = [&](int page) {
        int i = page - begin;
        return p.kept_pages ? Pages(*(const uint2*)(kept_scores + i), *(const uint4*)(kept_masses + i))
                            : Pages(*(const uint2*)(scores + page), *(const uint4*)(masses + page));
    };
    const float* of_heads = p.heads.logits + row * p.heads.row_stride;
    auto chosen = [&](int page) { return page >= first && page < last; };
#pragma unroll 2
    for (int page = begin + RUN * thread; page < end; page += RUN * THREADS) {
        float mass[RUN] = {0, 0, 0, 0};
#pragma unroll 4
        for (int h = 0; h < GROUP; h++) {
            float4 four = *(const float4*)(of_heads + h * p.scores_stride + page);
            float base = shared.base[h];
            mass[0] += fast_exp2(four.x - base), mass[1] += fast_exp2(four.y - base);
            mass[2] += fast_exp2(four.z - base), mass[3] += fast_exp2(four.w - base);
        }
        u32 rounded[RUN];
#pragma unroll
        for (int i = 0; i < RUN; i++) rounded[i] = chosen(page + i) ? __float2uint_rn(mass[i]) : 0;
        uint4 four = {rounded[0], rounded[1], rounded[2], rounded[3]};
        if (p.kept_pages) {
            *(uint4*)(kept_masses + page - begin) = four;
            *(uint2*)(kept_scores + page - begin) = *(const uint2*)(scores + page);
        } else {
            *(uint4*)(masses + page) = four;
        }
    }
    Peers::wait();

    // Sums numbers over all threads of the cluster. `before` gets the sum of the last number over earlier thread blocks.
    auto sum_up = [&](auto& numbers, int turn, u32* before = nullptr) {
        constexpr int COUNT = sizeof(numbers) / sizeof(u32);
        auto& found = shared.found[turn % 2];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            u32 sum = __reduce_add_sync(FULL, numbers[i]);
            if (lane < CLUSTER) Peers::store((int*)&found[i][rank * WARPS + warp], lane, (int)sum);
        }
        Peers::sync();
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            u32 sum = 0, of_earlier = 0;
#pragma unroll
            for (int j = lane; j < CLUSTER * WARPS; j += WARP) {
                sum += found[i][j];
                if (i == COUNT - 1 && j < rank * WARPS) of_earlier += found[i][j];
            }
            numbers[i] = __reduce_add_sync(FULL, sum);
            if (before && i == COUNT - 1) *before = __reduce_add_sync(FULL, of_earlier);
        }
    };
    u32 target = max(__float2uint_rn(missing * WHOLE), 1u), threshold = 0;
    int turn = 0;
#pragma unroll 1
    for (int shift = 16 - BITS; shift >= 0; shift -= BITS, turn++) {
        u32 reached[TRIED] = {0, 0, 0};
#pragma unroll 4
        for (int page = begin + RUN * thread; page < end; page += RUN * THREADS) {
            Pages pages = read(page);
#pragma unroll
            for (int i = 0; i < RUN; i++)
#pragma unroll
                for (int t = 0; t < TRIED; t++)
                    reached[t] += pages.keys[i] >= (threshold | (u32)(t + 1) << shift) ? pages.masses[i] : 0;
        }
        sum_up(reached, turn);
        u32 digit = 0;
#pragma unroll
        for (int t = 0; t < TRIED; t++) digit += reached[t] >= target;
        threshold |= digit << shift;
    }
    // Mass and number of the pages above the threshold, and number and mass of the pages at it.
    u32 parts[TRIED + 1] = {0, 0, 0, 0}, reached = 0;
#pragma unroll 4
    for (int page = begin + RUN * thread; page < end; page += RUN * THREADS) {
        Pages pages = read(page);
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            bool above = chosen(page + i) && pages.keys[i] > threshold, tie = chosen(page + i) && pages.keys[i] == threshold;
            parts[0] += above ? pages.masses[i] : 0, parts[1] += above;
            parts[2] += tie, parts[3] += tie ? pages.masses[i] : 0;
        }
    }
    sum_up(parts, turn++, &reached);
    reached += parts[0];
    // Of the pages with this key, take the first until the target is reached.
    u32 short_of[1] = {0};
#pragma unroll 1
    for (int from = begin, round = 0; from < end; from += RUN * THREADS, round++) {
        int page = from + RUN * thread;
        u32 equal[RUN] = {0, 0, 0, 0}, sum = 0;
        bool ties[RUN] = {false, false, false, false};
        if (page < end) {
            Pages pages = read(page);
#pragma unroll
            for (int i = 0; i < RUN; i++) {
                ties[i] = chosen(page + i) && pages.keys[i] == threshold;
                equal[i] = ties[i] ? pages.masses[i] : 0;
                sum += equal[i];
            }
        }
        u32 inclusive = sum;
#pragma unroll
        for (int offset = 1; offset < WARP; offset *= 2) {
            u32 below = __shfl_up_sync(FULL, inclusive, offset);
            if (lane >= offset) inclusive += below;
        }
        if (lane == WARP - 1) shared.ties[round % 2][warp] = inclusive;
        __syncthreads();
        u32 of_warp = lane < WARPS ? shared.ties[round % 2][lane] : 0u;
        u32 here = reached + __reduce_add_sync(FULL, lane < warp ? of_warp : 0u) + inclusive - sum;
        reached += __reduce_add_sync(FULL, of_warp);
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            here += equal[i];
            short_of[0] += ties[i] && here < target;
        }
    }
    sum_up(short_of, turn);
    finish((int)(parts[1] + min(short_of[0] + 1, parts[2])) + p.heads.sink_pages + p.heads.recent_pages);
}
