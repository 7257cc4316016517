"""The command `vllm-sparse plan`: prints how many requests fit a GPU's memory. Starts no server."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.table import Column, Table
from sparse_kernels.limits import MAX_GROUP, MAX_K

from vllm_sparse_plugin.config import KEY, ResolvedConfig, preset_names, read_trained_section, resolve
from vllm_sparse_plugin.config.account import PREFERRED_BLOCK, ModelKeys
from vllm_sparse_plugin.config.offload import bytes_of
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.evictions import Retention, requests_at_once
from vllm_sparse_plugin.notices import EIGHT_BIT_CACHES
from vllm_sparse_plugin.offload.refusals import refuse_settings
from vllm_sparse_plugin.requests.arguments import largest_selection
from vllm_sparse_plugin.tools.arguments import (
    AdditionalConfig,
    AttentionBackend,
    ModelFolder,
    expect_cache_dtype,
    find_model,
    find_preset,
    model_shape,
    parse_additional_config,
)
from vllm_sparse_plugin.tools.endings import open_console, say
from vllm_sparse_plugin.tools.models import name_of, read_config, text_config

_KERNEL_BLOCK = 16
"""FlashAttention needs blocks of a multiple of this many tokens."""
_FIELDS_OF_OTHER_LAYERS = (
    "sliding_window", "attention_chunk_size", "full_attention_interval", "full_attn_idxs", "attn_layer_period"
)  # fmt: skip
"""Fields of a config.json that does not name the kind of each layer, such as that of Gemma 3, Mistral or Jamba."""
_GIVEN = "as given"
"""Row of the settings in `--additional-config`."""
_MOST_TOKENS = 1 << 30
_BUS_BYTES_PER_SECOND = 48e9
"""What decode kernels read from host memory over PCIe 5 with 16 lanes."""


class CacheShape(NamedTuple):
    """Shape of a model's KV cache."""

    layers: int
    heads: int
    """Query heads."""
    kv_heads: int
    head_size: int
    itemsize: int
    """Bytes of an element."""

    def block_size(self, config: ResolvedConfig, given: int | None) -> int:
        """Return the tokens of a block: `given`, or the size that a server chooses.

        Raises:
            ConfigurationError: `given` does not hold whole pages and statistics.
        """
        layout = config.statistics_layout(self.head_size, self.itemsize)
        pages = config.selector.page_size if config.selector else 1
        multiple = math.lcm(_KERNEL_BLOCK, pages, layout.unit_tokens if layout else 1)
        if given is None:
            return math.lcm(PREFERRED_BLOCK, multiple)
        if given % multiple:
            raise ConfigurationError(f"block_size: got {given}, allowed: a multiple of {multiple}")
        return given

    def block_bytes(self, config: ResolvedConfig, block_size: int) -> int:
        """Return the bytes of a block of one layer, page statistics included."""
        rows, layout = block_size, config.statistics_layout(self.head_size, self.itemsize)
        if layout is not None:
            rows += layout.rows(block_size)
        return rows * self.kv_heads * 2 * self.head_size * self.itemsize


