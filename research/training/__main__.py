"""Trains arms of one recipe on a pretrained model, and measures each at every budget.

python -m research.training prepare --model MODEL --prose ESSAYS --output training.jsonl.xz
python -m research.training run --model MODEL --data training.jsonl.xz --arm soft,hard --output arms.jsonl
python -m research.training table arms.jsonl
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.common.arms import BEFORE
from bench.common.console import print_tables
from bench.common.options import Commit, Output, TimeLimit, make_app, parse_names, parse_sizes, usable_device
from bench.common.results import ResultFile, Row
from research.real.model import Llama
from research.training import evaluate
from research.training.arms import ARMS, OutOfTimeError, open_trainer, settings_of, train
from research.training.data import Amounts, prepare, read_data, write_data
from research.training.report import tables
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import find_preset, open_tokenizer, parse_additional_config, run_app
from vllm_sparse_plugin.tools.eval.items import Prompter
from vllm_sparse_plugin.tools.extras import TRAINING
from vllm_sparse_plugin.tools.files import read_text
from vllm_sparse_plugin.tools.models import end_tokens
from vllm_sparse_plugin.tools.provenance import describe_run
from vllm_sparse_plugin.tools.training.attention import ServedSelection

_RATES = {False: 2e-4, True: 5e-4}
"""Peak learning rates of all weights and of low-rank updates."""
_MOST_IDS = 1 << 16
_EVERYTHING = 1 << 20
"""A budget that no row exceeds."""

app = make_app("What training with the mask gains.")
Model = Annotated[Path, typer.Option(help="Folder of a Llama in transformers' format.")]


@app.command("prepare")
def write(
    model: Model,
    output: Annotated[Path, typer.Option(help="Compressed JSON lines to write.")],
    prose: Annotated[list[Path], typer.Option(help="Text file of held-out prose, repeatable.")],
    row_tokens: Annotated[int, typer.Option(help="Tokens of a training row and of a held-out text.")] = 8192,
    rows: Annotated[int, typer.Option(min=4, help="Training rows.")] = 400,
    learned_tokens: Annotated[int, typer.Option(min=1, help="Last tokens of a training text, to learn.")] = 512,
    context: Annotated[str, typer.Option(help="Tokens of held-out questions.")] = "4K,8K",
    questions: Annotated[int, typer.Option(min=1, help="Held-out questions per task and context.")] = 25,
    texts: Annotated[int, typer.Option(min=1, help="Held-out texts per kind.")] = 12,
) -> None:
    """Write training rows, held-out texts and held-out questions as tokens."""
    tokenizer = open_tokenizer(model)
    if len(tokenizer) > _MOST_IDS:
        raise ConfigurationError(f"model: got {len(tokenizer)} token ids, allowed: up to {_MOST_IDS}")
    amounts = Amounts(row_tokens, rows, learned_tokens, parse_sizes("context", [context]), questions, texts)
    data = prepare(tokenizer, amounts, "\n\n".join(read_text(path, "prose", "a file of text") for path in prose))
    write_data(output, data)
    learned = sum(sum(row.learned) for row in data.rows)
    typer.echo(f"{len(data.rows)} rows with {learned} learned tokens, {len(data.questions)} questions")


@app.command()
def run(
    model: Model,
    data: Annotated[Path, typer.Option(help="File of `prepare`.")],
    output: Output,
    arm: Annotated[list[str], typer.Option(help=f"Repeatable: {', '.join((BEFORE, *ARMS))}.")],
    seeds: Annotated[str, typer.Option(help="Of the order of rows, and of low-rank weights.")] = "0",
    lora_rank: Annotated[int, typer.Option(min=0, help="Rank of the updates; 0 trains all weights.")] = 0,
    settings: Annotated[str, typer.Option(help="JSON of other training settings, for all arms.")] = "{}",
    attention_backend: Annotated[str, typer.Option(help="Backend whose selection is trained.")] = "unique_paper",
    budget_tokens: Annotated[int, typer.Option(help="Budget to train for.")] = 128,
    budgets: Annotated[str, typer.Option(help="Budgets to measure, besides dense attention.")] = (
        "2048,1024,512,256,128,64"
    ),
    longest: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 64,
    at_once: Annotated[int, typer.Option(min=1, help="Questions that are answered at the same time.")] = 200,
    models: Annotated[Path | None, typer.Option(help="Folder for the trained models. Default: not kept.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda",
    time_limit: TimeLimit = 540,
    commit: Commit = None,
) -> None:
    """Train arms, measure each, and write each result at once. Exit code 3 if time runs out.

    A run has the same steps, rows, order of rows and schedule in all arms of a seed.
    """
    deadline = time.monotonic() + time_limit
    names, device = parse_names("arm", arm, (BEFORE, *ARMS)), usable_device(device)
    found, tokenizer = read_data(data), open_tokenizer(model)
    row_tokens = max(len(row.tokens) for row in found.rows)
    shared = {
        "steps": 100, "rows_per_step": 4, "learning_rate": _RATES[lora_rank > 0], "sequence_tokens": row_tokens,
        "gradient_checkpointing": False, **parse_additional_config(settings, "settings"), "lora_rank": lora_rank,
    }  # fmt: skip
    plans = {name: settings_of(ARMS[name], shared) for name in names if name != BEFORE}
    preset = find_preset(attention_backend)
    selections = {
        name: resolve({"selection": {"budget_tokens": _EVERYTHING if ARMS[name].is_dense else budget_tokens}}, preset)
        for name in plans
    }
    served = ServedSelection.of(resolve({"selection": {"budget_tokens": budget_tokens}}, preset))
    measured = (evaluate.DENSE, *parse_sizes("budgets", [budgets]))
    evaluate.check_budgets(found.questions, served, measured)
    prompter = Prompter(tokenizer, end_tokens=end_tokens(model))
    original = Llama.load(model, device, _dtype(device))
    with torch.no_grad():
        before = evaluate.dense_tokens(original, found.texts, served)

    def measure(weights: Llama) -> Iterator[Row]:
        with torch.no_grad():
            yield from evaluate.measure_texts(weights, found.texts, served, measured, before)
            yield from evaluate.measure_questions(
                weights, found.questions, served, measured, prompter.decode, prompter.end_tokens, longest, at_once
            )

    def train_and_measure(name: str, number: int, folder: Path) -> Iterator[Row]:
        chosen = plans[name].model_copy(update={"seed": number})
        trainer = open_trainer(model, folder, found, chosen, selections[name], tokenizer, device)
        yield from train(trainer, budget_tokens, deadline)
        del trainer
        gc.collect()
        yield from measure(Llama.load(folder, device, _dtype(device)))

    def measure_original() -> Iterator[Row]:
        with torch.no_grad():
            yield from evaluate.measure_noise(before, found.texts, served, Llama.load(model, device, torch.float32))
        yield from measure(original)

    about = describe_run(model, commit, tuple(TRAINING)) | {
        "settings": shared, "selection": attention_backend, "budget_tokens": budget_tokens
    }  # fmt: skip
    with ResultFile(output, about) as file, tempfile.TemporaryDirectory(prefix="vllm-sparse-") as scratch:
        for (place, number), name in product(enumerate(map(int, seeds.split(","))), names):
            if name == BEFORE and place:
                continue
            begin, about_arm = time.monotonic(), {"arm": name, "seed": number, "lora_rank": lora_rank}
            folder = (models or Path(scratch)) / f"{name}-{lora_rank}-{number}"
            rows = measure_original() if name == BEFORE else train_and_measure(name, number, folder)
            try:
                for row in rows:
                    file.write(about_arm | row | {"seconds": round(time.monotonic() - begin, 2)})
            except OutOfTimeError:
                typer.echo(f"time is up in {name}, seed {number}", err=True)
                raise typer.Exit(3) from None
            typer.echo(f"{name}, seed {number}: {time.monotonic() - begin:.0f} s", err=True)


@app.command("table")
def show(
    results: Annotated[list[Path], typer.Argument(help="Files of `run`, for one model.")],
) -> None:
    """Print the tables of result files."""
    print_tables(results, tables)


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


def main() -> None:
    """Run the command line. Bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
