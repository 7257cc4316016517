"""The command `vllm-sparse train`: fine-tunes a model on the pages that serving selects."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_sparse_plugin.config import KEY, resolve, section_of
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import (
    AdditionalConfig,
    AttentionBackend,
    Device,
    ModelFolder,
    expect_selection_alone,
    find_device,
    find_model,
    find_preset,
    model_limits,
    open_tokenizer,
    parse_additional_config,
)
from vllm_sparse_plugin.tools.caches import ensure_caches
from vllm_sparse_plugin.tools.cores import serve_command
from vllm_sparse_plugin.tools.endings import open_console, say
from vllm_sparse_plugin.tools.eval.progress import Advance, show_progress
from vllm_sparse_plugin.tools.extras import TRAINING, require_packages
from vllm_sparse_plugin.tools.files import digest_of
from vllm_sparse_plugin.tools.provenance import describe_run

Budget = Annotated[int | None, typer.Option(help="Budget to train for. Default: the preset's.")]


def train(
    data: Annotated[
        Path,
        typer.Option(help="JSON lines with `text`, or with `prompt` and the `completion` to learn.", metavar="PATH"),
    ],
    output: Annotated[
        Path, typer.Option(help="Folder of the trained model. The same command continues a killed run.", metavar="PATH")
    ],
    model: ModelFolder = None,
    attention_backend: AttentionBackend = "unique",
    budget_tokens: Budget = None,
    additional_config: AdditionalConfig = "{}",
    settings: Annotated[str, typer.Option(help='Training settings, such as {"lora_rank": 0}.', metavar="JSON")] = "{}",
    device: Device = None,
) -> None:
    """Fine-tune a model on the pages that serving selects.

    Prompts attend densely. Later tokens attend only to the pages that a server would select. The model learns to give
    the answers that it gives with dense attention.

    The trained model's config.json holds the settings, so a server applies them automatically.
    """
    require_packages("train", TRAINING)
    # Imported here: bad input must not wait for it.
    from vllm_sparse_plugin.tools.eval.items import Prompter
    from vllm_sparse_plugin.tools.training.attention import ServedSelection
    from vllm_sparse_plugin.tools.training.data import pack, read_documents
    from vllm_sparse_plugin.tools.training.settings import parse_settings
    from vllm_sparse_plugin.tools.training.trainer import CURVES, Run, Trainer

    folder = find_model(model)
    chosen = parse_settings(parse_additional_config(settings, "settings"))
    given = parse_additional_config(additional_config).get(KEY) or {}
    preset = find_preset(attention_backend)
    resolved = resolve(given, preset)
    if budget_tokens is not None:
        selection = dict(given.get("selection") or {}) | {"budget_tokens": budget_tokens}
        resolved = resolve(dict(given) | {"selection": selection}, preset)
    served = ServedSelection.of(resolved)
    expect_selection_alone(resolved, "training")
    section = section_of(resolved)
    section["selection"]["statistics"] = served.selection.statistics
    limit, layers = model_limits(folder)
    if served.first_dense_layers >= layers:
        raise ConfigurationError(
            f"{KEY}.first_dense_layers: got {served.first_dense_layers}, allowed for training: less than the model's "
            f"{layers} layers"
        )
    if chosen.sequence_tokens > limit:
        raise ConfigurationError(
            f"settings.sequence_tokens: got {chosen.sequence_tokens}, allowed: the model's {limit}"
        )
    torch_device = find_device(device)
    if torch_device.startswith("cuda:"):
        raise ConfigurationError(
            f"device: got {device!r}, allowed for training: cpu or cuda, with CUDA_VISIBLE_DEVICES to choose GPUs"
        )
    tokenizer = open_tokenizer(folder)
    decoded_tokens = chosen.decoded_tokens if chosen.dense_prompts else None
    begin = Prompter(tokenizer).begin
    rows = pack(read_documents(data, tokenizer), chosen.sequence_tokens, chosen.seed, decoded_tokens, begin)
    if not rows:
        raise ConfigurationError(
            f"data: got {str(data)!r}, whose prompts fill rows of {chosen.sequence_tokens} tokens, allowed: at least "
            "one completion that begins within a row"
        )
    longest, whole_tokens = max(max(row.packing.lengths) for row in rows), served.mask(None).whole_tokens
    # The text loss has weight 0, so training would learn only rounding.
    if chosen.distillation == 1 and longest <= whole_tokens:
        raise ConfigurationError(
            f"data: got documents of up to {longest} tokens, allowed: some of more than {whole_tokens}, because the "
            "selection reads shorter ones whole"
        )
    about = describe_run(folder, packages=TRAINING)
    run = Run(
        model=folder, output=output, served=served, section=section, settings=chosen, about=about, data=digest_of(data)
    )
    console = open_console()
    ensure_caches()
    trainer = Trainer(run, rows, tokenizer, torch_device)
    left = chosen.steps - trainer.steps
    with show_progress(console, f"Training: {left} steps", left) as advance:
        trainer.train(lambda row: _report(row, console, advance))
    say(console, f"The model is in {output}, its curves in {output / CURVES}.")
    serve = f"{serve_command()} {shlex.quote(str(output))} --attention-backend {attention_backend}"
    say(console, f"Serve it: {serve}")


def _report(row: dict[str, Any], console: Console, advance: Advance) -> None:
    if "objective" in row:
        mask = "hard mask" if row["temperature"] is None else f"T {row['temperature']:.3g}"
        advance(
            f"Step {row['step']}: objective {row['objective']:.4f}, {mask}, {row['tokens_per_second']:,.0f} tokens/s"
        )
        return
    console.print(
        f"step {row['step']}: held-out loss dense {row['dense_loss']:.4f}, as served {row['served_loss']:.4f}, "
        f"same likeliest token {row['agreement']:.1%}",
        highlight=False,
    )
