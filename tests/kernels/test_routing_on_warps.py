"""The CUDA code that decides which groups are skipped (`route.cuh`), on a CPU: it decides as the reference does."""

import subprocess
from pathlib import Path

import pytest
import torch
from sparse_kernels.group_routing import GROUP_SCORES
from sparse_kernels.group_routing.reference import aggregate
from support.emulated import HEADERS, compile_program, needs_compiler

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    headers = HEADERS / "route.cuh", HEADERS / "params.cuh"
    return compile_program(tmp_path_factory.mktemp("warps"), "route", headers)


NAN = float("nan")


@pytest.mark.parametrize("score", GROUP_SCORES)
@pytest.mark.parametrize("cosines", [(0.5, 0.25, 1, 0.75), (0.75, NAN, 0.75, 0.75), (NAN, NAN, NAN, NAN)], ids=str)
def test_it_decides_as_the_reference(program: Path, score: str, cosines: tuple[float, ...]) -> None:
    number = GROUP_SCORES.index(score)
    for threshold in (-2, 0.25, 0.5, 0.75, 1, 2):
        arguments = (number, threshold, *cosines)
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=True)
        assert bool(int(done.stdout)) == bool(aggregate(torch.tensor(cosines), number) >= threshold)
