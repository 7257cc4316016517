import pytest
import torch
from sparse_kernels.group_routing import GroupRouting, group_scores
from sparse_kernels.page_score import score_pages
from sparse_kernels.page_topk import best_first, select_pages
from sparse_kernels.routed_attention import routed_attention
from sparse_kernels.sparse_attention import attend_pages
from sparse_kernels.sparse_decode import sparse_decode
from sparse_kernels.termination import StopRule, count_visits, visited_pages
from support.paged import PagedBatch, dense_attention, make_batch

SCALE = 0.1
HEADS, GROUP, SIZE = 2, 4, 64


def query_of(batch: PagedBatch, queries: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(len(batch.keys) * queries, HEADS * GROUP, SIZE, generator=generator).bfloat16()


def decode(batch: PagedBatch, query: torch.Tensor, **more: object) -> torch.Tensor:
    arguments = {"k": 8, "sink_pages": 1, "recent_pages": 1, "std_weight": 0.75, "scale": SCALE}
    lens = more.pop("seq_lens", batch.context_lens.int())
    statistics = more.pop("statistics", batch.statistics)
    return sparse_decode(
        query, batch.paged_keys, batch.paged_values, statistics, batch.block_table.int(), lens, **(arguments | more)
    )


def dense(batch: PagedBatch, query: torch.Tensor) -> torch.Tensor:
    rows = query.unflatten(1, (HEADS, GROUP))
    each = [dense_attention(row, *kv, SCALE) for row, *kv in zip(rows, batch.keys, batch.values, strict=True)]
    return torch.stack(each).float()


def test_is_score_select_and_attend():
    batch = make_batch([700, 129, 1000], HEADS, SIZE)
    query = query_of(batch)
    grouped = query.unflatten(1, (HEADS, GROUP))
    scores = score_pages(grouped, batch.statistics, batch.block_table, batch.num_pages, 0.75)
    pages = select_pages(scores, batch.num_pages, 8, 1, 1)
    expected = attend_pages(
        grouped, batch.paged_keys, batch.paged_values, batch.block_table, batch.context_lens, pages, SCALE
    )
    torch.testing.assert_close(decode(batch, query), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("how", ["k", "dense_tokens", "dense_requests"])
def test_whole_contexts_are_dense(how):
    batch = make_batch([300, 129, 7], HEADS, SIZE)
    query = query_of(batch)
    whole = {"k": 40, "dense_tokens": 300, "dense_requests": torch.tensor([True, True, False])}
    expected = dense(batch, query)
    torch.testing.assert_close(decode(batch, query, **{how: whole[how]}).float(), expected, atol=1e-2, rtol=1e-2)
    assert not torch.allclose(decode(batch, query).float(), expected, atol=1e-2, rtol=1e-2)


def test_query_tokens_are_the_last_of_their_request():
    batch = make_batch([300, 129], HEADS, SIZE)
    query = query_of(batch, queries=3)
    together = decode(batch, query)
    for token in range(6):
        request, from_end = token // 3, 2 - token % 3
        lens = batch.context_lens.int() - from_end
        alone = decode(batch, query[token].expand(2, -1, -1), seq_lens=lens)
        assert torch.equal(together[token], alone[request])


def test_padding_is_zero_and_out_is_written():
    batch = make_batch([300, 129], HEADS, SIZE)
    query = query_of(batch)
    out = torch.full(query.shape, torch.nan)
    returned = decode(batch, query, seq_lens=torch.tensor([300, 0], dtype=torch.int32), out=out)
    assert returned is out
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert out.isfinite().all()


def test_without_statistics_the_newest_pages_are_read():
    batch = make_batch([300], HEADS, SIZE)
    query = query_of(batch)
    pages = torch.tensor([0, *range(30, 37)]).expand(1, HEADS, -1)
    grouped = query.unflatten(1, (HEADS, GROUP))
    expected = attend_pages(
        grouped, batch.paged_keys, batch.paged_values, batch.block_table, batch.context_lens, pages, SCALE
    )
    actual = decode(batch, query, statistics=None, recent_pages=0)
    torch.testing.assert_close(actual, expected, atol=1e-2, rtol=1e-2)


def test_scales_of_eight_bit_tensors_multiply():
    batch = make_batch([300], HEADS, SIZE)
    query = query_of(batch)
    two, half = torch.tensor([2.0]), torch.tensor([0.5])
    scaled = decode(batch, query, query_scale=two, key_scale=half, value_scale=two)
    torch.testing.assert_close(scaled, decode(batch, query) * 2, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"k": 1}, "k: got 1, allowed: at least 2"),
        ({"seq_lens": torch.ones(2, dtype=torch.int32)}, "query: got 1 tokens, allowed: a multiple of the 2 requests"),
    ],
)
def test_refuses(change, sentence):
    batch = make_batch([300], HEADS, SIZE)
    with pytest.raises(ValueError, match=sentence):
        decode(batch, query_of(batch), **change)


