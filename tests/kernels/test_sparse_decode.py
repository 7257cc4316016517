import ctypes
from dataclasses import replace

import pytest
import torch
from sparse_kernels.batch import DecodeBatch, DecodeOutput, PageSelection, Softmax
from sparse_kernels.group_routing import GroupRouting, group_scores
from sparse_kernels.page_score import score_pages
from sparse_kernels.page_topk import best_first, select_pages
from sparse_kernels.sparse_attention import attend_pages
from sparse_kernels.sparse_decode import reference, sparse_decode
from sparse_kernels.split_attention import Stopping, split_attention
from sparse_kernels.stopping import StopRule, count_reads, pages_until_stable
from support.paged import PagedBatch, dense_attention, make_batch

SCALE = 0.1
SOFTMAX = Softmax(SCALE)
HEADS, GROUP, SIZE = 2, 4, 64
SELECTION = PageSelection(8, sink_pages=1, recent_pages=1, std_weight=0.75)


def query_of(batch: PagedBatch, queries: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(len(batch.keys) * queries, HEADS * GROUP, SIZE, generator=generator).bfloat16()


def requests_of(batch: PagedBatch, query: torch.Tensor, **changes: object) -> DecodeBatch:
    return replace(DecodeBatch(query, batch.block_table.int(), batch.context_lens.int()), **changes)


def decode(batch: PagedBatch, query: torch.Tensor, selection: PageSelection = SELECTION, **changes: object):
    requests = {name: changes.pop(name) for name in list(changes) if name in DecodeBatch.__dataclass_fields__}
    cache = replace(
        batch.cache,
        **{name: changes.pop(name) for name in ("statistics", "key_scale", "value_scale") if name in changes},
    )
    softmax = changes.pop("softmax", SOFTMAX)
    return sparse_decode(requests_of(batch, query, **requests), cache, softmax, selection, **changes)


def dense(batch: PagedBatch, query: torch.Tensor) -> torch.Tensor:
    rows = query.unflatten(1, (HEADS, GROUP))
    outputs = [dense_attention(row, *kv, SCALE) for row, *kv in zip(rows, batch.keys, batch.values, strict=True)]
    return torch.stack(outputs).float()


def test_is_score_select_and_attend():
    batch = make_batch([700, 129, 1000], HEADS, SIZE)
    query = query_of(batch)
    grouped = query.unflatten(1, (HEADS, GROUP))
    scores = score_pages(grouped, batch.statistics, batch.block_table, batch.num_pages, 0.75)
    pages = select_pages(scores, batch.num_pages, 8, 1, 1)
    expected = attend_pages(batch.tokens(grouped), batch.cache, pages, SOFTMAX)
    torch.testing.assert_close(decode(batch, query), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("queries", [1, 2])
def test_each_request_reads_its_own_budget(statistics, queries):
    """Of four contexts one fits its budget, and one is attended whole despite its budget."""
    batch = make_batch([700, 300, 1000, 900], HEADS, SIZE)
    query = query_of(batch, queries)
    changes = {} if statistics else {"statistics": None}
    budgets, dense_requests = (8, 40, 64, 5), torch.tensor([False, False, False, True])
    selection = replace(SELECTION, k=64)
    mixed = decode(
        batch, query, selection, budgets=torch.tensor(budgets).int(), dense_requests=dense_requests, **changes
    )
    for request, k in enumerate(budgets):
        rows = slice(request * queries, (request + 1) * queries)
        alone = decode(batch, query, replace(SELECTION, k=k), dense_requests=dense_requests, **changes)[rows]
        assert torch.equal(mixed[rows], alone)
        whole = decode(batch, query, replace(SELECTION, k=1000), **changes)[rows]
        assert torch.equal(alone, whole) == (request in (1, 3))


def test_a_budget_is_never_more_than_there_is_room_for():
    batch = make_batch([700, 129], HEADS, SIZE)
    query = query_of(batch)
    assert torch.equal(decode(batch, query, budgets=torch.tensor([500, 8]).int()), decode(batch, query))


@pytest.mark.parametrize("requests", [1, 2])
def test_kernels_find_a_budget_for_each_query_token(requests: int) -> None:
    """Kernels read consecutive numbers, whatever the strides of the tensor."""
    budgets = torch.tensor([8, 9], dtype=torch.int32)[:requests]
    batch = make_batch([700, 300][:requests], HEADS, SIZE)
    found = requests_of(batch, query_of(batch, 3), budgets=budgets).token_budgets()
    read = (ctypes.c_int32 * (3 * requests)).from_address(found.data_ptr())
    assert list(read) == budgets.repeat_interleave(3).tolist()


def test_budgets_follow_their_requests():
    batch = make_batch([700, 300, 1000], HEADS, SIZE)
    whole = requests_of(batch, query_of(batch, 2), budgets=torch.tensor([8, 9, 10]).int())
    assert whole.token_budgets().tolist() == [8, 8, 9, 9, 10, 10]
    assert whole.requests(1, 3).budgets.tolist() == [9, 10]
    assert requests_of(batch, query_of(batch)).token_budgets() is None
    with pytest.raises(ValueError, match="budgets: got 2, allowed: 3"):
        replace(whole, budgets=torch.tensor([8, 9]).int()).check(HEADS, SIZE)
    with pytest.raises(ValueError, match="budgets: got int64 of 1 dimensions"):
        replace(whole, budgets=torch.tensor([8, 9, 10])).check(HEADS, SIZE)


@pytest.mark.parametrize("how", ["selection", "dense_tokens", "dense_requests"])
def test_whole_contexts_are_dense(how):
    batch = make_batch([300, 129, 7], HEADS, SIZE)
    query = query_of(batch)
    whole = {
        "selection": replace(SELECTION, k=40), "dense_tokens": 300,
        "dense_requests": torch.tensor([True, True, False]),
    }  # fmt: skip
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


def test_complete_pages_of_query_tokens():
    batch = make_batch([300, 129, 1], HEADS, SIZE)
    requests = requests_of(batch, query_of(batch, queries=3), seq_lens=torch.tensor([41, 40, 1], dtype=torch.int32))
    assert requests.num_pages(8).tolist() == [4, 5, 5, 4, 4, 5, 0, 0, 0]


def test_padding_is_zero_and_out_is_written():
    batch = make_batch([300, 129], HEADS, SIZE)
    query = query_of(batch)
    out = torch.full(query.shape, torch.nan).bfloat16()
    returned = decode(batch, query, seq_lens=torch.tensor([300, 0], dtype=torch.int32), output=DecodeOutput(out))
    assert returned is out
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert out.isfinite().all()


def test_without_statistics_the_newest_pages_are_read():
    batch = make_batch([300], HEADS, SIZE)
    query = query_of(batch)
    pages = torch.tensor([0, *range(30, 37)]).expand(1, HEADS, -1)
    grouped = query.unflatten(1, (HEADS, GROUP))
    expected = attend_pages(batch.tokens(grouped), batch.cache, pages, SOFTMAX)
    actual = decode(batch, query, replace(SELECTION, recent_pages=0), statistics=None)
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
        ({"selection": replace(SELECTION, k=1)}, "k: got 1, allowed: at least 2"),
        ({"selection": replace(SELECTION, sink_pages=-1)}, "sink_pages: got -1, allowed: at least 0"),
        ({"block_table": torch.zeros(1, 9).long()}, r"block_table: got int64 of 2 dimensions.*, allowed: int32 of 2"),
        ({"seq_lens": torch.ones(1).long()}, r"seq_lens: got int64 of 1 dimensions.*, allowed: int32 of 1"),
        ({"dense_requests": torch.ones(2).bool()}, "dense_requests: got 2 requests, allowed: 1"),
        ({"dense_requests": torch.ones(1).int()}, r"dense_requests: got int32 .*, allowed: bool"),
        (
            {"output": DecodeOutput(torch.zeros(2, HEADS * GROUP, SIZE).bfloat16())},
            r"output: got \[2, 8, 64\] on cpu, allowed: \[1, 8, 64\] on cpu",
        ),
        ({"output": DecodeOutput(torch.zeros(1, HEADS * GROUP, SIZE))}, r"output: got float32 .*bfloat16 or float16"),
        (
            {"output": DecodeOutput(torch.zeros(1, HEADS * GROUP, 2 * SIZE).bfloat16()[..., :SIZE])},
            "output: got 128 elements from a head to the next, allowed: 64",
        ),
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


def every_page(batch: PagedBatch, query: torch.Tensor, rule: StopRule | None = None, **changes: object) -> torch.Tensor:
    """Decodes over all pages; under a rule, the first page before the newest."""
    requests = requests_of(batch, query, dense_tokens=changes.pop("dense_tokens", 0))
    stopping = None if rule is None else Stopping(rule, sink_pages=1)
    return split_attention(requests, batch.cache, changes.pop("softmax", SOFTMAX), stopping=stopping, **changes)


@pytest.mark.parametrize("policy", ["best first", "newest of a budget", "every page"])
def test_attention_that_stops_is_attention_over_the_pages_read(policy):
    contexts = [1500, 1501, 600, 100, 1]
    batch = make_batch(contexts, HEADS, SIZE)
    # Each query finds the newest key, in some requests better than in others.
    newest = torch.stack([key[-1].repeat_interleave(GROUP, dim=0) for key in batch.keys])
    query = (newest * torch.tensor([2.0, 0.5, 2.0, 1.0, 1.0])[:, None, None] + query_of(batch) * 0.3).bfloat16()
    pages_read, counters = torch.full((5, HEADS), -1), torch.zeros(HEADS, 4, dtype=torch.int64)
    k = {"best first": 64, "newest of a budget": 64, "every page": None}[policy]
    statistics = batch.statistics if policy == "best first" else None
    rule = RULE._replace(least_pages=1)
    output = replace(DecodeOutput.like(query), pages_read=pages_read, counters=counters)
    if k is None:
        out = every_page(batch, query, rule, dense_tokens=100, output=output)
    else:
        selection = replace(SELECTION, k=k, recent_pages=0)
        out = decode(batch, query, selection, statistics=statistics, rule=rule, dense_tokens=100, output=output)
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
        token = batch.tokens(grouped)[row]
        count = torch.full((1, HEADS), pages)
        if context > 100 and pages > (k or 0):
            count = pages_until_stable(token, batch.cache, chosen, SOFTMAX, rule)
            counted += count_reads(count, batch.context_lens[row], 8, 64)[0]
        assert pages_read[request].tolist() == count[0].tolist()
        chosen = torch.where(torch.arange(chosen.shape[-1]) < count[..., None], chosen, -1)
        torch.testing.assert_close(out[row], attend_pages(token, batch.cache, chosen, SOFTMAX), atol=1e-2, rtol=1e-2)
    assert torch.equal(counters, counted)
    readable = batch.num_pages.clamp(max=k or 1500)[:, None]
    assert (pages_read < readable).any(), "nothing stopped"
    assert (pages_read == readable).any(), "nothing went on to the end"


@pytest.mark.parametrize("k", [64, None])
def test_skipped_groups_read_nothing_and_others_stop_as_without_routing(k):
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
        pages_read, counters = torch.full((5, HEADS), -1), torch.zeros(HEADS, 4, dtype=torch.int64)
        rule = RULE._replace(least_pages=1)
        output = replace(DecodeOutput.like(query), pages_read=pages_read, counters=counters)
        changes = {"rule": rule, "routing": routing, "dense_tokens": 100, "output": output}
        if k is None:
            out = every_page(batch, query, **changes)
        else:
            out = decode(batch, query, replace(SELECTION, k=k), **changes)
        found.append((out.unflatten(1, (HEADS, GROUP)), pages_read))
        assert routing.counts[:, 1].tolist() == [3] * HEADS
        reads = (pages_read[:3] > 0)[..., None]
        assert torch.equal(counters, (count_reads(pages_read[:3], batch.context_lens[:3], 8, 64) * reads).sum(dim=0))
    (plain, all_reads), (routed, reads) = found
    assert skipped.sum() == 3
    assert torch.equal(routed, plain.masked_fill(skipped[..., None, None], 0))
    assert torch.equal(reads, all_reads.masked_fill(skipped, 0))
    assert (all_reads < batch.num_pages.clamp(max=k or 1500)[:, None])[:3].any(), "nothing stopped"


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("rule", [None, RULE])
@pytest.mark.parametrize("limit", [0.05, None], ids=["routed", "unrouted"])
@pytest.mark.parametrize("budgets", [None, (8, 64, 9, 8, 200, 30, 8)])
def test_a_cpu_follows_the_specification(statistics, rule, limit, budgets):
    """Of seven requests of two tokens, one attends densely, one is short, one pads the batch."""
    batch = make_batch([1500, 1501, 600, 100, 1700, 900, 0], HEADS, SIZE)
    selection, query = replace(SELECTION, k=200, recent_pages=0), query_of(batch, 2)
    routing = None
    if limit is not None:
        coefficients = torch.tensor([[limit, 0, 0, 0]]).repeat(HEADS, 1)
        routing = GroupRouting(coefficients, "max", counts=torch.zeros(HEADS, 2, dtype=torch.int64))
    requests = requests_of(
        batch, query, dense_tokens=100, dense_requests=torch.arange(7) == 2,
        budgets=None if budgets is None else torch.tensor(budgets).int(),
    )  # fmt: skip
    cache = batch.cache if statistics else replace(batch.cache, statistics=None)
    found = []
    for step, scale in ((sparse_decode, None), (sparse_decode, torch.ones(1)), (reference.sparse_decode, None)):
        output = replace(
            DecodeOutput.like(query), pages=torch.full((14, HEADS, 200), 7).int(),
            pages_read=torch.full((14, HEADS), 7).int(), counters=torch.zeros(HEADS, 4, dtype=torch.int64),
        )  # fmt: skip
        if routing is not None:
            routing.counts.zero_()
        scaled = replace(requests, query_scale=scale)
        if step is sparse_decode:
            step(scaled, cache, SOFTMAX, selection, routing=routing, rule=rule, output=output)
        else:
            step(scaled, cache, SOFTMAX, selection, routing, rule, output)
        found.append((output, None if routing is None else routing.counts.tolist()))
    (compiled, routed), *specified = found
    for expected, counts in specified:
        torch.testing.assert_close(compiled.heads, expected.heads, atol=1e-2, rtol=1e-2)
        # Without scores and a rule no order is that of the specification.
        assert torch.equal(compiled.pages.sort().values, expected.pages.sort().values)
        assert rule is None or torch.equal(compiled.pages_read, expected.pages_read)
        assert torch.equal(compiled.counters, expected.counters)
        assert routed == counts
    assert (compiled.pages[[4, 5, 12, 13]] == -1).all()
    assert rule is None or compiled.counters.any()
    assert routed is None or 0 < sum(skipped for skipped, _ in routed) < sum(both for _, both in routed)


@pytest.mark.parametrize("step", [decode, every_page])
def test_a_rule_needs_whole_pages(step):
    batch = make_batch([300], HEADS, SIZE)
    with pytest.raises(ValueError, match="block_tokens: got 12, allowed: a multiple of the page size 8"):
        step(batch, query_of(batch), rule=RULE._replace(block_tokens=12))


def test_learned_sinks_are_part_of_what_stops():
    batch = make_batch([300, 129], HEADS, SIZE)
    query, softmax = query_of(batch), replace(SOFTMAX, sink_logits=torch.linspace(-2, 3, HEADS * GROUP))
    never = RULE._replace(patience=0)
    expected = decode(batch, query, replace(SELECTION, k=64), softmax=softmax)
    for rule in (never, None):
        torch.testing.assert_close(every_page(batch, query, rule, softmax=softmax), expected, atol=1e-2, rtol=1e-2)
