// Dense attention over a long context. The thread blocks of its row would read it long after those of other rows have
// ended. The context is therefore cut into pieces of consecutive tokens, one per warp, and stripes of pieces. All
// thread blocks of the launch take stripes of the requests that the host lists. A context that is not listed is read by
// one thread block of its row. The context alone decides the cut and the order of the sums, and so the bits.
#pragma once
#include "merge.cuh"

// The thread blocks of a row read shorter contexts.
constexpr int WHOLE_TOKENS = 4096;
// Before the rows' numbers in `arrived`: stripes that are taken, and thread blocks that have ended.
constexpr int WHOLE_COUNTERS = 2;
constexpr int STRIPE = 16, MOST_STRIPES = 64, LEAST_PIECE_TOKENS = 64;

DEVICE bool is_long_and_whole(const QueryToken& at) { return at.whole && at.context > WHOLE_TOKENS; }

struct WholeCut {
    int context, length, pieces;

    DEVICE explicit WholeCut(int context) : context(context) {
        length = max(LEAST_PIECE_TOKENS, ceil_div(ceil_div(context, STRIPE * MOST_STRIPES), 64) * 64);
        pieces = ceil_div(context, length);
    }

    DEVICE int stripes() const { return ceil_div(pieces, STRIPE); }
    DEVICE int first(int piece) const { return piece * length; }
    DEVICE int end(int piece) const { return min((piece + 1) * length, context); }
};

// The sum over pieces or stripes, in order. A thread holds some elements of the output.
template <int ELEMENTS>
struct OrderedSum {
    float largest[ELEMENTS], total[ELEMENTS], value[ELEMENTS];

