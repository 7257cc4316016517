// Types, loads, matrix instructions and cluster primitives of all kernels. NVRTC needs no headers for them.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

// Numbers of element formats, as in launch.py.
#define BF16 0
#define FP16 1
#define FP8 2
#define INT8 3
#define SKETCH 4
#define QUARTERS 5
#define FP32 6
#define LEVELED 7

#define INFINITY_F __int_as_float(0x7f800000)

constexpr int WARP = 32;
constexpr u32 FULL = 0xffffffffu;

DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Kernels compute on heads padded to a multiple of 64 elements. The padding is zero, and exists only in registers and
// shared memory.
DEVICE constexpr int padded(int head_size) { return ceil_div(head_size, 64) * 64; }

template <int HEAD_SIZE>
DEVICE constexpr bool in_head(int element) { return HEAD_SIZE % 64 == 0 || element < HEAD_SIZE; }

// A load with AHEAD is not moved behind a later barrier.
template <bool AHEAD = false>
DEVICE uint4 load16(const void* p) {
    uint4 v;
    if constexpr (AHEAD)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    else
        asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

template <bool AHEAD = false>
DEVICE uint2 load8(const void* p) {
    uint2 v;
    if constexpr (AHEAD)
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    else
        asm("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

// Loads what other thread blocks may change.
DEVICE u64 load_relaxed(const u64* p) {
    u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// A dependent launch may begin before the previous kernel ends. It must call this before it touches memory.
DEVICE void depend_on_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void release_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE float bf16_to_float(u32 bits) { return __uint_as_float(bits << 16); }

DEVICE u32 pack_bf16(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

DEVICE u32 pack_fp16(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

DEVICE float fp16_to_float(u16 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
}

// Converts two e4m3 bytes to two halves. Before compute capability 8.9 there is no instruction for it.
DEVICE u32 fp8_pair_to_fp16(u16 pair) {
#if __CUDA_ARCH__ >= 890
    u32 d;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(pair));
    return d;
#else
    // An e4m3 number shifted into the fields of a half is too small by 2^8, subnormals included.
    u32 wide = ((u32)pair & 0xffu) << 8 | ((u32)pair & 0xff00u) << 16;
    u32 bits = (wide & 0x80008000u) | (wide & 0x7f007f00u) >> 1, d;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(bits), "r"(0x5c005c00u));
    return d;
#endif
}

template <int FORMAT>
DEVICE float load_float(const void* p, i64 i) {
    if constexpr (FORMAT == BF16) return bf16_to_float(((const u16*)p)[i]);
    if constexpr (FORMAT == FP16) return fp16_to_float(((const u16*)p)[i]);
    if constexpr (FORMAT == FP8) return fp16_to_float((u16)fp8_pair_to_fp16(((const u8*)p)[i]));
}

// Packs two numbers in the 16-bit format of the matrix instructions.
template <int FORMAT>
DEVICE u32 pack_pair(float low, float high) {
    return FORMAT == BF16 ? pack_bf16(low, high) : pack_fp16(low, high);
}

// Returns the larger of each half of two pairs of bfloat16, or NaN if either is NaN.
DEVICE u32 max_or_nan_bf16(u32 a, u32 b) {
    u32 d;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

DEVICE float fast_exp2(float x) {
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}

DEVICE void mma_s8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// `mma_s8` with an unsigned second operand.
DEVICE void mma_s8_u8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <int FORMAT>
DEVICE void mma_k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if constexpr (FORMAT == BF16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}

template <int FORMAT>
DEVICE void mma_k8(float (&c)[4], u32 a0, u32 a1, u32 b0) {
    if constexpr (FORMAT == BF16) {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
    } else {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
    }
}

DEVICE u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
DEVICE u32 word(const uint2& v, int i) { return i == 0 ? v.x : v.y; }

DEVICE float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(FULL, x, offset);
    return x;
}

DEVICE float warp_max(float x) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) x = fmaxf(x, __shfl_xor_sync(FULL, x, offset));
    return x;
}

// Adds to a counter in shared memory. The compiler would let one lane add for all, which is slower than all lanes in
// turn.
DEVICE int append(int* counter, int n) {
    int before;
    asm volatile("atom.shared.add.s32 %0, [%1], %2;"
                 : "=r"(before) : "r"((u32)__cvta_generic_to_shared(counter)), "r"(n) : "memory");
    return before;
}

// Returns the keys of two scores (select.cuh).
DEVICE u32 ordered_pair(u32 scores) {
    // The larger of NaN and -inf is -inf; -0 + 0 is 0.
    asm("max.bf16x2 %0, %0, %1;" : "+r"(scores) : "r"(0xff80ff80u));
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(scores) : "r"(0x3f803f80u), "r"(0u));
    return scores ^ ((scores >> 15 & 0x00010001u) * 0xffffu | 0x80008000u);
}

// Subtracts one from `count` if `a` is below `b`.
DEVICE void count_down_if_below(int& count, u32 a, u32 b) {
    u32 difference;
    asm("sub.cc.u32 %0, %2, %3; subc.u32 %1, %1, 0;" : "=&r"(difference), "+r"(count) : "r"(a), "r"(b));
}

DEVICE u32 dynamic_shared_bytes() {
    u32 d;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(d));
    return d;
}

