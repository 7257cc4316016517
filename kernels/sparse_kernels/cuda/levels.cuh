// Scores of leveled quarters. A record has four rows of four-bit codes with a step each: the mean m of the page, and the
// differences u, v and w that give back the quarters m + u +- v and m - u +- w. Row r of all pages of a block lies before
// row r + 1.
//
// A row of the batch with many pages is scored in two levels. The first reads the means of all pages. The stripes of the
// row are its blocks by their number modulo STRIPES; of each stripe the best pages are refined: scored by the whole
// record. A thread block has whole stripes and needs no other thread block. The operations on floats are rounded one by
// one, as in page_score/leveled_triton.py, which has the same bits.
#pragma once
#include "score.cuh"
#include "select.cuh"

// As in page_score/levels.py.
constexpr int STRIPES = 32, FLAT_PAGES = 2048, LEAST_OF_STRIPE = 32, SHARE_UNITS = 1024;

// The pages of a row whose block has the number `rank` modulo RANKS, numbered in their order.
template <int RANKS, int PAGES_PER_BLOCK>
struct Striped {
    int rank;
    int count;

    DEVICE Striped(int rank_, int num_pages) : rank(rank_) {
        constexpr int ROUND = RANKS * PAGES_PER_BLOCK;
        int rest = num_pages % ROUND - rank * PAGES_PER_BLOCK;
        count = num_pages / ROUND * PAGES_PER_BLOCK + min(max(rest, 0), PAGES_PER_BLOCK);
    }

    // The block of a page in the block table.
    DEVICE int block(int i) const { return i / PAGES_PER_BLOCK * RANKS + rank; }
    DEVICE int page(int i) const { return block(i) * PAGES_PER_BLOCK + i % PAGES_PER_BLOCK; }
};

// RECORD is LEVELED wherever the functions are called.
template <int RECORD, int CLUSTER, int WARPS, int PAGES_PER_BLOCK, int GROUP, int HEAD_SIZE>
struct Levels {
    using Query = ScoreQuery<RECORD, GROUP, HEAD_SIZE>;
    using Pages = Striped<CLUSTER, PAGES_PER_BLOCK>;
    static constexpr int TILES = Query::TILES, DIMS = Query::DIMS;
    static constexpr int ROW_BYTES = HEAD_SIZE / 2, ROW_STRIDE = PAGES_PER_BLOCK * ROW_BYTES;
    // A lane reads a row in units of 8 bytes, two of which are neighbours if the row has room for 16 bytes of each lane.
    static constexpr int UNITS = DIMS / 64;
    static constexpr bool PAIRED = HEAD_SIZE % 128 == 0;
    // Batches of 32 pages of the first level that a warp has in flight.
    static constexpr int DEPTH = UNITS < 3 ? 8 / UNITS : 2;
    static constexpr int BATCH = 8 * SCORE_TILES;
    static constexpr int STRIPES_HERE = STRIPES / CLUSTER;
    // Keys of a stripe that a lane keeps while it bisects.
    static constexpr int HELD = 16;

    // The scratch of a thread block. The selection clears its memory afterwards.
    struct Scratch {
        u16 listed[WARPS][2 * BATCH];  // Pages to refine.
        u32 least[STRIPES_HERE];       // The smallest key of a stripe that is refined.
    };

    u32 fragments[TILES][UNITS][8];
    float step[TILES];
    int middle[TILES];

    static DEVICE int byte_of(int unit, int t) { return PAIRED ? 64 * (unit / 2) + 16 * t + 8 * (unit % 2) : 32 * unit + 8 * t; }

