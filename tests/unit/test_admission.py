from pathlib import Path

import pytest
import torch
from support.admission import (
    BOTH_WAYS,
    CUBIC,
    NGRAM,
    UNCALIBRATED,
    UNIQUE,
    connector,
    engine_config,
    on_cuda,
    refusal,
    routed,
    settings,
)
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from vllm_sparse_plugin import admission, notices
from vllm_sparse_plugin.admission import admit
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.config.fingerprint import fingerprint_of
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.names import BACKENDS

PER_KIND = {"full_attention": "unique", "sliding_window": "streaming_llm"}


REFUSED_MODELS = {
    "DeepseekV2ForCausalLM": "DeepseekV2ForCausalLM with MLA, {}models with multi-head or grouped attention",
    "BloomForCausalLM": "BloomForCausalLM with ALiBi, {}models with rotary positions",
    "MambaForCausalLM": "MambaForCausalLM without attention, {}models with attention",
    "FalconH1ForCausalLM": "FalconH1ForCausalLM with state-space layers, {}models without, or of the types "
    "jamba, lfm2, nemotron_h, qwen3_5_moe_text, qwen3_5_text or qwen3_next",
    "BartForConditionalGeneration": "encoder-decoder BartForConditionalGeneration, {}decoder-only models",
    "WhisperForConditionalGeneration": "encoder-decoder WhisperForConditionalGeneration, {}decoder-only models",
}


def test_a_hybrid_that_is_held_to_dense_attention_is_served(folder):
    assert engine_config(folder("JambaForCausalLM")).model_config.is_hybrid


def test_a_hybrid_has_no_hits_within_a_block(folder):
    for unit in (16, 64):
        refused = refusal(folder("JambaForCausalLM"), prefix_match_unit=unit)
        assert refused == f"prefix_match_unit: got {unit} with state-space layers, {UNIQUE}none"
    assert engine_config(folder(), prefix_match_unit=64)


def test_vllm_copies_one_view_of_the_memory_of_a_block():
    """Once this fails, hybrids may have hits within a block."""
    blocks, layers = 4, 2
    memory = torch.arange(blocks * layers * 8, dtype=torch.int8)
    state, attention = (memory.view(layers, blocks, 8)[0, :, :width] for width in (3, 8))
    before = attention.clone()
    copy_kv_cache_blocks_inplace([state, attention], blocks, [KVCacheBlockCopy(1, 2)])
    assert torch.equal(attention[2, :3], before[1, :3])
    assert torch.equal(attention[2, 3:], before[2, 3:])


@pytest.mark.parametrize("architecture", REFUSED_MODELS)
def test_refused_model(architecture, folder):
    assert refusal(folder(architecture)) == f"model: got {REFUSED_MODELS[architecture].format(UNIQUE)}"


