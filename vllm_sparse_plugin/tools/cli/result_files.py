"""The commands `vllm-sparse eval show` and `compare`: tables and pictures of result files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_sparse_plugin.tools.endings import open_console
from vllm_sparse_plugin.tools.extras import TABLES, require_packages

_EXTRA = TABLES
Plot = Annotated[Path | None, typer.Option(help="Picture to write, .png or .svg.")]


def show(
    results: Annotated[list[Path], typer.Argument(help="Files of `vllm-sparse eval`.")],
    plot: Plot = None,
) -> None:
    """Print the scores of runs side by side, and draw them."""
    require_packages("eval", _EXTRA)
    from vllm_sparse_plugin.tools.eval.report import check_plot, plot_scores, score_table
    from vllm_sparse_plugin.tools.eval.results import read_results

    check_plot(plot)
    files = [read_results(path) for path in results]
    open_console().print(score_table(files))
    if plot:
        plot_scores(files, plot)


def compare(
    first: Annotated[Path, typer.Argument(help="File of `vllm-sparse eval`, such as of dense attention.")],
    second: Annotated[Path, typer.Argument(help="Another one, of the same tasks.")],
    again: Annotated[
        Path | None,
        typer.Option(help="The first run once more, made with --other-batches: what it loses to itself is its noise."),
    ] = None,
    plot: Plot = None,
) -> None:
    """Print how much the second run's scores differ from the first's on the same items, and draw it.

    Of text, it also prints how near both runs' next tokens are, and how much farther than the first run is from itself.
    """
    require_packages("eval", _EXTRA)
    from vllm_sparse_plugin.tools.eval.report import check_plot, difference_table, fidelity_table, plot_differences
    from vllm_sparse_plugin.tools.eval.results import read_results

    check_plot(plot)
    files = read_results(first), read_results(second)
    noise = None if again is None else read_results(again)
    console = open_console()
    console.print(difference_table(*files))
    if (next_tokens := fidelity_table(*files, noise)) is not None:
        console.print(next_tokens)
        if noise is None:
            console.print(
                f"How far {files[0].label} is from itself is not measured, so a part of these differences means "
                "nothing: run it once more with --other-batches, and give the file as --again."
            )
    if plot:
        plot_differences(*files, plot)
