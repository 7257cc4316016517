// Attention that stops when its output is stable (ART): tiles are read in waves, and between two waves the blocks of a
// cluster look at what all chains have summed up so far.
#pragma once
#include "merge.cuh"

// Elements of an output that are watched, evenly spread: one to a lane.
constexpr int PROBE = WARP;
// Chains are merged for a look in groups of this many, then the groups: an order that no launch changes.
constexpr int CHAINS_PER_PART = 4, PARTS = CHAINS / CHAINS_PER_PART;

struct StopRule {
    float scale_tolerance;
    float direction_tolerance;
    int patience;     // 0 never stops
    int least_tiles;  // tiles at the front that are read whatever the outputs

    // Whether a probe is near the one before, by the squares of their distance and norms and their product. Without a
    // direction (0 / 0) nothing is.
    DEVICE bool stable(float distance, float product, float now, float then) const {
        return sqrtf(distance) < scale_tolerance && 1 - product / (sqrtf(now) * sqrtf(then)) < direction_tolerance;
    }
};

// A warp to a chain at most, so that a chain's sums stay in registers. `TILES` are those of pages in a wave. With whole
// rounds of reads in a wave (IN_FLIGHT tiles to each chain) the sums have the bits of `ChainedAttention::run`.
template <int CLUSTER, int WARPS, int KV, int GROUP, int HEAD_SIZE, int TILES>
struct StoppingAttention : ChainedAttention<CLUSTER, WARPS, KV, GROUP, HEAD_SIZE> {
    using Chained = ChainedAttention<CLUSTER, WARPS, KV, GROUP, HEAD_SIZE>;
    using Attend = typename Chained::Attend;
    using Peers = Cluster<CLUSTER>;
    static constexpr int PER_BLOCK = Chained::PER_BLOCK;
    static_assert(WARPS >= PER_BLOCK && PER_BLOCK % CHAINS_PER_PART == 0, "a warp to a chain");
    static constexpr int READS = TILES >= Chained::IN_FLIGHT * CHAINS ? Chained::IN_FLIGHT : 1;
    static constexpr int HEADS_PER_WARP = ceil_div(GROUP, WARPS);
    static constexpr int STEP = HEAD_SIZE / PROBE;

    // The probe of some of a row's tokens, unnormalised.
    struct Part {
        float largest;
        float total_weight;
        float values[PROBE];
    };
    struct Looks {
        Part chains[PER_BLOCK][GROUP];
        // Of the whole row; a slow block may still look at one wave while a fast one tells of the next.
        Part parts[2][PARTS][GROUP];
        // The incomplete page, which is part of every look and added to the sums last.
        Part tail[GROUP];
        int stable[GROUP];
    };

