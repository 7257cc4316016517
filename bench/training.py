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
from sparse_kernels.masked_attention import Packing, PageMask, masked_attention, page_records
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.common import options
from bench.common.console import print_beside, print_rows
from bench.common.models import Model, open_model
from bench.common.results import ResultFile, Row, spread
from vllm_sparse_plugin.config import ResolvedConfig, resolve, section_of
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
PASSES = [*MASKS, *DENSE]
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
    return name != "math" if on_gpu else name in (*MASKS, "math")


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


@contextmanager
def open_trainer(
    model: Model, settings: TrainingSettings, config: ResolvedConfig, device: str, layers: int | None
) -> Iterator[Trainer]:
    """Yields a trainer in a temporary folder, for rows of random tokens.

    Args:
        model: its checkpoint is trained; without one, its shape with random weights on the device.
        settings: of the run.
        config: with the selection that is trained.
        device: torch's name.
        layers: replaces the number of layers of a shape; None to keep it.
    """

    def draw(folder: Path, attention: HasName, dtype: torch.dtype) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        shape: Any = AutoConfig.from_pretrained(folder)
        shape.num_hidden_layers = layers or shape.num_hidden_layers
        shape.use_cache = False
        torch.manual_seed(0)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(shape, attn_implementation=attention.name, dtype=dtype)

    tokens = settings.sequence_tokens
    # The last row is not trained on.
    drawn = torch.randint(model.vocabulary, (_ROWS + 1, tokens), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [TextRow(row, [False] + [True] * (tokens - 1), Packing((tokens,)), (0,)) for row in drawn]
    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:
        run = Run(model.folder, Path(folder) / "run", ServedSelection.of(config), section_of(config), settings)
        yield Trainer(run, rows, None, device, draw if model.drawn_weights else load_model)


CONTEXTS = ["8K", "16K", "32K", "64K", "128K"]

app = options.make_app("Attention under a page mask, forward and backward, compared with dense attention.")
Budget = Annotated[int, typer.Option(help="Budget of the mask in tokens.")]
Device = Annotated[str, typer.Option(help="Torch device.")]


@app.command()
def run(
    output: options.Output,
    context: Annotated[list[str], typer.Option(help="Tokens, repeatable.")] = CONTEXTS,
    passes: Annotated[list[str], typer.Option("--pass", help="Repeatable, of what the machine supports.")] = PASSES,
    query_heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 8,
    head_size: Annotated[int, typer.Option(min=16, help="Elements of a head.")] = 128,
    budget_tokens: Budget = 512,
    statistics: Annotated[str, typer.Option(help="Page statistics.")] = "quarters",
    repeats: options.Repeats = 10,
    device: Device = "cuda",
    time_limit: options.TimeLimit = 540,
    commit: options.Commit = None,
) -> None:
    """Time one layer's attention of one sequence. Default: the shape of Llama-3.1-8B.

    Each line is written at once: milliseconds of the forward and the backward pass, and on a GPU the memory that both
    need besides queries, keys and values.
    """
    end, device = time.monotonic() + time_limit, options.usable_device(device)
    names = [name for name in options.parse_names("pass", passes, PASSES) if is_available(name, device)]
    settings = {"selection": {"budget_tokens": budget_tokens, "statistics": statistics}}
    selection = resolve(settings, "unique").selection
    assert isinstance(selection, UniqueSelection)
    shape = Shape(query_heads, kv_heads, head_size, torch.bfloat16 if device.startswith("cuda") else torch.float32)
    rows: list[Row] = []
    with ResultFile(output, describe_run(commit=commit)) as file:
        for tokens in options.parse_sizes("context", context):
            inputs = shape.draw(tokens, device)
            for name in names:
                if time.monotonic() > end:
                    break
                row: Row = {
                    "pass": name, "context_tokens": tokens, "query_heads": query_heads, "kv_heads": kv_heads,
                    "head_size": head_size,
                }  # fmt: skip
                if name in MASKS:
                    row |= {"budget_tokens": budget_tokens, "statistics": statistics}
                try:
                    row |= measure(forward_of(name, inputs, selection), device, repeats)
                except RuntimeError as error:  # such as torch's OutOfMemoryError
                    row["failed"] = " ".join(str(error).split())[:200]
                for each in inputs:
                    each.grad = None
                rows.append(row)
                file.write(row)
    form = "{forward[median_ms]:.3f} + {backward[median_ms]:.3f}"
    print_beside(rows, ["context_tokens"], "pass", "both.median_ms", form)


@app.command()
def steps(
    output: options.Output,
    model: options.ModelName = "llama-3.1-8b",
    layers: Annotated[int | None, typer.Option(min=1, help="Replaces the number of layers of a shape.")] = None,
    context: Annotated[str, typer.Option(help="Tokens of a row.")] = "32K",
    count: Annotated[int, typer.Option("--steps", min=1, help="Steps of the trainer.")] = 10,
    settings: Annotated[str, typer.Option(help="JSON of other training settings.")] = "{}",
    attention_backend: Annotated[str, typer.Option(help="Backend whose selection is trained.")] = "unique",
    budget_tokens: Budget = 512,
    device: Device = "cuda",
    commit: options.Commit = None,
) -> None:
    """Train a model shape with random weights on random tokens. Default: LoRA, one row per step.

    A line is one step of the trainer, as in its log, with the GPU memory. `accelerate launch` runs it on several
    devices. A step then has `rows_per_step` rows on each device.
    """
    (tokens,) = options.parse_sizes("context", [context])
    own = {"steps": count, "hard_steps": count // 2, "rows_per_step": 1, "warmup_steps": 0, "sequence_tokens": tokens}
    chosen = parse_settings(own | LOSS_OF_THE_TEXT | parse_additional_config(settings, "settings"))
    config = resolve({"selection": {"budget_tokens": budget_tokens}}, find_preset(attention_backend))
    device = options.usable_device(device)
    with open_model(model) as found, open_trainer(found, chosen, config, device, layers) as trainer:
        about = describe_run(found.folder, commit, ("accelerate", "peft")) | {"settings": chosen.model_dump()}
        with ResultFile(output if trainer.is_main_process else Path(os.devnull), about) as file:
            for _ in range(count):
                row = trainer.step() | {"processes": trainer.num_processes, "layers": layers}
                file.write(row)
                if trainer.is_main_process:
                    print_rows([row], list(row))


def main() -> None:
    """Runs the command line. Bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
