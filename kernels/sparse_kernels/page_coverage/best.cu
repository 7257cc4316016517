// Counts the pages of a coverage from the best pages of a row. One thread block handles one query token and KV head.
//
// It lists the pages whose key reaches a floor that enough pages reach, so no better page is missing. Only their records
// are scored again, for the logits of each head. Bisection over key and page finds the last page that the target needs.
// If the best pages do not reach it, as many as the row may read are listed. Counts are those of `count_pages`.
#include "rows.cuh"
#include "score.cuh"
#include "select.cuh"

constexpr int RECORD = SK_RECORD, PAGES_PER_BLOCK = SK_PAGES_PER_BLOCK;
// Pages that are listed first, at least.
constexpr int FIRST = 256;
// Bits of a candidate that one bisection step decides.
constexpr int BITS = 2, TRIED = (1 << BITS) - 1;
// A bound of a sum of masses is in this unit, so that it fits an integer.
constexpr float UNIT = 1024.0f;

using Score = ScoreQuery<RECORD, GROUP, HEAD_SIZE>;
using Batch = ScoreBatch<PAGES_PER_BLOCK, RECORD, GROUP, HEAD_SIZE>;
using Best = Select<WARPS>;

struct Shared {
    typename Best::Shared select;
    typename Score::Shared query;
    HeadShares heads;
    u32 masses[MAX_CANDIDATES];
    // Numbers of all warps, two sets: one sum's numbers are read while the next sum's are written.
    u32 found[2][TRIED][WARPS];
};
static_assert(sizeof(Shared) == SK_SHARED_BYTES, "the host counts the shared memory of a block otherwise");
constexpr int FIXED_BYTES = (sizeof(Shared) + 15) / 16 * 16;

struct BestPages {
    const CountParams& p;
    const CountedRow& row;
    Shared& shared;
    int turn = 0;

    // A thread has every THREADS-th candidate.
    static constexpr int OWN = ceil_div(MAX_CANDIDATES, THREADS);

    // Adds up numbers of all threads.
    template <int N>
    DEVICE void sum_up(u32 (&numbers)[N]) {
        auto& found = shared.found[turn++ % 2];
#pragma unroll
        for (int i = 0; i < N; i++) {
            u32 sum = __reduce_add_sync(FULL, numbers[i]);
            if (row.lane == 0) found[i][row.warp] = sum;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < N; i++) numbers[i] = __reduce_add_sync(FULL, row.lane < WARPS ? found[i][row.lane] : 0u);
    }

    // Returns whether the listed pages can reach the target. No head has a larger product with a page than its score,
    // but for the rounding of the score.
    DEVICE bool may_reach(int count, u32 target) {
        HeadLogits logits(p.heads);
        float bound = 0;
#pragma unroll 1
        for (int i = row.thread; i < count; i += THREADS) {
            u32 key = shared.select.candidates[i] >> 16;
            float score = bf16_to_float(key & 0x8000 ? key ^ 0x8000 : key ^ 0xffff);
            if (score == -INFINITY_F) continue;
            float logit = logits(fmaf(fabsf(score), 1.01f / 256, score));
#pragma unroll 1
            for (int h = 0; h < GROUP; h++) bound += fast_exp2(logit - shared.heads.base[h]);
        }
        u32 units[1] = {__float2uint_ru(fminf(bound * (1.001f / UNIT), 4194304.0f))};
        sum_up(units);
        return units[0] >= (u32)(target / UNIT);
    }

