// Prints the chunks of contexts by params.cuh. Reads lines: pages, k, parts, least pages of a chunk, room.
#include "common.cuh"

#include "params.cuh"


int main() {
    int num_pages, k;
    CandidateParams p{};
    while (scanf("%d %d %d %d %lld", &num_pages, &k, &p.parts, &p.chunk, &p.stride) == 5) {
        Chunks chunks(p, num_pages, k);
        printf("%d %d %d %d\n", chunks.size, chunks.kept, chunks.count, chunks.candidates(num_pages));
    }
}
