// Attention over selected pages that stops when its output is stable (ART). Tiles are read in waves. Between two waves,
// the thread blocks of a cluster test the sums of all chains.
#pragma once
#include "merge.cuh"

// Elements of the probe, evenly spread over an output, one per lane.
constexpr int PROBE = WARP;

// Returns the element of a head that a lane tests.
template <int HEAD_SIZE>
DEVICE constexpr int probe_element(int lane) { return lane * HEAD_SIZE / PROBE; }

// A stop test merges the chains in groups of this many, then the groups. The order is the same in every launch.
constexpr int CHAINS_PER_PART = 4, PARTS = CHAINS / CHAINS_PER_PART;

struct StopRule {
    float scale_tolerance;
    float direction_tolerance;
    int patience;     // 0 never stops.
    int least_tiles;  // First tiles, which are read in any case.

    DEVICE StopRule(const StopParams& p, int tiles_per_page)
        : scale_tolerance(p.scale_tolerance), direction_tolerance(p.direction_tolerance), patience(p.patience),
          least_tiles(p.least_pages * tiles_per_page) {}

    // Returns whether a probe is near the previous one, from the squares of their distance and norms and from their
    // product. A probe without a direction (0 / 0) is not near.
    DEVICE bool stable(float distance, float product, float now, float then) const {
        return sqrtf(distance) < scale_tolerance && 1 - product / (sqrtf(now) * sqrtf(then)) < direction_tolerance;
    }
};

// A warp works on at most one chain, so that the sums of a chain stay in registers. A wave reads `TILES` tiles of
// pages. If a wave is whole rounds of reads (IN_FLIGHT tiles per chain), the sums have the bits of
// `ChainedAttention::run`.
template <int CLUSTER, int WARPS, int KV, int GROUP, int HEAD_SIZE, int TILES>
struct StoppingAttention : ChainedAttention<CLUSTER, WARPS, KV, GROUP, HEAD_SIZE> {
    using Chained = ChainedAttention<CLUSTER, WARPS, KV, GROUP, HEAD_SIZE>;
    using Attend = typename Chained::Attend;
    using Peers = Cluster<CLUSTER>;
    static constexpr int PER_BLOCK = Chained::PER_BLOCK;
    static_assert(WARPS >= PER_BLOCK && PER_BLOCK % CHAINS_PER_PART == 0, "a warp to a chain");
    static constexpr int READS = TILES >= Chained::IN_FLIGHT * CHAINS ? Chained::IN_FLIGHT : 1;
    static constexpr int HEADS_PER_WARP = ceil_div(GROUP, WARPS);

