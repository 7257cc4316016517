"""The memory of rounds of prompts, with interpreted kernels."""

from importlib.util import find_spec

import pytest
import torch
from sparse_kernels.batch import Prompts, Softmax
from sparse_kernels.block_prefill import BlockRule, prefill_blocks, scratch_bytes
from sparse_kernels.page_statistics import KINDS, StatisticsLayout
from sparse_kernels.token_prefill import TokenRule
from support.paged import make_batch

from vllm_sparse_plugin.attention.prefill import PromptRule, plan_rounds, round_bounds

HEADS, GROUP, SIZE, LONGEST, TOKENS = 2, 4, 32, 800, 64
RULE = BlockRule(tile_tokens=16, block_tokens=16, density=0.4, least_blocks=2, dense_tokens=32, query_stride=1)
BATCHES = {
    "short prompts before a long one": ([2] * 10 + [40], [2] * 10 + [640]),
    "a long prompt before short ones": ([40] + [2] * 10, [640] + [2] * 10),
    "short prompts alone": ([2] * 32, [2] * 32),
    "hits of a prefix": ([2] * 16, [49] * 16),
    "a long prompt": ([64], [800]),
}
"""Query tokens and contexts of the prompts of a step."""


def prompts_of(chunks: list[int], contexts: list[int], table: torch.Tensor) -> Prompts:
    starts = torch.tensor([0, *chunks]).cumsum(0, dtype=torch.int32)
    return Prompts(starts, table, torch.tensor(contexts, dtype=torch.int32), tuple(chunks), tuple(contexts))


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU Triton compiles its kernels")
@pytest.mark.parametrize("batch", BATCHES)
def test_no_round_takes_more_memory_than_a_prompt_of_the_longest_context(batch, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kind, (chunks, contexts) = KINDS["mean_and_spread"], BATCHES[batch]
    paged = make_batch(contexts, HEADS, SIZE, statistics=kind.formats[0], kind=kind.name, block_size=16)
    prompts = prompts_of(chunks, contexts, paged.block_table.int())
    query = torch.randn(sum(chunks), HEADS * GROUP, SIZE).bfloat16()
    reserved = scratch_bytes(RULE, StatisticsLayout(8, SIZE, kind.formats[0], kind=kind), HEADS, GROUP, TOKENS, LONGEST)
    rounds = plan_rounds(prompts, RULE, {GROUP}, round_bounds(prompts, RULE, {GROUP}, TOKENS, LONGEST))
    assert [part.tokens.start for part in rounds][1:] == [part.tokens.stop for part in rounds][:-1]
    assert (rounds[0].tokens.start, rounds[-1].tokens.stop) == (0, sum(chunks))
    empty = torch.empty
    for part in rounds:
        taken = []

        def counted(*shape, taken=taken, **options):
            made = empty(*shape, **options)
            taken.append(made.nbytes)
            return made

        output = torch.zeros_like(query[part.tokens])
        with monkeypatch.context() as counting:
            counting.setattr(torch, "empty", counted)
            prefill_blocks(
                part.prompts.batch(query[part.tokens]), paged.cache, Softmax(SIZE**-0.5), RULE, part.tiles[GROUP],
                output=output, attend=lambda *_: None,
            )  # fmt: skip
        assert 0 < sum(taken) <= reserved


TOKEN_RULE = TokenRule()


@pytest.mark.parametrize(
    ("rule", "chunks", "contexts", "expected"),
    [
        # Each context of a round takes the memory of the longest one.
        (TOKEN_RULE, [1, 1, 1], [200, 300, 300], [(0, 2), (2, 3)]),
        (TOKEN_RULE, [1, 1, 1], [200, 200, 400], [(0, 2), (2, 3)]),
        # Contexts are laid out in whole blocks: 40 + 10 of 50, and then 51.
        (RULE, [1, 1], [640, 160], [(0, 2)]),
        (RULE, [1, 1], [640, 161], [(0, 1), (1, 2)]),
        # A prompt has up to 3 groups of tiles, which may be scored over 50 blocks: as many as 4 groups over 37.
        (RULE, [1, 1, 1, 1], [592, 1, 1, 1], [(0, 4)]),
        (RULE, [1, 1, 1, 1], [608, 1, 1, 1], [(0, 3), (3, 4)]),
        (RULE, [64, 1, 1], [800, 1, 1], [(0, 1), (1, 3)]),
    ],
)
def test_rounds_end_where_one_more_prompt_would_take_more(
    rule: PromptRule, chunks: list[int], contexts: list[int], expected: list[tuple[int, int]]
):
    longest = 800 if isinstance(rule, BlockRule) else 799
    prompts = prompts_of(chunks, contexts, torch.zeros(len(chunks), 50, dtype=torch.int32))
    assert round_bounds(prompts, rule, {GROUP}, TOKENS, longest) == expected
