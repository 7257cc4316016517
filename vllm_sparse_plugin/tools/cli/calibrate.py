"""The command `vllm-sparse calibrate`: SinkRouter's thresholds for a model, and whether it should be routed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
import yaml
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_sparse_plugin.config.fingerprint import fingerprint_of
from vllm_sparse_plugin.errors import ConfigurationError, choices
from vllm_sparse_plugin.tools.arguments import (
    Device,
    ModelFolder,
    Seed,
    find_device,
    find_model,
    model_limits,
    open_tokenizer,
    read_prompts,
)
from vllm_sparse_plugin.tools.caches import ensure_caches
from vllm_sparse_plugin.tools.endings import open_console
from vllm_sparse_plugin.tools.models import name_of
from vllm_sparse_plugin.tools.needles import MIN_CONTEXT_TOKENS, QUESTIONS_PER_DOCUMENT, TASKS, build_questions
from vllm_sparse_plugin.tools.provenance import check_output, open_report, write_output

if TYPE_CHECKING:
    from vllm_sparse_plugin.tools.diagnostics.calibration import Outcome, Text

DEFAULT_TASKS = ("multikey", "kv")
LENGTHS = 4
"""Contexts that thresholds are found for, if the user names none: as many as a cubic has coefficients."""
SAMPLES = 50
"""Continuations of documents that thresholds are fitted to, at least, if the user names no number."""
_TEXT_QUERIES = 64


Prompts = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines with `prompt` and perhaps `completion`, as long as the longest context: thresholds are "
        "fitted to every other one and judged by the rest. Needle documents if left out."
    ),
]
Contexts = Annotated[
    list[int] | None,
    typer.Option(
        help=f"Context in tokens, repeatable, two or more; {LENGTHS} from {MIN_CONTEXT_TOKENS} to the model's "
        "longest. Engines with longer contexts than the longest of these are refused."
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(help=f"Task of needle documents, repeatable: {', '.join(TASKS)}; {' and '.join(DEFAULT_TASKS)}."),
]
Samples = Annotated[
    int,
    typer.Option(min=1, help="Questions of needle documents to fit to, at least; as many others judge."),
]
SkipRatio = Annotated[float, typer.Option(help="Share of the groups to be skipped.")]
Score = Annotated[Literal["mean", "max", "min"], typer.Option(help="Of the cosines of a group's heads.")]
DenseLayers = Annotated[int, typer.Option(min=0, help="Leading layers that are not routed.")]
Output = Annotated[
    Path | None, typer.Option(help="Preset to write; sinkrouter-MODEL.yaml if left out.", metavar="PATH")
]
Report = Annotated[
    Path | None,
    typer.Option("--json", help="Write a JSON line for the run and one for its results.", metavar="PATH"),
]


class _Documents(NamedTuple):
    """What thresholds are fitted to and judged by."""

    fitting: list[Text]
    judging: list[Text]
    data: str
    """What they are, in words."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all contexts."""
        return sum(text.length for text in (*self.fitting, *self.judging))


def calibrate(
    model: ModelFolder = None,
    prompts: Prompts = None,
    context: Contexts = None,
    task: Tasks = None,
    samples: Samples = SAMPLES,
    skip_ratio: SkipRatio = 0.6,
    score: Score = "mean",
    dense_layers: DenseLayers = 2,
    seed: Seed = 0,
    device: Device = None,
    output: Output = None,
    json_path: Report = None,
) -> None:
    """Find the thresholds at which SinkRouter skips a share of a model's KV groups, and say whether to use them.

    Runs the model in transformers. Thresholds are fitted to some documents and judged by others: the share of groups
    skipped by length and task, how many of those attend to the first token, how large the value is that a zero stands
    for, and the answers beside those of dense attention, at several skip ratios. Writes a preset for this model alone,
    to be given as `--additional-config '{"sparse_attention": {"config": "PATH"}}'`.
    """
    folder = find_model(model)
    limit, layers = model_limits(folder)
    lengths = _lengths(context, limit, 2 if prompts else MIN_CONTEXT_TOKENS)
    if not 0 < skip_ratio < 1:
        raise ConfigurationError(f"skip_ratio: got {skip_ratio}, allowed: more than 0 and less than 1")
    if dense_layers >= layers:
        raise ConfigurationError(f"dense_layers: got {dense_layers}, allowed: 0 to {layers - 1}")
    tasks = _check_tasks(task or list(DEFAULT_TASKS))
    given = _read_texts(prompts)
    preset = output or Path(f"sinkrouter-{name_of(folder)}.yaml")
    check_output(preset, "output")
    # Imported late: bad input need not wait for them.
    torch_device = find_device(device)
    ensure_caches()
    from vllm_sparse_plugin.tools.diagnostics import calibration
    from vllm_sparse_plugin.tools.diagnostics.forward import CapturingModel

    tokenizer = open_tokenizer(folder)
    console = open_console()
    with console.status("Writing the documents"):
        documents = _documents(tokenizer, given, prompts, tasks, lengths, samples, seed)
    with open_report(json_path, folder, "json") as report:
        with Progress(console=console, transient=True) as progress:
            captured = CapturingModel(folder, torch_device)
            bar = progress.add_task("Running the model", total=documents.num_tokens)
            outcome = calibration.calibrate(
                captured, documents.fitting, documents.judging, skip_ratio,
                lambda tokens: progress.advance(bar, tokens), score, dense_layers, _origin(folder, documents.data),
            )  # fmt: skip
        report.add({**asdict(outcome), "routing": outcome.routing.model_dump()})
        _print(outcome, documents, console)
        write_output(preset, _preset(outcome), "output")
        console.print(f"Wrote {preset}.", markup=False, highlight=False, soft_wrap=True)


