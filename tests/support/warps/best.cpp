// Counts the pages of the rows of one request by best.cu on a CPU.
// Arguments: memory of the cache; bytes from a block to the next, from a head to the next and from a token to the next;
// bytes before the keys, the statistics and their scales; block table; context, heads, pages of a block; query; scores;
// sums of the heads' weights; scale, softcap; share, least, most; output of counts.
#include "common.cuh"

alignas(16) u8 memory[1 << 18];

#include "best.cu"

int main(int, char** arguments) {
    auto next = [&] { return *++arguments; };
    CountParams p{};
    const u8* cache = contents(next());
    p.cache.block_stride = p.statistics.block_stride = atoll(next());
    p.cache.head_stride = p.statistics.head_stride = atoll(next());
    p.cache.token_stride = atoi(next());
    p.cache.keys = cache + atoll(next());
    p.statistics.vectors = cache + atoll(next());
    p.statistics.scales = (const u16*)(cache + atoll(next()));
    p.contexts.block_table = (const int*)contents(next());
    int context = atoi(next()), heads = atoi(next());
    p.contexts.seq_lens = &context;
    p.contexts.tokens_per_request = 1;
    p.contexts.dense_tokens = -1;
    p.pages_per_block = atoi(next());
    p.page_size = SK_PAGE_SIZE;
    p.query.heads = contents(next());
    p.query.head_stride = HEAD_SIZE;
    p.scores = (const u16*)contents(next());
    p.scores_stride = ceil_div(context / p.page_size, 8) * 8;
    p.heads.sums = (float2*)contents(next());
    p.heads.sink_pages = p.heads.recent_pages = p.sums_of_head = 1;
    p.chunk = 1 << 20;
    p.heads.scale = atof(next());
    p.heads.softcap = atof(next());
    float share = atof(next());
    i64 least = atoll(next()), most = atoll(next());
    std::vector<int> counts(heads);
    p.share = &share, p.least = &least, p.most = &most, p.counts = counts.data();
    gridDim.y = heads;
    for (blockIdx.y = 0; blockIdx.y < heads; blockIdx.y++) run_block(WARPS, [&] { count_best(p); });
    FILE* file = fopen(next(), "wb");
    fwrite(counts.data(), 4, heads, file);
    fclose(file);
}