REFUSED = {
    "pooling runner": ({"runner": "pooling"}, f"runner: got pooling, {UNIQUE}generate"),
    "float16": ({"dtype": "float16"}, f"dtype: got float16, {UNIQUE}bfloat16"),
    "float32": ({"dtype": "float32"}, f"dtype: got float32, {UNIQUE}bfloat16"),
    "fp8 cache": ({"kv_cache_dtype": "fp8"}, f"kv_cache_dtype: got fp8, {UNIQUE}auto or bfloat16"),
    "block of 48": ({"block_size": 48}, f"block_size: got 48, {UNIQUE}a multiple of 32 (pages of 8 tokens)"),
    "block of 16": ({"block_size": 16}, f"block_size: got 16, {UNIQUE}a multiple of 32 (pages of 8 tokens)"),
    "bf16 statistics in blocks of 32": (
        {"block_size": 32, "additional_config": settings(statistics="bf16")},
        f"block_size: got 32, {UNIQUE}a multiple of 64 (pages of 8 tokens)",
    ),
    "bf16 statistics in blocks of 96": (
        {"block_size": 96, "additional_config": settings(statistics="bf16", page_size=16)},
        f"block_size: got 96, {UNIQUE}a multiple of 64 (pages of 16 tokens)",
    ),
    "pages of 32 in blocks of 48": (
        {"block_size": 48, "additional_config": settings(page_size=32)},
        f"block_size: got 48, {UNIQUE}a multiple of 32 (pages of 32 tokens)",
    ),
    "two vectors of a record in blocks of 32": (
        {"attention_backend": "quest", "block_size": 32},
        "block_size: got 32, allowed with attention backend quest: a multiple of 64 (pages of 8 tokens)",
    ),
    "dense in blocks of 48": (
        {"attention_backend": "dense", "block_size": 48},
        "block_size: got 48, allowed with attention backend dense: a multiple of 32",
    ),
    "decode context parallelism": (
        {"decode_context_parallel_size": 2, "tensor_parallel_size": 4},
        f"decode_context_parallel_size: got 2, {UNIQUE}1",
    ),
    "prefill context parallelism": (
        {"prefill_context_parallel_size": 2},
        f"prefill_context_parallel_size: got 2, {UNIQUE}1",
    ),
    "an anchor behind the last layer": (
        {"additional_config": settings(anchor_layers=[0, 8])},
        f"sparse_attention.selection.anchor_layers: got [0, 8], {UNIQUE}layers from 0 to 1",
    ),
    "heads of too few layers": (
        {"additional_config": settings(anchor_layers=[0], anchor_heads=[[]])},
        f"sparse_attention.selection.anchor_heads: got 1 lists, {UNIQUE}one for each of 2 layers",
    ),
    "connector that copies tokens": (
        connector("ExampleConnector"),
        f"kv_connector: got ExampleConnector, {UNIQUE}one that keeps page statistics: "
        "OffloadingConnector, SimpleCPUOffloadConnector, NixlConnector or DecodeBenchConnector",
    ),
    "connector of another module": (
        {
            "kv_transfer_config": {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_connector_module_path": "mine.connectors",
            }
        },
        f"kv_connector_module_path: got mine.connectors, {UNIQUE}none",
    ),
    "engines that need not agree": (
        {
            "kv_transfer_config": {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"enforce_handshake_compat": False},
            }
        },
        f"kv_connector_extra_config.enforce_handshake_compat: got false, {UNIQUE}true: engines must agree on their "
        "page statistics",
    ),
    "blocks of an answer that return for a turn with another budget": (
        BOTH_WAYS,
        f"kv_connector_extra_config.bidirectional_kv_xfer: got true, {UNIQUE}false: a later turn may read other pages "
        "than the answers before it",
    ),
    "offloading to LMCache": (
        {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"},
        f"kv_offloading_backend: got lmcache, {UNIQUE}native",
    ),
    "prompts whose last token is told apart by vLLM alone": (
        {"kv_sharing_fast_prefill": True},
        f"kv_sharing_fast_prefill: got true, {UNIQUE}false",
    ),
    "two backends by kind": (
        {"attention_backend": None, "attention_config": {"backend_per_kind": PER_KIND}},
        "attention_config: got backends STREAMING_LLM and UNIQUE, allowed: one of them at a time",
    ),
    "two backends, one by kind": (
        {"attention_config": {"backend_per_kind": {"sliding_window": "streaming_llm"}}},
        "attention_config: got backends STREAMING_LLM and UNIQUE, allowed: one of them at a time",
    ),
    "settings without a backend": (
        {"attention_backend": None, "additional_config": settings()},
        "sparse_attention: got settings but no attention backend of this plugin, "
        "allowed: unique, quest, streaming_llm, dense, sinkrouter, art, unique_prefill, zipvl, snapkv, pyramidkv, "
        "h2o or lossless",
    ),
    "settings with vLLM's backend": (
        {"attention_backend": "CPU_ATTN", "additional_config": {"sparse_attention": {}}},
        "sparse_attention: got settings but no attention backend of this plugin, "
        "allowed: unique, quest, streaming_llm, dense, sinkrouter, art, unique_prefill, zipvl, snapkv, pyramidkv, "
        "h2o or lossless",
    ),
    "settings that are no mapping": (
        {"additional_config": {"sparse_attention": 5}},
        "sparse_attention: got 5, allowed: a JSON object",
    ),
    "unknown key": (
        {"additional_config": {"sparse_attention": {"selektion": 1}}},
        "sparse_attention.selektion: unknown key (did you mean 'selection'?), "
        "allowed: selection, prefill, compaction, routing, stopping, offload, first_dense_layers, min_context_tokens, "
        "lossless, speculation, diagnostics, preset, config or trained",
    ),
    "key of the other backend's policy": (
        {"attention_backend": "streaming_llm", "additional_config": settings(statistics="fp8")},
        "sparse_attention.selection.statistics: unknown key, allowed: policy, page_size, budget_tokens or sink_pages",
    ),
    "value out of range": (
        {"additional_config": settings(sink_pages=65)},
        "sparse_attention.selection.sink_pages: got 65, allowed: an integer from 0 to 64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, folder):
    arguments, sentence = REFUSED[case]
    assert refusal(folder(), **arguments) == sentence


@pytest.mark.parametrize("key", ["sparse_atention", "selection"])
def test_settings_at_the_wrong_place_are_refused_with_a_backend_of_ours_alone(key, folder):
    given = {"additional_config": {key: {"page_size": 16}, "another_plugin": {}}}
    assert refusal(folder(), **given).startswith(f"additional_config: got the key '{key}'")
    engine_config(folder(), attention_backend=None, **given)


def test_two_levels_end_where_one_launch_no_longer_numbers_the_pages(folder, monkeypatch):
    config = engine_config(folder(head_dim=128))
    on_cuda(monkeypatch)
    config.additional_config = settings(statistics="leveled_quarters")
    config.model_config.max_model_len = 1 << 19
    admit(config, BACKENDS)
    config.model_config.max_model_len += 1
    expected = "max_model_len: got 524289, allowed with attention backend unique: up to 524288 with statistics in two"
    with pytest.raises(ConfigurationError, match=expected):
        admit(config, BACKENDS)


DECLARED_FP8 = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "kv_cache_scheme": {
            "type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False
        },
    }
}  # fmt: skip
"""The KV cache section of a compressed-tensors checkpoint in config.json."""


