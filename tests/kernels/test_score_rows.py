"""Rows of scores as the CUDA code reads them: eight at once, from an address that is a multiple of 16 bytes."""

from types import SimpleNamespace

import pytest
import torch
from sparse_kernels.batch import DecodeBatch, PageSelection, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.page_coverage import Limits
from sparse_kernels.page_coverage import cuda as coverage
from sparse_kernels.page_topk import cuda
from sparse_kernels.sparse_decode.cuda import _scores
from support.paged import make_batch


class Recorded:
    """A kernel that only keeps its arguments."""

    def __init__(self) -> None:
        self.launches: list[object] = []

    def reserve_shared(self, num_bytes: int) -> None:
        pass

    def launch(self, grid: tuple[int, int, int], params: object, shared_bytes: int = 0) -> None:
        self.launches.append(params)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    kernel = Recorded()
    monkeypatch.setattr(cuda, "kernel", lambda *_: kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=132))
    return kernel


@pytest.mark.parametrize("k", [8, 1025])
@pytest.mark.parametrize("first", [0, 3, 8])
def test_scores_anywhere_in_memory_are_selected_from(first: int, k: int, recorded: Recorded) -> None:
    scores = torch.zeros(2, 3, 2056, dtype=torch.bfloat16)[:, :, first : first + 2048]
    cuda.select_pages(scores, torch.tensor([2048, 5]), k, 0, 0)
    (params,) = recorded.launches
    assert params.scores % 16 == 0
    assert params.scores_stride % 8 == 0


def of_one_head(tokens: int, pages: int) -> torch.Tensor:
    """Scores of one KV head, whose dimension has a stride that no kernel may use."""
    return torch.randn(1, tokens, pages).bfloat16().transpose(0, 1)


@pytest.mark.parametrize("k", [8, 1025])
def test_the_rows_of_one_head_follow_each_other(k: int, recorded: Recorded) -> None:
    scores = of_one_head(3, 2048)
    assert scores.stride(1) != 2048
    cuda.select_pages(scores, torch.tensor([2048, 5, 9]), k, 0, 0)
    (params,) = recorded.launches
    assert params.scores_stride == 2048


def test_the_rows_of_one_head_of_a_batch_follow_each_other() -> None:
    inputs = make_batch([500, 300, 400], 1, 64)
    scores, query = of_one_head(3, 64), torch.zeros(3, 1, 64).bfloat16()
    batch = DecodeBatch(query, inputs.block_table.int(), inputs.context_lens.int(), scores=scores)
    batch.check(1, 64)
    assert _scores(batch, inputs.cache, PageSelection(4), None, 64).stride(1) == 64


def test_a_coverage_counts_the_rows_of_one_head(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, counted = make_batch([500, 300, 400], 1, 64, statistics="int4", kind="quarters"), []
    monkeypatch.setattr(coverage, "_count", lambda batch, cache, scores, *_: counted.append(scores) or scores)
    tokens = inputs.tokens(torch.zeros(3, 1, 2, 64).bfloat16())
    width = coverage._width(coverage.batch_of(tokens), inputs.cache)
    limits = Limits(torch.full((3,), 0.5), torch.full((3,), 4), torch.full((3,), 8))
    coverage.count_pages(tokens, inputs.cache, of_one_head(3, width), PageSelection(8, 1, 1), Softmax(0.1), limits)
    assert counted[0].stride(1) == width


@pytest.mark.parametrize("pages", [61, 64])
def test_scores_of_a_batch_may_have_any_number_of_pages(pages: int) -> None:
    inputs = make_batch([500], 2, 64)
    scores = torch.randn(1, 2, pages).bfloat16()
    query = torch.zeros(1, 2, 64).bfloat16()
    batch = DecodeBatch(query, inputs.block_table.int(), inputs.context_lens.int(), scores=scores)
    batch.check(2, 64)
    cache: KVCache = inputs.cache
    found = _scores(batch, cache, PageSelection(4), None, 64)
    assert found.shape[2] == 64
    assert torch.equal(found[..., :pages], scores)
