// One thread block selects exactly the k largest bfloat16 scores of a row. Ties go to the lowest page.
//
// Samples give a floor that at least k scores reach: the largest score of each thread, or of a quarter of its scores.
// Little more than k scores reach it, and each of these is compared with all others. If many more reach it (large k,
// equal scores), two rounds of 8-bit radix over all scores come first.
#pragma once
#include "common.cuh"

constexpr int BUCKETS = 256;
// Also the largest k. Pages of a row have 16-bit numbers.
constexpr int MAX_CANDIDATES = 1024;
// Keys are ordered like scores. A missing page is below every score, an always-selected page above.
constexpr u32 KEY_ABSENT = 0;
constexpr u32 KEY_ALWAYS = 0xffff;

// NaN ranks like -inf, -0 like 0.
DEVICE u32 ordered_key(u32 bits) {
    if ((bits & 0x7fff) > 0x7f80) bits = 0xff80;
    if (bits == 0x8000) bits = 0;
    return bits & 0x8000 ? bits ^ 0xffff : bits | 0x8000;
}

// Returns the bucket of the `wanted`-th largest entry, and its rank in the bucket. Every warp computes it separately.
__device__ __noinline__ int2 find_bucket(const int* counts, int wanted, int lane) {
    constexpr int PER_LANE = BUCKETS / WARP;
    const int4* eight = (const int4*)(counts + BUCKETS - PER_LANE * (lane + 1));
    int4 low = eight[0], high = eight[1];
    int sums[PER_LANE] = {high.w, high.z, high.y, high.x, low.w, low.z, low.y, low.x};
#pragma unroll
    for (int i = 1; i < PER_LANE; i++) sums[i] += sums[i - 1];
    int inclusive = sums[PER_LANE - 1];
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        int below = __shfl_up_sync(FULL, inclusive, offset);
        if (lane >= offset) inclusive += below;
    }
    int lane_rank = wanted - (inclusive - sums[PER_LANE - 1]), skipped = 0, index = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE - 1; i++)
        if (sums[i] < lane_rank) skipped = sums[i], index = i + 1;
    // The first lane whose sum reaches `wanted` has the bucket.
    int source = __ffs(__ballot_sync(FULL, inclusive >= wanted)) - 1;
    return {__shfl_sync(FULL, BUCKETS - 1 - lane * PER_LANE - index, source), __shfl_sync(FULL, lane_rank - skipped, source)};
}

// Eight consecutive keys of a shared array.
struct EightKeys {
    uint4 v;
    DEVICE explicit EightKeys(const u16* keys) : v(*(const uint4*)keys) {}
    DEVICE u32 operator[](int i) const { return i % 2 ? word(v, i / 2) >> 16 : word(v, i / 2) & 0xffff; }
};

