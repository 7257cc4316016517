"""The frontier: time per token, and agreement with dense attention, by budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.common.pages import Block, link, table
from bench.common.results import RESULTS, ROOT, read_run
from bench.pages.quality import LOOK_ALIKES, TUNED, interval, share_right
from bench.pages.serving import H200, Steps, read_steps
from vllm_sparse_plugin.tools.eval.noise import SHARES
from vllm_sparse_plugin.tools.eval.statistics import Estimate

FIGURE = ROOT / "docs" / "figures" / "frontier.svg"
"""The figure of `figures.draw_frontier`."""
FOLDER = H200 / "frontier"
_DEFAULT = 512
"""The budget of `unique`."""
_NEEDLES = RESULTS / "h200" / "accuracy" / "quarters.jsonl"
_NEEDLE_TOKENS = 16384
"""The context length of the needles."""
_PAGE_TOKENS = 8
"""Tokens of the pages that their budgets count."""

Budget = int | None
"""Tokens; None for dense attention."""


def decode_files() -> dict[Budget, Path]:
    """The result files of decode steps by budget, dense attention first."""
    dense = FOLDER / "decode_dense.jsonl"
    files = {int(path.stem.removeprefix("decode_")): path for path in FOLDER.glob("decode_*.jsonl") if path != dense}
    return {None: dense, **dict(sorted(files.items()))}


def read_times() -> dict[Budget, Steps]:
    """Decode steps by budget."""
    return {budget: read_steps(path) for budget, path in decode_files().items()}


def read_kept() -> dict[int, dict[str, Estimate]]:
    """Agreement with dense attention as found by `vllm-sparse tune`, by budget and measure."""
    return {
        row["section"]["selection"]["budget_tokens"]: {name: Estimate(**row[name]) for name in SHARES}
        for row in read_run(TUNED).rows
    }


def frontier() -> Block:
    """Time per token, and agreement with dense attention, by budget."""
    times, kept = read_times(), read_kept()
    budgets: list[Budget] = [None, *sorted({*kept, *(budget for budget in times if budget)})]

    def line(name: str, cells: Mapping[Budget, str]) -> list[str]:
        return [name, *(cells.get(budget, "-") for budget in budgets)]

    def time_line(context: int, batch: int) -> list[str]:
        found = {budget: steps[context, batch] for budget, steps in times.items() if (context, batch) in steps}
        cells = {budget: f"{step['ms_per_token']:.2f}" for budget, step in found.items()}
        return line(f"{batch} x {context:,}, ms per token", cells)

    rows = [time_line(*step) for step in dict(sorted(times[None])).items()]  # the largest batch of each context
    rows.append(line("same next token", {budget: interval(of["agreement"]) for budget, of in kept.items()}))
    rows += [line("needles", _needles()), line("look-alikes", _look_alikes())]
    headings = ["requests and context", *("dense" if budget is None else f"{budget:,}" for budget in budgets)]
    picture = f"!{link('Time per token, and what is kept of dense attention, by budget', FIGURE)}"
    sources = [*decode_files().values(), TUNED, _NEEDLES, *LOOK_ALIKES.values()]
    return Block(f"{table(headings, rows)}\n\n{picture}", sources)


def _needles() -> dict[Budget, str]:
    """Right answers by budget, over all tasks."""
    counts: dict[Budget, list[int]] = {}
    for row in read_run(_NEEDLES).rows:
        if row["context_tokens"] == _NEEDLE_TOKENS:
            budget = row["budget_pages"] and row["budget_pages"] * _PAGE_TOKENS
            count = counts.setdefault(budget, [0, 0])
            count[0] += row["correct"]
            count[1] += row["questions"]
    return {budget: f"{right}/{asked}" for budget, (right, asked) in counts.items()}


def _look_alikes() -> dict[Budget, str]:
    """The same for contexts that consist of needles only."""
    answers = {budget: read_run(path).rows for budget, path in LOOK_ALIKES.items()}
    where = {"context_tokens": _NEEDLE_TOKENS}
    cells: dict[Budget, str] = {
        budget: share_right(rows, backend="unique", **where) for budget, rows in answers.items()
    }
    return cells | {None: share_right(answers[_DEFAULT], backend="dense", **where)}
