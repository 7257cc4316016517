"""Plots a training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_curves(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the objective, the loss of the served selection and the agreement.

    Args:
        rows: of the run's log. Rows of steps have an `objective`, rows of measurements a `served_loss`.
        path: of the plot.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    losses, fidelity, agreement = figure.subplots(1, 3)
    steps = [row for row in rows if "objective" in row]
    measured = [row for row in rows if "served_loss" in row]
    for hard, color, label in ((False, "C0", "soft mask"), (True, "C3", "hard mask")):
        part = [row for row in steps if (row["temperature"] is None) == hard]
        if part:
            values = [row["objective"] for row in part]
            losses.plot([row["step"] for row in part], values, color=color, label=label, linewidth=1)
    losses.set_title("objective of the steps", fontsize=9)
    for name, label, color in (("dense_loss", "dense", "C0"), ("served_loss", "as served", "C3")):
        values = [row[name] for row in measured]
        fidelity.plot([row["step"] for row in measured], values, marker="o", markersize=3, color=color, label=label)
    fidelity.set_title("loss of the held-out row", fontsize=9)
    agreement.plot(
        [row["step"] for row in measured], [row["agreement"] for row in measured], marker="o", markersize=3, color="C2"
    )
    agreement.set_title("same likeliest token, served and dense", fontsize=9)
    for panel in (losses, fidelity, agreement):
        panel.set_xlabel("step", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.grid(alpha=0.3)
    for panel in (losses, fidelity):
        panel.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
