// The blocks of a cluster list the k best pages of a row of scores in the order of the pages, however long the row and
// however large k. They bisect the keys for the k-th largest, which takes a count of the row for each bit, then list what is
// above it and the first of those equal to it.
#include "params.cuh"
#include "select.cuh"

constexpr int CLUSTER = SK_CLUSTER, WARPS = SK_WARPS, THREADS = WARPS * WARP;
constexpr int RUN = 8;

using Peers = Cluster<CLUSTER>;

struct ListParams {
    const u16* scores;
    const u8* skipped;  // [rows], 1 for a row that needs no list; null for none.
    int* pages;         // [rows, selection.k]; a list ends behind the pages of its request.
    i64 scores_stride;  // From one row of scores to the next, in elements; a multiple of eight, like the room of a row.
    ContextParams contexts;
    SelectionParams selection;
    int page_size;      // 0: the lengths of contexts are complete pages, not tokens.
};

// The keys of a row, read anew each time: the first reading brings them near.
struct RowKeys {
    const u16* scores;
    int num_pages, sink_pages, recent_pages;

    // Reads eight keys from page `first` on, a multiple of eight. Pages beyond the row have KEY_ABSENT.
    DEVICE void read(int first, u32 (&keys)[RUN]) const {
        uint4 v = *(const uint4*)(scores + first);
        bool plain = first >= sink_pages && first + RUN <= num_pages - recent_pages;
#pragma unroll
        for (int j = 0; j < RUN; j++) {
            u32 pair = ordered_pair(word(v, j / 2));
            keys[j] = j % 2 ? pair >> 16 : pair & 0xffff;
            int page = first + j;
            if (!plain && (page < sink_pages || page >= num_pages - recent_pages)) keys[j] = KEY_ALWAYS;
            if (!plain && page >= num_pages) keys[j] = KEY_ABSENT;
        }
    }
};

struct Shared {
    // Numbers of all warps of the cluster. Those of one count are still read while those of the next are written.
    int counts[2][CLUSTER * WARPS];
    int above[CLUSTER * WARPS];
    int equal[CLUSTER * WARPS];
};

extern "C" __global__ void __launch_bounds__(THREADS)
#if SK_CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
list_pages(const __grid_constant__ ListParams p) {
    __shared__ Shared shared;
    depend_on_previous();
    release_next();
    int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, rank = Peers::rank();
    int token = blockIdx.z, row = token * gridDim.y + blockIdx.y;
    QueryToken at(p.contexts, token);
    int k = p.selection.pages_of(at.request, row);
    int num_pages = p.page_size ? at.context / p.page_size : at.context;
    int* out = p.pages + row * (i64)p.selection.k;
    // The blocks of a row leave together.
    if (at.whole || (p.skipped && p.skipped[row])) return;
    if (num_pages <= k) {
#pragma unroll 1
        for (int i = rank * THREADS + thread; i < k; i += CLUSTER * THREADS) out[i] = i < num_pages ? i : -1;
        return;
    }
    // All blocks of the cluster run before one of them writes to another.
    Peers::sync();
    RowKeys row_keys{p.scores + row * p.scores_stride, num_pages, p.selection.sink_pages, p.selection.recent_pages};
    // Each warp of the cluster has a share of the row.
    int mine = rank * WARPS + warp, share = ceil_div(ceil_div(num_pages, CLUSTER * WARPS), RUN) * RUN;
    int begin = min(mine * share, num_pages), end = min(begin + share, num_pages);
    auto tell = [&](int* numbers, int number) {
        if (lane < CLUSTER) Peers::store(numbers + mine, lane, number);
    };
    auto sum_of_first = [&](const int* numbers, int count) {
        int sum = 0;
#pragma unroll 1
        for (int i = lane; i < count; i += WARP) sum += numbers[i];
        return __reduce_add_sync(FULL, sum);
    };

    u32 threshold = KEY_ABSENT;
#pragma unroll 1
    for (int bit = 15; bit >= 0; bit--) {
        u32 tried = threshold | 1u << bit;
        int count = 0;
#pragma unroll 1
        for (int i = begin + RUN * lane; i < end; i += RUN * WARP) {
            u32 keys[RUN];
            row_keys.read(i, keys);
#pragma unroll
            for (int j = 0; j < RUN; j++) count += keys[j] >= tried;
        }
        int* counts = shared.counts[bit % 2];
        tell(counts, __reduce_add_sync(FULL, count));
        Peers::sync();
        if (sum_of_first(counts, CLUSTER * WARPS) >= k) threshold = tried;
    }

    int above = 0, equal = 0;
#pragma unroll 1
    for (int i = begin + RUN * lane; i < end; i += RUN * WARP) {
        u32 keys[RUN];
        row_keys.read(i, keys);
#pragma unroll
        for (int j = 0; j < RUN; j++) above += keys[j] > threshold, equal += keys[j] == threshold;
    }
    tell(shared.above, __reduce_add_sync(FULL, above));
    tell(shared.equal, __reduce_add_sync(FULL, equal));
    Peers::sync();
    int ties = k - sum_of_first(shared.above, CLUSTER * WARPS);
    above = sum_of_first(shared.above, mine), equal = sum_of_first(shared.equal, mine);
#pragma unroll 1
    for (int base = begin; base < end; base += RUN * WARP) {
        int first = base + RUN * lane;
        u32 keys[RUN], greater = 0, tie = 0;
        if (first < end) {
            row_keys.read(first, keys);
#pragma unroll
            for (int j = 0; j < RUN; j++) {
                greater |= (u32)(keys[j] > threshold) << j;
                tie |= (u32)(keys[j] == threshold) << j;
            }
        }
        // A lane's pages come after those of the lanes before it. 256 pages fit half of a number.
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
            if (!is_tie || e < ties) out[a + min(e, ties)] = first + j;
            a += !is_tie;
            e += is_tie;
        }
        above += sum & 0xffff;
        equal += sum >> 16;
    }
}
