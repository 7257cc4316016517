// One thread block scores chunks of pages of one query token and KV head. It keeps the best pages of each chunk, as
// many as are selected from the whole context. The best candidates are the best of all pages. This serves contexts with
// too many pages for the thread blocks of a row, which also have few multiprocessors where a batch has few rows.
#include "score.cuh"
#include "select.cuh"

constexpr int QUERY = SK_QUERY, RECORD = SK_RECORD, GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE, PAGE_SIZE = SK_PAGE_SIZE;
constexpr int PAGES_PER_BLOCK = SK_PAGES_PER_BLOCK;
constexpr int WARPS = SK_WARPS, THREADS = WARPS * WARP, BLOCKS_PER_SM = SK_BLOCKS_PER_SM;

using Score = ScoreQuery<RECORD, GROUP, HEAD_SIZE>;

struct FindParams {
    QueryParams query;
    StatisticsParams statistics;
    ContextParams contexts;
    SelectionParams selection;
    const u8* skipped;  // [rows], 1 for a row that needs no candidates; null for none.
    CandidateParams candidates;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) find_candidates(const __grid_constant__ FindParams p) {
    __shared__ typename Score::Shared prepared;
    __shared__ __align__(16) typename Select<WARPS>::Shared shared;
    __shared__ __align__(16) u16 keys[Chunks::MOST];
    depend_on_previous();
    release_next();
    int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    int head = blockIdx.y, token = blockIdx.z, row = token * gridDim.y + head;
    QueryToken at(p.contexts, token);
    int num_pages = at.context / PAGE_SIZE, k = p.selection.pages_of(at.request, row);
    if (at.whole || num_pages <= max(k, p.candidates.most_fused) || (p.skipped && p.skipped[row])) return;
    Score::prepare_all<QUERY, WARPS>(prepared, p.query, token, head, p.statistics.std_weight, warp, lane);
    __syncthreads();
    Score score;
    score.load(prepared, lane);
    Statistics statistics(p.statistics, head);
    Chunks chunks(p.candidates, num_pages, k);
#pragma unroll 1
    for (int chunk = blockIdx.x; chunk < chunks.count; chunk += gridDim.x) {
        int first = chunk * chunks.size, count = min(chunks.size, num_pages - first), padded = ceil_div(count, 8) * 8;
        i64 place = row * p.candidates.stride + chunk * chunks.kept;
        u16* found = p.candidates.keys + place;
        int* pages = p.candidates.pages + place;
        auto put = [&](int slot, int i) { found[slot] = keys[i], pages[slot] = first + i; };
        shared.clear(thread);
        if (thread < padded - count) keys[count + thread] = KEY_ABSENT;
        __syncthreads();
        score_range<SK_PIPELINED, PAGES_PER_BLOCK>(score, statistics, at.table, first, first + count, warp, WARPS, lane,
                                                   [&](int page, u16 bits) {
            bool always = page < p.selection.sink_pages || page >= num_pages - p.selection.recent_pages;
            keys[page - first] = (u16)(always ? KEY_ALWAYS : ordered_key(bits));
        });
        __syncthreads();
        if (count > chunks.kept) {
            Select<WARPS>{shared, k, warp, lane}.run(SharedKeys<WARPS>{keys, padded, thread}, put);
        } else {
#pragma unroll 1
            for (int i = thread; i < count; i += THREADS) put(i, i);
        }
        __syncthreads();
    }
}
