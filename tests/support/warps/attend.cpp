// Attends to lists of pages by attend.cu on a CPU, with two query tokens of one KV head each.
// Arguments: keys and values, a row of tokens after the other; tokens of a context; query; pages; output.
#include "common.cuh"

alignas(16) u8 memory[1 << 18];

#include "attend.cu"

constexpr int TOKENS = 2;

int main(int, char** arguments) {
    AttendParams p{};
    p.cache.keys = contents(arguments[1]);
    p.cache.values = p.cache.keys + 2 * HEAD_SIZE;
    p.cache.token_stride = 4 * HEAD_SIZE;
    p.cache.block_stride = PAGES_PER_BLOCK * PAGE_SIZE * p.cache.token_stride;
    int table[] = {0, 1, 2, 3, 4, 5, 6, 7}, lengths[TOKENS];
    for (int& length : lengths) length = atoi(arguments[2]);
    p.contexts.block_table = table;
    p.contexts.seq_lens = lengths;
    p.contexts.tokens_per_request = 1;
    p.contexts.dense_tokens = -1;
    p.query.heads = contents(arguments[3]);
    p.query.token_stride = GROUP * HEAD_SIZE;
    p.query.head_stride = HEAD_SIZE;
    p.pages = (const int*)contents(arguments[4]);
    p.k = SK_K;
    p.softmax.scale = 0.125f;
    std::vector<u16> heads(TOKENS * GROUP * HEAD_SIZE, 0xdead);
    p.output.heads = heads.data();
    p.output.token_stride = GROUP * HEAD_SIZE;
    for (blockIdx.z = 0; blockIdx.z < TOKENS; blockIdx.z++) run_block(WARPS, [&] { sparse_attention(p); });
    FILE* file = fopen(arguments[5], "wb");
    fwrite(heads.data(), 2, heads.size(), file);
    fclose(file);
}
