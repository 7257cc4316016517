import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from sparse_kernels.page_statistics import KINDS, StatisticsKind
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from vllm_sparse_plugin import admission, compat, notices
from vllm_sparse_plugin.admission import admit, check_layers
from vllm_sparse_plugin.attention.plan import is_of_draft
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.config.fingerprint import fingerprint_of
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.lossless.scheduler import PacedScheduler
from vllm_sparse_plugin.lossless.speculation import speculate_if_lossless
from vllm_sparse_plugin.names import BACKENDS

SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
}
ENCODER_DECODER = {
    "vocab_size": 256,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "is_encoder_decoder": True,
}
MODELS = {
    "LlamaForCausalLM": SMALL | {"model_type": "llama"},
    "DeepseekV2ForCausalLM": SMALL
    | {
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 2,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
    },
    "BloomForCausalLM": {"model_type": "bloom", "vocab_size": 256, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "MambaForCausalLM": {
        "model_type": "mamba",
        "vocab_size": 256,
        "hidden_size": 64,
        "state_size": 16,
        "num_hidden_layers": 2,
    },
    "JambaForCausalLM": SMALL
    | {
        "model_type": "jamba",
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 16,
    },
    "FalconH1ForCausalLM": SMALL | {"model_type": "falcon_h1"},
    "BartForConditionalGeneration": ENCODER_DECODER | {"model_type": "bart", "max_position_embeddings": 512},
    "WhisperForConditionalGeneration": ENCODER_DECODER | {"model_type": "whisper", "max_target_positions": 512},
}
UNIQUE = "allowed with attention backend unique: "


def settings(**selection: object) -> dict:
    return {"sparse_attention": {"selection": selection}}


def connector(name: str) -> dict:
    return {"kv_transfer_config": {"kv_connector": name, "kv_role": "kv_both"}}


NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}}
PER_KIND = {"full_attention": "unique", "sliding_window": "streaming_llm"}


@pytest.fixture
def folder(tmp_path: Path):
    def write(architecture: str = "LlamaForCausalLM", **more: object) -> str:
        values = MODELS[architecture] | {"architectures": [architecture], "torch_dtype": "bfloat16"} | more
        (tmp_path / "config.json").write_text(json.dumps(values))
        return str(tmp_path)

    return write


def engine_config(model: str, **arguments: object) -> VllmConfig:
    given = {
        "model": model,
        "attention_backend": "unique",
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "enforce_eager": True,
    }
    return EngineArgs(**(given | arguments)).create_engine_config()


def refusal(model: str, **arguments: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        engine_config(model, **arguments)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


REFUSED_MODELS = {
    "DeepseekV2ForCausalLM": "DeepseekV2ForCausalLM with MLA, {}models with multi-head or grouped attention",
    "BloomForCausalLM": "BloomForCausalLM with ALiBi, {}models with rotary positions",
    "MambaForCausalLM": "MambaForCausalLM without attention, {}models with attention",
    "FalconH1ForCausalLM": "FalconH1ForCausalLM with state-space layers, {}models without, or of the types "
    "jamba, lfm2, nemotron_h, qwen3_5_text or qwen3_next",
    "BartForConditionalGeneration": "encoder-decoder BartForConditionalGeneration, {}decoder-only models",
    "WhisperForConditionalGeneration": "encoder-decoder WhisperForConditionalGeneration, {}decoder-only models",
}


def test_a_hybrid_that_is_held_to_dense_attention_is_served(folder):
    assert engine_config(folder("JambaForCausalLM")).model_config.is_hybrid


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
        "allowed: unique, unique_paper, quest, infllm, mean, streaming_llm, dense, sinkrouter, art, "
        "unique_prefill, zipvl, snapkv, pyramidkv, h2o or lossless",
    ),
    "settings with vLLM's backend": (
        {"attention_backend": "CPU_ATTN", "additional_config": {"sparse_attention": {}}},
        "sparse_attention: got settings but no attention backend of this plugin, "
        "allowed: unique, unique_paper, quest, infllm, mean, streaming_llm, dense, sinkrouter, art, "
        "unique_prefill, zipvl, snapkv, pyramidkv, h2o or lossless",
    ),
    "settings that are no mapping": (
        {"additional_config": {"sparse_attention": 5}},
        "sparse_attention: got 5, allowed: a JSON object",
    ),
    "unknown key": (
        {"additional_config": {"sparse_attention": {"selektion": 1}}},
        "sparse_attention.selektion: unknown key (did you mean 'selection'?), "
        "allowed: selection, prefill, compaction, routing, stopping, first_dense_layers, min_context_tokens, "
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


COMPACTING = {"attention_backend": "snapkv"}
NOT_COMPACTED = {
    "speculation": (NGRAM, {}, "speculation"),
    "a connector": (connector("OffloadingConnector"), {}, "a KV connector"),
    "offloading": ({"kv_offloading_size": 1.0}, {}, "a KV connector"),
    "stages": ({"pipeline_parallel_size": 2}, {}, "2 pipeline stages"),
    "engines": ({"data_parallel_size": 2}, {}, "2 data-parallel engines"),
    "shared caches": ({}, {"num_kv_shared_layers": 1}, "LlamaForCausalLM with layers that share a cache"),
    "windows": (
        {},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64},
        "LlamaForCausalLM with layers of a sliding window or a chunk",
    ),
    "one window": ({}, {"sliding_window": 64}, "LlamaForCausalLM with layers of a sliding window or a chunk"),
}


