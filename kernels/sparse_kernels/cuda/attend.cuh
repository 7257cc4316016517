// Softmax attention over pages. A warp takes eight tokens at a time. Keys and values go from memory to the tensor cores
// without shared memory.
#pragma once
#include "params.cuh"

// Eight elements of a token's value. `interleave` pairs those of two tokens in the format of the matrix instructions.
template <int KV>
struct ValueType {
    using type = uint4;
    template <bool AHEAD>
    static DEVICE uint4 load(const u8* p) { return load16<AHEAD>(p); }
    static DEVICE void interleave(const uint4& first, const uint4& second, int j, u32& even, u32& odd) {
        even = __byte_perm(word(first, j), word(second, j), 0x5410);
        odd = __byte_perm(word(first, j), word(second, j), 0x7632);
    }
};

template <>
struct ValueType<FP8> {
    using type = uint2;
    template <bool AHEAD>
    static DEVICE uint2 load(const u8* p) { return load8<AHEAD>(p); }
    static DEVICE void interleave(const uint2& first, const uint2& second, int j, u32& even, u32& odd) {
        u32 bytes = __byte_perm(word(first, j / 2), word(second, j / 2), j % 2 ? 0x7362 : 0x5140);
        even = fp8_pair_to_fp16((u16)bytes);
        odd = fp8_pair_to_fp16((u16)(bytes >> 16));
    }
};

// A tile: eight consecutive tokens of a KV-cache block. The first `valid` tokens belong to the context.
struct TokenTile {
    i64 block;
    int token;
    int valid;
    i64 beside = 0;  // Bytes from the cache to other memory of the same form, if the tile is there.
};

// Query rows in shared memory, in the format of the matrix instructions. Rows beyond the group are zero.
template <int MMA, int GROUP, int HEAD_SIZE>
struct AttendQuery {
    static constexpr int ROWS = 8 * Heads<GROUP>::TILES;
    // 64 bytes of padding put the rows of a tile that one access reads into different banks.
    u16 rows[ROWS][padded(HEAD_SIZE) + 32];

    DEVICE uint4 eight(int row, int d) const { return row < ROWS ? *(const uint4*)&rows[row][d] : uint4{0, 0, 0, 0}; }

    // Stores one row, which is spread over a warp: `x` are the lane's consecutive elements.
    DEVICE void prepare(int row, const float (&x)[padded(HEAD_SIZE) / WARP], int lane) {
        constexpr int PER_LANE = padded(HEAD_SIZE) / WARP;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) rows[row][lane * PER_LANE + i] = (u16)pack_pair<MMA>(row < GROUP ? x[i] : 0, 0);
    }

    // Loads the query of a token and KV head with all warps of a thread block. All threads see it after a barrier.
    template <int QUERY, int WARPS>
    DEVICE void prepare_all(const QueryParams& p, int token, int head, int warp, int lane) {
        i64 first = first_query_element(p, token, head, GROUP);
#pragma unroll 1
        for (int r = warp; r < ROWS; r += WARPS) {
            float x[padded(HEAD_SIZE) / WARP];
            load_row<QUERY, GROUP, HEAD_SIZE>(p.heads, first, p.head_stride, r, lane, x);
            prepare(r, x, lane);
        }
    }
};

// The unnormalised attention of a warp. A lane holds two things. Of head g of each tile: the largest logit (base 2) and
// the sum of weights. Of heads 2t and 2t+1: the weighted values of elements 64 piece + 8 g + {2j, 2j+1}.
template <int KV, int GROUP, int HEAD_SIZE>
struct Attention {
    static constexpr int MMA = KV == BF16 ? BF16 : FP16;
    static constexpr int KV_BYTES = KV == FP8 ? 1 : 2;
    static constexpr int TILES = Heads<GROUP>::TILES;
    static constexpr int KEY_PIECES = padded(HEAD_SIZE) * KV_BYTES / 64;
    static constexpr int VALUE_PIECES = padded(HEAD_SIZE) / 64;
    using Query = AttendQuery<MMA, GROUP, HEAD_SIZE>;
    using ValuePiece = typename ValueType<KV>::type;

    float largest[TILES];
    float total[TILES];
    float values[TILES][VALUE_PIECES][4][4];

    struct Tokens {
        uint4 keys[KEY_PIECES];
        ValuePiece values[2][VALUE_PIECES];
    };