// The query heads of a KV head are the rows of matrix tiles, eight per tile. Spare rows repeat a head, so that the
// maximum over rows is the maximum over heads.
template <int GROUP>
struct Heads {
    static constexpr int TILES = ceil_div(GROUP, 8);
    static constexpr int ROWS = 8 * TILES;
    static constexpr bool POWER_OF_TWO = (GROUP & (GROUP - 1)) == 0;
    // A maximum needs this many rows of a tile; the other rows repeat them.
    static constexpr int DISTINCT = GROUP >= 8 || !POWER_OF_TWO ? 8 : GROUP;
    static DEVICE int of_row(int row) { return POWER_OF_TWO && GROUP < 8 ? row % GROUP : row < GROUP ? row : GROUP - 1; }
};

// Loads the lane's consecutive elements of a row of query heads, which is spread over a warp. Strides are in elements.
template <int QUERY, int GROUP, int HEAD_SIZE>
DEVICE void load_row(const void* query, i64 first, i64 head_stride, int row, int lane, float (&x)[padded(HEAD_SIZE) / WARP]) {
    constexpr int PER_LANE = padded(HEAD_SIZE) / WARP;
    i64 start = first + Heads<GROUP>::of_row(row) * head_stride + lane * PER_LANE;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        x[i] = in_head<HEAD_SIZE>(lane * PER_LANE + i) ? load_float<QUERY>(query, start + i) : 0.0f;
}

// In a cluster (compute capability 9.0 and later) the thread blocks of a row access each other's shared memory. A row
// with one thread block needs no cluster; the functions then serve that thread block.
template <int SIZE>
struct Cluster {
    static DEVICE int rank() {
        if constexpr (SIZE == 1) return 0;
        int r;
        asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
        return r;
    }

    static DEVICE void arrive() {
        if constexpr (SIZE > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    }

    static DEVICE void wait() {
        if constexpr (SIZE > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }

    // When this returns, every thread of the cluster has arrived, and sees the others' writes to shared memory.
    static DEVICE void sync() {
        if constexpr (SIZE == 1) __syncthreads();
        arrive();
        wait();
    }

    static DEVICE u32 address(const void* local, int peer) {
        u32 local_address = (u32)__cvta_generic_to_shared(local), peer_address;
        if constexpr (SIZE == 1) return local_address;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer_address) : "r"(local_address), "r"(peer));
        return peer_address;
    }

    static DEVICE uint4 load(const uint4* local, int peer) {
        if constexpr (SIZE == 1) return *local;
        uint4 v;
        asm volatile("ld.shared::cluster.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address(local, peer)) : "memory");
        return v;
    }

    static DEVICE u32 load(const u32* local, int peer) {
        if constexpr (SIZE == 1) return *local;
        u32 v;
        asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(address(local, peer)) : "memory");
        return v;
    }

    static DEVICE u16 load(const u16* local, int peer) {
        if constexpr (SIZE == 1) return *local;
        u16 v;
        asm volatile("ld.shared::cluster.u16 %0, [%1];" : "=h"(v) : "r"(address(local, peer)) : "memory");
        return v;
    }

    static DEVICE void store(int* local, int peer, int v) {
        if constexpr (SIZE == 1) *local = v;
        else asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(address(local, peer)), "r"(v) : "memory");
    }

    static DEVICE void store(float* local, int peer, float v) { store((int*)local, peer, __float_as_int(v)); }

    static DEVICE void store(float4* local, int peer, const float4& v) {
        if constexpr (SIZE == 1) *local = v;
        else
            asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address(local, peer)), "f"(v.x),
                         "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
    }
};
