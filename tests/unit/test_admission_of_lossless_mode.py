import pickle

import pytest
from support.admission import (
    NGRAM,
    UNIQUE,
    connector,
    drafted,
    engine_config,
    lossless,
    on_cuda,
    refusal,
)

from vllm_sparse_plugin import admission, compat, notices
from vllm_sparse_plugin.admission import admit
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.lossless.scheduler import PacedScheduler
from vllm_sparse_plugin.lossless.speculation import speculate_if_lossless
from vllm_sparse_plugin.names import BACKENDS

NOT_LOSSLESS = {
    "nothing sparse": (lossless(selection={"policy": "dense"}), {}, "a section without sparse attention for drafts"),
    "sparse prefill": (lossless(prefill={"method": "blocks"}), {}, "a section and sparse_attention.prefill"),
    "compaction": (lossless(compaction={"method": "snapkv"}), {}, "a section and sparse_attention.compaction"),
    "sparse drafts": (
        lossless(speculation={"draft": "sparse"}), {}, "a section and sparse_attention.speculation.draft sparse"
    ),
    "another draft": (lossless() | NGRAM, {}, "a section and drafts of ngram"),
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
        "step on a GPU, even if drafts gain nothing."
    ]


@pytest.mark.parametrize("other", OTHER_SCHEDULERS)
def test_under_another_scheduler_a_user_cannot_ask_for_lengths_that_adapt(start_on_a_gpu, other):
    expected = rf"^sparse_attention\.lossless\.draft_length: got adaptive {other}, {UNIQUE}fixed$"
    with pytest.raises(ConfigurationError, match=expected):
        start_on_a_gpu(**OTHER_SCHEDULERS[other], lossless={"draft_length": "adaptive"})
