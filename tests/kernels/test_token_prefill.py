from dataclasses import replace

import pytest
import torch
from sparse_kernels.batch import Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.paging import PagedTensor
from sparse_kernels.token_prefill import (
    KeptTokens,
    ListedAttention,
    PrefillSizes,
    Scratch,
    TokenRule,
    attended_pairs,
    draw_probes,
    token_prefill,
)
from sparse_kernels.token_prefill.reference import column_sums
from support.paged import assert_as_accurate
from support.prefill import (
    ATTENDING,
    SMALL_RULE,
    Prefill,
    attention_beside,
    attention_within,
    is_near,
    make_prefill,
    papers_tokens,
    rows_of,
    tokens_of,
)

SOFTMAX = Softmax(0.25)
RAGGED = [(90, 90), (33, 33), (0, 0), (120, 31), (65, 1), (64, 33), (1, 1)]


def run(prefill: Prefill, rule: TokenRule = SMALL_RULE, softmax: Softmax = SOFTMAX) -> tuple[torch.Tensor, KeptTokens]:
    output = prefill.output()
    return output, token_prefill(prefill.batch, prefill.cache, softmax, rule, output)


CASES = {
    "groups of 2": {},
    "multi-head": {"num_kv_heads": 3, "group": 1},
    "group of 3, heads of 80": {"group": 3, "head_size": 80},
    "group of 16": {"num_kv_heads": 1, "group": 16},
    "heads of 128": {"num_kv_heads": 1, "group": 4, "head_size": 128, "block_size": 64},
}


def softmax_of(name: str, heads: int) -> Softmax:
    generator = torch.Generator().manual_seed(5)
    match name:
        case "softcap":
            return replace(SOFTMAX, softcap=3.0)
        case "sink logits":
            return replace(SOFTMAX, sink_logits=torch.randn(heads, generator=generator) + 2)
    return SOFTMAX


@pytest.mark.parametrize("rule", [SMALL_RULE, replace(SMALL_RULE, fixed_ratio=0.3)], ids=["tau", "fixed ratio"])
@pytest.mark.parametrize("special", ["", "softcap", "sink logits"])
@pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
def test_the_reference_is_the_paper(shape, special, rule):
    prefill = make_prefill(RAGGED, padding=3, **shape)
    softmax = softmax_of(special, prefill.batch.query.shape[1])
    output, kept = run(prefill, rule, softmax)
    probes = draw_probes(prefill.batch, SMALL_RULE)
    some_left_out = False
    for request, chunk in enumerate(prefill.chunks):
        query, key, value = prefill.batch.query[chunk], prefill.keys[request], prefill.values[request]
        if len(query) == 0:
            assert tokens_of(kept, request) == set()
            continue
        tokens, p = papers_tokens(query, key, rows_of(probes, request), rule, softmax)
        assert tokens_of(kept, request) == tokens
        assert int(kept.important[request]) == p
        some_left_out |= len(tokens) < len(key)
        exact, rounded = (
            attention_within(query, key, value, tokens, softmax, d) for d in (torch.float64, torch.float32)
        )
        assert_as_accurate(output[chunk], exact, rounded)
        outside = [i for i in range(len(query)) if len(key) - len(query) + i not in tokens]
        assert output[chunk][outside].eq(0).all()
    assert some_left_out
    assert output[prefill.chunks[-1].stop :].eq(0).all()


@pytest.mark.parametrize("special", ["", "softcap", "sink logits"])
@pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
def test_every_query_attends_to_t_and_to_its_newest_tokens(shape, special):
    prefill = make_prefill(RAGGED, padding=3, **shape)
    softmax = softmax_of(special, prefill.batch.query.shape[1])
    output, kept = run(prefill, ATTENDING, softmax)
    _, kept_as_published = run(prefill, softmax=softmax)
    assert torch.equal(kept.important, kept_as_published.important)
    some_left_out = False
    for request, chunk in enumerate(prefill.chunks):
        given = prefill.batch.query[chunk], prefill.keys[request], prefill.values[request]
        if chunk.start == chunk.stop:
            assert tokens_of(kept, request) == set()
            continue
        context = len(given[1])
        tokens = tokens_of(kept, request)
        assert tokens == tokens_of(kept_as_published, request) | set(range(min(4, context)))
        exact, rounded = (
            attention_beside(*given, tokens, ATTENDING, softmax, d) for d in (torch.float64, torch.float32)
        )
        assert_as_accurate(output[chunk], exact, rounded)
        some_left_out |= len(tokens) < context - ATTENDING.local_tokens - ATTENDING.tile_tokens
    assert some_left_out
    assert output[prefill.chunks[-1].stop :].eq(0).all()


