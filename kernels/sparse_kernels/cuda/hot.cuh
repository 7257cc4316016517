// Copies of cache pages in device memory, for a cache in host memory. No output depends on them.
//
// A page hashes to a set of places. The tag of a place has the page of its copy and the step that last read it. A thread
// block keeps a place for the rest of the launch by an atomic change of its tag, so no other thread block replaces a
// copy that is read.
#pragma once
#include "params.cuh"

template <int PAGE_BYTES, int WARPS>
struct HotPages {
    static constexpr int WAYS = 8, PER_WARP = WARP / WAYS, LOADS = 4;
    static_assert(PAGE_BYTES % 16 == 0, "a copy takes 16 bytes at a time");

    u8* rows;
    u64* tags;
    u64* counters;
    u32 now;
    u32 sets;

    DEVICE HotPages(const HotParams& p, int head)
        : rows(p.rows + head * (i64)p.sets * WAYS * PAGE_BYTES), tags(p.tags + head * (i64)p.sets * WAYS),
          counters(p.counters + 2 * head), now((u32)*p.clock), sets(p.sets) {}

    // The set of a page, as `hot_pages.set_of` has it.
    DEVICE u32 set_of(u32 page) const { return __umulhi(page * 2654435761u, sets); }

    DEVICE u64 tag(u32 page, bool filling) const { return (u64)(now << 1 | (u32)filling) << 32 | (page + 1); }

    DEVICE void copy(u32 place, const u8* from, int lane) const {
        uint4* to = (uint4*)(rows + (i64)place * PAGE_BYTES);
#pragma unroll 1
        for (int first = lane; first < PAGE_BYTES / 16; first += LOADS * WARP) {
            uint4 words[LOADS];
#pragma unroll
            for (int n = 0; n < LOADS; n++)
                if (first + n * WARP < PAGE_BYTES / 16) words[n] = load16(from + 16 * (first + n * WARP));
#pragma unroll
            for (int n = 0; n < LOADS; n++)
                if (first + n * WARP < PAGE_BYTES / 16) to[first + n * WARP] = words[n];
        }
    }

    // Finds or makes copies of `count` pages with all warps of a thread block, which reads them after a barrier.
    // `page_of(i)` returns the number of page i in the whole cache, `address_of(page)` its tokens, and `found(i, place)`
    // is told where its copy is. Pages without a copy, because others need the places of their set, are read where they
    // are.
    template <typename PageOf, typename AddressOf, typename Found>
    DEVICE void find(int count, int warp, int lane, PageOf page_of, AddressOf address_of, Found found) const {
        int way = lane % WAYS, leader = lane - way, misses = 0;
        u32 of_page = ((1u << WAYS) - 1) << leader;
        bool filled = false;
#pragma unroll 1
        for (int first = warp * PER_WARP; first < count; first += WARPS * PER_WARP) {
            int i = first + lane / WAYS;
            bool exists = i < count;
            u32 page = exists ? page_of(i) : 0, set = set_of(page);
            u64* at = tags + (i64)set * WAYS + way;
            u64 seen = exists ? load_relaxed(at) : 0;
            u32 stamp = (u32)(seen >> 32);
            u32 same = __ballot_sync(FULL, exists && (u32)seen == page + 1) & of_page;
            // The oldest place is replaced, unless this step reads all of them.
            u64 oldest = (u64)(stamp >> 1 == now ? 0xffffffffu : stamp) << 32 | (u32)lane;
#pragma unroll
            for (int offset = WAYS / 2; offset; offset /= 2) {
                u64 other = __shfl_xor_sync(FULL, oldest, offset);
                oldest = other < oldest ? other : oldest;
            }
            int chosen = same ? __ffs(same) - 1 : (u32)(oldest >> 32) == 0xffffffffu ? -1 : (int)(u32)oldest;
            bool kept = false;
            if (exists && lane == chosen) {
                if (same && stamp >> 1 == now) {
                    // While another thread block fills it, nobody else reads a copy.
                    kept = !(stamp & 1);
                } else {
                    u64 mine = tag(page, !same), old = atomicCAS(at, seen, mine);
                    kept = old == seen || (same && old == mine);
                }
            }
            u32 fills = __ballot_sync(FULL, kept && !same);
            u32 hits = __ballot_sync(FULL, kept && same);
            // `found` may write what `page_of` has read for other lanes.
            __syncwarp();
            if (kept) found(i, set * WAYS + way);
            misses += __popc(__ballot_sync(FULL, exists && lane == leader && !(hits & of_page)));
            filled |= fills != 0;
#pragma unroll 1
            for (; fills; fills &= fills - 1) {
                int source = __ffs(fills) - 1;
                u32 of_source = __shfl_sync(FULL, page, source), place = __shfl_sync(FULL, set * WAYS + way, source);
                copy(place, address_of(of_source), lane);
            }
        }
        if (filled) __threadfence();
        if (lane == 0 && misses) atomicAdd(counters + 1, (u64)misses);
    }
};
