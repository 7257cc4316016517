"""The command `vllm-sparse needles`: compares the accuracy of sparse servers with a dense server."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from math import sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from vllm_sparse_plugin.config import KEY, read_trained_section, resolve
from vllm_sparse_plugin.config.account import PREFERRED_BLOCK, ModelKeys
from vllm_sparse_plugin.errors import ConfigurationError, choices
from vllm_sparse_plugin.names import BACKENDS
from vllm_sparse_plugin.tools import provenance
from vllm_sparse_plugin.tools.arguments import (
    AdditionalConfig,
    AttentionBackends,
    ModelFolder,
    Report,
    Seed,
    beside_preset,
    find_model,
    model_limits,
    model_shape,
    open_tokenizer,
    parse_additional_config,
)
from vllm_sparse_plugin.tools.caches import ensure_caches
from vllm_sparse_plugin.tools.cores import is_cpu_build
from vllm_sparse_plugin.tools.endings import open_console, say
from vllm_sparse_plugin.tools.eval.endpoints import Server
from vllm_sparse_plugin.tools.eval.items import Item, PlannedItem, Prompter, score
from vllm_sparse_plugin.tools.eval.progress import show_progress
from vllm_sparse_plugin.tools.eval.results import Result, ask
from vllm_sparse_plugin.tools.eval.tasks import needle_items
from vllm_sparse_plugin.tools.needles import ALL_TASKS, QUICK_TASKS, TASKS, check_questions, first_line
from vllm_sparse_plugin.tools.provenance import open_report
from vllm_sparse_plugin.tools.server import LaunchedServer, ServerSettings, launch_server, run_server

_DENSE = "dense"
"""Label of vLLM's own attention, unless the plugin's backend `dense` is compared as well."""
_VLLM = "vllm"
_LEVEL = 0.95
_MORE = (
    "This is the short test. The whole one: --all. The same questions to a server that reads the newest tokens only: "
    "--attention-backend streaming_llm."
)
_NO_GAIN = (
    "The seconds are no gain: they contain the prompts, the model is small, and a short context leaves little to save."
)
_EXAMPLE_PROMPT = (
    "def load(path):\n    return open(path).read()\n"
    "\nThe special magic number for zudewi bizino is: 4815162.\n"
    "\nThe special magic number for kalomu terife is: 2718281.\n"
    "\ndef keys(path):\n    return sorted(load(path))\n"
    "\nWhat is the special magic number for zudewi bizino? Answer:"
)  # fmt: skip


def needle_test(
    model: ModelFolder = None,
    context: Annotated[list[int] | None, typer.Option(help="Context in tokens, repeatable. Default: 4096.")] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Task, repeatable. Default: {', '.join(QUICK_TASKS)}. "
            f"Others: {', '.join(name for name in ALL_TASKS if name not in QUICK_TASKS)}."
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help=f"Ask {', '.join(TASKS)} at 4096 and 16384 tokens.")
    ] = False,
    questions: Annotated[int, typer.Option(help="Questions per task and context.")] = 8,
    attention_backend: AttentionBackends = None,
    additional_config: AdditionalConfig = "{}",
    seed: Seed = 0,
    min_ratio: Annotated[float, typer.Option(help="Required accuracy, as a fraction of the dense accuracy.")] = 0.95,
    json_path: Report = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Start the sparse server, ask nothing, and keep it until Ctrl-C.")
    ] = False,
) -> None:
    """Ask sparse servers and a dense server the same needle questions and compare their accuracy.

    Exit codes:

    - 0: every backend reaches the required accuracy
    - 1: a backend does not
    - 2: bad input
    - 3: a server failed
    """
    model = find_model(model)
    backends = attention_backend or ["unique"]
    contexts = context or ([4096, 16384] if everything else [4096])
    tasks = task or list(TASKS if everything else QUICK_TASKS)
    check_questions(tasks, contexts, questions, model_limits(model)[0])
    shares = _keys_of(model, backends, additional_config)
    if not 0 <= min_ratio <= 1:
        raise ConfigurationError(f"min_ratio: got {min_ratio}, allowed: 0 to 1")
    if keep and len(backends) > 1:
        raise ConfigurationError(f"attention_backend: got {len(backends)} of them, allowed with keep: one")
    dense = ServerSettings(model, max(contexts), None, log_lines=0, every_core=True)
    # The plugin's backend takes the name `dense`; vLLM's own attention then takes vLLM's name.
    reference = _VLLM if _DENSE in map(str.lower, backends) else _DENSE
    servers = {reference: dense}
    servers |= {name: replace(dense, backend=name, additional_config=additional_config) for name in backends}
    console = open_console()
    ensure_caches()
    if keep:
        _keep(servers[backends[0]], console)
        return
    with open_report(json_path, model, "json") as report:
        results = _ask_all(servers, partial(_items, model, contexts, tasks, questions, seed), report, console)
        for name in backends:
            console.print(_table(name, results[name], reference, results[reference], shares[name]))
            console.print(_answers(name, results[name], reference, results[reference]))
        say(console, _NO_GAIN)
        enough = [_enough(name, reference, results, min_ratio, console) for name in backends]
        if not everything:
            say(console, _MORE)
    if not all(enough):
        raise typer.Exit(1)


def _items(model: Path, contexts: list[int], tasks: list[str], count: int, seed: int) -> list[Item]:
    """Return the questions, ordered by context and task."""
    return [
        item for size in contexts for task in tasks for item in needle_items(_prompter(model), task, size, count, seed)
    ]


@cache
def _prompter(model: Path) -> Prompter:
    return Prompter(open_tokenizer(model))


def _ask_all(
    servers: dict[str, ServerSettings], write: Callable[[], list[Item]], report: provenance.Report, console: Console
) -> dict[str, list[Result]]:
    """Ask every server all questions that `write` returns, one server after the other.

    On a CPU as many servers start at once as there are cores: a start is mostly serial, and an idle server sleeps.
    On a GPU servers start one by one, because each takes most of the memory.
    """
    at_once = max(1, os.cpu_count() or 1) if is_cpu_build() else 1
    items: list[Item] = []
    results: dict[str, list[Result]] = {}
    for first in range(0, len(servers), at_once):
        starting = list(servers.items())[first : first + at_once]
        with ExitStack() as running:
            launched = [running.enter_context(launch_server(*each)) for each in starting]
            title = f"Starting the {' and the '.join(name for name, _ in starting)} server, 1 to 4 min"
            with show_progress(console, title):
                items = items or write()
                for server in launched:
                    server.wait_until_ready()
            for server in launched:
                results[server.name] = _ask(server, items, report, console)
                server.stop()
    return results


def _ask(server: LaunchedServer, items: list[Item], report: provenance.Report, console: Console) -> list[Result]:
    """Ask one server all questions. Print a line for each task and context, and record each answer."""
    planned = [PlannedItem(item.id, partial(lambda item: item, item)) for item in items]
    results: list[Result] = []
    with server.explain_failures():
        endpoint = Server(server.client, server.settings.model.name, concurrency=1)
        replies = ask(endpoint, planned, "prompt", _prompter(server.settings.model), score, console, server.name)
        for (task, context_tokens), part in groupby(replies, _row):
            answered = []
            for result in part:
                report.add(_record(server.name, result))
                answered.append(result)
            seconds = sum(result.seconds for result in answered)
            say(
                console,
                f"{server.name}: {task} at {context_tokens} tokens: {_correct(answered)} of {len(answered)} right, "
                f"{seconds:.1f} s",
            )
            results += answered
    return results


def _keys_of(model: Path, backends: list[str], additional_config: str) -> dict[str, ModelKeys]:
    """Return the keys that each backend reads and keeps, by context in tokens."""
    for name in backends:
        if name.upper() not in BACKENDS or backends.count(name) > 1:
            allowed = beside_preset(name) or f"{choices(known.lower() for known in BACKENDS)}, each once"
            raise ConfigurationError(f"attention_backend: got {name!r}, allowed: {allowed}")
    settings, trained = parse_additional_config(additional_config).get(KEY), read_trained_section(model)
    resolved = {name: resolve(settings, BACKENDS[name.upper()], trained) for name in backends}
    shape = model_shape(model)
    # A cache that evicts does so in whole blocks. A server chooses the block size when it starts.
    return {name: ModelKeys(each, shape.layers, shape.head_size, PREFERRED_BLOCK) for name, each in resolved.items()}


def _record(backend: str, result: Result) -> dict[str, object]:
    """Return the JSON row of one answer. The prompt is left out: it follows from the options."""
    return {
        "backend": backend,
        "task": result.task,
        "context_tokens": result.context_tokens,
        "prompt_tokens": result.prompt_tokens,
        "answer": result.answers[0],
        "completion": result.completion,
        "correct": result.score == 1,
        "seconds": result.seconds,
    }


def _keep(settings: ServerSettings, console: Console) -> None:
    """Start the sparse server, print a sample request, and wait for Ctrl-C or the server's end."""
    name = settings.backend or _DENSE
    with run_server(name, settings, console) as client:
        body = {"model": settings.model.name, "prompt": _EXAMPLE_PROMPT, "temperature": 0, "max_tokens": 16}
        command = ["curl", "-s", f"{client.base_url}completions", "-H", "Content-Type: application/json"]
        key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if os.environ.get("VLLM_API_KEY") else ""
        print(f"The {name} server is up, Ctrl-C stops it. Ask it for the number 4815162:\n")
        print(f"{shlex.join([*command, '-d', json.dumps(body)])}{key}", flush=True)
        while True:
            time.sleep(5)
            client.models.list()


