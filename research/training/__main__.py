"""Trains arms of one recipe on a pretrained model, and measures each at every budget.

python -m research.training prepare --model MODEL --prose ESSAYS --output training.jsonl.xz
python -m research.training run --model MODEL --data training.jsonl.xz --arm soft,hard --output arms.jsonl
python -m research.training grid --model MODEL --data training.jsonl.xz --output grid.jsonl
python -m research.training longer --model MODEL --data longer.jsonl.xz --arm yarn,trained --output longer.jsonl
python -m research.training table arms.jsonl
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.common.arms import BEFORE, Recipe
from bench.common.console import print_tables
from bench.common.options import Commit, Output, TimeLimit, make_app, parse_names, parse_sizes, usable_device
from bench.common.results import ResultFile, Row, read_run
from research.training import evaluate, longer
from research.training.arms import ARMS, OutOfTimeError, settings_of
from research.training.data import Amounts, Data, joined, prepare, read_data, write_data
from research.training.grid import finished, parse_numbers
from research.training.report import tables
from research.training.study import Study
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import open_tokenizer, parse_additional_config, run_app
from vllm_sparse_plugin.tools.extras import TRAINING
from vllm_sparse_plugin.tools.files import read_text
from vllm_sparse_plugin.tools.models import read_config
from vllm_sparse_plugin.tools.provenance import describe_run

_RATES = {False: 2e-4, True: 5e-4}
"""Peak learning rates of all weights and of low-rank updates."""
_MOST_IDS = 1 << 16
_PART_TOKENS = 2048
"""Tokens of a part of a text, whose mean loss `longer` measures."""

app = make_app("What training with the mask gains.")
Model = Annotated[Path, typer.Option(help="Folder of a Llama in transformers' format.")]
DataFile = Annotated[Path, typer.Option("--data", help="File of `prepare`.")]
Rank = Annotated[int, typer.Option("--lora-rank", min=0, help="Rank of the updates; 0 trains all weights.")]
Settings = Annotated[str, typer.Option("--settings", help="JSON of other training settings, for all arms.")]
Backend = Annotated[str, typer.Option("--attention-backend", help="Backend whose selection is trained.")]
Budget = Annotated[int, typer.Option("--budget-tokens", help="Budget to train for.")]
Budgets = Annotated[str, typer.Option("--budgets", help="Budgets to measure, besides dense attention.")]
Longest = Annotated[int, typer.Option("--longest", min=1, help="Maximum tokens of an answer.")]
AtOnce = Annotated[int, typer.Option("--at-once", min=1, help="Questions that are answered at the same time.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]


@app.command("prepare")
def write(
    model: Model,
    output: Annotated[Path, typer.Option(help="Compressed JSON lines to write.")],
    prose: Annotated[list[Path], typer.Option(help="Text file of held-out prose, repeatable.")],
    books: Annotated[Path | None, typer.Option(help="Folder of text files of prose to train on.")] = None,
    row_tokens: Annotated[int, typer.Option(help="Tokens of a training row and of a held-out text.")] = 8192,
    rows: Annotated[int, typer.Option(min=4, help="Training rows.")] = 400,
    learned_tokens: Annotated[int, typer.Option(min=1, help="Last tokens of a training text, to learn.")] = 512,
    decoded_tokens: Annotated[int, typer.Option(min=1, help="Last tokens of a training text, to decode.")] = 512,
    context: Annotated[str, typer.Option(help="Tokens of held-out questions.")] = "4K,8K",
    questions: Annotated[int, typer.Option(min=1, help="Held-out questions per task and context.")] = 25,
    texts: Annotated[int, typer.Option(min=1, help="Held-out texts per kind.")] = 12,
) -> None:
    """Write training rows, held-out texts and held-out questions as tokens."""
    tokenizer = open_tokenizer(model)
    if len(tokenizer) > _MOST_IDS:
        raise ConfigurationError(f"model: got {len(tokenizer)} token ids, allowed: up to {_MOST_IDS}")
    contexts = parse_sizes("context", [context])
    amounts = Amounts(row_tokens, rows, learned_tokens, decoded_tokens, contexts, questions, texts)
    told = [read_text(path, "books", "text files") for path in sorted(books.iterdir())] if books else []
    held_out = "\n\n".join(read_text(path, "prose", "a file of text") for path in prose)
    data = prepare(tokenizer, amounts, held_out, told)
    write_data(output, data)
    learned = sum(sum(row.learned) for row in data.rows)
    typer.echo(f"{len(data.rows)} rows with {learned} learned tokens, {len(data.questions)} questions")


@app.command()
def run(
    model: Model,
    data: DataFile,
    output: Output,
    arm: Annotated[list[str], typer.Option(help=f"Repeatable: {', '.join((BEFORE, *ARMS))}.")],
    seeds: Annotated[str, typer.Option(help="Of the order of rows, and of low-rank weights.")] = "0",
    lora_rank: Rank = 0,
    settings: Settings = "{}",
    attention_backend: Backend = "unique_paper",
    budget_tokens: Budget = 128,
    budgets: Budgets = "2048,1024,512,256,128,64",
    longest: Longest = 64,
    at_once: AtOnce = 200,
    models: Annotated[Path | None, typer.Option(help="Folder for the trained models. Default: not kept.")] = None,
    device: Device = "cuda",
    time_limit: TimeLimit = 540,
    commit: Commit = None,
) -> None:
    """Train arms, measure each, and write each result at once. Exit code 3 if time runs out.

    A run has the same steps, rows, order of rows and schedule in all arms of a seed. With `--models`, a training that
    ran out of time goes on.
    """
    deadline = time.monotonic() + time_limit
    names, device = parse_names("arm", arm, (BEFORE, *ARMS)), usable_device(device)
    found = read_data(data)
    shared = _shared(found, settings, lora_rank)
    plans = {name: settings_of(ARMS[name], shared) for name in names if name != BEFORE}
    study = Study.open(model, found, attention_backend, budget_tokens, budgets, longest, at_once, device)
    original = study.load(model)
    before = study.predict(original)

    def train_and_measure(name: str, number: int, folder: Path) -> Iterator[Row]:
        chosen = plans[name].model_copy(update={"seed": number})
        return study.train_and_measure(folder, chosen, ARMS[name].is_dense, deadline, before)

    with ResultFile(output, _about(study, commit, shared)) as file, _folder(models) as parent:
        for (place, number), name in product(enumerate(map(int, seeds.split(","))), names):
            if name == BEFORE and place:
                continue
            folder = parent / f"{name}-{lora_rank}-{number}"
            rows = study.measure_before(original, before) if name == BEFORE else train_and_measure(name, number, folder)
            about = {"arm": name, "seed": number, "lora_rank": lora_rank}
            _write(file, about, rows, f"{name}, seed {number}")


@app.command("grid")
def search(
    model: Model,
    data: DataFile,
    output: Annotated[Path, typer.Option(help="JSON lines to write. What an existing file has is not trained again.")],
    arm: Annotated[str, typer.Option(help=f"One of {', '.join(ARMS)}.")] = "taught-hard",
    lora_ranks: Annotated[str, typer.Option(help="Ranks of the updates; 0 trains all weights.")] = "0,8,16,64",
    rates: Annotated[str, typer.Option(help="Peak learning rates.")] = "1e-4,3e-4,1e-3",
    steps: Annotated[str, typer.Option(help="Numbers of updates.")] = "50",
    settings: Settings = "{}",
    attention_backend: Backend = "unique",
    budget_tokens: Budget = 128,
    budgets: Budgets = "128",
    questions: Annotated[int, typer.Option(min=1, help="Held-out questions per task and context.")] = 10,
    longest: Longest = 64,
    at_once: AtOnce = 200,
    device: Device = "cuda",
    time_limit: TimeLimit = 540,
    commit: Commit = None,
) -> None:
    """Train one arm with every rank, rate and number of steps, and measure each. Exit code 3 if time runs out."""
    deadline = time.monotonic() + time_limit
    (name,), device = parse_names("arm", [arm], tuple(ARMS)), usable_device(device)
    found = joined([read_data(data)], questions)
    shared = _shared(found, settings, 0)
    counts, ranks = parse_numbers("steps", steps, int), parse_numbers("lora_ranks", lora_ranks, int)
    peaks = parse_numbers("rates", rates, float)
    recipes = [Recipe(rank, peak, count) for count, peak, rank in product(counts, peaks, ranks)]
    plans = {recipe: settings_of(ARMS[name], shared | recipe._asdict()) for recipe in recipes}
    done = finished(read_run(output).rows) if output.exists() else set()
    study = Study.open(model, found, attention_backend, budget_tokens, budgets, longest, at_once, device)
    original = study.load(model)
    before = study.predict(original)

    def train_and_measure(recipe: Recipe) -> Iterator[Row]:
        with _folder(None) as folder:
            yield from study.train_and_measure(folder / name, plans[recipe], ARMS[name].is_dense, deadline, before)

    with ResultFile(output, _about(study, commit, shared), append=True) as file:
        if BEFORE not in done:
            about: Row = {"arm": BEFORE, "seed": 0, "lora_rank": 0}
            _write(file, about, study.measure_before(original, before), BEFORE)
        for recipe in recipes:
            if recipe not in done:
                about = {"arm": name, "seed": plans[recipe].seed, **recipe._asdict()}
                _write(file, about, train_and_measure(recipe), str(recipe))


@app.command("longer")
def lengthen(
    model: Model,
    data: Annotated[list[Path], typer.Option(help="File of `prepare`, repeatable. Texts are those of the first.")],
    output: Output,
    models: Annotated[Path, typer.Option(help="Folder for the models, and for `UPDATE`.")],
    arm: Annotated[list[str], typer.Option(help=f"Repeatable: {', '.join(longer.FORMS)}.")],
    context: Annotated[str, typer.Option(help="Tokens of the longer context.")] = "16K",
    rope_base: Annotated[float, typer.Option(min=1, help="Base of the rotary frequencies to train.")] = 500_000,
    lora_rank: Rank = 16,
    settings: Settings = "{}",
    attention_backend: Backend = "unique",
    budget_tokens: Budget = 256,
    budgets: Budgets = "512,256",
    questions: Annotated[int, typer.Option(min=1, help="Held-out questions per task and context.")] = 10,
    longest: Longest = 64,
    at_once: AtOnce = 64,
    device: Device = "cuda",
    time_limit: TimeLimit = 540,
    commit: Commit = None,
) -> None:
    """Train a model for a longer context, and measure it beside forms without training. Exit code 3 if time runs out.

    Prompts attend densely, and what follows reads the pages of the budget. A training that ran out of time goes on. A
    trained model is measured again without training.
    """
    deadline = time.monotonic() + time_limit
    names, device = parse_names("arm", arm, longer.FORMS), usable_device(device)
    found, (context_tokens,) = joined([read_data(path) for path in data], questions), parse_sizes("context", [context])
    forms = longer.positions(read_config(model), context_tokens, rope_base)
    shared = _shared(found, settings, lora_rank, rows_per_step=8)
    chosen = settings_of(longer.RECIPE, shared)
    study = Study.open(model, found, attention_backend, budget_tokens, budgets, longest, at_once, device)
    before = study.predict(study.load(model))

    def measure(folder: Path) -> Iterator[Row]:
        weights = study.load(folder)
        with torch.no_grad():
            yield from evaluate.measure_positions(weights, found.texts, _PART_TOKENS)
        yield from study.measure(weights, before)

    def train_and_measure() -> Iterator[Row]:
        raised, trained = models / longer.RAISED, models / f"{longer.TRAINED}-{lora_rank}"
        longer.write_form(model, forms[longer.TRAINED], raised)
        if not (trained / "config.json").exists():
            yield from study.train(trained, chosen, False, deadline, raised)
        if lora_rank:
            update = models / f"update-{lora_rank}.safetensors"
            longer.write_update(model, trained, update)
            # What is measured is what the update makes.
            trained = models / f"made-{lora_rank}"
            longer.apply_update(model, update, trained)
            yield {"part": "update", "bytes": update.stat().st_size}
        yield from measure(trained)

    about = _about(study, commit, shared) | {"context_tokens": context_tokens, "forms": forms}
    models.mkdir(parents=True, exist_ok=True)
    with ResultFile(output, about) as file:
        for name in names:
            if time.monotonic() > deadline:
                typer.echo(f"time is up before {name}", err=True)
                raise typer.Exit(3)
            about_arm = {"arm": name, "seed": chosen.seed}
            if name == longer.TRAINED:
                _write(file, about_arm | {"lora_rank": lora_rank}, train_and_measure(), name)
            else:
                longer.write_form(model, forms[name], models / name)
                _write(file, about_arm | {"lora_rank": None}, measure(models / name), name)


@app.command("apply")
def make(
    model: Model,
    update: Annotated[Path, typer.Option(help="File of `longer`.")],
    output: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Write the model of a longer context: the model before training plus an update."""
    longer.apply_update(model, update, output)


