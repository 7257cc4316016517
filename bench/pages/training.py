"""Blocks about training with the mask: passes of one layer by context, and steps of a large shape."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench.common.options import size_text
from bench.common.pages import Block, link, table
from bench.common.results import RESULTS, ROOT, Row, Run, read_run
from bench.training.passes import DENSE, MASKS

FOLDER = RESULTS / "h200" / "training-passes"
FIGURE = ROOT / "docs" / "figures" / "training-memory.svg"
"""What `figures.draw_training` draws."""
_NOTHING = "Nothing has been measured on a GPU yet."
Passes = dict[int, dict[str, Row]]
"""Rows by context, and by the name of the pass."""


def pass_files() -> list[Path]:
    """The result files of `bench.training run`, none until it was measured."""
    return sorted(FOLDER.glob("passes*.jsonl"))


def step_files() -> list[Path]:
    """The result files of `bench.training steps`, none until it was measured."""
    return sorted(FOLDER.glob("steps*.jsonl"))


def read_passes(path: Path) -> Passes:
    """The rows of a file of passes that were measured."""
    passes: Passes = {}
    for row in read_run(path).rows:
        if "both" in row:
            passes.setdefault(row["context_tokens"], {})[row["pass"]] = row
    return passes


def strongest_dense(found: dict[str, Row]) -> Row | None:
    """The dense pass that takes the least time forward and back, if one was measured."""
    dense = [row for name, row in found.items() if name in DENSE]
    return min(dense, key=_both, default=None)


def _both(row: Row) -> float:
    return float(row["both"]["median_ms"])


def passes() -> Block:
    """Milliseconds of one layer forward and back, and how many times the strongest dense pass that is."""
    lines, files = [], pass_files()
    for path in files:
        for context, found in sorted(read_passes(path).items()):
            dense = strongest_dense(found)
            for name in (name for name in MASKS if name in found):
                row = found[name]
                ratio = f"{_both(row) / _both(dense):.2f}x" if dense else "-"
                beside = f"{_both(dense):.2f} ({dense['pass']})" if dense else "-"
                parts = [f"{row[part]['median_ms']:.2f}" for part in ("forward", "backward", "both")]
                lines.append(
                    [size_text(context), row["statistics"], name, *parts, beside, ratio, f"{row['peak_mib']:,.0f}"]
                )
    if not lines:
        return Block(_NOTHING)
    headings = ["context", "statistics", "mask", "forward, ms", "backward", "both", "dense, both", "times dense", "MiB"]
    picture = link("Memory of one layer's attention by context", FIGURE)
    return Block(f"{table(headings, lines)}\n\n!{picture}", files)


def _settings(run: Run) -> dict[str, Any]:
    return dict(run.about["settings"])


def _speed(rows: list[Row], hard: bool) -> str:
    """The median of the steps with the soft or the hard mask but for the first, which compiles."""
    speeds = [row["tokens_per_second"] for row in rows if (row["temperature"] is None) == hard][1:]
    return f"{statistics.median(speeds):,.0f}" if speeds else "-"


def steps() -> Block:
    """Loss, speed and memory of the last step of each run, and the losses of all."""
    lines, files = [], step_files()
    for path in files:
        run = read_run(path)
        settings, last = _settings(run), run.rows[-1]
        weights = f"rank {settings['lora_rank']}" if settings["lora_rank"] else "all"
        losses = ", ".join(f"{row['loss']:.4f}" for row in run.rows[:4])
        speeds = [_speed(run.rows, hard) for hard in (False, True)]
        lines.append(
            [
                run.about["model"], str(last["layers"] or "all"), weights, size_text(settings["sequence_tokens"]),
                str(last["processes"]), *speeds, f"{last['gpu_memory_gib']:.1f}", losses,
            ]
        )  # fmt: skip
    if not lines:
        return Block(_NOTHING)
    headings = [
        "shape", "layers", "trained", "row", "GPUs", "tokens/s, soft", "hard", "GiB of each", "loss of the first steps",
    ]  # fmt: skip
    return Block(table(headings, lines), files)
