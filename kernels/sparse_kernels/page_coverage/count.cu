// Counts the pages of a coverage. The thread blocks of a cluster handle one query token and KV head. They find how many of
// its best pages carry the target share of the attention weight.
//
// `page_score` has also written the pages' logits of each query head, from which the masses of all pages follow.
// Bisection finds the lowest key such that the pages with at least this key reach the target. Of the pages with exactly
// this key, the first are taken. Sums and counts do not depend on the number of thread blocks per row.
#include "rows.cuh"
#include "select.cuh"

constexpr int CLUSTER = SK_CLUSTER;
// Pages that a thread reads together.
constexpr int RUN = 4;
// Bits of a key that one bisection step decides.
constexpr int BITS = 2, TRIED = (1 << BITS) - 1;

using Peers = Cluster<CLUSTER>;

struct Shared : HeadShares {
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
    CountedRow row(p, shared);
    int thread = row.thread, lane = row.lane, warp = row.warp, rank = Peers::rank();
    int first = row.first, last = row.last;
    auto finish = [&](int found) {
        if (rank == 0 && thread == 0) row.finish(found);
    };
    // All thread blocks of a row return together.
    if (row.is_settled()) {
        finish(row.uncounted());
        return;
    }
    // All thread blocks of the cluster must run before one of them writes to another.
    Peers::arrive();
    float missing = row.missing();
    if (!(missing > 0)) {
        Peers::wait();
        finish(0);
        return;
    }

    // Each thread block of the cluster handles a range of the row, and each thread a range of its pages.
    int block_share = ceil_div(ceil_div(last, CLUSTER), RUN) * RUN;
    int begin = min(rank * block_share, last), end = min(begin + block_share, last);
    // A thread block keeps its range in shared memory if it fits: it is read many times.
    u32* masses = p.masses + row.row * p.scores_stride;
    const u16* scores = p.scores + row.row * p.scores_stride;
    u32* kept_masses = (u32*)kept;
    u16* kept_scores = (u16*)(kept_masses + p.kept_pages);
    auto read = [&](int page) {
        int i = page - begin;
        return p.kept_pages ? Pages(*(const uint2*)(kept_scores + i), *(const uint4*)(kept_masses + i))
                            : Pages(*(const uint2*)(scores + page), *(const uint4*)(masses + page));
    };
    const float* of_heads = p.heads.logits + row.row * p.heads.row_stride;
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
