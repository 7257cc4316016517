"""The compiled kernels share torch's threads, for every core that the main thread is bound to."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CORES = sorted(os.sched_getaffinity(0))
PROGRAM = Path(__file__).parents[1] / "support" / "thread_report.py"

two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


@functools.cache
def report(*arguments: object, **variables: str) -> dict:
    unset = ("OMP_", "GOMP_", "KMP_", "NUMBA_NUM_", "NUMBA_THREADING_", "LD_PRELOAD")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    result = subprocess.run(command, env=inherited | variables, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(result.stdout)


def test_a_bound_main_thread_leaves_torch_and_the_kernels_their_threads():
    got = report(CORES[0])
    assert got["torch"] == [2, 2]
    assert got["numba"] == 2
    assert got["main thread"] == [[CORES[0]], [CORES[0]]]


@two_cores
def test_little_work_stays_on_one_thread():
    assert report(OMP_NUM_THREADS="2")["by work"] == [1, 2]


@two_cores
@pytest.mark.parametrize("layer", ["", "workqueue"])
def test_kernels_run_on_the_cores_that_openmp_is_bound_to(layer):
    bound = {"GOMP_CPU_AFFINITY": f"{CORES[0]} {CORES[1]}", "OMP_NUM_THREADS": "2"}
    got = report(**bound, **({"NUMBA_THREADING_LAYER": layer} if layer else {}))
    assert got["layer"] == (layer or "omp")
    assert got["torch"] == [2, 2]
    assert got["numba"] == 2
    assert got["cores"] == CORES[:2]
    assert got["main thread"] == [[CORES[0]], [CORES[0]]]


def test_a_worker_of_one_core_has_one_thread():
    got = report(GOMP_CPU_AFFINITY=str(CORES[-1]), OMP_NUM_THREADS="1")
    assert (got["torch"], got["numba"], got["cores"]) == ([1, 1], 1, [CORES[-1]])


@two_cores
def test_unbound_threads_are_as_many_as_torch_has():
    got = report(OMP_NUM_THREADS="1")
    assert (got["torch"], got["numba"]) == ([1, 1], 1)
    got = report(OMP_NUM_THREADS="2")
    assert (got["torch"], got["numba"], got["cores"]) == ([2, 2], 2, CORES)


@two_cores
def test_numbas_own_variable_comes_first_and_spares_torch():
    got = report(NUMBA_NUM_THREADS="1", OMP_NUM_THREADS="2")
    assert (got["torch"], got["numba"]) == ([2, 2], 1)
