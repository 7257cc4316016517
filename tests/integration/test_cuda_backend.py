"""The CUDA backend's metadata and layer without a GPU: FlashAttention is replaced by torch, the kernels run their
references."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from sparse_kernels.batch import Softmax
from sparse_kernels.block_prefill import COUNTERS, BlockRule, VirtualSequences, scratch_bytes
from sparse_kernels.compaction import CompactionRule
from sparse_kernels.group_routing import GroupRouting
from sparse_kernels.page_coverage import count_rows
from sparse_kernels.rolling_attention import RollingWindow, Rotation
from sparse_kernels.token_prefill import KeptAttention, TokenRule
from support.logs import said
from support.paged import dense_attention
from support.snapkv import kept_tokens
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from vllm_sparse_plugin.attention.base import ModelSize
from vllm_sparse_plugin.attention.cuda import SparseCUDAImpl, SparseCUDAMetadataBuilder, flash, start_up
from vllm_sparse_plugin.attention.cuda import builder as builder_module
from vllm_sparse_plugin.attention.cuda import layer as layer_module
from vllm_sparse_plugin.attention.cuda.whole import WHOLE_SCRATCH
from vllm_sparse_plugin.attention.metering import Meter
from vllm_sparse_plugin.attention.plan import LayerPlan
from vllm_sparse_plugin.attention.prefill import PrefillPlan, PromptRule
from vllm_sparse_plugin.attention.rolling import RollingPlan
from vllm_sparse_plugin.compaction.step import StepCompaction
from vllm_sparse_plugin.config import ResolvedConfig, Retention, resolve
from vllm_sparse_plugin.metrics import sampling
from vllm_sparse_plugin.metrics.live import LayerQuality
from vllm_sparse_plugin.metrics.sampling import Sample, StepSampler
from vllm_sparse_plugin.policies import EveryPage
from vllm_sparse_plugin.requests.arguments import EVERY_PAGE
from vllm_sparse_plugin.requests.limits import StepLimits, StepNumbers
from vllm_sparse_plugin.requests.rows import BatchRows

HEADS, GROUP, SIZE, BLOCK = 2, 2, 64, 64
BUDGET = {"selection": {"budget_tokens": 64}, "min_context_tokens": 0}
SCALE = 0.2


def common_metadata(query_lens: list[int], seq_lens: list[int], prefilling: list[bool]) -> CommonAttentionMetadata:
    start = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    width = -(-max(seq_lens) // BLOCK)
    table = torch.arange(len(seq_lens) * width, dtype=torch.int32).view(-1, width).flip(0)
    slots = [
        int(table[request, position // BLOCK]) * BLOCK + position % BLOCK
        for request, (new, length) in enumerate(zip(query_lens, seq_lens, strict=True))
        for position in range(length - new, length)
    ]
    return CommonAttentionMetadata(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(query_lens),
        num_actual_tokens=int(start[-1]),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots),
        is_prefilling=torch.tensor(prefilling),
    )


def budgets_of(preset: str, *arguments: dict | None, **settings: object) -> StepLimits:
    """The limits of a server with requests that have these arguments."""
    config = resolve(settings if preset == "dense" else BUDGET | settings, preset)
    return StepLimits(config, asking(*arguments), 16, torch.device("cpu"))


@pytest.fixture
def builder(monkeypatch):
    def build(self, common_prefix_len, common, fast_build=False):
        return FlashAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", build)
    made = object.__new__(SparseCUDAMetadataBuilder)
    made.reorder_batch_threshold = 4
    made.any_dense_layer = False
    made.any_sparse_layer = True
    made.answers_sparsely, made.verifies_at_once = True, False
    made.rolls = False
    made.meter = object.__new__(Meter)
    made.meter.sampler, made.meter._log = StepSampler(0), None
    made.counts = []
    made.compaction = None
    made.reads = None
    made.prefill_rule = None
    made.group_sizes = {GROUP}
    made.any_dense_decode = False
    made.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=1000))
    made.dense_requests = StepNumbers(False, 16, torch.bool, torch.device("cpu"))
    made.limits = budgets_of("dense")
    made.whole = None
    return made


@pytest.fixture
def layer(request, monkeypatch):
    """A layer with torch as its dense attention; a test may name another backend."""

    def forward(self, layer, query, key, value, kv_cache, metadata, output, *scales):
        start = metadata.query_start_loc.tolist()
        for request, length in enumerate(metadata.seq_lens.tolist()):
            blocks = metadata.block_table[request].long()
            tokens = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length].transpose(0, 1)
            for token in range(start[request], start[request + 1]):
                seen = tokens[: length - (start[request + 1] - 1 - token)]
                rows = query[token].unflatten(0, (HEADS, GROUP))
                output[token] = dense_attention(rows, seen[..., :SIZE], seen[..., SIZE:], SCALE)
        return output

    monkeypatch.setattr(FlashAttentionImpl, "forward", forward)
    made = object.__new__(SparseCUDAImpl)
    made.num_kv_heads, made.head_size, made.scale, made.logits_soft_cap = HEADS, SIZE, SCALE, 0.0
    made.sinks, made.splits, made.scratch = None, 64, None
    preset = getattr(request, "param", "unique")
    budget = {} if preset in ("dense", "art") else {"selection": {"budget_tokens": 64}}
    made.bind(plan_of(resolve({**budget, "min_context_tokens": 0}, preset)))
    return made


def plan_of(sparse: ResolvedConfig, **changes: object) -> LayerPlan:
    """The plan of a layer that attends to its whole context."""
    plan = LayerPlan(
        block_size=BLOCK,
        page_size=(sparse.selector or EveryPage()).page_size,
        dense_tokens=sparse.config.min_context_tokens - 1,
        statistics=sparse.statistics_layout(SIZE, 2),
        selector=sparse.selector,
        stop_rule=sparse.stop_rule,
    )
    return replace(plan, **changes)


SCALES = SimpleNamespace(
    _q_scale=torch.ones(1), _k_scale=torch.ones(1), _v_scale=torch.ones(1), layer_name="layer", num_heads=HEADS * GROUP,
    head_size=SIZE,
)  # fmt: skip


def run(layer, builder, common, drafts=False):
    """One step on a filled cache: output, and the step's metadata."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    blocks = int(common.block_table_tensor.max()) + 1
    rows = BLOCK + (layer.plan.statistics.rows(BLOCK) if layer.plan.statistics else 0)
    cache = torch.full((blocks, HEADS, rows, 2 * SIZE), torch.nan, dtype=torch.bfloat16)
    for request, length in enumerate(common.seq_lens.tolist()):
        position = torch.arange(length)
        slots = common.block_table_tensor[request, position // BLOCK].long() * BLOCK + position % BLOCK
        layer.do_kv_cache_update(SCALES, random(length, HEADS, SIZE), random(length, HEADS, SIZE), cache, slots)
    tokens = common.num_actual_tokens
    new = random(tokens, HEADS, SIZE), random(tokens, HEADS, SIZE)
    layer.do_kv_cache_update(SCALES, *new, cache, common.slot_mapping)
    metadata = builder.build_for_drafting(common, 0) if drafts else builder.build(0, common)
    output = torch.full((tokens, HEADS * GROUP, SIZE), torch.nan, dtype=torch.bfloat16)
    query = random(tokens, HEADS * GROUP, SIZE)
    layer.forward(SCALES, query, *new, cache, metadata, output)
    whole = torch.full_like(output, torch.nan)
    FlashAttentionImpl.forward(layer, SCALES, query, *new, cache[:, :, :BLOCK], metadata, whole)
    return output.float(), whole.float(), metadata


@pytest.mark.parametrize("layer", ["unique", "quest", "infllm", "mean", "streaming_llm"], indirect=True)
def test_a_mixed_batch_decodes_sparsely_and_prefills_densely(layer, builder):
    common = common_metadata([4, 4, 1, 70], [300, 40, 500, 200], [False, False, False, True])
    output, dense, metadata = run(layer, builder, common)
    assert [decode.tokens for decode in metadata.decode] == [slice(0, 8), slice(8, 9)]
    assert metadata.prefill.num_actual_tokens == 70
    # The second request fits the budget; the last one is a prompt.
    torch.testing.assert_close(output[4:8], dense[4:8], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(output[9:], dense[9:], atol=2e-2, rtol=2e-2)
    for tokens in (slice(0, 4), slice(8, 9)):
        assert output[tokens].isfinite().all()
        assert not torch.allclose(output[tokens], dense[tokens], atol=2e-2, rtol=2e-2)


def test_in_lossless_mode_drafting_steps_select_and_steps_that_answer_attend_densely(builder, layer):
    builder.answers_sparsely = False
    builder.reads = reads = CountedSteps()
    output, dense, metadata = run(layer, builder, common_metadata([3, 2], [300, 500], [False, False]))
    assert (metadata.num_decode_tokens, metadata.prefill.num_actual_tokens, reads.steps) == (0, 5, 0)
    assert metadata.verified is None
    assert torch.equal(output, dense)
    output, dense, metadata = run(layer, builder, common_metadata([1, 1], [300, 500], [False, False]), drafts=True)
    assert [(part.tokens, part.seq_lens.tolist()) for part in metadata.decode] == [(slice(0, 2), [300, 500])]
    assert (metadata.prefill, reads.steps) == (None, 1)
    assert output.isfinite().all()
    assert not any(torch.allclose(*rows, atol=2e-2, rtol=2e-2) for rows in zip(output, dense, strict=True))


@pytest.mark.parametrize("has_dense_layers", [False, True])
def test_a_step_that_verifies_as_many_drafts_of_every_request_attends_at_once(
    builder, layer, monkeypatch, has_dense_layers
):
    builder.answers_sparsely, builder.verifies_at_once, builder.any_dense_layer = False, True, has_dense_layers
    common = common_metadata([3, 3], [300, 500], [False, False])
    kernel = mock.Mock(side_effect=layer_module.multi_token_decode)
    monkeypatch.setattr(layer_module, "multi_token_decode", kernel)
    output, dense, metadata = run(layer, builder, common)
    assert kernel.call_count == 1
    assert (metadata.decode, metadata.prefill) == ([], None)
    torch.testing.assert_close(output, dense, atol=1e-2, rtol=1e-2)
    # A graph must read the original buffers, not copies.
    assert metadata.verified.seq_lens.data_ptr() == common.seq_lens.data_ptr()
    assert metadata.verified.block_table.data_ptr() == common.block_table_tensor.data_ptr()


@pytest.mark.parametrize(
    ("queries", "drafting"), [([1, 1], False), ([5, 5], False), ([3, 3, 2], False), ([3, 3], True)]
)
def test_other_steps_do_not_verify(builder, queries, drafting):
    """One token decodes, five exceed the number of drafts plus one, and drafting steps choose pages."""
    builder.answers_sparsely, builder.verifies_at_once = False, True
    common = common_metadata(queries, [300] * len(queries), [False] * len(queries))
    built = builder.build_for_drafting(common, 0) if drafting else builder.build(0, common)
    assert built.verified is None


def test_tokens_over_a_cache_of_8_bits_are_verified_by_the_kernel_that_they_would_run_alone(builder, layer):
    """This kernel rounds weights to 8 bits. Another kernel could make other tokens the likeliest."""
    builder.answers_sparsely, builder.verifies_at_once = False, False
    output, dense, metadata = run(layer, builder, common_metadata([3, 3], [300, 500], [False, False]))
    assert (metadata.verified, metadata.prefill.num_actual_tokens) == (None, 6)
    assert torch.equal(output, dense)


class CountedSteps:
    """Counts the steps that are counted."""

    steps = 0

    def step(self, *_: object) -> None:
        self.steps += 1


def test_single_tokens_of_a_prompt_attend_densely(layer, builder):
    common = common_metadata([1, 1], [300, 500], [False, True])
    output, dense, metadata = run(layer, builder, common)
    torch.testing.assert_close(output[1], dense[1], atol=2e-2, rtol=2e-2)
    assert not torch.allclose(output[0], dense[0], atol=2e-2, rtol=2e-2)
    assert metadata.prefill is None
    # The flags are a buffer that graphs read: the next step clears them.
    address = metadata.decode[0].dense.data_ptr()
    (later,) = builder.build(0, common_metadata([1, 1], [300, 500], [False, False])).decode
    assert not later.dense.any()
    assert later.dense.data_ptr() == address


KINDS = (None, {"sparse_budget_tokens": 128}, {"sparse": "dense"}, {"sparse_budget_tokens": 24}, {"other": 1})


def asking(*arguments: dict | None) -> BatchRows:
    """The rows of vLLM's first model runner, with these arguments of requests."""
    names = [f"request {index}" for index in range(len(arguments))]
    states = [SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra)) for extra in arguments]
    batch = SimpleNamespace(num_reqs=len(names), req_ids=[*names, None])
    rows = BatchRows(runner := Runner(requests=dict(zip(names, states, strict=True)), input_batch=batch))
    rows.runner = runner
    return rows


