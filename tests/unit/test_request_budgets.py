"""What a request may say of its own attention, and what is answered to the rest."""

from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform

import vllm_sparse_plugin
from vllm_sparse_plugin import request_budgets
from vllm_sparse_plugin.compaction.requests import BatchRows
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.config.requests import EVERY_PAGE, pages_of_request
from vllm_sparse_plugin.errors import ConfigurationError

vllm_sparse_plugin.register()


@pytest.fixture
def served():
    yield request_budgets.remember
    request_budgets.remember(None)


@pytest.mark.parametrize(
    ("arguments", "pages"),
    [
        (None, None),
        ({}, None),
        ({"forced_token_ids": [1]}, None),
        ({"sparse_budget_tokens": 24}, (3, 3, 0.0)),
        ({"sparse_budget_tokens": 1 << 20}, (1 << 17, 1 << 17, 0.0)),
        ({"sparse": "dense"}, (EVERY_PAGE, EVERY_PAGE, 0.0)),
        ({"sparse_coverage": 0.99}, (16, 1024, 0.99)),
        ({"sparse_coverage": 1}, (16, 1024, 1.0)),
    ],
)
def test_arguments_become_pages(arguments, pages):
    assert pages_of_request(arguments, resolve(None, "unique")) == pages


def test_the_settings_limit_a_coverage_and_give_those_who_say_nothing_one():
    selection = {"coverage": 0.9, "min_budget_tokens": 64, "max_budget_tokens": 640}
    config = resolve({"selection": selection}, "unique")
    assert config.selector.pages_read == (8, 80, 0.9)
    assert pages_of_request({"sparse_coverage": 0.5}, config) == (8, 80, 0.5)
    assert pages_of_request({"sparse_budget_tokens": 64}, config) == (8, 8, 0.0)
    # What is always read fits into the least.
    wide = resolve({"selection": {"sink_pages": 30}}, "unique")
    assert pages_of_request({"sparse_coverage": 0.5}, wide).least == 32


BOUNDS = "allowed: a multiple of page_size (8), from 24 to 1048576"


@pytest.mark.parametrize(
    ("backend", "settings", "arguments", "sentence"),
    [
        ("unique", {}, {"sparse_budget_tokens": 16}, f"sparse_budget_tokens: got 16, {BOUNDS}"),
        ("unique", {}, {"sparse_budget_tokens": 2049}, f"sparse_budget_tokens: got 2049, {BOUNDS}"),
        ("unique", {}, {"sparse_budget_tokens": 1 << 21}, f"sparse_budget_tokens: got 2097152, {BOUNDS}"),
        ("unique", {}, {"sparse_budget_tokens": True}, f"sparse_budget_tokens: got True, {BOUNDS}"),
        ("unique", {}, {"sparse_budget_tokens": 512.0}, f"sparse_budget_tokens: got 512.0, {BOUNDS}"),
        ("unique", {}, {"sparse_budget_tokens": "512"}, f"sparse_budget_tokens: got '512', {BOUNDS}"),
        ("unique", {}, {"sparse": "off"}, "sparse: got 'off', allowed: dense"),
        (
            "unique", {}, {"sparse": "dense", "sparse_budget_tokens": 512},
            "sparse, sparse_budget_tokens: got all of them, allowed: one in a request",
        ),
        ("unique", {}, {"sparse_coverage": 1.5}, "sparse_coverage: got 1.5, allowed: from 0.01 to 1"),
        ("unique", {}, {"sparse_coverage": True}, "sparse_coverage: got True, allowed: from 0.01 to 1"),
        ("unique", {}, {"sparse_coverage": "0.9"}, "sparse_coverage: got '0.9', allowed: from 0.01 to 1"),
        (
            "quest", {}, {"sparse_coverage": 0.9},
            "sparse_coverage: got 0.9, allowed: policy unique with quarters or a sketch",
        ),
        (
            "unique_paper", {}, {"sparse_coverage": 0.9},
            "sparse_coverage: got 0.9, allowed: policy unique with quarters or a sketch",
        ),
        (
            "unique", {"termination": {}}, {"sparse_coverage": 0.9},
            "sparse_coverage: got 0.9 with termination, allowed: none",
        ),
        (
            "dense", {}, {"sparse_budget_tokens": 512},
            "sparse_budget_tokens: got 512 with policy dense, allowed: none",
        ),
        (
            "unique", {"termination": {}}, {"sparse_budget_tokens": 512},
            "sparse_budget_tokens: got 512 with termination, allowed: none",
        ),
        (
            "streaming_llm", {}, {"sparse_budget_tokens": 512},
            "sparse_budget_tokens: got 512 with a compaction that slides, allowed: none",
        ),
        (
            "unique", {"prefill": {"method": "blocks"}}, {"sparse": "dense"},
            "sparse: got dense with a server whose prefill is sparse, allowed: none",
        ),
        (
            "streaming_llm", {}, {"sparse": "dense"},
            "sparse: got dense with a server whose compaction is sparse, allowed: none",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_answered_with_a_sentence(backend, settings, arguments, sentence, served):
    served(resolve(settings, backend))
    with pytest.raises(VLLMValidationError) as refusal:
        current_platform.validate_request({}, SamplingParams(extra_args=arguments))
    assert str(refusal.value) == sentence


def test_requests_are_vllms_own_without_a_backend_of_ours(served):
    bad = SamplingParams(extra_args={"sparse_budget_tokens": 16})
    served(None)
    current_platform.validate_request({}, bad)
    served(resolve(None, "unique"))
    with pytest.raises(VLLMValidationError, match="sparse_budget_tokens"):
        current_platform.validate_request(processed_inputs={}, params=bad)
    current_platform.validate_request({}, SamplingParams())
    current_platform.validate_request({}, SamplingParams(extra_args={"another": 1}))


def test_a_gpu_has_one_budget_for_all(monkeypatch, served):
    served(resolve(None, "unique"))
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    for arguments in ({"sparse_budget_tokens": 2048}, {"sparse": "dense"}, {"sparse_coverage": 0.9}):
        (name, got) = next(iter(arguments.items()))
        with pytest.raises(ValueError, match=f"{name}: got {got!r}, allowed on a GPU: none"):
            request_budgets.check_arguments(arguments)


def test_the_runner_says_what_each_request_of_a_batch_gave():
    def of(extra_args):
        return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra_args))

    runner = type("Runner", (), {})()
    runner.requests = {"a": of({"sparse": "dense"}), "b": of(None), "c": SimpleNamespace(sampling_params=None)}
    runner.input_batch = SimpleNamespace(num_reqs=3, req_ids=["b", "a", "c", None])
    assert BatchRows(runner).arguments() == [{}, {"sparse": "dense"}, {}]
    del runner.input_batch
    runner.req_states = None
    with pytest.raises(ConfigurationError, match="vLLM's model runner: got Runner"):
        BatchRows(runner).arguments()
