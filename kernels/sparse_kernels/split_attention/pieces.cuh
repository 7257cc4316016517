// The results of the launch that attends to pieces, for the launch that adds them up.
#pragma once
#include "marks.cuh"

struct PieceParams {
    float* values;    // [rows, most, GROUP, HEAD_SIZE], not normalised.
    float2* weights;  // [rows, most, GROUP], largest logit (base 2) and sum of weights.
    int* counts;      // [rows], pieces that count; 0 for an output of zero.
    int most;         // Room for this many pieces per row.
};

// Data that the thread blocks of a row share under a stop rule.
struct ScanParams {
    int* marks;       // `RowMarks` of every row.
    float4* states;   // [rows, GROUP, WARP]: `Scan::states`.
    int* consecutive; // [rows]: `Scan::consecutive`.
    int pieces_per_test;
    int sink_pages;   // First pages, which are read first.
};
