"""Blocks about kernels on a GPU and their rivals."""

from __future__ import annotations

from pathlib import Path

from bench.common.options import size_text
from bench.common.pages import Block, table, wrap
from bench.common.results import RESULTS, Row, read_run

_FOLDER = RESULTS / "h200" / "kernels"
STOP = _FOLDER / "stop.jsonl"
BUDGETS = _FOLDER / "budgets.jsonl"
LEVELED = _FOLDER / "leveled.jsonl"
ONE_HEAD = _FOLDER / "one_head.jsonl"
TOKENS = _FOLDER / "tokens.jsonl"
"""ZipVL's prefill and its parts, one layer."""
WHOLE, COUNTERS = (RESULTS / "h100" / "kernels" / f"{name}.jsonl" for name in ("whole", "counters"))
RIVALS = ("FlashAttention 3", "FlashInfer")
_STOP_CONTEXTS = ("8K", "32K", "128K")

_Times = dict[tuple[str, str], dict[str, Row]]
"""Rows by operation and case, and by provider."""


def read_times(path: Path) -> _Times:
    """The rows of a result file by operation and case, and by provider."""
    times: _Times = {}
    for row in read_run(path).rows:
        times.setdefault((row["op"], row["case_name"]), {})[row["provider"]] = row
    return times


def kernels_gpu() -> Block:
    """The attention of a decode step compared with dense attention, with four query heads per KV head."""
    path, rows = _FOLDER / "all.jsonl", []
    times = read_times(path)
    for batch in (1, 32):
        for context in ("2K", "32K", "128K"):
            found = times["decode", f"{batch}q1s{context} g4"]
            us = {name: row["warm"]["median_us"] for name, row in found.items()}
            ours = us["unique"]
            others = (f"{us[rival]:.1f} ({us[rival] / ours:.1f}x)" for rival in RIVALS)
            rows.append([context, str(batch), f"{ours:.1f}", *others])
    return Block(table(["context", "requests", "`unique`, quarters, µs", *RIVALS], rows), [path])


def kernels_default() -> Block:
    """The same with the default budget, and on a worker with one KV head."""
    rows = []
    for path, heads, contexts, batches in (
        (LEVELED, "8", ("8K", "32K", "128K"), (1, 32)),
        (ONE_HEAD, "1", ("128K",), (1, 8)),
    ):
        times = read_times(path)
        for batch in batches:
            for context in contexts:
                found = times["decode", f"{batch}q1s{context} g4"]
                ours, dense = (found[name]["warm"]["median_us"] for name in ("unique", RIVALS[0]))
                rows.append([context, str(batch), heads, f"{ours:.1f}", f"{dense:.1f} ({dense / ours:.1f}x)"])
    return Block(table(["context", "requests", "KV heads", "`unique`, µs", RIVALS[0]], rows), [LEVELED, ONE_HEAD])


def leveled() -> Block:
    """The attention of a decode step with flat records and in two levels."""
    times, rows = read_times(LEVELED), []
    for batch in (1, 8, 32):
        for context in ("32K", "128K"):
            flat, levels = (
                times["decode", f"{batch}q1s{context} g4{kind}"]["unique"]["cold"]["median_us"]
                for kind in ("", " leveled")
            )
            rows.append([f"{batch} x {context}", f"{flat:.1f}", f"{levels:.1f}", f"{levels / flat:.2f}"])
    return Block(table(["requests", "`quarters`, µs", "two levels, µs", "ratio"], rows), [LEVELED])


def budgets_by_request() -> Block:
    """The cost of separate budgets for the requests of a batch."""
    gaps = [
        by_request["warm"]["median_us"] / providers["unique, one for all"]["warm"]["median_us"] - 1
        for providers in read_times(BUDGETS).values()
        if "warm" in (by_request := providers["unique"])
    ]
    text = (
        f"Budgets by request change the time of a decode step's attention by {min(gaps):+.1%} to {max(gaps):+.1%}, "
        f"measured for {len(gaps)} batches of 1 to 32 requests with 2K to 512K tokens."
    )
    return Block(wrap(text, ""), [BUDGETS])


def zipvl_layer() -> Block:
    """One layer of ZipVL's prefill, and its parts, compared with dense attention."""
    names = "zipvl", "zipvl_paper", "part: probe", "part: choice"
    rows = []
    for providers in read_times(TOKENS).values():
        cells = (f"{cold_ms(providers, name):.2f}" for name in (RIVALS[0], *names))
        rows.append([size_text(providers[RIVALS[0]]["case"]["context"]), *cells])
    return Block(table(["prompt", RIVALS[0], "`zipvl`", "`zipvl_paper`", "probe", "choice"], rows), [TOKENS])


def cold_ms(providers: dict[str, Row], name: str) -> float:
    """Milliseconds of a provider, cold."""
    return float(providers[name]["cold"]["median_us"]) / 1e3


def stop_gpu() -> Block:
    """The time of dense attention relative to attention that may stop, and the cost of the stop tests."""
    rows = []
    for batch in (1, 8, 32):
        costs = stop_costs(batch)
        gains = (f"{gain:.2f}" for gain in stop_gains(batch))
        rows.append([str(batch), *gains, f"{min(costs):.1%} to {max(costs):.1%}"])
    headings = ["requests", *(f"{context} tokens" for context in _STOP_CONTEXTS), "cost of the stop tests"]
    return Block(table(headings, rows), [STOP])


def stop_gains(batch: int) -> list[float]:
    """The time of dense attention relative to attention that may stop, by context."""
    return [found[RIVALS[0]] / found["art"] for found in _stop_times(batch)]


def stop_costs(batch: int) -> list[float]:
    """The time that the stop tests add, by context."""
    return [found["art that never stops"] / found["art, endless patience"] - 1 for found in _stop_times(batch)]


def _stop_times(batch: int) -> list[dict[str, float]]:
    times = read_times(STOP)
    return [
        {name: row["cold"]["median_us"] for name, row in times["stop", f"{batch}q1s{context} g4"].items()}
        for context in _STOP_CONTEXTS
    ]


def whole() -> Block:
    """Requests that attend to everything, beside FlashAttention 3."""
    times, rows = read_times(WHOLE), []
    for batch in (1, 4, 16):
        for context in ("8K", "32K", "128K"):
            found = times["whole", f"{batch}q1s{context} g4"]
            ours, dense = (found[name]["cold"]["median_us"] for name in ("unique", RIVALS[0]))
            rows.append([context, str(batch), f"{ours:.1f}", f"{dense:.1f}", f"{dense / ours:.2f}x"])
    return Block(table(["context", "requests", "`unique`, µs", f"{RIVALS[0]}, µs", "ratio"], rows), [WHOLE])


def counters() -> Block:
    """What the longest kernel of a call reads from memory, by hardware counters."""
    calls: dict[tuple[str, str], list[Row]] = {}
    for row in read_run(COUNTERS).rows:
        calls.setdefault((row["op"], row["case_name"]), []).append(row)
    lines = []
    for (op, case), found in calls.items():
        longest = max(found, key=lambda row: row["nanoseconds"])
        name = f"`{longest['name']}`" if longest["name"].isidentifier() else RIVALS[0]
        megabytes = (f"{number / 1e6:.1f}" for number in (longest["read_bytes"], longest["bytes"]))
        share = f"{longest['bandwidth_percent']:.0f}%"
        lines.append([f"`{op}` {case}", name, *megabytes, f"{longest['nanoseconds'] / 1e3:.0f}", share])
    heads = ["call", "longest kernel", "MB read", "MB that the call needs", "µs", "of the bandwidth"]
    return Block(table(heads, lines), [COUNTERS])
