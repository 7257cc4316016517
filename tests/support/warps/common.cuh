// Warps on a CPU: stands in for common.cuh of the kernels, for code without asynchronous copies and clusters. Every lane
// is a thread. Functions of a warp exchange values between two barriers; a lane that does not call them hangs the test.
#pragma once
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define DEVICE inline
#define __device__
#define __noinline__
#define __global__
#define __shared__
#define __align__(bytes)
#define __launch_bounds__(...)
#define __grid_constant__

#define BF16 0
#define FP16 1
#define FP8 2
#define INT8 3
#define SKETCH 4
#define QUARTERS 5
#define FP32 6
#define LEVELED 7
#define INFINITY_F __int_as_float(0x7f800000)

struct uint4 { u32 x, y, z, w; };
struct uint2 { u32 x, y; };
struct int4 { int x, y, z, w; };
struct int2 { int x, y; };
struct float4 { float x, y, z, w; };
struct float2 { float x, y; };

constexpr int WARP = 32;
constexpr u32 FULL = 0xffffffffu;

inline constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline constexpr int padded(int head_size) { return ceil_div(head_size, 64) * 64; }
template <int HEAD_SIZE>
inline constexpr bool in_head(int element) { return HEAD_SIZE % 64 == 0 || element < HEAD_SIZE; }
template <typename A, typename B>
inline auto max(A a, B b) { return a > b ? a : b; }
template <typename A, typename B>
inline auto min(A a, B b) { return a < b ? a : b; }

// The threads of a block, and the block.
struct Index { int x, y, z; };
inline thread_local Index threadIdx;
inline Index blockIdx, gridDim{1, 1, 1};
inline void depend_on_previous() {}
inline void release_next() {}
struct Lanes {
    std::barrier<> barrier{WARP};
    u64 one[WARP];
    u32 operands[WARP][6];
};
inline std::vector<std::unique_ptr<Lanes>> warps;
inline std::barrier<>* block;

// Calls `f()` for each thread of a block of `count` warps.
template <typename F>
inline void run_block(int count, F f) {
    warps.clear();
    for (int w = 0; w < count; w++) warps.emplace_back(new Lanes);
    std::barrier<> all(count * WARP);
    block = &all;
    std::vector<std::thread> threads;
    for (int t = 0; t < count * WARP; t++)
        threads.emplace_back([=] {
            threadIdx.x = t;
            f();
        });
    for (auto& thread : threads) thread.join();
}

inline Lanes& lanes() { return *warps[threadIdx.x / WARP]; }
inline int lane_id() { return threadIdx.x % WARP; }
inline void __syncthreads() { block->arrive_and_wait(); }
inline void __syncwarp() { lanes().barrier.arrive_and_wait(); }

// Returns what `f` makes of the values of all lanes.
template <typename F>
inline auto together(u64 value, F f) {
    lanes().one[lane_id()] = value;
    __syncwarp();
    auto found = f(lanes().one);
    __syncwarp();
    return found;
}

template <typename T>
inline T __shfl_sync(u32, T value, int from) {
    u64 bits = 0;
    memcpy(&bits, &value, sizeof(T));
    bits = together(bits, [=](const u64* all) { return all[from & (WARP - 1)]; });
    memcpy(&value, &bits, sizeof(T));
    return value;
}
template <typename T>
inline T __shfl_xor_sync(u32, T value, int mask) { return __shfl_sync(FULL, value, lane_id() ^ mask); }
template <typename T>
inline T __shfl_up_sync(u32, T value, int by) { return __shfl_sync(FULL, value, lane_id() < by ? lane_id() : lane_id() - by); }
inline u32 __ballot_sync(u32, bool vote) {
    return together(vote, [](const u64* all) {
        u32 bits = 0;
        for (int i = 0; i < WARP; i++) bits |= (u32)all[i] << i;
        return bits;
    });
}
template <typename T>
inline T __reduce_add_sync(u32, T value) {
    return together((u64)(i64)value, [](const u64* all) {
        i64 sum = 0;
        for (int i = 0; i < WARP; i++) sum += (i64)all[i];
        return (T)sum;
    });
}

