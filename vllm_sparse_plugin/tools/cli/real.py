"""The command `vllm-sparse real`: compares sparse with dense attention on a real model."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Column, Table

from vllm_sparse_plugin.config import KEY, resolve
from vllm_sparse_plugin.errors import choices
from vllm_sparse_plugin.tools.arguments import (
    AdditionalConfig,
    AttentionBackend,
    Report,
    Seed,
    find_model,
    find_preset,
    model_limits,
    open_tokenizer,
    parse_additional_config,
)
from vllm_sparse_plugin.tools.caches import ensure_caches
from vllm_sparse_plugin.tools.cli.fetch_model import fetched_model
from vllm_sparse_plugin.tools.endings import open_console
from vllm_sparse_plugin.tools.eval import FORCED_TOKENS_PROCESSOR
from vllm_sparse_plugin.tools.eval.items import NLL
from vllm_sparse_plugin.tools.extras import STATISTICS, require_packages
from vllm_sparse_plugin.tools.models import FETCHED, end_tokens, fetched_folder, name_of
from vllm_sparse_plugin.tools.needles import check_contexts
from vllm_sparse_plugin.tools.provenance import open_report

if TYPE_CHECKING:
    from vllm_sparse_plugin.tools import provenance
    from vllm_sparse_plugin.tools.eval.items import PlannedItem, Prompter
    from vllm_sparse_plugin.tools.eval.results import Result
    from vllm_sparse_plugin.tools.eval.statistics import Estimate
    from vllm_sparse_plugin.tools.server import ServerSettings

_DEFAULT = "smollm2-135m"
_TASKS = ("niah_single_1", "niah_single_2", "niah_multikey_1")
_CONTEXT, _SCORED_TOKENS = 4096, 64
_BATCH = 4
"""Concurrency when dense attention is compared with itself. Another batch changes the rounding of a token."""
_DENSE, _AGAIN = "dense", "dense, another batch"


class _Asked(NamedTuple):
    """Items that both servers are asked."""

    questions: list[PlannedItem]
    texts: list[PlannedItem]
    """The newest tokens of each text are forced and decoded."""


def real(
    model: Annotated[
        str, typer.Option(help=f"{choices(FETCHED)}, which are fetched, or a model as in other commands.")
    ] = _DEFAULT,
    attention_backend: AttentionBackend = "unique",
    additional_config: AdditionalConfig = "{}",
    questions: Annotated[int, typer.Option(min=1, help="Questions per task.")] = 1,
    texts: Annotated[int, typer.Option(min=1, help="Number of texts. Their newest tokens are compared.")] = 4,
    seed: Seed = 0,
    json_path: Report = None,
) -> None:
    """Download a real model and compare sparse with dense attention on needles and on text.

    Dense attention is also compared with itself in another batch, because rounding alone changes some next tokens.

    Exit codes:

    - 2: bad input
    - 3: a server failed
    """
    preset = find_preset(attention_backend)
    settings = parse_additional_config(additional_config).get(KEY)
    resolve(settings, preset)
    is_fetched = model in FETCHED
    folder = fetched_folder(model) if is_fetched else find_model(model)
    with open_report(json_path, folder, "json") as report:
        require_packages("real", STATISTICS)
        if is_fetched:
            folder, _ = fetched_model(model, None, "real")
        check_contexts([_CONTEXT], model_limits(folder)[0])
        ensure_caches()
        # Imported here: bad input must not wait for it.
        from vllm_sparse_plugin.tools.eval.items import Prompter
        from vllm_sparse_plugin.tools.eval.tasks import plan_tasks, plan_windows
        from vllm_sparse_plugin.tools.server import ServerSettings

        prompter = Prompter(open_tokenizer(folder), end_tokens=end_tokens(folder))
        asked = _Asked(
            plan_tasks(_TASKS, prompter, [_CONTEXT], questions, seed),
            plan_windows(_manual(), prompter, [_CONTEXT], texts, _SCORED_TOKENS),
        )
        dense = ServerSettings(folder, _CONTEXT, None, log_lines=0, every_core=True)
        forcing = ("--logits-processors", FORCED_TOKENS_PROCESSOR, "--logprobs-mode", "raw_logprobs")
        dense = replace(dense, arguments=(*dense.arguments, *forcing))
        sparse = replace(dense, backend=attention_backend, additional_config=additional_config)
        # The results of vLLM's own dense attention already have the name `dense`.
        name = f"backend-{_DENSE}" if attention_backend.lower() == _DENSE else attention_backend
        console = open_console()
        runs = _ask(_DENSE, dense, asked, prompter, console, report)
        runs |= _ask(name, sparse, asked, prompter, console, report)
        console.print(_table(name_of(folder), runs, name))


def _manual() -> str:
    """Return Python's reference manual: prose that every interpreter has."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _ask(
    name: str, settings: ServerSettings, asked: _Asked, prompter: Prompter, console: Console, report: provenance.Report
) -> dict[str, list[Result]]:
    """Ask one server all items, and dense attention the texts a second time."""
    from vllm_sparse_plugin.tools.eval import results
    from vllm_sparse_plugin.tools.eval.endpoints import Server
    from vllm_sparse_plugin.tools.eval.items import score
    from vllm_sparse_plugin.tools.server import run_server

    asking = [(name, 1, asked.texts), (_AGAIN, _BATCH, asked.texts), (name, 1, asked.questions)]
    found: dict[str, list[Result]] = {}
    with run_server(name, settings, console) as client:
        for run, concurrency, planned in asking:
            if run == _AGAIN and name != _DENSE:
                continue
            endpoint = Server(client, settings.model.name, concurrency)
            for result in results.ask(endpoint, planned, "question", prompter, score, console, run):
                found.setdefault(run, []).append(result)
                report.add({"run": run, **result.model_dump(mode="json")})
    return found


def _table(model: str, runs: dict[str, list[Result]], sparse: str) -> Table:
    """Return a table with a row per task, and rows for the next tokens of text."""
    from vllm_sparse_plugin.tools.eval.noise import beside

    table = Table(Column("", no_wrap=True), title=f"{model}: sparse compared with dense attention")
    for heading in (_DENSE, sparse):
        table.add_column(heading, justify="right")
    scores = {name: [result for result in runs[name] if result.metric != NLL] for name in (_DENSE, sparse)}
    for (task, of_dense), (_, of_sparse) in zip(*(groupby(scores[name], _task) for name in scores), strict=True):
        parts = [list(of_dense), list(of_sparse)]
        means = (f"{fmean(result.score for result in part):.2f}" for part in parts)
        table.add_row(f"{task}, score, asked {len(parts[0])}", *means)
    dense, other, again = (
        [result for result in runs[name] if result.metric == NLL] for name in (_DENSE, sparse, _AGAIN)
    )
    same = beside("agreement", dense, other, again)
    assert same.own is not None
    assert same.excess is not None
    table.add_section()
    table.add_row(
        f"same next token as dense, {len(dense)} texts x {dense[0].forced_tokens} tokens",
        _percent(same.own), _percent(same.found),
    )  # fmt: skip
    table.add_row("changed beyond the noise of dense attention", "", _percent(same.excess))
    table.caption = (
        f"Dense attention is compared with itself in another batch ({_BATCH} requests in flight instead of one): "
        "rounding changes some tokens. Brackets: 95 % intervals."
    )
    return table


def _percent(found: Estimate) -> str:
    interval = f" [{found.low:.1%}, {found.high:.1%}]" if found.count > 1 else ""
    return f"{found.value:.1%}{interval}"


def _task(result: Result) -> str:
    return result.task
