"""Every Triton kernel compiles for every kind of statistics, on the oldest and newest architecture, without a GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from sparse_kernels.page_statistics import KINDS

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

CODE = """
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


triton.runtime.driver.set_active(Driver())

from sparse_kernels.batch import DecodeBatch
from sparse_kernels.page_score import triton as scores
from sparse_kernels.page_statistics import KINDS, StatisticsLayout
from sparse_kernels.page_statistics import triton as write


class Compile:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **kwargs: print(len(self.kernel.warmup(*args, grid=grid, **kwargs).asm["cubin"]))


write._write_cache, scores._page_score = Compile(write._write_cache), Compile(scores._page_score)
for kind in KINDS.values():
    layout = StatisticsLayout(8, 128, kind.formats[0], kind=kind)
    cache = torch.zeros(4, 8, 64 + layout.rows(64), 256).bfloat16()
    views = layout.views(cache[:, :, 64:], 64)
    projected = torch.zeros(3, 48, 128).bfloat16()
    query, key, value = projected.split([32, 8, 8], dim=1)
    write.write_cache(key, value, cache[:, :, :64], views, torch.zeros(3).long(), 8, None, None)
    if kind.is_fused:
        continue
    table, lengths = torch.zeros(3, 4).int(), torch.zeros(3).int()
    batch = DecodeBatch(query, table, lengths)
    scores.launch_scores(batch, views, 8, 1.0, torch.zeros(3, 8, 32).bfloat16())
"""


@pytest.mark.parametrize("architecture", ["80", "90"])
def test_compiles(architecture: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, architecture], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    sizes = list(map(int, done.stdout.split()))
    assert len(sizes) == len(KINDS) + sum(not kind.is_fused for kind in KINDS.values())
    assert min(sizes) > 0
