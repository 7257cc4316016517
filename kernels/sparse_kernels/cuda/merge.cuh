// The thread blocks of a cluster compute the attention of one query token and KV head. Tiles of tokens go to a fixed
// number of chains of summation, which are merged in a fixed order.
#pragma once
#include "attend.cuh"

// The number of chains is independent of thread blocks and warps, so a token's bits do not depend on the launch or the
// batch.
constexpr int CHAINS = 32;

template <int CLUSTER, int WARPS, int KV, int GROUP, int HEAD_SIZE>
struct ChainedAttention {
    using Attend = Attention<KV, GROUP, HEAD_SIZE>;
    using Peers = Cluster<CLUSTER>;
    static constexpr int PER_BLOCK = CHAINS / CLUSTER;
    static constexpr int DIMS = padded(HEAD_SIZE);
    // Elements of the output that a thread block merges, padding included.
    static constexpr int SHARE = GROUP * DIMS / CLUSTER;
    static constexpr int IN_FLIGHT = HEAD_SIZE <= 128 && GROUP <= 8 ? 2 : 1;

    struct Shared {
        typename Attend::Query query;
        float largest[CHAINS][GROUP];
        float total_weight[CHAINS][GROUP];
        float weights[CHAINS][GROUP];
    };
    struct Values {
        float rows[CHAINS][SHARE];
    };

    // Returns the thread block that works on tile i.
    static DEVICE int block_of(int i) { return i % CHAINS / PER_BLOCK; }

    // Adds the tiles `first`, `first + stride` and so on, below `tiles`. `locate(i)` returns the `TokenTile` of tile i.
    template <typename Locate>
    static DEVICE void add_tiles(Attend& attention, const typename Attend::Query& query, const TokenRows& rows,
                                 int first, int stride, int tiles, float scale, float softcap, int lane, Locate locate) {
#pragma unroll 1
        for (int i = first; i < tiles; i += IN_FLIGHT * stride) {
            typename Attend::Tokens tokens[IN_FLIGHT];
            TokenTile at[IN_FLIGHT];
            int valid[IN_FLIGHT], count = min(IN_FLIGHT, ceil_div(tiles - i, stride));
#pragma unroll
            for (int n = 0; n < IN_FLIGHT; n++) {
                // Beyond the last tile, the first tile fills the place, without a valid token.
                at[n] = locate(n < count ? i + n * stride : i);
                valid[n] = n < count ? at[n].valid : 0;
            }
#pragma unroll
            for (int n = 0; n < IN_FLIGHT; n++) tokens[n] = Attend::read(rows, at[n], valid[n], lane);
            attention.add(query, tokens, valid, count, scale, softcap, lane);
        }
    }

    // Sends a finished chain to the thread blocks that merge it.
    static DEVICE void publish(Shared& shared, Values& values, const Attend& attention, int chain, int lane) {
        int g = lane / 4;
#pragma unroll
        for (int tile = 0; tile < Attend::TILES; tile++) {
            float total_weight = attention.total_weight(tile);
            if (8 * tile + g < GROUP)
#pragma unroll 1
                for (int peer = lane % 4; peer < CLUSTER; peer += 4) {
                    Peers::store(&shared.largest[chain][8 * tile + g], peer, attention.largest[tile]);
                    Peers::store(&shared.total_weight[chain][8 * tile + g], peer, total_weight);
                }
        }
        attention.for_each_four(lane, [&](int h, int d, float4 four) {
            int i = h * DIMS + d;
            Peers::store((float4*)&values.rows[chain][i % SHARE], i / SHARE, four);
        });
    }

    // The caller has made sure that all thread blocks of the cluster run.
    template <int OUTPUT, typename Locate>
    static DEVICE void run(Shared& shared, Values& values, const TokenRows& rows, int tiles, float scale, float softcap,
                           const SinkLogits& sink_logits, float value_scale, u16* out, int rank, int warp, int lane,
                           Locate locate) {
#pragma unroll 1
        for (int c = warp; c < PER_BLOCK; c += WARPS) {
            int chain = rank * PER_BLOCK + c;
            Attend attention;
            attention.clear();
            add_tiles(attention, shared.query, rows, chain, CHAINS, tiles, scale, softcap, lane, locate);
            publish(shared, values, attention, chain, lane);
        }
        merge<OUTPUT>(shared, values, sink_logits, value_scale, out, rank, warp, lane);
    }

    // Merges the published chains. Every thread block merges its share of the output.
    template <int OUTPUT>
    static DEVICE void merge(Shared& shared, Values& values, const SinkLogits& sink_logits, float value_scale, u16* out, int rank,
                             int warp, int lane) {
        Peers::sync();

#pragma unroll 1
        for (int h = warp; h < GROUP; h += WARPS) {
            float largest = shared.largest[lane][h], base = warp_max(largest);
            float sink = sink_logits ? sink_logits[h] * LOG2E : -INFINITY_F;
            base = fmaxf(base, sink);
            float weight = base == -INFINITY_F ? 0.0f : fast_exp2(largest - base);
            float sum = warp_sum(weight * shared.total_weight[lane][h]);
            if (base != -INFINITY_F) sum += fast_exp2(sink - base);
            // A row that reads nothing has no weights.
            shared.weights[lane][h] = sum == 0 ? 0.0f : weight / sum * value_scale;
        }
        __syncthreads();
#pragma unroll 1
        for (int i = warp * WARP + lane; i < SHARE; i += WARPS * WARP) {
            int h = (rank * SHARE + i) / DIMS, place = rank * SHARE + i - h * (DIMS - HEAD_SIZE);
            if (!in_head<HEAD_SIZE>(place - h * HEAD_SIZE)) continue;
            float sum = 0;
#pragma unroll
            for (int chain = 0; chain < CHAINS; chain++) sum = fmaf(shared.weights[chain][h], values.rows[chain][i], sum);
            out[place] = (u16)pack_pair<OUTPUT>(sum, 0);
        }
    }
};
