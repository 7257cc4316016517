// Page scores, S_p = max_g(q_g . mu_p + lambda ||q_g|| sigma_p). A warp scores eight pages at a time on the tensor
// cores.
#pragma once
#include "params.cuh"

// The statistics of a KV head; the stride is in bytes.
struct Statistics {
    const u8* vectors;
    const u16* scales;
    const u16* spread;
    i64 block_stride;

    DEVICE Statistics(const StatisticsParams& p, int head)
        : vectors(p.vectors + head * p.head_stride), scales((const u16*)((const u8*)p.scales + head * p.head_stride)),
          spread((const u16*)((const u8*)p.spread + head * p.head_stride)), block_stride(p.block_stride) {}
};

// Returns element `index` of the row of lane `from`, and `index` may differ by lane.
template <int N>
DEVICE float shuffled(const float (&x)[N], int index, int from) {
    float found = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        float value = __shfl_sync(FULL, x[i], from);
        if (i == index) found = value;
    }
    return found;
}

// A stage of the Hadamard transform between elements of one lane, or between lanes.
template <int N>
DEVICE void within_lane(float (&x)[N], int offset) {
#pragma unroll
    for (int i = 0; i < N; i++)
        if (!(i & offset)) {
            float low = x[i], high = x[i + offset];
            x[i] = low + high, x[i + offset] = low - high;
        }
}
template <int N>
DEVICE void between_lanes(float (&x)[N], int offset, int lane) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        float partner = __shfl_xor_sync(FULL, x[i], offset);
        x[i] = lane & offset ? partner - x[i] : x[i] + partner;
    }
}

// Flips fixed signs, then applies a Hadamard matrix to each block of a row that is spread over a warp; `x` are the lane's
// consecutive elements. Blocks have the size of the largest power of two that divides the head size.
template <int HEAD_SIZE>
DEVICE void rotate(float (&x)[padded(HEAD_SIZE) / WARP], int lane) {
    constexpr int PER_LANE = padded(HEAD_SIZE) / WARP, SIZE = HEAD_SIZE & -HEAD_SIZE;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        u32 drawn = (lane * PER_LANE + i + 1) * 0x9e3779b1u;
        if ((drawn ^ drawn >> 15) * 0x85ebca77u >> 31) x[i] = -x[i];
    }
    if constexpr ((PER_LANE & (PER_LANE - 1)) == 0) {
#pragma unroll
        for (int offset = 1; offset < PER_LANE && offset < SIZE; offset *= 2) within_lane(x, offset);
#pragma unroll
        for (int offset = 1; offset * PER_LANE < SIZE; offset *= 2) between_lanes(x, offset, lane);
    } else {
        // Consecutive elements go to consecutive lanes and back, because blocks would end within a lane.
        float y[PER_LANE];
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) y[i] = shuffled(x, (i * WARP + lane) % PER_LANE, (i * WARP + lane) / PER_LANE);
#pragma unroll
        for (int offset = 1; offset < WARP && offset < SIZE; offset *= 2) between_lanes(y, offset, lane);
#pragma unroll
        for (int offset = WARP; offset < SIZE; offset *= 2) within_lane(y, offset / WARP);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) x[i] = shuffled(y, (lane * PER_LANE + i) / WARP, (lane * PER_LANE + i) % WARP);
    }
    float norm = rsqrtf((float)SIZE);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) x[i] *= norm;
}

