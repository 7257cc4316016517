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

import yaml

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
SHAPES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text(encoding="utf-8"))
"""Configurations of models. Time does not depend on their weights."""


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

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return int(self.config["max_position_embeddings"])

    def kv_bytes_per_token(self, kv_cache_dtype: str) -> int:
        """Bytes of keys and values of one token in all layers, without page statistics."""
        config = self.config
        itemsize = 1 if kv_cache_dtype.startswith("fp8") else 2
        return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * itemsize)


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
