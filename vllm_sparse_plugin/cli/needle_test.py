"""The command `vllm-sparse needles`: accuracy of a sparse server beside a dense one."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from vllm_sparse_plugin.cli.arguments import parse_additional_config
from vllm_sparse_plugin.cli.provenance import open_report
from vllm_sparse_plugin.cli.server import ServerError, ServerSettings, run_server, unwind_on_termination
from vllm_sparse_plugin.config import KEY, resolve
from vllm_sparse_plugin.errors import ConfigurationError, choices
from vllm_sparse_plugin.eval.endpoints import Server
from vllm_sparse_plugin.eval.items import Item, PlannedItem, Prompter
from vllm_sparse_plugin.eval.results import Result, ask
from vllm_sparse_plugin.eval.tasks import needle_items
from vllm_sparse_plugin.names import BACKENDS
from vllm_sparse_plugin.needles import STRESS_TASKS, TASKS, first_line

_DENSE = "dense"
"""Name of vLLM's own attention in tables and reports, unless it is compared with our backend of that name."""
_VLLM = "vllm"
_EXAMPLE_PROMPT = (
    "import json\n\n\ndef load(path):\n    with open(path) as file:\n        return json.load(file)\n"
    "\nThe special magic number for zudewi bizino is: 4815162.\n"
    "\ndef save(path, data):\n    with open(path, \"w\") as file:\n        json.dump(data, file)\n"
    "\nThe special magic number for kalomu terife is: 2718281.\n"
    "\ndef keys(path):\n    return sorted(load(path))\n"
    "\nWhat is the special magic number for zudewi bizino? Answer:"
)  # fmt: skip


def needle_test(
    model: Annotated[
        Path | None, typer.Option(help="Model folder; models/needle-8m of the checkout if left out.")
    ] = None,
    context: Annotated[list[int] | None, typer.Option(help="Context in tokens, repeatable; 4096 and 16384.")] = None,
    task: Annotated[
        list[str] | None, typer.Option(help=f"Task, repeatable; {', '.join(TASKS)}. Also {', '.join(STRESS_TASKS)}.")
    ] = None,
    questions: Annotated[int, typer.Option(help="Questions for each task and context.")] = 8,
    backend: Annotated[
        list[str] | None, typer.Option(help="Attention backend of ours to test, repeatable; unique.")
    ] = None,
    additional_config: Annotated[
        str | None, typer.Option(help="Passed to each sparse server's --additional-config.", metavar="JSON")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of documents and needles.")] = 0,
    min_ratio: Annotated[float, typer.Option(help="Accuracy needed, as a fraction of the dense accuracy.")] = 0.95,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="Write one JSON line for the run and one for each answer.", metavar="PATH"),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Only start the sparse server, until Ctrl-C; ask nothing.")
    ] = False,
) -> None:
    """Ask sparse servers and a dense one the same needle questions and compare their accuracy.

    Exit code 0 if every backend reaches the accuracy needed, 1 if not, 2 for bad input, 3 if a server fails.
    """
    model = (model or Path(__file__).parents[2] / "models" / "needle-8m").resolve()
    contexts, backends = context or [4096, 16384], backend or ["unique"]
    kv_read_shares = _check(model, contexts, backends, min_ratio, additional_config)
    dense = ServerSettings(model, max(contexts), None)
    # Our own backend of that name has it; then vLLM's goes by vLLM's.
    reference = _VLLM if _DENSE in map(str.lower, backends) else _DENSE
    servers = {name: replace(dense, backend=name, additional_config=additional_config) for name in backends}
    servers[reference] = dense
    console = Console()
    unwind_on_termination()
    try:
        if keep:
            if len(backends) > 1:
                raise ConfigurationError(f"backend: got {len(backends)} of them, allowed with keep: one")
            _keep(servers[backends[0]], console)
            return
        # Imported late: the other commands need not wait for it.
        from transformers import AutoTokenizer

        try:
            prompter = Prompter(AutoTokenizer.from_pretrained(model))
        except (OSError, ValueError):
            raise ConfigurationError(f"model: got {str(model)!r}, allowed: a folder with a tokenizer") from None
        with console.status("Writing the questions"):
            items = [
                item
                for size in contexts
                for kind in task or TASKS
                for item in needle_items(prompter, kind, size, questions, seed)
            ]
        with open_report(json_path, model, "json") as report:
            results = {}
            for name, settings in servers.items():
                results[name] = _run(name, settings, items, prompter, console)
                for result in results[name]:
                    print(json.dumps(_record(name, result)), file=report)
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(3) from None
    for name in backends:
        console.print(_table(name, results[name], reference, results[reference], kv_read_shares[name]))
    enough = [_enough(name, reference, results, min_ratio, console) for name in backends]
    if not all(enough):
        raise typer.Exit(1)


