"""Figures of the pages, drawn from result files."""

from __future__ import annotations

import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from bench.common.options import size_text
from bench.common.results import ROOT, read_run
from bench.pages.serving import H200

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = ROOT / "docs" / "figures"
_VERSION = re.compile(rb"Matplotlib v([\w.]+)")


def _decode() -> Figure:
    """Decode time per token of dense and of sparse attention, by context and batch."""
    from matplotlib.figure import Figure

    paths = [H200 / "decode" / f"{name}.jsonl" for name in ("flash_attn_noise", "unique_noise")]
    runs = [read_run(path) for path in paths]
    times = [
        {(row["context_tokens"], row["batch"]): row["ms_per_token"] for row in run.rows if row.get("ms_per_token")}
        for run in runs
    ]
    steps = sorted(set(times[0]) & set(times[1]))
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    for offset, label, colour, by_step in zip(
        (-0.2, 0.2), ("FlashAttention 3", "unique"), ("#9aa5b1", "#3f51b5"), times, strict=True
    ):
        heights = [by_step[step] for step in steps]
        axes.bar([place + offset for place in range(len(steps))], heights, 0.4, label=label, color=colour)
    for place, step in enumerate(steps):
        dense, sparse = (by_step[step] for by_step in times)
        axes.text(place, max(dense, sparse), f"{dense / sparse:.1f}x", ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(steps)), [f"{size_text(context)}\nx {batch}" for context, batch in steps])
    axes.set_xlabel("context in tokens x requests")
    axes.set_ylabel("ms per token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.suptitle(f"Decoding with {runs[0].about['model']}'s shape on one H200", fontsize=11)
    return figure


FIGURES: dict[Path, Callable[[], Figure]] = {FOLDER / "decode.svg": _decode}
"""What draws each figure."""


def draw(make: Callable[[], Figure]) -> bytes:
    """A figure as SVG, the same bytes every time."""
    import matplotlib as mpl

    file = BytesIO()
    with mpl.rc_context({"svg.hashsalt": "vllm_sparse_plugin"}):
        make().savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def is_current(path: Path, content: bytes) -> bool:
    """Whether a file shows what was drawn; one that another version of matplotlib drew is taken to."""
    if not path.exists():
        return False
    written = path.read_bytes()
    return written == content or _VERSION.findall(written) != _VERSION.findall(content)