template <typename T>
inline T __reduce_min_sync(u32, T value) {
    return together((u64)value, [](const u64* all) { return (T)*std::min_element(all, all + WARP); });
}

// An m16n8k32 product. Lane (g, t) has rows g and g + 8, columns 2t and 2t + 1.
inline void mma_s8_u8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    u32 mine[6] = {a0, a1, a2, a3, b0, b1};
    memcpy(lanes().operands[lane_id()], mine, sizeof(mine));
    __syncwarp();
    auto byte = [](u32 word, int k) { return (u8)(word >> 8 * (k % 4)); };
    auto of = [&](int outer, int k, int operand) { return byte(lanes().operands[outer * 4 + k % 16 / 4][operand], k); };
    int g = lane_id() / 4, t = lane_id() % 4;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 32; k++)
            c[i] += (int)(int8_t)of(g, k, (i >= 2) + 2 * (k >= 16)) * (int)of(2 * t + i % 2, k, 4 + (k >= 16));
    __syncwarp();
}
inline void mma_s8(int (&)[4], u32, u32, u32, u32, u32, u32) { abort(); }

inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __clz(int x) { return __builtin_clz(x); }
inline u32 __vmaxu2(u32 a, u32 b) { return max(a & 0xffff, b & 0xffff) | max(a >> 16, b >> 16) << 16; }
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
    u64 both = (u64)b << 32 | a;
    u32 found = 0;
    for (int i = 0; i < 4; i++) found |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return found;
}
inline int __ffs(u32 x) { return __builtin_ffs(x); }
inline int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(u32 x) { return __int_as_float((int)x); }
inline int __float2int_rn(float x) { return x != x ? 0 : (int)lrintf(x); }
// Compiled without contraction, so that each operation is rounded.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline u32 __float2uint_rn(float x) { return x != x ? 0 : (u32)llrintf(x); }
inline u32 __float2uint_ru(float x) { return x != x ? 0 : (u32)ceilf(x); }
inline float fast_exp2(float x) { return exp2f(x); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }

