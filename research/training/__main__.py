"""What training with the mask buys, on a GPU.

python -m research.training run --arm soft-hard --work WORK --output needle-8m_soft-hard.jsonl
python -m research.training report
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from bench.common.models import NEEDLE_8M
from bench.common.options import Commit, Output, Seed, TimeLimit, make_app, parse_names, parse_sizes, usable_device
from vllm_sparse_plugin.cli.arguments import parse_additional_config, run_app
from vllm_sparse_plugin.cli.provenance import describe_run

_TRAIN_SEED_OFFSET = 1000
_MIB = 1 << 20

app = make_app("What training with the mask buys.")


@app.command()
def run(
    output: Output,
    work: Annotated[Path, typer.Option(help="Folder of the trained model; a run that was killed goes on there.")],
    arm: Annotated[str, typer.Option(help="before, dense, soft or soft-hard.")] = "before",
    folder: Annotated[Path, typer.Option("--model", help="needle-8m's folder, or another of its format.")] = NEEDLE_8M,
    context: Annotated[str, typer.Option(help="In tokens, of rows and of documents that are asked about.")] = "16K",
    budget_tokens: Annotated[int, typer.Option(help="Budget that the model is trained for.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Updates of the weights.")] = 200,
    settings: Annotated[str, typer.Option(help="JSON of other training settings.")] = "{}",
    rows: Annotated[int, typer.Option(min=2, help="To train on, one of them to measure.")] = 257,
    text_mib: Annotated[int, typer.Option(min=1, help="Text that rows are made of.")] = 24,
    count: Annotated[int, typer.Option("--documents", min=1, help="Of each task, with 8 questions each.")] = 7,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cuda",
    time_limit: TimeLimit = 240,
    commit: Commit = None,
) -> None:
    """Train one way, then answer and read text with every budget; exit code 3 if the time for that was not enough."""
    from research.training.data import build_rows, training_text
    from research.training.measure import ARMS, BEFORE, Recipe, documents_of, measure, train
    from research.witness.data import open_workers

    (context_tokens,) = parse_sizes("context", [context])
    (arm,) = parse_names("arm", [arm], ARMS)
    usable_device(device)
    recipe = Recipe(arm, budget_tokens, steps, context_tokens, parse_additional_config(settings, "settings"))
    about = describe_run(folder, commit, ("accelerate",)) | {"arm": arm}
    model = folder
    if arm != BEFORE:
        about |= {"budget_tokens": budget_tokens, "training": recipe.settings(seed).model_dump()}
        # Documents to train on are not those that are asked about.
        drawn = seed + _TRAIN_SEED_OFFSET
        with open_workers(min(os.cpu_count() or 1, 12)) as workers:
            made = build_rows(training_text(text_mib * _MIB, drawn), context_tokens, rows, drawn, workers)
        model = work / f"{folder.name}_{arm}_{budget_tokens}"
        train(recipe, folder, model, made, device, seed)
    if not measure(output, about, model, documents_of(context_tokens, count, seed), device, time_limit):
        typer.echo("time is up: run the same command again to go on", err=True)
        raise typer.Exit(3)


@app.command()
def report() -> None:
    """Write the page of this folder from the results."""
    from research.training.report import PAGE, render

    PAGE.write_text(render(), encoding="utf-8")


def main() -> None:
    """Runs the command line; bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