def test_refuses_heads_that_do_not_fit():
    batch = make_batch([300], HEADS, SIZE)
    with pytest.raises(ValueError, match=r"query: got 3 heads of size 64, allowed: a multiple of 2 heads of size 64"):
        decode(batch, torch.zeros(1, 3, SIZE))


RULE = StopRule(scale_tolerance=0.2, direction_tolerance=0.02, patience=2, block_tokens=64)


def every_page(batch: PagedBatch, query: torch.Tensor, **more: object) -> torch.Tensor:
    """Under a rule, the first page before the newest."""
    return routed_attention(
        query, batch.paged_keys, batch.paged_values, batch.block_table.int(), batch.context_lens.int(),
        more.pop("routing", None), SCALE, sink_pages=1, **more,
    )  # fmt: skip


@pytest.mark.parametrize("policy", ["best first", "newest of a budget", "every page"])
def test_attention_that_stops_is_attention_over_the_pages_visited(policy):
    contexts = [1500, 1501, 600, 100, 1]
    batch = make_batch(contexts, HEADS, SIZE)
    # Each query finds the newest key, in some requests better than in others.
    newest = torch.stack([key[-1].repeat_interleave(GROUP, dim=0) for key in batch.keys])
    query = (newest * torch.tensor([2.0, 0.5, 2.0, 1.0, 1.0])[:, None, None] + query_of(batch) * 0.3).bfloat16()
    visited, counters = torch.full((5, HEADS), -1), torch.zeros(HEADS, 4, dtype=torch.int64)
    k = {"best first": 64, "newest of a budget": 64, "every page": None}[policy]
    statistics = batch.statistics if policy == "best first" else None
    rule = RULE._replace(least_pages=1)
    more = {"rule": rule, "visited": visited, "counters": counters, "dense_tokens": 100}
    if k is None:
        out = every_page(batch, query, **more)
    else:
        out = decode(batch, query, k=k, recent_pages=0, statistics=statistics, **more)
    grouped = query.unflatten(1, (HEADS, GROUP))
    counted = torch.zeros_like(counters)
    for request, context in enumerate(contexts):
        row, pages = slice(request, request + 1), context // 8
        if k is not None and pages > k and statistics is not None:
            scores = score_pages(grouped[row], statistics, batch.block_table[row], batch.num_pages[row], 0.75)
            chosen = select_pages(scores, batch.num_pages[row], k, 1, 0)
            chosen = best_first(chosen, scores, batch.num_pages[row], 1, 0)
        else:
            chosen = torch.tensor([0, *range(pages - 1, 0, -1)][: min(k or pages, pages)]).expand(1, HEADS, -1)
        rest = batch.paged_keys, batch.paged_values, batch.block_table[row], batch.context_lens[row]
        count = torch.full((1, HEADS), pages)
        if context > 100 and pages > (k or 0):
            count = visited_pages(grouped[row], *rest, chosen, SCALE, rule)
            counted += count_visits(count, batch.context_lens[row], 8, 64)[0]
        assert visited[request].tolist() == count[0].tolist()
        chosen = torch.where(torch.arange(chosen.shape[-1]) < count[..., None], chosen, -1)
        torch.testing.assert_close(out[row], attend_pages(grouped[row], *rest, chosen, SCALE), atol=1e-2, rtol=1e-2)
    assert torch.equal(counters, counted)
    readable = batch.num_pages.clamp(max=k or 1500)[:, None]
    assert (visited < readable).any(), "nothing stopped"
    assert (visited == readable).any(), "nothing went on to the end"


