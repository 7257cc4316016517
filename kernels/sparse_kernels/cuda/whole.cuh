// Attention to a long context that is read whole. The blocks of its row would still read it long after those of other
// rows have ended, so it is cut into pieces of consecutive tokens, one for a warp, and every block of the launch takes
// pieces of the requests that the host lists. A long context that is not listed is read by one block of its row.
// The cut and the order of the sum follow from the context alone. Hence the bits do, too.
#pragma once
#include "merge.cuh"

// Shorter contexts stay with the blocks of their row.
constexpr int WHOLE_TOKENS = 4096;
constexpr int MOST_PIECES = 256, LEAST_PIECE_TOKENS = 256;

DEVICE bool is_long_and_whole(const QueryToken& at) { return at.whole && at.context > WHOLE_TOKENS; }

struct WholeCut {
    int context, length, pieces;

    DEVICE explicit WholeCut(int context) : context(context) {
        length = max(LEAST_PIECE_TOKENS, ceil_div(ceil_div(context, MOST_PIECES), 64) * 64);
        pieces = ceil_div(context, length);
    }

    DEVICE int first(int piece) const { return piece * length; }
    DEVICE int end(int piece) const { return min((piece + 1) * length, context); }
};

// The sum over the pieces of a row, in their order. A thread holds some elements of the output.
template <int ELEMENTS>
struct PieceSum {
    float largest[ELEMENTS], total[ELEMENTS], value[ELEMENTS];

    DEVICE void clear() {
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) largest[e] = -INFINITY_F, total[e] = value[e] = 0;
    }

    // Adds a piece: its largest logit (base 2), the sum of its weights and its weighted values.
    DEVICE void add(int e, float piece_largest, float piece_total, float piece_value) {
        bool grows = piece_largest > largest[e];
        float ratio = piece_largest == largest[e] ? 1.0f : fast_exp2(-fabsf(piece_largest - largest[e]));
        float before = grows ? ratio : 1.0f, weight = grows ? 1.0f : ratio;
        total[e] = fmaf(piece_total, weight, total[e] * before);
        value[e] = fmaf(piece_value, weight, value[e] * before);
        largest[e] = fmaxf(largest[e], piece_largest);
    }

    DEVICE float result(int e, float sink, float value_scale) {
        if (sink != -INFINITY_F) add(e, sink, 1, 0);
        return value[e] / total[e] * value_scale;
    }
};

DEVICE float load_l2(const float* p) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
    return x;
}

DEVICE float2 load_l2(const float2* p) {
    float2 x;
    asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(p) : "memory");
    return x;
}

// What the launch is compiled for. `Params` has what `DecodeParams` has.
template <int QUERY, int OUTPUT, int KV, int GROUP, int HEAD_SIZE, int BLOCK_TOKENS, int WARPS, typename Params>
struct WholeAttention {
    using Chained = ChainedAttention<1, WARPS, KV, GROUP, HEAD_SIZE>;
    using Attend = typename Chained::Attend;
    using Query = typename Attend::Query;
    static constexpr int THREADS = WARPS * WARP, WIDTH = GROUP * HEAD_SIZE, ELEMENTS = ceil_div(WIDTH, THREADS);
    using Sum = PieceSum<ELEMENTS>;
    static constexpr int STRIPES = ceil_div(MOST_PIECES, WARPS);

    const Params& p;
    Query& query;
    int thread, lane, warp;

    DEVICE WholeAttention(const Params& params, Query& query)
        : p(params), query(query), thread(threadIdx.x), lane(threadIdx.x % WARP), warp(threadIdx.x / WARP) {}

    DEVICE void attend(Attend& attention, const QueryToken& at, const TokenRows& rows, const WholeCut& cut, int piece) const {
        int first = cut.first(piece), end = cut.end(piece);
        attention.clear();
        Chained::add_tiles(attention, query, rows, 0, 1, ceil_div(end - first, 8), logit_scale(p.softmax, p.query, p.cache),
                           p.softmax.softcap, lane, [&](int i) {
            int token = first + 8 * i;
            return TokenTile{at.table[token / BLOCK_TOKENS], token % BLOCK_TOKENS, min(8, end - token)};
        });
    }

    // Stores what a warp has of a piece: `values[WIDTH]` and `weights[GROUP]`, the largest logit and the sum of weights.
    DEVICE void store(const Attend& attention, float* values, float2* weights) const {
#pragma unroll
        for (int tile = 0; tile < Attend::TILES; tile++) {
            int h = 8 * tile + lane / 4;
            float total_weight = attention.total_weight(tile);
            if (lane % 4 == 0 && h < GROUP) weights[h] = float2{attention.largest[tile], total_weight};
        }
        attention.for_each_four(lane, [&](int h, int d, float4 four) { *(float4*)(values + h * HEAD_SIZE + d) = four; });
    }