// The query heads of one KV head, in the format of the vectors that they multiply.
//
// For int8 vectors the query is 16-bit fixed point, split into two signed bytes in two rows of the matrix tile. The dot
// product is an exact integer, and no vector is converted. float8 vectors are multiplied in fp16, bf16 vectors in bf16.
// A byte of a sketch holds the two-bit codes of one dimension of four vectors. A byte of quarters holds the four-bit
// codes of two vectors. Bytes are masked, not shifted: they are codes times a power of two, and the sum is shifted back
// after the dot product. Quarters have two rows, with their steps in place of the first two dimensions. Leveled quarters
// (levels.cuh) have four, and a byte of a row holds an even dimension and the next one: the query has all even dimensions
// first.
template <int RECORD, int GROUP, int HEAD_SIZE>
struct ScoreQuery {
    static constexpr int ROWS = Heads<GROUP>::ROWS;
    static constexpr int TILES = Heads<GROUP>::TILES;
    static constexpr int DIMS = padded(HEAD_SIZE);
    static constexpr bool CODES = RECORD == SKETCH || RECORD == QUARTERS || RECORD == LEVELED;
    static constexpr bool FIXED_POINT = RECORD == INT8 || CODES;
    static constexpr bool HAS_SCALE = RECORD != BF16 && RECORD != QUARTERS && RECORD != LEVELED;
    static constexpr bool HAS_SPREAD = !CODES;
    static constexpr int VECTOR_BYTES = RECORD == BF16 || RECORD == QUARTERS || RECORD == LEVELED ? 2 : 1;
    static constexpr int RECORD_BYTES = HEAD_SIZE * VECTOR_BYTES + 2 * HAS_SCALE + 2 * HAS_SPREAD;
    // 16-byte pieces of a vector that a lane holds.
    static constexpr int PIECES = DIMS * VECTOR_BYTES / 64;
    // Rows of codes of a record, and bits of a code.
    static constexpr int CODE_ROWS = RECORD == QUARTERS || RECORD == LEVELED ? 2 : 1;
    static constexpr int CODE_BITS = RECORD == QUARTERS || RECORD == LEVELED ? 4 : 2;
    // Bytes of a vector or of a row of codes in memory, and the pieces of it that a lane holds.
    static constexpr int ROW_BYTES = HEAD_SIZE * VECTOR_BYTES / CODE_ROWS, ROW_PIECES = PIECES / CODE_ROWS;
    // Pieces of a query that a lane holds. All rows of codes use the same pieces.
    static constexpr int QUERY_PIECES = CODES ? PIECES / CODE_ROWS : PIECES * (RECORD == FP8 ? 2 : 1);

    struct Shared {
        union {
            u8 planes[2][ROWS][DIMS];
            u16 halves[ROWS][DIMS];
        };
        float step[ROWS];
        float spread[ROWS];
    };

    // The rows of a tile, in the order of the matrix instructions.
    u32 fragments[TILES][QUERY_PIECES][8];
    float step[TILES];
    float spread[TILES];