@app.command("table")
def show(
    results: Annotated[list[Path], typer.Argument(help="Files of `run`, for one model.")],
) -> None:
    """Print the tables of result files."""
    print_tables(results, tables)


def _shared(data: Data, settings: str, lora_rank: int, rows_per_step: int = 4) -> dict[str, Any]:
    """Return the training settings of all arms."""
    return {
        "steps": 100, "rows_per_step": rows_per_step, "learning_rate": _RATES[lora_rank > 0],
        "sequence_tokens": max(len(row.tokens) for row in data.rows), "gradient_checkpointing": False,
        **parse_additional_config(settings, "settings"), "lora_rank": lora_rank,
    }  # fmt: skip


def _about(study: Study, commit: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    return describe_run(study.model, commit, tuple(TRAINING)) | {
        "settings": settings, "selection": study.attention_backend, "budget_tokens": study.budget_tokens
    }  # fmt: skip


@contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    """Yield a folder for models, or one that is deleted."""
    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as scratch:
        yield kept or Path(scratch)


def _write(file: ResultFile, about: Row, rows: Iterator[Row], name: str) -> None:
    """Write rows with their time since the first. End with exit code 3 if time runs out."""
    begin = time.monotonic()
    try:
        for row in rows:
            file.write(about | row | {"seconds": round(time.monotonic() - begin, 2)})
    except OutOfTimeError:
        typer.echo(f"time is up in {name}", err=True)
        raise typer.Exit(3) from None
    typer.echo(f"{name}: {time.monotonic() - begin:.0f} s", err=True)


def main() -> None:
    """Run the command line. Bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
