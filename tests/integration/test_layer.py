"""One attention layer with vLLM's metadata and KV-cache update."""

import pytest
import torch
from sparse_kernels.page_statistics.reference import quantise, summarise
from sparse_kernels.sparse_attention import attend_pages
from sparse_kernels.split_attention import cpu as decode_cpu
from support.layer import SMALL, LayerHarness, Request
from support.paged import assert_as_accurate, dense_attention

from vllm_sparse_plugin.attention import packing

DENSE_TOLERANCE = 2e-2
"""vLLM's CPU kernel rounds probabilities to bfloat16; outputs here are averages of unit normals."""


def expected_sparse(harness: LayerHarness, request: Request, token: int = -1, dtype=torch.float64) -> torch.Tensor:
    """A scored policy's output for one token, from the raw keys: without page tables and cache. It shares only the
    formulas of the statistics with the code under test."""
    selection = harness.selection
    context = len(request.keys) - len(request.fresh) + range(len(request.fresh))[token] + 1
    page_size, pages = selection.page_size, context // selection.page_size
    query = request.fresh[token].unflatten(0, (harness.num_kv_heads, -1))
    paged = request.keys[: pages * page_size].unflatten(0, (pages, page_size)).transpose(1, 2)
    kind = selection.statistics_layout(query.shape[-1], 2).kind
    vectors, spread = summarise(kind, paged)
    if kind.codes:
        packed, steps = kind.codes.pack(vectors)
        stored, scales = kind.codes.unpack(packed), kind.codes.per_vector(steps)
    else:
        stored, scales = quantise(vectors, torch.int8)
    features = kind.features(query.float(), selection.std_weight)
    products = torch.einsum("hgvd,phvd->hgpv", features, stored.float())
    raw = kind.combine(products * scales.float().transpose(0, 1)[:, None])
    if spread is not None:
        raw += selection.std_weight * query.float().norm(dim=-1)[..., None] * spread.bfloat16().float().T[:, None]
    score = raw.amax(dim=1).bfloat16()
    visible = torch.zeros(harness.num_kv_heads, context, dtype=torch.bool)
    visible[:, pages * page_size :] = True
    for head in range(harness.num_kv_heads):
        order = sorted(
            range(pages), key=lambda page, head=head: (0 < page < pages - 1, -float(score[head, page]), page)
        )
        for page in order[: selection.budget_pages]:
            visible[head, page * page_size : (page + 1) * page_size] = True
    impl = harness.layer.impl
    arguments = query, request.keys[:context], request.values[:context], impl.scale, visible
    return dense_attention(*arguments, impl.sinks, impl.logits_soft_cap, dtype)


def assert_sparse(harness: LayerHarness, request: Request, output: torch.Tensor) -> None:
    for token in range(len(output)):
        exact = expected_sparse(harness, request, token)
        assert_as_accurate(output[token], exact, expected_sparse(harness, request, token, torch.float32))


def assert_dense(harness: LayerHarness, request: Request, output: torch.Tensor) -> None:
    for token in {0, len(output) // 2, len(output) - 1}:
        assert (output[token].double() - harness.dense(request, token)).abs().max() < DENSE_TOLERANCE


@pytest.mark.parametrize("isa", ["amx", "vec", "vec16"])
@pytest.mark.parametrize("page_size", [8, 16, 32])
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 32), (64, 128), (96, 64), (128, 64), (256, 32)])
def test_every_packing_is_read_back(isa, page_size, head_size, block_size):
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("needs a CPU with AMX")
    packing.check_packing(isa, block_size, head_size, page_size, torch.bfloat16)


def test_an_unknown_packing_is_refused(monkeypatch):
    monkeypatch.setitem(packing._PACKINGS, "vec", (packing.PagedTensor.from_rows, packing.PagedTensor.from_rows))
    with pytest.raises(packing.ConfigurationError, match="unknown block packing for 'vec'"):
        packing.check_packing("vec", 128, 64, 8, torch.bfloat16)


@pytest.mark.parametrize(
    ("backend", "num_heads", "num_kv_heads", "head_size"),
    [
        *(("unique", *shape) for shape in [(8, 2, 64), (4, 4, 96), (16, 1, 256)]),
        *((backend, 8, 2, 64) for backend in ("mean", "quest", "infllm")),
    ],
)
@pytest.mark.parametrize("extras", [{}, {"sinks": True}, {"logits_soft_cap": 3.0}], ids=["plain", "sinks", "softcap"])
def test_decode_is_sparse_and_prefill_is_dense(model, backend, num_heads, num_kv_heads, head_size, extras):
    if extras.get("sinks"):
        extras = {"sinks": torch.randn(num_heads).bfloat16()}
    harness = LayerHarness(model, num_heads, num_kv_heads, head_size, settings=SMALL, backend=backend, **extras)
    request = harness.request(300)
    (output,) = harness.step([(request, 300)])
    assert_dense(harness, request, output)
    for _ in range(20):
        (output,) = harness.step([(request, 1)])
        assert_sparse(harness, request, output)