    static DEVICE void watch(Part (&parts)[GROUP], const Attend& attention, int lane) {
        int g = lane / 4;
#pragma unroll
        for (int tile = 0; tile < Attend::TILES; tile++) {
            float total_weight = attention.total_weight(tile);
            if (8 * tile + g < GROUP && lane % 4 == 0) {
                parts[8 * tile + g].largest = attention.largest[tile];
                parts[8 * tile + g].total_weight = total_weight;
            }
        }
        attention.for_each_four(lane, [&](int h, int d, float4 four) {
            float each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int e = 0; e < 4; e++)
                if ((d + e) % STEP == 0) parts[h].values[(d + e) / STEP] = each[e];
        });
    }

    // Merges the chains of this block by parts and tells every block of the cluster.
    static DEVICE void tell(Looks& looks, int wave, int rank, int warp, int lane) {
        constexpr int OWN = PER_BLOCK / CHAINS_PER_PART;
#pragma unroll 1
        for (int task = warp; task < OWN * GROUP; task += WARPS) {
            int part = task / GROUP, h = task % GROUP;
            float largest[CHAINS_PER_PART], base = -INFINITY_F;
#pragma unroll
            for (int c = 0; c < CHAINS_PER_PART; c++) {
                largest[c] = looks.chains[part * CHAINS_PER_PART + c][h].largest;
                base = fmaxf(base, largest[c]);
            }
            float total = 0, value = 0;
#pragma unroll
            for (int c = 0; c < CHAINS_PER_PART; c++) {
                const Part& chain = looks.chains[part * CHAINS_PER_PART + c][h];
                float weight = base == -INFINITY_F ? 0.0f : fast_exp2(largest[c] - base);
                total = fmaf(weight, chain.total_weight, total);
                value = fmaf(weight, chain.values[lane], value);
            }
            Part& whole = looks.parts[wave % 2][rank * OWN + part][h];
#pragma unroll 1
            for (int peer = 0; peer < CLUSTER; peer++) {
                Peers::store(&whole.values[lane], peer, value);
                if (lane == 0) {
                    Peers::store(&whole.largest, peer, base);
                    Peers::store(&whole.total_weight, peer, total);
                }
            }
        }
    }

    // The lane's element of a head's output over all that has been read.
    static DEVICE float element(const Looks& looks, int wave, int h, const float* sinks, float value_scale, int lane) {
        auto part = [&](int i) -> const Part& { return i < PARTS ? looks.parts[wave % 2][i][h] : looks.tail[h]; };
        bool one = lane <= PARTS;
        float largest = one ? part(lane).largest : -INFINITY_F, sink = sinks ? sinks[h] * LOG2E : -INFINITY_F;
        float base = fmaxf(warp_max(largest), sink);
        float weight = base == -INFINITY_F ? 0.0f : fast_exp2(largest - base);
        float total = warp_sum(one ? weight * part(lane).total_weight : 0.0f);
        if (base != -INFINITY_F) total += fast_exp2(sink - base);
        float value = 0;
#pragma unroll
        for (int i = 0; i <= PARTS; i++) value = fmaf(__shfl_sync(FULL, weight, i), part(i).values[lane], value);
        return value / total * value_scale;
    }

    // `locate(i, visited)` gives where tile i lies if the incomplete page comes after `visited` tiles of pages. Returns
    // how many of the `page_tiles` were visited; tells all threads of the cluster the same.
    template <int OUTPUT, typename Locate>
    static DEVICE int run(typename Chained::Shared& shared, typename Chained::Values& values, Looks& looks,
                          const TokenRows& rows, bool stopping, int page_tiles, int tail_tiles, const StopRule& rule,
                          float scale, float softcap, const float* sinks, float value_scale, u16* out, int rank, int warp,
                          int lane, Locate locate) {
        bool working = warp < PER_BLOCK;
        int chain = rank * PER_BLOCK + warp, visited = page_tiles;
        Attend attention;
        typename Attend::Tokens tokens[READS];
        int valid[READS], count = 0;
        // Reads this chain's tiles i, i + CHAINS, ... that lie before `end`.
        auto read = [&](int i, int end) {
            count = working && i < end ? min(READS, ceil_div(end - i, CHAINS)) : 0;
            if (count == 0) return;
#pragma unroll
            for (int n = 0; n < READS; n++) {
                TokenTile at = locate(n < count ? i + n * CHAINS : i, visited);
                valid[n] = n < count ? at.valid : 0;
                tokens[n] = Attend::template read<true>(rows, at.block, at.token, valid[n], lane);
            }
        };
        if (stopping && rank == 0 && warp == 0) {
            attention.clear();
#pragma unroll 1
            for (int i = 0; i < tail_tiles; i++) {
                TokenTile at = locate(page_tiles + i, page_tiles);
                typename Attend::Tokens one[1] = {Attend::read(rows, at.block, at.token, at.valid, lane)};
                int valid_one[1] = {at.valid};
                attention.add(shared.query, one, valid_one, 1, scale, softcap, lane);
            }
            watch(looks.tail, attention, lane);
            __syncwarp();
#pragma unroll 1
            for (int peer = 1; peer < CLUSTER; peer++)
#pragma unroll 1
                for (int i = lane; i < sizeof(looks.tail) / 4; i += WARP)
                    Peers::store((float*)looks.tail + i, peer, ((const float*)looks.tail)[i]);
        }
        attention.clear();
        float before[HEADS_PER_WARP];
        int consecutive = 0;
        auto end_of = [&](int from) {
            return !stopping || from + TILES >= visited ? visited + tail_tiles : from + TILES;
        };
        auto first_of = [&](int from) { return from + (chain - from & CHAINS - 1); };
        int from = 0, i = first_of(0), end = end_of(0);
        read(i, end);
#pragma unroll 1
        for (int wave = 0;;) {
            if (count) attention.add(shared.query, tokens, valid, count, scale, softcap, lane);
            i += READS * CHAINS;
            bool same_wave = i < end;
            if (!same_wave) {
                if (!stopping || from + TILES >= visited) break;
                from += TILES, i = first_of(from), end = end_of(from);
            }
            // The next wave is on its way while this one is looked at.
            read(i, end);
            if (same_wave) continue;
            if (working) watch(looks.chains[warp], attention, lane);
            __syncthreads();
            tell(looks, wave, rank, warp, lane);
            Peers::sync();
#pragma unroll
            for (int n = 0; n < HEADS_PER_WARP; n++) {
                int h = warp + n * WARPS;
                if (h >= GROUP) break;
                float x = element(looks, wave, h, sinks, value_scale, lane), then = wave ? before[n] : 0.0f;
                float distance = warp_sum((x - then) * (x - then)), product = warp_sum(x * then);
                float now_square = warp_sum(x * x), then_square = warp_sum(then * then);
                bool stable = wave && rule.stable(distance, product, now_square, then_square);
                if (lane == 0) looks.stable[h] = stable;
                before[n] = x;
            }
            __syncthreads();
            bool stable = true;
#pragma unroll
            for (int h = 0; h < GROUP; h++) stable &= looks.stable[h] != 0;
            consecutive = stable ? consecutive + 1 : 0;
            wave++;
            if (rule.patience && consecutive >= rule.patience && from >= rule.least_tiles) {
                visited = from, end = end_of(from);
                read(i, end);
            }
        }
        if (working) Chained::publish(shared, values, attention, chain, lane);
        Chained::template merge<OUTPUT>(shared, values, sinks, value_scale, out, rank, warp, lane);
        return visited;
    }
};
