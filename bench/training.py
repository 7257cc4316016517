"""Training with a mask, timed: one layer's attention forward and backward, and steps of the trainer.

python -m bench.training run --output training.jsonl
python -m bench.training steps --output steps.jsonl
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from sparse_kernels.masked_attention import Packing, PageMask, masked_attention, page_records
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.common.models import SHAPES, Model, open_model
from bench.common.options import Commit, Output, TimeLimit, make_app, parse_names, parse_sizes, size_text, usable_device
from bench.common.results import ResultFile, Row, spread
from vllm_sparse_plugin.config import resolve, section_of
from vllm_sparse_plugin.policies import UniqueSelection
from vllm_sparse_plugin.tools.arguments import find_preset, parse_additional_config, run_app
from vllm_sparse_plugin.tools.provenance import describe_run
from vllm_sparse_plugin.tools.training.attention import ServedSelection
from vllm_sparse_plugin.tools.training.data import Row as TextRow
from vllm_sparse_plugin.tools.training.model import HasName, load_model
from vllm_sparse_plugin.tools.training.settings import LOSS_OF_THE_TEXT, TrainingSettings, parse_settings
from vllm_sparse_plugin.tools.training.trainer import Run, Trainer

MASKS: dict[str, float | None] = {"soft": 1.0, "hard": None}
"""Passes under a mask, with T of the mask."""
DENSE: dict[str, SDPBackend | None] = {
    "math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "flash3": None
}  # fmt: skip
"""Dense passes, and torch's backend for each; None for the package flash-attn-3."""
PASSES = (*MASKS, *DENSE)
_FLASH3 = "flash_attn_interface"


@dataclass(frozen=True)
class Shape:
    """The shape of attention."""

    query_heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype = torch.bfloat16

    def draw(self, tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries, keys and values with gradients: `[tokens, heads, head_size]`."""
        generator = torch.Generator(device).manual_seed(0)
        query, key, value = (
            torch.randn(tokens, heads, self.head_size, generator=generator, device=device, dtype=self.dtype)
            for heads in (self.query_heads, self.kv_heads, self.kv_heads)
        )
        return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def is_available(name: str, device: str) -> bool:
    """Returns whether a pass runs on this machine."""
    on_gpu = device.startswith("cuda")
    if name == "flash3":
        return on_gpu and find_spec(_FLASH3) is not None
    return on_gpu or name in (*MASKS, "math")


def forward_of(
    name: str, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], selection: UniqueSelection
) -> Callable[[], torch.Tensor]:
    """Returns the forward pass of a name in `PASSES`, page statistics included."""
    query, key, value = inputs
    tokens, _, head_size = query.shape
    scale = head_size**-0.5
    if name in MASKS:
        layout = selection.statistics_layout(head_size, 2)
        mask = PageMask(selection.page_selection(), selection.page_size, MASKS[name])
        packing = Packing((tokens,))

        def masked() -> torch.Tensor:
            records = page_records(key, packing, mask.page_size, layout.kind, layout.format)
            return masked_attention(query, key, value, records, packing, mask, scale)

        return masked
    backend = DENSE[name]
    if backend is None:
        import flash_attn_interface

        def flash3() -> torch.Tensor:
            found = flash_attn_interface.flash_attn_func(query[None], key[None], value[None], causal=True)
            output: torch.Tensor = found[0] if isinstance(found, tuple) else found
            return output[0]

        return flash3

    def dense() -> torch.Tensor:
        parts = [x.transpose(0, 1)[None] for x in (query, key, value)]
        with sdpa_kernel(backend):
            output = scaled_dot_product_attention(
                parts[0], parts[1], parts[2], is_causal=True, scale=scale, enable_gqa=True
            )
        return output[0].transpose(0, 1)

    return dense


def measure(forward: Callable[[], torch.Tensor], device: str, repeats: int) -> Row:
    """Time a pass forward and backward, after a warm-up. Return milliseconds and additional memory."""
    on_gpu = device.startswith("cuda")
    before = torch.cuda.memory_allocated() if on_gpu else 0
    times: dict[str, list[float]] = {"forward": [], "backward": [], "both": []}
    for repeat in range(repeats + 1):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begin = _now(on_gpu)
        output = forward()
        middle = _now(on_gpu)
        output.backward(torch.ones_like(output))
        end = _now(on_gpu)
        if repeat:
            times["forward"].append(middle - begin)
            times["backward"].append(end - middle)
            times["both"].append(end - begin)
        del output
    row: Row = {}
    for part, found in times.items():
        median, low, high = (round(value * 1e3, 4) for value in spread(found))
        row[part] = {"median_ms": median, "p20_ms": low, "p80_ms": high, "repeats": repeats}
    if on_gpu:
        row["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
    return row


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


_ROWS = 4
"""Number of rows that steps are trained on repeatedly."""


def draw_rows(vocabulary: int, tokens: int, count: int) -> list[TextRow]:
    """Returns rows of one document each with random tokens, and one more, which is not trained on."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(vocabulary, (count + 1, tokens), generator=generator).tolist()
    return [TextRow(row, [False] + [True] * (tokens - 1), Packing((tokens,)), (0,)) for row in drawn]


def loader_of(model: Model, device: str, layers: int | None) -> Callable[[Path, HasName, torch.dtype], Any]:
    """Returns a function that makes the model: from its checkpoint, or from its shape with random weights on the
    device.

    Args:
        model: see `bench.common.models.open_model`.
        device: torch's name.
        layers: replaces the number of layers of a shape; None to keep it.
    """
    if not model.drawn_weights:
        return load_model

    def draw(folder: Path, attention: HasName, dtype: torch.dtype) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        config: Any = AutoConfig.from_pretrained(folder)
        config.num_hidden_layers = layers or config.num_hidden_layers
        config.use_cache = False
        torch.manual_seed(0)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, attn_implementation=attention.name, dtype=dtype)

    return draw


