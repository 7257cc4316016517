"""The command `vllm-sparse calibrate`: fits SinkRouter's thresholds for a model, and reports whether to use them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
import yaml
from rich.console import Console
from rich.table import Table

from vllm_sparse_plugin.config.fingerprint import fingerprint_of
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import (
    Device,
    ModelFolder,
    Report,
    Seed,
    find_device,
    find_model,
    model_limits,
    open_tokenizer,
)
from vllm_sparse_plugin.tools.caches import ensure_caches
from vllm_sparse_plugin.tools.diagnostics.texts import (
    DEFAULT_TASKS,
    LENGTHS,
    MIN_TEXT_TOKENS,
    SAMPLES,
    Documents,
    are_few,
    build_documents,
    count_continuations,
    read_texts,
)
from vllm_sparse_plugin.tools.endings import open_console, say
from vllm_sparse_plugin.tools.eval.progress import show_progress
from vllm_sparse_plugin.tools.models import name_of
from vllm_sparse_plugin.tools.needles import ALL_TASKS, MIN_CONTEXT_TOKENS, check_questions
from vllm_sparse_plugin.tools.provenance import check_output, open_report, write_output

if TYPE_CHECKING:
    from vllm_sparse_plugin.tools.diagnostics.calibration import Outcome


def calibrate(
    model: ModelFolder = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with `prompt` and an optional `completion`. Each text must be as long as the longest "
            "context. Every other text fits the thresholds, the rest judge them. Default: needle documents."
        ),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            help=f"Context in tokens, repeatable, two or more. Default: {LENGTHS} from {MIN_CONTEXT_TOKENS} to the "
            "model's longest. The preset refuses engines with longer contexts."
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help=f"Needle task, repeatable: {', '.join(ALL_TASKS)}. Default: {' and '.join(DEFAULT_TASKS)}."),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(min=1, help="Minimum number of needle questions to fit to. As many others judge."),
    ] = SAMPLES,
    skip_ratio: Annotated[float, typer.Option(help="Share of the KV groups to skip.")] = 0.6,
    score: Annotated[
        Literal["mean", "max", "min"], typer.Option(help="How to combine the cosines of a group's heads.")
    ] = "mean",
    dense_layers: Annotated[int, typer.Option(min=0, help="First layers, which are never routed.")] = 2,
    seed: Seed = 0,
    device: Device = None,
    output: Annotated[
        Path | None, typer.Option(help="Preset to write. Default: sinkrouter-MODEL.yaml.", metavar="PATH")
    ] = None,
    json_path: Report = None,
) -> None:
    """Fit SinkRouter's thresholds for one model, and report whether to use them.

    Runs the model in transformers. One half of the documents fits the thresholds, the other half judges them.

    The report has:

    - the share of KV groups skipped, by length and task
    - how many skipped groups attend to the first token
    - the norm of token 0's value, which a skipped group replaces by zero
    - the answers beside those of dense attention

    Writes a preset for this model only. Use it with `--additional-config '{"sparse_attention": {"config": "PATH"}}'`.
    """
    folder = find_model(model)
    limit, layers = model_limits(folder)
    lengths = _lengths(context, limit, MIN_TEXT_TOKENS if prompts else MIN_CONTEXT_TOKENS)
    if not 0 < skip_ratio < 1:
        raise ConfigurationError(f"skip_ratio: got {skip_ratio}, allowed: more than 0 and less than 1")
    if dense_layers >= layers:
        raise ConfigurationError(f"dense_layers: got {dense_layers}, allowed: 0 to {layers - 1}")
    tasks = task or list(DEFAULT_TASKS)
    if prompts is None:
        check_questions(tasks, lengths, samples)
    texts = read_texts(prompts)
    preset = output or Path(f"sinkrouter-{name_of(folder)}.yaml")
    check_output(preset, "output")
    # Imported here: bad input must not wait for it.
    torch_device = find_device(device)
    ensure_caches()
    from vllm_sparse_plugin.tools.diagnostics import calibration
    from vllm_sparse_plugin.tools.diagnostics.forward import captured_model

    tokenizer = open_tokenizer(folder)
    console = open_console()
    with open_report(json_path, folder, "json") as report:
        with show_progress(console, "Writing the documents"):
            documents = build_documents(tokenizer, texts, prompts, tasks, lengths, samples, seed)
        with captured_model(folder, torch_device, documents.num_tokens, console) as (captured, progress):
            outcome = calibration.calibrate(
                captured, documents.fitting, documents.judging, skip_ratio,
                progress, score, dense_layers, _origin(folder, documents.data),
            )  # fmt: skip
        report.add({**asdict(outcome), "routing": outcome.routing.model_dump()})
        _print(outcome, documents, console)
        write_output(preset, _preset(outcome), "output")
        say(console, f"Wrote {preset}.")


def _origin(folder: Path, data: str) -> dict[str, str | None]:
    """Return the fields of `Routing` that record the origin of the thresholds."""
    date = datetime.now(UTC).date().isoformat()
    return {"fingerprint": fingerprint_of(folder), "model": name_of(folder), "data": data, "date": date}


def _print(outcome: Outcome, documents: Documents, console: Console) -> None:
    for table in _tables(outcome):
        console.print(table)
    fitted, lengths = count_continuations(documents.fitting), len(outcome.thresholds)
    told = f"Fitted to {fitted} samples of {lengths} lengths"
    if are_few(fitted, lengths):
        told += f"; take {SAMPLES} samples and {LENGTHS} lengths or more before you serve with it"
    say(console, f"{told}.")
    say(
        console,
        f"Skipped groups that are sink groups: {_number(outcome.detection.precision)}. Sink groups that are skipped: "
        f"{_number(outcome.detection.recall)}. AUPRC of the score as a sign of a sink group: {_number(outcome.auprc)}.",
    )
    recommended = f"Routing is {'' if outcome.verdict.route else 'NOT '}recommended for {outcome.routing.model}: "
    console.print(recommended, end="")
    say(console, f"{outcome.verdict.reason}.")


def _lengths(given: list[int] | None, limit: int, least: int) -> list[int]:
    """Return the contexts to calibrate at, ascending."""
    if given is None:
        ratio = limit / MIN_CONTEXT_TOKENS
        given = [round(MIN_CONTEXT_TOKENS * ratio ** (i / (LENGTHS - 1))) for i in range(LENGTHS)] if ratio > 1 else []
    lengths = sorted(set(given))
    if len(lengths) < 2 or lengths[0] < least or lengths[-1] > limit:
        raise ConfigurationError(
            f"context: got {', '.join(map(str, lengths)) or f'a model of {limit}'} tokens, allowed: two or more "
            f"lengths from {least} to the model's {limit}"
        )
    return lengths


def _preset(outcome: Outcome) -> str:
    """Return the preset as YAML."""
    routing, verdict = outcome.routing, outcome.verdict
    about = "" if verdict.route else f"# Routing is not recommended for this model: {verdict.reason}.\n"
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in routing.model_dump().items()}
    given = {name: value for name, value in values.items() if value is not None}
    body = yaml.safe_dump({"selection": {"policy": "dense"}, "routing": given}, sort_keys=False, width=1000)
    return f"# SinkRouter for {routing.model}, written by vllm-sparse calibrate.\n{about}{body}"


def _tables(outcome: Outcome) -> Iterator[Table]:
    table = Table("context", "task", title="Documents that judge the thresholds, and the share of them that is right")
    headings = "threshold", "skipped", "sink groups", "answers, dense", "routed", "tokens, dense", "routed"
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in outcome.rows:
        table.add_row(
            str(row["context_tokens"]), row["task"], f"{outcome.thresholds[row['context_tokens']]:.4f}",
            f"{row['skipped']:.1%}", f"{row['sink_groups']:.1%}",
            *(f"{row[key]}/{row['answers']}" for key in ("dense_answers_right", "routed_answers_right")),
            *(f"{row[key] / row['tokens']:.1%}" for key in ("dense_tokens_right", "routed_tokens_right")),
        )  # fmt: skip
    yield table
    table = Table(title="By layer. Value of token 0: its norm over the median norm of the other values")
    for heading in ("layer", "skipped", "attention on token 0", "sink groups", "value of token 0", "largest"):
        table.add_column(heading, justify="right")
    for row in outcome.layers:
        table.add_row(
            str(row["layer"]), f"{row['skipped']:.1%}", f"{row['mass']:.4f}", f"{row['sink_groups']:.1%}",
            f"{row['first_value']:.3f}", f"{row['first_value_largest']:.3f}",
        )  # fmt: skip
    yield table


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"