    DEVICE void clear() {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            largest[tile] = -INFINITY_F;
            total[tile] = 0;
#pragma unroll
            for (int piece = 0; piece < VALUE_PIECES; piece++)
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int c = 0; c < 4; c++) values[tile][piece][j][c] = 0;
        }
    }

    // Reads eight consecutive tokens of a KV-cache block. Values of tokens beyond `valid` are not read, because they
    // may hold anything. With AHEAD, loads of tokens that are used after a barrier start before it.
    template <bool AHEAD = false>
    static DEVICE Tokens read(const TokenRows& rows, const TokenTile& tile, int valid, int lane) {
        int g = lane / 4, t = lane % 4;
        Tokens tokens;
        i64 at = tile.beside + tile.block * rows.block_stride + (i64)tile.token * rows.token_stride;
        const u8* key = rows.keys + at + g * rows.token_stride + 16 * t;
#pragma unroll
        for (int piece = 0; piece < KEY_PIECES; piece++) {
            bool exists = in_head<HEAD_SIZE>((64 * piece + 16 * t) / KV_BYTES);
            tokens.keys[piece] = exists ? load16<AHEAD>(key + 64 * piece) : uint4{0, 0, 0, 0};
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u8* value = rows.values + at + (2 * t + i) * rows.token_stride + 8 * KV_BYTES * g;
#pragma unroll
            for (int piece = 0; piece < VALUE_PIECES; piece++) {
                tokens.values[i][piece] = ValuePiece{};
                if (2 * t + i < valid && in_head<HEAD_SIZE>(64 * piece + 8 * g))
                    tokens.values[i][piece] = ValueType<KV>::template load<AHEAD>(value + 64 * KV_BYTES * piece);
            }
        }
        return tokens;
    }

    // Adds the first `count` of N tiles. `scale` includes log2(e) unless there is a softcap.
    template <int N>
    DEVICE void add(const Query& query, const Tokens (&tokens)[N], const int (&valid)[N], int count, float scale,
                    float softcap, int lane) {
        int g = lane / 4, t = lane % 4;
        // A tile has two chains of products, because the tensor cores have a long latency.
        float logits[N][2][4];
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int c = 0; c < 8; c++) logits[n][c / 4][c % 4] = 0;
        auto step = [&](int n, const uint4& low, const uint4& high, int half, u32 b0, u32 b1) {
            mma_k16<MMA>(logits[n][half], word(low, 2 * half), word(high, 2 * half), word(low, 2 * half + 1),
                         word(high, 2 * half + 1), b0, b1);
        };
#pragma unroll
        for (int piece = 0; piece < KEY_PIECES; piece++) {
            if constexpr (KV != FP8) {
                int d = 32 * piece + 8 * t;
                uint4 low = query.eight(g, d), high = query.eight(8 + g, d);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const uint4& key = tokens[n].keys[piece];
                    step(n, low, high, 0, key.x, key.y);
                    step(n, low, high, 1, key.z, key.w);
                }
            } else {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int d = 64 * piece + 16 * t + 8 * i;
                    uint4 low = query.eight(g, d), high = query.eight(8 + g, d);
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            u32 four = word(tokens[n].keys[piece], 2 * i + half);
                            step(n, low, high, half, fp8_pair_to_fp16((u16)four), fp8_pair_to_fp16((u16)(four >> 16)));
                        }
                }
            }
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            float weights[N][2], now = largest[tile];
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float x = (logits[n][0][2 * tile + i] + logits[n][1][2 * tile + i]) * scale;
                    if (softcap > 0) x = softcap * tanhf(x / softcap) * LOG2E;
                    weights[n][i] = n < count && 2 * t + i < valid[n] ? x : -INFINITY_F;
                    now = fmaxf(now, weights[n][i]);
                }
            now = fmaxf(now, __shfl_xor_sync(FULL, now, 1));
            now = fmaxf(now, __shfl_xor_sync(FULL, now, 2));
            // If every logit is -inf or NaN, there is no largest logit to subtract.
            float base = now == -INFINITY_F ? 0.0f : now;
            float shrink = fast_exp2(largest[tile] - base), sum = 0;
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    weights[n][i] = fast_exp2(weights[n][i] - base);
                    sum += weights[n][i];
                }
            // The total is of the lane's own tokens only. The lanes of a head add up their totals at the end.
            total[tile] = total[tile] * shrink + sum;
            largest[tile] = now;
            float even = __shfl_sync(FULL, shrink, 8 * t), odd = __shfl_sync(FULL, shrink, 8 * t + 4);
#pragma unroll
            for (int piece = 0; piece < VALUE_PIECES; piece++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    values[tile][piece][j][0] *= even, values[tile][piece][j][1] *= odd;
                    values[tile][piece][j][2] *= even, values[tile][piece][j][3] *= odd;
                }
#pragma unroll
            for (int n = 0; n < N; n++) {
                // The product with the values needs the weights of two tokens of a head in one register.
                u32 pair = pack_pair<MMA>(weights[n][0], weights[n][1]);
#pragma unroll
                for (int piece = 0; piece < VALUE_PIECES; piece++)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        u32 first, second;
                        ValueType<KV>::interleave(tokens[n].values[0][piece], tokens[n].values[1][piece], j, first, second);
                        mma_k8<MMA>(values[tile][piece][j], first, second, pair);
                    }
            }
        }
    }

    // Returns the sum of the weights of a head's tokens over the lanes that share them.
    DEVICE float total_weight(int tile) const {
        float sum = total[tile];
        sum += __shfl_xor_sync(FULL, sum, 1);
        return sum + __shfl_xor_sync(FULL, sum, 2);
    }

    // Calls `f(head, element, four consecutive values)` for all values of this lane.
    template <typename F>
    DEVICE void for_each_four(int lane, F f) const {
        int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int piece = 0; piece < VALUE_PIECES; piece++)
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int j = 0; j < 4; j += 2) {
                        int head = 8 * tile + 2 * t + i;
                        const float(&a)[4] = values[tile][piece][j];
                        const float(&b)[4] = values[tile][piece][j + 1];
                        int d = 64 * piece + 8 * g + 2 * j;
                        if (head < GROUP && in_head<HEAD_SIZE>(d))
                            f(head, d, float4{a[i], a[2 + i], b[i], b[2 + i]});
                    }
    }
};