    DEVICE void load(const typename Query::Shared& shared, int lane) {
        int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            step[tile] = shared.step[8 * tile + g];
            middle[tile] = __float_as_int(shared.spread[8 * tile + g]);
#pragma unroll
            for (int unit = 0; unit < UNITS; unit++)
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    int d = i / 2 % 2 * (DIMS / 2) + byte_of(unit, t) + i % 2 * 4;
                    fragments[tile][unit][i] = *(const u32*)&shared.planes[i / 4][8 * tile + g][d];
                }
        }
    }

    // Reads the lane's part of a row of codes of page g of a tile.
    static DEVICE void load_row(uint2 (&codes)[UNITS], const u8* row, int t) {
        if constexpr (PAIRED) {
#pragma unroll
            for (int unit = 0; unit < UNITS; unit += 2) {
                uint4 both = load16(row + byte_of(unit, t));
                codes[unit] = uint2{both.x, both.y};
                codes[unit + 1 < UNITS ? unit + 1 : unit] = uint2{both.z, both.w};
            }
        } else {
#pragma unroll
            for (int unit = 0; unit < UNITS; unit++)
                codes[unit] = byte_of(unit, t) < ROW_BYTES ? load8(row + byte_of(unit, t)) : uint2{0, 0};
        }
    }

    // Returns the products of head g of each tile with a row of codes of pages 2t and 2t+1.
    DEVICE void dot(const uint2 (&codes)[UNITS], float (&out)[TILES][2]) const {
        // The step of a page is in its first lane.
        float units[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            units[i] = bf16_to_float(__shfl_sync(FULL, codes[0].x, 8 * (threadIdx.x % 4) + 4 * i) & 0xffff);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            int even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
#pragma unroll
            for (int unit = 0; unit < UNITS; unit++) {
                const u32(&f)[8] = fragments[tile][unit];
                mma_s8_u8(even, f[0], f[4], f[1], f[5], codes[unit].x & 0x0f0f0f0fu, codes[unit].y & 0x0f0f0f0fu);
                mma_s8_u8(odd, f[2], f[6], f[3], f[7], codes[unit].x & 0xf0f0f0f0u, codes[unit].y & 0xf0f0f0f0u);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int sum = even[i] * 256 + even[2 + i] + ((odd[i] * 256 + odd[2 + i]) >> 4);
                out[tile][i] = __fmul_rn(__fmul_rn((float)(2 * sum - middle[tile]), step[tile]), units[i]);
            }
        }
    }

    // Keys that are not finite have a mean beyond any other, which counts as positive.
    static DEVICE float first_level(float product) { return fabsf(product) > 1.2676506e30f ? fabsf(product) : product; }

    // Scores the first level of all pages of this thread block. Calls `emit(page, bf16 bits)`.
    template <typename Emit>
    DEVICE void score_first(const Statistics& head, const int* table, const Pages& pages, int warp, int lane, Emit emit) const {
        int g = lane / 4, t = lane % 4;
        constexpr int STRIDE = WARPS * BATCH;
        uint2 codes[DEPTH][SCORE_TILES][UNITS];
        int ids[SCORE_TILES];
        auto find = [&](int base) {
#pragma unroll
            for (int u = 0; u < SCORE_TILES; u++) ids[u] = table[pages.block(min(base + 8 * u + g, pages.count - 1))];
        };
        auto load = [&](uint2 (&into)[SCORE_TILES][UNITS], int base) {
#pragma unroll
            for (int u = 0; u < SCORE_TILES; u++) {
                int i = min(base + 8 * u + g, pages.count - 1);
                load_row(into[u], head.vectors + ids[u] * head.block_stride + i % PAGES_PER_BLOCK * ROW_BYTES, t);
            }
        };
        int first = warp * BATCH;
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
            if (first + d * STRIDE < pages.count) {
                find(first + d * STRIDE);
                load(codes[d], first + d * STRIDE);
            }
        if (first + DEPTH * STRIDE < pages.count) find(first + DEPTH * STRIDE);
#pragma unroll 1
        for (; first < pages.count; first += DEPTH * STRIDE) {
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                int base = first + d * STRIDE;
                if (base >= pages.count) break;
                u32 best[SCORE_TILES];
#pragma unroll
                for (int u = 0; u < SCORE_TILES; u++) {
                    float products[TILES][2];
                    dot(codes[d][u], products);
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) {
                        u32 both = pack_bf16(first_level(products[tile][0]), first_level(products[tile][1]));
                        best[u] = tile ? max_or_nan_bf16(best[u], both) : both;
                    }
                }
                if (base + DEPTH * STRIDE < pages.count) {
                    load(codes[d], base + DEPTH * STRIDE);
                    if (base + (DEPTH + 1) * STRIDE < pages.count) find(base + (DEPTH + 1) * STRIDE);
                }
                u16 bits = best_of_heads<GROUP>(best, lane);
                int i = base + page_of_lane(lane);
                if (i < pages.count) emit(pages.page(i), bits);
            }
        }
    }

    // Returns the smallest key of a stripe that is refined, to all lanes of a warp: as many keys of the stripe reach it as
    // its share says, or more if keys are equal.
    static __device__ __noinline__ u32 least_of_stripe(const u16* keys, int stripe, int num_pages, int share, int lane) {
        Striped<STRIPES, PAGES_PER_BLOCK> pages(stripe, num_pages);
        int wanted = max((pages.count * share + SHARE_UNITS - 1) / SHARE_UNITS, LEAST_OF_STRIPE);
        if (wanted >= pages.count) return KEY_ABSENT;
        u32 held[HELD];
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            int i = n * WARP + lane;
            held[n] = i < pages.count ? keys[pages.page(i)] : KEY_ABSENT;
        }
        u32 least = 0;
