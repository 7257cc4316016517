"""Coverage asked against coverage got.

python -m research.coverage run --output needle-8m.jsonl
python -m research.coverage run --model models/witness-6m --output witness-6m.jsonl
python -m research.coverage answers --output answers_needle-8m.jsonl
python -m research.coverage report
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from bench.common.console import open_console
from bench.common.models import NEEDLE_8M, load_tokenizer
from bench.common.options import (
    Commit,
    Output,
    Seed,
    StageContexts,
    TimeLimit,
    chosen_contexts,
    make_app,
    usable_device,
)  # fmt: skip
from bench.common.results import ResultFile
from research.coverage import answers as answering
from research.coverage.measure import Reached, measure
from research.coverage.report import PAGE, render
from research.study.documents import TEXT, Document, build_documents
from vllm_sparse_plugin.tools.arguments import run_app
from vllm_sparse_plugin.tools.diagnostics.forward import CapturingModel, LayerInputs
from vllm_sparse_plugin.tools.provenance import describe_run

CONTEXTS = (4096, 16384)
TASKS = ("multikey", "kv")
TEXT_TOKENS = 16
"""Newest tokens of a document whose queries are measured as text."""
QUESTIONS = 1
"""Of a document."""

app = make_app("Coverage asked against coverage got.")

_Model = Annotated[Path, typer.Option("--model", help="needle-8m's folder, or another of its format.")]
_Documents = Annotated[int, typer.Option("--documents", min=1, help="Of each task and context.")]
_Device = Annotated[str, typer.Option(help="Torch device.")]


def _layers(model: CapturingModel, document: Document) -> Iterator[tuple[str, list[LayerInputs]]]:
    """What the layers see of a document's newest tokens, and of questions after it, by what those tokens are."""
    kept, newest = document.tokens[:-TEXT_TOKENS], document.tokens[-TEXT_TOKENS:]
    cache = model.prefill(kept)
    for index in range(QUESTIONS + 1):
        tail = document.tails[index - 1].tokens if index else []
        layers = model.decode(cache, [*newest, *tail]).layers
        first = len(newest) if tail else 0
        yield (
            "needles" if tail else TEXT,
            [LayerInputs(x.query[first:], x.keys, x.values, x.scale) for x in layers if x is not None],
        )


@app.command()
def run(
    output: Output,
    folder: _Model = NEEDLE_8M,
    contexts: StageContexts = None,
    count: _Documents = 4,
    seed: Seed = 0,
    device: _Device = "cpu",
    commit: Commit = None,
) -> None:
    """Measure the newest tokens of documents, and questions after them."""
    console = open_console()
    model, tokenizer = CapturingModel(folder, usable_device(device)), load_tokenizer(folder)
    with ResultFile(output, describe_run(folder, commit)) as file:
        for context in chosen_contexts(contexts) or CONTEXTS:
            for task in TASKS:
                for document in build_documents(tokenizer, task, context, count, seed):
                    for what, layers in _layers(model, document):
                        for line in _lines([measure(layer) for layer in layers]):
                            about = {"context_tokens": context, "document": document.name, "what": what}
                            file.write(about | line)
                    console.print(document.name)


def _lines(layers: list[dict[tuple[str, float], Reached]]) -> Iterator[dict[str, object]]:
    """One line for each rule and target, with means over tokens and KV heads of each layer."""
    for rule, target in layers[0]:
        of_layers = [layer[rule, target] for layer in layers]
        yield {
            "rule": rule,
            "target": target,
            "mass": [round(float(layer.mass.mean()), 4) for layer in of_layers],
            "pages": [round(float(layer.pages.float().mean()), 1) for layer in of_layers],
            "below": [round(float((layer.mass < target - 0.05).float().mean()), 4) for layer in of_layers],
        }


@app.command()
def answers(
    output: Output,
    folder: _Model = NEEDLE_8M,
    contexts: StageContexts = None,
    targets: Annotated[
        list[float] | None, typer.Option("--target", min=0.01, max=1, help="Share of a coverage, repeatable.")
    ] = None,
    count: _Documents = 4,
    seed: Seed = 0,
    device: _Device = "cpu",
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Ask what the output does not hold yet; exit code 3 if time runs out, after which the same command goes on."""
    lengths = chosen_contexts(contexts) or CONTEXTS
    shares, torch_device = targets or answering.TARGETS, usable_device(device)
    if not answering.measure(output, folder, lengths, shares, count, seed, torch_device, time_limit, commit):
        typer.echo("time is up: run the same command again to go on", err=True)
        raise typer.Exit(3)


@app.command()
def report() -> None:
    """Write the page of this folder from the results."""
    PAGE.write_text(render(), encoding="utf-8")


def main() -> None:
    """Runs the command line; bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
