// Thread blocks of one launch exchange numbers and sums through memory.
#pragma once
#include "common.cuh"

// The `stride` numbers that the thread blocks of a row share. They are zero between launches: the stop of the row (0
// while unknown), the number of marks in use, and the marks.
struct RowMarks {
    int* numbers;

    static DEVICE int stride(int pieces) { return 2 + pieces; }
    DEVICE int* stop() const { return numbers; }
    DEVICE int* used() const { return numbers + 1; }
    DEVICE int* mark(int piece) const { return numbers + 2 + piece; }
};

// These loads bypass the cache of the multiprocessor, which does not see the writes of other thread blocks.
DEVICE int load_shared(const int* p) {
    int v;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

DEVICE int load_acquire(const int* p) {
    int v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

DEVICE float load_shared(const float* p) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}

DEVICE float2 load_shared(const float2* p) {
    float2 v;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
    return v;
}

DEVICE float4 load_shared(const float4* p) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
}

DEVICE void store_shared(int* p, int v) { asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }

// One thread calls this between two barriers. It releases what all threads wrote before the first
// barrier. Reads of all threads after the second barrier see what earlier callers released.
DEVICE int arrive(int* mark, int who) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(mark), "r"(who) : "memory");
    return before;
}