@pytest.mark.parametrize("isa", ["vec", "vec16"])
def test_decode_with_other_instruction_sets(model, isa):
    harness = LayerHarness(model, settings=SMALL, isa=isa)
    request = harness.request(200)
    harness.step([(request, 200)])
    for _ in range(9):
        (output,) = harness.step([(request, 1)])
        assert_sparse(harness, request, output)


@pytest.mark.parametrize("page_size", [16, 32])
def test_larger_pages(model, page_size):
    settings = {"selection": {"page_size": page_size, "budget_tokens": 128}, "min_context_tokens": 0}
    harness = LayerHarness(model, settings=settings)
    request = harness.request(500)
    harness.step([(request, 500)])
    for _ in range(page_size + 1):
        (output,) = harness.step([(request, 1)])
        assert_sparse(harness, request, output)


@pytest.mark.parametrize(("page_size", "block_size"), [(8, 32), (32, 32)])
def test_the_warm_up_reads_no_block_beyond_its_table(model, monkeypatch, page_size, block_size):
    seen = []

    def attend(tokens, *arguments):
        seen.append((int(tokens.context_lens.max()), tokens.block_table))
        return attend_pages(tokens, *arguments)

    monkeypatch.setattr(decode_cpu, "attend_pages", attend)
    settings = {"selection": {"page_size": page_size, "budget_tokens": 4 * page_size}, "min_context_tokens": 0}
    LayerHarness(model, settings=settings, block_size=block_size)
    ((context, table),) = seen
    assert page_size < context <= block_size * table.shape[1]
    # The cache of a warm-up has two blocks.
    assert int(table.max()) < 2


def test_chunked_prefill_gives_the_bits_of_one_shot_prefill(model):
    outputs = []
    for chunks in ([200], [1, 6, 1, 57, 63, 72]):
        harness = LayerHarness(model, settings=SMALL)
        data = torch.Generator().manual_seed(1)
        query = torch.randn(201, 8, 64, generator=data).bfloat16()
        key = torch.randn(201, 2, 64, generator=data).bfloat16()
        value = torch.randn(201, 2, 64, generator=data).bfloat16()
        request, position = harness.request(200), 0
        for new in [*chunks, 1]:
            span = slice(position, position + new)
            (output,) = harness.step([(request, new)], {0: (query[span], key[span], value[span])})
            position += new
        outputs.append(output)
        assert_sparse(harness, request, output)
    assert torch.equal(*outputs)


def test_mixed_batch(model):
    """Long decodes, short decodes, and prefill chunks of one and of many tokens in one step."""
    harness = LayerHarness(model, settings=SMALL)
    long, short, one, many = (harness.request(n) for n in (150, 20, 90, 400))
    harness.step([(long, 150), (short, 20)])
    harness.step([(one, 89), (many, 111)])
    for new in (100, 100):
        outputs = harness.step([(long, 1), (short, 1), (one, 1), (many, new)])
        assert_sparse(harness, long, outputs[0])
        assert_dense(harness, short, outputs[1])
        assert_dense(harness, many, outputs[3])
        # The first step is the last token of that request's prompt, the second a decode.
        (assert_dense if len(one.keys) == 90 else assert_sparse)(harness, one, outputs[2])


def test_batch_of_one_and_batch_of_many_give_the_same_bits(model):
    lengths = [130, 64, 72, 71, 333, 128, 1000]
    data = torch.Generator().manual_seed(2)
    tensors = [[torch.randn(n + 1, heads, 64, generator=data).bfloat16() for heads in (8, 2, 2)] for n in lengths]
    together = LayerHarness(model, settings=SMALL)
    requests = [together.request(n) for n in lengths]
    prompts = {i: tuple(part[:-1] for part in tensor) for i, tensor in enumerate(tensors)}
    tokens = {i: tuple(part[-1:] for part in tensor) for i, tensor in enumerate(tensors)}
    together.step([(request, n) for request, n in zip(requests, lengths, strict=True)], prompts)
    outputs = together.step([(request, 1) for request in requests], tokens)
    sparse = 0
    for index, length in enumerate(lengths):
        alone = LayerHarness(model, settings=SMALL, seed=index)
        request = alone.request(length)
        alone.step([(request, length)], {0: prompts[index]})
        (output,) = alone.step([(request, 1)], {0: tokens[index]})
        if alone.metadata.decode is not None:
            sparse += 1
            assert torch.equal(output, outputs[index])
    assert sparse == 6