EDGES = [(length, chunk) for length in (63, 64, 65, 127, 128, 129) for chunk in (1, 62, 63)]


@pytest.mark.parametrize("tile_tokens", [1, 64])
@pytest.mark.parametrize("local_tokens", [1, 63, 64, 65, 1000])
def test_the_queries_of_a_tile_share_the_newest_tokens_of_its_first_position(local_tokens, tile_tokens):
    prefill = make_prefill(EDGES, num_kv_heads=1)
    rule = replace(ATTENDING, tau=0.5, local_tokens=local_tokens, tile_tokens=tile_tokens)
    output, kept = run(prefill, rule)
    for request, chunk in enumerate(prefill.chunks):
        given = prefill.batch.query[chunk], prefill.keys[request], prefill.values[request], tokens_of(kept, request)
        exact, rounded = (attention_beside(*given, rule, SOFTMAX, d) for d in (torch.float64, torch.float32))
        assert_as_accurate(output[chunk], exact, rounded)


@pytest.mark.parametrize("share", ["tau", "fixed_ratio"])
@pytest.mark.parametrize("rule", [SMALL_RULE, ATTENDING], ids=["zero", "attend"])
def test_a_share_of_one_is_dense(rule, share):
    rule = replace(rule, **{share: 1.0})
    prefill = make_prefill(RAGGED)
    output, kept = run(prefill, rule)
    assert kept.counts.tolist() == kept.important.tolist() == [length for length, _ in RAGGED]
    for request, chunk in enumerate(prefill.chunks):
        if chunk.start == chunk.stop:
            continue
        arguments = prefill.batch.query[chunk], prefill.keys[request], prefill.values[request]
        every = set(range(len(arguments[1])))
        exact, rounded = (attention_within(*arguments, every, SOFTMAX, d) for d in (torch.float64, torch.float32))
        assert_as_accurate(output[chunk], exact, rounded)


@pytest.mark.parametrize("rule", [SMALL_RULE, ATTENDING], ids=["zero", "attend"])
def test_short_contexts_are_whole_and_others_as_without_them(rule):
    prefill = make_prefill(RAGGED)
    sparse, kept_sparse = run(prefill, rule)
    whole, _ = run(prefill, replace(rule, tau=1.0))
    output, kept = run(prefill, replace(rule, dense_tokens=65))
    differ = False
    for request, (chunk, (length, new)) in enumerate(zip(prefill.chunks, RAGGED, strict=True)):
        short = length <= 65
        assert torch.equal(output[chunk], (whole if short else sparse)[chunk])
        if new:
            assert tokens_of(kept, request) == (set(range(length)) if short else tokens_of(kept_sparse, request))
            differ |= short and len(tokens_of(kept_sparse, request)) < length
    assert differ


@pytest.mark.parametrize("rule", [SMALL_RULE, ATTENDING], ids=["zero", "attend"])
def test_a_request_does_not_depend_on_its_neighbours(rule):
    prefill = make_prefill(RAGGED)
    output, kept = run(prefill, rule)
    for request, chunk in enumerate(prefill.chunks):
        if chunk.start == chunk.stop:
            continue
        alone, kept_alone = run(prefill.alone(request), rule)
        assert torch.equal(alone, output[chunk])
        assert tokens_of(kept_alone, 0) == tokens_of(kept, request)


@pytest.mark.parametrize("local_tokens", [1, 8, 65, 1000])
@pytest.mark.parametrize("rule", [SMALL_RULE, ATTENDING], ids=["zero", "attend"])
def test_pairs_that_attend_are_counted(rule, local_tokens):
    rule = replace(rule, local_tokens=local_tokens)
    prefill = make_prefill(RAGGED)
    _, kept = run(prefill, rule)
    attend = dense = 0
    for request, (context, chunk) in enumerate(RAGGED):
        tokens = tokens_of(kept, request)
        for row in range(context - chunk, context):
            dense += row + 1
            for column in range(row + 1):
                near = is_near(row, column, rule)
                attend += column in tokens and row in tokens if rule.others == "zero" else column in tokens or near
    assert attended_pairs(kept, prefill.batch, rule).tolist() == [attend, dense]


