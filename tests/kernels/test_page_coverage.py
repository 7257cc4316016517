"""The number of pages that reach a share of the attention weight, compared with its formula in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from sparse_kernels.batch import DecodeBatch, PageSelection, QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.page_coverage import Limits, count_pages, count_rows, reference
from sparse_kernels.page_score import score_pages
from sparse_kernels.page_topk import select_pages
from sparse_kernels.stopping import count_reads
from support.paged import PagedBatch, make_batch

CONTEXTS = [1000, 8, 7, 505, 64, 72, 999]
BOTH = pytest.mark.parametrize("kind", ["quarters", "sketch"])
SELECTION = PageSelection(4, 1, 1)


WAYS_TO_COUNT: tuple[Callable[..., torch.Tensor], ...] = (count_pages, reference.count_pages)
"""The compiled kernel and the reference."""


def batch_of(kind: str, page_size: int = 8, head_size: int = 64) -> PagedBatch:
    statistics = {"quarters": "int4", "sketch": "int2"}[kind]
    return make_batch(CONTEXTS, 2, head_size, page_size=page_size, statistics=statistics, kind=kind)


def arguments(batch: PagedBatch, group: int = 4, scale: float = 1.0) -> tuple[QueryTokens, KVCache, torch.Tensor]:
    """Queries of all requests, the cache and the scores of its pages."""
    generator = torch.Generator().manual_seed(1)
    heads, head_size = batch.keys[0].shape[1:]
    query = torch.randn(len(CONTEXTS), heads, group, head_size, generator=generator).mul(scale).bfloat16()
    tokens = QueryTokens(query, batch.block_table, batch.context_lens)
    scores = score_pages(query, batch.statistics, batch.block_table, batch.num_pages, 0.0)
    return tokens, KVCache(batch.paged_keys, batch.paged_values, batch.statistics), scores


def limits_of(share: float, least: int = 3, most: int = 1000) -> Limits:
    number = len(CONTEXTS)
    return Limits(torch.full((number,), share), torch.full((number,), least), torch.full((number,), most))


def reached(batch: PagedBatch, tokens: QueryTokens, scores: torch.Tensor, index: int, head: int, softmax: Softmax):
    """Shares reached with 0, 1, 2 and more of the best pages, plus those always read, in float64."""
    size, context = batch.page_size, CONTEXTS[index]
    pages = context // size
    query = tokens.query[index, head].double()

    def weight(keys: torch.Tensor) -> torch.Tensor:
        logits = query @ keys.double().T * softmax.scale
        return (softmax.softcap * torch.tanh(logits / softmax.softcap) if softmax.softcap else logits).exp()

    keys = batch.keys[index][:, head]
    always = {0, pages - 1}
    known = sum(weight(keys[page * size : (page + 1) * size]).sum(dim=1) for page in always)
    known = known + weight(keys[pages * size :]).sum(dim=1)
    vectors, scales, _ = batch.statistics.records(batch.block_table[index])
    stored = batch.statistics.kind.summary((vectors * scales[..., None]).double(), None)[0][head]
    masses = {page: size * weight(stored[page]).amax(dim=1) for page in range(pages) if page not in always}
    total = known + sum(masses.values())
    order = sorted(masses, key=lambda page: (-float(scores[index, head, page]), page))
    shares = [(known / total).mean()]
    for page in order:
        shares.append(shares[-1] + (masses[page] / total).mean())
    return shares


@pytest.mark.parametrize(
    ("kind", "softcap", "page_size", "head_size"),
    [("quarters", 0.0, 8, 64), ("sketch", 2.0, 8, 64), ("quarters", 2.0, 16, 96)],
)
def test_the_fewest_best_pages_whose_estimated_share_reaches_the_target(kind, softcap, page_size, head_size):
    batch = batch_of(kind, page_size, head_size)
    tokens, cache, scores = arguments(batch)
    softmax = Softmax(0.3, softcap)
    by_row = {
        (index, head): reached(batch, tokens, scores, index, head, softmax)
        for index, context in enumerate(CONTEXTS)
        for head in range(2)
        if context // page_size > 3
    }
    ways = set()
    for implementation in WAYS_TO_COUNT:
        for share in (0.2, 0.6, 0.9, 0.99):
            counts = implementation(tokens, cache, scores, SELECTION, softmax, limits_of(share))
            for index, context in enumerate(CONTEXTS):
                pages = context // page_size
                for head in range(2):
                    count = int(counts[index, head])
                    if pages <= 3:
                        assert count == 3
                        continue
                    shares = by_row[index, head]
                    # Of pages that reach the target within a float32 error, either may be the last.
                    assert shares[count - 2] > share - 1e-5 or count == pages
                    assert count == 3 or shares[count - 3] < share + 1e-5
                    ways.add((share, "least" if count == 3 else "some"))
    assert len(ways) > 4


@BOTH
def test_a_fast_count_is_that_of_the_reference_and_of_its_row_alone(kind):
    tokens, cache, scores = arguments(batch_of(kind), scale=2.0)
    limits = limits_of(0.9)
    # Each row has different limits.
    limits.share[:] = torch.linspace(0.5, 0.99, len(CONTEXTS))
    limits.most[3] = 20
    counts = count_pages(tokens, cache, scores, SELECTION, Softmax(0.125), limits)
    expected = reference.count_pages(tokens, cache, scores, SELECTION, Softmax(0.125), limits)
    assert (counts - expected).abs().max() <= 1
    assert len(counts.unique()) > 3
    for index in range(len(CONTEXTS)):
        one = slice(index, index + 1)
        alone = count_pages(tokens[one], cache, scores[one], SELECTION, Softmax(0.125), limits[one])
        assert torch.equal(alone, counts[one])


@BOTH
def test_a_floor_a_cap_and_everything(kind):
    tokens, cache, scores = arguments(batch_of(kind))
    for count in WAYS_TO_COUNT:
        capped = count(tokens, cache, scores, SELECTION, Softmax(0.125), limits_of(0.999, 5, 9))
        assert capped[0].tolist() == [9, 9]
        assert capped.min() == 5
        fixed = count(tokens, cache, scores, SELECTION, Softmax(0.125), limits_of(0.0, 7, 7))
        assert fixed.eq(7).all()
        whole = count(tokens, cache, scores, SELECTION, Softmax(0.125), limits_of(1.0, 3))
        assert whole[:, 0].tolist() == [max(3, context // 8) for context in CONTEXTS]


def test_a_fixed_row_is_selected_as_by_a_budget():
    batch = batch_of("quarters")
    tokens, cache, scores = arguments(batch)
    counts = count_pages(tokens, cache, scores, SELECTION, Softmax(0.125), limits_of(0.0, 7, 7))
    ours = select_pages(scores, batch.num_pages, 7, 1, 1, counts)
    assert torch.equal(ours, select_pages(scores, batch.num_pages, 7, 1, 1))


def test_equal_scores_go_to_the_lowest_page_and_masses_decide_how_many():
    """All keys are zero, so all pages weigh the same: a share is a number of pages."""
    batch = make_batch([800], 1, 64, statistics="int4", kind="quarters")
    cache = KVCache(batch.paged_keys, batch.paged_values, batch.statistics)
    tokens = QueryTokens(torch.zeros(1, 1, 4, 64).bfloat16(), batch.block_table, batch.context_lens)
    scores = score_pages(tokens.query, batch.statistics, batch.block_table, batch.num_pages, 0.0)
    for share in (0.25, 0.5, 0.75):
        limits = Limits(torch.tensor([share]), torch.tensor([3]), torch.tensor([100]))
        for count in WAYS_TO_COUNT:
            found = int(count(tokens, cache, scores, SELECTION, Softmax(1.0), limits))
            assert abs(found - math.ceil(100 * share)) <= 1


def test_bad_arguments_are_refused():
    batch = batch_of("quarters")
    tokens, cache, scores = arguments(batch)
    with pytest.raises(ValueError, match="least: got 1, allowed: at least 2"):
        count_pages(tokens, cache, scores, SELECTION, Softmax(1.0), limits_of(0.9, 1))
    with pytest.raises(ValueError, match="most: got less than least"):
        count_pages(tokens, cache, scores, SELECTION, Softmax(1.0), limits_of(0.9, 9, 8))
    with pytest.raises(ValueError, match=r"share: got \[2\] torch.float32, allowed: \[7\] torch.float32"):
        count_pages(tokens, cache, scores, SELECTION, Softmax(1.0), limits_of(0.9)[:2])
    with pytest.raises(ValueError, match="scores: got"):
        count_pages(tokens, cache, scores.float(), SELECTION, Softmax(1.0), limits_of(0.9))
    means = make_batch(CONTEXTS, 2, 64)
    plain = KVCache(means.paged_keys, means.paged_values, means.statistics)
    with pytest.raises(ValueError, match="statistics: got mean_and_spread, allowed: quarters or sketch"):
        count_pages(tokens, plain, scores, SELECTION, Softmax(1.0), limits_of(0.9))


def test_rows_of_decoding_requests_are_counted_each_to_its_limits():
    """Two query tokens each. One request is attended whole, one has few pages, one has a fixed number."""
    batch = make_batch([300, 20, 205, 299], 2, 64, statistics="int4", kind="quarters")
    query = torch.randn(8, 8, 64, generator=torch.Generator().manual_seed(2)).mul(2).bfloat16()
    limits = Limits(torch.tensor([0.9, 0.9, 0.0, 0.6]), torch.tensor([4, 4, 9, 4]), torch.tensor([1000, 1000, 9, 1000]))
    dense = torch.tensor([False, False, False, True])
    requests = DecodeBatch(query, batch.block_table.int(), batch.context_lens.int(), dense, dense_tokens=30)
    cache = KVCache(batch.paged_keys, batch.paged_values, batch.statistics)
    counters = torch.zeros(2, 4, dtype=torch.int64)
    counted_batch = count_rows(requests, cache, SELECTION, Softmax(0.125), limits, counters)
    found = counted_batch.budgets
    contexts = torch.tensor([299, 300, 19, 20, 204, 205, 298, 299])
    request = torch.arange(4).repeat_interleave(2)
    tokens = QueryTokens(query.unflatten(1, (2, 4)), batch.block_table[request], contexts)
    scores = score_pages(tokens.query, batch.statistics, tokens.block_table, contexts // 8, 0.0)
    assert torch.equal(counted_batch.scores, scores)
    each = count_pages(tokens, cache, scores, SELECTION, Softmax(0.125), limits[request])
    assert torch.equal(found.long(), each)
    assert found.dtype == torch.int32
    assert found[2:4].eq(4).all()
    assert found[4:6].eq(9).all()
    assert found[:2].min() > 9
    reads = count_reads(found, contexts, 8, 8)
    assert torch.equal(counters, reads[:2].sum(dim=0) + reads[4:6].sum(dim=0))
