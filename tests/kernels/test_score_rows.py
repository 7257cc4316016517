"""Rows of scores as the CUDA code reads them: eight at once, from an address that is a multiple of 16 bytes."""

from types import SimpleNamespace

import pytest
import torch
from sparse_kernels.page_topk import cuda


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
