"""Compares page statistics on the queries and keys of a model.

python -m research.selection run --model MODEL --output selection.jsonl
python -m research.selection table selection.jsonl
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from bench.common.console import open_console
from bench.common.models import NEEDLE_8M
from bench.common.options import (
    Commit,
    Output,
    Seed,
    TimeLimit,
    make_app,
    parse_names,
    parse_shares,
    parse_sizes,
    split_values,
    usable_device,
)
from bench.common.results import ResultFile, read_runs
from research.selection.evaluate import Grid, measure_layer
from research.selection.report import table
from research.selection.statistics import STATISTICS
from research.selection.texts import needle_texts, read_texts
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import open_tokenizer, run_app
from vllm_sparse_plugin.tools.diagnostics.forward import CapturingModel
from vllm_sparse_plugin.tools.needles import QUICK_TASKS
from vllm_sparse_plugin.tools.provenance import describe_run

PAGE_SIZES = (8, 16, 32)

app = make_app("Page statistics on the queries and keys of a model.")


@app.command()
def run(
    output: Output,
    model: Annotated[
        Path, typer.Option(help="Folder or Hugging Face name. Default: needle-8m.", show_default=False)
    ] = NEEDLE_8M,
    statistics: Annotated[list[str] | None, typer.Option(help=f"Repeatable. Default: {', '.join(STATISTICS)}.")] = None,
    page_size: Annotated[list[str] | None, typer.Option(help="Tokens of a page, repeatable. Default: 8.")] = None,
    budget: Annotated[list[str] | None, typer.Option(help="Tokens, repeatable. Default: 64,128,512,2K.")] = None,
    coverage: Annotated[
        list[str] | None, typer.Option(help="Share of the weight, repeatable. Default: 0.9,0.95.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with `prompt` and an optional `completion`. Default: needles.")
    ] = None,
    queries: Annotated[int, typer.Option(min=1, help="Newest tokens to measure without a completion.")] = 16,
    context: Annotated[
        list[str] | None, typer.Option(help="Tokens of needle questions, repeatable. Default: 8K.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help=f"Needle task, repeatable. Default: {','.join(QUICK_TASKS)}.")
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="Questions per task and context.")] = 2,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Run a model once over each text and measure every selection of its layers. Exit code 3 if time runs out."""
    end = time.monotonic() + time_limit
    kinds = {name: STATISTICS[name] for name in parse_names("statistics", statistics or STATISTICS, list(STATISTICS))}
    sizes = parse_sizes("page_size", page_size or ["8"])
    if not set(sizes) <= set(PAGE_SIZES):
        raise ConfigurationError(f"page_size: got {max(set(sizes) - set(PAGE_SIZES))}, allowed: 8, 16, 32")
    budgets = parse_sizes("budget", budget or ["64,128,512,2K"])
    grid = Grid(sizes, budgets, parse_shares("coverage", coverage or ["0.9,0.95"]))
    contexts, where = parse_sizes("context", context or ["8K"]), usable_device(device)
    tokenizer, console = open_tokenizer(model), open_console()
    if prompts is not None:
        texts = list(read_texts(tokenizer, prompts, queries))
    else:
        tasks = split_values(task or QUICK_TASKS)
        texts = list(
            itertools.chain.from_iterable(needle_texts(tokenizer, tasks, size, questions, seed) for size in contexts)
        )
    with ResultFile(output, describe_run(model, commit)) as file:
        captured = CapturingModel(model, where)
        for text in track(texts, "Measuring", console=console, transient=True):
            about = {"document": text.document, "context_tokens": len(text.tokens), "queries": text.queries}
            for index, layer in enumerate(captured.run(text.tokens, text.queries)):
                # A sliding-window layer selects nothing.
                for row in measure_layer(layer, kinds, grid) if layer is not None else ():
                    file.write(about | {"layer": index} | row)
            if time.monotonic() > end:
                typer.echo("time is up", err=True)
                raise typer.Exit(3)
    console.print(table(read_runs(output)))


@app.command("table")
def print_table(
    results: Annotated[list[Path], typer.Argument(help="Files of `run`, for one model.")],
    by_layer: Annotated[bool, typer.Option("--by-layer", help="One row per layer.")] = False,
) -> None:
    """Print the table of result files."""
    open_console().print(table([each for path in results for each in read_runs(path)], by_layer))


def main() -> None:
    """Run the command line. Bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
