"""Compaction in steps, and its warm-up."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sparse_kernels.batch import Softmax
from sparse_kernels.compaction import CompactionRule
from support.cuda_layer import BLOCK, GROUP, HEADS, SCALE, SCALES, SIZE, Runner, common_metadata, plan_of, start_builder
from support.logs import said
from support.paged import dense_attention
from support.snapkv import kept_tokens

from vllm_sparse_plugin.attention.cuda import SparseCUDAImpl, start_up
from vllm_sparse_plugin.compaction.step import StepCompaction
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.evictions import Retention
from vllm_sparse_plugin.metrics import dropping
from vllm_sparse_plugin.requests.rows import BatchRows

RULE = CompactionRule(window_tokens=8, pool_tokens=5, sink_tokens=4)


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
    rule = None if slides else replace(RULE, every_query=every_query)
    rows = BatchRows(runner)
    return StepCompaction(retention, rule, layers, BLOCK, 16, rows, torch.device("cpu"))


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
    # Captures and dummy runs have requests without names.
    metadata = builder.build(0, common.replace(req_idx=np.arange(3)))
    assert torch.equal(metadata.decode[0].block_table, common.block_table_tensor)
    assert metadata.decode[0].block_table.data_ptr() == seen[1][0]


def test_another_request_of_the_same_name_begins_anew(builder, layer):
    """A client may abort a request and send another one of its name, which begins at a prefix-cache hit."""
    runner = runner_of({2: 900})
    builder.compaction = compaction_of(runner, layer, slides=True)

    def step(new: int, length: int) -> list[int]:
        common = common_metadata([new], [length], [False]).replace(req_idx=np.array([2]))
        return builder.build(0, common).seq_lens.tolist()

    assert step(64, 64) == [64]
    runner.req_states.prompt_len.np[2] = 300
    assert step(236, 300) == [300]
    # Two full blocks of 100 tokens are left, one of them with the sinks.
    assert step(1, 301) == [2 * BLOCK + 45]


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
    query, key, value = (
        torch.randn(301, heads, SIZE, generator=generator).bfloat16() for heads in (HEADS * GROUP, HEADS, HEADS)
    )
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
        RULE,
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


@pytest.mark.parametrize("compacts", [True, False])
def test_a_builder_warms_compaction_up_in_one_layer_of_each_shape(monkeypatch, compacts):
    """Otherwise a first prompt would wait for the compilation of kernels."""
    step = object() if compacts else None
    plans = dict.fromkeys("abc", plan_of(resolve(None, "dense")))
    warmed, layers, (spec, config, device) = start_builder(monkeypatch, plans, step)
    expected = [(layers[name], spec, config.model_config, step, device) for name in ("c", "b")]
    assert warmed == {"warm_up_compaction": expected if compacts else [], "warm_up_prompts": []}


def test_a_warm_up_that_fails_is_said_and_leaves_no_cache_bound(layer, monkeypatch):
    monkeypatch.setattr(dropping, "_reported", set())
    warnings = said(monkeypatch, "vllm.vllm_sparse_plugin.metrics.dropping", "warning")
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
    assert layer.bound_cache is None
