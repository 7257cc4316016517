"""Probe rows, and the tokens that they choose."""

from dataclasses import replace

import pytest
import torch
from sparse_kernels.batch import PrefillBatch
from sparse_kernels.token_prefill import TokenRule, draw_probes
from sparse_kernels.token_prefill.tokens import choose_tokens
from support.prefill import rows_of, tokens_of


def batch_of(contexts: list[int], chunks: list[int], widest: int | None = None) -> PrefillBatch:
    starts = torch.tensor([0, *chunks]).cumsum(0).int()
    lengths = torch.tensor(contexts, dtype=torch.int32)
    table = torch.zeros(len(contexts), 1, dtype=torch.int32)
    return PrefillBatch(torch.zeros(sum(chunks), 1, 16), starts, table, lengths, widest or max(chunks), max(contexts))


def test_probes_are_the_newest_and_others_of_the_chunk():
    rule = TokenRule()
    probes = draw_probes(batch_of([1000, 300, 129, 100, 40], [1000, 200, 129, 100, 40]), rule)
    assert probes.shape == (5, 128)
    assert probes.dtype == torch.int32
    for request, (context, chunk) in enumerate([(1000, 1000), (300, 200), (129, 129), (100, 100), (40, 40)]):
        rows = rows_of(probes, request)
        assert len(set(rows)) == len(rows) == min(chunk, 128)
        assert set(range(context - min(64, chunk), context)) <= set(rows)
        assert min(rows) >= context - chunk


def test_the_draw_is_the_same_in_every_batch_and_place():
    rule = TokenRule(random_probes=6, recent_probes=2)
    together = draw_probes(batch_of([500, 700, 90], [500, 300, 5], widest=800), rule)
    for request, (context, chunk) in enumerate([(500, 500), (700, 300), (90, 5)]):
        assert torch.equal(draw_probes(batch_of([context], [chunk]), rule)[0], together[request])
    # Every device and version must give these numbers: a request resumed elsewhere has the same rows.
    assert together[1].tolist() == [585, 448, 461, 586, 411, 517, 698, 699]


@pytest.mark.parametrize("other", [(501, 501, 0), (501, 500, 0), (500, 500, 1)])
def test_the_draw_follows_from_seed_start_and_length(other):
    context, chunk, seed = other
    one = draw_probes(batch_of([500], [500]), TokenRule(recent_probes=1))
    two = draw_probes(batch_of([context], [chunk]), TokenRule(recent_probes=1, seed=seed))
    assert len(set(rows_of(one, 0)) & set(rows_of(two, 0))) < 32


def test_every_token_is_as_likely_to_be_drawn():
    rule = TokenRule(recent_probes=1, random_probes=10)
    contexts = list(range(401, 801))
    probes = draw_probes(batch_of(contexts, [400] * 400), rule)[:, :10]
    places = (probes - (torch.tensor(contexts)[:, None] - 400)) * 10 // 400
    counts = places.flatten().bincount(minlength=10)
    # Four standard deviations of 4,000 draws over ten tenths.
    assert ((counts - 400).abs() <= 4 * (4000 * 0.1 * 0.9) ** 0.5).all()


def chosen(sums: list[float], rows: list[int], tau: float, sink_tokens: int = 0) -> tuple[list[int], int]:
    """T and p of a context with these sums."""
    batch = batch_of([len(sums)], [len(sums)])
    padded = torch.tensor([[*sums, torch.nan, 9.0]])
    kept = choose_tokens(
        padded, torch.tensor([rows], dtype=torch.int32), batch, TokenRule(tau, len(rows), 0, sink_tokens=sink_tokens)
    )
    return sorted(tokens_of(kept, 0)), int(kept.important[0])


def test_p_is_the_fewest_tokens_that_reach_tau():
    assert chosen([4.0, 3.0, 2.0, 1.0], [3, 3], 0.7) == ([0, 1, 3], 2)
    assert chosen([4.0, 3.0, 2.0, 1.0], [3, 3], 0.71) == ([0, 1, 2, 3], 3)
    assert chosen([1.0, 2.0, 3.0, 4.0], [3, 3], 0.4) == ([3], 1)


def test_a_fixed_ratio_is_a_share_of_the_context_whatever_its_attention():
    rule = TokenRule(0.1, 2, 0, fixed_ratio=0.3, dense_tokens=4, sink_tokens=0)
    sums = torch.zeros(4, 20)
    sums[0, 7] = sums[1, 3] = 1.0
    sums[1, :11] += 1.0
    batch = batch_of([20, 11, 5, 4], [20, 11, 5, 4])
    probes = torch.tensor([[19, 18], [10, 9], [4, 3], [3, 2]], dtype=torch.int32)
    kept = choose_tokens(sums, probes, batch, rule)
    # 0.3 of 20, of 11 and of 5 tokens, rounded up; a context of 4 is whole. The last token may join.
    assert kept.important.tolist() == [6, 4, 2, 4]
    assert {7, 19} <= tokens_of(kept, 0)
    assert len(tokens_of(kept, 0)) == 7
    assert 3 in tokens_of(kept, 1)


def test_the_last_token_joins_where_it_is_not_among_the_best():
    assert chosen([4.0, 3.0, 0.0], [2, 2], 0.9) == ([0, 1, 2], 2)


def test_the_first_tokens_join_and_do_not_change_p():
    assert chosen([0.0, 0.0, 3.0, 4.0, 1.0, 1.0], [5, 5], 0.7, sink_tokens=2) == ([0, 1, 2, 3, 5], 2)
    assert chosen([1.0, 1.0], [1, 1], 0.5, sink_tokens=4) == ([0, 1], 1)


def test_of_equal_tokens_the_first_are_kept():
    assert chosen([1.0] * 40, [39, 39], 0.25) == ([*range(10), 39], 10)


def test_sums_decide_how_many_and_what_a_row_gives_decides_which():
    # Four rows see tokens 0 and 1, one sees the others. Accumulated, 0 and 1 come first; normalised, they come last.
    assert chosen([2.0, 2.0, 0.9, 0.8, 0.7], [1, 1, 1, 4], 0.6) == ([2, 3, 4], 2)


def test_small_sums_add_up_beside_a_large_one():
    # A float32 sum loses 0.0004 next to 16,000. All of them together are 2.
    tokens, p = chosen([16000.0] + [0.0004] * 5000, [5000], (16000 + 0.4) / 16002)
    assert p == pytest.approx(1001, abs=1)
    assert tokens == [*range(p), 5000]


def test_sums_that_are_no_numbers_end_nothing():
    tokens, p = chosen([torch.nan] * 5, [4], 0.5)
    assert p == 1
    assert 4 in tokens


def test_the_width_of_a_batch_does_not_change_a_choice():
    generator = torch.Generator().manual_seed(2)
    sums = torch.rand(1, 5000, generator=generator).pow(8)
    batch = batch_of([3000], [3000])
    probes = draw_probes(batch, TokenRule())
    wide, narrow = (
        choose_tokens(part, probes, replace(batch, max_seq_tokens=part.shape[1]), TokenRule())
        for part in (sums, sums[:, :3000])
    )
    assert tokens_of(wide, 0) == tokens_of(narrow, 0)
