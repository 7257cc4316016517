// Where attention that is split stops (ART): the outputs of pieces are looked at in the order of the pieces while later
// ones are computed, and no block ever waits for another.
//
// A piece is looked at once two have arrived at its mark: the block that wrote it (READY), and the scan of its row, which
// has looked at all pieces before it (REACHED). Whoever comes second goes on with the scan; who comes first leaves, so
// the scan is one block's at a time and no wake-up can be lost. Arriving is one atomic operation that releases what the
// block has written, the piece or the state of the scan, and acquires what the other has. The scan skips its own arrival
// at pieces that it finds READY: their blocks came first, found it not there and have left.
//
// What is decided follows from the pieces alone, not from who looks or at how many at once: sums are taken in the order
// of the pieces by the same instructions, and handed on as they are.
#pragma once
#include "marks.cuh"
#include "stop.cuh"

constexpr int READY = 1, REACHED = 2;

template <int WARPS, int GROUP, int HEAD_SIZE>
struct Scan {
    static constexpr int STEP = HEAD_SIZE / PROBE, HEADS_PER_WARP = ceil_div(GROUP, WARPS);

    struct Shared {
        u32 stable[GROUP];
        int count;
        int goes_on;
    };
    // The probes of a head after each piece of a batch, behind that before the batch; padded so that lanes that read
    // rows side by side read different banks.
    struct Probes {
        float rows[WARP + 1][PROBE + 1];
    };

    const float* values;    // of the row's pieces, as they are merged
    const float2* weights;
    float4* states;         // [GROUP, WARP] of the row: element of the probe, unnormalised and as last looked at; sums
    int* consecutive;       // stable pieces before the next
    RowMarks marks;
    StopRule rule;
    int piece_tiles;
    const float* sinks;     // of the row's heads
    float value_scale;

    // Adds `count` pieces from `first` on to the state of a head, and looks after each: bit i for a stable piece i.
    DEVICE u32 look(Probes& probes, float4& state, int h, int first, int count, float2 weight, float value, int lane) const {
        auto& x = probes.rows;
        __syncwarp();
        auto place = [&](int i) { return (i64)(first + i) * GROUP + h; };
        x[0][lane] = state.y;
        x[1][lane] = value;
        if (lane > 0 && lane < count) weight = load_shared(weights + place(lane));
#pragma unroll 1
        for (int i = 1; i < count; i += 8) {
            float each[8];
#pragma unroll
            for (int j = 0; j < 8; j++)
                each[j] = i + j < count ? load_shared(values + place(i + j) * HEAD_SIZE + lane * STEP) : 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (i + j < count) x[1 + i + j][lane] = each[j];
        }
        // Not unrolled, here and in what follows: every piece is added by the same instructions.
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            float largest = __shfl_sync(FULL, weight.x, i), total = __shfl_sync(FULL, weight.y, i);
            float base = fmaxf(state.z, largest);
            float shrink = base == -INFINITY_F ? 0.0f : fast_exp2(state.z - base);
            float grow = base == -INFINITY_F ? 0.0f : fast_exp2(largest - base);
            state.x = fmaf(grow, x[1 + i][lane], shrink * state.x);
            state.z = base;
            state.w = fmaf(grow, total, shrink * state.w);
            x[1 + i][lane] = state.x / state.w * value_scale;
        }
        state.y = x[count][lane];
        __syncwarp();
        // A lane to a piece.
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

    // Goes on at `piece`, which is ready, and which the scan has reached: before the last piece, whose look decides
    // nothing. Returns after how many pieces the row stops, `pieces` if it does not, and 0 if others will tell. By all
    // threads of a block, between barriers; `probes` are those of each warp.
    DEVICE int run(Shared& shared, Probes* probes, int piece, int pieces, int warp, int lane) const {
        float4 state[HEADS_PER_WARP];
#pragma unroll
        for (int n = 0; n < HEADS_PER_WARP; n++) {
            int h = warp + n * WARPS;
            if (h >= GROUP) break;
            if (piece == 0)
                state[n] = float4{0, 0, sinks ? sinks[h] * LOG2E : -INFINITY_F, sinks ? 1.0f : 0.0f};
            else
                state[n] = load_shared(states + h * WARP + lane);
        }
        int stable_before = piece ? load_shared(consecutive) : 0;
#pragma unroll 1
        for (;;) {
            // The first piece's loads do not wait for the marks of those behind it.
            float2 weight[HEADS_PER_WARP];
            float value[HEADS_PER_WARP];
#pragma unroll
            for (int n = 0; n < HEADS_PER_WARP; n++) {
                int h = warp + n * WARPS;
                if (h >= GROUP) break;
                i64 place = (i64)piece * GROUP + h;
                weight[n] = load_shared(weights + place);
                value[n] = load_shared(values + place * HEAD_SIZE + lane * STEP);
            }
            if (warp == 0) {
                // Pieces whose blocks have come first. The barrier passes on to all warps what the lanes acquire.
                int i = piece + lane;
                bool ready = lane == 0 || (i < pieces - 1 && load_acquire(marks.mark(i)) & READY);
                u32 missing = ~__ballot_sync(FULL, ready);
                if (lane == 0) shared.count = missing ? __ffs(missing) - 1 : WARP;
            }
            __syncthreads();
            int count = shared.count;
#pragma unroll
            for (int n = 0; n < HEADS_PER_WARP; n++) {
                int h = warp + n * WARPS;
                if (h >= GROUP) break;
                u32 stable = look(probes[warp], state[n], h, piece, count, weight[n], value[n], lane);
                if (lane == 0) shared.stable[h] = stable;
            }
            __syncthreads();
            u32 stable = FULL;
#pragma unroll
            for (int h = 0; h < GROUP; h++) stable &= shared.stable[h];
#pragma unroll 1
            for (int i = 0; i < count; i++) {
                stable_before = stable >> i & 1 ? stable_before + 1 : 0;
                int visited = piece + i + 1;
                if (stable_before >= rule.patience && visited * piece_tiles >= rule.least_tiles) return visited;
            }
            piece += count;
            if (piece == pieces - 1) return pieces;
#pragma unroll
            for (int n = 0; n < HEADS_PER_WARP; n++) {
                int h = warp + n * WARPS;
                if (h < GROUP) states[h * WARP + lane] = state[n];
            }
            if (warp == 0 && lane == 0) *consecutive = stable_before;
            __syncthreads();
            if (warp == 0 && lane == 0) shared.goes_on = arrive(marks.mark(piece), REACHED) & READY;
            __syncthreads();
            if (!shared.goes_on) return 0;
        }
    }
};