def test_a_cache_that_the_checkpoint_declares_is_checked_as_one_that_the_user_names(folder, monkeypatch):
    model = folder(head_dim=128, **DECLARED_FP8)
    sentence = "kv_cache_dtype: got fp8, which the model's checkpoint declares, allowed with attention backend"
    assert refusal(model) == f"{sentence} unique: bfloat16"
    explicit = engine_config(model, kv_cache_dtype="bfloat16")
    assert explicit.cache_config.cache_dtype == "bfloat16"
    plain = engine_config(model, attention_backend=None)
    assert plain.cache_config.cache_dtype == "auto"
    # A user's block size is checked only on a GPU.
    on_cuda(monkeypatch)
    config = engine_config(model, kv_cache_dtype="bfloat16", block_size=32)
    config.cache_config.cache_dtype = "auto"
    with pytest.raises(ConfigurationError, match=r"^block_size: got 32, .*: a multiple of 256 \(pages of 8 tokens\)$"):
        admit(config, BACKENDS)


def test_refusals_name_the_chosen_backend(folder):
    assert refusal(folder(), attention_backend="streaming_llm", dtype="float16") == (
        "dtype: got float16, allowed with attention backend streaming_llm: bfloat16"
    )


@pytest.mark.parametrize(
    "alibi", [{"alibi": True}, {"attn_config": {"alibi": True}}], ids=["in the config", "in its attention part"]
)
def test_refused_alibi_of_any_spelling(alibi, folder):
    # As Falcon and MPT spell it; vLLM 0.32 no longer loads MPT itself.
    assert refusal(folder(**alibi)) == f"model: got LlamaForCausalLM with ALiBi, {UNIQUE}models with rotary positions"


def test_alibi_that_is_off_is_served(folder):
    assert engine_config(folder(alibi=False, attn_config={"alibi": False}))


