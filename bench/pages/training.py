"""Blocks about training with the mask: passes of one layer, and steps of a large model shape."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench.common.options import size_text
from bench.common.pages import Block, table, wrap
from bench.common.results import RESULTS, Row, Run, read_run

MASKS, DENSE = ("soft", "hard"), ("math", "flash", "cudnn", "flash3")
"""Passes of `bench.training run` under a mask, and dense ones."""
FOLDER = RESULTS / "h200" / "training-passes"
_NOTHING = "Nothing has been measured on a GPU yet."
Passes = dict[int, dict[str, Row]]
"""Rows by context, and by the name of the pass."""


def pass_files() -> list[Path]:
    """The result files of `bench.training run`; empty if not measured."""
    return sorted(FOLDER.glob("passes*.jsonl"))


def step_files() -> list[Path]:
    """The result files of `bench.training steps`; empty if not measured."""
    return sorted(FOLDER.glob("steps*.jsonl"))


def read_passes(path: Path) -> Passes:
    """The rows of measured passes in a file."""
    passes: Passes = {}
    for row in read_run(path).rows:
        if "both" in row:
            passes.setdefault(row["context_tokens"], {})[row["pass"]] = row
    return passes


def strongest_dense(found: dict[str, Row]) -> Row | None:
    """The fastest dense pass, forward and backward; None if not measured."""
    dense = [row for name, row in found.items() if name in DENSE]
    return min(dense, key=_both, default=None)


def _both(row: Row) -> float:
    return float(row["both"]["median_ms"])


def passes() -> Block:
    """The time of one layer relative to the fastest dense pass, forward and backward, in one sentence."""
    files, ratios = pass_files(), dict[str, dict[int, float]]()
    for path in files:
        for context, found in sorted(read_passes(path).items()):
            dense = strongest_dense(found)
            for name in MASKS:
                if dense is None or name not in found:
                    continue
                ratios.setdefault(name, {})[context] = _both(found[name]) / _both(dense)
    if not ratios:
        return Block(_NOTHING)
    parts = []
    for name, by_context in ratios.items():
        times = ", ".join(f"{ratio:.2f} at {size_text(context)}" for context, ratio in by_context.items())
        parts.append(f"with the {name} mask {times}")
    text = f"Time of one layer's attention, forward and backward, over that of dense attention: {'; '.join(parts)}."
    return Block(wrap(text, ""), files)


def _settings(run: Run) -> dict[str, Any]:
    return dict(run.about["settings"])


def _speed(rows: list[Row], hard: bool) -> str:
    """The median of the steps with the soft or the hard mask, without the first step, which compiles."""
    speeds = [row["tokens_per_second"] for row in rows if (row["temperature"] is None) == hard][1:]
    return f"{statistics.median(speeds):,.0f}" if speeds else "-"


def steps() -> Block:
    """Speed and memory of each run, under the soft and under the hard mask."""
    lines, files = [], step_files()
    for path in files:
        run = read_run(path)
        settings, last = _settings(run), run.rows[-1]
        weights = f"rank {settings['lora_rank']}" if settings["lora_rank"] else "all"
        row = f"{settings['rows_per_step']} x {size_text(settings['sequence_tokens'])}"
        speeds = [_speed(run.rows, hard) for hard in (False, True)]
        lines.append([row, weights, str(last["processes"]), *speeds, f"{last['gpu_memory_gib']:.1f}"])
    if not lines:
        return Block(_NOTHING)
    headings = ["rows per GPU", "weights", "GPUs", "tokens/s, soft mask", "tokens/s, hard mask", "GiB per GPU"]
    return Block(table(headings, lines), files)
