"""Decodes texts with dense attention, again in other batches, and with each setting, and compares the next tokens.

    python -m bench.quality served --model MODEL --texts texts.jsonl --setting unique:512,unique:1024,art \
        --output served.jsonl

A line of the texts has `prompt`, whose newest tokens are decoded, and an optional `kind`, which rows repeat.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from bench.common.console import end_with, open_console
from bench.common.options import Commit, Output, TimeLimit, split_values
from bench.common.results import ResultFile, Row, read_run
from bench.quality.settings import DENSE, SHARES, Setting, evaluate
from vllm_sparse_plugin.tools.arguments import parse_additional_config, read_prompts
from vllm_sparse_plugin.tools.eval.noise import MEASURES
from vllm_sparse_plugin.tools.eval.results import Result
from vllm_sparse_plugin.tools.eval.statistics import estimate_excess
from vllm_sparse_plugin.tools.files import read_json_lines
from vllm_sparse_plugin.tools.models import folder_of
from vllm_sparse_plugin.tools.provenance import describe_run

AGAIN = "dense-again"


def served(
    output: Output,
    model: Annotated[str, typer.Option(help="Folder or name.")],
    texts: Annotated[Path, typer.Option(help="JSON lines with `prompt`, and `kind` if there are several.")],
    setting: Annotated[list[str], typer.Option(help="BACKEND[:BUDGET][+FIELD=VALUE], repeatable.")],
    dense_backend: Annotated[str, typer.Option(help="vLLM's attention backend to compare with.")] = "FLASH_ATTN",
    scored_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each text to decode.")] = 128,
    engine_args: Annotated[str, typer.Option(metavar="JSON", help="Arguments of vllm.LLM.")] = "{}",
    at_once: Annotated[int, typer.Option(min=1, help="Engines that run at the same time.")] = 1,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Compare next tokens of served texts with those of dense attention; exit code 3 if an engine fails."""
    end = time.monotonic() + time_limit
    parse_additional_config(engine_args, "engine_args")
    dense = ("--attention-backend", dense_backend)
    settings = [Setting(DENSE, dense), Setting(AGAIN, (*dense, "--other-batches"))]
    settings += [Setting.parse(text) for text in split_values(setting)]
    kinds = _kinds(texts)
    shared = [
        "--model", model, "--completions", str(texts), "--scored-tokens", str(scored_tokens),
        "--engine-args", engine_args,
    ]  # fmt: skip
    found, failed = evaluate(settings, shared, at_once, end)
    about = {**describe_run(folder_of(Path(model)), commit), "scored_tokens": scored_tokens}
    with ResultFile(output, about) as file:
        for row in rows_of(found, kinds):
            file.write(row)
    open_console().print(table(read_run(output).rows))
    end_with(failed)


def _kinds(texts: Path) -> dict[str, str]:
    """The kind of each text, by its name in results.

    Raises:
        ConfigurationError: the texts cannot be read.
    """
    names = [prompt["name"] for prompt in read_prompts(texts, "texts")]
    entries = [entry for _, _, entry in read_json_lines(texts, "texts")]
    return {name: str(entry.get("kind", "text")) for name, entry in zip(names, entries, strict=True)}


def rows_of(found: Mapping[str, Mapping[str, Result]], kinds: Mapping[str, str]) -> list[Row]:
    """A row for each setting and text that dense attention decoded, too.

    Args:
        found: results by setting and by text.
        kinds: of the texts, by name.
    """
    dense, rows = found.get(DENSE, {}), []
    for setting, results in found.items():
        for name, result in results.items():
            if setting == DENSE or name not in dense:
                continue
            values = {key: round(measure.of(dense[name], result), 6) for key, measure in MEASURES.items()}
            shares: dict[str, Any] = {key: getattr(result, key) for key in SHARES}
            text = name.partition("/")[2]
            about = {"setting": setting, "id": name, "text": kinds[text], "context_tokens": result.prompt_tokens}
            rows.append({**about, "scored_tokens": result.forced_tokens, **values, **shares})
    return rows


def table(rows: Sequence[Row]) -> Table:
    """The share of next tokens that each setting changes beyond dense attention in other batches."""
    shown = Table(title="Next tokens changed beyond those of dense attention in other batches, by kind of text")
    kinds = list(dict.fromkeys(row["text"] for row in rows))
    for heading in ("setting", *kinds):
        shown.add_column(heading)
    by_setting: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_setting.setdefault(row["setting"], {})[row["id"]] = row
    again = by_setting.get(AGAIN, {})
    for setting, texts in by_setting.items():
        cells = []
        for kind in kinds:
            pairs = [(again[name], row) for name, row in texts.items() if row["text"] == kind and name in again]
            if not pairs:
                cells.append("")
                continue
            noise, kept = ([row["agreement"] for row in each] for each in zip(*pairs, strict=True))
            more = estimate_excess(noise, kept, pairs[0][1]["scored_tokens"])
            cells.append(f"{more.value:.1%} ({more.low:.1%} to {more.high:.1%})")
        shown.add_row(setting, *cells)
    return shown
