from types import SimpleNamespace

import pytest
from sparse_kernels.page_statistics import KINDS, StatisticsKind
from support.admission import UNCALIBRATED, UNIQUE, drafted, engine_config, on_cuda, routed, settings

from vllm_sparse_plugin.admission import admit, check_layers
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.names import BACKENDS

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


@pytest.mark.parametrize(
    ("backend", "arguments"),
    [
        ("dense", {"attention_backend": "dense", "additional_config": PREFILL}),
        ("sinkrouter", routed(**UNCALIBRATED)),
    ],
    ids=["sparse prefill before a dense decode", "routing"],
)
def test_other_methods_have_the_limits_of_our_kernels(backend, arguments, folder, monkeypatch):
    config = engine_config(folder(head_dim=40), **arguments)
    on_cuda(monkeypatch)
    with pytest.raises(ConfigurationError) as caught:
        admit(config, BACKENDS)
    allowed = f"allowed with attention backend {backend}: multiples of 16 from 32 to 256"
    assert str(caught.value) == f"head size: got 40, {allowed}"


def test_sparse_prefill_of_large_heads_is_refused_where_vllm_has_another_kernel_for_them(folder, monkeypatch):
    config = engine_config(folder(head_dim=256), attention_backend="unique_prefill")
    on_cuda(monkeypatch, (9, 0))
    admit(config, BACKENDS)
    on_cuda(monkeypatch, (10, 0))
    with pytest.raises(ConfigurationError) as caught:
        admit(config, BACKENDS)
    assert str(caught.value) == (
        "sparse_attention.prefill: got heads of 256 on compute capability 10.0, "
        "allowed with attention backend unique_prefill: null"
    )


def test_dense_attention_has_no_limits_of_our_kernels(folder, monkeypatch):
    config = engine_config(folder(head_dim=72, max_position_embeddings=1 << 20), attention_backend="dense")
    on_cuda(monkeypatch)
    admit(config, BACKENDS)


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


@pytest.mark.parametrize("size", [64, 96, 128])
def test_a_gpu_serves_sketches_of_heads_of_any_size(folder, monkeypatch, size):
    on_cuda(monkeypatch, (9, 0))
    admit(engine_config(folder(head_dim=size), additional_config=settings(statistics="sketch")), BACKENDS)


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


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"block_size": 32}, r" \(pages of 8 tokens\)"),
        ({"block_size": 64, "attention_backend": "dense", "additional_config": PREFILL}, ""),
    ],
    ids=["selection", "sparse prefill before a dense decode"],
)
def test_block_size_that_an_fp8_cache_cannot_have_on_cuda(arguments, reason, folder, monkeypatch):
    config = engine_config(folder(head_dim=64), **arguments)
    on_cuda(monkeypatch)
    admit(config, BACKENDS)
    config.cache_config.cache_dtype = "fp8"
    with pytest.raises(
        ConfigurationError, match=rf"^block_size: got {arguments['block_size']}, .*: a multiple of 256{reason}$"
    ):
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
