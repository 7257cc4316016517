"""Stopping on a trained model, on a CPU.

python -m research.termination run --output needle-8m.jsonl
python -m research.termination run --model models/witness-6m --output witness-6m.jsonl
python -m research.termination report
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from sparse_kernels.stopping import StopRule, probe_elements
from sparse_kernels.stopping.reference import stop_blocks

from bench.common.console import open_console
from bench.common.options import Commit, Output, make_app
from bench.common.results import ResultFile
from research.termination.model import MODEL, Layer, Setting, StoppingModel, questions
from research.termination.report import PAGE, render
from vllm_sparse_plugin.policies import EveryPage, UniqueSelection
from vllm_sparse_plugin.tools.arguments import run_app
from vllm_sparse_plugin.tools.provenance import describe_run

CONTEXTS = (1024, 2048, 4096, 8192)
TASKS = ("single", "multikey", "kv")
PAPER = StopRule(1e-5, 1e-3, 5, 64)
"""The paper's tolerances; blocks of 64 tokens, so that a context of 1K has several."""
NEWEST = "newest first"
ORDERS = {
    NEWEST: EveryPage(sink_pages=0),
    "first page, then newest": EveryPage(sink_pages=1),
    "unique, best first": UniqueSelection(budget_tokens=2048),
}
SCALES = (1e-5, 1e-3, 1e-1)
"""Of tau: the paper's, and larger ones."""
ABLATED = (1e-5, 1e-3)

app = make_app("Stopping on a trained model, on a CPU.")


def rules(ablated: bool) -> dict[str, StopRule]:
    """The rules that are measured, by name; with those that lack a part if `ablated`."""
    found = {"never": PAPER._replace(patience=0)}
    for scale in SCALES:
        rule = PAPER._replace(scale_tolerance=scale)
        found[f"whole, {scale:g}"] = rule
        if ablated and scale in ABLATED:
            found[f"no direction test, {scale:g}"] = rule._replace(direction_tolerance=math.inf)
            found[f"no patience, {scale:g}"] = rule._replace(patience=1)
    if ablated:
        found["no scale test"] = PAPER._replace(scale_tolerance=math.inf)
    return found


def agreement(layer: Layer, rule: StopRule) -> dict[str, int]:
    """The stops of single query heads by their probe and by their whole output (the paper's Table 4), counted."""
    heads = layer.partial.transpose(2, 3).flatten(1, 2).unsqueeze(3)
    size = heads.shape[-1]
    last = layer.blocks[:, None]
    # Having read the last block is no stop.
    probe, oracle = (
        torch.where((stop := stop_blocks(heads, rule, chosen)) < last, stop, last)
        for chosen in (probe_elements(size), list(range(size)))
    )
    offsets = (probe - oracle)[(probe < last) & (oracle < last)].abs()
    return {
        "decisions": probe.numel(),
        "early": int((probe < oracle).sum()),
        "late": int((probe > oracle).sum()),
        "stopped": int((probe < last).sum()),
        "apart": int((offsets > 0).sum()),
        "offset_sum": int(offsets.sum()),
        "offset_squares": int(offsets.square().sum()),
    }


def depth(layer: Layer) -> dict[str, Any]:
    """How far the tokens of a layer read, and what that changed."""
    share = layer.stop / layer.blocks[:, None]
    index = (layer.stop - 1)[:, :, None, None, None].expand(-1, -1, 1, *layer.partial.shape[3:])
    stopped, whole = layer.partial.gather(2, index)[:, :, 0], layer.partial[:, :, -1]
    tenth = (share * 10).ceil().long().clamp(1, 10) - 1
    return {
        "rows": share.numel(),
        "share_sum": share.sum().item(),
        "error_sum": ((stopped - whole).norm(dim=-1) / whole.norm(dim=-1)).mean(dim=-1).sum().item(),
        **{
            f"to {10 * n + 10}%": count
            for n, count in enumerate(torch.bincount(tenth.flatten(), minlength=10).tolist())
        },
    }


def add(sums: dict[tuple[Any, ...], list[dict[str, Any]]], key: tuple[Any, ...], layers: list[dict[str, Any]]) -> None:
    """Adds a question's numbers to those of others, layer by layer."""
    before = sums.setdefault(key, [dict.fromkeys(layer, 0) for layer in layers])
    for into, layer in zip(before, layers, strict=True):
        for name, value in layer.items():
            into[name] = round(into[name] + value, 6)


@app.command()
def run(
    output: Output,
    folder: Annotated[Path, typer.Option("--model", help="needle-8m's folder, or another of its format.")] = MODEL,
    count: Annotated[int, typer.Option(min=1, help="Questions of each task and context.")] = 3,
    commit: Commit = None,
) -> None:
    """Ask every question with every rule."""
    console = open_console()
    model = StoppingModel(folder)
    with ResultFile(output, describe_run(folder, commit)) as file:
        for context, task in itertools.product(CONTEXTS, TASKS):
            right: dict[tuple[str, str], int] = {}
            sums: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
            for question in questions(model.tokenizer, task, context, count):
                cache = model.prefill(question)
                for order, selection in ORDERS.items():
                    if selection.budget_pages * selection.page_size >= context:
                        continue
                    for name, rule in rules(order == NEWEST).items():
                        answered, layers = model.answer(question, cache, Setting(selection, rule))
                        right[order, name] = right.get((order, name), 0) + answered
                        add(sums, (order, name), [depth(layer) for layer in layers])
                        if (order, name) == (NEWEST, "never"):
                            for scale in SCALES:
                                each = [agreement(layer, PAPER._replace(scale_tolerance=scale)) for layer in layers]
                                add(sums, (scale,), each)
            about = {"context_tokens": context, "task": task, "questions": count}
            for key, by_layer in sums.items():
                row = {"scale": key[0]} if len(key) == 1 else {"order": key[0], "rule": key[1], "right": right[key]}
                file.write(about | row | {"layers": by_layer})
            console.print(f"{context} tokens, {task}: {right[NEWEST, 'never']} of {count} right")


@app.command()
def report() -> None:
    """Write the page of this folder from the results."""
    PAGE.write_text(render(), encoding="utf-8")


def main() -> None:
    """Runs the command line; bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
