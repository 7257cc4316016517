"""The block about the gains of recipes: one measured row for each load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench.common.pages import Block, table
from bench.common.results import Row, read_run
from bench.pages.serving import H200, read_steps

_LONGEST = 131072
_WIDE = [H200 / "frontier" / f"decode_{name}.jsonl" for name in ("dense", "2048")]
_FP8 = [H200 / "decode" / f"{name}_fp8_cache.jsonl" for name in ("flash_attn", "unique")]
_BF16 = H200 / "decode" / "flash_attn_noise.jsonl"
_CAPACITY = H200 / "compaction" / "capacity_window.jsonl"
_PREFILL = H200 / "prefill" / "chunks_8k.jsonl"
_SERVE = H200 / "serve" / "unique_prefill.jsonl"


def recipe_gains() -> Block:
    """Dense attention and the backend of each recipe, with prompts of 128K tokens if measured."""
    rows = [*_decode(_WIDE, "`unique_wide`", (1, 6)), *_decode(_FP8, "`unique`, both with an fp8 cache", (12,))]
    rows += [*_cache_tokens(), *_capacity(), *_first_token()]
    headings = ["load on one H200", "unit", "dense", "plugin", "settings", "gain"]
    return Block(table(headings, rows), [*_WIDE, *_FP8, _BF16, _CAPACITY, _PREFILL, _SERVE])


def _decode(paths: list[Path], settings: str, batches: tuple[int, ...]) -> Iterator[list[str]]:
    dense, sparse = map(read_steps, paths)
    for batch in batches:
        times = [steps[_LONGEST, batch]["ms_per_token"] for steps in (dense, sparse)]
        load = f"{batch} request{'s' * (batch > 1)} with {_LONGEST:,} tokens"
        yield _line(load, "ms per token", times[0], times[1], settings, times[0] / times[1])


def _cache_tokens() -> Iterator[list[str]]:
    dense, sparse = (read_run(path).rows[0]["kv_cache_tokens"] for path in (_BF16, _FP8[1]))
    yield _line("the same memory", "tokens of cache", dense, sparse, "`unique` with an fp8 cache", sparse / dense)


def _capacity() -> Iterator[list[str]]:
    dense, sparse = _by_variant(_CAPACITY, "dense", "snapkv")
    load = f"{dense['concurrency']} clients, prompts of {dense['input_tokens']:,} tokens, answers of "
    load += f"{dense['output_tokens']:,}, cache of {dense['cache_tokens']:,}"
    for unit, key in (("requests at once", "running_mean"), ("output tokens per s", "output_tokens_per_second")):
        yield _line(load, unit, dense[key], sparse[key], "`snapkv`", sparse[key] / dense[key])


def _first_token() -> Iterator[list[str]]:
    unit, settings = "s to the first token", "`unique_prefill`"
    dense, sparse = _by_variant(_PREFILL, "flash_attn", "unique_prefill", context_tokens=_LONGEST)
    times = [row["seconds_median"] for row in (dense, sparse)]
    yield _line(f"1 prompt of {_LONGEST:,} tokens", unit, times[0], times[1], settings, times[0] / times[1])
    dense, sparse = _by_variant(_SERVE, "flash_attn", "unique_prefill", concurrency=4)
    times = [row["ttft_ms_median"] / 1e3 for row in (dense, sparse)]
    load = f"{dense['concurrency']} clients, prompts of {dense['input_tokens']:,} tokens"
    yield _line(load, unit, times[0], times[1], settings, times[0] / times[1])


def _by_variant(path: Path, *variants: str, **where: object) -> list[Row]:
    rows = [row for row in read_run(path).rows if row.get("measurement", "first_token") == "first_token"]
    found = [row for row in rows if all(row[key] == value for key, value in where.items())]
    return [next(row for row in found if row["variant"] == variant) for variant in variants]


def _line(load: str, unit: str, dense: float, sparse: float, settings: str, gain: float) -> list[str]:
    return [load, unit, _number(dense), _number(sparse), settings, f"{gain:.1f}x"]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
