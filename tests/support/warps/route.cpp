// Decides by route.cuh on a CPU which groups are skipped. Arguments: the score, the threshold, and the cosines of a group
// of four. Prints 1 for a skipped group.
#include "common.cuh"

#include "route.cuh"

int main(int, char** arguments) {
    RoutingParams p{};
    p.score = atoi(arguments[1]);
    float cosines[4];
    for (int h = 0; h < 4; h++) cosines[h] = strtof(arguments[3 + h], nullptr);
    printf("%d\n", Routing{p}.skips<4>(cosines, strtof(arguments[2], nullptr)));
}