// Reads a row of scores as keys, padded with KEY_ABSENT to a multiple of eight.
DEVICE void load_keys(const u16* scores, int count, u16* keys, int thread, int threads) {
    constexpr int IN_FLIGHT = 4;
#pragma unroll 1
    for (int base = 8 * thread; base < count; base += 8 * threads * IN_FLIGHT) {
        uint4 v[IN_FLIGHT];
#pragma unroll
        for (int n = 0; n < IN_FLIGHT; n++) v[n] = load16(scores + min(base + 8 * n * threads, (count - 1) & ~7));
#pragma unroll
        for (int n = 0; n < IN_FLIGHT; n++) {
            int i = base + 8 * n * threads;
            if (i >= count) break;
            u32 out[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                out[j] = ordered_pair(word(v[n], j));
            *(uint4*)(keys + i) = uint4{out[0], out[1], out[2], out[3]};
#pragma unroll 1
            for (int j = count; j < i + 8; j++) keys[j] = KEY_ABSENT;
        }
    }
}

// Marks the pages that are always selected.
DEVICE void mark_always(u16* keys, int count, int sink_pages, int recent_pages, int thread, int threads) {
#pragma unroll 1
    for (int i = thread; i < sink_pages + recent_pages; i += threads)
        keys[i < sink_pages ? i : count - recent_pages - sink_pages + i] = KEY_ALWAYS;
}

// Counts the numbers above a given one in four chains of additions. The compiler would make one chain of twice the
// length.
struct LargerCount {
    int less[4] = {0, 0, 0, 0};

    DEVICE void add(const uint4& four, u32 number) {
#pragma unroll
        for (int i = 0; i < 4; i++) count_down_if_below(less[i], number, word(four, i));
    }

    DEVICE int count() const { return -(less[0] + less[1] + less[2] + less[3]); }
};

// The keys of a row in shared memory. The padding to a multiple of eight is KEY_ABSENT.
template <int WARPS>
struct SharedKeys {
    // Consecutive keys that a thread reads together.
    static constexpr int RUN = 4;
    const u16* keys;
    int padded;
    int thread;

    // Calls `f(pairs of keys, index of the first)` for this thread's runs.
    template <typename F>
    DEVICE void for_each_run(F f) const {
#pragma unroll 2
        for (int i = RUN * thread; i < padded; i += RUN * WARPS * WARP) {
            uint2 four = *(const uint2*)(keys + i);
            u32 pairs[RUN / 2] = {four.x, four.y};
            f(pairs, i);
        }
    }

    // Returns where all keys are in shared memory.
    DEVICE const u16* spilled() const { return keys; }
};

// Selection from a row of at most 2^16 keys by a thread block of WARPS warps.
template <int WARPS>
struct Select {
    static constexpr int THREADS = WARPS * WARP;
    // Up to four threads keep this many reads of candidates in flight. They may read SPARE candidates beyond the last
    // one, which are zero.
    static constexpr int LOADS = 4, SPARE = 16 * LOADS;
    // Samples of the keys of a thread, which come in pairs.
    static constexpr int SAMPLES = 4;

    struct Shared {
        // A candidate is a key, then the page counted from the end. It is unique, and larger is better.
        u32 candidates[MAX_CANDIDATES + SPARE];
        // At first the largest key of every thread, later the counts of `radix`.
        union {
            u32 largest[WARPS][WARP];
            int counts[2][BUCKETS];
        };
        int2 shares[WARPS];
        u32 floors[WARP];
        int num_candidates;

        // All threads see it cleared after a barrier.
        DEVICE void clear(int thread) {
#pragma unroll 1
            for (int i = 4 * thread; i < MAX_CANDIDATES + SPARE; i += 4 * THREADS)
                *(uint4*)(candidates + i) = uint4{0, 0, 0, 0};
            if (thread < WARP) floors[thread] = KEY_ALWAYS;
            if (thread == 0) num_candidates = 0;
        }
    };

    Shared& shared;
    int k;  // At least k keys are pages.
    int warp;
    int lane;

    // Lists candidates: all pages that reach a floor, at least k, or exactly the k best. Returns their number. `shared` is
    // clear; all threads see the list.
    template <typename Keys>
    DEVICE int list(const Keys& keys) {
        u32 floor = find_floor(keys), below = (floor - 1) * 0x10001u;
        keys.for_each_run([&](const auto& pairs, int page) {
            constexpr int RUN = Keys::RUN;
            u32 best = pairs[0];
#pragma unroll
            for (int j = 1; j < RUN / 2; j++) best = __vmaxu2(best, pairs[j]);
            if (__vmaxu2(best, below) == below) return;
            auto key = [&](int j) { return j % 2 ? pairs[j / 2] >> 16 : pairs[j / 2] & 0xffff; };
            u32 reach = 0;
#pragma unroll
            for (int j = 0; j < RUN; j++) reach |= (u32)(key(j) >= floor) << j;
            int slot = append(&shared.num_candidates, __popc(reach));
#pragma unroll
            for (int j = 0; j < RUN; j++) {
                if (!(reach >> j & 1)) continue;
                if (slot < MAX_CANDIDATES) shared.candidates[slot] = key(j) << 16 | (0xffff - page - j);
                slot++;
            }
        });
        __syncthreads();
        int count = shared.num_candidates;
        if (count <= MAX_CANDIDATES) return count;
        radix(shared, keys.spilled(), keys.padded, k);
        return k;
    }

    // Calls `emit(slot, page)` for the selected pages, slots by descending score. `shared` is clear.
    template <typename Keys, typename Emit>
    DEVICE void run(const Keys& keys, Emit emit) {
        int thread = warp * WARP + lane, count = list(keys);
        // Several threads rank a candidate if there are enough threads.
        int log = THREADS >= 4 * count ? 2 : THREADS >= 2 * count, parts = 1 << log, part = thread & parts - 1;
#pragma unroll 1
        for (int first = 0; first < count; first += THREADS >> log) {
            int c = first + (thread >> log);
            u32 candidate = c < count ? shared.candidates[c] : 0xffffffffu;
            LargerCount larger;
#pragma unroll 1
            for (int i = 4 * part; i < count; i += 4 * LOADS * parts) {
                uint4 four[LOADS];
#pragma unroll
                for (int n = 0; n < LOADS; n++) four[n] = *(const uint4*)(shared.candidates + i + 4 * n * parts);
#pragma unroll
                for (int n = 0; n < LOADS; n++) larger.add(four[n], candidate);
            }
            int rank = larger.count();
            if (parts > 1) rank += __shfl_xor_sync(FULL, rank, 1);
            if (parts > 2) rank += __shfl_xor_sync(FULL, rank, 2);
            if (part == 0 && c < count && rank < k) emit(rank, 0xffff - (candidate & 0xffff));
        }
    }

private:
    // Returns a key that at least k keys reach, and not many more. Each warp has a share of k, and finds its
    // `share`-th largest sample. The smallest of these samples is the floor. A sample is the largest key of a thread.
    // For a large share it is the largest of a quarter of a thread's keys, because too few threads would be below it.
    template <typename Keys>
    DEVICE u32 find_floor(const Keys& keys) {
        // The number of active warps is a power of two, which saves a division.
        int log = 31 - __clz(min(WARPS, keys.padded / (Keys::RUN * WARP))), active = 1 << log, share = (k + active - 1) >> log;
        if (log < 0 || share > SAMPLES * WARP) return KEY_ABSENT + 1;
        u32 samples[SAMPLES / 2] = {KEY_ABSENT, KEY_ABSENT};
        keys.for_each_run([&](const auto& pairs, int) {
#pragma unroll
            for (int j = 0; j < Keys::RUN / 2; j++) samples[j % 2] = __vmaxu2(samples[j % 2], pairs[j]);
        });
        u32 floor = share <= WARP / SAMPLES ? floor_of_threads(__vmaxu2(samples[0], samples[1]), share)
                                            : floor_of_quarters(samples, share);
        if (floor != KEY_ALWAYS + 1 && warp < active) shared.floors[warp] = floor;
        __syncthreads();
        return max(__reduce_min_sync(FULL, shared.floors[lane]), KEY_ABSENT + 1);
    }

    // Returns the warp's `share`-th largest of the threads' largest keys to the lane that has it, KEY_ALWAYS + 1 to
    // others.
    DEVICE u32 floor_of_threads(u32 pair, int share) {
        u32 best = max(pair & 0xffff, pair >> 16) << 5 | (u32)lane;
        u32* largest = shared.largest[warp];
        largest[lane] = best;
        __syncwarp();
        LargerCount larger;
#pragma unroll
        for (int i = 0; i < WARP; i += 4) larger.add(*(const uint4*)(largest + i), best);
        return larger.count() == share - 1 ? best >> 5 : KEY_ALWAYS + 1;
    }

    // Returns the warp's `share`-th largest sample to all of its lanes, by bisection.
    DEVICE u32 floor_of_quarters(const u32 (&samples)[SAMPLES / 2], int share) {
        u32 floor = 0;
#pragma unroll 1
        for (u32 bit = 0x8000; bit; bit >>= 1) {
            u32 tried = floor | bit, reach = 0;
#pragma unroll
            for (int j = 0; j < SAMPLES; j++) reach += (j % 2 ? samples[j / 2] >> 16 : samples[j / 2] & 0xffff) >= tried;
            if (__reduce_add_sync(FULL, reach) >= (u32)share) floor = tried;
        }
        return floor;
    }

    // Lists exactly the k best, in two rounds over the bytes of all keys.
    static __device__ __noinline__ void radix(Shared& shared, const u16* keys, int padded, int k) {
        int thread = threadIdx.x;
        __syncthreads();
        for (int i = thread; i < 2 * BUCKETS; i += THREADS) shared.counts[i / BUCKETS][i % BUCKETS] = 0;
        __syncthreads();
        int2 high = count_bytes(keys, padded, shared.counts[0], -1, k);
        int2 low = count_bytes(keys, padded, shared.counts[1], high.x, high.y);
        compact(shared, keys, padded, (u32)high.x << 8 | (u32)low.x, low.y, k);
    }

    // Counts the high bytes of all keys (`high` is -1), or the low bytes of the keys with this high byte.
    static DEVICE int2 count_bytes(const u16* keys, int padded, int* counts, int high, int wanted) {
#pragma unroll 1
        for (int i = threadIdx.x; i < padded; i += THREADS) {
            u32 key = keys[i];
            if (high < 0) atomicAdd(counts + (key >> 8), 1);
            else if (key >> 8 == high) atomicAdd(counts + (key & 0xff), 1);
        }
        __syncthreads();
        return find_bucket(counts, wanted, threadIdx.x % WARP);
    }

    // Lists the keys above the threshold, and the first `ties` keys at it.
    static DEVICE void compact(Shared& shared, const u16* keys, int padded, u32 threshold, int ties, int k) {
        int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        // A warp's share of the keys is a multiple of the keys that it reads at once.
        int share = ceil_div(ceil_div(padded, WARPS), 8) * 8;
        int begin = min(warp * share, padded), end = min(begin + share, padded);
        int above = 0, equal = 0;
#pragma unroll 1
        for (int i = begin + 8 * lane; i < end; i += 8 * WARP) {
            EightKeys eight(keys + i);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                above += eight[j] > threshold;
                equal += eight[j] == threshold;
            }
        }
        above = __reduce_add_sync(FULL, above), equal = __reduce_add_sync(FULL, equal);
        if (lane == 0) shared.shares[warp] = {above, equal};
        __syncthreads();
        above = equal = 0;
#pragma unroll 1
        for (int w = 0; w < warp; w++) above += shared.shares[w].x, equal += shared.shares[w].y;
#pragma unroll 1
        for (int base = begin; base < end; base += 8 * WARP) {
            int i = base + 8 * lane;
            EightKeys eight(keys + min(i, end - 8));
            u32 greater = 0, tie = 0;
            if (i < end) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    greater |= (u32)(eight[j] > threshold) << j;
                    tie |= (u32)(eight[j] == threshold) << j;
                }
            }
            u32 lane_counts = __popc(greater) | __popc(tie) << 16, before = lane_counts;
#pragma unroll
            for (int offset = 1; offset < WARP; offset *= 2) {
                u32 preceding = __shfl_up_sync(FULL, before, offset);
                if (lane >= offset) before += preceding;
            }
            u32 sum = __shfl_sync(FULL, before, WARP - 1);
            before -= lane_counts;
            int a = above + (before & 0xffff), e = equal + (before >> 16);
#pragma unroll 1
            for (u32 listed = greater | tie; listed; listed &= listed - 1) {
                int j = __ffs(listed) - 1;
                bool is_tie = tie >> j & 1;
                if (!is_tie || e < ties)
                    shared.candidates[a + min(e, ties)] = (u32)keys[i + j] << 16 | (0xffff - (i + j));
                a += !is_tie;
                e += is_tie;
            }
            above += sum & 0xffff;
            equal += sum >> 16;
        }
        if (threadIdx.x < SPARE) shared.candidates[k + threadIdx.x] = 0;
        __syncthreads();
    }
};