    // The probe over some of a row's tokens; its values are not normalised.
    struct Part {
        float largest;
        float total_weight;
        float values[PROBE];
    };
    struct Probes {
        Part chains[PER_BLOCK][GROUP];
        // The parts of a row have room twice: a slow thread block may still test one wave while a fast one publishes
        // the next.
        Part parts[2][PARTS][GROUP];
        // The incomplete page is part of every test, and is added to the sums last.
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
            float elements[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int watching = HEAD_SIZE % PROBE ? ceil_div((d + e) * PROBE, HEAD_SIZE) : (d + e) / (HEAD_SIZE / PROBE);
                if (probe_element<HEAD_SIZE>(watching) == d + e && watching < PROBE) parts[h].values[watching] = elements[e];
            }
        });
    }

    // Merges the chains of this thread block by parts, and sends them to every thread block of the cluster.
    static DEVICE void publish_probes(Probes& probes, int wave, int rank, int warp, int lane) {
        constexpr int BLOCK_PARTS = PER_BLOCK / CHAINS_PER_PART;
#pragma unroll 1
        for (int task = warp; task < BLOCK_PARTS * GROUP; task += WARPS) {
            int part = task / GROUP, h = task % GROUP;
            float largest[CHAINS_PER_PART], base = -INFINITY_F;
#pragma unroll
            for (int c = 0; c < CHAINS_PER_PART; c++) {
                largest[c] = probes.chains[part * CHAINS_PER_PART + c][h].largest;
                base = fmaxf(base, largest[c]);
            }
            float total = 0, value = 0;
#pragma unroll
            for (int c = 0; c < CHAINS_PER_PART; c++) {
                const Part& chain = probes.chains[part * CHAINS_PER_PART + c][h];
                float weight = base == -INFINITY_F ? 0.0f : fast_exp2(largest[c] - base);
                total = fmaf(weight, chain.total_weight, total);
                value = fmaf(weight, chain.values[lane], value);
            }
            Part& whole = probes.parts[wave % 2][rank * BLOCK_PARTS + part][h];
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

    // Returns the lane's element of a head's output over all tokens read.
    static DEVICE float element(const Probes& probes, int wave, int h, const SinkLogits& sink_logits, float value_scale, int lane) {
        auto part = [&](int i) -> const Part& { return i < PARTS ? probes.parts[wave % 2][i][h] : probes.tail[h]; };
        bool has_part = lane <= PARTS;
        float largest = has_part ? part(lane).largest : -INFINITY_F, sink = sink_logits ? sink_logits[h] * LOG2E : -INFINITY_F;
        float base = fmaxf(warp_max(largest), sink);
        float weight = base == -INFINITY_F ? 0.0f : fast_exp2(largest - base);
        float total = warp_sum(has_part ? weight * part(lane).total_weight : 0.0f);
        if (base != -INFINITY_F) total += fast_exp2(sink - base);
        float value = 0;
#pragma unroll
        for (int i = 0; i <= PARTS; i++) value = fmaf(__shfl_sync(FULL, weight, i), part(i).values[lane], value);
        return value / total * value_scale;
    }

    // `locate(i, end_of_pages)` returns where tile i is, if the incomplete page follows `end_of_pages` tiles of pages.
    // Returns how many of the `page_tiles` were read; all threads of the cluster get the same number.
    template <int OUTPUT, typename Locate>
    static DEVICE int run(typename Chained::Shared& shared, typename Chained::Values& values, Probes& probes,
                          const TokenRows& rows, bool stopping, int page_tiles, int tail_tiles, const StopRule& rule,
                          float scale, float softcap, const SinkLogits& sink_logits, float value_scale, u16* out, int rank, int warp,
                          int lane, Locate locate) {
        bool working = warp < PER_BLOCK;
        int chain = rank * PER_BLOCK + warp, end_of_pages = page_tiles;
        Attend attention;
        typename Attend::Tokens tokens[READS];
        int valid[READS], count = 0;
        // Reads this chain's tiles i, i + CHAINS, ... before `end`.
        auto read = [&](int i, int end) {
            count = working && i < end ? min(READS, ceil_div(end - i, CHAINS)) : 0;
            if (count == 0) return;
#pragma unroll
            for (int n = 0; n < READS; n++) {
                TokenTile at = locate(n < count ? i + n * CHAINS : i, end_of_pages);
                valid[n] = n < count ? at.valid : 0;
                tokens[n] = Attend::template read<true>(rows, at, valid[n], lane);
            }
        };
        if (stopping && rank == 0 && warp == 0) {
            attention.clear();
#pragma unroll 1
            for (int i = 0; i < tail_tiles; i++) {
                TokenTile at = locate(page_tiles + i, page_tiles);
                typename Attend::Tokens tile[1] = {Attend::read(rows, at, at.valid, lane)};
                int tile_valid[1] = {at.valid};
                attention.add(shared.query, tile, tile_valid, 1, scale, softcap, lane);
            }
            watch(probes.tail, attention, lane);
            __syncwarp();
#pragma unroll 1
            for (int peer = 1; peer < CLUSTER; peer++)
#pragma unroll 1
                for (int i = lane; i < sizeof(probes.tail) / 4; i += WARP)
                    Peers::store((float*)probes.tail + i, peer, ((const float*)probes.tail)[i]);
        }
        attention.clear();
        float before[HEADS_PER_WARP];
        int consecutive = 0;
        auto end_of = [&](int from) {
            return !stopping || from + TILES >= end_of_pages ? end_of_pages + tail_tiles : from + TILES;
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
                if (!stopping || from + TILES >= end_of_pages) break;
                from += TILES, i = first_of(from), end = end_of(from);
            }
            // The next wave is in flight while this one is tested.
            read(i, end);
            if (same_wave) continue;
            if (working) watch(probes.chains[warp], attention, lane);
            __syncthreads();
            publish_probes(probes, wave, rank, warp, lane);
            Peers::sync();
#pragma unroll
            for (int n = 0; n < HEADS_PER_WARP; n++) {
                int h = warp + n * WARPS;
                if (h >= GROUP) break;
                float x = element(probes, wave, h, sink_logits, value_scale, lane), then = wave ? before[n] : 0.0f;
                float distance = warp_sum((x - then) * (x - then)), product = warp_sum(x * then);
                float now_square = warp_sum(x * x), then_square = warp_sum(then * then);
                bool stable = wave && rule.stable(distance, product, now_square, then_square);
                if (lane == 0) probes.stable[h] = stable;
                before[n] = x;
            }
            __syncthreads();
            bool stable = true;
#pragma unroll
            for (int h = 0; h < GROUP; h++) stable &= probes.stable[h] != 0;
            consecutive = stable ? consecutive + 1 : 0;
            wave++;
            if (rule.patience && consecutive >= rule.patience && from >= rule.least_tiles) {
                end_of_pages = from, end = end_of(from);
                read(i, end);
            }
        }
        if (working) Chained::publish(shared, values, attention, chain, lane);
        Chained::template merge<OUTPUT>(shared, values, sink_logits, value_scale, out, rank, warp, lane);
        return end_of_pages;
    }
};
