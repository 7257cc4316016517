"""What training with the mask buys, on a GPU.

python -m research.training run --arm soft-hard --work WORK --output needle-8m_soft-hard.jsonl
python -m research.training report

Arms can share rows: `python -m research.training rows --output ROWS`, then `run --data ROWS`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from bench.common.models import NEEDLE_8M
from bench.common.options import Commit, Output, Seed, TimeLimit, make_app, parse_names, parse_sizes, usable_device
from research.training.data import LEARNED_SHARE
from vllm_sparse_plugin.tools.arguments import parse_additional_config, run_app
from vllm_sparse_plugin.tools.provenance import describe_run
from vllm_sparse_plugin.tools.training.data import Row

_TRAIN_SEED_OFFSET = 1000
_MIB = 1 << 20

app = make_app("What training with the mask buys.")


Context = Annotated[str, typer.Option(help="In tokens, of rows and of documents that are asked about.")]
RowCount = Annotated[int, typer.Option("--rows", min=2, help="To train on, one of them to measure.")]
LearnedShare = Annotated[float, typer.Option(min=0.0, max=1.0, help="Of what is decoded and no answer, learned.")]
TextMib = Annotated[int, typer.Option(min=1, help="Text that rows are made of.")]


def _make_rows(context_tokens: int, count: int, text_mib: int, learned_share: float, seed: int) -> list[Row]:
    from research.training.data import build_rows, training_text
    from research.witness.data import open_workers

    # Documents to train on are not those that are asked about.
    drawn = seed + _TRAIN_SEED_OFFSET
    with open_workers(min(os.cpu_count() or 1, 12)) as workers:
        text = training_text(text_mib * _MIB, drawn)
        return build_rows(text, context_tokens, count, drawn, workers, learned_share)


@app.command()
def rows(
    output: Annotated[Path, typer.Option(help="File to write.")],
    context: Context = "16K",
    count: RowCount = 257,
    text_mib: TextMib = 24,
    learned_share: LearnedShare = LEARNED_SHARE,
    seed: Seed = 0,
) -> None:
    """Make the rows that several arms are trained on."""
    from research.training.data import write_rows

    (context_tokens,) = parse_sizes("context", [context])
    write_rows(_make_rows(context_tokens, count, text_mib, learned_share, seed), output)


@app.command()
def run(
    output: Output,
    work: Annotated[Path, typer.Option(help="Folder of the trained model; one that is there is not trained again.")],
    arm: Annotated[str, typer.Option(help="before, dense, soft, hard or soft-hard.")] = "before",
    folder: Annotated[Path, typer.Option("--model", help="needle-8m's folder, or another of its format.")] = NEEDLE_8M,
    context: Context = "16K",
    budget_tokens: Annotated[int, typer.Option(help="Budget that the model is trained for.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Updates of the weights.")] = 200,
    settings: Annotated[str, typer.Option(help="JSON of other training settings.")] = "{}",
    data: Annotated[Path | None, typer.Option(help="File of rows, in place of making them.")] = None,
    row_count: RowCount = 257,
    text_mib: TextMib = 24,
    learned_share: LearnedShare = LEARNED_SHARE,
    budgets: Annotated[str, typer.Option(help="To answer with, in tokens.")] = "512,256,128,64",
    count: Annotated[int, typer.Option("--documents", min=1, help="Of each task, with 8 questions each.")] = 7,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cuda",
    time_limit: TimeLimit = 240,
    commit: Commit = None,
) -> None:
    """Train one way, then answer and read text with every budget; exit code 3 if the time for that was not enough."""
    from research.training.data import read_rows
    from research.training.measure import ARMS, BEFORE, Recipe, documents_of, measure, train

    (context_tokens,) = parse_sizes("context", [context])
    (arm,) = parse_names("arm", [arm], ARMS)
    usable_device(device)
    recipe = Recipe(arm, budget_tokens, steps, context_tokens, parse_additional_config(settings, "settings"))
    about = describe_run(folder, commit, ("accelerate",)) | {"arm": arm}
    model = folder
    if arm != BEFORE:
        about |= {"budget_tokens": budget_tokens, "training": recipe.settings(seed).model_dump()}
        made = read_rows(data) if data else _make_rows(context_tokens, row_count, text_mib, learned_share, seed)
        about["rows"] = {"count": len(made), "learned_tokens": sum(sum(row.learned) for row in made)}
        model = work / f"{folder.name}_{arm}_{budget_tokens}"
        train(recipe, folder, model, made, device, seed)
    documents = documents_of(context_tokens, count, seed)
    if not measure(output, about, model, documents, device, time_limit, parse_sizes("budgets", [budgets])):
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
