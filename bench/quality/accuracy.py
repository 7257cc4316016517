"""Accuracy of dense and sparse attention on needle questions, one engine per setting, in one process.

python -m bench.quality accuracy --output accuracy.jsonl
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from pydantic import BaseModel, ConfigDict
from rich.table import Table

from bench.common.children import run_python
from bench.common.console import end_with, open_console
from bench.common.engine import Variant, engine, exits_for_wrong_backend, parse_variants
from bench.common.models import NEEDLE_8M, Model, load_tokenizer, open_model
from bench.common.options import Commit, Output, TimeLimit, parse_sizes, split_values
from bench.common.results import ResultFile, Row, read_run
from bench.quality.questions import check, write_questions
from vllm_sparse_plugin.config import KEY
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.policies.unique import UniqueSelection
from vllm_sparse_plugin.tools.engine import free_engines
from vllm_sparse_plugin.tools.needles import TASKS, Question, answer_tokens, is_correct
from vllm_sparse_plugin.tools.provenance import describe_gpu, describe_run

if TYPE_CHECKING:
    from vllm import LLM

PAGE_SIZE = 8
STATISTICS = tuple(kind for kind in get_args(UniqueSelection.model_fields["statistics"].annotation) if kind != "auto")
DEFAULT_PAGES = ("64,32,16,8",)
DEFAULT_CONTEXTS = ("4K,8K,16K,32K",)
_MAX_NUM_SEQS = 32


@dataclass(frozen=True)
class Setting:
    """One engine's configuration."""

    variant: Variant
    pages: int | None = None
    """Budget in pages; None for dense attention."""
    statistics: str | None = None
    """Statistics of pages; None for dense attention."""

    @property
    def name(self) -> str:
        """Name in tables."""
        return self.variant.name if self.pages is None else f"{self.variant.name} {self.statistics} {self.pages}"

    @property
    def additional_config(self) -> str | None:
        """The JSON for vLLM's `--additional-config`."""
        if self.pages is None:
            return None
        selection = {"page_size": PAGE_SIZE, "budget_tokens": self.pages * PAGE_SIZE, "statistics": self.statistics}
        return json.dumps({KEY: {"selection": selection}})


class Job(BaseModel):
    """The input of a process that runs engines."""

    model_config = ConfigDict(frozen=True)

    model: str
    """Folder of the model."""
    engines: tuple[tuple[str, int | None, str | None], ...]
    """Variant, pages and statistics of each setting."""
    block_size: int | None
    gpu_memory_utilization: float
    questions: str
    """JSON file with the questions."""
    output: str
    """JSON lines file to append to."""


def all_settings(
    dense: Iterable[str], sparse: Iterable[str], pages: Sequence[int], statistics: Sequence[str]
) -> list[Setting]:
    """Every dense variant, and every combination of sparse variant, budget and format.

    Raises:
        ConfigurationError: for an unknown variant, format or budget, or a variant in the wrong list.
    """
    settings = [Setting(variant) for variant in parse_variants(dense)]
    settings += [
        Setting(variant, budget, kind) for variant in parse_variants(sparse) for kind in statistics for budget in pages
    ]
    for setting in settings:
        if setting.variant.sparse != (setting.pages is not None):
            option, allowed = (
                ("dense", "a backend of vLLM") if setting.pages is None else ("sparse", "a backend of the plugin")
            )
            raise ConfigurationError(f"{option}: got {setting.variant.name!r}, allowed: {allowed}")
        setting.variant.additional_config(setting.additional_config)
    return settings


def unfinished(settings: list[Setting], rows: list[dict[str, Any]], rows_each: int) -> int:
    """Index of the first setting without all of its rows; the last index if all are complete."""
    written = Counter(row["setting"] for row in rows)
    return next((i for i, each in enumerate(settings) if written[each.name] < rows_each), len(settings) - 1)