def test_a_chunk_chooses_anew_from_the_whole_context():
    whole = make_prefill([(100, 100)])
    batch = whole.batch
    second = replace(batch, query=batch.query[60:], query_start=torch.tensor([0, 40], dtype=torch.int32))
    prefill = Prefill(second, whole.cache, whole.keys, whole.values)
    output, kept = run(prefill)
    probes = rows_of(draw_probes(second, SMALL_RULE), 0)
    assert min(probes) >= 60
    tokens, _ = papers_tokens(second.query, whole.keys[0], probes, SMALL_RULE, SOFTMAX)
    assert tokens_of(kept, 0) == tokens
    assert min(tokens) < 60
    first = Prefill(
        replace(
            batch, query=batch.query[:60], query_start=torch.tensor([0, 60], dtype=torch.int32),
            seq_lens=torch.tensor([60], dtype=torch.int32),
        ),
        whole.cache, [], [],
    )  # fmt: skip
    _, kept_before = run(first)
    # The second chunk attends to tokens that the first chunk dropped, and T of the first ends with its last token.
    assert {token for token in tokens if token < 60} - tokens_of(kept_before, 0)
    assert 59 in tokens_of(kept_before, 0)
    assert output[-1].ne(0).any()


def test_packed_keys_are_read_page_by_page():
    prefill = make_prefill([(90, 40)])
    rows = prefill.cache.keys
    # Keys as vLLM's CPU kernels pack them: the tokens of a block are columns.
    packed = rows.view.flatten(2, 4).transpose(2, 3).contiguous()
    columns = packed.unflatten(3, (rows.pages_per_block, 1, rows.page_size)).permute(0, 1, 3, 4, 2, 5)
    keys = PagedTensor(columns, (1,), rows.page_size, rows.head_size)
    for rule in (SMALL_RULE, ATTENDING):
        expected, _ = run(prefill, rule)
        output, _ = run(replace(prefill, cache=KVCache(keys, prefill.cache.values)), rule)
        assert torch.equal(output, expected)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (TokenRule(tau=0.0), "tau: got 0.0, allowed: above 0, at most 1"),
        (TokenRule(tau=1.5), "tau: got 1.5"),
        (TokenRule(fixed_ratio=0.0), "fixed_ratio: got 0.0, allowed: above 0, at most 1"),
        (TokenRule(recent_probes=0), "recent_probes: got 0, allowed: at least 1"),
        (TokenRule(random_probes=-1), "random_probes: got -1, allowed: at least 0"),
        (TokenRule(dense_tokens=-1), "dense_tokens: got -1, allowed: at least 0"),
        (TokenRule(local_tokens=0), "local_tokens: got 0, allowed: at least 1"),
        (TokenRule(tile_tokens=0), "tile_tokens: got 0, allowed: at least 1"),
        (TokenRule(sink_tokens=-1), "sink_tokens: got -1, allowed: at least 0"),
        (TokenRule(others="rows"), "others: got 'rows', allowed: attend or zero"),
    ],
)
def test_rules_that_keep_nothing_are_refused(rule, message):
    prefill = make_prefill([(9, 9)])
    with pytest.raises(ValueError, match=message):
        run(prefill, rule)


def test_what_does_not_fit_is_refused():
    prefill = make_prefill([(9, 9), (40, 8)])
    batch, cache, output = prefill.batch, prefill.cache, prefill.output()
    for changed, message in (
        (replace(batch, query=batch.query[:, :3]), "query: got 3 heads of size 16"),
        (replace(batch, query_start=batch.query_start[:2]), "query_start: got 2 rows, allowed: 3"),
        (replace(batch, block_table=batch.block_table[:1]), "block_table: got 1 rows, allowed: 2"),
        (replace(batch, seq_lens=batch.seq_lens.long()), "seq_lens: got int64"),
        (replace(batch, max_seq_tokens=0), "max_seq_tokens: got 0"),
    ):
        room = output[:, : changed.query.shape[1]]
        with pytest.raises(ValueError, match=message):
            token_prefill(changed, cache, SOFTMAX, SMALL_RULE, room)
    with pytest.raises(ValueError, match="output: got"):
        token_prefill(batch, cache, SOFTMAX, SMALL_RULE, output[1:])
    with pytest.raises(ValueError, match="probes: got"):
        token_prefill(batch, cache, SOFTMAX, SMALL_RULE, output, probes=torch.zeros(2, 3, dtype=torch.int32))


