"""The referee of whole engines sees faults of decode steps and of compactions."""

import math

import pytest
import torch
from sparse_kernels.batch import DecodeBatch, PageSelection, Softmax
from sparse_kernels.compaction import CompactionRule, ObservationWindow, PromptBlocks, api
from sparse_kernels.sparse_decode import sparse_decode
from support.families.evictions import watch_evictions
from support.families.referee import Referee, watch
from support.paged import PagedBatch, make_batch

from vllm_sparse_plugin.attention import base
from vllm_sparse_plugin.attention.plan import LayerPlan
from vllm_sparse_plugin.policies import UniqueSelection

SOFTMAX = Softmax(0.125)
SELECTION = UniqueSelection(budget_tokens=64, sink_pages=1, recent_pages=1, statistics="quarters")


@pytest.fixture
def paged() -> PagedBatch:
    return make_batch([300, 45], num_kv_heads=2, head_size=64, statistics="int4", kind="quarters")


def judged(paged: PagedBatch, change: object = None) -> Referee:
    """The referee's result for a decode step with a changed output or cache."""
    query = torch.randn(2, 4, 64).bfloat16()
    batch = DecodeBatch(query, paged.block_table.int(), paged.context_lens.int())
    plan = LayerPlan(block_size=64, page_size=8, dense_tokens=0, selector=SELECTION)
    output = sparse_decode(batch, paged.cache, SOFTMAX, PageSelection(8, 1, 1, SELECTION.std_weight))
    if change is not None:
        change(paged, output)
    with watch() as referee:
        referee.judge(plan, batch, paged.cache, SOFTMAX, output)
    return referee


def test_the_referee_lets_a_right_step_pass(paged):
    referee = judged(paged)
    assert (referee.steps, referee.faults) == (1, [])
    assert 0 < referee.output_error < 2**-7


def test_the_referee_sees_an_output_that_is_off_by_little(paged):
    def change(_: PagedBatch, output: torch.Tensor) -> None:
        output[1, 3] *= 1.02

    assert judged(paged, change).faults == ["an output that differs from the reference's"]


def test_the_referee_sees_an_output_that_is_not_finite(paged):
    def change(_: PagedBatch, output: torch.Tensor) -> None:
        output[0, 0, 5] = math.nan

    assert judged(paged, change).faults == ["an output that is not finite"]


@pytest.mark.parametrize("page", [0, 36])
def test_the_referee_sees_a_record_of_other_keys(paged, page):
    def change(paged: PagedBatch, _: torch.Tensor) -> None:
        block = paged.block_table[0, page // 8]
        paged.statistics.vectors[block, 1, page % 8] = 0x5A

    assert judged(paged, change).faults == ["page statistics that are not those of the keys"]


def test_the_referee_leaves_records_of_no_page_alone(paged):
    def change(paged: PagedBatch, _: torch.Tensor) -> None:
        paged.statistics.vectors[paged.block_table[0, 4], 1, 5:] = 0x5A

    assert judged(paged, change).faults == []


def halve(add, votes, *rest):
    add(votes, *rest)
    votes *= 0.5


def keep_the_first(choose, votes, *rest):
    return torch.arange(choose(votes, *rest).shape[1]).repeat(len(votes), 1)


def keep_the_worst(choose, votes, *rest):
    return choose(-votes, *rest)


def move_too_far(move, kept, prompt, cache):
    move(kept.roll(1, dims=1), prompt, cache)


@pytest.mark.parametrize(
    ("name", "change", "faults"),
    [
        (None, None, []),
        ("add_votes", halve, ["votes that are not the attention of the queries"]),
        ("choose_tokens", keep_the_first, ["a token that is always kept is not"]),
        ("choose_tokens", keep_the_worst, ["a token is kept instead of one with more votes"]),
        ("_move", move_too_far, ["kept tokens that are not in their places, in blocks of 32 tokens"]),
    ],
)
@pytest.mark.parametrize("sinks", [None, torch.tensor([4.0, 0.0, 1.0, 9.0])])
def test_the_referee_sees_compactions_that_err(monkeypatch, sinks, name, change, faults):
    paged = make_batch([320, 70], 2, 16, 32)
    if name is not None:
        right = getattr(api, name)
        monkeypatch.setattr(api, name, lambda *arguments: change(right, *arguments))
    window = ObservationWindow(torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(1)).bfloat16(), 312)
    found: list[str] = []
    with watch_evictions(found.append) as moves:
        prompt = PromptBlocks(paged.block_table[0], 320, 7)
        base.compact_prompt(window, prompt, paged.cache, Softmax(0.25, 0.0, sinks), CompactionRule(8, 5, 4))
    assert set(found) >= set(faults) if faults else not found
    assert moves == [1]
