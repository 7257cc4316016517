// Finds where a row of split attention stops (ART). The pieces are tested in order while later pieces are computed, and
// no thread block waits for another.
//
// Neighbouring pieces share a mark. They are tested together once all of them have arrived there (one each), and the
// scan of their row too (REACHED), after it has tested all earlier pieces. The thread block that arrives last continues
// the scan, and the others leave. The scan therefore belongs to one thread block at a time, and no wake-up is lost.
// Arriving is one atomic operation. It releases what the thread block has written (the piece or the state of the scan)
// and acquires what the others have written. The scan does not arrive at marks that it finds full: their thread blocks
// came first, did not find the scan, and have left.
//
// The pieces alone decide the stop, not the thread block that tests them nor the number of pieces tested at once. The
// same instructions add up the pieces in order, and the sums are handed on unchanged.
#pragma once
#include "marks.cuh"
#include "stop.cuh"

constexpr int REACHED = 1 << 16;

template <int WARPS, int GROUP, int HEAD_SIZE>
struct Scan {
    static constexpr int HEADS_PER_WARP = ceil_div(GROUP, WARPS);
    // A scan loads the numbers of this many pieces before it knows which others are ready.
    static constexpr int AHEAD = 4;

    struct Shared {
        u32 stable[GROUP];
        int count;
        int goes_on;
    };
    // Row 0 holds the probe of a head before a batch of pieces, the other rows the probe after each piece. With
    // padding, lanes that read neighbouring rows read different banks.
    struct Probes {
        float rows[WARP + 1][PROBE + 1];
    };

    const float* values;  // of the row's pieces, as they are merged
    const float2* weights;
    float4* states;       // [GROUP, WARP] of the row: unnormalised element of the probe, and at the last test; sums
    int* consecutive;     // stable pieces before the next
    RowMarks marks;
    StopRule rule;
    int piece_tiles;
    int tests;            // tested pieces: all but the last, whose test would decide nothing
    int pieces_per_test;  // a power of two, at most the lanes of a warp
    SinkLogits sink_logits;  // of the row's heads
    float value_scale;

    // Adds `count` pieces from `first` on to the state of a head and tests the output after each of them: bit i is set
    // if piece i is stable. The numbers of the first `ahead` pieces are loaded: lane i holds the weight of piece i, and
    // all lanes hold their elements.
    DEVICE u32 test(Probes& probes, float4& state, int h, int first, int count, int ahead, float2 weight,
                    const float (&elements)[AHEAD], int lane) const {
        auto& x = probes.rows;
        __syncwarp();
        auto place = [&](int i) { return (i64)(first + i) * GROUP + h; };
        x[0][lane] = state.y;
        if (lane >= ahead && lane < count) weight = load_shared(weights + place(lane));
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (i < ahead) x[1 + i][lane] = elements[i];
#pragma unroll 1
        for (int i = ahead; i < count; i += 16) {
            float batch[16];
#pragma unroll
            for (int j = 0; j < 16; j++)
                batch[j] = i + j < count ? load_shared(values + place(i + j) * HEAD_SIZE + probe_element<HEAD_SIZE>(lane)) : 0.0f;
#pragma unroll
            for (int j = 0; j < 16; j++)
                if (i + j < count) x[1 + i + j][lane] = batch[j];
        }
        // Each lane takes a piece. It finds the largest logit up to the piece, which scales the piece and the sum
        // before it.
        float base = fmaxf(state.z, weight.x);
#pragma unroll
        for (int offset = 1; offset < WARP; offset *= 2) {
            float earlier_base = __shfl_up_sync(FULL, base, offset);
            if (lane >= offset) base = fmaxf(base, earlier_base);
        }
        float before = __shfl_up_sync(FULL, base, 1);
        if (lane == 0) before = state.z;
        float shrink = base == -INFINITY_F ? 0.0f : fast_exp2(before - base);
        float grow = base == -INFINITY_F ? 0.0f : fast_exp2(weight.x - base);
        // The pieces are added in order, loaded ahead or not.
#pragma unroll 4
        for (int i = 0; i < count; i++) {
            float piece_factor = __shfl_sync(FULL, grow, i), total = __shfl_sync(FULL, weight.y, i);
            float sum_factor = __shfl_sync(FULL, shrink, i);
            state.x = fmaf(piece_factor, x[1 + i][lane], sum_factor * state.x);
            state.w = fmaf(piece_factor, total, sum_factor * state.w);
            x[1 + i][lane] = state.x / state.w * value_scale;
        }
        state.z = __shfl_sync(FULL, base, count - 1);
        state.y = x[count][lane];
        __syncwarp();
        // Each lane tests a piece.
        float distance = 0, product = 0, now_square = 0, then_square = 0;
#pragma unroll 4
        for (int d = 0; d < PROBE; d++) {
            float now = x[lane + 1][d], then = x[lane][d];
            distance = fmaf(now - then, now - then, distance);
            product = fmaf(now, then, product);
            now_square = fmaf(now, now, now_square);
            then_square = fmaf(then, then, then_square);
        }
        bool stable = lane < count && first + lane > 0 && rule.stable(distance, product, now_square, then_square);
        return __ballot_sync(FULL, stable);
    }

