"""The commands `vllm-sparse eval show` and `compare`: tables and plots of result files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vllm_sparse_plugin.tools.endings import open_console, say
from vllm_sparse_plugin.tools.extras import TABLES, require_packages

if TYPE_CHECKING:
    from vllm_sparse_plugin.tools.eval.results import ResultFile

Plot = Annotated[Path | None, typer.Option(help="Plot to write, .png or .svg.")]


def show(
    results: Annotated[list[Path], typer.Argument(help="Result files of `vllm-sparse eval`.")],
    plot: Plot = None,
) -> None:
    """Print the scores of runs side by side. `--plot` also draws them."""
    require_packages("eval", TABLES)
    from vllm_sparse_plugin.tools.eval.report import check_plot, plot_scores, score_table
    from vllm_sparse_plugin.tools.eval.results import read_results

    check_plot(plot)
    files = [read_results(path) for path in results]
    console = open_console()
    console.print(score_table(files))
    _name_partial(files, console)
    if plot:
        plot_scores(files, plot)


def _name_partial(files: Sequence[ResultFile], console: Console) -> None:
    """Print a sentence for each file of a run that did not end."""
    for file in files:
        planned = file.settings.get("items")
        if isinstance(planned, int) and len(file.results) < planned:
            say(
                console,
                f"{file.path} has {len(file.results)} of {planned} items: the run was interrupted, the same command "
                "continues it.",
            )


def compare(
    first: Annotated[Path, typer.Argument(help="Result file of `vllm-sparse eval`, for example of dense attention.")],
    second: Annotated[Path, typer.Argument(help="Result file with the same tasks.")],
    again: Annotated[
        Path | None,
        typer.Option(help="Result file of the first run repeated with --other-batches. It measures the noise."),
    ] = None,
) -> None:
    """Print how far the second run's scores differ from the first's on the same items.

    For text it also compares the next tokens of both runs.
    """
    require_packages("eval", TABLES)
    from vllm_sparse_plugin.tools.eval.report import difference_table, fidelity_table
    from vllm_sparse_plugin.tools.eval.results import read_results

    files = read_results(first), read_results(second)
    noise = None if again is None else read_results(again)
    console = open_console()
    console.print(difference_table(*files))
    _name_partial([*files, *([noise] if noise else [])], console)
    if (next_tokens := fidelity_table(*files, noise)) is not None:
        console.print(next_tokens)
        if noise is None:
            console.print(
                f"The noise of {files[0].label} is not measured, so some of these differences may be noise. "
                "Repeat the run with --other-batches, and give its file as --again."
            )