def _check_tasks(tasks: list[str]) -> list[str]:
    for name in tasks:
        if name not in TASKS:
            raise ConfigurationError(f"task: got {name!r}, allowed: {choices(TASKS)}")
    return tasks


def _read_texts(prompts: Path | None) -> list[str] | None:
    """The texts of a file, None without one."""
    if prompts is None:
        return None
    texts = [entry["prompt"] + entry["completion"] for entry in read_prompts(prompts)]
    if len(texts) < 2:
        raise ConfigurationError(f"prompts: got one in {str(prompts)!r}, allowed: two or more")
    return texts


def _documents(
    tokenizer: Any,
    given: list[str] | None,
    prompts: Path | None,
    tasks: list[str],
    lengths: list[int],
    samples: int,
    seed: int,
) -> _Documents:
    """Half of them to fit to and half to judge by: the texts of a file, or needle documents without one."""
    contexts = f"contexts of {', '.join(map(str, lengths))} tokens"
    if given is None or prompts is None:
        fitting, judging = (list(_needles(tokenizer, tasks, lengths, samples, 2 * seed + part)) for part in (0, 1))
        parts = f"{_count(fitting)} questions to fit to, {_count(judging)} to judge by"
        kind = f"needle documents ({', '.join(tasks)}), {parts}, seed {seed}"
        return _Documents(fitting, judging, f"{kind}, {contexts}")
    texts = [tokenizer.encode(text) for text in given]
    fitting, judging = (list(_cut(texts[part::2], lengths)) for part in (0, 1))
    kind = f"{prompts.name}, {_count(fitting)} texts to fit to, {_count(judging)} to judge by"
    return _Documents(fitting, judging, f"{kind}, {contexts}")


def _origin(folder: Path, data: str) -> dict[str, str | None]:
    """The fields of `Routing` that say where thresholds come from."""
    date = datetime.now(UTC).date().isoformat()
    return {"fingerprint": fingerprint_of(folder), "model": name_of(folder), "data": data, "date": date}


def _print(outcome: Outcome, documents: _Documents, console: Console) -> None:
    for table in _tables(outcome):
        console.print(table)
    fitted, lengths = _count(documents.fitting), len(outcome.thresholds)
    few = fitted < SAMPLES or lengths < LENGTHS
    more = f"; take {SAMPLES} samples and {LENGTHS} lengths or more before you serve with it" if few else ""
    console.print(f"Fitted to {fitted} samples of {lengths} lengths{more}.", highlight=False, soft_wrap=True)
    console.print(f"AUPRC of the score as a sign of a sink group: {_number(outcome.auprc)}.")
    recommended = f"Routing is {'' if outcome.verdict.route else 'NOT '}recommended for {outcome.routing.model}: "
    console.print(recommended, end="")
    console.print(f"{outcome.verdict.reason}.", highlight=False)


def _lengths(given: list[int] | None, limit: int, least: int) -> list[int]:
    """The contexts to calibrate at, ascending."""
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


def _count(texts: Sequence[Text]) -> int:
    """Continuations of documents."""
    return sum(len(text.rest) for text in texts)


