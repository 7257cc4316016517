"""Read bandwidth of the device's memory, the reference for shares of bandwidth."""

from __future__ import annotations

import statistics

import torch
import triton
import triton.language as tl

_BLOCKS = (4096, 8192, 16384)
"""Elements per iteration to try; the fastest result counts."""
_ITERATIONS = 16
_REPEATS = 10


@triton.jit
def _read(source_ptr, sums_ptr, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.int32)
    for iteration in tl.static_range(ITERATIONS):
        total += tl.load(source_ptr + (program * ITERATIONS + iteration) * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums_ptr + program, tl.sum(total))


def read_bandwidth(device: torch.device, num_bytes: int = 4 << 30) -> float:
    """Measured bytes per second of a kernel that sums a buffer far larger than the L2 cache."""
    free, _ = torch.cuda.mem_get_info(device)
    unit = 4 * max(_BLOCKS) * _ITERATIONS
    num_bytes = min(num_bytes, free // 4) // unit * unit
    source = torch.randint(-(2**31), 2**31 - 1, (num_bytes // 4,), dtype=torch.int32, device=device)
    sums = torch.empty(num_bytes // 4 // min(_BLOCKS) // _ITERATIONS, dtype=torch.int32, device=device)
    best = float("inf")
    for block in _BLOCKS:
        times = []
        for _ in range(_REPEATS + 1):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            _read[(source.numel() // (block * _ITERATIONS),)](
                source, sums, BLOCK=block, ITERATIONS=_ITERATIONS, num_warps=block // 1024
            )
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        best = min(best, statistics.median(times[1:]))
    return num_bytes / best