ADMITTED = {
    "routing by layer and head": routed(threshold=[[0.5, 0.25], 0.5], **UNCALIBRATED),
    "routing by a cubic": {**routed(**CUBIC, **UNCALIBRATED), "max_model_len": 256},
    "defaults": {},
    **{f"backend {name.lower()}": {"attention_backend": name.lower()} for name in BACKENDS if name != "SINKROUTER"},
    "dense in blocks of 32": {"attention_backend": "dense", "block_size": 32},
    "block of 32": {"block_size": 32},
    "block of 96": {"block_size": 96},
    "pages of 32 in blocks of 32": {"block_size": 32, "additional_config": settings(page_size=32)},
    "bf16 statistics in blocks of 64": {"block_size": 64, "additional_config": settings(statistics="bf16")},
    "explicit cache dtype": {"kv_cache_dtype": "bfloat16"},
    "one kind of layers": {
        "attention_backend": None,
        "attention_config": {"backend_per_kind": {"full_attention": "unique"}},
        "additional_config": settings(budget_tokens=256),
    },
    "offloading connector": connector("OffloadingConnector"),
    "blocks of an answer where requests have no budgets": {"attention_backend": "art"} | BOTH_WAYS,
    "n-gram speculation": NGRAM,
    "lossless mode": {"additional_config": {"sparse_attention": {"preset": "lossless"}}},
    "other plugin's settings": {"additional_config": {"another_plugin": {"a": 1}}},
    "tensor parallelism": {"tensor_parallel_size": 2},
}


@pytest.mark.parametrize("case", ADMITTED)
def test_admitted(case, folder):
    config = engine_config(folder(), **ADMITTED[case])
    chosen = [config.attention_config.backend, *config.attention_config.backend_per_kind.values()]
    assert {member.name for member in chosen if member} <= set(BACKENDS)


@pytest.mark.parametrize(
    ("backend", "settings", "measures"),
    [
        ("unique", {}, True),
        ("streaming_llm", {}, True),
        ("sinkrouter", {"routing": {"accept": "uncalibrated"}}, True),
        ("art", {}, True),
        ("dense", {"prefill": {"method": "blocks"}}, True),
        ("dense", {}, False),
    ],
)
def test_metrics_have_a_place_wherever_something_is_counted(backend, settings, measures, folder, monkeypatch):
    made: list[None] = []
    monkeypatch.setattr(admission, "expose", lambda: made.append(None))
    engine_config(folder(), attention_backend=backend, additional_config={"sparse_attention": settings})
    assert bool(made) == measures


def test_batches_in_parts_are_refused(folder):
    config = engine_config(folder())
    config.parallel_config.enable_dbo = True
    with pytest.raises(ConfigurationError, match=r"^enable_dbo, ubatch_size: got split batches, .*: neither option$"):
        admit(config, BACKENDS)


def test_a_block_size_that_vllm_has_yet_to_choose(folder):
    # vLLM 0.33 chooses it on a CPU, too, after this check, and asks the backend.
    config = engine_config(folder())
    config.cache_config.block_size = 16
    assert not config.cache_config.user_specified_block_size
    admit(config, BACKENDS)


UNCHOSEN = {
    "float16": {"dtype": "float16"},
    "block of 48": {"block_size": 48},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "connector that copies tokens": connector("ExampleConnector"),
    "pooling runner": {"runner": "pooling"},
}


@pytest.mark.parametrize("case", UNCHOSEN)
def test_nothing_is_refused_unless_a_backend_of_ours_is_chosen(case, folder):
    assert engine_config(folder(), attention_backend=None, **UNCHOSEN[case])


def test_what_surprises_is_said_when_a_configuration_is_admitted(folder, monkeypatch):
    said = []
    monkeypatch.setattr(notices, "_log_once", said.append)
    config = engine_config(folder(), attention_backend="infllm")
    assert said == notices.notices_of(resolve(None, "infllm"), config.cache_config.cache_dtype)
    said.clear()
    engine_config(folder())
    assert said == []


def test_a_lambda_without_effect_is_refused(folder):
    assert refusal(folder(), additional_config=settings(**{"lambda": 0.5})) == (
        "sparse_attention.selection.lambda: got 0.5 with statistics 'quarters', which store no deviation, "
        "allowed: with statistics int8, fp8 or bf16"
    )


def test_anchors_of_another_model_are_refused(folder):
    path = folder()
    anchors = {"anchor_layers": [0], "fingerprint": "0123456789abcdef"}
    sentence = refusal(path, additional_config=settings(**anchors))
    assert sentence == (
        f"model: got {Path(path).name} with fingerprint {fingerprint_of(path)}, {UNIQUE}one with fingerprint "
        "0123456789abcdef, the model of the anchors"
    )
    own = settings(**anchors | {"fingerprint": fingerprint_of(path)})
    assert engine_config(path, additional_config=own).additional_config == own
