"""Plots a training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PANELS = {
    "objective of the steps": {"objective": "objective"},
    "loss of the held-out row": {"dense_loss": "dense", "served_loss": "as served"},
    "same likeliest token, served and dense": {"agreement": "agreement"},
}
"""Columns of the log with their labels, by the title of a panel."""


def draw_curves(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the objective, the loss of the served selection and the agreement.

    Args:
        rows: of the run's log. Rows of steps have an `objective`, rows of measurements a `served_loss`.
        path: of the plot.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    for panel, (title, columns) in zip(figure.subplots(1, len(_PANELS)), _PANELS.items(), strict=True):
        for column, label in columns.items():
            points = [(row["step"], row[column]) for row in rows if column in row]
            panel.plot(*zip(*points, strict=True), marker="o", markersize=2, linewidth=1, label=label)
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("step", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.legend(fontsize=8, frameon=False)
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
