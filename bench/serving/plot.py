"""Decode time per token against context, from result files; needs no GPU and no vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.common.options import parse_sizes, size_text
from bench.common.results import read_runs
from bench.serving.decode import variant_name
from vllm_sparse_plugin.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
_MOST_PANELS = 6


def plot(
    results: Annotated[list[Path], typer.Argument(help="Result files of `decode`.")],
    output: Annotated[Path, typer.Option(help="Picture to write, .png or .svg.")],
    batch: Annotated[
        list[str] | None, typer.Option(help="Batch to show, repeatable. Default: every measured one.")
    ] = None,
) -> None:
    """Draw decode time per token against context: a panel for each batch, a line for each variant."""
    if output.suffix not in SUFFIXES:
        raise ConfigurationError(f"output: got {str(output)!r}, allowed: a name that ends in {' or '.join(SUFFIXES)}")
    runs = [run for path in results for run in read_runs(path)]
    rows = [row for run in runs for row in run.rows if "ms_per_token" in row]
    batches = sorted({row["batch"] for row in rows})
    chosen = parse_sizes("batch", batch or [])
    shown = [size for size in batches if not chosen or size in chosen]
    if not shown or len(shown) > _MOST_PANELS:
        raise ConfigurationError(
            f"batch: got {len(shown)} of the measured batches {batches}, allowed: 1 to {_MOST_PANELS} of them"
        )
    try:
        _draw(rows, shown, _title(runs[-1].about)).savefig(output, dpi=150, bbox_inches="tight")
    except OSError as error:
        raise ConfigurationError(
            f"output: got {str(output)!r} ({error.strerror}), allowed: a file that can be written"
        ) from None


def _title(about: dict[str, Any]) -> str:
    hardware = about["hardware"].get("gpu") or about["hardware"].get("processor")
    return f"Decode time per token, {about['model']}, {hardware}"


def _draw(rows: list[dict[str, Any]], batches: list[int], title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(batches), 3.6))
    panels = figure.subplots(1, len(batches), squeeze=False)[0]
    variants = list(dict.fromkeys(map(variant_name, rows)))
    for panel, batch in zip(panels, batches, strict=True):
        for i, variant in enumerate(variants):
            # If files repeat a measurement, the last one counts.
            here = [row for row in rows if variant_name(row) == variant and row["batch"] == batch]
            found = {row["context_tokens"]: row for row in here}
            contexts = sorted(found)
            if contexts:
                times = [found[context]["ms_per_token"] for context in contexts]
                panel.plot(contexts, times, marker="o", markersize=4, color=f"C{i}", label=variant)
        panel.set_xscale("log", base=2)
        contexts = sorted({row["context_tokens"] for row in rows if row["batch"] == batch})
        panel.set_xticks(contexts, [size_text(context) for context in contexts])
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
        panel.set_title(f"batch {batch}", fontsize=10)
        panel.set_xlabel("context, tokens")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("ms per token")
    panels[0].legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    return figure