    // Stores one row, which is spread over a warp: `query` are the lane's consecutive elements.
    static DEVICE void prepare(Shared& shared, int row, const float (&query)[DIMS / WARP], float std_weight, int lane) {
        constexpr int PER_LANE = DIMS / WARP;
        float x[PER_LANE];
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) x[i] = query[i];
        if constexpr (RECORD == SKETCH) rotate<HEAD_SIZE>(x, lane);
        if constexpr (RECORD == QUARTERS) {
            if (lane == 0) x[0] = x[1] = 0;
        }
        if constexpr (RECORD == LEVELED) {
#pragma unroll
            for (int i = 0; i < PER_LANE; i++)
                if (lane * PER_LANE + i < 4) x[i] = 0;
        }
        float square = 0, largest = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            square += x[i] * x[i];
            largest = fmaxf(largest, fabsf(x[i]));
        }
        float norm = sqrtf(warp_sum(square));
        largest = warp_max(largest);
        // int8 vectors and codes need fixed point. For float8 vectors a power of two brings the query into the range of
        // fp16.
        float step = 1;
        if (FIXED_POINT) step = largest / 32512.0f;
        if (RECORD == FP8 && largest > 0) step = exp2f(floorf(log2f(largest)) - 8.0f);
        float inverse = step > 0 ? 1.0f / step : 0.0f;
        if constexpr (RECORD == LEVELED) {
            // Rounded as Triton rounds.
            step = __fdiv_rn(largest, 32512.0f);
            inverse = step > 0 ? __fdiv_rn(1.0f, step) : 0.0f;
        }
        int sum = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            int d = lane * PER_LANE + i;
            if (RECORD == LEVELED) d = d % 2 * (DIMS / 2) + d / 2;
            if constexpr (FIXED_POINT) {
                int fixed = max(-32512, min(32512, __float2int_rn(x[i] * inverse)));
                sum += fixed;
                int high = (fixed + 128) >> 8;
                shared.planes[0][row][d] = (u8)high;
                shared.planes[1][row][d] = (u8)(fixed - high * 256);
            } else {
                shared.halves[row][d] = (u16)pack_pair<RECORD == BF16 ? BF16 : FP16>(x[i] * inverse, 0);
            }
        }
        // A code stands for itself minus half of the largest code.
        if constexpr (CODES) sum = __reduce_add_sync(FULL, sum) * ((1 << CODE_BITS) - 1);
        if (lane == 0) {
            shared.step[row] = CODES ? 0.5f * step : step;
            shared.spread[row] = CODES ? __int_as_float(sum) : std_weight * norm;
        }
    }

    // Stores the query of a token and KV head with all warps of a thread block. All threads see it after a barrier.
    template <int QUERY, int WARPS>
    static DEVICE void prepare_all(Shared& shared, const QueryParams& p, int token, int head, float std_weight, int warp,
                                   int lane) {
        i64 first = first_query_element(p, token, head, GROUP);
#pragma unroll 1
        for (int r = warp; r < ROWS; r += WARPS) {
            float x[DIMS / WARP];
            load_row<QUERY, GROUP, HEAD_SIZE>(p.heads, first, p.head_stride, r, lane, x);
            prepare(shared, r, x, std_weight, lane);
        }
    }

    DEVICE void load(const Shared& shared, int lane) {
        int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            step[tile] = shared.step[8 * tile + g];
            spread[tile] = shared.spread[8 * tile + g];
            if constexpr (FIXED_POINT) {
#pragma unroll
                for (int piece = 0; piece < QUERY_PIECES; piece++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int d = 64 * piece + 16 * t + 4 * i;
                        fragments[tile][piece][i] = *(const u32*)&shared.planes[0][8 * tile + g][d];
                        fragments[tile][piece][4 + i] = *(const u32*)&shared.planes[1][8 * tile + g][d];
                    }
            } else {
                constexpr int PER_PIECE = 16 / VECTOR_BYTES;
#pragma unroll
                for (int piece = 0; piece < PIECES; piece++)
#pragma unroll
                    for (int i = 0; i < PER_PIECE / 2; i++) {
                        int d = 4 * PER_PIECE * piece + PER_PIECE * t + 2 * i;
                        fragments[tile][piece * PER_PIECE / 8 + i / 4][i % 4] =
                            *(const u32*)&shared.halves[8 * tile + g][d];
                    }
            }
        }
    }

    // Returns the dot products of head g of each tile with pages 2t and 2t+1, in units of the stored vector.
    DEVICE void dot(const uint4 (&vector)[PIECES], float (&out)[TILES][2]) const {
        if constexpr (RECORD == INT8) {
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                int c[4] = {0, 0, 0, 0};
#pragma unroll
                for (int piece = 0; piece < PIECES; piece++) {
                    const u32(&f)[8] = fragments[tile][piece];
                    mma_s8(c, f[0], f[4], f[1], f[5], vector[piece].x, vector[piece].y);
                    mma_s8(c, f[2], f[6], f[3], f[7], vector[piece].z, vector[piece].w);
                }
                out[tile][0] = (float)(c[0] * 256 + c[2]) * step[tile];
                out[tile][1] = (float)(c[1] * 256 + c[3]) * step[tile];
            }
        } else if constexpr (CODES) {
            // The steps of a page are in its first lane. The products of pages 2t and 2t+1 are in lane t of every head.
            float units[CODE_ROWS][2];
            if constexpr (RECORD == QUARTERS) {
                u32 steps = __byte_perm(vector[0].x, vector[PIECES / 2].x, 0x5410);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    u32 both = __shfl_sync(FULL, steps, 8 * (threadIdx.x % 4) + 4 * i);
                    units[0][i] = bf16_to_float(both & 0xffff), units[CODE_ROWS - 1][i] = bf16_to_float(both >> 16);
                }
            }
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
                for (int row = 0; row < CODE_ROWS; row++) {
                    int best[2];
#pragma unroll
                    for (int part = 0; part < 8 / CODE_BITS; part++) {
                        u32 mask = ((1u << CODE_BITS) - 1) * 0x01010101u << CODE_BITS * part;
                        int c[4] = {0, 0, 0, 0};
#pragma unroll
                        for (int piece = 0; piece < QUERY_PIECES; piece++) {
                            const u32(&f)[8] = fragments[tile][piece];
                            const uint4& codes = vector[row * QUERY_PIECES + piece];
                            mma_s8_u8(c, f[0], f[4], f[1], f[5], codes.x & mask, codes.y & mask);
                            mma_s8_u8(c, f[2], f[6], f[3], f[7], codes.z & mask, codes.w & mask);
                        }
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            int sum = (c[i] * 256 + c[2 + i]) >> CODE_BITS * part;
                            best[i] = part ? max(best[i], sum) : sum;
                        }
                    }
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float product = (float)(2 * best[i] - __float_as_int(spread[tile])) * step[tile];
                        if (RECORD == QUARTERS) product *= units[row][i];
                        out[tile][i] = row ? fmaxf(out[tile][i], product) : product;
                    }
                }
            }
        } else {
            float c[4] = {0, 0, 0, 0};
            constexpr int FORMAT = RECORD == BF16 ? BF16 : FP16;
            auto row = [&](int tile, int step, int i) { return tile < TILES ? fragments[tile < TILES ? tile : 0][step][i] : 0u; };
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++) {
                if constexpr (RECORD == BF16) {
                    mma_k16<FORMAT>(c, row(0, piece, 0), row(1, piece, 0), row(0, piece, 1), row(1, piece, 1),
                                    vector[piece].x, vector[piece].y);
                    mma_k16<FORMAT>(c, row(0, piece, 2), row(1, piece, 2), row(0, piece, 3), row(1, piece, 3),
                                    vector[piece].z, vector[piece].w);
                } else {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        u32 four = word(vector[piece], i);
                        int at = 2 * piece + i / 2, f = i % 2 * 2;
                        mma_k16<FORMAT>(c, row(0, at, f), row(1, at, f), row(0, at, f + 1), row(1, at, f + 1),
                                        fp8_pair_to_fp16((u16)four), fp8_pair_to_fp16((u16)(four >> 16)));
                    }
                }
            }
            out[0][0] = c[0] * step[0];
            out[0][1] = c[1] * step[0];
            if constexpr (TILES == 2) {
                out[1][0] = c[2] * step[1];
                out[1][1] = c[3] * step[1];
            }
        }
    }
};

