"""A small model with attention sinks: trained from scratch in minutes on one GPU.

python -m research.witness train --output my-witness --seconds 460
python -m research.witness measure --model my-witness
python -m research.witness card --model my-witness
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.common.console import open_console
from bench.common.options import Commit, TimeLimit, make_app, split_values, usable_device
from bench.common.results import ResultFile, read_runs
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import run_app
from vllm_sparse_plugin.tools.provenance import describe_run

if TYPE_CHECKING:
    # Imported late otherwise: worker processes import this module, and need neither torch nor transformers.
    from research.witness.data import Corpus
    from research.witness.training import Stage

STAGES = ("1024:0.3", "2048:0.25", "4096:0.25", "8192:0.2")
LEAST_LENGTH = 256
_PACKAGES = ("numpy", "tokenizers", "safetensors")

app = make_app("A small model with attention sinks: trained from scratch in minutes on one GPU.")

_Text = Annotated[
    list[Path] | None,
    typer.Option(help="Folder of source code and documentation, repeatable; this interpreter's environment."),
]
_Device = Annotated[str | None, typer.Option(help="Torch device; the GPU if there is one.")]
_Questions = Annotated[int, typer.Option(min=1, help="Of each task and context.")]


@app.command()
def train(
    output: Annotated[Path, typer.Option(help="Model folder to write; must not be there.")],
    seconds: Annotated[float, typer.Option(help="Until the model is trained, reading text and compiling included.")],
    text: _Text = None,
    text_bytes: Annotated[int, typer.Option(help="Of text at most.")] = 120_000_000,
    stage: Annotated[
        list[str] | None,
        typer.Option(help=f"LENGTH:SHARE of the time, repeatable, in order; {', '.join(STAGES)} if left out."),
    ] = None,
    tokens_per_step: Annotated[int, typer.Option(min=1, help="Of one update.")] = 262_144,
    tokens_at_once: Annotated[int, typer.Option(min=1, help="Of one pass.")] = 131_072,
    document_tokens: Annotated[int, typer.Option(min=1, help="Of documents with questions, by length.")] = 40_000_000,
    text_share: Annotated[float, typer.Option(min=0, max=1, help="Of the sequences: plain text.")] = 0.5,
    answer_share: Annotated[float, typer.Option(min=0, max=1, help="Of the loss: answers.")] = 0.3,
    head_price: Annotated[float, typer.Option(min=0, help="Of the loss: attention that is not on token 0.")] = 0.3,
    free_share: Annotated[float, typer.Option(min=0, max=1, help="Of such attention: costs nothing.")] = 0.4,
    learning_rate: Annotated[float, typer.Option(help="At its peak.")] = 2e-3,
    warmup_steps: Annotated[int, typer.Option(min=1, help="Until that peak.")] = 100,
    weight_decay: Annotated[float, typer.Option(min=0, help="Of AdamW.")] = 0.1,
    layers: Annotated[int, typer.Option(min=1)] = 10,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 192,
    intermediate: Annotated[int, typer.Option(min=1, help="Of the MLP.")] = 448,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 4,
    seed: Annotated[int, typer.Option(help="Of weights, text and needles.")] = 0,
    device: _Device = None,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="With torch.compile; on a GPU if left out.")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="That tokenise; two fewer than there are cores.")] = None,
    measure_seconds: Annotated[float, typer.Option(min=0, help="For measuring after that; 0 for none.")] = 60,
    questions: _Questions = 32,
    commit: Commit = None,
) -> None:
    """Train from scratch, measure, and write a folder that transformers and vLLM load."""
    begin, console = time.monotonic(), open_console()
    if not seconds > 0:
        raise ConfigurationError(f"seconds: got {seconds:g}, allowed: more than 0")
    if output.exists():
        raise ConfigurationError(f"output: got {str(output)!r}, which is there, allowed: a new folder")
    if heads % kv_heads:
        raise ConfigurationError(f"kv_heads: got {kv_heads}, allowed: a divisor of {heads}")
    stages = _stages(stage or list(STAGES))
    from research.witness.data import DocumentPool, collect_text, encode_files, installed_text, open_workers

    corpus = collect_text(text or installed_text(), text_bytes, seed)
    console.print(f"{time.monotonic() - begin:.0f} s: read {len(corpus.files):,} files")
    try:
        output.mkdir(parents=True)
    except OSError as error:
        raise ConfigurationError(
            f"output: got {str(output)!r} ({error.strerror}), allowed: a folder that can be written"
        ) from None
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers share the cores already
    workers = open_workers(processes or max(1, (os.cpu_count() or 1) - 2))
    try:
        stream = encode_files(corpus.files, workers)
        console.print(f"{time.monotonic() - begin:.0f} s: {len(stream) / 1e6:.1f} M tokens of text")
        lengths = [each.length + 1 for each in stages]
        pool = DocumentPool(corpus.files, lengths, document_tokens, seed, workers)

        from research.witness.card import LOG
        from research.witness.model import build_model
        from research.witness.training import Recipe, Trainer
        from research.witness.training import train as run

        where = _device(device)
        recipe = Recipe(
            stages, tokens_per_step, tokens_at_once, text_share, answer_share, head_price, free_share,
            learning_rate, warmup_steps, weight_decay, seed,
        )  # fmt: skip
        model = build_model(layers, hidden, intermediate, heads, kv_heads, seed)
        about = describe_run(output, commit, _PACKAGES) | {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "recipe": asdict(recipe),
            "data": {
                "files": len(corpus.files), "tokens": len(stream), "text_bytes": text_bytes,
                "held_out_characters": len(corpus.held_out), "held_out": corpus.digest,
                "document_tokens": document_tokens,
            },
        }  # fmt: skip
        console.print(f"{time.monotonic() - begin:.0f} s: {about['parameters']:,} parameters on {where}")
        with ResultFile(output / LOG, about) as log:
            try:
                trainer = Trainer(model, recipe, where, where != "cpu" if compiled is None else compiled)
                run(trainer, recipe, stream, pool, begin + seconds, output, log)
            finally:
                _write_card(output)
    finally:
        workers.shutdown(wait=False, cancel_futures=True)
    console.print(f"{time.monotonic() - begin:.0f} s: saved {output}")
    if measure_seconds:
        _measure(output, corpus, where, questions, measure_seconds, None, commit)
        console.print(f"{time.monotonic() - begin:.0f} s: measured")


@app.command()
def measure(
    model: Annotated[Path, typer.Option(help="Folder that `train` wrote.")],
    output: Annotated[Path | None, typer.Option(help="JSON lines to write; measurements.jsonl of the folder.")] = None,
    text: _Text = None,
    device: _Device = None,
    questions: _Questions = 32,
    time_limit: TimeLimit = 600,
    commit: Commit = None,
) -> None:
    """Measure perplexity of text that was held out, answers, and where the heads look."""
    from research.witness.card import LOG
    from research.witness.data import collect_text, installed_text

    about = read_runs(model / LOG)[0].about
    corpus = collect_text(text or installed_text(), about["data"]["text_bytes"], about["recipe"]["seed"])
    _measure(model, corpus, _device(device), questions, time_limit, output, commit)


@app.command()
def card(model: Annotated[Path, typer.Option(help="Folder that `train` wrote.")]) -> None:
    """Write the folder's README.md from its log and its measurements."""
    _write_card(model)


