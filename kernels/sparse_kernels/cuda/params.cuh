// The structs that are the arguments of the kernels. The host reads these declarations and fills the structs (params.py),
// so a field is a number, a pointer or another struct of this kind, on a line of its own.
#pragma once
#include "common.cuh"

constexpr float LOG2E = 1.4426950408889634f;

// The query heads of a batch; strides in elements.
struct QueryParams {
    const void* heads;
    const float* scale;  // Factor of float8 queries; null for other queries.
    i64 token_stride;
    i64 head_stride;
};

// Keys and values of a cache of token rows; strides in bytes.
struct CacheParams {
    const u8* keys;
    const u8* values;
    const float* key_scale;    // Factor of float8 keys; null for other caches.
    const float* value_scale;  // Factor of float8 values.
    i64 block_stride;
    i64 head_stride;
    int token_stride;
};

// The statistics of all pages; strides in bytes.
struct StatisticsParams {
    const u8* vectors;  // Null without statistics.
    const u16* scales;
    const u16* spread;
    i64 block_stride;
    i64 head_stride;
    float std_weight;
    int refined;        // Of leveled records: the share of a stripe that is scored whole, in units of 1/1024.
};

// The contexts of a batch of requests.
struct ContextParams {
    const int* block_table;
    const int* seq_lens;       // Tokens of each request's context, its query tokens included.
    const u8* dense_requests;  // Requests that attend densely; null for none.
    i64 table_stride;
    int tokens_per_request;
    int dense_tokens;          // Contexts of up to this many tokens attend densely.
};

// Long dense requests. All thread blocks of a launch share their stripes (whole.cuh).
struct WholeParams {
    const int* requests;  // Their count, then their numbers; `first_request` is the batch's first. Null: none.
    float* values;        // Per listed row and stripe: [group * head size].
    float* weights;       // Per listed row and stripe: [group][2].
    int* arrived;         // WHOLE_COUNTERS, then per listed row: stored stripes. Zero between launches.
    int first_request;
    int most_requests;    // Room for this many requests.
};

// The best pages of each chunk of a long context, best first; equal scores in text order. As many pages of a chunk are
// kept as the row reads, or all of a small chunk in text order.
struct CandidateParams {
    u16* keys;       // [rows, stride], ordered like the scores (select.cuh); null if no context is long.
    int* pages;      // [rows, stride]
    i64 stride;      // Room for candidates, a multiple of eight.
    int parts;       // Thread blocks that share a row, if it has as many chunks.
    int chunk;       // Pages of a chunk, at least.
    int most_fused;  // Contexts of up to this many pages have no candidates: their row scores them itself.

    DEVICE bool has(int num_pages) const { return keys && num_pages > most_fused; }
};

// The chunks of a context with candidates, whose row reads k pages: one to each thread block, unless the candidates
// would not find room or a chunk would be too large.
struct Chunks {
    // Of the pages of a chunk. Warps score this many pages at a time.
    static constexpr int UNIT = 32, MOST = 8192;
    // A chunk of up to this many times k pages keeps all of them: selecting twice takes longer than it saves.
    static constexpr int SMALL = 4;
    int size;
    int kept;  // Of each chunk but the last.
    int count;

    DEVICE Chunks(const CandidateParams& p, int num_pages, int k) {
        size = max(p.chunk, ceil_div(num_pages, p.parts));
        int most = (int)p.stride / max(k, 1);
        if (num_pages > p.stride && ceil_div(num_pages, size) > most) size = ceil_div(num_pages, most);
        size = min(ceil_div(size, UNIT) * UNIT, MOST);
        kept = num_pages <= p.stride && size <= SMALL * k ? size : min(k, size), count = ceil_div(num_pages, size);
    }

    DEVICE int candidates(int num_pages) const { return (count - 1) * kept + min(kept, num_pages - (count - 1) * size); }
};

// Copies of pages of a cache in host memory (hot.cuh). Null pointers: none.
struct HotParams {
    u8* rows;          // [heads, places]: the token rows of a page.
    u64* tags;         // [heads, places]: the stamp of the last step that read it << 32 | page + 1; 0: empty.
    u64* counters;     // [heads, 2]: pages read, pages read from the host.
    const int* clock;  // The number of the step.
    int sets;          // Of eight places each.
};

// The routing of one layer.
struct RoutingParams {
    const float4* coefficients;  // The cubic of each KV head's threshold; null: nothing is skipped.
    u64* counts;                 // Groups skipped and groups routed, per KV head; null: not counted.
    int score;
    float first;                 // The variable of the cubic is (log2(context) - first) * step, from 0 to 1.
    float step;
};

struct SoftmaxParams {
    const void* sink_logits;  // Null for none.
    float scale;
    float softcap;            // 0 for none.
    int sink_format;          // Format of the sink logits: BF16, FP16 or FP32.
};

struct SelectionParams {
    int k;               // The most pages to read; the budget unless `budgets` has it.
    int sink_pages;
    int recent_pages;
    int by_row;          // Whether `budgets` has a number per row, not per request.
    const int* budgets;  // Pages to read, of each request or row; null: k.

    // Returns the pages that a row reads, at most the room for them.
    DEVICE int pages_of(int request, i64 row) const { return budgets ? min(budgets[by_row ? row : request], k) : k; }
};

struct StopParams {
    float scale_tolerance;
    float direction_tolerance;
    int patience;     // 0 never stops.
    int least_pages;  // First pages, which are read in any case.
};

struct OutputParams {
    u16* heads;
    int* pages_read;   // Per query token and KV head; null: not written.
    u64* counters;     // Per KV head: rows, test intervals read, tokens read and context tokens, of rows that may stop.
    i64 token_stride;  // In elements.
};

// A query token: its request, its context, and whether it attends densely.
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

// Returns the factor of the logits of a stored query and a stored key. It includes log2(e) unless there is a softcap.
DEVICE float logit_scale(const SoftmaxParams& softmax, const QueryParams& query, const CacheParams& cache) {
    return softmax.scale * (query.scale ? *query.scale : 1.0f) * (cache.key_scale ? *cache.key_scale : 1.0f) *
           (softmax.softcap > 0 ? 1.0f : LOG2E);
}

DEVICE float value_scale(const CacheParams& cache) { return cache.value_scale ? *cache.value_scale : 1.0f; }

// The learned sink logits of the query heads of one KV head; false without any.
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
