"""Engines of variants: the arguments for vLLM, and the backend that it chose."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from bench.common import engine as engines
from bench.common.engine import Variant, WrongBackendError, engine, engine_options
from bench.common.models import open_model
from vllm_sparse_plugin.config import KEY

SETTINGS = json.dumps({KEY: {"selection": {"budget_tokens": 256}}})


def test_the_options_are_those_of_the_variant_and_nothing_that_was_left_out():
    with open_model("needle-8m") as model:
        ours = engine_options(model, Variant.parse("unique:fp8"), SETTINGS, block_size=None, seed=3)
        dense = engine_options(model, Variant.parse("dense"), SETTINGS)
    assert ours["attention_backend"] == "UNIQUE"
    assert ours["additional_config"] == json.loads(SETTINGS)
    assert (ours["kv_cache_dtype"], ours["seed"], ours["model"]) == ("fp8", 3, str(model.folder))
    assert "block_size" not in ours
    assert not {"attention_backend", "additional_config", "load_format"} & set(dense)
    with open_model("llama-3.1-8b") as model:
        assert engine_options(model, Variant.parse("unique"), None)["load_format"] == "dummy"


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The calls of an engine whose layers run TRITON_ATTN."""
    found: list[str] = []

    def call(method: str) -> list[list[str]]:
        found.append(method)
        return [["TRITON_ATTN"]]

    @contextmanager
    def start(**options):
        try:
            yield SimpleNamespace(collective_rpc=call)
        finally:
            found.append("ended")

    monkeypatch.setattr(engines, "engine_in_process", start)
    return found


def test_weights_are_drawn_and_the_backend_is_that_of_the_layers(calls):
    with open_model("llama-3.1-8b") as model, engine(model, Variant.parse("dense"), None) as (_, backend):
        assert backend == "TRITON_ATTN"
    assert calls == ["draw_weights", "attention_backends", "ended"]


def test_another_backend_ends_the_engine(calls):
    refused = pytest.raises(WrongBackendError, match="unique: vLLM runs TRITON_ATTN")
    with open_model("needle-8m") as model, refused, engine(model, Variant.parse("unique"), None):
        pass
    assert calls == ["attention_backends", "ended"]
