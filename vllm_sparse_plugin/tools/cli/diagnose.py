"""The command `vllm-sparse diagnose`: compares selections with dense attention, by layer, head and budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.table import Table

from vllm_sparse_plugin.config import KEY, read_trained_section, resolve
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.names import BACKENDS
from vllm_sparse_plugin.policies import Selection
from vllm_sparse_plugin.tools.arguments import (
    AdditionalConfig,
    AttentionBackends,
    Device,
    ModelFolder,
    Report,
    Seed,
    expect_selection_alone,
    find_device,
    find_model,
    find_preset,
    model_limits,
    open_tokenizer,
    parse_additional_config,
    read_prompts,
)
from vllm_sparse_plugin.tools.caches import ensure_caches
from vllm_sparse_plugin.tools.endings import open_console
from vllm_sparse_plugin.tools.eval.progress import show_progress
from vllm_sparse_plugin.tools.needles import TASKS, build_questions, check_questions
from vllm_sparse_plugin.tools.provenance import open_report

DEFAULT_BUDGETS = (1024, 512, 256, 128, 64)
_QUERIES = 16
"""Newest tokens that are measured of a prompt without a completion."""
_COLUMNS = ("mass", "oracle_mass", "recall", "cosine")


class _Prompt(NamedTuple):
    name: str
    tokens: list[int]
    queries: int
    """Number of newest tokens whose queries are measured."""


class _Compared(NamedTuple):
    backend: str
    """Backend whose preset is used."""
    first_dense_layers: int
    budgets: list[Selection]
    """The selection at each budget."""


def diagnose(
    model: ModelFolder = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with `prompt` and an optional `completion`, whose tokens are measured. Default: needle "
            "questions with their answers."
        ),
    ] = None,
    attention_backend: AttentionBackends = None,
    additional_config: AdditionalConfig = "{}",
    budget_tokens: Annotated[
        list[int] | None,
        typer.Option(help=f"Tokens read per KV head, repeatable. Default: {', '.join(map(str, DEFAULT_BUDGETS))}."),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of a needle question's context.")] = 8192,
    task: Annotated[
        list[str] | None, typer.Option(help=f"Needle task, repeatable. Default: {', '.join(TASKS)}.")
    ] = None,
    questions: Annotated[int, typer.Option(help="Needle questions for each task.")] = 2,
    seed: Seed = 0,
    by: Annotated[
        Literal["budget", "layer", "head"], typer.Option(help="One row of the table per budget, layer or head.")
    ] = "budget",
    device: Device = None,
    json_path: Report = None,
) -> None:
    """Compare the pages that each policy selects with dense attention, in one forward pass per prompt.

    Reports for each layer, KV head and budget:

    - the share of attention weight on the tokens read
    - the same share for an oracle that reads as many pages
    - the share of the oracle's pages that are read
    - the cosine of the outputs

    Values are means over the tokens that produce the completion. Without a completion: over the newest prompt tokens.
    """
    folder = find_model(model)
    budgets = budget_tokens or list(DEFAULT_BUDGETS)
    limit, _ = model_limits(folder)
    trained = read_trained_section(folder)
    compared = [_compared(name, additional_config, budgets, trained) for name in attention_backend or ["unique"]]
    entries = None if prompts is None else read_prompts(prompts)
    tasks = task or list(TASKS)
    if entries is None:
        check_questions(tasks, [context], questions, limit)
    # Imported here: bad input must not wait for it.
    torch_device = find_device(device)
    ensure_caches()
    from vllm_sparse_plugin.tools.diagnostics.forward import captured_model

    tokenizer = open_tokenizer(folder)
    console = open_console()
    with open_report(json_path, folder, "json") as report:
        if entries is None:
            with show_progress(console, "Writing the questions"):
                entries = _needle_prompts(tokenizer, tasks, context, questions, seed)
        encoded = [_encode(tokenizer, entry, limit) for entry in entries]
        rows: list[dict[str, Any]] = []
        num_tokens = sum(len(prompt.tokens) for prompt in encoded)
        with captured_model(folder, torch_device, num_tokens, console) as (captured, progress):
            for prompt in encoded:
                found = captured.run(prompt.tokens, prompt.queries)
                progress(len(prompt.tokens) / 2)
                for index, inputs in enumerate(found):
                    if inputs is not None:
                        for row in _rows(prompt, index, inputs, compared):
                            rows.append(row)
                            report.add(row)
                    progress(len(prompt.tokens) / 2 / len(found))
        if not rows:
            raise ConfigurationError(f"model: got layers that select pages: {len(rows)}, allowed: one or more")
        console.print(_table(rows, by))
        if by != "budget":
            console.print(_table(rows, "budget"))


def _needle_prompts(tokenizer: Any, tasks: list[str], context: int, questions: int, seed: int) -> list[dict[str, str]]:
    """Return needle questions with their answers, in the format of `read_prompts`."""
    return [
        {"name": f"{task} {number}", "prompt": question.prompt, "completion": f" {question.answer}"}
        for task in tasks
        for number, question in enumerate(build_questions(tokenizer, task, context, questions, seed))
    ]


def _compared(backend: str, additional_config: str, budgets: list[int], trained: Mapping[str, Any] | None) -> _Compared:
    selecting = [name for name, preset in BACKENDS.items() if isinstance(resolve(None, preset).selection, Selection)]
    preset = find_preset(backend, selecting)
    settings = parse_additional_config(additional_config).get(KEY) or {}
    selections = []
    for budget in budgets:
        merged = settings
        if isinstance(settings, dict) and isinstance(settings.get("selection", {}), dict):
            merged = settings | {"selection": settings.get("selection", {}) | {"budget_tokens": budget}}
        resolved = resolve(merged, preset, trained)
        if not isinstance(resolved.selection, Selection):
            raise ConfigurationError(f"{KEY}.selection.policy: got 'dense', allowed: one that selects pages")
        expect_selection_alone(resolved, "diagnose")
        selections.append(resolved.selection)
    return _Compared(backend.lower(), resolved.config.first_dense_layers, selections)


def _encode(tokenizer: Any, given: dict[str, str], limit: int) -> _Prompt:
    tokens = tokenizer.encode(given["prompt"])
    if not tokens:
        raise ConfigurationError(f"prompts: got no token in {given['name']}, allowed: one or more")
    completion, queries = [], _QUERIES
    if given["completion"]:
        completion = tokenizer.encode(given["completion"], add_special_tokens=False)
    if completion:
        # The last token of the completion predicts nothing that is measured.
        tokens, queries = [*tokens, *completion[:-1]], len(completion)
    if len(tokens) > limit:
        raise ConfigurationError(f"prompts: got {len(tokens)} tokens in {given['name']}, allowed: the model's {limit}")
    return _Prompt(given["name"], tokens, min(queries, len(tokens)))


def _rows(prompt: _Prompt, index: int, inputs: Any, compared: list[_Compared]) -> Iterator[dict[str, Any]]:
    """Yield one row for each backend, budget and KV head of a layer."""
    from vllm_sparse_plugin.tools.diagnostics.forward import PagedLayer

    for backend, first_dense_layers, selections in compared:
        if index < first_dense_layers:
            continue
        paged = PagedLayer(inputs, selections[0])
        for selection in selections:
            quality = paged.quality(selection)
            for head in range(inputs.keys.shape[0]):
                yield {
                    "prompt": prompt.name,
                    "context_tokens": len(prompt.tokens),
                    "queries": prompt.queries,
                    "backend": backend,
                    "policy": selection.name(),
                    "page_size": selection.page_size,
                    "budget_tokens": selection.budget_tokens,
                    "layer": index,
                    "kv_head": head,
                    **{name: round(getattr(quality, name)[:, head].mean().item(), 6) for name in _COLUMNS},
                }


def _table(rows: list[dict[str, Any]], by: str) -> Table:
    """Return a table of means over every key without a column."""
    keys = ["backend", "budget_tokens", *{"budget": [], "layer": ["layer"], "head": ["layer", "kv_head"]}[by]]
    table = Table(*(key.replace("_", " ") for key in keys), title="Selections compared with dense attention, means")
    for column in _COLUMNS:
        table.add_column(column.replace("_", " "), justify="right")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    for group, found in groups.items():
        means = (sum(row[column] for row in found) / len(found) for column in _COLUMNS)
        table.add_row(*map(str, group), *(f"{mean:.4f}" for mean in means))
    return table