def _stages(given: list[str]) -> tuple[Stage, ...]:
    from research.witness.model import MAX_POSITIONS
    from research.witness.training import Stage

    found = []
    for value in split_values(given):
        length, _, share = value.partition(":")
        try:
            found.append(Stage(int(length), float(share)))
        except ValueError:
            raise ConfigurationError(f"stage: got {value!r}, allowed: LENGTH:SHARE such as 1024:0.5") from None
    for stage in found:
        if not LEAST_LENGTH <= stage.length < MAX_POSITIONS:
            raise ConfigurationError(
                f"stage: got {stage.length} tokens, allowed: {LEAST_LENGTH} to {MAX_POSITIONS - 1}"
            )
    total = sum(stage.share for stage in found)
    if any(stage.share <= 0 for stage in found) or abs(total - 1) > 1e-6:
        raise ConfigurationError(f"stage: got shares of {total:g} together, allowed: shares above 0, 1 together")
    return tuple(found)


def _device(given: str | None) -> str:
    import torch

    return usable_device(given or ("cuda" if torch.cuda.is_available() else "cpu"))


def _measure(
    model: Path, corpus: Corpus, device: str, questions: int, seconds: float, output: Path | None, commit: str | None
) -> None:
    from research.witness.card import LOG, MEASUREMENTS
    from research.witness.measure import NEWEST
    from research.witness.measure import measure as run

    trained: dict[str, Any] = read_runs(model / LOG)[0].about
    about = describe_run(model, commit, _PACKAGES) | {
        "held_out": corpus.digest == trained["data"]["held_out"],
        "newest": NEWEST,
    }
    console = open_console()
    with ResultFile(output or model / MEASUREMENTS, about) as file:
        try:
            for row in run(model, corpus.held_out, device, questions, seconds):
                file.write(row)
                console.print(", ".join(f"{name} {value}" for name, value in row.items()), markup=False)
        finally:
            _write_card(model)


def _write_card(model: Path) -> None:
    from research.witness.card import PAGE, render

    (model / PAGE).write_text(render(model), encoding="utf-8")


def main() -> None:
    """Runs the command line; bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
