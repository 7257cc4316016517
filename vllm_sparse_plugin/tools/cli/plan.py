"""The command `vllm-sparse plan`: how many requests fit a GPU's memory, without starting anything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from vllm_sparse_plugin.config import ResolvedConfig, Retention, preset_names, requests_at_once, resolve
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.notices import EIGHT_BIT_CACHES
from vllm_sparse_plugin.tools.arguments import ModelFolder, find_model

_UNITS = {"": 1, "B": 1, **{f"{letter}iB": 1 << 10 * power for power, letter in enumerate("KMGT", 1)},
          **{f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("KMGT", 1)}}  # fmt: skip


class CacheShape(NamedTuple):
    """What the cache of a model takes."""

    layers: int
    kv_heads: int
    head_size: int
    itemsize: int
    """Bytes of an element."""

    def block_bytes(self, config: ResolvedConfig, block_size: int) -> int:
        """Returns the bytes of a block of one layer, page statistics included.

        Raises:
            ConfigurationError: if the block does not hold whole statistics.
        """
        rows, layout = block_size, config.statistics_layout(self.head_size, self.itemsize)
        if layout is not None:
            if block_size % layout.unit_tokens:
                raise ConfigurationError(f"block_size: got {block_size}, allowed: a multiple of {layout.unit_tokens}")
            rows += layout.rows(block_size)
        return rows * self.kv_heads * 2 * self.head_size * self.itemsize


def plan(
    model: ModelFolder = None,
    gpu_memory: Annotated[str, typer.Option(help="Memory of the GPU, such as 80GiB.")] = "80GiB",
    gpu_memory_utilization: Annotated[float, typer.Option(help="As given to vLLM.", min=0.01, max=1.0)] = 0.92,
    weights: Annotated[
        str | None, typer.Option(help="What the model takes of it; the size of its safetensors if left out.")
    ] = None,
    context: Annotated[int, typer.Option(help="Longest prompt, in tokens.", min=4)] = 32768,
    block_size: Annotated[int, typer.Option(help="As given to vLLM.", min=16)] = 64,
    kv_cache_dtype: Annotated[str, typer.Option(help="As given to vLLM's --kv-cache-dtype.")] = "auto",
) -> None:
    """Print how many requests fit a GPU's memory with every preset, without starting anything.

    All of them decode but one, which prefills. Activations and CUDA graphs take a share that vLLM measures when it
    starts and that is not known here: take the numbers for an upper bound, and compare the rows.
    """
    folder = find_model(model)
    shape = _shape_of(folder, 1 if kv_cache_dtype in EIGHT_BIT_CACHES else 2)
    taken = (
        _bytes_of("weights", weights) if weights else sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    )
    if not taken:
        raise ConfigurationError("weights: got none, allowed for a folder without safetensors: a size such as 16GiB")
    memory = int(_bytes_of("gpu_memory", gpu_memory) * gpu_memory_utilization) - taken
    if memory <= 0:
        raise ConfigurationError(f"gpu_memory: got {gpu_memory}, allowed: more than {taken / 2**30:.1f} GiB of weights")
    prompts = sorted({max(1, context // part) for part in (16, 4, 2, 1)})
    table = Table("preset", "tokens of cache", *(f"requests of {prompt:,}" for prompt in prompts))
    for preset in sorted(preset_names(), key=lambda name: (name != "dense", name)):
        config = resolve(None, preset)
        tables, num_blocks = _pool(config, shape, memory, block_size)
        fits = [str(requests_at_once(tables, num_blocks, prompt, block_size)) for prompt in prompts]
        table.add_row(preset, f"{num_blocks * block_size // len(tables):,}", *fits)
    console = Console()
    console.print(f"{folder.name}: {memory / 2**30:.1f} GiB for the KV cache, in blocks of {block_size} tokens")
    console.print(table)


def _pool(
    config: ResolvedConfig, shape: CacheShape, memory: int, block_size: int
) -> tuple[list[Retention | None], int]:
    """Returns what is kept by block table of a request, and the blocks of the pool that the tables share."""
    layer_bytes = shape.block_bytes(config, block_size)
    if config.compaction is None:
        return [None], memory // (layer_bytes * shape.layers)
    kept = list(dict.fromkeys(config.compaction.retention().of_layers(shape.layers)))
    return [*kept], memory // (layer_bytes * (shape.layers // len(kept)))


def _shape_of(folder: Path, itemsize: int) -> CacheShape:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads = int(config["num_attention_heads"])
        head_size = config.get("head_dim") or int(config["hidden_size"]) // heads
        kv_heads = config.get("num_key_value_heads") or heads
        return CacheShape(int(config["num_hidden_layers"]), int(kv_heads), int(head_size), itemsize)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        raise ConfigurationError(
            f"model: got {str(folder)!r}, allowed: a folder with a config.json that has num_hidden_layers, "
            "num_attention_heads and hidden_size"
        ) from None


def _bytes_of(field: str, text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?i?B|)", text)
    if match is None or match[2] not in _UNITS:
        raise ConfigurationError(f"{field}: got {text!r}, allowed: a size such as 80GiB")
    return int(float(match[1]) * _UNITS[match[2]])