    DEVICE void write(Sum& sum, int token, int head) const {
        u16* out = p.output.heads + token * p.output.token_stride + (i64)head * WIDTH;
        SinkLogits sink_logits(p.softmax, head, GROUP);
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            int i = thread + e * THREADS;
            if (i >= WIDTH) continue;
            float sink = sink_logits ? sink_logits[i / HEAD_SIZE] * LOG2E : -INFINITY_F;
            out[i] = (u16)pack_pair<OUTPUT>(sum.result(e, sink, value_scale(p.cache)), 0);
        }
    }

    // The block attends a row by itself. The query is prepared; `memory` has room for `ROOM` pieces.
    template <int ROOM>
    DEVICE void attend_alone(const QueryToken& at, int token, int head, float* memory) const {
        TokenRows rows(p.cache, head);
        WholeCut cut(at.context);
        auto* weights = (float2*)(memory + ROOM * WIDTH);
        Sum sum;
        sum.clear();
#pragma unroll 1
        for (int first = 0; first < cut.pieces; first += WARPS) {
            int piece = first + warp;
            Attend attention;
            if (piece < cut.pieces) attend(attention, at, rows, cut, piece);
#pragma unroll 1
            for (int turn = 0; turn < WARPS && first + turn < cut.pieces; turn += ROOM) {
                __syncthreads();
                int place = warp - turn;
                if (piece < cut.pieces && place >= 0 && place < ROOM)
                    store(attention, memory + place * WIDTH, weights + place * GROUP);
                __syncthreads();
#pragma unroll 1
                for (int n = 0; n < min(min(ROOM, WARPS - turn), cut.pieces - first - turn); n++)
#pragma unroll
                    for (int e = 0; e < ELEMENTS; e++) {
                        int i = thread + e * THREADS;
                        if (i >= WIDTH) continue;
                        float2 weight = weights[n * GROUP + i / HEAD_SIZE];
                        sum.add(e, weight.x, weight.y, memory[n * WIDTH + i]);
                    }
            }
        }
        write(sum, token, head);
    }

    // Returns whether the host lists a request. All threads of a block call it.
    DEVICE bool lists(int request) const {
        if (!p.whole.requests) return false;
        bool found = false;
#pragma unroll 1
        for (int i = thread; i < count(); i += THREADS) found |= p.whole.requests[1 + i] - p.whole.first_request == request;
        return __syncthreads_or(found);
    }

    DEVICE int count() const { return min(p.whole.requests[0], p.whole.most_requests); }

    // The block takes its share of the pieces of all listed requests, as one of `blocks`. The block that stores the last
    // piece of a row adds up the row.
    DEVICE void share(int heads, int requests, int block, int blocks) const {
        int per_request = p.contexts.tokens_per_request, listed_rows = count() * per_request * heads;
#pragma unroll 1
        for (int unit = block; unit < listed_rows * STRIPES; unit += blocks) {
            int row = unit % listed_rows, stripe = unit / listed_rows, head = row % heads, listed = row / heads / per_request;
            int request = p.whole.requests[1 + listed] - p.whole.first_request;
            if (request < 0 || request >= requests) continue;
            int token = request * per_request + row / heads % per_request;
            QueryToken at(p.contexts, token);
            WholeCut cut(at.context);
            int first = stripe * WARPS, piece = first + warp, count = min(WARPS, cut.pieces - first);
            if (!is_long_and_whole(at) || count <= 0) continue;
            __syncthreads();
            i64 first_query = first_query_element(p.query, token, head, GROUP);
#pragma unroll 1
            for (int r = warp; r < Query::ROWS; r += WARPS) {
                float x[padded(HEAD_SIZE) / WARP];
                load_row<QUERY, GROUP, HEAD_SIZE>(p.query.heads, first_query, p.query.head_stride, r, lane, x);
                query.prepare(r, x, lane);
            }
            __syncthreads();
            float* values = p.whole.values + (i64)row * MOST_PIECES * WIDTH;
            auto* weights = (float2*)p.whole.weights + (i64)row * MOST_PIECES * GROUP;
            if (piece < cut.pieces) {
                Attend attention;
                attend(attention, at, TokenRows(p.cache, head), cut, piece);
                store(attention, values + (i64)piece * WIDTH, weights + piece * GROUP);
            }
            __threadfence();
            __syncthreads();
            bool last = false;
            if (thread == 0) last = atomicAdd(p.whole.arrived + row, count) + count == cut.pieces;
            if (!__syncthreads_or(last)) continue;
            __threadfence();
            if (thread == 0) p.whole.arrived[row] = 0;
            add_up(values, weights, cut.pieces, token, head);
        }
    }

    DEVICE void add_up(const float* values, const float2* weights, int pieces, int token, int head) const {
        Sum sum;
        sum.clear();
        constexpr int IN_FLIGHT = ELEMENTS == 1 ? 16 : ELEMENTS <= 4 ? 8 : 2;
#pragma unroll 1
        for (int first = 0; first < pieces; first += IN_FLIGHT)
#pragma unroll
            for (int e = 0; e < ELEMENTS; e++) {
                int i = min(thread + e * THREADS, WIDTH - 1);
                float value[IN_FLIGHT];
                float2 weight[IN_FLIGHT];
#pragma unroll
                for (int n = 0; n < IN_FLIGHT; n++) {
                    int piece = min(first + n, pieces - 1);
                    value[n] = load_l2(values + (i64)piece * WIDTH + i);
                    weight[n] = load_l2(weights + piece * GROUP + i / HEAD_SIZE);
                }
#pragma unroll
                for (int n = 0; n < IN_FLIGHT; n++)
                    if (first + n < pieces) sum.add(e, weight[n].x, weight[n].y, value[n]);
            }
        write(sum, token, head);
    }
};