@pytest.mark.parametrize("case", NOT_COMPACTED)
def test_compaction_is_refused_where_it_is_not_proven_that_nothing_reads_what_is_given_back(case, folder):
    arguments, model, got = NOT_COMPACTED[case]
    expected = f"sparse_attention.compaction: got {got}, allowed with attention backend snapkv: null"
    assert refusal(folder(**model), **COMPACTING, **arguments) == expected
    without = {"additional_config": {"sparse_attention": {"compaction": None}}}
    assert engine_config(folder(**model), **COMPACTING, **arguments, **without)


ROLLING = {"method": "streaming_llm", "positions": "rolling"}
NOT_ROLLING = {
    "selection": ({"selection": {"policy": "unique"}}, "selection.policy: got unique with compaction.positions "
                  "rolling"),
    "routing": ({"routing": {"threshold": 0.5, "accept": "uncalibrated"}},
                "sparse_attention.compaction.positions: got rolling beside sparse_attention.routing"),
    "stopping": ({"stopping": {}}, "sparse_attention.compaction.positions: got rolling beside "
                    "sparse_attention.stopping"),
    "prefill": ({"prefill": {"method": "blocks"}}, "sparse_attention.compaction.positions: got rolling beside "
                "sparse_attention.prefill"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_ROLLING)
def test_positions_roll_where_a_window_is_all_that_is_read(case, folder):
    sections, sentence = NOT_ROLLING[case]
    backend = {"attention_backend": "dense"}
    given = {"additional_config": {"sparse_attention": {"compaction": ROLLING, **sections}}}
    allowed = "dense" if case == "selection" else "text"
    assert refusal(folder(), **backend, **given) == f"{sentence}, allowed with attention backend dense: {allowed}"


def test_positions_roll_on_both_platforms_in_a_cache_of_16_bits(folder, monkeypatch):
    given = {"additional_config": {"sparse_attention": {"compaction": ROLLING}}}
    config = engine_config(folder(head_dim=64), attention_backend="dense", **given)
    admit(config, BACKENDS)
    on_cuda(monkeypatch)
    admit(config, BACKENDS)
    config.cache_config.cache_dtype = "fp8"
    expected = "positions: got rolling with a KV cache of 8 bits, allowed with attention backend dense: text"
    with pytest.raises(ConfigurationError, match=expected):
        admit(config, BACKENDS)


@pytest.mark.parametrize("key", ["sparse_atention", "selection"])
def test_settings_at_the_wrong_place_are_refused_with_a_backend_of_ours_alone(key, folder):
    given = {"additional_config": {key: {"page_size": 16}, "another_plugin": {}}}
    assert refusal(folder(), **given).startswith(f"additional_config: got the key '{key}'")
    engine_config(folder(), attention_backend=None, **given)


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
    # A user's block size, and a coverage, are checked only on a GPU.
    on_cuda(monkeypatch)
    for given, expected in (
        ({"block_size": 32}, r"^block_size: got 32, .*: a multiple of 256 \(pages of 8 tokens\)$"),
        (
            {"additional_config": settings(coverage=0.9)},
            r"^sparse_attention.selection.coverage: got 0.9 with a KV cache",
        ),
    ):
        config = engine_config(model, kv_cache_dtype="bfloat16", **given)
        config.cache_config.cache_dtype = "auto"
        with pytest.raises(ConfigurationError, match=expected):
            admit(config, BACKENDS)


def test_workers_of_tensor_parallelism_and_8_bit_caches_compact(folder, monkeypatch):
    config = engine_config(folder(head_dim=64), **COMPACTING, tensor_parallel_size=2)
    admit(config, BACKENDS)
    on_cuda(monkeypatch)
    config.cache_config.cache_dtype = "fp8"
    admit(config, BACKENDS)


def lossless(**sections: object) -> dict:
    """The arguments of an engine in lossless mode, with further sections of settings."""
    return {"additional_config": {"sparse_attention": {"lossless": {"draft_tokens": 3}, **sections}}}


NOT_LOSSLESS = {
    "nothing sparse": (lossless(selection={"policy": "dense"}), {}, "a section with nothing sparse to draft with"),
    "sparse prefill": (lossless(prefill={"method": "blocks"}), {}, "a section beside sparse_attention.prefill"),
    "compaction": (lossless(compaction={"method": "snapkv"}), {}, "a section beside sparse_attention.compaction"),
    "sparse drafts": (
        lossless(speculation={"draft": "sparse"}), {}, "a section beside sparse_attention.speculation.draft sparse"
    ),
    "another draft": (lossless() | NGRAM, {}, "a section beside speculation by ngram"),
    "adapters": (lossless() | {"enable_lora": True}, {}, "LoRA adapters"),
    "a connector": (lossless() | connector("OffloadingConnector"), {}, "a KV connector"),
    "offloading": (lossless() | {"kv_offloading_size": 1.0}, {}, "a KV connector"),
    "embeddings": (lossless() | {"enable_prompt_embeds": True}, {}, "prompts of embeddings"),
    "workers": (lossless() | {"tensor_parallel_size": 2}, {}, "2 tensor-parallel workers"),
    "stages": (lossless() | {"pipeline_parallel_size": 2}, {}, "2 pipeline stages"),
    "engines": (lossless() | {"data_parallel_size": 2}, {}, "2 data-parallel engines"),
    "windows": (
        lossless(),
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64},
        "LlamaForCausalLM with layers of a sliding window or a chunk",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_LOSSLESS)
def test_lossless_mode_is_refused_where_drafts_are_not_proven_to_leave_nothing_behind(case, folder):
    arguments, model, got = NOT_LOSSLESS[case]
    expected = f"sparse_attention.lossless: got {got}, {UNIQUE}null"
    assert refusal(folder(**model), **arguments) == expected


def test_lossless_mode_is_not_for_hybrids(folder):
    expected = f"sparse_attention.lossless: got JambaForCausalLM with state-space layers, {UNIQUE}null"
    assert refusal(folder("JambaForCausalLM"), **lossless()) == expected


def test_lossless_mode_sets_up_speculation_by_itself_and_reserves_room_for_drafts(folder):
    model = folder()
    config = engine_config(model, **lossless())
    speculative = config.speculative_config
    assert compat.drafts_for_itself(config)
    assert speculative.draft_model_config is config.model_config
    assert (config.num_speculative_tokens, config.num_lookahead_tokens, config.uniform_decode_query_len) == (3, 3, 4)
    assert config.scheduler_config.async_scheduling is False
    # It reaches the processes of the engine.
    assert pickle.loads(pickle.dumps(config)).num_lookahead_tokens == 3
    assert engine_config(model, **NGRAM).num_lookahead_tokens == 0
    assert engine_config(model, **drafted(model)).num_lookahead_tokens == 2
    assert engine_config(model).speculative_config is None


@pytest.fixture
def on_a_gpu(folder, monkeypatch):
    """A complete configuration in lossless mode, as on an NVIDIA GPU."""
    config = engine_config(folder(head_dim=64))
    speculate_if_lossless(config, BACKENDS)
    assert config.speculative_config is None
    config.additional_config = lossless()["additional_config"]
    on_cuda(monkeypatch)
    speculate_if_lossless(config, BACKENDS)
    return config


def test_on_a_gpu_lossless_mode_is_for_the_second_model_runner_and_may_be_scheduled_ahead(on_a_gpu, monkeypatch):
    assert on_a_gpu.speculative_config.method == "draft_model"
    assert compat.drafts_for_itself(on_a_gpu)
    assert (on_a_gpu.num_speculative_tokens, on_a_gpu.num_lookahead_tokens) == (3, 3)
    assert not admission.drafts_with_attention(on_a_gpu)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    admit(on_a_gpu, BACKENDS)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(
        ConfigurationError, match=r"^sparse_attention\.lossless: got vLLM's first model runner on a GPU"
    ):
        admit(on_a_gpu, BACKENDS)


@pytest.fixture
def start_on_a_gpu(folder, monkeypatch):
    """Makes a complete configuration in lossless mode, as on an NVIDIA GPU, and admits it."""
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    monkeypatch.setattr(notices, "_log_once", (said := []).append)
    model = folder(head_dim=64)

    def start(backend="unique", requests=4, scheduler=None, asynchronous=True, **sections):
        config = engine_config(model, attention_backend=backend, max_num_seqs=requests, additional_config={
            "sparse_attention": {"lossless": None}})  # fmt: skip
        assert config.speculative_config is None
        config.additional_config = {"sparse_attention": sections}
        config.scheduler_config.async_scheduling = asynchronous
        config.scheduler_config.scheduler_cls = scheduler
        on_cuda(monkeypatch)
        speculate_if_lossless(config, BACKENDS)
        admit(config, BACKENDS)
        return config, said

    return start


@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize(
    ("backend", "sections"),
    [
        ("lossless", {}),
        ("unique", {"preset": "lossless"}),
        ("unique", {"lossless": {}}),
        ("unique", {"lossless": {"draft_length": "adaptive"}}),
        ("unique", {"lossless": {"draft_length": "fixed"}}),
    ],
)
def test_on_a_gpu_our_scheduler_says_how_much_is_drafted(start_on_a_gpu, backend, sections, requests):
    config, said = start_on_a_gpu(backend, requests, **sections)
    assert config.scheduler_config.get_scheduler_cls() is PacedScheduler
    assert config.num_speculative_tokens == 8
    assert said == []


OTHER_SCHEDULERS = {
    "without asynchronous scheduling": {"asynchronous": False},
    "with the scheduler another.Scheduler": {"scheduler": "another.Scheduler"},
}


@pytest.mark.parametrize("other", OTHER_SCHEDULERS)
def test_under_another_scheduler_every_request_drafts_as_much_and_the_log_says_so(start_on_a_gpu, other):
    config, said = start_on_a_gpu(**OTHER_SCHEDULERS[other], preset="lossless")
    assert config.scheduler_config.scheduler_cls != PacedScheduler
    assert said == [
        f"sparse_attention.lossless.draft_length: {other} every decoding request drafts and verifies 8 tokens in each "
        "step on a GPU, also where drafts gain nothing."
    ]


@pytest.mark.parametrize("other", OTHER_SCHEDULERS)
def test_under_another_scheduler_a_user_cannot_ask_for_lengths_that_adapt(start_on_a_gpu, other):
    expected = rf"^sparse_attention\.lossless\.draft_length: got adaptive {other}, {UNIQUE}fixed$"
    with pytest.raises(ConfigurationError, match=expected):
        start_on_a_gpu(**OTHER_SCHEDULERS[other], lossless={"draft_length": "adaptive"})


def test_a_hybrid_is_not_compacted(folder):
    expected = "sparse_attention.compaction: got JambaForCausalLM with state-space layers, allowed with attention "
    assert refusal(folder("JambaForCausalLM"), **COMPACTING) == f"{expected}backend snapkv: null"


def drafted(model: str, method: str = "draft_model", how: str = "dense", **more: object) -> dict:
    """Arguments of an engine with a draft of the same configuration."""
    return {
        "speculative_config": {"model": model, "method": method, "num_speculative_tokens": 2, **more},
        "additional_config": {"sparse_attention": {"speculation": {"draft": how}}},
    }


@pytest.mark.parametrize("how", ["dense", "sparse"])
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_a_draft_has_the_backend_of_the_model(folder, method, how):
    model = folder()
    config = engine_config(model, **drafted(model, method, how))
    assert config.speculative_config.attention_backend.name == "UNIQUE"


REFUSED_DRAFTS = {
    "another backend": (
        {"attention_backend": "CPU_ATTN"},
        {},
        "speculative attention_backend: got cpu_attn, {}none, which takes that of the model",
    ),
    "another cache": (
        {"kv_cache_dtype": "bfloat16"},
        {},
        "speculative kv_cache_dtype: got bfloat16, {}none, which takes that of the model",
    ),
    "several tokens in one pass": (
        {"parallel_drafting": True},
        {},
        "speculative parallel_drafting: got true, {}false",
    ),
    "sparse where nothing is selected": (
        {"how": "sparse"},
        {"attention_backend": "dense"},
        "sparse_attention.speculation.draft: got sparse with policy dense, {}dense",
    ),
    "sparse where every page may be read": (
        {"how": "sparse"},
        {"attention_backend": "art"},
        "sparse_attention.speculation.draft: got sparse with policy dense, {}dense",
    ),
}


@pytest.mark.parametrize("case", REFUSED_DRAFTS)
def test_refused_drafts(case, folder):
    changes, arguments, sentence = REFUSED_DRAFTS[case]
    model = folder()
    backend = arguments.get("attention_backend", "unique")
    allowed = f"allowed with attention backend {backend}: "
    assert refusal(model, **drafted(model, **changes), **arguments) == sentence.format(allowed)


def test_a_draft_of_ours_alone_is_refused(folder):
    model = folder()
    draft = drafted(model, attention_backend="unique")["speculative_config"]
    assert refusal(model, attention_backend=None, speculative_config=draft) == (
        f"speculative attention_backend: got unique, {UNIQUE}none, which takes that of the model"
    )


@pytest.mark.parametrize("arguments", [{}, NGRAM], ids=["no speculation", "n-gram"])
def test_a_sparse_draft_needs_a_draft(folder, arguments):
    settings = {"sparse_attention": {"speculation": {"draft": "sparse"}}}
    assert refusal(folder(), additional_config=settings, **arguments) == (
        f"sparse_attention.speculation.draft: got sparse, {UNIQUE}dense without a draft"
    )


@pytest.mark.parametrize(
    ("name", "of_draft"),
    [
        ("model.layers.1.self_attn.attn", False),
        ("model.layers.2.self_attn.attn", True),
        ("language_model.model.layers.0.self_attn.attn", False),
        ("draft_model.model.layers.0.self_attn.attn", True),
        ("mtp.layers.0.self_attn.attn", True),
        ("model.layers.2.mtp_block.self_attn.attn", True),
    ],
)
def test_the_layers_of_a_draft_are_known_by_their_names(folder, name, of_draft):
    model = folder()
    assert is_of_draft(name, engine_config(model, **drafted(model, "eagle"))) == of_draft
    assert not is_of_draft(name, engine_config(model, **NGRAM))


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


UNCALIBRATED = {"accept": "uncalibrated"}


def routed(**settings: object) -> dict:
    return {"attention_backend": "sinkrouter", "additional_config": {"sparse_attention": {"routing": settings}}}


ROUTED = "allowed with attention backend sinkrouter: "
CALIBRATE = "as config the file that vllm-sparse calibrate writes, or routing.accept uncalibrated"
CUBIC = {"cubic": [0.5, 0, 0, 0], "shortest": 16, "longest": 256}
REFUSED_ROUTING = {
    "thresholds of other layers": (
        routed(threshold=[0.5] * 3, **UNCALIBRATED),
        f"sparse_attention.routing.threshold: got a list of 3, {ROUTED}the model's 2 layers",
    ),
    "thresholds of other heads": (
        routed(threshold=[0.5, [0.5] * 4], **UNCALIBRATED),
        f"sparse_attention.routing.threshold: got a layer's list of 4, {ROUTED}the model's 2 KV heads",
    ),
    "contexts beyond the fit": (
        routed(**CUBIC, **UNCALIBRATED),
        f"max_model_len: got 512, {ROUTED}up to 256 (sparse_attention.routing.longest, the longest context that its "
        "cubic was fitted to)",
    ),
    "another model": (
        routed(**CUBIC, model="Llama-3.1-8B", fingerprint="1234", recommended=True) | {"max_model_len": 256},
        f"model: got FOLDER with fingerprint DIGITS, {ROUTED}Llama-3.1-8B with fingerprint 1234, whose thresholds "
        "these are",
    ),
    "a preset that is not calibrated": (
        {"attention_backend": "sinkrouter"},
        f"sparse_attention.routing.threshold: got a value that is not calibrated for this model, {ROUTED}{CALIBRATE}",
    ),
    "a name of a model alone": (
        routed(**CUBIC, model="FOLDER") | {"max_model_len": 256},
        f"sparse_attention.routing.cubic: got a value that is not calibrated for this model, {ROUTED}{CALIBRATE}",
    ),
    "thresholds beside a policy": (
        {"additional_config": {"sparse_attention": {"routing": {"threshold": 0.5}}}},
        "sparse_attention.routing.threshold: got a value that is not calibrated for this model, allowed with attention "
        f"backend unique: {CALIBRATE}",
    ),
    "a verdict against routing": (
        routed(**CUBIC, fingerprint="DIGITS", recommended=False) | {"max_model_len": 256},
        "sparse_attention.routing.recommended: got false, since vllm-sparse calibrate advises against routing, "
        f"{ROUTED}another backend, or routing.accept not_recommended",
    ),
    "no verdict": (
        routed(**CUBIC, fingerprint="DIGITS") | {"max_model_len": 256},
        "sparse_attention.routing.recommended: got false, since vllm-sparse calibrate advises against routing, "
        f"{ROUTED}another backend, or routing.accept not_recommended",
    ),
    "another model that is not recommended": (
        routed(**CUBIC, fingerprint="1234", accept="not_recommended") | {"max_model_len": 256},
        f"model: got FOLDER with fingerprint DIGITS, {ROUTED}one with fingerprint 1234, whose thresholds these are",
    ),
}


@pytest.mark.parametrize("case", REFUSED_ROUTING)
def test_refused_routing(case, folder):
    arguments, sentence = REFUSED_ROUTING[case]
    model = folder()
    names = {"FOLDER": Path(model).name, "DIGITS": fingerprint_of(model)}
    given, expected = json.dumps(arguments), sentence
    for name, stands_for in names.items():
        given, expected = given.replace(name, stands_for), expected.replace(name, stands_for)
    assert refusal(model, **json.loads(given)) == expected


def test_refused_routing_of_learned_sinks(folder, monkeypatch):
    config = engine_config(folder(), **routed(threshold=0.5, **UNCALIBRATED))
    monkeypatch.setattr(config.model_config.hf_config, "model_type", "gpt_oss")
    with pytest.raises(ConfigurationError) as caught:
        admit(config, BACKENDS)
    assert str(caught.value) == f"model: got gpt_oss with learned attention sinks, {ROUTED}models without, if routed"


def test_thresholds_are_those_of_one_model_wherever_it_lies(folder, tmp_path):
    model = folder()
    calibrated = routed(threshold=0.5, fingerprint=fingerprint_of(model), recommended=True)
    assert engine_config(model, **calibrated)
    moved = shutil.copytree(model, tmp_path / "elsewhere" / "renamed")
    assert engine_config(str(moved), **calibrated)
    accepted = routed(threshold=0.5, fingerprint=fingerprint_of(model), recommended=False, accept="not_recommended")
    assert engine_config(model, **accepted)
    folder(rope_theta=5e5)
    assert refusal(model, **calibrated).startswith(f"model: got {Path(model).name} with fingerprint ")


def test_a_model_of_the_hub_is_compared_once_it_is_loaded(folder, monkeypatch):
    model = folder()
    calibrated = routed(threshold=0.5, fingerprint="1234", recommended=True)
    monkeypatch.setattr(Path, "is_dir", lambda _: False)
    config = engine_config(model, **calibrated)
    monkeypatch.undo()
    chosen = config.attention_config.backend.get_class()
    layer = SimpleNamespace(get_attn_backend=lambda: chosen)
    monkeypatch.setattr("vllm.config.get_layers_from_vllm_config", lambda *_: {"layer": layer})
    with pytest.raises(
        ConfigurationError, match=r"^model: got .* with fingerprint [0-9a-f]{16}, allowed .* 1234, whose "
    ):
        check_layers(config, BACKENDS)


def test_the_thresholds_beside_the_witness_are_its_own(model):
    witness = Path(model).parent / "witness-6m"
    given = {
        "attention_backend": "sinkrouter",
        "max_model_len": 8192,
        "additional_config": {"sparse_attention": {"config": str(witness / "sinkrouter.yaml")}},
    }
    assert engine_config(str(witness), **given)
    assert refusal(str(witness), **given | {"max_model_len": 16384}).startswith("max_model_len: got 16384")
    digits = [fingerprint_of(folder) for folder in (model, str(witness))]
    assert refusal(model, **given) == (
        f"model: got needle-8m with fingerprint {digits[0]}, {ROUTED}witness-6m with fingerprint {digits[1]}, whose "
        "thresholds these are"
    )


def test_a_fingerprint_is_of_contents(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "transformers_version": "5.0", "_name_or_path": "/a"}

    def write(weights: bytes, name: str = "model.safetensors", **changes: object) -> str | None:
        (folder / "config.json").write_text(json.dumps(config | changes))
        (folder / name).write_bytes(weights)
        return fingerprint_of(folder)

    first = write(b"0" * 10_000)
    assert write(b"0" * 10_000, transformers_version="6", _name_or_path="/b", text_config=None) == first
    assert write(b"0" * 10_000, "optimizer.bin") == first
    others = {write(b"1" * 10_000), write(b"0" * 9_999), write(b"0" * 10_000, hidden_size=65), write(b"")}
    others.add(write(b"0" * 9_990 + b"1" * 10))
    assert len(others - {first}) == 5
    (folder / "config.json").write_text("[")
    assert fingerprint_of(folder) is None
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert fingerprint_of("meta-llama/Llama-3.1-8B", cache=str(tmp_path)) is None
    cached = tmp_path / "models--a--b" / "snapshots" / "abc"
    shutil.copytree(folder, cached)
    (cached / "config.json").write_text(json.dumps(config))
    (tmp_path / "models--a--b" / "refs").mkdir()
    (tmp_path / "models--a--b" / "refs" / "main").write_text("abc")
    assert fingerprint_of("a/b", cache=str(tmp_path)) == fingerprint_of(cached) is not None


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
    "n-gram speculation": NGRAM,
    "lossless mode": {"additional_config": {"sparse_attention": {"preset": "lossless"}}},
    "lossless mode over noise": lossless() | connector("DecodeBenchConnector"),
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


def on_cuda(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    platform = type(current_platform)
    monkeypatch.setattr(platform, "is_cpu", lambda self: False)
    monkeypatch.setattr(platform, "is_cuda", lambda self: True)
    monkeypatch.setattr(platform, "get_device_capability", classmethod(lambda cls: DeviceCapability(*capability)))


REFUSED_ON_CUDA = {
    "heads of 72": ({"head_dim": 72}, {}, "head size: got 72, {}multiples of 16 from 32 to 256"),
    "heads of 272": ({"head_dim": 272}, {}, "head size: got 272, {}multiples of 16 from 32 to 256"),
    "32 query heads to one that stop": (
        {"head_dim": 64, "num_attention_heads": 32, "num_key_value_heads": 1},
        {"additional_config": {"sparse_attention": {"stopping": {}}}},
        "query heads to a KV head: got 32, {}up to 16 where attention may stop",
    ),
    "budget that stops": (
        {"head_dim": 64},
        {"additional_config": {"sparse_attention": {"stopping": {}, "selection": {"budget_tokens": 8200}}}},
        "budget_tokens: got 8200, {}up to 8192 (pages of 8 tokens) where attention may stop",
    ),
    "sketches of heads of 80": (
        {"head_dim": 80},
        {"additional_config": settings(statistics="sketch")},
        "selection.statistics: got sketch, {}quarters, int8, fp8 or bf16 with heads of 80 on a GPU",
    ),
}


def test_heads_that_differ_between_layers_are_all_checked_on_cuda(folder, monkeypatch):
    """The configuration has the heads of one layer."""
    config = engine_config(folder(head_dim=64))
    chosen = config.attention_config.backend.get_class()

    def checked(**heads: int | None) -> None:
        shape = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "sliding_window": None}
        layers = {
            str(index): SimpleNamespace(get_attn_backend=lambda: chosen, **shape | other)
            for index, other in enumerate(({}, heads))
        }
        monkeypatch.setattr("vllm.config.get_layers_from_vllm_config", lambda *_: layers)
        check_layers(config, BACKENDS)

    checked(head_size=72)
    on_cuda(monkeypatch)
    checked(head_size=128)
    # Layers with a window stay dense.
    checked(head_size=72, sliding_window=512)
    with pytest.raises(ConfigurationError, match=r"^head size: got 72, .* multiples of 16 from 32 to 256$"):
        checked(head_size=72)


@pytest.mark.parametrize("case", REFUSED_ON_CUDA)
def test_refused_on_cuda(case, folder, monkeypatch):
    model, arguments, sentence = REFUSED_ON_CUDA[case]
    config = engine_config(folder(**model), **arguments)
    on_cuda(monkeypatch)
    with pytest.raises(ConfigurationError) as caught:
        admit(config, BACKENDS)
    assert str(caught.value) == sentence.format(UNIQUE)


def test_draft_models_are_refused_on_cuda(folder, monkeypatch):
    model = folder(head_dim=64)
    config, heads = engine_config(model, **drafted(model)), engine_config(model, **drafted(model, "eagle"))
    on_cuda(monkeypatch)
    with pytest.raises(ConfigurationError) as caught:
        admit(config, BACKENDS)
    assert str(caught.value) == f"speculative method: got draft_model, {UNIQUE}ngram, eagle, eagle3 or mtp"
    admit(heads, BACKENDS)


SERVED_ON_CUDA = {
    "a million tokens": ({"head_dim": 64, "max_position_embeddings": 1 << 20}, {}),
    "ten million tokens that stop": (
        {"head_dim": 64, "max_position_embeddings": 10 << 20},
        {"additional_config": {"sparse_attention": {"stopping": {}}}},
    ),
    "32 query heads to one": ({"head_dim": 64, "num_attention_heads": 32, "num_key_value_heads": 1}, {}),
    "64 routed query heads to one": (
        {"head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 1},
        routed(**UNCALIBRATED),
    ),
    "a budget of 64K": ({"head_dim": 64}, {"additional_config": settings(budget_tokens=1 << 16)}),
    "sketches of heads of 128": ({"head_dim": 128}, {"additional_config": settings(statistics="sketch")}),
    **{f"heads of {size}": ({"head_dim": size}, {}) for size in (32, 80, 96, 112, 192, 240)},
}


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
@pytest.mark.parametrize("case", SERVED_ON_CUDA)
def test_no_size_is_refused_on_cuda(case, capability, folder, monkeypatch):
    model, arguments = SERVED_ON_CUDA[case]
    config = engine_config(folder(**model), **arguments)
    on_cuda(monkeypatch, capability)
    if "stop" in case and capability < (9, 0):
        pytest.skip("before clusters no selection stops")
    admit(config, BACKENDS)


PREFILL = {"sparse_attention": {"prefill": {"method": "blocks"}}}


def test_zipvl_is_served_where_our_kernels_run(folder, monkeypatch):
    served, odd = (engine_config(folder(head_dim=size), attention_backend="zipvl") for size in (256, 40))
    admit(served, BACKENDS)
    # Its attention needs none of vLLM's kernels, so large heads are served everywhere.
    on_cuda(monkeypatch, (10, 0))
    admit(served, BACKENDS)
    with pytest.raises(ConfigurationError, match=r"^head size: got 40, .*: multiples of 16 from 32 to 256$"):
        admit(odd, BACKENDS)


def test_sparse_prefill_before_a_dense_decode_has_the_limits_of_our_kernels(folder, monkeypatch):
    config = engine_config(folder(head_dim=40), attention_backend="dense", additional_config=PREFILL)
    on_cuda(monkeypatch)
    with pytest.raises(ConfigurationError) as caught:
        admit(config, BACKENDS)
    assert (
        str(caught.value) == "head size: got 40, allowed with attention backend dense: multiples of 16 from 32 to 256"
    )


def test_sparse_prefill_of_large_heads_is_refused_where_vllm_has_another_kernel_for_them(folder, monkeypatch):
    config = engine_config(folder(head_dim=256), attention_backend="unique_prefill")
    on_cuda(monkeypatch, (9, 0))
    admit(config, BACKENDS)
    on_cuda(monkeypatch, (10, 0))
    with pytest.raises(ConfigurationError) as caught:
        admit(config, BACKENDS)
    assert str(caught.value) == (
        "sparse_attention.prefill: got heads of 256 on compute capability 10.0, "
        "allowed with attention backend unique_prefill: null for them"
    )


def test_blocks_hold_the_statistics_that_sparse_prefill_needs(folder, monkeypatch):
    config = engine_config(folder(head_dim=64), attention_backend="dense", block_size=32, additional_config=PREFILL)
    on_cuda(monkeypatch)
    admit(config, BACKENDS)
    config.cache_config.cache_dtype = "fp8"
    with pytest.raises(ConfigurationError, match=r"^block_size: got 32, .*: a multiple of 256$"):
        admit(config, BACKENDS)


def test_routing_has_the_limits_of_our_kernels(folder, monkeypatch):
    config = engine_config(folder(head_dim=72), **routed(**UNCALIBRATED))
    on_cuda(monkeypatch)
    with pytest.raises(ConfigurationError) as caught:
        admit(config, BACKENDS)
    assert str(caught.value) == f"head size: got 72, {ROUTED}multiples of 16 from 32 to 256"


def test_dense_attention_has_no_limits_of_our_kernels(folder, monkeypatch):
    config = engine_config(folder(head_dim=72, max_position_embeddings=1 << 20), attention_backend="dense")
    on_cuda(monkeypatch)
    admit(config, BACKENDS)


def test_a_coverage_needs_a_cache_of_16_bits(folder, monkeypatch):
    field = "sparse_attention.selection.coverage: got 0.9"
    plain = engine_config(folder(head_dim=64), additional_config=settings(coverage=0.9))
    both = {"sparse_attention": {**settings(coverage=0.9)["sparse_attention"], "diagnostics": {"sample_every": 100}}}
    sampled = engine_config(folder(head_dim=64), additional_config=both)
    admit(sampled, BACKENDS)
    on_cuda(monkeypatch)
    admit(plain, BACKENDS)
    admit(sampled, BACKENDS)
    plain.cache_config.cache_dtype = "fp8"
    with pytest.raises(ConfigurationError) as caught:
        admit(plain, BACKENDS)
    assert str(caught.value) == f"{field} with a KV cache of 8 bits, {UNIQUE}null with it"


def test_refused_on_an_old_gpu(folder, monkeypatch):
    config = engine_config(folder(head_dim=64))
    on_cuda(monkeypatch, (7, 5))
    with pytest.raises(ConfigurationError) as caught:
        admit(config, BACKENDS)
    assert str(caught.value) == f"compute capability: got 7.5, {UNIQUE}8.0 or later"


def test_fp8_statistics_need_a_gpu_that_knows_them(folder, monkeypatch):
    config = engine_config(folder(head_dim=64), additional_config=settings(statistics="fp8"))
    on_cuda(monkeypatch, (8, 9))
    admit(config, BACKENDS)
    on_cuda(monkeypatch, (8, 0))
    with pytest.raises(ConfigurationError) as caught:
        admit(config, BACKENDS)
    assert str(caught.value) == f"selection.statistics: got fp8, {UNIQUE}int8 or bf16 on this GPU"


def test_attention_that_stops_needs_our_heads_and_with_a_selection_clusters(folder, monkeypatch):
    small, odd = (engine_config(folder(head_dim=size), attention_backend="art") for size in (64, 72))
    settings = {"sparse_attention": {"stopping": {}}}
    selected = engine_config(folder(head_dim=64), attention_backend="unique", additional_config=settings)
    art = "allowed with attention backend art:"
    on_cuda(monkeypatch)
    admit(small, BACKENDS)
    with pytest.raises(ConfigurationError) as caught:
        admit(odd, BACKENDS)
    assert str(caught.value) == f"head size: got 72, {art} multiples of 16 from 32 to 256"
    admit(selected, BACKENDS)
    on_cuda(monkeypatch, (8, 9))
    admit(small, BACKENDS)
    with pytest.raises(ConfigurationError) as caught:
        admit(selected, BACKENDS)
    allowed = "allowed with attention backend unique: null on this GPU"
    assert str(caught.value) == f"sparse_attention.stopping: got a rule, {allowed}"


def test_statistics_without_a_triton_form_are_for_cpus(folder, monkeypatch):
    config = engine_config(folder(head_dim=64), attention_backend="quest")
    on_cuda(monkeypatch)
    admit(config, BACKENDS)
    for lacking in ("triton_summarise", "triton_features"):
        with monkeypatch.context() as without:
            without.setattr(type(KINDS["bounds"]), lacking, getattr(StatisticsKind, lacking))
            with pytest.raises(ConfigurationError) as caught:
                admit(config, BACKENDS)
        assert str(caught.value) == (
            "selection.policy: got quest, allowed with attention backend quest: one whose page statistics have a "
            "Triton form, on a GPU"
        )


@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3"])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_admitted_on_cuda(cache_dtype, head_size, folder, monkeypatch):
    config = engine_config(folder(head_dim=head_size))
    on_cuda(monkeypatch)
    config.cache_config.cache_dtype = cache_dtype
    admit(config, BACKENDS)


def test_batches_in_parts_are_refused(folder):
    config = engine_config(folder())
    config.parallel_config.enable_dbo = True
    with pytest.raises(ConfigurationError, match=r"^enable_dbo, ubatch_size: got batches in parts, .*: neither$"):
        admit(config, BACKENDS)


def test_caches_of_one_and_two_bytes_in_one_model(folder, monkeypatch):
    config = engine_config(folder(head_dim=128))
    on_cuda(monkeypatch)
    config.cache_config.kv_cache_dtype_skip_layers = ["sliding_window"]
    admit(config, BACKENDS)
    config.cache_config.cache_dtype = "fp8"
    with pytest.raises(ConfigurationError) as caught:
        admit(config, BACKENDS)
    assert str(caught.value) == f"kv_cache_dtype_skip_layers: got sliding_window, {UNIQUE}none with fp8"


@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
def test_gpus_with_less_shared_memory_stop_with_narrower_groups(capability, folder, monkeypatch):
    heads = {"head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 1}
    settings = {"sparse_attention": {"stopping": {}}}
    config = engine_config(folder(**heads), additional_config=settings)
    for large in ((9, 0), (10, 0)):
        on_cuda(monkeypatch, large)
        admit(config, BACKENDS)
    on_cuda(monkeypatch, capability)
    with pytest.raises(
        ConfigurationError, match=r"^shared memory of a block: got \d+, .*: up to 101376 bytes on this GPU$"
    ):
        admit(config, BACKENDS)


@pytest.mark.parametrize(("preset", "least"), [("unique", 16), ("quest", 64), ("dense", 16)])
def test_blocks_that_vllm_chooses_for_several_backends_hold_whole_units_on_cuda(preset, least, folder):
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    from vllm_sparse_plugin.attention.cuda.backend import SparseCUDABackend

    names = {"preset": preset, "get_name": staticmethod(preset.upper)}
    backend = type(preset.upper(), (SparseCUDABackend,), names)
    config = engine_config(folder(head_dim=128), attention_backend=preset)
    assert Platform._preferred_block_size_for_backends([backend, FlashAttentionBackend], 16, config) == least


def test_block_size_that_an_fp8_cache_cannot_have_on_cuda(folder, monkeypatch):
    config = engine_config(folder(head_dim=128), block_size=32)
    on_cuda(monkeypatch)
    admit(config, BACKENDS)
    config.cache_config.cache_dtype = "fp8"
    with pytest.raises(ConfigurationError, match=r"^block_size: got 32, .*: a multiple of 256 \(pages of 8 tokens\)$"):
        admit(config, BACKENDS)


def test_blocks_of_an_fp8_cache_are_as_long_as_its_statistics_need(folder, monkeypatch):
    from vllm.config import set_current_vllm_config

    from vllm_sparse_plugin.attention.cuda.backend import SparseCUDABackend

    backend = type("UNIQUE", (SparseCUDABackend,), {"preset": "unique"})
    config = engine_config(folder(head_dim=128))
    for dtype, wanted in (("auto", 64), ("fp8", 256)):
        config.cache_config.cache_dtype = dtype
        with set_current_vllm_config(config):
            assert backend.get_preferred_block_size(16) == wanted


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
        "sparse_attention.selection.lambda: got 0.5 with statistics 'quarters', which keep no deviation to weigh, "
        "allowed: with statistics int8, fp8 or bf16"
    )