// Tiles of eight pages that a warp scores at once: in the end one page per lane.
constexpr int SCORE_TILES = 4;

// Returns the largest score of any head, in bfloat16, of page `page_of_lane(lane)` of the tiles. A lane (g, t) has those
// of head g for pages 2t and 2t+1 of each tile.
template <int GROUP>
DEVICE u16 best_of_heads(u32 (&best)[SCORE_TILES], int lane) {
    int g = lane / 4;
    // Heads are in lanes 4 apart. Lanes that no longer need the same tiles split them.
    constexpr int DISTINCT = Heads<GROUP>::DISTINCT;
#pragma unroll
    for (int bit = 0, count = SCORE_TILES; bit < 2; bit++, count /= 2) {
        bool upper = g >> bit & 1;
#pragma unroll
        for (int i = 0; i < count / 2; i++) {
            u32 retained = upper ? best[count / 2 + i] : best[i], passed = upper ? best[i] : best[count / 2 + i];
            best[i] = retained;
            if (DISTINCT >> bit > 1) best[i] = max_or_nan_bf16(retained, __shfl_xor_sync(FULL, passed, 4 << bit));
        }
    }
    if (DISTINCT == 8) best[0] = max_or_nan_bf16(best[0], __shfl_xor_sync(FULL, best[0], 16));
    return (u16)(g & 4 ? best[0] >> 16 : best[0]);
}