// Loads must be aligned, as on a GPU.
template <typename T>
inline T aligned_load(const void* p) {
    if ((u64)p % sizeof(T)) abort();
    T value;
    memcpy(&value, p, sizeof(T));
    return value;
}
template <bool AHEAD = false>
inline uint4 load16(const void* p) { return aligned_load<uint4>(p); }
template <bool AHEAD = false>
inline uint2 load8(const void* p) { return aligned_load<uint2>(p); }
inline u64 load_relaxed(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline u64 atomicCAS(u64* p, u64 expected, u64 desired) {
    __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
inline u64 atomicAdd(u64* p, u64 value) { return __atomic_fetch_add(p, value, __ATOMIC_RELAXED); }
inline void atomicAdd(int* p, int value) { __atomic_fetch_add(p, value, __ATOMIC_RELAXED); }
inline int append(int* counter, int n) { return __atomic_fetch_add(counter, n, __ATOMIC_RELAXED); }
inline void count_down_if_below(int& count, u32 a, u32 b) { count -= a < b; }
inline u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <typename T>
inline T __ldg(const T* p) { return *p; }
inline void prefetch(const void*) {}

inline float bf16_to_float(u32 bits) { return __uint_as_float(bits << 16); }
inline u32 to_bf16(float x) {
    u32 bits = (u32)__float_as_int(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_bf16(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
inline u32 larger_or_nan(u32 a, u32 b) {
    float x = bf16_to_float(a), y = bf16_to_float(b);
    return x != x || y != y ? 0x7fff : x > y ? a : b;
}
inline u32 ordered_pair(u32 scores) {
    u32 keys = 0;
    for (int i = 0; i < 2; i++) {
        u32 bits = scores >> 16 * i & 0xffff;
        if ((bits & 0x7fff) > 0x7f80) bits = 0xff80;
        if (bits == 0x8000) bits = 0;
        keys |= (bits & 0x8000 ? bits ^ 0xffff : bits | 0x8000) << 16 * i;
    }
    return keys;
}
inline u32 fp8_pair_to_fp16(u16) { abort(); }
inline u32 max_or_nan_bf16(u32 a, u32 b) {
    return larger_or_nan(a & 0xffff, b & 0xffff) | larger_or_nan(a >> 16, b >> 16) << 16;
}
// Products of bfloat16, m16n8k16 and m16n8k8. Lane (g, t) has rows g and g + 8, columns 2t and 2t + 1.
template <int K>
inline void multiply_bf16(float (&c)[4], const u32 (&mine)[6]) {
    memcpy(lanes().operands[lane_id()], mine, sizeof(mine));
    __syncwarp();
    auto half = [](int outer, int k, int operand) {
        return bf16_to_float(lanes().operands[outer * 4 + k % 8 / 2][operand] >> 16 * (k % 2) & 0xffff);
    };
    int g = lane_id() / 4, t = lane_id() % 4;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < K; k++) c[i] += half(g, k, (i >= 2) + 2 * (k >= 8)) * half(2 * t + i % 2, k, 4 + (k >= 8));
    __syncwarp();
}
template <int FORMAT>
inline void mma_k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (FORMAT != BF16) abort();
    multiply_bf16<16>(c, {a0, a1, a2, a3, b0, b1});
}
template <int FORMAT>
inline void mma_k8(float (&c)[4], u32 a0, u32 a1, u32 b0) {
    if (FORMAT != BF16) abort();
    multiply_bf16<8>(c, {a0, a1, 0, 0, b0, 0});
}
template <int FORMAT>
inline u32 pack_pair(float low, float high) { return pack_bf16(low, high); }
template <int FORMAT>
inline float load_float(const void* p, i64 i) { return bf16_to_float(((const u16*)p)[i]); }
inline u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
inline u32 word(const uint2& v, int i) { return i == 0 ? v.x : v.y; }
inline float warp_sum(float x) {
    for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(FULL, x, offset);
    return x;
}
inline float warp_max(float x) {
    for (int offset = 16; offset; offset /= 2) x = fmaxf(x, __shfl_xor_sync(FULL, x, offset));
    return x;
}

// As in common.cuh.
template <int GROUP>
struct Heads {
    static constexpr int TILES = ceil_div(GROUP, 8);
    static constexpr int ROWS = 8 * TILES;
    static constexpr bool POWER_OF_TWO = (GROUP & (GROUP - 1)) == 0;
    static constexpr int DISTINCT = GROUP >= 8 || !POWER_OF_TWO ? 8 : GROUP;
    static int of_row(int row) { return POWER_OF_TWO && GROUP < 8 ? row % GROUP : row < GROUP ? row : GROUP - 1; }
};
template <int QUERY, int GROUP, int HEAD_SIZE>
inline void load_row(const void* query, i64 first, i64 head_stride, int row, int lane, float (&x)[padded(HEAD_SIZE) / WARP]) {
    constexpr int PER_LANE = padded(HEAD_SIZE) / WARP;
    i64 start = first + Heads<GROUP>::of_row(row) * head_stride + lane * PER_LANE;
    for (int i = 0; i < PER_LANE; i++)
        x[i] = in_head<HEAD_SIZE>(lane * PER_LANE + i) ? load_float<QUERY>(query, start + i) : 0.0f;
}

// One thread block has a row.
template <int SIZE>
struct Cluster {
    static_assert(SIZE == 1, "there are no clusters");
    static int rank() { return 0; }
    static void arrive() {}
    static void wait() {}
    static void sync() { __syncthreads(); }
    template <typename T>
    static void store(T* local, int, const T& v) { *local = v; }
};

// Reads a file to memory that is aligned like that of a GPU.
inline u8* contents(const char* name) {
    FILE* file = fopen(name, "rb");
    if (!file) abort();
    fseek(file, 0, SEEK_END);
    size_t size = ftell(file);
    rewind(file);
    u8* memory = (u8*)aligned_alloc(256, (size + 511) / 256 * 256);
    if (fread(memory, 1, size, file) != size) abort();
    fclose(file);
    return memory;
}