def test_blocks_are_reused_dirty(model):
    harness = LayerHarness(model, settings=SMALL, num_blocks=9)
    for length in (700, 300, 555):
        request = harness.request(length)
        harness.step([(request, length)])
        for _ in range(9):
            (output,) = harness.step([(request, 1)])
            assert_sparse(harness, request, output)
        harness.release(request)


def test_a_prefix_hit_brings_its_statistics(model):
    harness = LayerHarness(model, settings=SMALL)
    first = harness.request(300)
    harness.step([(first, 300)])
    second = harness.request(290, shared=first, shared_blocks=2)
    harness.step([(second, 34)])
    (output,) = harness.step([(second, 1)])
    assert_sparse(harness, second, output)


def test_speculative_rows_are_causal(model):
    harness = LayerHarness(model, settings=SMALL)
    harness.builder.reorder_batch_threshold = 4
    request = harness.request(157)
    harness.step([(request, 157)])
    for _ in range(4):
        (output,) = harness.step([(request, 4)])
        assert_sparse(harness, request, output)
        # Two drafts are rejected: their slots are written again by the next step.
        request.keys, request.values = request.keys[:-2], request.values[:-2]


def test_drafts_do_not_shorten_the_contexts_that_attend_densely(model):
    """Two of four tokens of a step have a context below the shortest one that attends sparsely."""
    harness = LayerHarness(model, settings={**SMALL, "min_context_tokens": 100})
    harness.builder.reorder_batch_threshold = 4
    crossing, beyond = harness.request(97), harness.request(150)
    harness.step([(crossing, 97), (beyond, 150)])
    outputs = harness.step([(crossing, 4), (beyond, 2)])
    for token, output in enumerate(outputs[0][:2]):
        assert (output.double() - harness.dense(crossing, token)).abs().max() < DENSE_TOLERANCE
    for token in (2, 3):
        exact = expected_sparse(harness, crossing, token)
        assert_as_accurate(outputs[0][token], exact, expected_sparse(harness, crossing, token, torch.float32))
    assert_sparse(harness, beyond, outputs[1])


def test_sliding_window_layers_stay_dense_within_their_window(model):
    harness = LayerHarness(model, settings=SMALL, per_layer_sliding_window=48)
    request = harness.request(200)
    (output,) = harness.step([(request, 200)])
    assert_dense(harness, request, output)
    (output,) = harness.step([(request, 1)])
    assert_dense(harness, request, output)


def test_first_dense_layers(model):
    settings = {**SMALL, "first_dense_layers": 2}
    for layer_index, check in ((1, assert_dense), (2, assert_sparse)):
        harness = LayerHarness(model, settings=settings, layer_index=layer_index)
        request = harness.request(200)
        harness.step([(request, 200)])
        (output,) = harness.step([(request, 1)])
        check(harness, request, output)


@pytest.mark.parametrize(
    ("context", "settings", "sparse"),
    [
        (71, SMALL, False),  # 8 complete pages fit the budget of 8
        (72, SMALL, True),
        (99, {**SMALL, "min_context_tokens": 100}, False),
        (100, {**SMALL, "min_context_tokens": 100}, True),
    ],
)
def test_where_sparse_begins(model, context, settings, sparse):
    harness = LayerHarness(model, settings=settings)
    request = harness.request(context - 1)
    harness.step([(request, context - 1)])
    (output,) = harness.step([(request, 1)])
    assert (harness.metadata.decode is not None) == sparse
    (assert_sparse if sparse else assert_dense)(harness, request, output)


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 3, 8).bfloat16()], ids=["plain", "sinks"])
def test_dense_is_vllms_own_attention(model, sinks):
    extras = {} if sinks is None else {"sinks": sinks}
    outputs = []
    for backend in ("dense", "cpu_attn"):
        harness = LayerHarness(model, backend=backend, seed=3, **extras)
        requests = [harness.request(n) for n in (1500, 40)]
        steps = [harness.step([(requests[0], 1500), (requests[1], 40)])]
        steps += [harness.step([(request, 1) for request in requests]) for _ in range(3)]
        outputs.append([output for step in steps for output in step])
        assert harness.spec.num_states == harness.block_size, "no statistics, no rows"
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*outputs, strict=True))