def accuracy(
    output: Output,
    model: Annotated[str, typer.Option(help="needle-8m or a folder.")] = NEEDLE_8M.name,
    dense: Annotated[list[str] | None, typer.Option(help="Dense variant, repeatable. Default: `dense`.")] = None,
    sparse: Annotated[list[str] | None, typer.Option(help="Sparse variant, repeatable. Default: `unique`.")] = None,
    pages: Annotated[
        list[str] | None,
        typer.Option(help=f"Pages of 8 tokens to read, repeatable. Default: {', '.join(DEFAULT_PAGES)}."),
    ] = None,
    statistics: Annotated[
        list[str] | None, typer.Option(help=f"Statistics of pages, repeatable. Default: {', '.join(STATISTICS)}.")
    ] = None,
    context: Annotated[
        list[str] | None, typer.Option(help="Context in tokens, repeatable. Default: 4K,8K,16K,32K.")
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help=f"Task, repeatable. Default: {', '.join(TASKS)}.")] = None,
    questions: Annotated[int, typer.Option(help="Questions for each task and context.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of documents and needles.")] = 0,
    block_size: Annotated[int | None, typer.Option(min=1, help="As for vLLM.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(min=0.05, max=1, help="As for vLLM.")] = 0.1,
    engines_per_process: Annotated[
        int | None, typer.Option(min=1, help="Default: all on a GPU, 1 on a CPU, where vLLM cannot start a second one.")
    ] = None,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Ask engines of all settings the same needle questions; exit code 3 if one fails or time runs out."""
    end = time.monotonic() + time_limit
    tasks, contexts = split_values(task or TASKS), parse_sizes("context", context or DEFAULT_CONTEXTS)
    budgets, kinds = parse_sizes("pages", pages or DEFAULT_PAGES), split_values(statistics or STATISTICS)
    settings = all_settings(dense or ["dense"], sparse or ["unique"], budgets, kinds)
    console = open_console()
    failed = []
    with open_model(model) as opened:
        check(opened, contexts, tasks, questions)
        with ResultFile(output, describe_run(opened.folder, commit)):
            pass
        with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:
            with console.status("Writing the questions"):
                asked = write_questions(opened, contexts, tasks, questions, seed, os.cpu_count() or 1)

                path = Path(folder) / "questions.json"
                path.write_text(json.dumps([asdict(question) for question in asked]), encoding="utf-8")
            per_process = engines_per_process or (len(settings) if describe_gpu() else 1)
            while settings:
                group = settings[:per_process]
                job = Job(
                    model=str(opened.folder),
                    engines=tuple((each.variant.name, each.pages, each.statistics) for each in group),
                    block_size=block_size,
                    gpu_memory_utilization=gpu_memory_utilization,
                    questions=str(path),
                    output=str(output.absolute()),
                )
                code = run_python("bench.quality", ["accuracy-engines", job.model_dump_json()], end - time.monotonic())
                if code == 0:
                    settings = settings[len(group) :]
                    continue
                first = unfinished(group, read_run(output).rows, len(contexts) * len(tasks))
                if code is None:
                    failed.append(f"{settings[first].name} and all later settings: not done by the deadline")
                    break
                # The settings after a failed engine get a new process.
                failed.append(f"{settings[first].name}: ended with exit code {code}")
                settings = settings[first + 1 :]
    for lines in tables(read_run(output).rows):
        console.print(lines)
    end_with(failed)


def accuracy_engines(text: Annotated[str, typer.Argument(metavar="JSON")]) -> None:
    """Ask some engines in this process for `accuracy`, and append a row for each task and context."""
    job = Job.model_validate_json(text)
    questions = [Question(**each) for each in json.loads(Path(job.questions).read_text(encoding="utf-8"))]
    arguments = {"block_size": job.block_size, "gpu_memory_utilization": job.gpu_memory_utilization}
    with exits_for_wrong_backend(), open_model(job.model) as model, ResultFile(Path(job.output)) as file:
        for i, (variant, pages, statistics) in enumerate(job.engines):
            if i:
                # Nothing references the previous engine now.
                free_engines()
            setting = Setting(Variant.parse(variant), pages, statistics)
            correct = _measure(setting, model, questions, arguments, file.write)
            print(f"{setting.name}: {correct}/{len(questions)}", flush=True)


def _measure(
    setting: Setting,
    model: Model,
    questions: list[Question],
    arguments: dict[str, Any],
    write: Callable[[Row], None],
) -> int:
    """Start an engine, ask all questions, write a row for each task and context; return the number of answers."""
    begin = time.perf_counter()
    tokenizer = load_tokenizer(model.folder)
    with engine(
        model,
        setting.variant,
        setting.additional_config,
        max_model_len=max(question.context_tokens for question in questions),
        max_num_seqs=_MAX_NUM_SEQS,
        enable_prefix_caching=True,
        enforce_eager=True,
        **arguments,
    ) as (llm, backend):
        about = {
            "setting": setting.name,
            "variant": setting.variant.name,
            "attention_backend": backend,
            "statistics": setting.statistics,
            "budget_pages": setting.pages,
            "start_seconds": round(time.perf_counter() - begin, 1),
        }
        return _ask(llm, tokenizer, questions, lambda row: write(about | row))


def _ask(llm: LLM, tokenizer: Any, questions: list[Question], write: Callable[[Row], None]) -> int:
    """Ask all questions, write a row for each task and context; return the number of answers."""
    from vllm import SamplingParams

    total = 0
    for context, task in dict.fromkeys((question.context_tokens, question.task) for question in questions):
        asked = [question for question in questions if (question.context_tokens, question.task) == (context, task)]
        prompts: Any = [{"prompt_token_ids": tokenizer.encode(question.prompt)} for question in asked]
        sampling = SamplingParams(temperature=0, max_tokens=answer_tokens(task))
        begin = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        right = [is_correct(question, output.outputs[0].text) for question, output in zip(asked, outputs, strict=True)]
        total += sum(right)
        write(
            {
                "task": task,
                "context_tokens": context,
                "questions": len(asked),
                "correct": sum(right),
                "wrong": [i for i, answered in enumerate(right) if not answered],
                "seconds": round(seconds, 3),
            }
        )
    return total


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Return a table for each sparse variant and format. Every table includes the dense variants."""
    dense = list(dict.fromkeys(row["setting"] for row in rows if row["budget_pages"] is None))
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row["budget_pages"] is not None:
            settings = groups.setdefault(f"{row['variant']}, statistics in {row['statistics']}", [])
            if row["setting"] not in settings:
                settings.append(row["setting"])
    found = {(row["context_tokens"], row["task"], row["setting"]): row for row in rows}
    places = list(dict.fromkeys((context, task) for context, task, _ in found))
    result = []
    for title, sparse in (groups or {"dense": []}).items():
        budgets = {row["setting"]: f"{row['budget_pages']} pages" for row in rows if row["budget_pages"] is not None}
        lines = Table("context", "task", title=f"Needles answered: {title}")
        for setting in (*dense, *sparse):
            lines.add_column(budgets.get(setting, setting), justify="right")
        for context, task in places:
            cells = (found.get((context, task, setting)) for setting in (*dense, *sparse))
            lines.add_row(
                str(context), task, *(f"{row['correct']}/{row['questions']}" if row else "-" for row in cells)
            )
        result.append(lines)
    return result