@pytest.mark.parametrize("k", [64, None])
def test_skipped_groups_visit_nothing_and_others_stop_as_without_routing(k):
    batch = make_batch([1500, 1501, 600, 100, 0], HEADS, SIZE)
    newest = torch.stack([(key if len(key) else torch.zeros(1, HEADS, SIZE))[-1] for key in batch.keys])
    query = (newest.repeat_interleave(GROUP, dim=1) + query_of(batch) * 0.3).bfloat16()
    grouped = query.unflatten(1, (HEADS, GROUP))[:3]
    scores = group_scores(grouped, torch.stack([key[0] for key in batch.keys[:3]]), "mean")
    threshold = scores.flatten().sort().values[2:4].mean()
    skipped = torch.zeros(5, HEADS, dtype=torch.bool)
    skipped[:3] = scores >= threshold
    found = []
    for limit in (2.0, threshold):
        coefficients = torch.zeros(HEADS, 4)
        coefficients[:, 0] = limit
        routing = GroupRouting(coefficients, counts=torch.zeros(HEADS, 2, dtype=torch.int64))
        visited, counters = torch.full((5, HEADS), -1), torch.zeros(HEADS, 4, dtype=torch.int64)
        rule = RULE._replace(least_pages=1)
        more = {"rule": rule, "visited": visited, "counters": counters, "routing": routing, "dense_tokens": 100}
        out = every_page(batch, query, **more) if k is None else decode(batch, query, k=k, **more)
        found.append((out.unflatten(1, (HEADS, GROUP)), visited))
        assert routing.counts[:, 1].tolist() == [3] * HEADS
        reads = (visited[:3] > 0)[..., None]
        assert torch.equal(counters, (count_visits(visited[:3], batch.context_lens[:3], 8, 64) * reads).sum(dim=0))
    (plain, all_visits), (routed, visits) = found
    assert skipped.sum() == 3
    assert torch.equal(routed, plain.masked_fill(skipped[..., None, None], 0))
    assert torch.equal(visits, all_visits.masked_fill(skipped, 0))
    assert (all_visits < batch.num_pages.clamp(max=k or 1500)[:, None])[:3].any(), "nothing stopped"


@pytest.mark.parametrize("step", [decode, every_page])
def test_a_rule_needs_whole_pages(step):
    batch = make_batch([300], HEADS, SIZE)
    with pytest.raises(ValueError, match="block_tokens: got 12, allowed: a multiple of the page size 8"):
        step(batch, query_of(batch), rule=RULE._replace(block_tokens=12))


def test_learned_sinks_are_part_of_what_stops():
    batch = make_batch([300, 129], HEADS, SIZE)
    query, sinks = query_of(batch), torch.linspace(-2, 3, HEADS * GROUP)
    never = RULE._replace(patience=0)
    expected = decode(batch, query, k=64, sinks=sinks)
    torch.testing.assert_close(every_page(batch, query, rule=never, sinks=sinks), expected, atol=1e-2, rtol=1e-2)
    with pytest.raises(ValueError, match="sinks: got learned ones without a rule, allowed: None"):
        every_page(batch, query, sinks=sinks)