def _check(
    model: Path, contexts: list[int], backends: list[str], min_ratio: float, additional_config: str | None
) -> dict[str, Callable[[int], float]]:
    """Raise ConfigurationError for what can be refused before a server is started.

    Returns the share of the KV cache's bytes that each backend reads, by context in tokens.
    """
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        limit, head_size = int(config["max_position_embeddings"]), int(config["head_dim"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigurationError(
            f"model: got {str(model)!r}, allowed: a folder with a config.json that has max_position_embeddings and "
            "head_dim"
        ) from None
    for size in contexts:
        if size > limit:
            raise ConfigurationError(f"context: got {size} tokens, allowed: at most the model's {limit}")
    for name in backends:
        if name.upper() not in BACKENDS or backends.count(name) > 1:
            allowed = choices(known.lower() for known in BACKENDS)
            raise ConfigurationError(f"backend: got {name!r}, allowed: {allowed}, each once")
    if not 0 <= min_ratio <= 1:
        raise ConfigurationError(f"min_ratio: got {min_ratio}, allowed: 0 to 1")
    settings = parse_additional_config(additional_config or "{}").get(KEY)
    selections = {name: resolve(settings, BACKENDS[name.upper()]).selection for name in backends}
    return {name: partial(selection.kv_read_share, head_size=head_size) for name, selection in selections.items()}


def _record(backend: str, result: Result) -> dict[str, object]:
    """Return what the JSON lines file has of one answer; the prompt follows from the options and is left out."""
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


def _run(name: str, settings: ServerSettings, items: list[Item], prompter: Prompter, console: Console) -> list[Result]:
    """Start a server, ask everything, stop it."""
    planned = [PlannedItem(item.id, partial(_built, item)) for item in items]
    with run_server(name, settings, console) as client:
        server = Server(client, settings.model.name, concurrency=1)
        return list(ask(server, planned, "prompt", prompter, _score, console, name))


def _built(item: Item) -> Item:
    return item


def _score(item: Item, completion: str) -> float:
    return float(first_line(completion) in item.answers)


def _keep(settings: ServerSettings, console: Console) -> None:
    """Start the sparse server, say how to ask it, and wait for Ctrl-C or its end."""
    name = settings.backend or _DENSE
    with run_server(name, settings, console) as client:
        body = {"model": settings.model.name, "prompt": _EXAMPLE_PROMPT, "temperature": 0, "max_tokens": 16}
        command = ["curl", "-s", f"{client.base_url}completions", "-H", "Content-Type: application/json"]
        print(f"The {name} server is up, Ctrl-C stops it. Ask it for the number 4815162:\n")
        print(shlex.join([*command, "-d", json.dumps(body)]), flush=True)
        with suppress(KeyboardInterrupt):
            while True:
                time.sleep(5)
                client.models.list()


def _table(
    backend: str, sparse: list[Result], reference: str, dense: list[Result], kv_read_share: Callable[[int], float]
) -> Table:
    """Return one row for each task and context."""
    table = Table(Column("task", no_wrap=True), title="Needles: accuracy and seconds spent in the questions")
    for heading in ("context", reference, backend, "share of KV read", f"{reference} seconds", f"{backend} seconds"):
        table.add_column(heading, justify="right")

    def row(result: Result) -> tuple[str, int]:
        return result.task, result.context_tokens

    for ((task, context_tokens), ours), (_, theirs) in zip(groupby(sparse, row), groupby(dense, row), strict=True):
        cells = [
            (_correct(part) / len(part), sum(result.seconds for result in part)) for part in map(list, (theirs, ours))
        ]
        table.add_row(
            task, str(context_tokens), *(f"{accuracy:.2f}" for accuracy, _ in cells),
            f"{kv_read_share(context_tokens):.1%}",
            *(f"{seconds:.1f}" for _, seconds in cells),
        )  # fmt: skip
    return table


def _correct(results: list[Result]) -> int:
    return sum(result.score == 1 for result in results)


def _enough(backend: str, reference: str, results: dict[str, list[Result]], min_ratio: float, console: Console) -> bool:
    """Print the total and return whether the sparse accuracy reaches `min_ratio` of the dense one."""
    correct = {name: _correct(part) for name, part in results.items()}
    if correct[reference] == 0:
        console.print("Total: dense attention answered no question, so there is nothing to compare with.")
        return False
    ratio = correct[backend] / correct[reference]
    total = len(results[reference])
    console.print(
        f"Total: {backend} {correct[backend]}/{total}, {reference} {correct[reference]}/{total}: "
        f"{backend} reaches {ratio:.3f} of the accuracy of dense attention ({min_ratio} needed)."
    )
    return ratio >= min_ratio