DEVICE int page_of_lane(int lane) {
    int g = lane / 4, t = lane % 4;
    return 16 * (g & 1) + 8 * (g >> 1 & 1) + 2 * t + (g >> 2);
}

// The data for a warp to score 32 consecutive pages. Block table and statistics are those of one row.
template <int PAGES_PER_BLOCK, int RECORD, int GROUP, int HEAD_SIZE>
struct ScoreBatch {
    using Query = ScoreQuery<RECORD, GROUP, HEAD_SIZE>;
    static constexpr int VECTOR_STRIDE = HEAD_SIZE * Query::VECTOR_BYTES;
    static constexpr bool TILE_IN_BLOCK = PAGES_PER_BLOCK % 8 == 0;
    static constexpr bool PAIR_IN_BLOCK = PAGES_PER_BLOCK % 2 == 0;

    uint4 vectors[SCORE_TILES][Query::PIECES];
    u32 scales[SCORE_TILES];
    u32 spreads[SCORE_TILES];

    struct Blocks {
        int ids[SCORE_TILES];
        DEVICE Blocks(const int* table, int base, int last, int lane) {
#pragma unroll
            for (int u = 0; u < SCORE_TILES; u++) ids[u] = table[min(base + 8 * u + lane / 4, last - 1) / PAGES_PER_BLOCK];
        }
    };

    // Loads the lane's part of the vectors of a page, which is page g of tile u.
    DEVICE void load_vectors(int u, const Statistics& head, int block, int page, int t) {
        const u8* p = head.vectors + block * head.block_stride + page % PAGES_PER_BLOCK * VECTOR_STRIDE + 16 * t;
#pragma unroll
        for (int piece = 0; piece < Query::PIECES; piece++) {
            int row = piece / Query::ROW_PIECES, at = piece % Query::ROW_PIECES * 64;
            bool exists = in_head<HEAD_SIZE>((at + 16 * t) * HEAD_SIZE / Query::ROW_BYTES);
            vectors[u][piece] = exists ? load16(p + row * Query::ROW_BYTES + at) : uint4{0, 0, 0, 0};
        }
    }

    // Pages of a batch from `last` on repeat the page before `last`. The first page of a range is a multiple of eight.
    DEVICE void load_tile(int u, const Statistics& head, const Blocks& blocks, int base, int last, int lane) {
        load_vectors(u, head, blocks.ids[u], min(base + 8 * u + lane / 4, last - 1), lane % 4);
    }

    DEVICE void load_scalars(int u, const Statistics& head, const Blocks& blocks, int base, int last, int lane) {
        int t = lane % 4;
        auto scalars = [&](int column) -> i64 {
            int page = min(base + 8 * u + column, last - 1);
            int block = TILE_IN_BLOCK ? blocks.ids[u] : __shfl_sync(FULL, blocks.ids[u], 4 * column);
            return block * head.block_stride + page % PAGES_PER_BLOCK / (PAIR_IN_BLOCK ? 2 : 1) * (PAIR_IN_BLOCK ? 4 : 2);
        };
        if constexpr (!Query::HAS_SCALE && !Query::HAS_SPREAD) {
            return;
        } else if constexpr (PAIR_IN_BLOCK) {
            i64 at = scalars(2 * t);
            if (Query::HAS_SCALE) scales[u] = __ldg((const u32*)((const u8*)head.scales + at));
            if (Query::HAS_SPREAD) spreads[u] = __ldg((const u32*)((const u8*)head.spread + at));
        } else {
            i64 even = scalars(2 * t), odd = scalars(2 * t + 1);
            auto both = [&](const u16* values) {
                return __ldg((const u16*)((const u8*)values + even)) |
                       (u32)__ldg((const u16*)((const u8*)values + odd)) << 16;
            };
            if (Query::HAS_SCALE) scales[u] = both(head.scales);
            if (Query::HAS_SPREAD) spreads[u] = both(head.spread);
        }
    }

