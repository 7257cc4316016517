"""The table of families, and the comparison with the reference pipeline."""

import math
from dataclasses import replace

import pytest
import torch
from sparse_kernels.batch import DecodeBatch, PageSelection, Softmax
from sparse_kernels.compaction import CompactionRule, ObservationWindow, PromptBlocks, api
from sparse_kernels.sparse_decode import sparse_decode
from support.paged import PagedBatch, make_batch

from bench.common.continuations import Continuation, logprob_error
from bench.common.options import parse_names
from bench.pages.families import FILES, families, read_cells
from bench.robustness.families.cells import FAILED, NOT_SERVED, OK, REFUSED, Cell, unless_raised
from bench.robustness.families.evictions import watch_evictions
from bench.robustness.families.referee import Referee, watch
from bench.robustness.families.table import FAMILIES, FEATURES, FEATURES_OF, WAYS
from vllm_sparse_plugin.attention import base
from vllm_sparse_plugin.attention.plan import LayerPlan
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.names import BACKENDS
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


def test_log_probabilities_are_compared_up_to_where_continuations_part():
    dense = Continuation([5, 6, 7], [{5: -0.5, 9: -2.0}, {6: -0.25, 8: -0.3125}, {7: -0.1, 5: -3.0}])
    same = replace(dense, logprobs=[{5: -0.5}, {6: -0.375}, {7: -0.1}])
    assert logprob_error(dense, same) == 0.125
    parted = Continuation([5, 8, 1], [{5: -0.5}, {8: -0.29, 6: -0.3}, {1: -9.0}])
    assert logprob_error(dense, parted) == 0.0625
    assert logprob_error(dense, replace(parted, tokens=[5, 4, 1])) == math.inf


def test_who_is_to_blame_for_an_exception():
    cell = Cell("llama", "unique", OK)

    def raises(error: Exception) -> object:
        def function() -> object:
            raise error

        return function

    def fine() -> Cell:
        return cell

    assert unless_raised(cell, fine, fine) is cell
    refused = unless_raised(cell, raises(ConfigurationError("model: got a cat")), fine)
    assert (refused.status, refused.reason) == (REFUSED, "model: got a cat")
    assert unless_raised(cell, raises(ValueError("ours\nmore")), fine).reason == "ValueError: ours"
    assert unless_raised(cell, raises(ValueError("ours")), fine).status == FAILED
    vllms = unless_raised(cell, raises(ValueError("ours")), raises(KeyError("theirs")))
    assert (vllms.status, vllms.reason) == (NOT_SERVED, "KeyError: 'theirs'")


def test_each_name_can_be_chosen():
    for option, names in (("family", FAMILIES), ("way", WAYS)):
        assert parse_names(option, names, list(names)) == tuple(names)


def test_every_preset_of_a_backend_is_a_way():
    of_prompts = {"unique_prefill", "zipvl", "zipvl_paper"}  # they do not change decode steps
    # The same kernels as those of the ways with compaction.
    shrinking = {"snapkv_paper", "pyramidkv", "pyramidkv_paper", "h2o"}
    between_steps = {"evicting h2o", "evicting r_kv"}
    drafting = {"lossless"}  # answers are dense, and it is refused for many families
    elsewhere = {"unique_offload"}  # on a CPU its decode steps are those of unique
    assert (
        set(WAYS) == {*BACKENDS.values(), "every page", *between_steps} - of_prompts - shrinking - drafting - elsewhere
    )
    assert len({family.name for family in FAMILIES.values()}) == len(FAMILIES)


@pytest.mark.parametrize("device", FILES)
def test_the_matrix_of_the_page_is_that_of_the_tables(device):
    cells = read_cells(FILES[device])
    wanted = {(family, way) for family in FAMILIES for way in WAYS} | {(FEATURES_OF, name) for name in FEATURES}
    if not cells:
        pytest.skip("was not run there yet")
    assert set(cells) <= wanted
    assert {row["status"] for row in cells.values()} <= {OK, REFUSED, NOT_SERVED}


def test_the_page_shows_every_family_and_feature():
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in families().text.splitlines()]
    named = [(row[0] == "compaction", name.partition(" (")[0]) for row in rows for name in row[1].split(", ")]
    for name in (*(family.name for family in FAMILIES.values()), *(name.partition(" (")[0] for name in FEATURES)):
        assert named.count((False, name)) == 1, name
    assert (True, "Gemma 3") in named
