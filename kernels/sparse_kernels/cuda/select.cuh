// Exact selection of the k largest bfloat16 scores of a row by one block, ties to the lowest page.
//
// A floor that at least k scores reach is found from a sample: the largest of each thread's scores. What reaches it is
// little more than k, and is ranked by comparing each with each. Where it is much more (large k, equal scores), two
// rounds of 8-bit radix over all scores go first.
#pragma once
#include "common.cuh"

constexpr int BUCKETS = 256;
// Also the largest k. Pages of a row are numbered in 16 bits.
constexpr int MAX_CANDIDATES = 1024;
// Keys order like scores. Below every score: a page that does not exist. Above: one that is always selected.
constexpr u32 KEY_ABSENT = 0;
constexpr u32 KEY_ALWAYS = 0xffff;

// NaN ranks like -inf, -0 like 0.
DEVICE u32 ordered_key(u32 bits) {
    if ((bits & 0x7fff) > 0x7f80) bits = 0xff80;
    if (bits == 0x8000) bits = 0;
    return bits & 0x8000 ? bits ^ 0xffff : bits | 0x8000;
}

// The bucket that holds the `wanted`-th largest entry and its rank there; every warp computes it for itself.
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
    int rest = wanted - (inclusive - sums[PER_LANE - 1]), skipped = 0, index = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE - 1; i++)
        if (sums[i] < rest) skipped = sums[i], index = i + 1;
    // The first lane whose sum reaches `wanted` holds the bucket.
    int source = __ffs(__ballot_sync(FULL, inclusive >= wanted)) - 1;
    return {__shfl_sync(FULL, BUCKETS - 1 - lane * PER_LANE - index, source), __shfl_sync(FULL, rest - skipped, source)};
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
                out[j] = ordered_key(word(v[n], j) & 0xffff) | ordered_key(word(v[n], j) >> 16) << 16;
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

// Selection from a row of at most 2^16 keys in shared memory by a block of WARPS warps.
template <int WARPS>
struct Select {
    static constexpr int THREADS = WARPS * WARP;

    // Zero at the start.
    struct Shared {
        // Key, then page from the end: unique, and larger the better.
        u32 candidates[MAX_CANDIDATES + 4];
        int high[BUCKETS];
        int low[BUCKETS];
        int2 counts[WARPS];
        u32 floors[WARPS];
        int found;

        DEVICE void clear(int thread) {
            constexpr int WORDS = MAX_CANDIDATES + 4 + 2 * BUCKETS;
            for (int i = 4 * thread; i < WORDS; i += 4 * THREADS) *(uint4*)(candidates + i) = uint4{0, 0, 0, 0};
            if (thread == 0) found = 0;
        }
    };

    Shared& shared;
    const u16* keys;
    int padded;  // Keys, a multiple of eight; those that stand for no page are KEY_ABSENT.
    int k;       // At least as many keys are not.
    int warp;
    int lane;

    // Calls `emit(slot, page)` for the selected pages, slots by descending score. All threads have seen the keys.
    template <typename Emit>
    DEVICE void run(Emit emit) {
        int thread = warp * WARP + lane;
        u32 floor = find_floor();
#pragma unroll 2
        for (int i = thread; i < padded / 2; i += THREADS) {
            u32 two = ((const u32*)keys)[i];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                u32 key = j ? two >> 16 : two & 0xffff;
                if (key >= floor) {
                    int slot = atomicAdd(&shared.found, 1);
                    if (slot < MAX_CANDIDATES) shared.candidates[slot] = key << 16 | (0xffff - 2 * i - j);
                }
            }
        }
        __syncthreads();
        int count = shared.found;
        if (count > MAX_CANDIDATES) {
            int2 high = radix_round(shared.high, -1, k);
            int2 low = radix_round(shared.low, high.x, high.y);
            compact((u32)high.x << 8 | (u32)low.x, low.y);
            count = k;
        }
#pragma unroll 1
        for (int c = thread; c < count; c += THREADS) {
            u32 own = shared.candidates[c];
            int rank = 0;
#pragma unroll 4
            for (int i = 0; i < count; i += 4) {
                uint4 four = *(const uint4*)(shared.candidates + i);
                rank += (four.x > own) + (four.y > own) + (four.z > own) + (four.w > own);
            }
            if (rank < k) emit(rank, 0xffff - (own & 0xffff));
        }
    }

private:
    // A key that at least k keys reach, and not many more: of the largest keys of a warp's threads, the one that as many
    // threads reach as fall to the warp's share of k; the least of the warps'.
    DEVICE u32 find_floor() {
        int words = padded / 2, active = min(WARPS, words / WARP);
        int share = active ? ceil_div(k, active) : WARP + 1;
        if (share > WARP) return KEY_ABSENT + 1;
        u32 pair = KEY_ABSENT;
#pragma unroll 4
        for (int i = warp * WARP + lane; i < words; i += THREADS) pair = __vmaxu2(pair, ((const u32*)keys)[i]);
        u32 own = max(pair & 0xffff, pair >> 16) << 5 | (u32)lane;
        int rank = 0;
#pragma unroll
        for (int offset = 1; offset < WARP; offset++) rank += __shfl_xor_sync(FULL, own, offset) > own;
        if (rank == share - 1) shared.floors[warp] = own >> 5;
        __syncthreads();
        u32 floor = KEY_ALWAYS;
#pragma unroll 1
        for (int w = 0; w < active; w++) floor = min(floor, shared.floors[w]);
        return max(floor, KEY_ABSENT + 1);
    }

    // One round of radix over all keys: counts their high bytes (`high` is -1), or the low bytes of those whose high
    // byte is given.
    __device__ __noinline__ int2 radix_round(int* counts, int high, int wanted) {
#pragma unroll 1
        for (int i = warp * WARP + lane; i < padded; i += THREADS) {
            u32 key = keys[i];
            if (high < 0) atomicAdd(counts + (key >> 8), 1);
            else if (key >> 8 == high) atomicAdd(counts + (key & 0xff), 1);
        }
        __syncthreads();
        return find_bucket(counts, wanted, lane);
    }

    // Lists the keys above the threshold, and of those at it the first `ties`.
    __device__ __noinline__ void compact(u32 threshold, int ties) {
        // A warp's share of the keys is a multiple of what it reads at once.
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
        if (lane == 0) shared.counts[warp] = {above, equal};
        __syncthreads();
        above = equal = 0;
#pragma unroll 1
        for (int w = 0; w < warp; w++) above += shared.counts[w].x, equal += shared.counts[w].y;
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
            u32 mine = __popc(greater) | __popc(tie) << 16, before = mine;
#pragma unroll
            for (int offset = 1; offset < WARP; offset *= 2) {
                u32 other = __shfl_up_sync(FULL, before, offset);
                if (lane >= offset) before += other;
            }
            u32 sum = __shfl_sync(FULL, before, WARP - 1);
            before -= mine;
            int a = above + (before & 0xffff), e = equal + (before >> 16);
#pragma unroll 1
            for (u32 rest = greater | tie; rest; rest &= rest - 1) {
                int j = __ffs(rest) - 1;
                bool is_tie = tie >> j & 1;
                if (!is_tie || e < ties)
                    shared.candidates[a + min(e, ties)] = (u32)keys[i + j] << 16 | (0xffff - (i + j));
                a += !is_tie;
                e += is_tie;
            }
            above += sum & 0xffff;
            equal += sum >> 16;
        }
        if (warp == 0 && lane < 4) shared.candidates[min(k + lane, MAX_CANDIDATES + 3)] = 0;
        __syncthreads();
    }
};
