"""The CUDA code that decides which groups are skipped (`route.cuh`), on a CPU: it decides as the reference does."""

import shutil
import subprocess
from pathlib import Path

import pytest
import sparse_kernels
import torch
from sparse_kernels.group_routing import GROUP_SCORES
from sparse_kernels.group_routing.reference import aggregate

HEADERS = Path(sparse_kernels.__file__).parent / "cuda"
WARPS = Path(__file__).parents[1] / "support" / "warps"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warps")
    for header in ("route.cuh", "params.cuh"):
        shutil.copy(HEADERS / header, folder)
    for source in ("common.cuh", "route.cpp"):
        shutil.copy(WARPS / source, folder)
    compiler = ["g++", "-std=c++20", "-O1", "-w", "-pthread"]
    subprocess.run([*compiler, "route.cpp", "-o", "route"], cwd=folder, check=True)
    return folder / "route"


NAN = float("nan")


@pytest.mark.parametrize("score", GROUP_SCORES)
@pytest.mark.parametrize("cosines", [(0.5, 0.25, 1, 0.75), (0.75, NAN, 0.75, 0.75), (NAN, NAN, NAN, NAN)], ids=str)
def test_it_decides_as_the_reference(program: Path, score: str, cosines: tuple[float, ...]) -> None:
    number = GROUP_SCORES.index(score)
    for threshold in (-2, 0.25, 0.5, 0.75, 1, 2):
        arguments = (number, threshold, *cosines)
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=True)
        assert bool(int(done.stdout)) == bool(aggregate(torch.tensor(cosines), number) >= threshold)
