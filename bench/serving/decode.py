"""Decode time per token only: from the prefix cache, in one process, by batch.

    python -m bench.serving decode --variant flash_attn,unique --output decode.jsonl

Prompts are text, and the cache holds what the model wrote for them. The longest prompt is computed; the other requests
get copies of its blocks and end differently (`batches.py`). Then 1 token and 1 + n tokens are generated from the prefix
cache, and the difference is divided by n. Every request has KV blocks of its own.

Each variant has one engine with the settings of a server, one after the other. `--no-compile` saves the minute of
torch.compile, for a quick look.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.table import Table

from bench.common.engine import DECODE_GRAPHS, Variant, engine, force_routing, parse_variants
from bench.common.host_reads import host_reads, host_share
from bench.common.models import SHAPES, Model, open_model
from bench.common.options import Commit, Output, TimeLimit
from bench.common.results import Row
from bench.serving.batches import (
    ALLOWED,
    Batch,
    Prompt,
    Runner,
    check_batches,
    draw_text,
    make_prompts,
    parse_batches,
)
from bench.serving.variants import VariantSettings, measure_variants, open_variant, per_token, variant_columns
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.provenance import describe_run

LOADS = (
    "1x2K", "24x2K", "128x4K", "64x8K", "16x32K", "24x32K", "1x128K", "4x128K", "5x128K", "6x128K",
)  # fmt: skip
MIXED = ("16x32K", "16x32K+1x128K", "16x32K+1x128K:dense")
_WARM_UP = 16
"""Tokens of the first, unmeasured generation."""
# Round figures of one H200, only for the forecast.
_FLOPS_PER_SECOND = 430e12
_BYTES_PER_SECOND = 3.5e12
_START_SECONDS = 50
_COMPILE_SECONDS = 95
_SPARSE_SHARE = 0.25
"""Bytes that a sparse step reads of the KV cache and the statistics."""


class DecodeSettings(VariantSettings):
    """The input of the process of one variant. None is vLLM's default."""

    loads: tuple[Batch, ...]
    new_tokens: int
    max_model_len: int
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    block_size: int | None
    compile: bool
    """Whether torch.compile and all graphs are on, as in a server."""


def forecast_seconds(model: Model, settings: DecodeSettings) -> float:
    """A rough estimate of the time of one variant on one H200, its start included."""
    variant = Variant.parse(settings.variant)
    read = model.kv_bytes_per_token(variant.kv_cache_dtype) * (_SPARSE_SHARE if variant.sparse else 1)
    seconds = _START_SECONDS + (_COMPILE_SECONDS if settings.compile else 0.0)
    seconds += model.prefill_flops(0, max(each.longest for each in settings.loads)) / _FLOPS_PER_SECOND
    tokens = settings.repeats * settings.new_tokens + _WARM_UP
    loads = settings.loads if variant.sparse else {_plain(each): each for each in settings.loads}.values()
    return seconds + sum(
        tokens * (2 * model.matrix_elements + each.tokens * read) / _BYTES_PER_SECOND for each in loads
    )


def measure_batch(runner: Runner, batch: Batch, prompts: Sequence[Prompt], settings: DecodeSettings) -> Row:
    """Time of one token of a batch, as columns of a row: that of 1 + n tokens without that of 1 token, divided by n.

    Raises:
        RuntimeError: if prompts were computed within a measured time, because they were not in the prefix cache.
    """
    about = runner.fill(batch, prompts)
    runner.generate(batch, prompts, 1 + min(_WARM_UP, settings.new_tokens))
    reads = host_reads()

    def seconds(tokens: int) -> float:
        begin = time.perf_counter()
        outputs = runner.generate(batch, prompts, tokens)
        end = time.perf_counter()
        for prompt, output in zip(prompts, outputs, strict=True):
            if (output.num_cached_tokens or 0) < len(prompt.tokens) - runner.block_size:
                raise RuntimeError(
                    f"{output.num_cached_tokens} of a prompt's {len(prompt.tokens)} tokens came from the prefix cache"
                )
        return end - begin

    times = [
        (seconds(1 + settings.new_tokens) - seconds(1)) / settings.new_tokens * 1e3 for _ in range(settings.repeats)
    ]
    counts = {"repeats": settings.repeats, "new_tokens": settings.new_tokens}
    return {**about, **per_token(times), **counts, **host_share(reads, host_reads())}


def decode_variant(text: Annotated[str, typer.Argument(metavar="JSON")]) -> None:
    """Measure one variant in this process for `decode`, and append a row for each batch."""
    settings = DecodeSettings.model_validate_json(text)
    begin = time.perf_counter()
    with open_variant(settings) as (model, file):
        for row in _measure_variant(settings, model):
            file.write(row)
            measured = f"{row['ms_per_token']:.2f} ms per token" if "ms_per_token" in row else row["skipped"]
            passed = time.perf_counter() - begin
            print(f"{settings.variant}: {row['load']}: {measured}, {passed:.0f} s since the start", flush=True)