#pragma unroll 1
        for (u32 bit = 0x8000; bit; bit >>= 1) {
            u32 tried = least | bit;
            int reach = 0;
#pragma unroll
            for (int n = 0; n < HELD; n++) reach += held[n] >= tried;
#pragma unroll 1
            for (int i = HELD * WARP + lane; i < pages.count; i += WARP) reach += keys[pages.page(i)] >= tried;
            if (__reduce_add_sync(FULL, reach) >= wanted) least = tried;
        }
        return least;
    }

    // Scores `count` listed pages of this thread block by their whole records, at most BATCH. Calls `emit(page, bf16 bits)`.
    template <typename Emit>
    DEVICE void score_listed(const Statistics& head, const int* table, const Pages& pages, const u16* listed, int count,
                             int lane, Emit emit) const {
        int g = lane / 4, t = lane % 4;
        uint2 codes[SCORE_TILES][4][UNITS];
#pragma unroll
        for (int u = 0; u < SCORE_TILES; u++) {
            int i = listed[min(8 * u + g, count - 1)];
            const u8* first = head.vectors + table[pages.block(i)] * head.block_stride + i % PAGES_PER_BLOCK * ROW_BYTES;
#pragma unroll
            for (int row = 0; row < 4; row++) load_row(codes[u][row], first + row * ROW_STRIDE, t);
        }
        u32 best[SCORE_TILES];
#pragma unroll
        for (int u = 0; u < SCORE_TILES; u++) {
            float m[TILES][2], x[TILES][2], v[TILES][2], w[TILES][2];
            dot(codes[u][0], m), dot(codes[u][1], x), dot(codes[u][2], v), dot(codes[u][3], w);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                float scores[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float older = __fadd_rn(x[tile][i], fabsf(v[tile][i])), newer = __fsub_rn(fabsf(w[tile][i]), x[tile][i]);
                    scores[i] = __fadd_rn(first_level(m[tile][i]), fmaxf(older, newer));
                }
                u32 both = pack_bf16(scores[0], scores[1]);
                best[u] = tile ? max_or_nan_bf16(best[u], both) : both;
            }
        }
        u16 bits = best_of_heads<GROUP>(best, lane);
        int at = page_of_lane(lane);
        if (at < count) emit(pages.page(listed[at]), bits);
    }

    // Gives the pages of this thread block their keys. Calls `key_of(page, bf16 bits)` for the key of a page. All warps
    // call it, before and after a barrier.
    template <typename KeyOf>
    static DEVICE void run(Scratch& scratch, const typename Query::Shared& query, const StatisticsParams& p, int head,
                           const int* table, int num_pages, u16* keys, int rank, int warp, int lane, KeyOf key_of) {
        constexpr u32 UNREFINED = 0xff80;  // Minus infinity.
        Levels levels;
        levels.load(query, lane);
        Statistics statistics(p, head);
        Pages pages(rank, num_pages);
        bool flat = num_pages <= FLAT_PAGES;
        if (!flat) {
            levels.score_first(statistics, table, pages, warp, lane,
                               [&](int page, u16 bits) { keys[page] = (u16)ordered_key(bits); });
            __syncthreads();
#pragma unroll 1
            for (int n = warp; n < STRIPES_HERE; n += WARPS) {
                u32 least = least_of_stripe(keys, rank + n * CLUSTER, num_pages, p.refined, lane);
                if (lane == 0) scratch.least[n] = least;
            }
            __syncthreads();
        }
        u16* listed = scratch.listed[warp];
        auto emit = [&](int page, u16 bits) { keys[page] = (u16)key_of(page, bits); };
        int waiting = 0;
#pragma unroll 1
        for (int base = warp * BATCH; base < pages.count; base += WARPS * BATCH) {
            int i = base + lane, page = pages.page(i);
            bool exists = i < pages.count;
            bool refined = exists && (flat || keys[page] >= scratch.least[i / PAGES_PER_BLOCK % STRIPES_HERE]);
            u32 which = __ballot_sync(FULL, refined);
            if (refined) listed[waiting + __popc(which & ((1u << lane) - 1))] = (u16)i;
            else if (exists) keys[page] = (u16)key_of(page, UNREFINED);
            waiting += __popc(which);
            __syncwarp();
            if (waiting < BATCH) continue;
            levels.score_listed(statistics, table, pages, listed, BATCH, lane, emit);
            waiting -= BATCH;
            __syncwarp();
            u16 moved = listed[BATCH + lane];
            __syncwarp();
            listed[lane] = moved;
            __syncwarp();
        }
        if (waiting) levels.score_listed(statistics, table, pages, listed, waiting, lane, emit);
    }

    // Prefetches what the first level, or a row of few pages, reads.
    static DEVICE void prefetch_records(const StatisticsParams& p, int head, const int* table, int num_pages, int rank,
                                        int thread, int threads) {
        Pages pages(rank, num_pages);
        int lines = ceil_div(num_pages <= FLAT_PAGES ? 4 * ROW_STRIDE : ROW_STRIDE, 128);
        int count = ceil_div(pages.count, PAGES_PER_BLOCK) * lines;
#pragma unroll 2
        for (int i = thread; i < count; i += threads)
            prefetch(p.vectors + head * p.head_stride + table[i / lines * CLUSTER + rank] * p.block_stride + i % lines * 128);
    }
};