def _needles(tokenizer: Any, tasks: Sequence[str], lengths: Sequence[int], samples: int, seed: int) -> Iterator[Text]:
    """Documents with their questions and answers: as many of each length and task, `samples` questions or more."""
    from vllm_sparse_plugin.tools.diagnostics.calibration import Text
    from vllm_sparse_plugin.tools.eval.items import Prompter

    prompter = Prompter(tokenizer)
    for length in lengths:
        for task in tasks:
            by_document = 1 if task == "single" else QUESTIONS_PER_DOCUMENT
            count = by_document * math.ceil(samples / (len(lengths) * len(tasks) * by_document))
            texts: dict[tuple[int, ...], Text] = {}
            for question in build_questions(tokenizer, task, length, count, seed):
                # Where a token spans the end of the document, questions do not share it.
                document, asked = prompter.split(*question.parts)
                answer = prompter.encode_plain(f" {question.answer}")
                text = texts.setdefault(tuple(document), Text(task, length, document, [], []))
                text.rest.append(asked + answer)
                text.asked.append(len(answer))
            yield from texts.values()


def _cut(texts: list[list[int]], lengths: Sequence[int]) -> Iterator[Text]:
    """The beginnings of texts, of whose last tokens the queries are looked at.

    Raises:
        ConfigurationError: for a text that is shorter than the longest context.
    """
    from vllm_sparse_plugin.tools.diagnostics.calibration import Text

    for length in lengths:
        for tokens in texts:
            if len(tokens) < length:
                raise ConfigurationError(
                    f"prompts: got a text of {len(tokens)} tokens, allowed: the longest context's {lengths[-1]} or more"
                )
            rest = min(_TEXT_QUERIES, length // 2)
            yield Text("text", length, tokens[: length - rest], [tokens[length - rest : length]], [rest - 1])


def _preset(outcome: Outcome) -> str:
    """The preset's YAML."""
    routing, verdict = outcome.routing, outcome.verdict
    about = "" if verdict.route else f"# Routing is not recommended for this model: {verdict.reason}.\n"
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in routing.model_dump().items()}
    given = {name: value for name, value in values.items() if value is not None}
    body = yaml.safe_dump({"selection": {"policy": "dense"}, "routing": given}, sort_keys=False, width=1000)
    return f"# SinkRouter for {routing.model}, written by vllm-sparse calibrate.\n{about}{body}"


def _tables(outcome: Outcome) -> Iterator[Table]:
    table = Table("context", "task", title="Documents that the thresholds were not fitted to")
    for heading in ("threshold found", "skipped", "sink groups"):
        table.add_column(heading, justify="right")
    for row in outcome.rows:
        table.add_row(
            str(row["context_tokens"]), row["task"], f"{outcome.thresholds[row['context_tokens']]:.4f}",
            f"{row['skipped']:.1%}", f"{row['sink_groups']:.1%}",
        )  # fmt: skip
    yield table
    table = Table("context", "task", title="What is right of their answers")
    for heading in ("dense", "routed", "tokens, dense", "tokens, routed"):
        table.add_column(heading, justify="right")
    for row in outcome.rows:
        table.add_row(
            str(row["context_tokens"]), row["task"],
            *(f"{row[key]}/{row['answers']}" for key in ("dense_answers_right", "routed_answers_right")),
            *(f"{row[key] / row['tokens']:.1%}" for key in ("dense_tokens_right", "routed_tokens_right")),
        )  # fmt: skip
    yield table
    table = Table(title="By layer; the norm of token 0's value over the median of the others', mean and largest")
    for heading in ("layer", "skipped", "attention on token 0", "sink groups", "value of token 0", "largest"):
        table.add_column(heading, justify="right")
    for row in outcome.layers:
        table.add_row(
            str(row["layer"]), f"{row['skipped']:.1%}", f"{row['mass']:.4f}", f"{row['sink_groups']:.1%}",
            f"{row['first_value']:.3f}", f"{row['first_value_largest']:.3f}",
        )  # fmt: skip
    yield table
    table = Table(title="By the share that thresholds were fitted to skip: precision and recall are of sink groups")
    for heading in ("asked for", "skipped", "precision", "recall", "tokens right", "answers right"):
        table.add_column(heading, justify="right")
    for row in outcome.sweep:
        table.add_row(
            f"{row['skip_ratio']:.0%}", f"{row['skipped']:.1%}", _number(row["precision"]), _number(row["recall"]),
            f"{row['tokens_right'] / row['tokens']:.1%}", f"{row['answers_right']}/{row['answers']}",
        )  # fmt: skip
    yield table


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"