def _measure_variant(settings: DecodeSettings, model: Model) -> Iterator[Row]:
    """Yields a row for each load, in an order in which prompts are found in the cache: the longest first."""
    variant = Variant.parse(settings.variant)
    begin = time.perf_counter()
    with engine(
        model,
        variant,
        settings.additional_config,
        skip_tokenizer_init=True,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        block_size=settings.block_size,
        enable_prefix_caching=True,
        compilation_config=None if settings.compile else DECODE_GRAPHS,
    ) as (llm, backend):
        config = llm.llm_engine.vllm_config
        runner = Runner(llm, variant.sparse)
        about = {
            **variant_columns(variant, backend, settings.additional_config, model),
            "block_size": runner.block_size,
            "kv_cache_tokens": runner.room,
            "max_model_len": settings.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "compile_mode": int(config.compilation_config.mode or 0),
            "cuda_graphs": getattr(config.compilation_config.cudagraph_mode, "name", None),
            "start_seconds": round(time.perf_counter() - begin, 1),
        }
        most = max(each.count for each in settings.loads)
        text = draw_text(model, max(each.longest for each in settings.loads), most)
        found: dict[tuple[int, ...], Row] = {}
        for batch in sorted(settings.loads, key=lambda each: (-each.longest, -each.tokens)):
            load = {
                "load": batch.name,
                "context_tokens": batch.longest,
                "batch": batch.count,
                "kv_gib": round(batch.tokens * model.kv_bytes_per_token(variant.kv_cache_dtype) / 2**30, 3),
            }
            if not runner.fits(batch):
                yield {**about, **load, "skipped": f"the KV cache holds {runner.room} tokens"}
                continue
            # Arguments change nothing in a backend of vLLM.
            if variant.sparse or _plain(batch) not in found:
                prompts = make_prompts(batch, *text, settings.new_tokens)
                try:
                    found[_plain(batch)] = measure_batch(runner, batch, prompts, settings)
                except RuntimeError as error:
                    yield {**about, **load, "skipped": str(error)}
                    continue
            yield {**about, **load, **found[_plain(batch)]}


def _plain(batch: Batch) -> tuple[int, ...]:
    """What vLLM's own backends know of a batch."""
    return tuple(batch.contexts)


def decode(
    output: Output,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="BACKEND or BACKEND:KV_CACHE_DTYPE, repeatable. Default: flash_attn and unique."),
    ] = None,
    model: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)} (random weights), or a folder.")] = "llama-3.1-8b",
    load: Annotated[list[str] | None, typer.Option(help=f"{ALLOWED}, repeatable. Default: {', '.join(LOADS)}.")] = None,
    mixed: Annotated[bool, typer.Option("--mixed", help=f"Measure also {', '.join(MIXED)}.")] = False,
    additional_config: Annotated[str | None, typer.Option(help="For the plugin's backends.", metavar="JSON")] = None,
    skip_ratio: Annotated[
        float | None,
        typer.Option(help="Share of the KV groups that routing skips in the plugin's backends, for any data."),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per measured time.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each measurement.")] = 3,
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="Start without torch.compile, with decode graphs only.")
    ] = False,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="As for vLLM. Default: the longest context.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="As for vLLM.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="As for vLLM.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(min=0.05, max=1, help="As for vLLM.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="As for vLLM.")] = None,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Measure decode time per token of each variant; exit code 3 if one fails or does not finish in time."""
    end = time.monotonic() + time_limit
    loads = parse_batches([*(load or LOADS), *(MIXED if mixed else ())])
    variants = parse_variants(variant or ("flash_attn", "unique"))
    with open_model(model) as opened:
        check_batches(loads, new_tokens, max_model_len or int(opened.config["max_position_embeddings"]))
        most = max(batch.count for batch in loads)
        if max_num_seqs is not None and most > max_num_seqs:
            raise ConfigurationError(f"load: got {most} requests, allowed: at most max_num_seqs = {max_num_seqs}")
        if skip_ratio is not None:
            additional_config = force_routing(opened, additional_config, skip_ratio)
        all_settings = [
            DecodeSettings(
                model=model if opened.drawn_weights else str(opened.folder),
                variant=each.name,
                additional_config=each.additional_config(additional_config),
                loads=loads,
                new_tokens=new_tokens,
                repeats=repeats,
                max_model_len=max_model_len or max(batch.longest for batch in loads),
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                gpu_memory_utilization=gpu_memory_utilization,
                block_size=block_size,
                compile=not no_compile,
                output=str(output.absolute()),
            )
            for each in variants
        ]
        forecasts = [(each.variant, forecast_seconds(opened, each)) for each in all_settings]
        each_text = ", ".join(f"{name} {seconds:.0f}" for name, seconds in forecasts)
        forecast = f"about {sum(seconds for _, seconds in forecasts):.0f} s on one H200: {each_text}"
        about = describe_run(opened.folder, commit)
        measure_variants("decode-variant", all_settings, about, output, lambda: end - time.monotonic(), table, forecast)


def table(rows: list[Row]) -> Table:
    """Return one line for each load, one column for each variant, and the largest ratio to the first variant."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    times = {(row["load"], row["variant"]): row for row in rows if "ms_per_token" in row}
    lines = Table("load", *variants, "ratio", title="Decode: median ms per token (least to most)")
    for load in dict.fromkeys(row["load"] for row in rows):
        found = [times.get((load, variant)) for variant in variants]
        known = [row["ms_per_token"] for row in found[1:] if row]
        ratio = f"{found[0]['ms_per_token'] / max(known):.2f}" if found[0] and known else "-"
        lines.add_row(load, *(_cell(row) for row in found), ratio)
    return lines


def _cell(row: Row | None) -> str:
    return "-" if row is None else "{ms_per_token:.2f} ({ms_per_token_min:.2f} to {ms_per_token_max:.2f})".format(**row)