    // Stores the masses of the listed pages. All threads see them after a barrier.
    DEVICE void weigh(int count) {
        int lane = row.lane, g = lane / 4, t = lane % 4;
        Score score;
        score.load(shared.query, lane);
        Statistics statistics(p.statistics, row.head);
        HeadLogits logits(p.heads);
        float base_of[Score::TILES];
#pragma unroll
        for (int tile = 0; tile < Score::TILES; tile++) base_of[tile] = shared.heads.base[min(8 * tile + g, GROUP - 1)];
        constexpr int AT_ONCE = 8 * SCORE_TILES;
#pragma unroll 1
        for (int base = AT_ONCE * row.warp; base < count; base += AT_ONCE * WARPS) {
            Batch batch;
            batch.load_listed(statistics, row.at.table, lane, [&](int i) {
                return 0xffff - (int)(shared.select.candidates[min(base + i, count - 1)] & 0xffff);
            });
            float weights[SCORE_TILES][Score::TILES][2];
            batch.score(score, lane, [](int) {}, [&](int u, int tile, const float(&products)[2]) {
#pragma unroll
                for (int i = 0; i < 2; i++) weights[u][tile][i] = fast_exp2(logits(products[i]) - base_of[tile]);
            });
#pragma unroll
            for (int u = 0; u < SCORE_TILES; u++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float mass = 0;
#pragma unroll
                    for (int h = 0; h < GROUP; h++) mass += __shfl_sync(FULL, weights[u][h / 8][i], h % 8 * 4 + t);
                    int slot = base + 8 * u + 2 * t + i;
                    if (g == u && slot < count) shared.masses[slot] = __float2uint_rn(mass);
                }
        }
    }

    // Returns how many of the best pages reach the target; 0 if the listed pages do not.
    DEVICE int count_until(int count, u32 target) {
        u32 candidates[OWN], masses[OWN], total[1] = {0}, threshold = 0;
#pragma unroll
        for (int n = 0; n < OWN; n++) {
            int i = row.thread + n * THREADS;
            candidates[n] = i < count ? shared.select.candidates[i] : 0;
            masses[n] = i < count ? shared.masses[i] : 0;
            total[0] += masses[n];
        }
        sum_up(total);
        if (total[0] < target) return 0;
#pragma unroll 1
        for (int shift = 32 - BITS; shift >= 0; shift -= BITS) {
            u32 reached[TRIED] = {0, 0, 0}, digit = 0;
#pragma unroll
            for (int n = 0; n < OWN; n++)
#pragma unroll
                for (int t = 0; t < TRIED; t++)
                    reached[t] += candidates[n] >= (threshold | (u32)(t + 1) << shift) ? masses[n] : 0;
            sum_up(reached);
#pragma unroll
            for (int t = 0; t < TRIED; t++) digit += reached[t] >= target;
            threshold |= digit << shift;
        }
        u32 needed[1] = {0};
#pragma unroll
        for (int n = 0; n < OWN; n++) needed[0] += row.thread + n * THREADS < count && candidates[n] >= threshold;
        sum_up(needed);
        return (int)needed[0];
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) count_best(const __grid_constant__ CountParams p) {
    extern __shared__ __align__(16) u8 memory[];
    depend_on_previous();
    release_next();
    Shared& shared = *(Shared*)memory;
    u16* keys = (u16*)(memory + FIXED_BYTES);
    CountedRow row(p, shared.heads);
    int thread = row.thread, num_pages = row.num_pages;
    if (row.is_settled() || row.at.whole) {
        if (thread == 0) row.finish(row.uncounted());
        return;
    }
    load_keys(p.scores + row.row * p.scores_stride, num_pages, keys, thread, THREADS);
    Score::template prepare_all<QUERY, WARPS>(shared.query, p.query, row.token, row.head, 0.0f, row.warp, row.lane);
    shared.select.clear(thread);
    float missing = row.missing();
    if (!(missing > 0)) {
        if (thread == 0) row.finish(0);
        return;
    }
    // Pages that are always read are not ranked.
    int always = row.first + p.heads.recent_pages;
#pragma unroll 1
    for (int i = thread; i < always; i += THREADS) keys[i < row.first ? i : row.last + i - row.first] = KEY_ABSENT;
    __syncthreads();
    u32 target = max(__float2uint_rn(missing * WHOLE), 1u);
    int most = min(min(row.most - always, row.last - row.first), MAX_CANDIDATES), found = 0;
    BestPages best{p, row, shared};
#pragma unroll 1
    for (int listed = min(FIRST, most);; listed = most) {
        int count = Best{shared.select, listed, row.warp, row.lane}.list(
            SharedKeys<WARPS>{keys, ceil_div(num_pages, 8) * 8, thread});
        if (best.may_reach(count, target)) {
            best.weigh(count);
            __syncthreads();
            found = best.count_until(count, target);
        }
        if (found || listed == most) break;
        __syncthreads();
        shared.select.clear(thread);
        __syncthreads();
    }
    if (thread == 0) row.finish(found ? found + always : row.most);
}
