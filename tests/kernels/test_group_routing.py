import math
from dataclasses import replace

import pytest
import torch
from sparse_kernels.batch import DecodeBatch, PageSelection, Softmax
from sparse_kernels.group_routing import GROUP_SCORES, GroupRouting, reference, route_groups
from sparse_kernels.paging import PagedTensor
from sparse_kernels.sparse_decode import sparse_decode
from sparse_kernels.split_attention import split_attention
from support.paged import PagedBatch, dense_attention, make_batch

HEADS, GROUP, SIZE = 2, 4, 64
SCALE = 0.1
CONTEXTS = [700, 129, 1000, 5]


def query_of(batch: PagedBatch, queries: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(len(batch.keys) * queries, HEADS, GROUP, SIZE, generator=generator).bfloat16()


def constant(threshold: float, heads: int = HEADS, **changes: object) -> GroupRouting:
    return GroupRouting(torch.tensor([[threshold, 0.0, 0.0, 0.0]]).repeat(heads, 1), **changes)


def score_by_hand(query: torch.Tensor, anchor: torch.Tensor, score: str) -> float:
    """The score of one group, in Python's floats."""
    key = anchor.double().tolist()
    cosines = []
    for head in query.double().tolist():
        dot = math.fsum(a * b for a, b in zip(head, key, strict=True))
        cosines.append(dot / math.hypot(*head) / math.hypot(*key))
    return {"mean": math.fsum(cosines) / len(cosines), "max": max(cosines), "min": min(cosines)}[score]


def scores_by_hand(batch: PagedBatch, query: torch.Tensor, score: str) -> torch.Tensor:
    rows = [
        [score_by_hand(query[token, head], keys[0, head], score) for head in range(HEADS)]
        for token, keys in enumerate(batch.keys)
    ]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("page_size", [8, 16, 32])
@pytest.mark.parametrize("score", GROUP_SCORES)
def test_groups_whose_cosine_reaches_the_threshold_are_skipped(score, page_size):
    batch = make_batch(CONTEXTS, HEADS, SIZE, page_size=page_size)
    query, expected = query_of(batch), scores_by_hand(batch, query_of(batch), score)
    keys = batch.paged_keys
    scores = reference.score_groups(query, keys, batch.block_table[:, 0], GROUP_SCORES.index(score))
    torch.testing.assert_close(scores.double(), expected, atol=1e-6, rtol=1e-5)
    between = expected.flatten().sort().values
    for threshold in ((between[1:] + between[:-1]) / 2).tolist():
        routing = constant(threshold, score=score)
        skipped = route_groups(batch.tokens(query), keys, routing)
        assert torch.equal(skipped, expected >= threshold)


def test_a_threshold_above_1_skips_nothing_and_one_below_minus_1_everything():
    batch = make_batch(CONTEXTS, HEADS, SIZE)
    # A query parallel to its anchor has the largest possible cosine.
    query = torch.stack([keys[0] for keys in batch.keys]).unsqueeze(2).repeat(1, 1, GROUP, 1)
    for threshold, expected in ((1.001, False), (0.99, True), (-1.001, True)):
        skipped = route_groups(batch.tokens(query), batch.paged_keys, constant(threshold))
        assert skipped.eq(expected).all()


def test_zeros_have_a_cosine_of_0_and_nan_is_no_sink():
    batch = make_batch([100, 100], HEADS, SIZE)
    query = query_of(batch)
    query[0], query[1, :, 0] = 0, torch.nan
    for threshold, expected in ((0.0, [True, False]), (1e-6, [False, False])):
        skipped = route_groups(batch.tokens(query), batch.paged_keys, constant(threshold))
        assert skipped.tolist() == [[group] * HEADS for group in expected]


@pytest.mark.parametrize("score", GROUP_SCORES)
def test_a_group_with_nan_is_not_skipped_by_any_score(score):
    """The largest and the smallest cosine must not leave a NaN out: its output would be a zero that looks right."""
    batch = make_batch([100, 100, 100], HEADS, SIZE)
    query = torch.stack([keys[0] for keys in batch.keys]).unsqueeze(2).repeat(1, 1, GROUP, 1)
    query[1, :, 1], query[2] = torch.nan, torch.nan
    skipped = route_groups(batch.tokens(query), batch.paged_keys, constant(0.9, score=score))
    assert skipped.tolist() == [[group] * HEADS for group in (True, False, False)]


def test_every_kv_head_has_its_own_threshold():
    batch = make_batch(CONTEXTS, HEADS, SIZE)
    coefficients = torch.zeros(HEADS, 4)
    coefficients[:, 0] = torch.tensor([2.0, -2.0])
    skipped = route_groups(batch.tokens(query_of(batch)), batch.paged_keys, GroupRouting(coefficients))
    assert skipped.tolist() == [[False, True]] * len(CONTEXTS)


def test_the_threshold_is_a_cubic_of_the_normalised_logarithm_of_the_length():
    cubic = (0.3, 0.5, -1.25, 0.75)
    routing = GroupRouting(torch.tensor([cubic]), shortest=1024, longest=16384)
    lengths = [1, 1024, 2048, 3000, 8192, 16384, 1 << 20]
    for length, found in zip(lengths, routing.thresholds(torch.tensor(lengths))[:, 0].tolist(), strict=True):
        x = min(1.0, max(0.0, math.log(length / 1024) / math.log(16)))
        assert found == pytest.approx(sum(c * x**power for power, c in enumerate(cubic)), abs=1e-6)


def test_the_score_does_not_depend_on_what_lies_beyond_token_0():
    batch = make_batch([100], HEADS, SIZE)
    query = query_of(batch)
    first = reference.score_groups(query, batch.paged_keys, batch.block_table[:, 0], 0)
    batch.paged_keys.view[batch.block_table[0, 0], :, 0, 0, 1:] = torch.nan
    assert torch.equal(reference.score_groups(query, batch.paged_keys, batch.block_table[:, 0], 0), first)
    routing = constant(float(first.mean()))
    skipped = route_groups(batch.tokens(query), batch.paged_keys, routing)
    assert torch.equal(skipped, first >= first.mean())


def test_blocks_of_each_head_are_the_same_pages():
    batch = make_batch([300], HEADS, SIZE)
    keys = batch.paged_keys
    page = torch.arange(37)
    for head in range(HEADS):
        blocks = batch.block_table[0, page // keys.pages_per_block]
        within = page % keys.pages_per_block
        expected = keys.gather(blocks, torch.full_like(page, head), within)
        numbered = keys.by_head.gather(blocks * HEADS + head, torch.zeros_like(page), within)
        assert torch.equal(numbered, expected)
    apart = PagedTensor.from_rows(torch.zeros(3, 2, 16, 8).transpose(0, 1), 8)
    with pytest.raises(RuntimeError):
        _ = apart.by_head


@pytest.mark.parametrize(
    ("routing", "sentence"),
    [
        (constant(0.5, heads=3), r"coefficients: got \[3, 4\], allowed: \[2, 4\]"),
        (constant(0.5, counts=torch.zeros(2, 1)), r"counts: got \[2, 1\], allowed: \[2, 2\]"),
    ],
)
def test_refuses(routing, sentence):
    batch = make_batch([100], HEADS, SIZE)
    with pytest.raises(ValueError, match=sentence):
        route_groups(batch.tokens(query_of(batch)), batch.paged_keys, routing)
    with pytest.raises(ValueError, match=sentence):
        decode(batch, query_of(batch), routing)


def test_heads_that_do_not_fit_are_refused():
    batch = make_batch([100], HEADS, SIZE)
    with pytest.raises(ValueError, match="query: got 3 KV heads of size 64, allowed: the keys' 2 of size 64"):
        route_groups(batch.tokens(torch.zeros(1, 3, GROUP, SIZE)), batch.paged_keys, constant(0.5, 3))


def decode(
    batch: PagedBatch, query: torch.Tensor, routing: GroupRouting | None, k: int | None = None, **changes: object
) -> torch.Tensor:
    """Decodes over every page, or over `k` pages."""
    requests = DecodeBatch(query.flatten(1, 2), batch.block_table.int(), batch.context_lens.int())
    requests = replace(requests, **changes)
    if k is None:
        return split_attention(requests, batch.cache, Softmax(SCALE), routing=routing)
    selection = PageSelection(k, sink_pages=1, recent_pages=1, std_weight=0.75)
    return sparse_decode(requests, batch.cache, Softmax(SCALE), selection, routing=routing)


@pytest.mark.parametrize("k", [None, 8], ids=["dense", "selected"])
def test_a_skipped_group_is_zero_and_the_others_are_as_they_were(k):
    batch = make_batch(CONTEXTS, HEADS, SIZE)
    query = query_of(batch)
    scores = scores_by_hand(batch, query, "mean")
    routing = constant(float(scores.median()))
    plain = decode(batch, query, None, k).unflatten(1, (HEADS, GROUP))
    routed = decode(batch, query, routing, k).unflatten(1, (HEADS, GROUP))
    skipped = scores >= scores.median()
    assert skipped.any()
    assert not skipped.all()
    assert routed[skipped].eq(0).all()
    assert torch.equal(routed[~skipped], plain[~skipped])
    assert torch.equal(decode(batch, query, constant(1.01), k).unflatten(1, (HEADS, GROUP)), plain)


def test_without_routing_it_is_dense_attention():
    batch = make_batch(CONTEXTS, HEADS, SIZE)
    query = query_of(batch)
    rows = [dense_attention(row, *kv, SCALE) for row, *kv in zip(query, batch.keys, batch.values, strict=True)]
    torch.testing.assert_close(decode(batch, query, None).float(), torch.stack(rows).float(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("k", [None, 8], ids=["dense", "selected"])
def test_who_is_exempt_is_not_asked(k):
    batch = make_batch(CONTEXTS, HEADS, SIZE)
    query, counts = query_of(batch), torch.zeros(HEADS, 2, dtype=torch.int64)
    lens = torch.tensor([700, 129, 1000, 0], dtype=torch.int32)
    requests = torch.tensor([False, False, True, False])
    routing = constant(-1.5, counts=counts)
    output = decode(batch, query, routing, seq_lens=lens, dense_tokens=129, dense_requests=requests, k=k)
    assert [bool(token.any()) for token in output] == [False, True, True, False]
    assert counts.tolist() == [[1, 1]] * HEADS
    decode(batch, query, replace(routing, coefficients=constant(1.5).coefficients), seq_lens=lens, k=k)
    assert counts.tolist() == [[1, 4]] * HEADS


def test_tokens_of_a_request_are_routed_one_by_one():
    batch = make_batch([300, 129], HEADS, SIZE)
    query = query_of(batch, queries=3)
    routing = GroupRouting(torch.tensor([[0.02, 0.05, 0.0, 0.0]] * HEADS), shortest=128, longest=300)
    together = decode(batch, query, routing)
    for token in range(6):
        lens = batch.context_lens.int() - (2 - token % 3)
        alone = decode(batch, query[token].expand(2, -1, -1, -1), routing, seq_lens=lens)
        assert torch.equal(together[token], alone[token // 3])