def _table(backend: str, sparse: list[Result], reference: str, dense: list[Result], keys: ModelKeys) -> Table:
    """Return a table with one row per task and context."""
    table = Table(Column("task", no_wrap=True), title="Needles: right answers, and seconds for the questions")
    for heading in ("context", reference, backend, "keys read", "keys kept", f"{reference} s", f"{backend} s"):
        table.add_column(heading, justify="right")
    for ((task, context_tokens), sparse_results), (_, dense_results) in zip(
        groupby(sparse, _row), groupby(dense, _row), strict=True
    ):
        parts, shares = [list(dense_results), list(sparse_results)], keys.shares(context_tokens)
        table.add_row(
            task, str(context_tokens), *(f"{_correct(part)}/{len(part)}" for part in parts),
            f"{shares.read:.1%}" if keys.by_length else "?", f"{shares.kept:.1%}",
            *(f"{sum(result.seconds for result in part):.1f}" for part in parts),
        )  # fmt: skip
    return table


def _answers(backend: str, sparse: list[Result], reference: str, dense: list[Result]) -> Table:
    """Return a table with the first answer of each task and context, and all answers in which the servers differ."""
    table = Table(Column("task", no_wrap=True), title="Answers: the first of each task, and those that differ")
    for heading in ("context", "right answer", reference, backend):
        table.add_column(heading)
    shown = set()
    for of_sparse, of_dense in zip(sparse, dense, strict=True):
        answers = [first_line(result.completion) for result in (of_dense, of_sparse)]
        if _row(of_dense) not in shown or answers[0] != answers[1]:
            shown.add(_row(of_dense))
            table.add_row(of_dense.task, str(of_dense.context_tokens), of_dense.answers[0], *map(escape, answers))
    return table