@contextmanager
def open_trainer(
    model: Model, settings: TrainingSettings, preset: str, budget_tokens: int, device: str, layers: int | None
) -> Iterator[Trainer]:
    """Yields a trainer in a temporary folder.

    Args:
        model: the model to train.
        settings: of the run.
        preset: of the selection.
        budget_tokens: the budget to train for.
        device: torch's name.
        layers: replaces the number of layers of a shape; None to keep it.
    """
    config = resolve({"selection": {"budget_tokens": budget_tokens}}, preset)
    rows = draw_rows(model.vocabulary, settings.sequence_tokens, _ROWS)
    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:
        run = Run(model.folder, Path(folder) / "run", ServedSelection.of(config), section_of(config), settings)
        yield Trainer(run, rows, None, device, loader_of(model, device, layers))


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
    device: Device = "cuda",
    time_limit: TimeLimit = 540,
    commit: Commit = None,
) -> None:
    """Time one layer's attention of one sequence. Default: the shape of Llama-3.1-8B.

    Each line is written at once: milliseconds of the forward and the backward pass, and on a GPU the memory that both
    need besides queries, keys and values.
    """
    end, device = time.monotonic() + time_limit, usable_device(device)
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
                row = _row(name, tokens, shape, selection) | _measured(name, inputs, selection, device, repeats)
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
    device: Device = "cuda",
    commit: Commit = None,
) -> None:
    """Train a model shape with random weights on random tokens. Default: LoRA, one row per step.

    A line is one step of the trainer, as in its log, with the GPU memory. `accelerate launch` runs it on several
    devices. A step then has `rows_per_step` rows on each device.
    """
    (tokens,) = parse_sizes("context", [context])
    own = {"steps": count, "hard_steps": count // 2, "rows_per_step": 1, "warmup_steps": 0, "sequence_tokens": tokens}
    chosen = parse_settings(own | LOSS_OF_THE_TEXT | parse_additional_config(settings, "settings"))
    preset, device = find_preset(attention_backend), usable_device(device)
    with open_model(model) as found, open_trainer(found, chosen, preset, budget_tokens, device, layers) as trainer:
        about = describe_run(found.folder, commit, ("accelerate", "peft")) | {"settings": chosen.model_dump()}
        with ResultFile(output if trainer.is_main_process else Path(os.devnull), about) as file:
            for _ in range(count):
                row = trainer.step() | {"processes": trainer.num_processes, "layers": layers}
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


def _measured(
    name: str, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], selection: UniqueSelection, device: str,
    repeats: int,
) -> Row:  # fmt: skip
    forward = forward_of(name, inputs, selection)
    try:
        return measure(forward, device, repeats)
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
