"""Blocks about compaction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from types import MappingProxyType

from bench.common.pages import Block, table, wrap
from bench.common.results import RESULTS, Row, read_rows, read_run

SOAK = RESULTS / "h100" / "soak" / "evicting.jsonl"
WINDOW = RESULTS / "h200" / "compaction" / "window_decoding_8b.jsonl"
CAPACITY_ZIPVL = RESULTS / "h200" / "compaction" / "capacity_zipvl.jsonl"
"""ZipVL's prefill and eviction in a window of a busy server."""
_NOTHING = "Nothing yet."
_TURNS = ("first", "second", "second, protected", "second, a new request")
"""The turns of `bench.quality turns`."""


def users() -> Block:
    """Requests that run at once, and throughput, over whole runs by cache, clients and variant."""
    paths = [path for path in _files("capacity") if any(map(_is_whole, read_run(path).rows))]
    rows = list(filter(_is_whole, read_rows(paths)))
    rows.sort(key=lambda row: (row["cache_tokens"] or float("inf"), row["concurrency"], row["input_tokens"]))
    lines = [
        [
            "no limit" if row["cache_tokens"] is None else f"{row['cache_tokens']:,} tokens",
            f"{row['concurrency']}", f"`{row['variant']}`", f"{row['running_most']}",
            f"{row['output_tokens_per_second']:,.0f}",
        ]
        for row in rows
    ]  # fmt: skip
    headings = ["KV cache", "clients", "backend", "requests at once", "output tokens per s"]
    return Block(table(headings, lines), paths) if paths else Block(_NOTHING)


def _is_whole(row: Row) -> bool:
    return "window_seconds" not in row


def speed() -> Block:
    """Requests that run at once, and the times of a prefill and a decode step."""
    return _joined(users(), times())


def checks() -> Block:
    """Checks that blocks are not read after they were given back."""
    return _joined(identical(), soak())


def _joined(*blocks: Block) -> Block:
    return Block("\n\n".join(block.text for block in blocks), [path for block in blocks for path in block.sources])


def soak() -> Block:
    """Results of many requests to a server with compaction."""
    end = read_run(SOAK).rows[-1]
    text = (
        f"{end['clients']} clients sent {end['answers'] + end['hung_up']:,} requests in {end['seconds'] / 60:.0f} "
        f"minutes and abandoned {end['hung_up']:,} of them. The server preempted requests {end['preemptions']:,.0f} "
        f"times. {end['parted']} of {end['answers']:,} answers differ from those asked alone. {len(end['faults'])} "
        f"requests failed. At the end {end['requests_running']:.0f} requests ran, and "
        f"{end['kv_cache_usage']:.1%} of the cache was in use."
    )
    return Block(wrap(text, ""), [SOAK])


def times() -> Block:
    """The time that compaction adds to a prefill, and to requests that decode at the same time."""
    paths = _files("time")
    rows = read_rows(paths)
    if not rows:
        return Block(_NOTHING)
    ((context, running),) = {(row["context_tokens"], row["running"]) for row in rows}
    took = [f"{row['prefill_seconds']:.2f} s and {row['step_ms']:.1f} ms (`{row['variant']}`)" for row in rows]
    text = f"A prefill of {context:,} tokens, and steps of {running} requests beside it: {', '.join(took)}."
    return Block(wrap(text, ""), paths)


def identical() -> Block:
    """Number of answers equal to dense attention's if the budget holds the whole prompt."""
    paths = _files("identical")
    rows = read_rows(paths)
    backends = ", ".join(f"`{name}`" for name in dict.fromkeys(row["variant"] for row in rows))
    text = (
        f"With a budget that holds the whole prompt, {sum(row['identical'] for row in rows)} of "
        f"{sum(row['prompts'] for row in rows)} answers of needle-8m equal those of dense attention ({backends})."
    )
    return Block(wrap(text, ""), paths) if paths else Block(_NOTHING)


def decoded() -> Block:
    """Next tokens and loss beside dense attention, of methods that evict while a text is decoded."""
    paths, lines = _files("decoded"), []
    rows = read_rows(paths)
    for setting in dict.fromkeys(row["setting"] for row in rows):
        found = [row for row in rows if row["setting"] == setting]
        kept, same, nats = (mean(row[name] for row in found) for name in ("key_kept_share", "agreement", "nll"))
        name = "dense, in other batches" if setting == "dense-again" else f"`{setting}`"
        lines.append([name, f"{kept:.0%}", f"{same:.1%}", f"{nats:.3f}"])
    headings = ["method", "tokens kept", "same next token as dense", "more nats per token"]
    return Block(table(headings, lines), paths) if paths else Block(_NOTHING)


def decoding() -> Block:
    """Users and speed of short prompts with long outputs, of methods that evict while requests decode."""
    paths = _files("decoding")
    lines = [
        [
            f"`{row['variant']}`", f"{row['running_mean']:.0f}", f"{row['output_tokens_per_second']:,}",
            f"{row['step_ms_median']:.1f}", f"{row['step_ms_p99']:.0f}", f"{row['step_ms_max']:.0f}",
        ]
        for row in read_rows(paths)
    ]  # fmt: skip
    headings = [
        "backend or method", "requests at once", "output tokens per s", "median step, ms", "99th percentile", "longest"
    ]  # fmt: skip
    return Block(table(headings, lines), paths) if paths else Block(_NOTHING)


def window() -> Block:
    """The same load, measured for some seconds of a busy server."""
    return _window(WINDOW)


def zipvl() -> Block:
    """The same with ZipVL's prefill and eviction, and the answers that ended in the window."""
    return _window(CAPACITY_ZIPVL, {"completed": "finished in the window"})


def _window(path: Path, counts: Mapping[str, str] = MappingProxyType({})) -> Block:
    """Requests that run at once, and throughput; between them the headings of further columns by their names."""
    lines = [
        [
            f"`{row['variant']}`", f"{row['running_mean']:.0f}", *(str(row[name]) for name in counts),
            f"{row['output_tokens_per_second']:,.0f}",
        ]
        for row in read_run(path).rows
    ]  # fmt: skip
    headings = ["backend", "requests at once", *counts.values(), "output tokens per s"]
    return Block(table(headings, lines), [path])


def turns() -> Block:
    """Right answers to two questions about a document, of which compaction has seen the first."""
    paths, lines = _files("turns"), []
    rows = read_rows(paths)
    for variant in dict.fromkeys(row["variant"] for row in rows):
        right = {row["turn"]: f"{row['right']}/{row['questions']}" for row in rows if row["variant"] == variant}
        lines.append([f"`{variant}`", *(right.get(turn, "-") for turn in _TURNS)])
    return Block(table(["backend", *_TURNS], lines), paths) if paths else Block(_NOTHING)


def streams() -> Block:
    """Perplexity at the end of a long text read through a window, by model and window."""
    paths, parts = _files("stream"), []
    for path in paths:
        run = read_run(path)
        last = [f"{row['perplexity'][-1]:.2f} ({row['window']})" for row in run.rows]
        first = run.rows[0]
        tokens = len(first["perplexity"]) * first["part_tokens"]
        parts.append(
            f"{run.about['model']} reads {tokens:,} tokens through a window of {first['cache_tokens']:,}. Perplexity "
            f"of the last {first['part_tokens']:,}: {', '.join(last)}."
        )
    return Block(wrap(" ".join(parts), ""), paths) if paths else Block(_NOTHING)


def _files(study: str) -> list[Path]:
    """Result files of a study on all machines."""
    return sorted(RESULTS.glob(f"*/compaction/{study}_*.jsonl"))
