"""The temporary memory of a decode step, with kernels that do nothing, on a CPU."""

import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from sparse_kernels.batch import DecodeBatch, DecodeOutput, PageSelection, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.limits import DecodeShape
from sparse_kernels.page_statistics import KINDS, StatisticsLayout
from sparse_kernels.page_topk import cuda as topk
from sparse_kernels.paging import PagedTensor
from sparse_kernels.sparse_decode import StepSize, candidates, cuda, scratch_bytes
from sparse_kernels.split_attention import cuda as split

HEADS, SIZE, BLOCK, PAGE = 2, 64, 64, 16
MULTIPROCESSORS = 132


class Memory:
    """Bytes of the tensors that `torch.empty` makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = self._held = 0
        empty = torch.empty

        def counted(*shape: Any, **options: Any) -> torch.Tensor:
            made = empty(*shape, **options)
            self._held += made.nbytes
            self.most = max(self.most, self._held)
            weakref.finalize(made, self._free, made.nbytes)
            return made

        monkeypatch.setattr(torch, "empty", counted)

    def _free(self, size: int) -> None:
        self._held -= size


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """A GPU of some compute capability, whose kernels do nothing."""
    capability = getattr(request, "param", (9, 0))
    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    for module in (cuda, candidates, split, topk):
        monkeypatch.setattr(module, "kernel", MagicMock())
    monkeypatch.setattr(cuda, "launch_scores", lambda *_, **__: None)
    return capability


def step(requests: int, pages: int, kind: str, tokens: int, group: int) -> tuple[DecodeBatch, KVCache]:
    """Requests of the longest context. All blocks of their tables are the same."""
    layout = StatisticsLayout(PAGE, SIZE, KINDS[kind].formats[0], kind=KINDS[kind])
    cache = torch.zeros(1, HEADS, BLOCK + layout.rows(BLOCK), 2 * SIZE, dtype=torch.bfloat16)
    keys, values = (PagedTensor.from_rows(cache[:, :, :BLOCK, side], PAGE) for side in (slice(SIZE), slice(SIZE, None)))
    batch = DecodeBatch(
        torch.zeros(1, HEADS * group, SIZE, dtype=torch.bfloat16).expand(requests * tokens, -1, -1),
        torch.zeros(1, pages * PAGE // BLOCK, dtype=torch.int32).expand(requests, -1),
        torch.full((requests,), pages * PAGE, dtype=torch.int32),
    )
    return batch, KVCache(keys, values, layout.views(cache[:, :, BLOCK:], BLOCK))


CASES = {
    "in pieces": (64, 4096, "mean_and_spread", 1, 4, 2048),
    "in pieces, more than fit at once": (6000, 4096, "mean_and_spread", 1, 4, 2048),
    "in pieces, drafts": (1500, 4096, "quarters", 4, 4, 1025),
    "in pieces, large groups": (300, 4096, "quarters", 1, 32, 64),
    "candidates": (256, 16384, "quarters", 1, 4, 128),
    "candidates of long contexts": (40, 60000, "mean_and_spread", 2, 4, 1024),
    "no candidates": (8, 4096, "quarters", 1, 4, 128),
    "another launch scores": (256, 4096, "bounds", 1, 4, 128),
    "another launch selects": (40, 70000, "bounds", 1, 4, 128),
}
"""Requests, pages of a context, kind of statistics, tokens of a request, query heads to a KV head, and pages read."""


@pytest.mark.parametrize("gpu", [(9, 0), (8, 0), (8, 9)], indirect=True, ids=["9.0", "8.0", "8.9"])
@pytest.mark.parametrize("case", CASES)
def test_no_more_memory_is_taken_than_is_reserved(
    case: str, gpu: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, pages, kind, tokens, group, k = CASES[case]
    batch, cache = step(requests, pages, kind, tokens, group)
    shape = DecodeShape(group, SIZE, pages, k)
    layout = StatisticsLayout(PAGE, SIZE, KINDS[kind].formats[0], kind=KINDS[kind])
    reserved = scratch_bytes(shape, StepSize(HEADS, requests, tokens), layout, gpu, MULTIPROCESSORS)
    output = DecodeOutput(torch.zeros_like(batch.query))
    softmax, selection = Softmax(0.1), PageSelection(k, 1, 1)
    memory = Memory(monkeypatch)
    cuda.sparse_decode(batch, cache, softmax, selection, None, None, output)
    # Numbers of single rows and chunks are not counted.
    assert memory.most <= 1.01 * reserved
    # Parts of large groups are not attended together.
    assert reserved <= 2 * memory.most
