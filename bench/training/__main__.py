"""`python -m bench.training run` and `python -m bench.training steps`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from bench.common.models import SHAPES, open_model
from bench.common.options import Commit, Output, TimeLimit, make_app, parse_names, parse_sizes, size_text, usable_device
from bench.common.results import ResultFile, Row
from bench.training.passes import MASKS, PASSES, Shape, forward_of, is_available, measure, run_both
from bench.training.profiles import profiled
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.policies import UniqueSelection
from vllm_sparse_plugin.tools.arguments import find_preset, parse_additional_config, run_app
from vllm_sparse_plugin.tools.provenance import describe_run

if TYPE_CHECKING:
    from vllm_sparse_plugin.tools.training.trainer import Trainer

_CONTEXTS = ("8K", "16K", "32K", "64K", "128K")

app = make_app("Attention under a page mask, forward and backward, compared with dense attention.")
Contexts = Annotated[
    list[str] | None, typer.Option("--context", help=f"Tokens, repeatable. Default: {', '.join(_CONTEXTS)}.")
]
Passes = Annotated[
    list[str] | None, typer.Option("--pass", help="Pass, repeatable. Default: all that the machine supports.")
]
Heads = Annotated[int, typer.Option(min=1, help="Query heads.")]
KVHeads = Annotated[int, typer.Option(min=1, help="KV heads.")]
HeadSize = Annotated[int, typer.Option(min=16, help="Elements of a head.")]
Budget = Annotated[int, typer.Option(help="Budget of the mask in tokens.")]
Statistics = Annotated[str, typer.Option(help="Page statistics.")]
ModelName = Annotated[str, typer.Option("--model", help=f"{', '.join(SHAPES)} or the folder of a Llama.")]
Repeats = Annotated[int, typer.Option(min=1, help="Measurements per pass.")]
Device = Annotated[str, typer.Option(help="Torch device.")]
Profile = Annotated[bool, typer.Option("--profile", help="Also launches, and the time of each kernel, on a GPU.")]


@app.command()
def run(
    output: Output,
    context: Contexts = None,
    passes: Passes = None,
    query_heads: Heads = 32,
    kv_heads: KVHeads = 8,
    head_size: HeadSize = 128,
    budget_tokens: Budget = 512,
    statistics: Statistics = "quarters",
    repeats: Repeats = 10,
    profile: Profile = False,
    device: Device = "cuda",
    time_limit: TimeLimit = 540,
    commit: Commit = None,
) -> None:
    """Time one layer's attention of one sequence. Default: the shape of Llama-3.1-8B.

    Each line is written at once: milliseconds of the forward and the backward pass, and on a GPU the memory that both
    need besides queries, keys and values.
    """
    end, device = time.monotonic() + time_limit, _device(device, profile)
    names = parse_names("pass", passes, PASSES) if passes else PASSES
    settings = {"selection": {"budget_tokens": budget_tokens, "statistics": statistics}}
    selection = resolve(settings, "unique").selection
    assert isinstance(selection, UniqueSelection)
    shape = Shape(query_heads, kv_heads, head_size, torch.bfloat16 if device.startswith("cuda") else torch.float32)
    rows: list[Row] = []
    with ResultFile(output, describe_run(commit=commit)) as file:
        for tokens in parse_sizes("context", context or _CONTEXTS):
            inputs = shape.draw(tokens, device)
            for name in names:
                if not is_available(name, device) or (name == "math" and device.startswith("cuda")):
                    continue
                if time.monotonic() > end:
                    break
                row = _row(name, tokens, shape, selection) | _measured(
                    name, inputs, selection, device, repeats, profile
                )
                rows.append(row)
                file.write(row)
    Console().print(_table(rows))


@app.command()
def steps(
    output: Output,
    model: ModelName = "llama-3.1-8b",
    layers: Annotated[int | None, typer.Option(min=1, help="Replaces the number of layers of a shape.")] = None,
    context: Annotated[str, typer.Option(help="Tokens of a row.")] = "32K",
    count: Annotated[int, typer.Option("--steps", min=1, help="Steps of the trainer.")] = 10,
    settings: Annotated[str, typer.Option(help="JSON of other training settings.")] = "{}",
    attention_backend: Annotated[str, typer.Option(help="Backend whose selection is trained.")] = "unique",
    budget_tokens: Budget = 512,
    profile: Profile = False,
    device: Device = "cuda",
    commit: Commit = None,
) -> None:
    """Train a model shape with random weights on random tokens. Default: LoRA, one row per step.

    A line is one step of the trainer, as in its log, with the GPU memory. `accelerate launch` runs it on several
    devices. A step then has `rows_per_step` rows on each device.
    """
    from bench.training.steps import open_trainer
    from vllm_sparse_plugin.tools.training.settings import LOSS_OF_THE_TEXT, parse_settings

    (tokens,) = parse_sizes("context", [context])
    own = {"steps": count, "hard_steps": count // 2, "rows_per_step": 1, "warmup_steps": 0, "sequence_tokens": tokens}
    chosen = parse_settings(own | LOSS_OF_THE_TEXT | parse_additional_config(settings, "settings"))
    preset, device = find_preset(attention_backend), _device(device, profile)
    with open_model(model) as found, open_trainer(found, chosen, preset, budget_tokens, device, layers) as trainer:
        about = describe_run(found.folder, commit, ("accelerate", "peft")) | {"settings": chosen.model_dump()}
        with ResultFile(output if trainer.is_main_process else Path(os.devnull), about) as file:
            for _ in range(count):
                row = _step(trainer, profile) | {"processes": trainer.num_processes, "layers": layers}
                file.write(row)
                if trainer.is_main_process:
                    Console().print(row)


def _row(name: str, tokens: int, shape: Shape, selection: UniqueSelection) -> Row:
    row: Row = {
        "pass": name, "context_tokens": tokens, "query_heads": shape.query_heads, "kv_heads": shape.kv_heads,
        "head_size": shape.head_size,
    }  # fmt: skip
    if name in MASKS:
        row |= {"budget_tokens": selection.budget_tokens, "statistics": selection.statistics}
    return row


def _device(device: str, profile: bool) -> str:
    if profile and not device.startswith("cuda"):
        raise ConfigurationError(f"profile: got the device {device!r}, allowed: a GPU")
    return usable_device(device)


def _step(trainer: Trainer, profile: bool) -> Row:
    if not profile:
        return trainer.step()
    rows: list[Row] = []
    found = profiled(lambda: rows.append(trainer.step()))
    return rows[0] | {"profile": found}


def _measured(
    name: str, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], selection: UniqueSelection, device: str,
    repeats: int, profile: bool,
) -> Row:  # fmt: skip
    forward = forward_of(name, inputs, selection)
    try:
        row = measure(forward, device, repeats)
        return row | {"profile": profiled(lambda: run_both(forward))} if profile else row
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    except RuntimeError as error:
        return {"failed": " ".join(str(error).split())[:200]}
    finally:
        for x in inputs:
            x.grad = None


def _table(rows: list[Row]) -> Table:
    table = Table("context", "pass", title="One layer, milliseconds")
    for heading in ("forward", "backward", "both", "memory, MiB"):
        table.add_column(heading, justify="right")
    for row in rows:
        parts = [f"{row[part]['median_ms']:.3f}" if part in row else "-" for part in ("forward", "backward", "both")]
        memory = row.get("peak_mib", row.get("failed", "-"))
        table.add_row(size_text(row["context_tokens"]), row["pass"], *parts, str(memory))
    return table


def main() -> None:
    """Runs the command line. Bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
