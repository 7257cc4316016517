"""Answers RULER questions with dense attention and with each setting.

python -m bench.quality ruler --model MODEL --setting unique,quest --output ruler.jsonl
python -m bench.quality ruler --model MODEL --setting snapkv,h2o --decode-from prompt --chat --output ruler.jsonl
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from bench.common.console import end_with, open_console
from bench.common.options import Commit, Output, TimeLimit, parse_sizes, split_values
from bench.common.results import ResultFile, Row, read_run
from bench.quality.settings import DENSE, SHARES, Setting, evaluate
from vllm_sparse_plugin.tools.arguments import parse_additional_config
from vllm_sparse_plugin.tools.eval.statistics import estimate_mean
from vllm_sparse_plugin.tools.models import folder_of
from vllm_sparse_plugin.tools.provenance import describe_run


def ruler(
    output: Output,
    model: Annotated[str, typer.Option(help="Folder or name.")],
    setting: Annotated[list[str], typer.Option(help="BACKEND[:BUDGET][+FIELD=VALUE], repeatable.")],
    dense_backend: Annotated[str, typer.Option(help="vLLM's attention backend to compare with.")] = "FLASH_ATTN",
    context: Annotated[list[str] | None, typer.Option(help="Tokens of a document, repeatable. Default: 4K.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Of RULER, repeatable. Default: all.")] = None,
    questions: Annotated[int, typer.Option(min=1, help="Questions of each task and context.")] = 25,
    decode_from: Annotated[
        Literal["prompt", "question"], typer.Option(help="Decode the question token by token, or prefill it, too.")
    ] = "question",
    chat: Annotated[bool, typer.Option("--chat", help="Apply the tokenizer's chat template.")] = False,
    engine_args: Annotated[str, typer.Option(metavar="JSON", help="Arguments of vllm.LLM.")] = "{}",
    concurrency: Annotated[int, typer.Option(min=1, help="Questions in flight.")] = 16,
    at_once: Annotated[int, typer.Option(min=1, help="Engines that run at the same time.")] = 1,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Answer RULER questions with dense attention and each setting; exit code 3 if an engine fails."""
    end = time.monotonic() + time_limit
    parse_additional_config(engine_args, "engine_args")
    contexts = parse_sizes("context", split_values(context or ["4K"]))
    settings = [Setting(DENSE, ("--attention-backend", dense_backend)), *map(Setting.parse, split_values(setting))]
    shared = [
        "--model", model, "--questions", str(questions), "--concurrency", str(concurrency),
        "--decode-from", decode_from, "--engine-args", engine_args, *(["--chat"] if chat else []),
    ]  # fmt: skip
    for name in split_values(task or ["ruler"]):
        shared += ["--task", name]
    for tokens in contexts:
        shared += ["--context", str(tokens)]
    found, failed = evaluate(settings, shared, at_once, end)
    about = {**describe_run(folder_of(Path(model)), commit), "decode_from": decode_from, "chat": chat}
    with ResultFile(output, about) as file:
        for name, results in found.items():
            for result in results.values():
                asked = {"setting": name, "id": result.id, "task": result.task, "context_tokens": result.context_tokens}
                shares = {key: getattr(result, key) for key in SHARES}
                file.write({**asked, "decode_from": decode_from, "chat": chat, "score": result.score, **shares})
    open_console().print(table(read_run(output).rows))
    end_with(failed)


def table(rows: Sequence[Row]) -> Table:
    """The mean score of each setting and context, with its interval."""
    shown = Table(title="RULER scores")
    contexts = sorted({row["context_tokens"] for row in rows})
    for heading in ("setting", *(f"{tokens:,} tokens" for tokens in contexts)):
        shown.add_column(heading)
    for setting in dict.fromkeys(row["setting"] for row in rows):
        scores = [
            [row["score"] for row in rows if (row["setting"], row["context_tokens"]) == (setting, tokens)]
            for tokens in contexts
        ]
        means = [estimate_mean(each) if each else None for each in scores]
        shown.add_row(
            setting,
            *("" if mean is None else f"{mean.value:.3f} ({mean.low:.3f} to {mean.high:.3f})" for mean in means),
        )
    return shown
