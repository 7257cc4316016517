"""The longest context that an engine starts with is the one that `vllm-sparse plan` predicts."""

import json

import pytest
import torch
from typer.testing import CliRunner
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_sparse_plugin.attention import backends
from vllm_sparse_plugin.compaction.manager import spread
from vllm_sparse_plugin.tools.cli.app import app

BLOCK = 128
MEMORY = 1 << 30
BACKENDS = ["dense", "unique", "quest", "unique_prefill", "art", "snapkv", "pyramidkv", "streaming_llm"]


def planned(model: str, backend: str, settings: dict) -> int:
    """Tokens of cache that the command prints for a backend."""
    given = json.dumps({"sparse_attention": settings})
    # All memory but a byte of weights is for the cache.
    sizes = ("--gpu-memory", f"{MEMORY + 1}B", "--gpu-memory-utilization", "1", "--weights", "1B")
    result = CliRunner().invoke(
        app,
        [
            "plan", "--model", model, *sizes, "--block-size", str(BLOCK), "--attention-backend", backend,
            "--additional-config", given,
        ],
        env={"COLUMNS": "200"},
    )  # fmt: skip
    (row,) = [line for line in result.output.splitlines() if line.startswith("│ as given ")]
    return int(row.split("│")[4].replace(",", ""))


def start(config, specs: dict, longest: int) -> str:
    """What vLLM says to a longest context; empty if the engine starts."""
    config.model_config.max_model_len = longest
    try:
        get_kv_cache_configs(config, [specs], [MEMORY])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("backend", "settings"),
    [*((backend, {}) for backend in BACKENDS), ("unique", {"selection": {"statistics": "bf16"}})],
)
def test_plan_predicts_the_longest_context_that_starts(model, backend, settings):
    config = EngineArgs(
        model=model, attention_backend=backend, additional_config={"sparse_attention": settings}, block_size=BLOCK,
        enforce_eager=True,
    ).create_engine_config()  # fmt: skip
    config.cache_config.kv_cache_layout = "LBHNC"
    hf = config.model_config.hf_text_config
    with set_current_vllm_config(config):
        bare = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=hf.num_key_value_heads, head_size=hf.head_dim, dtype=torch.bfloat16
        )
        spec = getattr(backends, backend.upper()).customize_spec(bare)
        names = [f"model.layers.{layer}.self_attn.attn" for layer in range(hf.num_hidden_layers)]
        specs = spread(dict.fromkeys(names, spec))
        predicted = planned(model, backend, settings)
        assert start(config, specs, int(0.99 * predicted)) == ""
        refused = start(config, specs, int(1.01 * predicted))
    assert refused.startswith("To serve at least one request with the model's max seq len")
    told = int(refused.partition("the estimated maximum model length is ")[2].split(".")[0])
    assert told == pytest.approx(predicted, rel=0.01)
