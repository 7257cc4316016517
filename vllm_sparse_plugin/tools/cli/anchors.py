"""The command `vllm-sparse anchors`: finds the layers that choose pages for the layers behind them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table

from vllm_sparse_plugin.config import read_trained_section, resolve
from vllm_sparse_plugin.config.fingerprint import fingerprint_of
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.names import BACKENDS
from vllm_sparse_plugin.policies.scored import ScoredSelection
from vllm_sparse_plugin.tools.arguments import (
    AttentionBackend,
    Device,
    ModelFolder,
    Report,
    Seed,
    find_device,
    find_model,
    find_preset,
    model_limits,
    model_shape,
    open_tokenizer,
)
from vllm_sparse_plugin.tools.caches import ensure_caches
from vllm_sparse_plugin.tools.diagnostics.texts import DEFAULT_TASKS, SAMPLES, build_documents, read_texts
from vllm_sparse_plugin.tools.endings import open_console, say
from vllm_sparse_plugin.tools.eval.progress import show_progress
from vllm_sparse_plugin.tools.models import name_of
from vllm_sparse_plugin.tools.needles import MIN_CONTEXT_TOKENS
from vllm_sparse_plugin.tools.provenance import check_output, open_report, write_output

if TYPE_CHECKING:
    from vllm_sparse_plugin.tools.diagnostics.anchors import Outcome

BUDGET_TOKENS = 2048
"""Default budget: twice that of the preset `unique`."""
SHARES = range(2, 17)
"""Layers per anchor that are allowed."""
_CONTEXT_BUDGETS = 4
"""Default context, in budgets."""

Context = Annotated[
    int | None,
    typer.Option(help=f"Context in tokens, longer than the budget. Default: {_CONTEXT_BUDGETS} budgets."),
]
Share = Annotated[int, typer.Option(help=f"Layers per anchor, {SHARES[0]} to {SHARES[-1]}.")]


def anchors(
    model: ModelFolder = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with `prompt` and an optional `completion`. Each text must be as long as the context. "
            "Every other text places the anchors, the rest judge them. Default: needle documents."
        ),
    ] = None,
    context: Context = None,
    share: Share = 3,
    budget: Annotated[int, typer.Option(help="Tokens read per KV head.")] = BUDGET_TOKENS,
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            "--tensor-parallel-size", help="As for vLLM. KV heads are paired with those of the same rank only."
        ),
    ] = 1,
    attention_backend: AttentionBackend = "unique",
    seed: Seed = 0,
    device: Device = None,
    output: Annotated[
        Path | None, typer.Option(help="Preset to write. Default: anchors-MODEL.yaml.", metavar="PATH")
    ] = None,
    json_path: Report = None,
) -> None:
    """Find the layers of one model whose pages the layers behind them can read.

    Runs the model in transformers. One half of the documents places the anchors and pairs KV heads, the other half
    judges them.

    The report has the share of the attention weight on the pages read, by layer:

    - if each layer chooses its own pages
    - with the anchors
    - with anchors at equal distances and the same KV heads

    Writes a preset for this model only. Use it with `--additional-config '{"sparse_attention": {"config": "PATH"}}'`.
    """
    folder = find_model(model)
    limit, layers = model_limits(folder)
    if share not in SHARES:
        raise ConfigurationError(f"share: got {share}, allowed: {SHARES[0]} to {SHARES[-1]}")
    preset = find_preset(attention_backend, [name for name in BACKENDS if _has_anchors(name)])
    resolved = resolve({"selection": {"budget_tokens": budget}}, preset, read_trained_section(folder))
    selection = resolved.selection
    assert isinstance(selection, ScoredSelection)
    heads, ranks = model_shape(folder).kv_heads, tensor_parallel_size
    if ranks < 1 or (heads % ranks and ranks % heads):
        raise ConfigurationError(
            f"tensor_parallel_size: got {ranks}, allowed: a divisor or a multiple of the model's {heads} KV heads"
        )
    tokens = _context(context, budget, limit, 2 if prompts else MIN_CONTEXT_TOKENS)
    given = read_texts(prompts)
    path = output or Path(f"anchors-{name_of(folder)}.yaml")
    check_output(path, "output")
    # Imported here: bad input must not wait for it.
    torch_device = find_device(device)
    ensure_caches()
    from vllm_sparse_plugin.tools.diagnostics.anchors import find_anchors
    from vllm_sparse_plugin.tools.diagnostics.forward import captured_model

    tokenizer = open_tokenizer(folder)
    console = open_console()
    with open_report(json_path, folder, "json") as report:
        with show_progress(console, "Writing the documents"):
            documents = build_documents(tokenizer, given, prompts, DEFAULT_TASKS, [tokens], SAMPLES, seed)
        with captured_model(folder, torch_device, documents.num_tokens, console) as (captured, progress):
            outcome = find_anchors(
                captured, documents.fitting, documents.judging, selection, resolved.config.first_dense_layers, layers,
                share, tensor_parallel_size, progress,
            )  # fmt: skip
        report.add({**asdict(outcome), "budget_tokens": budget, "policy": selection.name(), "data": documents.data})
        _print(outcome, console)
        write_output(path, _preset(outcome, selection, folder), "output")
        say(console, f"Wrote {path}.")


def _has_anchors(backend: str) -> bool:
    """Return whether layers can read the pages of others with an attention backend."""
    resolved = resolve(None, BACKENDS[backend])
    others = resolved.routing, resolved.compaction, resolved.config.stopping
    return isinstance(resolved.selection, ScoredSelection) and others == (None, None, None)


def _context(given: int | None, budget: int, limit: int, least: int) -> int:
    """Return the context to measure at."""
    least = max(least, budget + 1)
    tokens = given or min(limit, max(least, _CONTEXT_BUDGETS * budget))
    if not least <= tokens <= limit:
        raise ConfigurationError(
            f"context: got {tokens} tokens, allowed: more than the budget, from {least} to the model's {limit}"
        )
    return tokens


def _preset(outcome: Outcome, selection: ScoredSelection, folder: Path) -> str:
    """Return the preset as YAML."""
    section = {
        "policy": selection.name(),
        "budget_tokens": selection.budget_tokens,
        "anchor_layers": outcome.anchor_layers,
        "anchor_heads": outcome.anchor_heads,
        "fingerprint": fingerprint_of(folder),
    }
    body = yaml.safe_dump({"selection": section}, sort_keys=False, width=1000, default_flow_style=None)
    return f"# Anchor layers of {name_of(folder)}, written by vllm-sparse anchors.\n{body}"


def _print(outcome: Outcome, console: Console) -> None:
    table = Table(title="Share of the attention weight on the pages read")
    for heading in ("layer", "anchor", "own pages", "the anchor's", "equal distances"):
        table.add_column(heading, justify="right")
    for row in outcome.rows:
        anchor = "" if row["anchor"] == row["layer"] else str(row["anchor"])
        table.add_row(str(row["layer"]), anchor, *(f"{row[name]:.4f}" for name in outcome.weight))
    table.add_section()
    table.add_row("all", f"{len(outcome.anchor_layers)}", *(f"{weight:.4f}" for weight in outcome.weight.values()))
    console.print(table)
