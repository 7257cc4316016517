// The blocks of one launch tell each other numbers and sums through memory.
#pragma once
#include "common.cuh"

// The blocks of a row share `stride` numbers that are zero between launches: where the row stops (0 until that is known),
// how many marks are in use, and the marks.
struct RowMarks {
    int* numbers;

    static DEVICE int stride(int pieces) { return 2 + pieces; }
    DEVICE int* stop() const { return numbers; }
    DEVICE int* used() const { return numbers + 1; }
    DEVICE int* mark(int piece) const { return numbers + 2 + piece; }
};

// These loads go past the cache of the multiprocessor, which other blocks do not write to.
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

// One thread calls this between two barriers. It releases what all threads wrote before the first, and acquires what they
// read after the second.
DEVICE int arrive(int* mark, int who) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(mark), "r"(who) : "memory");
    return before;
}