@pytest.mark.parametrize("layer", ["unique", "quest", "streaming_llm"], indirect=True)
@pytest.mark.parametrize("new", [1, 2])
def test_requests_of_all_kinds_read_what_they_say(layer, builder, new):
    """Each request reads what a layer with its budget as setting reads. Other requests of the batch do not matter."""
    lengths = [900, 700, 800, 600, 300]
    common = common_metadata([new] * 5, lengths, [False] * 5)
    plain = layer.plan
    expected = {}
    for request, tokens in enumerate((64, 128, None, 24, 64)):
        selector = plain.selector.model_copy(update={"budget_tokens": tokens or 1024})
        layer.bind(replace(plain, selector=selector))
        rows = slice(request * new, (request + 1) * new)
        expected[request], dense = (part[rows] for part in run(layer, builder, common)[:2])
        assert torch.allclose(expected[request], dense, atol=2e-2, rtol=2e-2) == (tokens is None)
    builder.limits = budgets_of(plain.selector.name(), *KINDS, compaction=None)
    layer.bind(replace(plain, most_pages=1024))
    output, _, metadata = run(layer, builder, common)
    (decode,) = metadata.decode
    assert decode.budgets.tolist() == [8, 16, 8, 3, 8]
    assert decode.dense.tolist() == [False, False, True, False, False]
    for request, alone in expected.items():
        assert torch.equal(output[request * new : (request + 1) * new], alone)


