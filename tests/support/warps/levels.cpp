// Scores one row by levels.cuh on a CPU, the thread blocks of its cluster one after the other.
// Arguments: memory of the records, bytes from a block to the next, bytes before the first, block table, pages, query,
// share, output of keys.
#include "common.cuh"

#include "levels.cuh"


constexpr int CLUSTER = SK_CLUSTER, WARPS = SK_WARPS, PAGES_PER_BLOCK = SK_PAGES_PER_BLOCK;
constexpr int GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE;

using Score = ScoreQuery<LEVELED, GROUP, HEAD_SIZE>;
using Leveled = Levels<LEVELED, CLUSTER, WARPS, PAGES_PER_BLOCK, GROUP, HEAD_SIZE>;

int main(int, char** arguments) {
    StatisticsParams statistics{};
    statistics.vectors = contents(arguments[1]) + atoll(arguments[3]);
    statistics.block_stride = atoll(arguments[2]);
    statistics.refined = atoi(arguments[7]);
    const int* table = (const int*)contents(arguments[4]);
    int num_pages = atoi(arguments[5]);
    QueryParams query{};
    query.heads = contents(arguments[6]);
    query.head_stride = HEAD_SIZE;
    std::vector<u16> keys(num_pages, 0xdead);
    static typename Score::Shared prepared;
    static typename Select<WARPS>::Shared selection;
    static_assert(sizeof(typename Leveled::Scratch) <= sizeof(selection.candidates));
    auto& scratch = *(typename Leveled::Scratch*)selection.candidates;
    for (int rank = 0; rank < CLUSTER; rank++)
        run_block(WARPS, [&] {
            int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
            Score::prepare_all<BF16, WARPS>(prepared, query, 0, 0, 0.0f, warp, lane);
            __syncthreads();
            Leveled::run(scratch, prepared, statistics, 0, table, num_pages, keys.data(), rank, warp, lane,
                         [](int, u16 bits) { return (u32)bits; });
        });
    FILE* file = fopen(arguments[8], "wb");
    fwrite(keys.data(), 2, num_pages, file);
    fclose(file);
}