def triton_run(
    prefill: Prefill, rule: TokenRule = SMALL_RULE, softmax: Softmax = SOFTMAX, attend=None, scratch=None
) -> tuple[torch.Tensor, KeptTokens]:
    from sparse_kernels.token_prefill import triton

    output = prefill.output()
    kept = triton.token_prefill(prefill.batch, prefill.cache, softmax, rule, output, None, attend, scratch)
    return output, kept


def paged_flash_attention(listed: ListedAttention) -> None:
    """The attention of a kernel with pages of one token and a causal mask aligned at the bottom right."""
    group = listed.query.shape[1] // listed.keys.shape[2]
    starts = listed.query_start.tolist()
    for request, count in enumerate(listed.counts.tolist()):
        queries = slice(starts[request], starts[request + 1])
        assert queries.stop - queries.start <= listed.max_query_tokens
        assert count <= listed.max_seq_tokens
        rows = listed.rows[request, :count].long()
        keys, values = (
            paged[rows, 0].repeat_interleave(group, dim=1).float() for paged in (listed.keys, listed.values)
        )
        query = listed.query[queries].float()
        logits = torch.einsum("qhd,khd->hqk", query, keys) * listed.softmax.scale
        mask = torch.ones(len(query), count, dtype=torch.bool).tril(diagonal=count - len(query))
        weights = logits.masked_fill(~mask, -torch.inf).softmax(dim=-1)
        listed.output[queries] = torch.einsum("hqk,khd->qhd", weights, values).to(listed.output.dtype)


def triton_sums(prefill: Prefill, rule: TokenRule, softmax: Softmax) -> torch.Tensor:
    from sparse_kernels.token_prefill import triton

    batch = prefill.batch
    sizes = PrefillSizes(batch.num_tokens, batch.num_requests, batch.max_seq_tokens, *batch.query.shape[1:])
    scratch = Scratch.make(sizes, rule, batch.query.dtype, torch.bfloat16, batch.query.device)
    return triton.launch_sums(batch, prefill.cache, softmax, draw_probes(batch, rule), scratch)


def eight_bits(prefill: Prefill) -> Prefill:
    """The same requests with 8-bit queries, keys and values, and a scale of each."""
    keys, values = (
        replace(paged, view=paged.view.nan_to_num(0, 0, 0).clamp(-400, 400).to(torch.float8_e4m3fn))
        for paged in (prefill.cache.keys, prefill.cache.values)
    )
    query_scale, key_scale, value_scale = (torch.tensor([x]) for x in (0.5, 1.5, 0.7))
    batch = replace(prefill.batch, query=prefill.batch.query.to(torch.float8_e4m3fn), query_scale=query_scale)
    return replace(prefill, batch=batch, cache=KVCache(keys, values, None, key_scale, value_scale))


TRITON_CASES = {
    "ragged": (make_prefill, {"requests": RAGGED, "padding": 3}, ""),
    "small blocks": (make_prefill, {"requests": [(129, 64), (63, 63)], "block_size": 16}, ""),
    "large blocks": (make_prefill, {"requests": [(257, 65)], "block_size": 128}, ""),
    "several parts of a context": (make_prefill, {"requests": [(1090, 20), (70, 70)], "num_kv_heads": 1}, ""),
    "group of 3, heads of 80": (make_prefill, {"requests": [(90, 40), (33, 33)], "group": 3, "head_size": 80}, ""),
    "group of 16": (make_prefill, {"requests": [(90, 40)], "num_kv_heads": 1, "group": 16}, "softcap"),
    "heads of 256": (make_prefill, {"requests": [(80, 70)], "num_kv_heads": 1, "group": 1, "head_size": 256}, ""),
    "multi-head, sink logits": (make_prefill, {"requests": RAGGED[:4], "group": 1}, "sink logits"),
    "float16": (make_prefill, {"requests": [(90, 40)], "dtype": torch.float16}, ""),
    "8 bits": (lambda **given: eight_bits(make_prefill(**given)), {"requests": [(90, 40), (33, 33)]}, ""),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("prefill", [run, triton_run])
@pytest.mark.parametrize("rule", [SMALL_RULE, ATTENDING])
@pytest.mark.parametrize("tokens", [2, 90])
def test_requests_without_a_context_become_zero_and_change_no_neighbour(prefill, rule, tokens):
    given = make_prefill([(60, 3), (0, tokens), (40, 5)], padding=4)
    output, kept = prefill(given, rule)
    assert not output[3 : 3 + tokens].any()
    assert not output[-4:].any()
    assert kept.counts[1] == 0
    for request in (0, 2):
        assert torch.equal(output[given.chunks[request]], prefill(given.alone(request), rule)[0])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("make", "given", "special"), TRITON_CASES.values(), ids=TRITON_CASES)
