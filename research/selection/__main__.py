"""Compares page statistics on the queries and keys of a model.

python -m research.selection run --model MODEL --output selection.jsonl
python -m research.selection gates --model MODEL --data training.jsonl.xz --output gates.jsonl
python -m research.selection table selection.jsonl
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import torch
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
from research.real.model import Llama
from research.selection.evaluate import Grid, measure_layer
from research.selection.gates import FORMS, Distillation, capture
from research.selection.report import table
from research.selection.statistics import STATISTICS
from research.selection.texts import Text, needle_texts, read_texts
from research.training.data import read_data
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import open_tokenizer, run_app
from vllm_sparse_plugin.tools.diagnostics.forward import CapturingModel
from vllm_sparse_plugin.tools.needles import QUICK_TASKS
from vllm_sparse_plugin.tools.provenance import describe_run

PAGE_SIZES = (8, 16, 32)
BESIDE = ("quarters", "quarters-by-share", "mean", "oracle")
"""Statistics that gates are compared with."""
_Item = TypeVar("_Item")
_STEPS_OF_A_ROW = 10
"""Steps for each row of the training in a result file."""

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
            _end_after(end)
    console.print(table(read_runs(output)))


@app.command("gates")
def distill(
    output: Output,
    model: Annotated[Path, typer.Option(help="Folder of a Llama or a Gemma 3.")],
    data: Annotated[Path, typer.Option(help="File of `research.training prepare`.")],
    form: Annotated[list[str] | None, typer.Option(help=f"Repeatable. Default: {', '.join(FORMS)}.")] = None,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens of a page.")] = 8,
    pages: Annotated[list[str] | None, typer.Option(help="Pages to read, repeatable. Default: 16,32,64,128.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training rows to read, one in each step.")] = 300,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    queries: Annotated[int, typer.Option(min=1, help="Newest tokens of a row to learn from.")] = 256,
    measured: Annotated[int, typer.Option(min=1, help="Newest tokens of a held-out text to measure.")] = 64,
    documents: Annotated[int, typer.Option(min=1, help="Held-out texts to measure, and as many questions.")] = 12,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    time_limit: TimeLimit = 540,
    commit: Commit = None,
) -> None:
    """Train gates on rows of texts, and measure the pages they find in others beside statistics. Exit code 3 if time
    runs out."""
    end = time.monotonic() + time_limit
    forms = {name: FORMS[name] for name in parse_names("form", form or FORMS, list(FORMS))}
    counts = parse_sizes("pages", pages or ["16,32,64,128"])
    grid = Grid((page_size,), tuple(count * page_size for count in counts), ())
    found, where = read_data(data), usable_device(device)
    weights = Llama.load(model, where, torch.bfloat16)
    rows = [row.tokens for row in found.rows if len(row.packing.lengths) == 1]
    texts = [
        Text(f"{each.kind}-{place}", each.tokens, measured)
        for place, each in enumerate(_spread(found.texts, documents))
    ]
    # The answer begins after the last token of a question.
    texts += [
        Text(f"{each.task}-{place}", [*each.context, *each.question], 1)
        for place, each in enumerate(_spread(found.questions, documents))
    ]
    settings = {"steps": steps, "rate": rate, "queries": queries, "page_size": page_size}
    with ResultFile(output, describe_run(model, commit) | {"gates": settings}) as file:
        training, begin = Distillation(weights, page_size, steps, rate, forms), time.monotonic()
        for step, losses in enumerate(training.train(itertools.cycle(rows), queries), 1):
            if step % _STEPS_OF_A_ROW == 0 or step == steps:
                file.write({"step": step, "divergence": losses, "seconds": round(time.monotonic() - begin, 2)})
            _end_after(end)
        for text in by_turns(texts):
            about = {"document": text.document, "context_tokens": len(text.tokens), "queries": text.queries}
            for index, layer in capture(weights, text.tokens, text.queries).items():
                kinds = {name: STATISTICS[name] for name in BESIDE} | training.statistics(index)
                for row in measure_layer(layer, kinds, grid):
                    file.write(about | {"layer": index} | row)
            _end_after(end)
    open_console().print(table(read_runs(output)))


def _spread(items: Sequence[_Item], count: int) -> list[_Item]:
    """Return some of the items, spread evenly over their kinds, which lie one after the other."""
    count = min(count, len(items))
    return [items[place * len(items) // count] for place in range(count)]


def by_turns(texts: Sequence[Text]) -> list[Text]:
    """Return the texts so that their kinds, the beginnings of their documents, take turns. A run that is out of time
    has then read some of each."""
    turns: dict[str, int] = {}
    turn = []
    for text in texts:
        kind = text.document.rpartition("-")[0]
        turn.append(turns.setdefault(kind, 0))
        turns[kind] += 1
    return [text for _, text in sorted(zip(turn, texts, strict=True), key=lambda each: each[0])]


def _end_after(end: float) -> None:
    if time.monotonic() > end:
        typer.echo("time is up", err=True)
        raise typer.Exit(3)


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
