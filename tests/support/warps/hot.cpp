// Rows find copies of pages by hot.cuh on a CPU, all at the same time, and read them while other rows still look.
// Arguments: pages of the cache, pages of a row, sets, steps, seed, share of the pages that rows have in common (percent).
// The exit code is 1 if a row reads other bytes than those of its page. Prints the pages read and those from the host.
#include "common.cuh"

#include "hot.cuh"

#include <random>

constexpr int ROWS = 4, WARPS = 2, PAGE_BYTES = SK_PAGE_BYTES;
using Hot = HotPages<PAGE_BYTES, WARPS>;

int main(int, char** arguments) {
    int pages = atoi(arguments[1]), per_row = atoi(arguments[2]), sets = atoi(arguments[3]), steps = atoi(arguments[4]);
    std::mt19937 random(atoi(arguments[5]));
    int common = atoi(arguments[6]);
    auto zeros = [](size_t bytes) { return (u8*)memset(aligned_alloc(256, (bytes + 255) / 256 * 256), 0, bytes); };
    u8* cache = zeros((size_t)pages * PAGE_BYTES);
    auto fill = [&](int page) {
        for (int i = 0; i < PAGE_BYTES / 4; i++) ((u32*)(cache + (size_t)page * PAGE_BYTES))[i] = random();
    };
    for (int page = 0; page < pages; page++) fill(page);
    HotParams p{};
    p.rows = zeros((size_t)sets * Hot::WAYS * PAGE_BYTES);
    p.tags = (u64*)zeros((size_t)sets * Hot::WAYS * 8);
    p.counters = (u64*)zeros(16);
    int clock = atoi(arguments[7]);
    p.clock = &clock;
    p.sets = sets;
    bool wrong = false;
    std::vector<int> selected(ROWS * per_row);
    for (int step = 0; step < steps; step++) {
        clock = (clock + 1) & 0x7fffffff;
        // What a step writes, it forgets.
        int written = random() % pages;
        fill(written);
        for (int way = 0; way < Hot::WAYS; way++) {
            u64& tag = p.tags[Hot(p, 0).set_of(written) * Hot::WAYS + way];
            if ((u32)tag == (u32)written + 1) tag = 0;
        }
        int window = random() % pages;
        for (int& page : selected)
            page = (int)(random() % 100) < common ? (window + (int)(random() % (2 * per_row))) % pages : random() % pages;
        std::vector<int> wanted = selected;
        std::vector<std::unique_ptr<std::barrier<>>> rows;
        for (int row = 0; row < ROWS; row++) rows.emplace_back(new std::barrier<>(WARPS * WARP));
        run_block(ROWS * WARPS, [&] {
            int row = threadIdx.x / WARP / WARPS, warp = threadIdx.x / WARP % WARPS, lane = threadIdx.x % WARP;
            int* mine = selected.data() + row * per_row;
            Hot hot(p, 0);
            hot.find(per_row, warp, lane, [&](int i) { return (u32)mine[i]; },
                     [&](u32 page) { return cache + (size_t)page * PAGE_BYTES; },
                     [&](int i, u32 place) { mine[i] = -1 - (int)place; });
            rows[row]->arrive_and_wait();
            for (int i = warp * WARP + lane; i < per_row; i += WARPS * WARP) {
                const u8* expected = cache + (size_t)wanted[row * per_row + i] * PAGE_BYTES;
                const u8* found = mine[i] < 0 ? p.rows + (size_t)(-1 - mine[i]) * PAGE_BYTES : expected;
                if (memcmp(found, expected, PAGE_BYTES)) wrong = true;
            }
        });
    }
    printf("%lld %llu\n", (i64)steps * ROWS * per_row, p.counters[1]);
    return wrong;
}
