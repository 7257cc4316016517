"""A program that runs a compiled kernel and prints the threads of torch and Numba as JSON.

With an argument, its main thread is first bound to that core and torch gets two threads, as in vLLM's worker.
"""

import ctypes
import json
import os
import sys

import numpy as np
import torch

if len(sys.argv) > 1:
    os.sched_setaffinity(0, {int(sys.argv[1])})
    torch.set_num_threads(2)
torch_before = torch.get_num_threads()
main_before = os.sched_getaffinity(0)

import numba  # noqa: E402 - counts the cores that are left to the main thread, before any kernel, as in vLLM's worker
from sparse_kernels.page_topk import select_pages  # noqa: E402

threads_used = []
for length in (8, 2**20):
    select_pages(torch.zeros(1, 2, length, dtype=torch.bfloat16), torch.tensor([length]), 4)
    threads_used.append(numba.get_num_threads())

thread_id = ctypes.CDLL(None).gettid
thread_id.argtypes, thread_id.restype = [], ctypes.c_int


@numba.njit(parallel=True)
def run(threads):
    for i in numba.prange(threads.size):
        threads[i] = thread_id()


threads = np.zeros(numba.get_num_threads(), dtype=np.int64)
run(threads)
# Another package, such as vLLM's n-gram speculation, changes the number temporarily.
numba.set_num_threads(1)
numba.set_num_threads(len(threads))
print(
    json.dumps(
        {
            "layer": numba.threading_layer(),
            "torch": [torch_before, torch.get_num_threads()],
            "numba": len(set(threads.tolist())),
            "by work": threads_used,
            "cores": sorted({core for thread in threads.tolist() for core in os.sched_getaffinity(thread)}),
            "main thread": [sorted(main_before), sorted(os.sched_getaffinity(0))],
        }
    )
)
