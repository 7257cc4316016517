from types import SimpleNamespace

import pytest
from support.admission import NGRAM, connector, engine_config, on_cuda, refusal

from vllm_sparse_plugin import notices
from vllm_sparse_plugin.admission import admit
from vllm_sparse_plugin.attention.base import ModelSize
from vllm_sparse_plugin.engine_traits import layers_over_everything
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.names import BACKENDS

COMPACTING = {"attention_backend": "snapkv"}
WINDOWS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}
NOT_COMPACTED = {
    "speculation": (NGRAM, {}, "speculation"),
    "a connector": (connector("OffloadingConnector"), {}, "a KV connector"),
    "offloading": ({"kv_offloading_size": 1.0}, {}, "a KV connector"),
    "stages": ({"pipeline_parallel_size": 2}, {}, "2 pipeline stages"),
    "engines": ({"data_parallel_size": 2}, {}, "2 data-parallel engines"),
    "shared caches": ({}, {"num_kv_shared_layers": 1}, "LlamaForCausalLM with layers that share a cache"),
    "windows": (
        {"disable_hybrid_kv_cache_manager": True},
        WINDOWS,
        "LlamaForCausalLM with layers of a sliding window and one block table for all layers",
    ),
    "chunks": (
        {},
        {"layer_types": ["full_attention", "chunked_attention"], "attention_chunk_size": 64},
        "LlamaForCausalLM with layers of a chunk",
    ),
    "one window": (
        {}, {"sliding_window": 64}, "LlamaForCausalLM without a layer that attends to the whole context"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_COMPACTED)
def test_compaction_is_refused_where_it_is_not_proven_that_nothing_reads_what_is_given_back(case, folder):
    arguments, model, got = NOT_COMPACTED[case]
    expected = f"sparse_attention.compaction: got {got}, allowed with attention backend snapkv: null"
    assert refusal(folder(**model), **COMPACTING, **arguments) == expected
    without = {"additional_config": {"sparse_attention": {"compaction": None}}}
    assert engine_config(folder(**model), **COMPACTING, **arguments, **without)


def test_layers_without_a_window_compact_beside_those_with_one(folder):
    admit(engine_config(folder(**WINDOWS), **COMPACTING), BACKENDS)


def test_only_layers_without_a_window_keep_queries(folder):
    compaction = {"method": "h2o", "every": 128}
    arguments = {"attention_backend": "dense", "additional_config": {"sparse_attention": {"compaction": compaction}}}
    # 32 queries of 4 heads of 16 elements, two bytes each, and 16 GiB in all.
    for model, layers in (({}, 2), (WINDOWS, 1)):
        got = refusal(folder(**model), **arguments, max_num_seqs=1 << 26, max_num_batched_tokens=1 << 26)
        assert f": at most {(1 << 22) // layers}: each running request keeps " in got


@pytest.mark.parametrize(
    ("layers", "settings", "is_flat"),
    [
        (7, {}, True),
        (7, {"layer_classes": 7}, False),
        (7, {"layer_classes": 1}, False),
        (7, {"beta": 1.0}, False),
        (9, {}, False),
        (1, {}, False),
    ],
)
def test_a_pyramid_of_one_class_is_said_in_one_sentence(layers, settings, is_flat, folder, monkeypatch):
    """No number from 2 to 4 divides 7 layers, as it divides none of the 13 layers of Gemma 2 2B without a window."""
    found: list[str] = []
    monkeypatch.setattr(notices, "_log_once", found.append)
    kinds = {"layer_types": ["full_attention", "sliding_attention"] * layers, "sliding_window": 64}
    model = folder(num_hidden_layers=2 * layers, **kinds)
    given = {"additional_config": {"sparse_attention": {"compaction": settings}}} if settings else {}
    admit(engine_config(model, attention_backend="pyramidkv", **given), BACKENDS)
    sentence = (
        "sparse_attention.compaction.layer_classes: no number of classes from 2 to 4 divides the 7 layers that attend "
        "to everything, so all of them keep the same budget, as with snapkv; set a divisor of 7."
    )
    about_classes = {each for each in found if each.startswith("sparse_attention.compaction.layer_classes: ")}
    assert about_classes == ({sentence} if is_flat else set())


@pytest.mark.parametrize(
    ("text", "has_noops", "expected"),
    [
        ({"layer_types": ["conv", "full_attention", "sliding_attention", "full_attention"]}, False, 2),
        ({"layers_block_type": ["mamba", "mlp", "mamba", "attention"]}, False, 1),
        ({"layer_types": None}, False, 4),
        ({}, True, 3),
    ],
)
def test_layers_without_attention_share_no_budget(text, has_noops, expected):
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(**text), has_noops=has_noops,
        get_num_layers=lambda parallel: 4, get_num_layers_by_block_type=lambda parallel: 3,
        get_layers_start_end_indices=lambda parallel: (0, 4),
    )  # fmt: skip
    assert layers_over_everything(SimpleNamespace(model_config=model, parallel_config=None)) == expected


def test_a_pipeline_stage_counts_its_layers(folder):
    model = folder(layer_types=["full_attention"] * 2)
    for stages in (1, 2):
        config = engine_config(model, pipeline_parallel_size=stages, distributed_executor_backend="mp")
        assert layers_over_everything(config) == 2 // stages


def test_memory_is_reserved_for_layers_with_attention(folder):
    # Every second layer of the model has attention.
    assert ModelSize.of(engine_config(folder("JambaForCausalLM"))).num_layers == 1
    assert ModelSize.of(engine_config(folder())).num_layers == 2


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


def test_positions_do_not_roll_beside_windows(folder):
    given = {"additional_config": {"sparse_attention": {"compaction": ROLLING}}}
    expected = (
        "sparse_attention.compaction.positions: got rolling with LlamaForCausalLM with layers of a sliding window or a "
        "chunk, allowed with attention backend dense: text"
    )
    assert refusal(folder(**WINDOWS), attention_backend="dense", **given) == expected


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


def test_workers_of_tensor_parallelism_and_8_bit_caches_compact(folder, monkeypatch):
    config = engine_config(folder(head_dim=64), **COMPACTING, tensor_parallel_size=2)
    admit(config, BACKENDS)
    on_cuda(monkeypatch)
    config.cache_config.cache_dtype = "fp8"
    admit(config, BACKENDS)


def test_a_hybrid_is_compacted_without_prefix_caching(folder):
    hybrid = folder("JambaForCausalLM")
    admit(engine_config(hybrid, **COMPACTING, enable_prefix_caching=False), BACKENDS)
    expected = (
        "sparse_attention.compaction: got JambaForCausalLM with state-space layers and prefix caching, allowed with "
        "attention backend snapkv: null"
    )
    assert refusal(hybrid, **COMPACTING, enable_prefix_caching=True) == expected
