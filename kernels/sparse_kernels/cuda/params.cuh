// The host fills these structs (params.py), which are the arguments of the kernels. A test holds both sides to the same
// sizes and offsets.
#pragma once
#include "common.cuh"

constexpr float LOG2E = 1.4426950408889634f;

// The query heads of a batch; strides in elements.
struct QueryParams {
    const void* heads;
    const float* scale;  // A float8 query times this is the query; null for other queries.
    i64 token_stride;
    i64 head_stride;
};

// Keys and values of a cache of token rows; strides in bytes.
struct CacheParams {
    const u8* keys;
    const u8* values;
    const float* key_scale;    // A float8 key times this is the key; null for other caches.
    const float* value_scale;  // The same of values.
    i64 block_stride;
    i64 head_stride;
    int token_stride;
};

// The statistics of all pages; strides in bytes.
struct StatisticsParams {
    const u8* vectors;  // Null: there are none.
    const u16* scales;
    const u16* spread;
    i64 block_stride;
    i64 head_stride;
    float std_weight;
};

// The contexts of a batch of requests.
struct ContextParams {
    const int* block_table;
    const int* seq_lens;       // Tokens of each request's context, its query tokens included.
    const u8* dense_requests;  // Requests that are attended whole; null for none.
    i64 table_stride;
    int tokens_per_request;
    int dense_tokens;          // Contexts of up to this many tokens are attended whole.
};

// Long requests that are attended whole, whose stripes all blocks of a launch share (whole.cuh).
struct WholeParams {
    const int* requests;  // How many are listed, then which, as `first_request` numbers the batch's first; null: none.
    float* values;        // Per listed row and stripe: [group * head size].
    float* weights;       // Per listed row and stripe: [group][2].
    int* arrived;         // Per listed row: stripes that are stored. Zero between launches.
    int first_request;
    int most_requests;    // That there is room for.
};

// The best pages of each chunk of a long context, best first, equal ones in the order of the text. Chunk c has its places
// from c * k on, where k is what the row reads.
struct CandidateParams {
    u16* keys;       // [rows, stride] in the order of scores (select.cuh); null where no context is long.
    int* pages;      // [rows, stride]
    i64 stride;      // A multiple of eight.
    int chunk;       // Pages of a chunk.
    int most_fused;  // Contexts of up to this many pages have no candidates: the blocks of their row score them.

    DEVICE bool has(int num_pages) const { return keys && num_pages > most_fused; }

    // The candidates of a context with more pages than are read.
    DEVICE int count(int num_pages, int k) const {
        int before = (num_pages - 1) / chunk;
        return before * k + min(k, num_pages - before * chunk);
    }
};

// The routing of one layer.
struct RoutingParams {
    const float4* coefficients;  // The cubic of each KV head's threshold; null: nothing is skipped.
    u64* counts;                 // Groups skipped and groups asked for, per KV head; null: not counted.
    int score;
    float first;                 // The cubic's variable is (log2(context) - first) * step, within 0 and 1.
    float step;
};

struct SoftmaxParams {
    const void* sink_logits;  // Null for none.
    float scale;
    float softcap;            // 0 for none.
    int sink_format;          // How sink logits are stored: BF16, FP16 or FP32.
};

struct SelectionParams {
    int k;               // Pages that are read, or where `budgets` says how many, at most.
    int sink_pages;
    int recent_pages;
    int by_row;          // Whether `budgets` are those of rows, not of requests.
    const int* budgets;  // Pages that each request, or each row, reads; null: k.

    // Returns the pages that a row reads, never more than there is room for.
    DEVICE int pages_of(int request, i64 row) const { return budgets ? min(budgets[by_row ? row : request], k) : k; }
};

struct StopParams {
    float scale_tolerance;
    float direction_tolerance;
    int patience;     // 0 never stops.
    int least_pages;  // Pages at the front that are read whatever the outputs.
};

struct OutputParams {
    u16* heads;
    int* pages_read;   // Per query token and KV head; null: not asked for.
    u64* counters;     // Per KV head: rows, blocks read, tokens read and tokens of the contexts of rows that may stop.
    i64 token_stride;  // In elements.
};

// A query token: its request, its context, and whether that is attended whole.
struct QueryToken {
    int request;
    int context;
    const int* table;
    bool whole;

    DEVICE QueryToken(const ContextParams& p, int token) {
        request = p.tokens_per_request == 1 ? token : token / p.tokens_per_request;
        context = p.seq_lens[request] - (p.tokens_per_request - 1 - (token - request * p.tokens_per_request));
        table = p.block_table + request * p.table_stride;
        whole = context <= p.dense_tokens || (p.dense_requests && p.dense_requests[request]);
    }
};

DEVICE i64 first_query_element(const QueryParams& p, int token, int head, int group) {
    return token * p.token_stride + (i64)head * group * p.head_stride;
}

// Keys and values of one KV head; the stride in bytes.
struct TokenRows {
    const u8* keys;
    const u8* values;
    i64 block_stride;
    int token_stride;

    DEVICE TokenRows(const CacheParams& p, int head)
        : keys(p.keys + head * p.head_stride), values(p.values + head * p.head_stride), block_stride(p.block_stride),
          token_stride(p.token_stride) {}

    // The key of the context's first token.
    DEVICE const u8* first_key(const int* table) const { return keys + table[0] * block_stride; }
};

// Returns the factor of the logits of a query and a key as they are stored. It includes log2(e) unless there is a softcap.
DEVICE float logit_scale(const SoftmaxParams& softmax, const QueryParams& query, const CacheParams& cache) {
    return softmax.scale * (query.scale ? *query.scale : 1.0f) * (cache.key_scale ? *cache.key_scale : 1.0f) *
           (softmax.softcap > 0 ? 1.0f : LOG2E);
}

DEVICE float value_scale(const CacheParams& cache) { return cache.value_scale ? *cache.value_scale : 1.0f; }

// The sink logits of the query heads of one KV head, as the model stores them; false if there are none.
struct SinkLogits {
    const void* logits;
    int first;
    int format;

    DEVICE SinkLogits(const SoftmaxParams& p, int head, int group)
        : logits(p.sink_logits), first(head * group), format(p.sink_format) {}

    DEVICE explicit operator bool() const { return logits != nullptr; }

    DEVICE float operator[](int h) const {
        if (format == FP32) return ((const float*)logits)[first + h];
        return format == BF16 ? load_float<BF16>(logits, first + h) : load_float<FP16>(logits, first + h);
    }
};