    // One thread reports a written piece. Returns whether the scan must continue with the pieces of its mark.
    DEVICE bool arrives(int piece) const {
        int mark = piece / pieces_per_test;
        return arrive(marks.mark(mark), 1) + 1 == sharing(mark) + (mark ? REACHED : 0);
    }

    DEVICE int sharing(int mark) const { return min(pieces_per_test, tests - mark * pieces_per_test); }

    // Continues at the mark of `piece`, where the scan and all pieces have arrived. Returns the number of pieces at
    // which the row stops: all if it does not stop, 0 if another thread block will find out. All threads of a thread
    // block call it, between barriers; `probes` holds those of each warp.
    DEVICE int run(Shared& shared, Probes* probes, int piece, int warp, int lane) const {
        piece -= piece % pieces_per_test;
        float4 state[HEADS_PER_WARP];
#pragma unroll
        for (int n = 0; n < HEADS_PER_WARP; n++) {
            int h = warp + n * WARPS;
            if (h >= GROUP) break;
            if (piece == 0)
                state[n] = float4{0, 0, sink_logits ? sink_logits[h] * LOG2E : -INFINITY_F, sink_logits ? 1.0f : 0.0f};
            else
                state[n] = load_shared(states + h * WARP + lane);
        }
        int stable_before = piece ? load_shared(consecutive) : 0;
#pragma unroll 1
        for (;;) {
            // Loads of pieces that are known to be ready do not wait for the marks of later pieces.
            int ahead = min(min(AHEAD, pieces_per_test), tests - piece);
            float2 weight[HEADS_PER_WARP];
            float elements[HEADS_PER_WARP][AHEAD];
#pragma unroll
            for (int n = 0; n < HEADS_PER_WARP; n++) {
                int h = warp + n * WARPS;
                if (h >= GROUP) break;
                i64 place = (i64)piece * GROUP + h;
                weight[n] = load_shared(weights + place + min(lane, ahead - 1) * GROUP);
#pragma unroll
                for (int i = 0; i < AHEAD; i++)
                    elements[n][i] =
                        i < ahead ? load_shared(values + (place + i * GROUP) * HEAD_SIZE + probe_element<HEAD_SIZE>(lane)) : 0.0f;
            }
            if (warp == 0) {
                // After the barrier, all warps see what the lanes acquire.
                int mark = piece / pieces_per_test + lane, first = mark * pieces_per_test;
                bool full = lane == 0 || (first < tests && load_acquire(marks.mark(mark)) == sharing(mark));
                u32 missing = ~__ballot_sync(FULL, full);
                int marks_full = missing ? __ffs(missing) - 1 : WARP;
                if (lane == 0) shared.count = min(min(WARP, marks_full * pieces_per_test), tests - piece);
            }
            __syncthreads();
            int count = shared.count;
#pragma unroll
            for (int n = 0; n < HEADS_PER_WARP; n++) {
                int h = warp + n * WARPS;
                if (h >= GROUP) break;
                u32 stable = test(probes[warp], state[n], h, piece, count, ahead, weight[n], elements[n], lane);
                if (lane == 0) shared.stable[h] = stable;
            }
            __syncthreads();
            u32 stable = FULL;
#pragma unroll
            for (int h = 0; h < GROUP; h++) stable &= shared.stable[h];
#pragma unroll 1
            for (int i = 0; i < count; i++) {
                stable_before = stable >> i & 1 ? stable_before + 1 : 0;
                int count_read = piece + i + 1;
                if (stable_before >= rule.patience && count_read * piece_tiles >= rule.least_tiles) return count_read;
            }
            piece += count;
            if (piece == tests) return tests + 1;
#pragma unroll
            for (int n = 0; n < HEADS_PER_WARP; n++) {
                int h = warp + n * WARPS;
                if (h < GROUP) states[h * WARP + lane] = state[n];
            }
            if (warp == 0 && lane == 0) *consecutive = stable_before;
            __syncthreads();
            if (warp == 0 && lane == 0) {
                int mark = piece / pieces_per_test;
                shared.goes_on = arrive(marks.mark(mark), REACHED) == sharing(mark);
            }
            __syncthreads();
            if (!shared.goes_on) return 0;
        }
    }
};