def test_a_server_with_a_coverage_serves_budgets_beside_it(layer, builder):
    """Each request reads what `count_rows` returns, independent of other requests."""
    settings = {"selection": {"coverage": 0.6, "min_budget_tokens": 32, "max_budget_tokens": 512}}
    kinds = (None, {"sparse_budget_tokens": 128}, {"sparse": "dense"}, {"sparse_coverage": 0.9})
    config = resolve(BUDGET | settings, "unique")
    counters = torch.zeros(HEADS, 4, dtype=torch.int64)
    layer.bind(replace(plan_of(config), most_pages=1024, counters=counters))
    counted = []

    def counting(batch, *given):
        found = count_rows(batch, *given)
        counted.append(found.budgets)
        return found

    with mock.patch.object(layer_module, "count_rows", counting):
        builder.limits = StepLimits(config, asking(*kinds), 16, torch.device("cpu"))
        common = common_metadata([2] * 4, [900, 700, 800, 600], [False] * 4)
        output, dense, metadata = run(layer, builder, common)
    (decode,) = metadata.decode
    assert decode.budgets is None
    assert decode.limits.share.tolist() == pytest.approx([0.6, 0, 0.6, 0.9])
    assert decode.limits.least.tolist() == [4, 16, 4, 4]
    assert decode.limits.most.tolist() == [64, 16, 64, 64]
    (counts,) = counted
    assert counts[2:4].eq(16).all()
    assert 4 < counts[:2].min() < counts[6:].min()
    torch.testing.assert_close(output[4:6], dense[4:6], atol=2e-2, rtol=2e-2)
    close = [torch.allclose(mine, whole, atol=2e-2, rtol=2e-2) for mine, whole in zip(output, dense, strict=True)]
    assert close == [False] * 4 + [True] * 2 + [False] * 2
    # Three requests of two tokens each are counted.
    assert counters[:, 0].tolist() == [6] * HEADS
    assert counters[:, 3].tolist() == [899 + 900 + 699 + 700 + 599 + 600] * HEADS
    assert counters[0, 1] == int(counts[[0, 1, 2, 3, 6, 7], 0].sum())


def test_budgets_lie_in_a_tensor_that_stays_and_is_written_when_they_change(builder, monkeypatch):
    written: list[int] = []
    builder.limits = budgets_of("unique", *KINDS)
    copied = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *given, **more: written.append(1) or copied(self, *given))
    (first,) = builder.build(0, common_metadata([1] * 6, [300] * 6, [False] * 6)).decode
    # The last row is padding.
    assert first.budgets.tolist() == [8, 16, 8, 3, 8, 8]
    assert first.dense.tolist() == [False, False, True, False, False, False]
    assert len(written) == 2
    (same,) = builder.build(0, common_metadata([1] * 5, [300] * 5, [False] * 5)).decode
    assert len(written) == 2
    # A prompt's single tokens are dense as well.
    (mixed,) = builder.build(0, common_metadata([1] * 5, [300] * 5, [True, False, True, False, False])).decode
    assert mixed.dense.tolist() == [True, False, True, False, False]
    builder.limits._requested._rows = asking(None, None, {"sparse_budget_tokens": 8192})
    (later,) = builder.build(0, common_metadata([1] * 3, [300] * 3, [False] * 3)).decode
    assert later.budgets.tolist() == [8, 8, 1024]
    assert not later.dense.any()
    assert len({decode.budgets.data_ptr() for decode in (first, same, mixed, later)}) == 1
    builder.limits._requested._rows = None
    assert builder.build(0, common_metadata([1] * 3, [300] * 3, [False] * 3)).decode[0].budgets.tolist() == [8] * 3


def test_runs_of_a_step_have_their_own_budgets(layer, builder):
    builder.limits = budgets_of("unique", *KINDS[:3])
    common = common_metadata([4, 1, 70], [900, 800, 600], [False, False, True])
    _, _, metadata = run(layer, builder, common)
    assert [decode.budgets.tolist() for decode in metadata.decode] == [[8], [16]]


def test_what_is_counted_of_reads_are_the_budgets_of_the_requests(builder):
    seen = []
    builder.reads = SimpleNamespace(step=lambda common, longest, budgets, log, left_out: seen.append(budgets))
    builder.build(0, common_metadata([1, 1], [300, 500], [False, False]))
    builder.limits = budgets_of("unique", *KINDS[:3])
    builder.build(0, common_metadata([1] * 4, [300] * 4, [False] * 4))
    assert seen[0] is None
    assert seen[1].tolist() == [8, 16, EVERY_PAGE, 8]


@pytest.mark.parametrize("stopping", [None, {}])
def test_where_no_request_has_a_budget_all_launches_are_those_of_the_settings(builder, stopping):
    builder.limits = budgets_of("unique", None, {"sparse": "dense"}, stopping=stopping)
    (decode,) = builder.build(0, common_metadata([1, 1], [300, 500], [False, False])).decode
    assert (decode.budgets is None) == (stopping is not None)
    assert decode.dense.tolist() == [False, True]


def test_a_decode_batch_needs_no_plan_of_flash_attention(builder, monkeypatch):
    def fail(*arguments, **more):
        raise AssertionError("planned")

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", fail)
    metadata = builder.build(0, common_metadata([4, 4], [300, 40], [False, False]))
    assert [decode.tokens for decode in metadata.decode] == [slice(0, 8)]


def test_dense_attention_that_stops_reads_no_further_and_counts(layer, builder):
    loose = {"scale_tolerance": 1000.0, "direction_tolerance": 16.0, "block_tokens": 64}
    for patience in (0, 1):
        settings = {"stopping": loose | {"patience": patience}, "min_context_tokens": 0}
        counters = torch.zeros(HEADS, 4, dtype=torch.int64)
        layer.bind(plan_of(resolve(settings, "art"), counters=counters))
        output, dense, _ = run(layer, builder, common_metadata([1, 1], [300, 500], [False, False]))
        close = [torch.allclose(mine, whole, atol=2e-2, rtol=2e-2) for mine, whole in zip(output, dense, strict=True)]
        assert close == [patience == 0] * 2
        # All of 18 and 31 pages of 16 tokens, in blocks of 4; or two blocks of each.
        tokens = 2 * 128 + 300 % 16 + 500 % 16 if patience else 800
        assert counters.tolist() == [[2, 4 if patience else 13, tokens, 800]] * HEADS