STOPPING = {"scale_tolerance": 0.2, "direction_tolerance": 0.05, "patience": 1, "block_tokens": 64}
COMPOSED = {
    "unique": {"selection": {"budget_tokens": 512}},
    "quest": {"selection": {"budget_tokens": 512}},
    "streaming_llm": {"selection": {"budget_tokens": 512, "sink_pages": 2}, "compaction": None},
    "art": {},
}


def recent_query(request: Request, heads: int) -> torch.Tensor:
    """A query that matches the newest keys."""
    return request.keys[-3].repeat_interleave(heads // request.keys.shape[1], dim=0)[None] * 2


@pytest.mark.parametrize("backend", COMPOSED)
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 3, 8).bfloat16()], ids=["plain", "sinks"])
def test_a_stopped_step_is_exact_over_what_it_read(model, backend, sinks, monkeypatch):
    seen = []
    monkeypatch.setattr(
        decode_cpu, "attend_pages", lambda *arguments: seen.append(arguments[2]) or attend_pages(*arguments)
    )
    settings = COMPOSED[backend] | {"stopping": STOPPING, "min_context_tokens": 0}
    extras = {} if sinks is None else {"sinks": sinks}
    harness = LayerHarness(model, settings=settings, backend=backend, **extras)
    request = harness.request(1003)
    harness.step([(request, 1003)])
    outputs = []
    for query in (recent_query(request, 8), torch.zeros(1, 8, 64).bfloat16()):
        key, value = torch.randn(2, 1, 2, 64).bfloat16()
        (output,) = harness.step([(request, 1)], {0: (query, key, value)})
        page_size, impl = harness.selection.page_size, harness.layer.impl
        context = len(request.keys)
        visible = torch.zeros(2, context, dtype=torch.bool)
        visible[:, context // page_size * page_size :] = True
        for head in range(2):
            for page in seen[-1][0, head].tolist():
                if page >= 0:
                    visible[head, page * page_size : (page + 1) * page_size] = True
        arguments = query[0].unflatten(0, (2, -1)), request.keys, request.values, impl.scale, visible, impl.sinks
        exact, single = dense_attention(*arguments), dense_attention(*arguments, dtype=torch.float32)
        assert_as_accurate(output[0], exact, single)
        outputs.append(visible.sum(dim=1))
        rows, blocks, tokens, contexts = harness.layer.impl.plan.counters.T
        assert rows.tolist() == [len(outputs)] * 2
        assert tokens.tolist() == sum(outputs).tolist()
        assert contexts.tolist() == [sum(range(context - len(outputs) + 1, context + 1))] * 2
        assert (blocks * 64 + (page_size - 1) * len(outputs) >= tokens).all()
    sharp, flat = outputs
    assert (sharp < flat).all(), "a query of the newest tokens stops before one of all"


@pytest.mark.parametrize("backend", COMPOSED)
def test_without_patience_the_bits_are_those_without_stopping(model, backend):
    outputs = []
    for stopping in (STOPPING | {"patience": 0}, None):
        settings = COMPOSED[backend] | {"stopping": stopping, "min_context_tokens": 0}
        harness = LayerHarness(model, settings=settings, backend=backend, seed=5)
        request = harness.request(1003)
        harness.step([(request, 1003)])
        outputs.append(torch.cat([harness.step([(request, 1)])[0] for _ in range(10)]))
    if backend == "art":
        # Without stopping vLLM's own kernel attends.
        assert (outputs[0] - outputs[1]).abs().max() < DENSE_TOLERANCE
    else:
        assert torch.equal(*outputs)


@pytest.mark.parametrize("extras", [{}, {"sinks": torch.linspace(-1, 3, 8).bfloat16()}], ids=["plain", "sinks"])
def test_streaming_llm_reads_sinks_and_newest(model, extras):
    settings = {"selection": {"budget_tokens": 64, "sink_pages": 2}, "min_context_tokens": 0}
    harness = LayerHarness(model, settings=settings, backend="streaming_llm", **extras)
    assert harness.spec.num_states == harness.block_size, "no statistics, no rows"
    request = harness.request(203)
    harness.step([(request, 203)])
    (output,) = harness.step([(request, 1)])
    visible = torch.zeros(2, 204, dtype=torch.bool)
    visible[:, :16] = visible[:, 19 * 8 :] = True
    impl = harness.layer.impl
    query = request.fresh[0].unflatten(0, (2, -1))
    arguments = query, request.keys, request.values, impl.scale, visible, impl.sinks
    assert_as_accurate(output[0], dense_attention(*arguments), dense_attention(*arguments, dtype=torch.float32))
