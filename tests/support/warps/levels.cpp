// Scores one row by levels.cuh on a CPU, the thread blocks of its cluster one after the other.
// Arguments: memory of the records, bytes from a block to the next, bytes before the first, block table, pages, query,
// share, output of keys.
#include "common.cuh"

// Declared for the parts of select.cuh that are not used.
inline void atomicAdd(int*, int) {}
inline u32 __vmaxu2(u32, u32) { abort(); }
inline u32 __byte_perm(u32, u32, u32) { abort(); }
inline u32 __reduce_min_sync(u32, u32) { abort(); }
inline int __clz(u32) { abort(); }
inline u64 __cvta_generic_to_shared(const void*) { abort(); }

#include "levels.cuh"

#include <cstdio>

constexpr int CLUSTER = SK_CLUSTER, WARPS = SK_WARPS, PAGES_PER_BLOCK = SK_PAGES_PER_BLOCK;
constexpr int GROUP = SK_GROUP, HEAD_SIZE = SK_HEAD_SIZE;

using Score = ScoreQuery<LEVELED, GROUP, HEAD_SIZE>;
using Leveled = Levels<LEVELED, CLUSTER, WARPS, PAGES_PER_BLOCK, GROUP, HEAD_SIZE>;

// Reads a file to memory that is aligned like that of a GPU.
u8* contents(const char* name) {
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