@pytest.mark.parametrize("prefilling", [[False] * 4, [False, True], [False, True, False, False]])
def test_padded_requests_of_a_graph_are_one_run_with_the_rest(builder, prefilling):
    common = common_metadata([1, 1], [300, 500], [False, False])
    start = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32)
    padded = common.replace(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=torch.tensor([300, 500, 0, 0], dtype=torch.int32),
        block_table_tensor=common.block_table_tensor.repeat(2, 1),
        is_prefilling=torch.tensor(prefilling),
        num_reqs=4,
        num_actual_tokens=4,
    )
    builder.dense_requests.write([True] * 16)
    (decode,) = builder.build(0, padded).decode
    assert decode.tokens == slice(0, 4)
    assert decode.dense.tolist() == [False, any(prefilling), False, False]
    assert decode.seq_lens.tolist() == [300, 500, 0, 0]


def test_a_dense_layer_leaves_everything_to_flash_attention(layer, builder):
    builder.any_dense_layer = True
    layer.bind(replace(layer.plan, selector=None))
    output, dense, _ = run(layer, builder, common_metadata([1, 70], [300, 200], [False, True]))
    assert torch.equal(output, dense)


def test_a_sampled_token_is_measured(layer, builder, monkeypatch):
    recorded = []
    monkeypatch.setattr(LayerQuality, "record", lambda self, *arguments: recorded.append(arguments))
    layer.bind(replace(layer.plan, quality=LayerQuality(torch.zeros(HEADS, 5, dtype=torch.int64), 0, 2)))
    lengths = [300, 40, 500, 600, 200]
    common = common_metadata([4, 4, 1, 1, 70], lengths, [False, False, False, True, True])
    # With asynchronous speculation the host knows only upper bounds.
    common = common.replace(seq_lens_cpu_upper_bound=torch.tensor([length + 2 for length in lengths]))
    builder.selector, builder.dense_tokens = layer.plan.selector, 40
    # The first request's tokens and that of the third: the second fits the budget, the fourth is part of a prompt.
    for number, (index, request, context) in enumerate(
        [(0, 0, 297), (1, 0, 298), (2, 0, 299), (3, 0, 300), (8, 2, 500), (0, 0, 297)]
    ):
        builder.meter.sampler.sample = Sample(number, 2)
        recorded.clear()
        output, _, metadata = run(layer, builder, common)
        assert metadata.sampled.token == index
        ((token, longest, _, pages, softmax, selection, masses, left_out),) = recorded
        assert masses is None
        assert not left_out.any()
        assert token.context_lens.tolist() == [context]
        assert longest == context + 2
        assert softmax == Softmax(SCALE)
        assert selection == layer.plan.selector.page_selection()
        blocks = token.block_table[0]
        assert torch.equal(blocks, common.block_table_tensor[request].long()[: len(blocks)])
        assert token.query.shape == (1, HEADS, GROUP, SIZE)
        assert pages.shape == (1, HEADS, 8)
        assert pages[..., 0].eq(0).all()
        assert pages[..., -1].eq(context // 8 - 1).all()
    # Another layer is measured, or none.
    for sample in (Sample(0, 1), None):
        builder.meter.sampler.sample = sample
        recorded.clear()
        again, _, _ = run(layer, builder, common)
        assert recorded == []
        assert torch.equal(again, output)


def metered(layer, builder, number: int = 0) -> torch.Tensor:
    """Measures the given sampled token in a step; returns the counts of the layer."""
    counts = torch.zeros(HEADS, 5, dtype=torch.int64)
    layer.bind(replace(layer.plan, quality=LayerQuality(counts, 0, 1)))
    builder.selector, builder.dense_tokens = layer.plan.selector, layer.plan.dense_tokens
    builder.meter.sampler.sample = Sample(number, 0)
    return counts


def test_under_a_coverage_a_sampled_token_is_measured_by_what_it_read(layer, builder, monkeypatch):
    """The coverage comes from the server or from the request. Budgets of other requests still apply."""
    recorded = []
    monkeypatch.setattr(LayerQuality, "record", lambda self, *arguments: recorded.append(arguments))
    settings = {"selection": {"coverage": 0.6, "min_budget_tokens": 32, "max_budget_tokens": 512}}
    config = resolve(BUDGET | settings, "unique")
    layer.bind(replace(plan_of(config), most_pages=1024))
    builder.limits = StepLimits(
        config, asking(None, {"sparse_budget_tokens": 128}, {"sparse": "dense"}, {"sparse_coverage": 0.9}), 16,
        torch.device("cpu"),
    )  # fmt: skip
    found = {}
    # Tokens of the third request attend to everything. The last context fits the smallest number of pages.
    lengths = [900, 700, 800, 600, 33]
    for number in range(6):
        metered(layer, builder, number)
        recorded.clear()
        output, _, metadata = run(layer, builder, common_metadata([2] * 5, lengths, [False] * 5))
        ((token, _, cache, pages, softmax, _, _, left_out),) = recorded
        index, context = metadata.sampled.token, int(token.context_lens)
        assert not left_out.any()
        assert context == lengths[index // 2] - 1 + index % 2
        found[index] = (pages >= 0).sum(dim=-1)[0].tolist()
        rows = (part.gather_blocks(token.block_table[0])[:, :context] for part in (cache.keys, cache.values))
        keys, values = (part.transpose(0, 1) for part in rows)
        # The recorded pages give the output of attention.
        visible = torch.zeros(HEADS, context, dtype=torch.bool)
        visible[:, context // 8 * 8 :] = True
        for head in range(HEADS):
            for page in pages[0, head][pages[0, head] >= 0].tolist():
                visible[head, page * 8 : page * 8 + 8] = True
        exact = dense_attention(token.query[0], keys, values, softmax.scale, visible)
        torch.testing.assert_close(output[index].double(), exact, atol=2e-2, rtol=2e-2)
    assert sorted(found) == [0, 1, 2, 3, 6, 7]
    assert found[2] == found[3] == [16, 16]
    assert 4 < min(found[0] + found[1]) < min(found[6] + found[7]) < 64


def test_a_group_that_is_skipped_is_not_measured(layer, builder):
    common = common_metadata([1], [300], [False])
    first = GroupRouting(torch.tensor([[-2.0, 0, 0, 0], [2.0, 0, 0, 0]]))
    layer.bind(replace(layer.plan, routing=first))
    counts = metered(layer, builder)
    run(layer, builder, common)
    assert counts[:, 4].tolist() == [0, 1]
    assert counts[0].eq(0).all()


def test_a_context_that_bounds_took_for_a_longer_one_is_not_measured(layer, builder):
    """With asynchronous speculation the host knows only upper bounds. Contexts attended whole omit nothing."""
    for length, measured in ((300, 0), (301, 1)):
        common = common_metadata([1], [length], [False])
        common = common.replace(seq_lens_cpu_upper_bound=torch.tensor([304]))
        layer.bind(replace(layer.plan, dense_tokens=300))
        counts = metered(layer, builder)
        _, _, metadata = run(layer, builder, common)
        assert metadata.sampled is not None
        assert counts[:, 4].tolist() == [measured] * HEADS


@pytest.mark.parametrize("where", ["record", "masses_of"])
def test_what_fails_while_measuring_leaves_the_step_as_it_is(layer, builder, monkeypatch, where):
    def fail(*arguments: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(sampling, "_reported", set())
    warnings = said(monkeypatch, "vllm.vllm_sparse_plugin.metrics.sampling", "warning")
    common = common_metadata([4, 1, 70], [300, 500, 200], [False, False, True])
    plain, _, _ = run(layer, builder, common)
    counts = metered(layer, builder)
    monkeypatch.setattr(*((LayerQuality, where) if where == "record" else (Meter, where)), fail)
    for _ in range(2):
        output, _, _ = run(layer, builder, common)
        assert torch.equal(output, plain)
    assert counts.eq(0).all()
    (line,) = warnings
    assert line.endswith("a token cannot be measured (RuntimeError: no such luck)")


@pytest.mark.parametrize("layer", ["unique", "quest", "streaming_llm"], indirect=True)
def test_measuring_is_warmed_up_and_leaves_no_trace(layer, monkeypatch):
    monkeypatch.setattr(sampling, "_reported", set())
    warnings = said(monkeypatch, "vllm.vllm_sparse_plugin.metrics.sampling", "warning")
    measured = []
    record = LayerQuality.record
    monkeypatch.setattr(
        LayerQuality, "record", lambda self, *given: measured.append(record(self, *given)) or self.counts[0, 4].item()
    )
    counts = torch.zeros(HEADS, 5, dtype=torch.int64)
    layer.bind(replace(layer.plan, quality=LayerQuality(counts, 3, 8)))
    layer.num_queries_per_kv = GROUP
    rows = BLOCK + (layer.plan.statistics.rows(BLOCK) if layer.plan.statistics else 0)
    module = SimpleNamespace(**vars(SCALES), impl=layer)
    start_up.warm_up_meter(module, SimpleNamespace(num_states=rows, dtype=torch.bfloat16), 1000, torch.device("cpu"))
    assert warnings == []
    assert len(measured) == 1
    assert counts.eq(0).all()
    assert layer._bound_cache is None


@pytest.mark.parametrize("layer", ["unique", "quest", "streaming_llm", "dense", "art"], indirect=True)
@pytest.mark.parametrize("selects", [True, False])
def test_skipped_groups_are_zero_and_others_keep_their_bits(layer, builder, selects):
    if selects and layer.plan.selector is None:
        pytest.skip("a dense policy selects nothing")
    common = common_metadata([4, 4, 1, 1, 70], [300, 40, 500, 90, 200], [False, False, False, True, True])
    selector = layer.plan.selector if selects else None
    nothing = GroupRouting(torch.tensor([[2.0, 0, 0, 0], [2.0, 0, 0, 0]]))
    layer.bind(replace(layer.plan, selector=selector, dense_tokens=50, routing=nothing))
    plain, dense, metadata = run(layer, builder, common)
    first = GroupRouting(torch.tensor([[-2.0, 0, 0, 0], [2.0, 0, 0, 0]]))
    layer.bind(replace(layer.plan, routing=first))
    routed, _, _ = run(layer, builder, common)
    # Short contexts, prompts' single tokens and prompts are not routed.
    skips = torch.tensor([True] * 4 + [False] * 4 + [True] + [False] * 71)
    assert len(metadata.decode) == 2
    assert routed[skips, :GROUP].eq(0).all()
    assert torch.equal(routed[skips, GROUP:], plain[skips, GROUP:])
    assert torch.equal(routed[~skips], plain[~skips])
    if not selects:
        torch.testing.assert_close(plain, dense, atol=2e-2, rtol=2e-2)


def test_a_dense_policy_leaves_everything_to_flash_attention(layer, builder):
    layer.bind(plan_of(resolve(None, "dense")))
    builder.any_sparse_layer = False
    builder.any_dense_layer = True
    output, dense, metadata = run(layer, builder, common_metadata([1, 70], [300, 200], [False, True]))
    assert torch.equal(output, dense)
    assert metadata.decode == []


RULE = BlockRule(density=0.01, least_blocks=2, dense_tokens=256)


def prefills_sparsely(layer, builder, preset: str, rule: PromptRule = RULE) -> torch.Tensor:
    """Sets a rule for prompts in builder and layer; returns the counters."""
    counters = torch.zeros(HEADS, COUNTERS, dtype=torch.int64)
    method = "zipvl" if isinstance(rule, TokenRule) else "blocks"
    shortest = {} if preset in ("dense", "zipvl") else {"min_context_tokens": 0}
    sparse = resolve({"prefill": {"method": method}, **shortest}, preset)
    layer.bind(plan_of(sparse, prefill=PrefillPlan(rule, counters)))
    builder.prefill_rule = rule
    builder.any_dense_decode = not layer.plan.is_sparse
    builder.any_sparse_layer, builder.any_dense_layer = layer.plan.is_sparse, not layer.plan.is_sparse
    return counters


@pytest.mark.parametrize("preset", ["unique", "streaming_llm", "dense", "art"])
def test_long_prompts_read_blocks_beside_requests_that_decode(layer, builder, preset):
    counters = prefills_sparsely(layer, builder, preset)
    common = common_metadata([4, 1, 70, 100], [900, 400, 600, 200], [False, False, True, True])
    output, dense, metadata = run(layer, builder, common)
    close = [torch.allclose(mine, whole, atol=2e-2, rtol=2e-2) for mine, whole in zip(output, dense, strict=True)]
    # Of the prompts, the first has 9 blocks before its last tile; the second ends before tiles choose.
    assert not any(close[5:75])
    assert all(close[75:])
    assert output.isfinite().all()
    assert all(close[:5]) == (preset in ("dense", "art"))
    assert [part.tokens for part in metadata.rounds] == [slice(0, 170)]
    assert (metadata.dense_decode is not None) == (preset == "dense")
    # Positions 530 to 599 are in tiles of 8 and 9 past blocks; 100 to 199 in tiles of 1, 2 and 3.
    assert counters[:, :2].tolist() == [[2 + 2 + 1 + 2 + 3, 8 + 9 + 1 + 2 + 3]] * HEADS


@pytest.mark.parametrize("preset", ["unique", "dense"])
def test_short_prompts_are_split_and_attended_as_without_sparse_prefill(layer, builder, preset):
    common = common_metadata([1, 70], [900, 256], [False, True])
    plain = resolve({"min_context_tokens": 0}, preset)
    layer.bind(plan_of(plain))
    builder.any_sparse_layer, builder.any_dense_layer = layer.plan.is_sparse, not layer.plan.is_sparse
    expected, _, without = run(layer, builder, common)
    counters = prefills_sparsely(layer, builder, preset)
    output, _, metadata = run(layer, builder, common)
    assert torch.equal(output, expected)
    assert (metadata.rounds, metadata.dense_decode) == ([], None)
    assert len(metadata.decode) == len(without.decode)
    assert (metadata.prefill is None) == (without.prefill is None)
    assert not counters.any()


def test_a_decode_batch_of_a_dense_policy_is_built_as_without_sparse_prefill(layer, builder, monkeypatch):
    prefills_sparsely(layer, builder, "dense")
    built = []
    build = FlashAttentionMetadataBuilder.build
    monkeypatch.setattr(
        FlashAttentionMetadataBuilder, "build", lambda self, *given: built.append(given[1:]) or build(self, *given)
    )
    common = common_metadata([1, 1], [900, 400], [False, False])
    metadata = builder.build(0, common)
    assert built == [(common, False)]
    assert (metadata.decode, metadata.rounds, metadata.dense_decode) == ([], [], None)
    assert metadata.num_decode_tokens == 0


def test_prompts_form_rounds_whose_contexts_fit_the_longest_request(layer, builder):
    counters = prefills_sparsely(layer, builder, "unique")
    common = common_metadata([40, 5, 20, 70, 30], [500, 400, 200, 1000, 300], [True] * 5)
    output, _, metadata = run(layer, builder, common)
    # 500 + 400 fit 1,000 tokens, and so does the longest request alone.
    assert [part.tokens for part in metadata.rounds] == [slice(0, 45), slice(45, 65), slice(65, 135), slice(135, 165)]
    assert [part.prompts.longest for part in metadata.rounds] == [(500, 400), (200,), (1000,), (300,)]
    assert metadata.prefill is not None
    once = counters.clone()
    builder.vllm_config.model_config.max_model_len = 10_000
    together, _, metadata = run(layer, builder, common)
    assert [part.tokens for part in metadata.rounds] == [slice(0, 165)]
    assert torch.equal(output, together)
    assert torch.equal(counters, 2 * once)


def test_upper_bounds_of_lengths_decide_where_the_device_alone_knows_them(layer, builder):
    prefills_sparsely(layer, builder, "unique")
    common = common_metadata([70], [200], [True])
    bound = torch.tensor([400], dtype=torch.int32)
    assert builder.build(0, common).rounds == []
    assert builder.build(0, common.replace(max_seq_len=400)).rounds == []
    assert builder.build(0, common.replace(max_seq_len=400, seq_lens_cpu_upper_bound=None)).rounds != []
    padded = common.replace(seq_lens_cpu_upper_bound=bound)
    output, dense, metadata = run(layer, builder, padded)
    assert metadata.rounds[0].prompts.longest == (400,)
    torch.testing.assert_close(output, dense, atol=2e-2, rtol=2e-2)


def test_a_layer_whose_prefill_is_dense_stays_so_beside_others(layer, builder):
    prefills_sparsely(layer, builder, "unique")
    layer.bind(replace(layer.plan, prefill=None))
    common = common_metadata([4, 70], [900, 600], [False, True])
    output, dense, metadata = run(layer, builder, common)
    assert metadata.rounds != []
    torch.testing.assert_close(output[4:], dense[4:], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("preset", ["zipvl", "unique"])
def test_prompts_keep_tokens_beside_requests_that_decode(layer, builder, preset):
    common = common_metadata([4, 1, 70, 100], [900, 400, 600, 200], [False, False, True, True])
    every = TokenRule(tau=1.0, recent_probes=8, random_probes=8)
    counters = prefills_sparsely(layer, builder, preset, every)
    whole, dense, metadata = run(layer, builder, common)
    assert metadata.rounds != []
    torch.testing.assert_close(whole[5:], dense[5:], atol=2e-2, rtol=2e-2)
    assert counters[:, :2].tolist() == [[800, 800]] * HEADS
    few = replace(every, tau=0.5, dense_tokens=200)
    counters = prefills_sparsely(layer, builder, preset, few)
    output, _, metadata = run(layer, builder, common)
    assert torch.equal(output[:5], whole[:5])
    assert torch.allclose(output[:5], dense[:5], atol=2e-2, rtol=2e-2) == (preset == "zipvl")
    # The long prompt omits tokens. The short prompt of its round does not.
    assert [part.tokens for part in metadata.rounds] == [slice(0, 70), slice(70, 170)]
    builder.vllm_config.model_config.max_model_len = 1200
    together, _, metadata = run(layer, builder, common)
    assert [part.tokens for part in metadata.rounds] == [slice(0, 170)]
    assert torch.equal(together, output)
    assert output[5:75].eq(0).flatten(1).all(dim=1).any()
    assert torch.equal(output[75:], whole[75:])
    kept, of = counters[0, :2].tolist()
    assert 2 * 200 < kept < of == 2 * 800


@pytest.mark.parametrize("eight_bits", [False, True])
def test_flash_attention_3_is_asked_for_pages_of_one_token(layer, monkeypatch, eight_bits):
    asked = {}
    monkeypatch.setattr(flash.fa_utils, "flash_attn_varlen_func", lambda **given: asked.update(given), raising=False)
    query, sinks = torch.zeros(6, HEADS * GROUP, SIZE), torch.zeros(HEADS * GROUP)
    rows = torch.zeros(2, 40, dtype=torch.int32)
    scale = torch.ones(1) if eight_bits else None
    kept = KeptAttention(
        query, torch.tensor([0, 3, 6], dtype=torch.int32), torch.zeros(90, 1, HEADS, SIZE),
        torch.zeros(90, 1, HEADS, SIZE), rows, torch.tensor([20, 30], dtype=torch.int32), 5, 40,
        Softmax(SCALE, 3.0, sinks), scale, scale, scale, torch.empty_like(query),
    )  # fmt: skip
    flash.attend_kept(kept)
    for name, tensor in {
        "q": query, "k": kept.keys, "v": kept.values, "out": kept.output, "cu_seqlens_q": kept.query_start,
        "seqused_k": kept.counts, "block_table": rows, "s_aux": sinks,
    }.items():  # fmt: skip
        assert asked[name] is tensor
    assert (asked["max_seqlen_q"], asked["max_seqlen_k"], asked["fa_version"], asked["num_splits"]) == (5, 40, 3, 1)
    assert (asked["softmax_scale"], asked["softcap"], asked["causal"]) == (SCALE, 3.0, True)
    shapes = [None if (of := asked[f"{name}_descale"]) is None else tuple(of.shape) for name in "qkv"]
    assert shapes == [(2, HEADS) if eight_bits else None] * 3


def test_flash_attention_is_asked_for_virtual_sequences(layer, builder, monkeypatch):
    """The call on a GPU: page tables of one head, no sinks, scales of every sequence."""
    asked = {}

    def virtual(**given):
        asked.update(given)
        given["out"].zero_()
        return given["out"], torch.zeros(1)

    monkeypatch.setattr(flash.fa_utils, "flash_attn_varlen_func", virtual, raising=False)
    layer.vllm_flash_attn_version, layer.supports_quant_query_input = 3, True
    sequences = VirtualSequences(
        torch.zeros(6, GROUP, SIZE), torch.zeros(9, 16, 1, SIZE), torch.zeros(9, 16, 1, SIZE),
        torch.tensor([0, 3, 6], dtype=torch.int32), 3, torch.tensor([20, 30], dtype=torch.int32), 32,
        torch.zeros(2, 2, dtype=torch.int32),
    )  # fmt: skip
    attend = flash.varlen_attention(layer, SCALES)
    assert attend(sequences, torch.empty(6, GROUP, SIZE), wants_lse=False) is None
    assert attend(sequences, torch.empty(6, GROUP, SIZE), wants_lse=True) is not None
    assert asked["causal"] is True
    assert asked["return_softmax_lse"] is True
    assert asked.get("s_aux") is None
    assert (asked["max_seqlen_q"], asked["max_seqlen_k"], asked["fa_version"]) == (3, 32, 3)
    assert (asked["softmax_scale"], asked["softcap"]) == (SCALE, 0.0)
    assert [tuple(asked[f"{name}_descale"].shape) for name in "qkv"] == [(2, 1)] * 3
    layer.supports_quant_query_input = False
    attend(sequences, torch.empty(6, GROUP, SIZE), wants_lse=False)
    assert asked["q_descale"] is None


@pytest.mark.parametrize("preset", ["unique_prefill", "zipvl", "unique", "snapkv", "h2o"])
def test_the_profile_of_memory_leaves_room_for_scratch(layer, monkeypatch, preset):
    asked = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **more: asked.append(size) or empty(*size, **more))
    config = resolve(None, preset)
    module = SimpleNamespace(attn_backend=SimpleNamespace(config=lambda: config))
    layer.kv_cache_dtype, layer.model_size, layer.num_queries_per_kv = "auto", ModelSize(4096, 32), GROUP
    query = torch.ones(32, HEADS * GROUP, SIZE, dtype=torch.bfloat16)
    output = torch.ones_like(query)
    layer.forward(module, query, None, None, empty(0), None, output)
    assert not output.any()
    of_blocks = preset == "unique_prefill" and scratch_bytes(
        config.prefill.rule(), config.statistics_layout(SIZE, 2), HEADS, GROUP, 32, 4096
    )
    windows = 256 * 2**20 + 40 * HEADS * 4096
    wanted = {
        "unique_prefill": of_blocks, "zipvl": 3 * 2 * query.numel() + 300 * 2**20, "snapkv": windows,
        "h2o": windows + 32 * 4 * HEADS * 4096,
    }  # fmt: skip
    selects = config.selector is not None and not config.selector.reads_every_page
    every = wanted.get(preset, 0) + (WHOLE_SCRATCH if selects else 0)
    assert asked == ([(every,)] if every else [])


class Runner(SimpleNamespace):
    """A runner that supports weak references."""


def runner_of(prompts: dict[int, int]) -> Runner:
    """The parts of vLLM's second model runner that compaction uses: prompt lengths by slot."""
    lengths = np.zeros(16, dtype=np.int32)
    lengths[list(prompts)] = list(prompts.values())
    names = {slot: f"request {slot}" for slot in prompts}
    slots = {name: slot for slot, name in names.items()}
    states = SimpleNamespace(index_to_req_id=names, req_id_to_index=slots, prompt_len=SimpleNamespace(np=lengths))
    return Runner(req_states=states)


def compaction_of(runner: Runner, layer: SparseCUDAImpl, slides: bool, every_query: bool = False) -> StepCompaction:
    retention = Retention(slides, 100, None, 4, 0)
    layers = {"layer": SimpleNamespace(**vars(SCALES), impl=layer)}
    rule = None if slides else CompactionRule(window_tokens=8, every_query=every_query)
    return StepCompaction(retention, rule, layers, BLOCK, 16, BatchRows(runner), torch.device("cpu"))


def test_decoding_requests_get_condensed_tables_in_buffers_that_stay(builder, layer):
    runner = runner_of({3: 300, 5: 500})
    builder.compaction = compaction_of(runner, layer, slides=True)
    seen = []
    for length in (301, 600):
        common = common_metadata([1, 1, 1], [length, 450, 1], [False] * 3)
        # Slot 5 is still in its prompt, and the last row is padding.
        common = common.replace(req_idx=np.array([3, 5]), is_prefilling=torch.tensor([False, True]))
        metadata = builder.build(0, common)
        (decode,) = metadata.decode
        first = (length - 96) // BLOCK
        kept = [0, *range(first, -(-length // BLOCK))]
        assert torch.equal(decode.block_table[0, : len(kept)], common.block_table_tensor[0, kept])
        assert decode.seq_lens.tolist() == [length - (first - 1) * BLOCK, 450, 1]
        assert torch.equal(decode.block_table[1], common.block_table_tensor[1])
        assert metadata.max_seq_len == max(450, length - (first - 1) * BLOCK)
        assert torch.equal(metadata.slot_mapping, common.slot_mapping)
        seen.append((decode.block_table.data_ptr(), decode.seq_lens.data_ptr()))
    # The second table is wider, unlike vLLM's tables. Lengths keep their place in both cases.
    assert builder.build(0, common).decode[0].block_table.data_ptr() == seen[1][0]
    # Captures and dummy runs have no requests.
    metadata = builder.build(0, common.replace(req_idx=None))
    assert torch.equal(metadata.decode[0].block_table, common.block_table_tensor)
    assert metadata.decode[0].block_table.data_ptr() == seen[1][0]


@pytest.mark.parametrize("layer", ["unique", "dense"], indirect=True)
@pytest.mark.parametrize("every_query", [False, True])
def test_what_a_prompt_votes_for_moves(builder, layer, every_query):
    runner = runner_of({2: 300})
    layer.plan = replace(layer.plan, moves_tokens=True)
    builder.compaction = compaction_of(runner, layer, slides=False, every_query=every_query)
    builder.any_sparse_layer, builder.any_dense_layer = layer.plan.is_sparse, not layer.plan.is_sparse
    generator = torch.Generator().manual_seed(3)
    rows = BLOCK + (layer.plan.statistics.rows(BLOCK) if layer.plan.statistics else 0)
    cache = torch.zeros(8, HEADS, rows, 2 * SIZE, dtype=torch.bfloat16)
    query, key, value = (torch.randn(301, heads, SIZE, generator=generator).bfloat16() for heads in (4, 2, 2))
    outputs = []
    for done, new in ((0, 296), (296, 4), (300, 1)):
        common = common_metadata([new], [done + new], [done < 300]).replace(req_idx=np.array([2]))
        part = [tensor[done : done + new] for tensor in (query, key, value)]
        metadata = builder.build(0, common)
        layer.do_kv_cache_update(SCALES, *part[1:], cache, common.slot_mapping)
        output = torch.full_like(part[0], torch.nan)
        layer.forward(SCALES, *part, cache, metadata, output)
        outputs.append(output)
    # 100 tokens are two blocks, before the 44 tokens of the incomplete one.
    kept = kept_tokens(
        query[0 if every_query else 292 : 300],
        key[:300],
        2 * BLOCK + 44,
        Softmax(SCALE),
        CompactionRule(window_tokens=8),
        BLOCK,
    )
    assert metadata.seq_lens.tolist() == [2 * BLOCK + 45]
    if layer.plan.is_sparse:
        assert outputs[-1].isfinite().all()
        moved = cache[metadata.block_table[0, :2].long(), :, :BLOCK, :SIZE].transpose(1, 2).flatten(0, 1)
        expected = torch.stack([key[sorted(kept[head] - set(range(256, 300))), head] for head in range(2)], dim=1)
        assert torch.equal(moved, expected)
        return
    visible = torch.zeros(HEADS, 301, dtype=torch.bool)
    visible[:, 300] = True
    for head in range(HEADS):
        visible[head, sorted(kept[head])] = True
    exact = dense_attention(query[300].unflatten(0, (HEADS, GROUP)), key, value, SCALE, visible)
    assert (outputs[-1][0].double() - exact).abs().max() < 2e-2


ANGLES = torch.arange(1000)[:, None] * 0.9 ** torch.arange(SIZE // 2)
WINDOW = RollingWindow(sink_tokens=4, cache_tokens=104, whole_tokens=104)


def rolls(layer, builder, window: RollingWindow = WINDOW) -> None:
    """Enables rolling positions in builder and layer."""
    compaction = {"method": "streaming_llm", "budget_tokens": window.cache_tokens, "positions": "rolling"}
    plan = RollingPlan(window, Rotation(torch.cat([ANGLES.cos(), ANGLES.sin()], dim=1)))
    layer.bind(plan_of(resolve({"compaction": compaction}, "dense"), rolling=plan))
    builder.rolls, builder.any_sparse_layer, builder.any_dense_layer = True, False, True


@pytest.fixture
def in_triton(interpreted):
    """Runs rolling positions in Triton's interpreter, within the context."""
    from sparse_kernels.rolling_attention import triton

    return mock.patch.object(layer_module, "attend_rolling", triton.attend_rolling)


def test_decoding_requests_and_prompts_see_their_sinks_directly_before_their_windows(layer, builder, in_triton):
    common = common_metadata([1, 1, 70, 30], [90, 500, 300, 90], [False, False, True, True])
    rolls(layer, builder, RollingWindow(4, 1000, 1000))
    with in_triton:
        output, dense, _ = run(layer, builder, common)
    torch.testing.assert_close(output, dense, atol=2e-2, rtol=2e-2)
    rolls(layer, builder)
    with in_triton:
        output, dense, metadata = run(layer, builder, common)
    assert (metadata.decode, metadata.prefill) == ([], None)
    fits = torch.tensor([True] + [False] * 71 + [True] * 30)
    close = [torch.allclose(mine, whole, atol=2e-2, rtol=2e-2) for mine, whole in zip(output, dense, strict=True)]
    assert close == fits.tolist()
    expected, _, _ = run(layer, builder, common)
    torch.testing.assert_close(output, expected, atol=2e-2, rtol=2e-2)
    # Without the rotation, the sinks would get other weights.
    window, rotation = layer.plan.rolling
    nowhere = replace(rotation, table=rotation.table[:1].expand_as(rotation.table))
    layer.bind(replace(layer.plan, rolling=RollingPlan(window, nowhere)))
    parted = (run(layer, builder, common)[0] - expected).abs().amax(dim=(1, 2)) > 2e-2
    assert not parted[fits].any()
    assert parted[~fits].float().mean() > 0.9


@pytest.mark.parametrize("start", [[0, 1, 2, 2, 2], [0, 1, 2, 4, 4]])
def test_a_graph_of_rolling_requests_is_padded_and_needs_no_plan_of_flash_attention(
    layer, builder, in_triton, monkeypatch, start
):
    starts, lengths = torch.tensor(start, dtype=torch.int32), torch.tensor([300, 500, 0, 0], dtype=torch.int32)
    common = common_metadata([1, 1, 1, 1], [300, 500, 1, 1], [False] * 4)
    padded = common.replace(query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths)
    rolls(layer, builder)
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", None)
    expected, _, _ = run(layer, builder, padded)
    with in_triton:
        output, _, metadata = run(layer, builder, padded)
    torch.testing.assert_close(output[:2], expected[:2], atol=2e-2, rtol=2e-2)
    assert output[2 : start[-1]].eq(0).all()
    assert output[start[-1] :].isnan().all()
    # They are vLLM's buffers, so a graph finds the numbers of later steps.
    assert metadata.query_start_loc is starts
    assert metadata.seq_lens is lengths
    assert metadata.block_table is padded.block_table_tensor
    assert metadata.num_decode_tokens == 0


@pytest.mark.parametrize("compacts", [True, False])
def test_a_builder_warms_compaction_up_in_one_layer_of_each_shape(monkeypatch, compacts):
    """Otherwise a first prompt would wait for the compilation of kernels."""
    step = object() if compacts else None
    warmed = []

    def layer_of(heads: int) -> SimpleNamespace:
        impl = SimpleNamespace(bind=lambda plan: None, plan=plan)
        backend = SimpleNamespace(config=lambda: resolve(None, "dense"), statistics_layout=lambda spec: None)
        return SimpleNamespace(num_heads=heads, head_size=SIZE, num_kv_heads=HEADS, impl=impl, attn_backend=backend)

    def init(self, spec, names, vllm_config, device):
        self.vllm_config, self.device, self.block_size, self.max_cudagraph_size = vllm_config, device, BLOCK, 0

    plan = plan_of(resolve(None, "dense"))
    layers = {"a": layer_of(4), "b": layer_of(8), "c": layer_of(4)}
    group = SimpleNamespace(
        plans=dict.fromkeys(layers, plan), counts=[], reads=None, prefill_rule=None, group_sizes=set()
    )
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "__init__", init)
    monkeypatch.setattr(
        SparseCUDAMetadataBuilder, "_init_reorder_batch_threshold",
        lambda self, number, **_: setattr(self, "reorder_batch_threshold", number),
    )  # fmt: skip
    monkeypatch.setattr(builder_module, "get_layers_from_vllm_config", lambda *_: layers)
    monkeypatch.setattr(builder_module, "Meter", mock.Mock())
    monkeypatch.setattr(builder_module, "plan_compaction", lambda *_: step)
    monkeypatch.setattr(builder_module, "plan_layers", lambda *_: group)
    monkeypatch.setattr(builder_module, "warm_up_compaction", lambda *given: warmed.append(given))
    model, spec, device = SimpleNamespace(max_model_len=1000), object(), torch.device("cpu")
    SparseCUDAMetadataBuilder(
        spec,
        list(layers),
        SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(max_num_seqs=16)),
        device,
    )
    expected = [(layers[name], spec, model, step, device) for name in ("c", "b")]
    assert warmed == (expected if compacts else [])


def test_a_warm_up_that_fails_is_said_and_leaves_no_cache_bound(layer, monkeypatch):
    monkeypatch.setattr(sampling, "_reported", set())
    warnings = said(monkeypatch, "vllm.vllm_sparse_plugin.metrics.sampling", "warning")
    compaction = compaction_of(runner_of({}), layer, slides=False)

    def fail(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(layer, "compact", fail, raising=False)
    rows = BLOCK + layer.plan.statistics.rows(BLOCK)
    module = SimpleNamespace(**vars(SCALES), query_quant=None, impl=layer)
    spec = SimpleNamespace(num_states=rows, dtype=torch.bfloat16)
    model = SimpleNamespace(dtype=torch.bfloat16, max_model_len=1000)
    start_up.warm_up_compaction(module, spec, model, compaction, torch.device("cpu"))
    (line,) = warnings
    assert line.startswith("vllm_sparse_ compaction of process ")
    assert line.endswith("its kernels are compiled when a prompt needs them (OutOfMemoryError: CUDA out of memory)")
    assert layer._bound_cache is None