    DEVICE void clear() {
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) largest[e] = -INFINITY_F, total[e] = value[e] = 0;
    }

    // Adds the largest logit (base 2), the sum of weights and the weighted values of the next piece or stripe.
    DEVICE void add(int e, float next_largest, float next_total, float next_value) {
        bool grows = next_largest > largest[e];
        float ratio = next_largest == largest[e] ? 1.0f : fast_exp2(-fabsf(next_largest - largest[e]));
        float before = grows ? ratio : 1.0f, weight = grows ? 1.0f : ratio;
        total[e] = fmaf(next_total, weight, total[e] * before);
        value[e] = fmaf(next_value, weight, value[e] * before);
        largest[e] = fmaxf(largest[e], next_largest);
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

// The launch is compiled for these. `Params` has the members of `DecodeParams`.
template <int QUERY, int OUTPUT, int KV, int GROUP, int HEAD_SIZE, int BLOCK_TOKENS, int WARPS, typename Params>
struct WholeAttention {
    using Chained = ChainedAttention<1, WARPS, KV, GROUP, HEAD_SIZE>;
    using Attend = typename Chained::Attend;
    using Query = typename Attend::Query;
    static constexpr int THREADS = WARPS * WARP, WIDTH = GROUP * HEAD_SIZE, ELEMENTS = ceil_div(WIDTH, THREADS);
    using Sum = OrderedSum<ELEMENTS>;
    // A warp's sums of a piece.
    struct alignas(16) Piece {
        float values[WIDTH];
        float2 weights[GROUP];
    };

    const Params& p;
    Query& query;
    Piece* published;
    int room;  // Pieces that fit shared memory.
    int thread, lane, warp;

    // `memory` has `bytes` of shared memory, at least two pieces.
    DEVICE WholeAttention(const Params& params, Query& query, void* memory, u32 bytes)
        : p(params), query(query), published((Piece*)memory), room(min(WARPS, (int)(bytes / sizeof(Piece)))),
          thread(threadIdx.x), lane(threadIdx.x % WARP), warp(threadIdx.x / WARP) {}

    // Calls `f(index among the thread's elements, place in the output)`.
    template <typename F>
    DEVICE void for_each_element(F f) const {
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            int i = thread + e * THREADS;
            if (i < WIDTH) f(e, i);
        }
    }

    DEVICE void attend(Attend& attention, const QueryToken& at, const TokenRows& rows, const WholeCut& cut, int piece) const {
        int first = cut.first(piece), end = cut.end(piece);
        attention.clear();
        Chained::add_tiles(attention, query, rows, 0, 1, ceil_div(end - first, 8), logit_scale(p.softmax, p.query, p.cache),
                           p.softmax.softcap, lane, [&](int i) {
            int token = first + 8 * i;
            return TokenTile{at.table[token / BLOCK_TOKENS], token % BLOCK_TOKENS, min(8, end - token)};
        });
    }

    DEVICE void publish(const Attend& attention, int place) const {
#pragma unroll
        for (int tile = 0; tile < Attend::TILES; tile++) {
            int h = 8 * tile + lane / 4;
            float total_weight = attention.total_weight(tile);
            if (lane % 4 == 0 && h < GROUP) published[place].weights[h] = float2{attention.largest[tile], total_weight};
        }
        attention.for_each_four(lane, [&](int h, int d, float4 four) {
            *(float4*)(published[place].values + h * HEAD_SIZE + d) = four;
        });
    }

    // Sums up a stripe. The query is prepared; all threads of the thread block call it.
    DEVICE Sum attend_stripe(const QueryToken& at, const TokenRows& rows, const WholeCut& cut, int stripe) const {
        Sum sum;
        sum.clear();
        int end = min((stripe + 1) * STRIPE, cut.pieces);
#pragma unroll 1
        for (int first = stripe * STRIPE; first < end; first += WARPS) {
            int piece = first + warp, last = min(first + WARPS, end);
            Attend attention;
            if (piece < last) attend(attention, at, rows, cut, piece);
#pragma unroll 1
            for (int turn = first; turn < last; turn += room) {
                __syncthreads();
                if (piece >= turn && piece < min(turn + room, last)) publish(attention, piece - turn);
                __syncthreads();
                for_each_element([&](int e, int i) {
#pragma unroll 1
                    for (int n = 0; n < min(room, last - turn); n++) {
                        float2 weight = published[n].weights[i / HEAD_SIZE];
                        sum.add(e, weight.x, weight.y, published[n].values[i]);
                    }
                });
            }
        }
        return sum;
    }

    DEVICE void write(Sum& sum, int token, int head) const {
        u16* out = p.output.heads + token * p.output.token_stride + (i64)head * WIDTH;
        SinkLogits sink_logits(p.softmax, head, GROUP);
        for_each_element([&](int e, int i) {
            float sink = sink_logits ? sink_logits[i / HEAD_SIZE] * LOG2E : -INFINITY_F;
            out[i] = (u16)pack_pair<OUTPUT>(sum.result(e, sink, value_scale(p.cache)), 0);
        });
    }

    // The thread block attends to the context of a row alone. The query is prepared.
    DEVICE void attend_alone(const QueryToken& at, int token, int head) const {
        TokenRows rows(p.cache, head);
        WholeCut cut(at.context);
        Sum sum;
        sum.clear();
#pragma unroll 1
        for (int stripe = 0; stripe < cut.stripes(); stripe++) {
            Sum next = attend_stripe(at, rows, cut, stripe);
            for_each_element([&](int e, int) { sum.add(e, next.largest[e], next.total[e], next.value[e]); });
        }
        write(sum, token, head);
    }

    // Returns whether the host lists a request. All threads of a thread block call it.
    DEVICE bool find_listed(int request) const {
        if (!p.whole.requests) return false;
        bool found = false;
#pragma unroll 1
        for (int i = thread; i < count(); i += THREADS) found |= p.whole.requests[1 + i] - p.whole.first_request == request;
        return __syncthreads_or(found);
    }

    DEVICE int count() const { return min(p.whole.requests[0], p.whole.most_requests); }

    // Stripes of the row of a query token; none if its own thread blocks read it.
    DEVICE int stripes(const QueryToken& at) const { return is_long_and_whole(at) ? WholeCut(at.context).stripes() : 0; }

    // The thread block takes stripes of the listed requests until none is left, as one of `blocks`. Not all thread blocks
    // of a launch run at once: one that starts late finds little to do. The thread block that stores the last stripe of a
    // row adds up the row.
    DEVICE void share(int heads, int requests, int blocks) const {
        int per_request = p.contexts.tokens_per_request, tokens = count() * per_request;
        int *taken = p.whole.arrived, *ended = taken + 1, *arrived = taken + WHOLE_COUNTERS;
        int next = thread == 0 ? atomicAdd(taken, 1) : 0;
        while (true) {
            __syncthreads();
            if (thread == 0) *(int*)published = next;
            __syncthreads();
            int unit = *(int*)published, listed = 0, token = 0;
#pragma unroll 1
            for (; listed < tokens; listed++) {
                int request = p.whole.requests[1 + listed / per_request] - p.whole.first_request;
                if (request < 0 || request >= requests) continue;
                token = request * per_request + listed % per_request;
                int units = heads * stripes(QueryToken(p.contexts, token));
                if (unit < units) break;
                unit -= units;
            }
            if (listed == tokens) break;
            // Its answer is needed after the stripe only.
            if (thread == 0) next = atomicAdd(taken, 1);
            int head = unit % heads, stripe = unit / heads, row = listed * heads + head;
            QueryToken at(p.contexts, token);
            WholeCut cut(at.context);
            query.template prepare_all<QUERY, WARPS>(p.query, token, head, warp, lane);
            __syncthreads();
            Sum sum = attend_stripe(at, TokenRows(p.cache, head), cut, stripe);
            float* values = p.whole.values + (i64)row * MOST_STRIPES * WIDTH;
            auto* weights = (float2*)p.whole.weights + (i64)row * MOST_STRIPES * GROUP;
            for_each_element([&](int e, int i) {
                values[stripe * WIDTH + i] = sum.value[e];
                if (i % HEAD_SIZE == 0) weights[stripe * GROUP + i / HEAD_SIZE] = float2{sum.largest[e], sum.total[e]};
            });
            __threadfence();
            __syncthreads();
            bool last = false;
            if (thread == 0) last = atomicAdd(arrived + row, 1) + 1 == cut.stripes();
            if (!__syncthreads_or(last)) continue;
            __threadfence();
            if (thread == 0) arrived[row] = 0;
            add_up(values, weights, cut.stripes(), token, head);
        }
        // The last thread block that ends leaves zeros for the next launch.
        if (thread == 0 && atomicInc((u32*)ended, blocks - 1) == (u32)blocks - 1) *taken = 0;
    }

    DEVICE void add_up(const float* values, const float2* weights, int stripes, int token, int head) const {
        Sum sum;
        sum.clear();
        constexpr int IN_FLIGHT = 16;
        for_each_element([&](int e, int i) {
#pragma unroll 1
            for (int first = 0; first < stripes; first += IN_FLIGHT) {
                float value[IN_FLIGHT];
                float2 weight[IN_FLIGHT];
#pragma unroll
                for (int n = 0; n < IN_FLIGHT; n++) {
                    int stripe = min(first + n, stripes - 1);
                    value[n] = load_l2(values + stripe * WIDTH + i);
                    weight[n] = load_l2(weights + stripe * GROUP + i / HEAD_SIZE);
                }
#pragma unroll
                for (int n = 0; n < IN_FLIGHT; n++)
                    if (first + n < stripes) sum.add(e, weight[n].x, weight[n].y, value[n]);
            }
        });
        write(sum, token, head);
    }
};
