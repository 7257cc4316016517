"""Models to measure: the small one of this repository, and the shape of a large one with random weights."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.common.results import ROOT
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools import models
from vllm_sparse_plugin.tools.needles import library_text

NEEDLE_8M = ROOT / "models" / "needle-8m"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_NEEDED = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "intermediate_size",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip

CHARS_PER_TOKEN = 8
"""More characters per token than any tokenizer has on source code, so that a piece is long enough."""
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 0,
        "dtype": "bfloat16",
        "eos_token_id": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500000.0,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
}
"""Configurations of models. Time does not depend on their weights."""
SHAPES["llama-3.2-1b"] = SHAPES["llama-3.1-8b"] | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_parameters": SHAPES["llama-3.1-8b"]["rope_parameters"] | {"factor": 32.0},
    "tie_word_embeddings": True,
}
SHAPES["qwen3-1.7b"] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 131072,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
for _name, _tokens in (("512k", 1 << 19), ("1m", 1 << 20)):
    SHAPES[f"llama-3.1-8b-{_name}"] = SHAPES["llama-3.1-8b"] | {"max_position_embeddings": _tokens}


@dataclass(frozen=True)
class Model:
    """A folder that vLLM can load."""

    folder: Path
    """The folder; its last part is the name in results."""
    drawn_weights: bool
    """Whether there is no checkpoint: load dummy weights and call `BenchWorker.draw_weights`."""
    config: dict[str, Any]
    """The contents of config.json."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.config["vocab_size"])

    def kv_bytes_per_token(self, kv_cache_dtype: str) -> int:
        """Bytes of keys and values of one token in all layers, without page statistics."""
        config = self.config
        itemsize = 1 if kv_cache_dtype.startswith("fp8") else 2
        return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * itemsize)

    @property
    def matrix_elements(self) -> int:
        """Weights in matrices that every token is multiplied by."""
        config = self.config
        hidden = config["hidden_size"]
        heads = 2 * (config["num_attention_heads"] + config["num_key_value_heads"]) * config["head_dim"]
        layer = hidden * (heads + 3 * config["intermediate_size"])
        return int(config["num_hidden_layers"] * layer + self.vocabulary * hidden)

    def prefill_flops(self, begin: int, end: int) -> float:
        """Floating-point operations for the tokens from `begin` to `end` of one prompt."""
        config = self.config
        width = config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"]
        return float(2 * self.matrix_elements * (end - begin) + 2 * width * (end**2 - begin**2))


@contextmanager
def open_model(name: str) -> Iterator[Model]:
    """Yield the model of a folder, or of a shape in a temporary folder.

    A shape uses the tokenizer of needle-8m, which is enough for prompts of a given length.

    Raises:
        ConfigurationError: if `name` is neither.
    """
    if name in SHAPES:
        with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as parent:
            folder = Path(parent) / name
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=2), encoding="utf-8")
            for file in TOKENIZER_FILES:
                shutil.copy(NEEDLE_8M / file, folder)
            yield Model(folder, True, SHAPES[name])
        return
    folder = NEEDLE_8M if name == NEEDLE_8M.name else Path(name).resolve()
    yield Model(folder, False, _read_config(name, folder))


@cache
def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model.

    Raises:
        ConfigurationError: if the folder has none.
    """
    try:
        return models.load_tokenizer(folder)
    except (OSError, ValueError):
        raise ConfigurationError(f"model: got {folder.name!r}, allowed: a model with a tokenizer") from None


def _read_config(name: str, folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if all(isinstance(config[key], int) for key in _NEEDED):
            return dict(config)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    known = ", ".join((NEEDLE_8M.name, *SHAPES))
    raise ConfigurationError(f"model: got {name!r}, allowed: {known} or a folder with the config.json of a Llama")


def library_tokens(tokenizer: Any, start: int, count: int) -> list[int]:
    """The first tokens of a section of Python's library source that begins at character `start`."""
    tokens: list[int] = tokenizer.encode(library_text(start, count * CHARS_PER_TOKEN))
    return tokens[:count]