def test_triton_equals_the_reference(make, given, special):
    prefill = make(**given)
    if prefill.batch.query.dtype == torch.float16:
        halves = (
            replace(paged, view=paged.view.nan_to_num(0, 0, 0).clamp(-400, 400).half())
            for paged in (prefill.cache.keys, prefill.cache.values)
        )
        prefill = replace(prefill, cache=KVCache(*halves))
    softmax = softmax_of(special, prefill.batch.query.shape[1])
    expected_sums = column_sums(prefill.batch, prefill.cache, softmax, draw_probes(prefill.batch, SMALL_RULE))
    sums = triton_sums(prefill, SMALL_RULE, softmax)
    for request, chunk in enumerate(prefill.chunks):
        length = int(prefill.batch.seq_lens[request]) if chunk.start < chunk.stop else 0
        # Weights are exponentials of float32 logits of up to some tens, each with some roundings.
        torch.testing.assert_close(sums[request, :length], expected_sums[request, :length], rtol=2e-5, atol=1e-6)
        assert sums[request, length:].isnan().all()
    for rule in (SMALL_RULE, ATTENDING):
        expected, expected_kept = run(prefill, rule, softmax)
        output, kept = triton_run(prefill, rule, softmax)
        assert torch.equal(kept.positions, expected_kept.positions)
        assert torch.equal(kept.important, expected_kept.important)
        assert torch.equal(output == 0, expected == 0)
        # Weights and outputs are rounded to 8 bits of mantissa each.
        error = (output.float() - expected.float()).norm(dim=-1)
        assert (error <= 2**-7 * expected.float().norm(dim=-1)).all()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("local_tokens", "tile_tokens"),
    [*((local, 64) for local in (1, 63, 64, 65, 1000)), (1, 1), (64, 1), (63, 100), (1000, 100)],
)
def test_lists_hold_the_tokens_of_a_tile(local_tokens, tile_tokens):
    """With another kernel in the place of the attention, so that every edge is cheap."""
    edges = [(length, chunk) for length in (63, 64, 65, 128, 129) for chunk in (1, 2, 63)] + [(0, 0)]
    edges += [(length, chunk) for length in (193, 200) for chunk in (64, 65, 129)] + [(70, 0)]
    prefill = make_prefill(edges, num_kv_heads=1, padding=3)
    rule = replace(ATTENDING, tau=0.5, local_tokens=local_tokens, tile_tokens=tile_tokens)
    expected, expected_kept = run(prefill, rule)
    output, kept = triton_run(prefill, rule, attend=paged_flash_attention)
    assert torch.equal(kept.positions, expected_kept.positions)
    error = (output.float() - expected.float()).norm(dim=-1)
    assert (error <= 2**-8 * expected.float().norm(dim=-1)).all()


