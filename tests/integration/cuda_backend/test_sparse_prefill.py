"""Prompts that read key blocks or kept tokens, and the calls of FlashAttention for them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sparse_kernels.batch import Softmax
from sparse_kernels.block_prefill import COUNTERS, BlockRule, VirtualSequences, scratch_bytes
from sparse_kernels.token_prefill import ListedAttention, TokenRule
from support.cuda_layer import BLOCK, GROUP, HEADS, SCALE, SCALES, SIZE, common_metadata, plan_of, run, start_builder
from support.logs import said
from torch.multiprocessing.reductions import StorageWeakRef
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

from vllm_sparse_plugin.attention.base import ModelSize
from vllm_sparse_plugin.attention.cuda import flash, start_up
from vllm_sparse_plugin.attention.cuda.whole import WHOLE_SCRATCH
from vllm_sparse_plugin.attention.prefill import PrefillPlan, PromptRule
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.metrics import dropping

RULE = BlockRule(density=0.01, least_blocks=2, dense_tokens=256)


def settings_of(preset: str) -> dict[str, object]:
    """Settings with which decode steps of 900 tokens select pages if the preset has a policy for it."""
    if preset in ("dense", "zipvl"):
        return {}
    return {"min_context_tokens": 0} | ({} if preset == "art" else {"selection": {"budget_tokens": 512}})


def prefills_sparsely(layer, builder, preset: str, rule: PromptRule = RULE) -> torch.Tensor:
    """Sets a rule for prompts in builder and layer; returns the counters."""
    counters = torch.zeros(HEADS, COUNTERS, dtype=torch.int64)
    method = "zipvl" if isinstance(rule, TokenRule) else "blocks"
    sparse = resolve({"prefill": {"method": method}, **settings_of(preset)}, preset)
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
    layer.bind(plan_of(resolve(settings_of(preset), preset)))
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


@pytest.mark.parametrize("others", ["attend", "zero"])
@pytest.mark.parametrize("preset", ["zipvl", "unique"])
def test_prompts_keep_tokens_beside_requests_that_decode(layer, builder, preset, others):
    common = common_metadata([4, 1, 70, 100], [900, 400, 600, 200], [False, False, True, True])
    every = TokenRule(tau=1.0, recent_probes=8, random_probes=8, others=others, local_tokens=16)
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
    assert output[5:75].eq(0).flatten(1).all(dim=1).any() == (others == "zero")
    assert not torch.allclose(output[5:75], dense[5:75], atol=2e-2, rtol=2e-2)
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
    listed = ListedAttention(
        query, torch.tensor([0, 3, 6], dtype=torch.int32), torch.zeros(90, 1, HEADS, SIZE),
        torch.zeros(90, 1, HEADS, SIZE), rows, torch.tensor([20, 30], dtype=torch.int32), 5, 40,
        Softmax(SCALE, 3.0, sinks), scale, scale, scale, torch.empty_like(query),
    )  # fmt: skip
    flash.attend_listed(listed)
    for name, tensor in {
        "q": query, "k": listed.keys, "v": listed.values, "out": listed.output, "cu_seqlens_q": listed.query_start,
        "seqused_k": listed.counts, "block_table": rows, "s_aux": sinks,
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


def test_a_builder_warms_prompts_up_in_one_layer_of_each_shape_with_sparse_prefill(monkeypatch):
    """Otherwise a first prompt would wait for the compilation of kernels."""
    dense = plan_of(resolve(None, "dense"))
    sparse = replace(dense, prefill=PrefillPlan(RULE, torch.zeros(HEADS, COUNTERS)))
    plans = {"a": sparse, "b": sparse, "c": sparse, "d": dense}
    warmed, layers, (spec, config, device) = start_builder(monkeypatch, plans)
    expected = [(layers[name], spec, config.model_config, device) for name in ("c", "b")]
    assert warmed == {"warm_up_compaction": [], "warm_up_prompts": expected}


def test_a_warm_up_of_prompts_that_fails_is_said_and_leaves_neither_cache_nor_counts(layer, builder, monkeypatch):
    monkeypatch.setattr(dropping, "_reported", set())
    warnings = said(monkeypatch, "vllm.vllm_sparse_plugin.metrics.dropping", "warning")
    counters = prefills_sparsely(layer, builder, "unique")
    layer.num_queries_per_kv = GROUP

    def fail(*arguments: object) -> None:
        counters.fill_(3)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(layer, "attend_rounds", fail)
    module = SimpleNamespace(**vars(SCALES), query_quant=None, impl=layer)
    spec = SimpleNamespace(num_states=BLOCK + layer.plan.statistics.rows(BLOCK), dtype=torch.bfloat16)
    model = SimpleNamespace(dtype=torch.bfloat16, max_model_len=1000)
    start_up.warm_up_prompts(module, spec, model, torch.device("cpu"))
    (line,) = warnings
    assert line.startswith("vllm_sparse_ prefill of process ")
    assert line.endswith("its kernels are compiled when a prompt needs them (OutOfMemoryError: CUDA out of memory)")
    assert layer.bound_cache is None
    assert not counters.any()


MIB = 2**20
LONGEST, LAYERS, REQUESTS = 4096, 32, 8
VOTES = 4 * HEADS * LONGEST
"""Bytes of a number for each KV head and token of the longest context."""
WHOLE = WHOLE_SCRATCH // LAYERS


def scratch_of_blocks() -> int:
    config = resolve(None, "unique_prefill")
    return scratch_bytes(config.prefill.rule(), config.statistics_layout(SIZE, 2), HEADS, GROUP, 32, LONGEST)


def pages_between_drafts() -> int:
    config = resolve({"lossless": {"score_every": 8}}, "lossless")
    return config.kept_page_bytes(HEADS, REQUESTS)


def evicting(method: str, **more: object) -> dict[str, object]:
    return {"compaction": {"method": method, "every": 128, **more}}


SCRATCH = {
    "unique_prefill": ({}, lambda: (scratch_of_blocks(), WHOLE)),
    "zipvl": ({}, lambda: (300 * MIB, 0)),
    "zipvl_paper": ({}, lambda: (300 * MIB + 6 * 32 * HEADS * GROUP * SIZE, 0)),
    "unique": ({}, lambda: (0, WHOLE)),
    # Scores, pages and pieces of each row.
    "unique, more than 1,024 pages": (
        {"selection": {"budget_tokens": 8 * 2048}},
        lambda: (3 * REQUESTS * HEADS * (2 * LONGEST // 8 + 4 * 2048 + 64 * GROUP * (SIZE + 2) * 4), WHOLE),
    ),
    # Scores, which another launch writes.
    "quest": ({}, lambda: (3 * REQUESTS * HEADS * 2 * LONGEST // 8, WHOLE)),
    "lossless": ({"lossless": {"score_every": 8}}, lambda: (0, WHOLE + pages_between_drafts())),
    "snapkv": ({}, lambda: (10 * VOTES, 8 * MIB)),
    "h2o": ({}, lambda: (10 * VOTES, 8 * MIB + VOTES)),
    # 8 intervals of 512 tokens.
    "art": ({}, lambda: (3 * REQUESTS * HEADS * 8 * GROUP * (SIZE + 2) * 4, 3 * REQUESTS * HEADS * 10 * 4 // LAYERS)),
    "sinkrouter": (
        {"routing": {"threshold": 0.5, "accept": "uncalibrated"}},
        lambda: (3 * REQUESTS * HEADS * 64 * GROUP * (SIZE + 2) * 4, 0),
    ),
    "snapkv, evicting": (
        evicting("snapkv"),
        lambda: (3 * VOTES * LAYERS, REQUESTS * HEADS * (32 * GROUP * SIZE * 2 + 1024 + 128)),
    ),
    "h2o, evicting": (
        evicting("h2o", budget_tokens=512),
        lambda: (3 * VOTES * LAYERS, VOTES + REQUESTS * HEADS * (RING * GROUP * SIZE * 2 + 5 * (512 + 128))),
    ),
    "dense": ({}, lambda: (0, 0)),
}
"""Settings of presets, and the bytes that a layer takes while it runs, and all the time."""
RING = resolve(evicting("h2o"), "dense").compaction.rule().ring_tokens


@pytest.mark.parametrize("name", SCRATCH)
def test_the_profile_of_memory_leaves_room_for_scratch(layer, monkeypatch, name):
    settings, bytes_of = SCRATCH[name]
    preset = "dense" if "evicting" in name else name.partition(",")[0]
    config = resolve(settings, preset)
    asked = []
    empty = torch.empty
    module = SimpleNamespace(attn_backend=SimpleNamespace(config=lambda: config))
    layer.kv_cache_dtype, layer.num_queries_per_kv = "auto", GROUP
    layer.model_size = ModelSize(LONGEST, LAYERS, REQUESTS, 3 * REQUESTS)
    layer.is_planned = False
    query = torch.ones(32, HEADS * GROUP, SIZE, dtype=torch.bfloat16)
    output = torch.ones_like(query)
    nothing = empty(0)
    monkeypatch.setattr(torch, "empty", lambda *size, **more: asked.append(size) or empty(*size, **more))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    passing, lasting = bytes_of()
    # vLLM may profile twice.
    for _ in range(2):
        asked.clear()
        layer.forward(module, query, None, None, nothing, None, output)
        assert asked == [(each,) for each in (passing, lasting) if each]
        assert (0 if layer.reserved is None else layer.reserved.numel()) == lasting
    assert not output.any()
    asked.clear()
    layer.bind(layer.plan)
    assert layer.reserved is None
    # A data-parallel rank without requests runs without metadata too.
    layer.forward(module, query, None, None, nothing, None, output)
    assert asked == []


@pytest.mark.parametrize("layer", ["dense", "unique", "art"], indirect=True)
def test_a_planned_layer_holds_no_cache(layer):
    """Before the cache of requests vLLM makes one for the profile of its graphs, and plans layers for each."""
    cache = torch.zeros(3, HEADS, BLOCK + 16, 2 * SIZE, dtype=torch.bfloat16)
    memory = StorageWeakRef(cache.untyped_storage())
    layer.bind_cache(cache)
    del cache
    assert not memory.expired()
    layer.bind(layer.plan)
    assert memory.expired()
