"""Blocks about kernels on a GPU, each beside its rivals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.common.options import size_text
from bench.common.pages import Block, table, wrap
from bench.common.results import RESULTS, Row, read_run

_FOLDER = RESULTS / "h200" / "kernels"
BUDGETS = _FOLDER / "budgets.jsonl"
COVERAGE = _FOLDER / "coverage.jsonl"
_RIVALS = ("FlashAttention 3", "FlashInfer")

_Times = dict[tuple[str, str], dict[str, Row]]
"""Rows by operation and case, and by provider."""


def _read_times(path: Path) -> _Times:
    times: _Times = {}
    for row in read_run(path).rows:
        times.setdefault((row["op"], row["case_name"]), {})[row["provider"]] = row
    return times


def kernels_gpu() -> Block:
    """A decode step, selection and scoring beside their rivals on a GPU."""
    path = _FOLDER / "all.jsonl"
    times = _read_times(path)

    def line(op: str, case: str, rivals: list[str]) -> list[str]:
        here = times[op, case]
        ours = here["unique"]["warm"]["median_us"]
        others = (here[rival]["warm"]["median_us"] for rival in rivals)
        return [case, f"{ours:.1f}", *(f"{other:.1f} ({other / ours:.1f}x)" for other in others)]

    rivals = ["flashinfer.top_k", "torch.topk"]
    cases = [f"{rows} x {pages}" for rows in (8, 64, 256) for pages in ("1K", "4K", "16K", "64K")]
    topk = table(["rows x pages, k = 64", "ours, µs", *rivals], [line("topk", case, rivals) for case in cases])
    scores = [line("score", f"{case} g4 int8", ["three launches"]) for case in ("1q1s128K", "8q1s32K", "32q1s128K")]
    for cells, case in zip(scores, ("1q1s128K", "8q1s32K", "32q1s128K"), strict=True):
        cells.append(f"{times['score', f'{case} g4 int8']['unique']['share_of_read_bandwidth']['warm']:.0%}")
    headings = ["requests and context, int8 means", "ours, µs", "three launches", "of read bandwidth"]
    named = (f"{batch}q1s{context} g4" for batch in (1, 8, 32) for context in ("2K", "8K", "32K", "128K", "512K"))
    steps = [step for case in named if (step := _step(times, case))]
    ours = ("`unique`, quarters, µs", "`unique`, int8, µs")
    decodes = table(["requests and context", *ours, *_RIVALS], steps)
    return Block("\n\n".join([decodes, topk, table(headings, scores)]), [path])


def _step(times: _Times, case: str) -> list[str] | None:
    """Cache write, statistics, scores, selection and attention beside dense attention; None if it was not measured."""
    quarters, means = (times.get(("decode", name), {}) for name in (case, f"{case} int8"))
    if not all("warm" in providers.get("unique", {}) for providers in (quarters, means)):
        return None
    large, small = (providers["unique"]["warm"]["median_us"] for providers in (quarters, means))
    cells = [case.removesuffix(" g4"), f"{large:.1f}", f"{small:.1f}"]
    for rival in _RIVALS:
        both = [providers.get(rival, {}).get("warm", {}).get("median_us") for providers in (quarters, means)]
        cells.append(
            "-" if None in both else f"{both[0]:.1f} ({both[0] / large:.1f}x), {both[1]:.1f} ({both[1] / small:.1f}x)"
        )
    return cells


def kernels_budgets() -> Block:
    """Sparse attention of long contexts and of larger budgets beside dense attention, and beside itself in pieces."""
    paths = [_FOLDER / f"{name}.jsonl" for name in ("budget_64", "budget_256", "long")]
    rows = []
    for path in paths:
        geometry = read_run(path).about["geometry"]
        for (_, case), providers in _read_times(path).items():
            us = {name: row["warm"]["median_us"] for name, row in providers.items()}
            ours = us["unique"]
            others = (f"{us[rival]:.1f} ({us[rival] / ours:.1f}x)" for rival in ("in pieces", "FlashAttention 3"))
            bandwidth = f"{providers['unique']['share_of_read_bandwidth']['warm']:.0%}"
            tokens = f"{geometry['k'] * geometry['page_size']:,}"
            rows.append([case.removesuffix(" g4"), tokens, f"{ours:.1f}", *others, bandwidth])
    headings = ["requests and context", "budget, tokens", "`unique`, quarters, µs"]
    headings += ["in pieces", "FlashAttention 3", "of read bandwidth"]
    return Block(table(headings, rows), paths)


def budgets_by_request() -> Block:
    """What it takes that each request of a batch has a budget of its own."""
    text = (
        "**What it takes.** Attention of a decode step where all requests have one budget, and where the same one is "
        "said for each (`python -m bench.kernels run --only budgets`). `8q1s32K` is eight requests with contexts of "
        "32K tokens:"
    )
    ways = {"unique": "by request, µs", "unique, room for no more": "by request, room for no more"}
    return _beside_one_budget(text, BUDGETS, ways)


def coverage_cost() -> Block:
    """What it takes to count the pages of a coverage before they are read."""
    text = (
        "**What it takes.** Attention of a decode step with a budget, and with pages that are scored and counted for a "
        "coverage before as many are read (`python -m bench.kernels run --only coverage`). `8q1s32K` is eight requests "
        "with contexts of 32K tokens:"
    )
    return _beside_one_budget(text, COVERAGE, {"unique": "with a coverage, µs"})


def verification() -> Block:
    """Dense attention with several query tokens of each request at once, beside FlashAttention's; empty until it was
    measured."""
    path = _FOLDER / "verify.jsonl"
    if not path.exists():
        return Block("")
    rival, rows = _RIVALS[0], []
    for (_, case), providers in _read_times(path).items():
        us = {name: row["cold"]["median_us"] for name, row in providers.items() if "cold" in row}
        if us.keys() >= {"unique", rival}:
            ours, share = us["unique"], providers["unique"]["share_of_read_bandwidth"]["cold"]
            beside = f"{us[rival]:.0f} ({us[rival] / ours:.2f}x)"
            rows.append([case.removesuffix(" g4"), f"{ours:.0f}", beside, f"{share:.0%}"])
    headings = ["requests, tokens of each and context", "ours, µs", f"{rival}", "ours, of read bandwidth"]
    return Block(table(headings, rows), [path])


def _beside_one_budget(text: str, path: Path, ways: Mapping[str, str]) -> Block:
    """A text, and attention under one budget for all beside other ways to say how much is read.

    Args:
        text: what stands above the table.
        path: the result file.
        ways: headings by provider.
    """
    rows = []
    for (_, case), providers in _read_times(path).items():
        us = {name: row["warm"]["median_us"] for name, row in providers.items() if "warm" in row}
        fixed = us.get("unique, one for all")
        if fixed and us.keys() >= ways.keys():
            cells = (f"{us[name]:.1f} ({us[name] / fixed - 1:+.1%})" for name in ways)
            rows.append([case.removesuffix(" g4"), f"{fixed:.1f}", *cells])
    return Block(
        f"{wrap(text, '')}\n\n{table(['requests and context', 'one budget, µs', *ways.values()], rows)}", [path]
    )


def kernels_groups() -> Block:
    """A decode step of other group sizes beside dense attention."""
    path = _FOLDER / "groups.jsonl"
    rows = []
    for (op, case), providers in _read_times(path).items():
        if op == "decode" and "warm" in providers.get("unique", {}):
            ours = providers["unique"]["warm"]["median_us"]
            others = (providers.get(rival, {}).get("warm", {}).get("median_us") for rival in _RIVALS)
            cells = (f"{other:.1f} ({other / ours:.1f}x)" if other else "-" for other in others)
            step, _, group = case.partition(" g")
            rows.append([step, group, f"{ours:.1f}", *cells])
    headings = ["requests and context", "query heads of a KV head", "`unique`, quarters, µs", *_RIVALS]
    return Block(table(headings, rows), [path])


def routing_gpu() -> Block:
    """Attention of routed groups beside dense attention, and what asking costs."""
    path = _FOLDER / "route.jsonl"
    times = _read_times(path)
    rows = []
    for batch in (1, 4, 8, 32):
        for context in ("8K", "32K", "128K", "512K"):
            case = f"{batch}q1s{context} g4"
            us = {name: row["cold"]["median_us"] for name, row in times["route", case].items()}
            sparse = {name: row["cold"]["median_us"] for name, row in times["route_unique", case].items()}
            routed, dense = us["sinkrouter"], us["FlashAttention 3"]
            asking = us["sinkrouter, nothing skipped"] / us["sinkrouter, not routed"] - 1
            cells = f"{routed:.0f}", f"{dense:.0f} ({dense / routed:.2f}x)", f"{asking:+.1%}"
            rows.append([case.removesuffix(" g4"), *cells, f"{sparse['unique']:.0f} / {sparse['unique, routed']:.0f}"])
    headings = ["requests and context", "routed, µs", "FlashAttention 3", "cost of asking", "`unique` / routed, µs"]
    return Block(table(headings, rows), [path])


def stop_gpu() -> Block:
    """Attention that stops beside attention that tests in vain, and that cannot stop."""
    path = _FOLDER / "stop.jsonl"
    run = read_run(path)
    us = {(row["case_name"], row["provider"]): row["cold"]["median_us"] for row in run.rows}
    rows = []
    for case in dict.fromkeys(case for case, _ in us):
        art, vain, plain, split, dense = (
            us[case, name]
            for name in (
                "art", "art that never stops", "art, endless patience", "sinkrouter, not routed", "FlashAttention 3",
            )
        )  # fmt: skip
        cells = f"{art:.0f}", f"{vain:.0f}", f"{plain:.0f}", f"{vain / plain - 1:+.1%}", f"{split:.0f}"
        rows.append([case.removesuffix(" g4"), *cells, f"{dense:.0f} ({dense / art:.2f}x)"])
    headings = ["requests and context", "`art`, µs", "tests in vain", "patience without end", "cost of the tests"]
    return Block(table([*headings, "our split attention", "FlashAttention 3"], rows), [path])


def prefill_kernels() -> Block:
    """Sparse prefill of a chunk beside dense attention, and its parts; empty until it was measured."""
    path = _FOLDER / "prefill.jsonl"
    if not path.exists():
        return Block("")
    ms: dict[str, dict[str, float]] = {}
    for row in read_run(path).rows:
        if row["op"] == "prefill" and "cold" in row:
            case = f"{size_text(row['case']['chunk'])} of {size_text(row['case']['context'])}"
            ms.setdefault(case, {})[row["provider"]] = row["cold"]["median_us"] / 1e3
    rival, part = _RIVALS[0], "part: "
    names = list(dict.fromkeys(name for times in ms.values() for name in times))
    wholes = [name for name in names if name.startswith("unique")]
    parts = [name for name in names if name.startswith(part)]
    rows = []
    for case, times in ms.items():
        dense = times.get(rival)
        cells = [_beside(times.get(name), dense) for name in wholes]
        others = (f"{times[name]:.3f}" if name in times else "-" for name in parts)
        rows.append([case, f"{dense:.2f}" if dense else "-", *cells, *others])
    headings = ["chunk of a prompt", f"{rival}, ms", *wholes, *(name.removeprefix(part) for name in parts)]
    return Block(table(headings, rows), [path])


def _beside(time: float | None, rival: float | None) -> str:
    if time is None:
        return "-"
    return f"{time:.2f} ({rival / time:.1f}x)" if rival else f"{time:.2f}"
