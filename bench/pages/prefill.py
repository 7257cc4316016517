"""Blocks about the time to first token of engines with sparse prefill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.common.pages import Block, table
from bench.common.results import RESULTS, Row, read_rows

FOLDER = RESULTS / "h200" / "prefill"
ZIPVL = {"zipvl": FOLDER / "zipvl.jsonl", "zipvl_paper": FOLDER / "zipvl_paper.jsonl"}
DENSE = "FlashAttention 3"

Times = dict[tuple[Any, ...], dict[str, Row]]
"""Rows by measurement, and by the engine's name."""


def prefill_files() -> list[Path]:
    """The result files of `bench.serving prefill` by tokens of a step; empty if not measured."""
    return sorted(FOLDER.glob("chunks_*.jsonl"))


def engine_name(row: Row) -> str:
    """The engine of a row: its backend and its settings."""
    if row["attention_backend"] == "FLASH_ATTN":
        return _dense_name(row)
    return ", ".join([f"`{row['variant']}`", *_set(row["additional_config"])])


def _dense_name(row: Row) -> str:
    """The dense engine with the KV cache type of a row."""
    return DENSE if row["kv_cache_dtype"] == "auto" else f"{DENSE}, {row['kv_cache_dtype']}"


def _set(config: object, name: str = "") -> Iterator[str]:
    """The leaves of a configuration, such as `density 0.05`."""
    if isinstance(config, dict):
        for key, value in config.items():
            yield from _set(value, key)
    elif config is not None:
        yield f"{name} {config}"


def read_times(paths: Sequence[Path], measurement: str, *keys: str) -> Times:
    """The rows of a kind of measurement by some of their columns. If files repeat a row, the last one counts."""
    times: Times = {}
    for row in read_rows(paths):
        if row["measurement"] == measurement and "seconds_median" in row:
            times.setdefault(tuple(row[key] for key in keys), {})[engine_name(row)] = row
    return dict(sorted(times.items()))


def engines(*all_times: Times) -> list[str]:
    """The engines of some rows, dense attention first."""
    names = dict.fromkeys(name for times in all_times for found in times.values() for name in found)
    return sorted(names, key=lambda name: not name.startswith(DENSE))


def prefill_gpu() -> Block:
    """Time to first token by context, then throughput with many prompts at once; empty if not measured."""
    paths = prefill_files()
    loads = read_times(paths, "load", "context_tokens", "requests", "chunk_tokens")
    parts = [_first_tokens(paths)]
    if loads:
        names = engines(loads)
        rows = []
        for (context, requests, chunk), found in loads.items():
            cells = (
                f"{found[name]['total_tokens_per_second']:,.0f} / {found[name]['output_tokens_per_second']:,.1f}"
                if name in found
                else "-"
                for name in names
            )
            rows.append([f"{requests} x {context:,}", f"{chunk:,}", *cells])
        parts.append(table(["prompts at once", "tokens of a step", *(f"{name}, tokens/s" for name in names)], rows))
    return Block("\n\n".join(filter(None, parts)), paths)


def zipvl_gpu() -> Block:
    """Time to first token and throughput with ZipVL, over those of dense attention in the same files.

    Each file of `ZIPVL` calls its form `zipvl`. The others prefill in one chunk, and say what was kept.
    """
    one_chunk = sorted(FOLDER.glob("one_chunk*.jsonl"))
    groups: list[tuple[str | None, list[Path]]] = [(f"`{form}`", [path]) for form, path in ZIPVL.items()]
    found = [
        (form, read_times(paths, "first_token", "chunk_tokens", "context_tokens"))
        for form, paths in (*groups, (None, one_chunk))
    ]
    contexts = sorted({context for _, times in found for _, context in times})
    loads = read_times(one_chunk, "load", "chunk_tokens", "requests", "context_tokens")
    asked = sorted({(requests, context) for _, requests, context in loads})
    rows = []
    for form, times in found:
        for chunk in sorted({chunk for chunk, _ in times}):
            of_chunk = {context: each for (size, context), each in times.items() if size == chunk}
            for name in engines(of_chunk):
                if name == DENSE:
                    continue
                shares = [each[name].get("prefill_density") for each in of_chunk.values() if name in each]
                kept = "" if shares[-1] is None else f"{shares[-1]:.0%}"
                cells = [_over_dense(of_chunk.get(context, {}), name) for context in contexts]
                # Files of one form call it `zipvl`, as those of one chunk do.
                of_load = [{} if form else loads.get((chunk, *load), {}) for load in asked]
                rows.append([form or name, f"{chunk:,}", kept, *cells, *(_over_dense(each, name) for each in of_load)])
    heads = ["form", "tokens of a step", "kept", *(f"{context:,}, s" for context in contexts)]
    heads += [f"{requests} x {context:,}, s" for requests, context in asked]
    return Block(table(heads, rows), [*ZIPVL.values(), *one_chunk])


def _first_tokens(paths: Sequence[Path]) -> str:
    """A table of times to first token by prompt and engine; empty if not measured."""
    keys = ("context_tokens", "chunk_tokens")
    alone, hits = (read_times(paths, measurement, *keys) for measurement in ("first_token", "prefix_hit"))
    if not alone and not hits:
        return ""
    names = engines(alone, hits)
    rows = [_line(f"{context:,}", chunk, found, names) for (context, chunk), found in alone.items()]
    for (context, chunk), found in hits.items():
        cached = next(iter(found.values()))["cached_tokens"]
        rows.append(_line(f"{context:,}, {cached:,} of them cached", chunk, found, names))
    return table(["prompt", "tokens of a step", *(f"{name}, s" for name in names)], rows)


def _line(prompt: str, chunk: int, found: dict[str, Row], names: list[str]) -> list[str]:
    return [prompt, f"{chunk:,}", *(_over_dense(found, name) for name in names)]


def _over_dense(found: dict[str, Row], name: str) -> str:
    """The seconds of an engine, and how many times faster than dense attention with the same KV cache type it is."""
    if name not in found:
        return "-"
    seconds, dense = found[name]["seconds_median"], _dense_name(found[name])
    ratio = f" ({found[dense]['seconds_median'] / seconds:.2f}x)" if dense in found and name != dense else ""
    return f"{seconds:.2f}{ratio}"