def without_unread_values(prefill: Prefill, kept: KeptTokens, rule: TokenRule) -> Prefill:
    """The same requests with garbage in place of the values that no query attends to."""
    keys, values = prefill.cache.keys, prefill.cache.values
    # Keys and values share their memory.
    memory = torch.empty(0, dtype=values.view.dtype).set_(values.view.untyped_storage()).clone()
    view = memory.as_strided(values.view.shape, values.view.stride(), values.view.storage_offset())
    block_tokens = values.page_size * values.pages_per_block
    unread = 0
    for request, chunk in enumerate(prefill.chunks):
        context = int(prefill.batch.seq_lens[request])
        first = context - (chunk.stop - chunk.start)
        unseen = [column for column in range(first) if not is_near(first, column, rule)]
        for position in sorted(set(unseen) - tokens_of(kept, request)):
            block = int(prefill.batch.block_table[request, position // block_tokens])
            page, token = divmod(position % block_tokens, values.page_size)
            view[block, :, page, 0, token] = torch.nan
            unread += 1
    assert unread > 20
    keys = replace(keys, view=memory.as_strided(keys.view.shape, keys.view.stride(), keys.view.storage_offset()))
    return replace(prefill, cache=replace(prefill.cache, keys=keys, values=replace(values, view=view)))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("form", ["reference", "triton"])
def test_values_that_no_query_attends_to_are_not_read(form):
    prefill = make_prefill([(120, 31), (200, 7)])
    attend = run if form == "reference" else triton_run
    expected, kept = attend(prefill, ATTENDING)
    output, _ = attend(without_unread_values(prefill, kept, ATTENDING), ATTENDING)
    assert torch.equal(output, expected)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("rule", [SMALL_RULE, ATTENDING], ids=["zero", "attend"])
def test_a_request_has_its_bits_in_every_batch_on_a_gpu(monkeypatch, rule):
    prefill = make_prefill(RAGGED)
    output, kept = triton_run(prefill, rule)
    for request in (1, 3, 5):
        alone, kept_alone = triton_run(prefill.alone(request), rule)
        assert torch.equal(alone, output[prefill.chunks[request]])
        assert tokens_of(kept_alone, 0) == tokens_of(kept, request)
    # Two requests at once.
    monkeypatch.setattr("sparse_kernels.token_prefill.scratch._TOKENS_AT_ONCE", 2 * prefill.batch.max_seq_tokens)
    monkeypatch.setattr("sparse_kernels.token_prefill.triton.listed.LISTED_AT_ONCE", 1)
    in_parts, kept_in_parts = triton_run(prefill, rule)
    assert torch.equal(in_parts, output)
    assert torch.equal(kept_in_parts.positions, kept.positions)
    assert torch.equal(kept_in_parts.counts, kept.counts)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("rule", [SMALL_RULE, ATTENDING], ids=["zero", "attend"])
def test_attention_to_lists_may_be_another_kernels(rule):
    prefill = make_prefill(RAGGED, padding=2)
    expected, _ = run(prefill, rule)
    calls = []

    def attend(listed: ListedAttention) -> None:
        calls.append(listed)
        paged_flash_attention(listed)

    output, _ = triton_run(prefill, rule, attend=attend)
    assert len(calls) == 1
    error = (output.float() - expected.float()).norm(dim=-1)
    assert (error <= 2**-8 * expected.float().norm(dim=-1)).all()


@pytest.mark.usefixtures("interpreted")
def test_scratch_serves_smaller_batches_one_after_the_other():
    prefill = make_prefill(RAGGED)
    expected, _ = triton_run(prefill)
    sizes = PrefillSizes(500, 3, 400, 4, 16)
    scratch = Scratch.make(sizes, SMALL_RULE, torch.bfloat16, torch.bfloat16, torch.device("cpu"))
    for _ in range(2):
        output, _ = triton_run(prefill, scratch=scratch)
        assert torch.equal(output, expected)
    small = Scratch.make(
        replace(sizes, max_seq_tokens=100), SMALL_RULE, torch.bfloat16, torch.bfloat16, torch.device("cpu")
    )
    with pytest.raises(ValueError, match="scratch: got room for 100 tokens of a context"):
        triton_run(prefill, scratch=small)
    # Queries that all attend are not gathered.
    assert len(Scratch.make(sizes, ATTENDING, torch.bfloat16, torch.bfloat16, torch.device("cpu")).query) == 0
    with pytest.raises(ValueError, match="scratch: got room for 0 query tokens"):
        triton_run(
            prefill,
            scratch=Scratch.make(sizes, ATTENDING, torch.bfloat16, torch.bfloat16, torch.device("cpu")),
        )
    with pytest.raises(ValueError, match="scratch: got one for 4 query heads of size 16 and 16 probe rows"):
        triton_run(prefill, replace(SMALL_RULE, recent_probes=9), scratch=scratch)
