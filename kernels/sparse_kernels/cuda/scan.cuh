// Where attention that is split stops (ART): the outputs of pieces are looked at in the order of the pieces while later
// ones are computed, and no block ever waits for another.
//
// Neighbouring pieces share a mark, and are looked at together once all of them have arrived there (one each) and so has
// the scan of their row (REACHED), which has looked at all pieces before them. Whoever comes last goes on with the scan;
// who comes before leaves, so the scan is one block's at a time and no wake-up can be lost. Arriving is one atomic
// operation that releases what the block has written, the piece or the state of the scan, and acquires what the others
// have. The scan skips its own arrival at marks that it finds full: their blocks came first, found it not there and have
// left.
//
// What is decided follows from the pieces alone, not from who looks or at how many at once: sums are taken in the order
// of the pieces by the same instructions, and handed on as they are.
#pragma once
#include "marks.cuh"
#include "stop.cuh"

constexpr int REACHED = 1 << 16;

template <int WARPS, int GROUP, int HEAD_SIZE>
struct Scan {
    static constexpr int STEP = HEAD_SIZE / PROBE, HEADS_PER_WARP = ceil_div(GROUP, WARPS);
    // Pieces whose numbers a scan asks for before it knows which more are ready.
    static constexpr int AHEAD = 4;

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

    const float* values;  // of the row's pieces, as they are merged
    const float2* weights;
    float4* states;       // [GROUP, WARP] of the row: element of the probe, unnormalised and as last looked at; sums
    int* consecutive;     // stable pieces before the next
    RowMarks marks;
    StopRule rule;
    int piece_tiles;
    int looks;            // pieces that are looked at: all but the last, whose look decides nothing
    int pieces_per_look;  // a power of two, a warp's lanes at most
    const float* sinks;   // of the row's heads
    float value_scale;

    // Adds `count` pieces from `first` on to the state of a head, and looks after each: bit i for a stable piece i. Of
    // `ahead` pieces the numbers are here: lane i has the weight of piece i, all lanes have their elements.
    DEVICE u32 look(Probes& probes, float4& state, int h, int first, int count, int ahead, float2 weight,
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
            float each[16];
#pragma unroll
            for (int j = 0; j < 16; j++)
                each[j] = i + j < count ? load_shared(values + place(i + j) * HEAD_SIZE + lane * STEP) : 0.0f;
#pragma unroll
            for (int j = 0; j < 16; j++)
                if (i + j < count) x[1 + i + j][lane] = each[j];
        }
        // A lane to a piece: the largest logit up to it, and what it and the sum before it are scaled by.
        float base = fmaxf(state.z, weight.x);
#pragma unroll
        for (int offset = 1; offset < WARP; offset *= 2) {
            float other = __shfl_up_sync(FULL, base, offset);
            if (lane >= offset) base = fmaxf(base, other);
        }
        float before = __shfl_up_sync(FULL, base, 1);
        if (lane == 0) before = state.z;
        float shrink = base == -INFINITY_F ? 0.0f : fast_exp2(before - base);
        float grow = base == -INFINITY_F ? 0.0f : fast_exp2(weight.x - base);
        // In the order of the pieces, whichever of them are at hand.
#pragma unroll 4
        for (int i = 0; i < count; i++) {
            float own = __shfl_sync(FULL, grow, i), total = __shfl_sync(FULL, weight.y, i);
            float rest = __shfl_sync(FULL, shrink, i);
            state.x = fmaf(own, x[1 + i][lane], rest * state.x);
            state.w = fmaf(own, total, rest * state.w);
            x[1 + i][lane] = state.x / state.w * value_scale;
        }
        state.z = __shfl_sync(FULL, base, count - 1);
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

    // A piece has been written, one thread says. Returns whether the scan is to go on with the pieces of its mark.
    DEVICE bool arrives(int piece) const {
        int mark = piece / pieces_per_look;
        return arrive(marks.mark(mark), 1) + 1 == sharing(mark) + (mark ? REACHED : 0);
    }

    DEVICE int sharing(int mark) const { return min(pieces_per_look, looks - mark * pieces_per_look); }

    // Goes on at the mark of `piece`, where the scan and all pieces are. Returns after how many pieces the row stops, all
    // of them if it does not, and 0 if others will tell. By all threads of a block, between barriers; `probes` are those
    // of each warp.
    DEVICE int run(Shared& shared, Probes* probes, int piece, int warp, int lane) const {
        piece -= piece % pieces_per_look;
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
            // The loads of the pieces that are known to be ready do not wait for the marks of those behind them.
            int ahead = min(min(AHEAD, pieces_per_look), looks - piece);
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
                        i < ahead ? load_shared(values + (place + i * GROUP) * HEAD_SIZE + lane * STEP) : 0.0f;
            }
            if (warp == 0) {
                // The barrier passes on to all warps what the lanes acquire.
                int mark = piece / pieces_per_look + lane, first = mark * pieces_per_look;
                bool full = lane == 0 || (first < looks && load_acquire(marks.mark(mark)) == sharing(mark));
                u32 missing = ~__ballot_sync(FULL, full);
                int marks_full = missing ? __ffs(missing) - 1 : WARP;
                if (lane == 0) shared.count = min(min(WARP, marks_full * pieces_per_look), looks - piece);
            }
            __syncthreads();
            int count = shared.count;
#pragma unroll
            for (int n = 0; n < HEADS_PER_WARP; n++) {
                int h = warp + n * WARPS;
                if (h >= GROUP) break;
                u32 stable = look(probes[warp], state[n], h, piece, count, ahead, weight[n], elements[n], lane);
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
            if (piece == looks) return looks + 1;
#pragma unroll
            for (int n = 0; n < HEADS_PER_WARP; n++) {
                int h = warp + n * WARPS;
                if (h < GROUP) states[h * WARP + lane] = state[n];
            }
            if (warp == 0 && lane == 0) *consecutive = stable_before;
            __syncthreads();
            if (warp == 0 && lane == 0) {
                int mark = piece / pieces_per_look;
                shared.goes_on = arrive(marks.mark(mark), REACHED) == sharing(mark);
            }
            __syncthreads();
            if (!shared.goes_on) return 0;
        }
    }
};