def _row(result: Result) -> tuple[str, int]:
    return result.task, result.context_tokens


def _correct(results: list[Result]) -> int:
    return sum(result.score == 1 for result in results)


def _enough(backend: str, reference: str, results: dict[str, list[Result]], min_ratio: float, console: Console) -> bool:
    """Print the total. Return whether the sparse accuracy reaches `min_ratio` of the dense accuracy."""
    correct, total = {name: _correct(part) for name, part in results.items()}, len(results[reference])
    if correct[reference] == 0:
        say(console, "Total: dense attention answered no question right, so accuracy cannot be compared.")
        return False
    ratio = correct[backend] / correct[reference]
    shares = (f"{name} {correct[name]}/{total} ({_interval(correct[name], total)})" for name in (backend, reference))
    say(
        console,
        f"Total: {', '.join(shares)}: {backend} reaches {ratio:.3f} of the accuracy of dense attention "
        f"({min_ratio} needed). In brackets: Wilson's 95 % interval of the accuracy.",
    )
    return ratio >= min_ratio


def _interval(correct: int, total: int) -> str:
    """Return Wilson's interval of a proportion. SciPy has it, but this command does not require SciPy."""
    z = NormalDist().inv_cdf((1 + _LEVEL) / 2)
    share, spread = correct / total, z * z / total
    middle = (share + spread / 2) / (1 + spread)
    reach = sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return f"{max(middle - reach, 0):.2f} to {min(middle + reach, 1):.2f}"