    DEVICE void load(const Statistics& head, const Blocks& blocks, int base, int last, int lane) {
#pragma unroll
        for (int u = 0; u < SCORE_TILES; u++) load_tile(u, head, blocks, base, last, lane);
#pragma unroll
        for (int u = 0; u < SCORE_TILES; u++) load_scalars(u, head, blocks, base, last, lane);
    }

    // Returns the score, in bfloat16, of page base + `place(lane)`. Calls `after(u)` when tile u has been scored.
    template <typename After>
    DEVICE u16 score(const Query& query, int lane, After after) {
        u32 best[SCORE_TILES];
#pragma unroll
        for (int u = 0; u < SCORE_TILES; u++) {
            float dots[Query::TILES][2];
            query.dot(vectors[u], dots);
#pragma unroll
            for (int tile = 0; tile < Query::TILES; tile++) {
                float scores[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float unit = Query::HAS_SCALE ? bf16_to_float(i ? scales[u] >> 16 : scales[u] & 0xffff) : 1.0f;
                    scores[i] = dots[tile][i] * unit;
                    if constexpr (Query::HAS_SPREAD) {
                        float sigma = bf16_to_float(i ? spreads[u] >> 16 : spreads[u] & 0xffff);
                        scores[i] = fmaf(dots[tile][i], unit, query.spread[tile] * sigma);
                    }
                }
                u32 both = pack_bf16(scores[0], scores[1]);
                best[u] = tile ? max_or_nan_bf16(best[u], both) : both;
            }
            after(u);
        }
        return best_of_heads<GROUP>(best, lane);
    }

    static DEVICE int place(int lane) { return page_of_lane(lane); }
};

// Scores pages [first, last) of a row with all warps of a thread block. Calls `emit(page, bf16 bits)` for each page.
// `first` is a multiple of eight.
//
// PIPELINED is for few warps with many registers. It keeps one batch in flight while the previous one is scored, and
// the block ids of the next. A batch of wide records takes half of the registers, so the next tile is loaded as soon as
// one has been scored.
template <bool PIPELINED, int PAGES_PER_BLOCK, int RECORD, int GROUP, int HEAD_SIZE, typename Emit>
DEVICE void score_range(const ScoreQuery<RECORD, GROUP, HEAD_SIZE>& query, const Statistics& head, const int* table,
                        int first, int last, int warp, int warps, int lane, Emit emit) {
    using Batch = ScoreBatch<PAGES_PER_BLOCK, RECORD, GROUP, HEAD_SIZE>;
    using Blocks = typename Batch::Blocks;
    constexpr int STEP = 8 * SCORE_TILES;
    constexpr bool WIDE = Batch::VECTOR_STRIDE > 128;
    int base = first + warp * STEP, stride = warps * STEP;
    if (base >= last) return;
    Blocks blocks(table, base, last, lane);
    Batch batch;
    auto load = [&](Batch& into, int base) {
        into.load(head, blocks, base, last, lane);
        if (base + stride < last) blocks = Blocks(table, base + stride, last, lane);
    };
    auto score = [&](auto after) {
        u16 bits = batch.score(query, lane, after);
        int page = base + Batch::place(lane);
        if (page < last) emit(page, bits);
    };
    auto nothing = [](int) {};
    if constexpr (PIPELINED && WIDE) {
        load(batch, base);
#pragma unroll 1
        for (; base < last; base += stride) {
            bool has_next = base + stride < last;
            score([&](int u) {
                if (!has_next) return;
                batch.load_tile(u, head, blocks, base + stride, last, lane);
                batch.load_scalars(u, head, blocks, base + stride, last, lane);
            });
            if (base + 2 * stride < last) blocks = Blocks(table, base + 2 * stride, last, lane);
        }
    } else if constexpr (PIPELINED) {
        load(batch, base);
#pragma unroll 1
        for (; base < last; base += stride) {
            Batch next;
            if (base + stride < last) load(next, base + stride);
            score(nothing);
            batch = next;
        }
    } else {
#pragma unroll 1
        for (; base < last; base += stride) {
            load(batch, base);
            score(nothing);
        }
    }
}