def plan(
    model: ModelFolder = None,
    gpu_memory: Annotated[str, typer.Option(help="GPU memory, such as 80GiB.")] = "80GiB",
    gpu_memory_utilization: Annotated[float, typer.Option(help="As for vLLM.")] = 0.92,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory for offloading, unless the settings name it. Default: 128GiB.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Memory of the weights. Default: the size of the safetensors files.")
    ] = None,
    context: Annotated[int, typer.Option(help="Longest prompt in tokens.", min=4, max=_MOST_TOKENS)] = 32768,
    block_size: Annotated[
        int | None, typer.Option(help="As for vLLM. Default: as a server chooses.", min=1, max=_MOST_TOKENS)
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="As for vLLM.")] = "auto",
    max_num_seqs: Annotated[
        int,
        typer.Option(
            help="As for vLLM; counts with compaction.every and lossless.score_every alone.", min=1, max=_MOST_TOKENS
        ),
    ] = 256,
    attention_backend: AttentionBackend = "unique",
    additional_config: AdditionalConfig = "{}",
) -> None:
    """Print how many requests fit a GPU's memory with each preset. Starts no server.

    The numbers are upper bounds: a server measures the memory of activations and CUDA graphs when it starts. One
    request prefills, the others decode. Presets that are refused or with which no request fits have no row.

    Keys read and keys kept are shares of the longest prompt, in the first decode step after it. "?" means known only
    at run time. `--additional-config` adds the row "as given" for `--attention-backend` with these settings.
    """
    folder = find_model(model)
    preset = find_preset(attention_backend)
    settings = parse_additional_config(additional_config).get(KEY)
    shape = _shape_of(folder, kv_cache_dtype)
    if not 0 < gpu_memory_utilization <= 1:
        raise ConfigurationError(f"gpu_memory_utilization: got {gpu_memory_utilization}, allowed: more than 0, up to 1")
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    taken = _bytes_of("weights", weights) if weights else files
    if not taken:
        raise ConfigurationError("weights: got none, allowed for a folder without safetensors: a size such as 16GiB")
    memory = int(_bytes_of("gpu_memory", gpu_memory) * gpu_memory_utilization) - taken
    if memory <= 0:
        raise ConfigurationError(f"gpu_memory: got {gpu_memory}, allowed: more than {taken / 2**30:.1f} GiB of weights")
    trained = read_trained_section(folder)
    if settings is not None:
        resolve(settings, preset, trained)
    prompts = sorted({max(1, context // part) for part in (16, 4, 1)})
    table = Table(
        *(Column(heading, no_wrap=True) for heading in ("preset", "keys\nread", "keys\nkept", "tokens\nof cache")),
        *(f"{prompt:,}" for prompt in prompts), title="Requests that fit, by tokens of their prompts",
    )  # fmt: skip
    host, notes, fitting_none = _bytes_of("host_memory", host_memory or "128GiB"), [*_warnings(folder, context)], []
    blocks: dict[int, list[str]] = {}
    rows = [(_GIVEN, settings, preset)] if settings is not None else []
    rows += [(name, None, name) for name in sorted(preset_names(), key=lambda name: (name != "dense", name))]
    for name, value, of_preset in rows:
        try:
            config = resolve(value, of_preset, trained)
            _expect_served(config, shape)
            tokens = shape.block_size(config, block_size)
            if config.offload is None:
                tables, num_blocks = _pool(config, shape, memory, tokens, max_num_seqs)
            else:
                room = config.offload.bytes or host
                num_blocks, note = _offloaded(config, shape, memory, room, tokens, context, max_num_seqs)
                tables = [None]
                notes.append(f"{name}: {note}")
        except ConfigurationError as error:
            notes.append(f"{name} is refused: {error}")
            continue
        fits = [requests_at_once(tables, num_blocks, prompt, tokens) for prompt in prompts]
        if not fits[-1] and name not in (_GIVEN, "dense"):
            fitting_none.append(name)
            continue
        blocks.setdefault(tokens, []).append(name)
        keys = ModelKeys(config, shape.layers, shape.head_size, tokens, shape.itemsize)
        shares = keys.shares(context)
        read, cached = f"{shares.read:.1%}" if keys.by_length else "?", f"{num_blocks * tokens // len(tables):,}"
        table.add_row(name, read, f"{shares.kept:.1%}", cached, *map(str, fits))
    if fitting_none:
        notes.append(f"No request of {context:,} tokens fits with {', '.join(fitting_none)}.")
    sizes = sorted(blocks, key=lambda size: -len(blocks[size]))
    others = "".join(f"; {size} with {', '.join(blocks[size])}" for size in sizes[1:])
    notes.append(f"Blocks of {sizes[0]} tokens{others}.")
    console = open_console()
    say(console, f"{name_of(folder)}: {memory / 2**30:.1f} GiB for the KV cache, {shape.itemsize * 8} bits an element")
    console.print(table)
    for sentence in notes:
        say(console, sentence)


def _offloaded(
    config: ResolvedConfig, shape: CacheShape, memory: int, host: int, block_size: int, context: int, running: int
) -> tuple[int, str]:
    """Return the number of blocks in host memory, and a sentence on both memories and the time of a decode step."""
    assert config.offload is not None
    assert config.selector is not None
    token = 2 * shape.layers * shape.kv_heads * shape.head_size * shape.itemsize
    block = token * block_size
    of_block = shape.layers * shape.block_bytes(config, block_size) - block  # page statistics, on the GPU
    buffers = 2 * -(-context // block_size) * block // shape.layers
    if buffers >= memory:
        raise ConfigurationError(f"context: got {context}, allowed: less, since two buffers of it must fit the GPU")
    num_blocks, most = host // block, (memory - buffers) // of_block if of_block else host
    if num_blocks > most and config.offload.bytes is not None:
        allowed = math.floor(10 * most * block / 2**30) / 10
        raise ConfigurationError(
            f"{KEY}.offload.host_memory: got {config.offload.host_memory}, whose page statistics take "
            f"{num_blocks * of_block / 2**30:.1f} GiB of GPU memory, allowed: up to {allowed}GiB"
        )
    num_blocks = min(num_blocks, most)
    statistics, selected = num_blocks * of_block, config.selector.budget_pages * config.selector.page_size * token
    # Selections in pieces are read where they are.
    in_pieces = largest_selection(config) > MAX_K or shape.heads // shape.kv_heads > MAX_GROUP
    wanted = 0 if in_pieces else int(config.offload.hot_pages * running * selected)
    copies = min(memory - buffers - statistics, wanted)
    gib = [f"{size / 2**30:.1f} GiB" for size in (num_blocks * block, statistics, buffers, copies)]
    milliseconds = selected / _BUS_BYTES_PER_SECOND * 1e3
    return num_blocks, (
        f"{gib[0]} of host memory; on the GPU {gib[1]} of page statistics, {gib[2]} of buffers for prompts and "
        f"{gib[3]} of copies of pages; a request adds up to {milliseconds:.1f} ms to a step (no page has a copy), "
        f"{milliseconds / 10:.2f} ms if nine of ten have one"
    )


def _expect_served(config: ResolvedConfig, shape: CacheShape) -> None:
    """Refuse a configuration that a server refuses for this cache dtype, or beside offloading."""
    for field, got, allowed in refuse_settings(config, on_gpu=True) if config.offload is not None else ():
        raise ConfigurationError(f"{field}: got {got}, allowed: {allowed}")
    if shape.itemsize == 1 and config.rolling_window is not None:
        raise ConfigurationError(
            f"{KEY}.compaction.positions: got rolling with a KV cache of 8 bits, allowed: text with it"
        )


def _pool(
    config: ResolvedConfig, shape: CacheShape, memory: int, block_size: int, running: int
) -> tuple[list[Retention | None], int]:
    """Return the retention of each block table of a request, and the number of blocks that the tables share."""
    layer_bytes = shape.block_bytes(config, block_size)
    memory -= config.kept_page_bytes(shape.layers * shape.kv_heads, running)
    if config.compaction is not None:
        # Queries have 16 bits where keys have fewer.
        memory -= running * config.compaction.query_bytes(shape.layers, shape.heads, shape.head_size, 2)
    if memory <= 0:
        keep = "drafts keep pages" if config.compaction is None else "evictions keep queries"
        raise ConfigurationError(f"max_num_seqs: got {running}, allowed: fewer, since {keep} of each")
    if config.compaction is None:
        return [None], memory // (layer_bytes * shape.layers)
    kept = list(dict.fromkeys(config.compaction.retention().of_layers(shape.layers)))
    return [*kept], memory // (layer_bytes * (shape.layers // len(kept)))


def _shape_of(folder: Path, cache_dtype: str) -> CacheShape:
    """Read the shape of the cache from a config.json."""
    shape = model_shape(folder)
    if cache_dtype == "auto":
        # A quantised checkpoint may ask for one.
        quantization = read_config(folder).get("quantization_config")
        scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, Mapping) else None
        if isinstance(scheme, Mapping):
            kind, bits = scheme.get("type"), scheme.get("num_bits")
            cache_dtype = "fp8" if (kind, bits) == ("float", 8) else f"{kind} of {bits} bits"
    expect_cache_dtype(cache_dtype)
    return CacheShape(*shape[1:], itemsize=1 if cache_dtype in EIGHT_BIT_CACHES else 2)


def _warnings(folder: Path, context: int) -> Iterator[str]:
    """Yield sentences on a context beyond the model's, and on layers that do not attend to the whole context."""
    config, longest = text_config(read_config(folder)), model_shape(folder).longest
    if longest and context > longest:
        yield f"A context of {context:,} tokens is beyond the model's {longest:,}; a server refuses it."
    # Some hybrids name their layers, others have a letter for each.
    named = (config.get(name) for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"))
    kinds = next((kinds for kinds in named if kinds and isinstance(kinds, (list, str))), [])
    others = [kind for kind in kinds if kind not in ("full_attention", "attention", "*")]
    which = f"{len(others)} of {len(kinds)} layers" if others else None
    field = next(filter(config.get, _FIELDS_OF_OTHER_LAYERS), None)
    # Qwen2 names a window that it does not use.
    if not kinds and field and (field != "sliding_window" or config.get("use_sliding_window") is not False):
        which = f"the layers of {field}"
    if which:
        yield (
            f"{which} do not attend to the whole context; the numbers take all layers to do so, so they are no upper "
            "bounds"
        )


def _bytes_of(field: str, text: str) -> int:
    # Without a unit a size would be bytes, which nobody means.
    size = None if text.strip().isdigit() else bytes_of(text)
    if size is None:
        raise ConfigurationError(f"{field}: got {text!r}, allowed: a size such as 80GiB")
    return size
