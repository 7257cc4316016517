"""Starts the threads of the compiled CPU kernels: as many as torch has, on torch's cores.

Numba counts the cores of the thread that imports it. vLLM binds each OpenMP thread of a worker to one core, including
the main thread, so Numba counts one core there. Its OpenMP layer would then set the runtime that it shares with torch
to one thread, and torch would also have only one.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numba
import torch
from numba.extending import overload
from numba.np.ufunc import parallel

_ELEMENTS_PER_THREAD = 2**18
"""Work of about 50 microseconds. With less, a thread costs more than it gains, even more if it waits for a core."""


def start_threads() -> None:
    """Start Numba's threads, once per process. torch keeps its number of threads.

    OpenMP comes first: the kernels then run on torch's threads, which stay on the cores chosen by vLLM. Numba's own
    pool is used if the OpenMP runtime that Numba was built for is not installed.

    Numba's environment variables have precedence. A pool that another package has already started stays.
    """
    threads = torch.get_num_threads()
    if not parallel._is_initialized:
        if "NUMBA_NUM_THREADS" not in os.environ:
            _resize_pool(threads)
        if "NUMBA_THREADING_LAYER_PRIORITY" not in os.environ:
            numba.config.THREADING_LAYER_PRIORITY = ["omp", "workqueue", "tbb"]
        # Asking for the number of threads starts them.
        with _bound_to(_openmp_cores()):
            numba.get_num_threads()
    if torch.get_num_threads() != threads:
        # vLLM's worker replaces `torch.set_num_threads` by a function that only warns.
        torch._C.set_num_threads(threads)


def use_threads(elements: int) -> None:
    """Let the next kernels of this thread run on as many threads as their work justifies, at least one.

    Args:
        elements: numbers that the kernel reads.
    """
    most = parallel.NUM_THREADS if "NUMBA_NUM_THREADS" in os.environ else torch.get_num_threads()
    numba.set_num_threads(max(1, min(most, parallel.NUM_THREADS, -(-elements // _ELEMENTS_PER_THREAD))))


def _resize_pool(threads: int) -> None:
    """Give Numba another number of threads than it counted. Numba's own functions cannot do this after its import."""
    numba.config.NUMBA_NUM_THREADS = parallel.NUM_THREADS = threads
    # The limit of `numba.set_num_threads` was also fixed at import.
    parallel.snt_check = parallel.gen_snt_check()
    overload(parallel.snt_check)(parallel.ol_snt_check)


def _openmp_cores() -> set[int]:
    """Return the cores that the OpenMP runtime binds its threads to; empty if it does not bind them."""
    runtime = ctypes.CDLL(None)
    cores: set[int] = set()
    if hasattr(runtime, "omp_get_num_places"):
        for place in range(runtime.omp_get_num_places()):
            of_place = (ctypes.c_int * runtime.omp_get_place_num_procs(place))()
            runtime.omp_get_place_proc_ids(place, of_place)
            cores.update(of_place)
    return cores


@contextmanager
def _bound_to(cores: set[int]) -> Iterator[None]:
    """Bind the calling thread to `cores` for a while, which new threads inherit. An empty set changes nothing."""
    if not cores or sys.platform != "linux":
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
