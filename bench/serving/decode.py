"""Decode time per token only: from the prefix cache, in one process, by context and batch.

    python -m bench.serving decode --variant flash_attn --variant unique --output decode.jsonl

The prompts of a batch are computed once. Then 1 token and 1 + n tokens are generated from the prefix cache, and the
difference is divided by n: median over repeats. Every request has separate KV blocks. The prompts of a context begin
with those of shorter contexts, and the prompts of a batch are the first of a larger batch. A token is therefore
computed once per variant while the cache has room. One process per variant, one after the other.

With `--noise-cache` no prompt is computed: the whole cache is filled with noise at start (vLLM's
DecodeBenchConnector). Use it for contexts that take minutes to compute, if contents do not affect time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from bench.common.engine import DECODE_GRAPHS, Variant, engine, force_routing, parse_variants
from bench.common.host_reads import host_reads, host_share
from bench.common.models import SHAPES, Model, open_model
from bench.common.options import LARGEST, Commit, GridRow, Output, TimeLimit, parse_grid
from bench.common.results import Row
from bench.serving.variants import (
    BackendSettings,
    Generate,
    check_batches,
    generator,
    measure_variants,
    open_variant,
    time_tokens,
    variant_columns,
)
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.provenance import describe_run

if TYPE_CHECKING:
    from vllm import LLM

DEFAULT_GRID = ("2K=1,6,24", "8K=1,8,24", "32K=1,8,24", "128K=1,4,6")
# Round figures of one H200, only for the forecast.
_FLOPS_PER_SECOND = 500e12
_BYTES_PER_SECOND = 3.5e12
_START_SECONDS = 60
NOISE = {
    "kv_connector": "DecodeBenchConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"startup_fill": True, "fill_mean": 0.0, "fill_std": 1.0},
}
"""Fills the KV cache of an engine with noise, for vLLM's `--kv-transfer-config`."""


class DecodeSettings(BackendSettings):
    """The input of the process of one variant."""

    grid: tuple[GridRow, ...]
    new_tokens: int
    max_num_seqs: int
    block_size: int | None
    max_num_batched_tokens: int | None
    one_token: bool
    """Whether each batch is measured again with one generated token."""
    noise_cache: bool
    """Whether keys and values are noise instead of those of prompts."""


def draw_prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Return random prompts with distinct first tokens; shorter prompts are prefixes of longer ones."""
    prompts = []
    for i in range(count):
        rng = random.Random(i)
        first = 3 + i % (vocabulary - 3)
        prompts.append([first, *rng.choices(range(3, vocabulary), k=length - 1)])
    return prompts


def forecast_seconds(model: Model, settings: DecodeSettings) -> float:
    """A rough estimate of the time of one variant with dense attention on one H200, its start included."""
    kv_bytes = model.kv_bytes_per_token(Variant.parse(settings.variant).kv_cache_dtype)
    seconds = float(_START_SECONDS)
    computed: dict[int, int] = {}
    for row in settings.grid:
        # The largest batch is not known yet.
        largest = max(batch or 1 for batch in row.batches)
        batches = [batch or min(2 * largest, settings.max_num_seqs) for batch in row.batches]
        for i in range(0 if settings.noise_cache else max(batches)):
            seconds += model.prefill_flops(computed.get(i, 0), row.context) / _FLOPS_PER_SECOND
            computed[i] = row.context
        for batch in batches:
            step = (2 * model.matrix_elements + batch * row.context * kv_bytes) / _BYTES_PER_SECOND
            seconds += (settings.repeats + 1) * settings.new_tokens * step
    return seconds


def measure_batch(
    generate: Generate,
    prompts: list[list[int]],
    settings: DecodeSettings,
    least: int,
) -> dict[str, Any]:
    """Seconds of decoding a batch whose prompts are in the prefix cache, as columns of a row.

    Args:
        generate: generates that many tokens for each prompt and returns the number of cached tokens of each.
        prompts: the batch.
        settings: repeats and new tokens.
        least: tokens of each prompt that must come from the cache for a time to count.
    """

    reads: list[tuple[float, int]] = []

    def seconds(tokens: int) -> float:
        reads.append(host_reads())
        begin = time.perf_counter()
        cached = generate(prompts, tokens)
        end = time.perf_counter()
        if min(cached) < least:
            raise RuntimeError(f"only {min(cached)} of a prompt's tokens came from the prefix cache, not {least}")
        return end - begin

    begin = time.perf_counter()
    generate(prompts, 1)
    prefill = time.perf_counter() - begin
    times = time_tokens(seconds, settings.new_tokens, settings.repeats)
    # The first call is the warm-up.
    return {**times, **host_share(reads[1], host_reads()), "prefill_seconds": round(prefill, 3)}


def decode_variant(text: Annotated[str, typer.Argument(metavar="JSON")]) -> None:
    """Measure one variant in this process for `decode`, and append a row for each batch."""
    settings = DecodeSettings.model_validate_json(text)
    with open_variant(settings) as (model, file):
        seconds = forecast_seconds(model, settings)
        print(f"{settings.variant}: about {seconds:.0f} s on one H200 if attention were dense", flush=True)
        _measure_variant(settings, model, file.write)


def _measure_variant(settings: DecodeSettings, model: Model, write: Callable[[Row], None]) -> None:
    variant = Variant.parse(settings.variant)
    longest = settings.grid[-1].context
    begin = time.perf_counter()
    with engine(
        model,
        variant,
        settings.additional_config,
        skip_tokenizer_init=True,
        max_model_len=longest,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        block_size=settings.block_size,
        enable_prefix_caching=True,
        kv_transfer_config=NOISE if settings.noise_cache else None,
        compilation_config=DECODE_GRAPHS,
    ) as (llm, backend):
        start_seconds = time.perf_counter() - begin
        generates = {False: generator(llm)} | ({True: generator(llm, only=7)} if settings.one_token else {})
        cache = llm.llm_engine.vllm_config.cache_config
        block_size = cache.block_size
        blocks = cache.num_gpu_blocks - 1  # vLLM reserves one
        prompts = draw_prompts(settings.max_num_seqs, longest, model.vocabulary)
        if settings.noise_cache:
            fill_records(llm, prompts[0])
        for row in settings.grid:
            fits = blocks // -(-row.context // block_size)
            length = row.context - settings.new_tokens - 1
            largest = min(fits, settings.max_num_seqs)
            batches = sorted({largest if batch is None else batch for batch in row.batches})
            for batch, one_token in product(batches, generates):
                about = {
                    **variant_columns(variant, backend, settings.additional_config, model),
                    "context_tokens": row.context,
                    "batch": batch,
                    "block_size": block_size,
                    "kv_cache_tokens": blocks * block_size,
                    "noise_cache": settings.noise_cache,
                    "one_token": one_token,
                }
                if batch > fits or batch == 0:
                    write({**about, "skipped": f"the KV cache holds {fits} requests of {row.context} tokens"})
                    continue
                asked = [prompt[:length] for prompt in prompts[:batch]]
                measured = measure_batch(generates[one_token], asked, settings, length - block_size)
                kv_gib = batch * row.context * model.kv_bytes_per_token(variant.kv_cache_dtype) / 2**30
                found = {**about, **measured, "kv_gib": round(kv_gib, 3), "start_seconds": round(start_seconds, 1)}
                write(found)
                print(
                    f"{variant.name}: {row.context} tokens, batch {batch}: {found['ms_per_token']:.2f} ms per token, "
                    f"prefill {found['prefill_seconds']:.1f} s, {time.perf_counter() - begin:.0f} s since the start",
                    flush=True,
                )


def decode(
    output: Output,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="BACKEND or BACKEND:KV_CACHE_DTYPE, repeatable. Default: flash_attn and unique, each alone and :fp8."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)} (random weights), or a folder.")] = "llama-3.1-8b",
    grid: Annotated[
        list[str] | None,
        typer.Option(
            help=f"CONTEXT=BATCH,..., repeatable, {LARGEST} for as many as fit. Default: {', '.join(DEFAULT_GRID)}.",
        ),
    ] = None,
    additional_config: Annotated[str | None, typer.Option(help="For the plugin's backends.", metavar="JSON")] = None,
    skip_ratio: Annotated[
        float | None,
        typer.Option(help="Share of the KV groups that routing skips in the plugin's backends, for any data."),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per measured time.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each measurement.")] = 5,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Largest batch of the engine.")] = 32,
    gpu_memory_utilization: Annotated[float, typer.Option(min=0.05, max=1, help="As for vLLM.")] = 0.92,
    block_size: Annotated[int | None, typer.Option(min=1, help="As for vLLM.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a prefill step.")] = None,
    one_token: Annotated[
        bool,
        typer.Option("--one-token", help="Measure each batch again with one token all the time: steps select alike."),
    ] = False,
    noise_cache: Annotated[
        bool, typer.Option(help="Fill the KV cache with noise at the start instead of computing prompts.")
    ] = False,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Measure decode time per token of each variant; exit code 3 if one fails or does not finish in time."""
    end = time.monotonic() + time_limit
    variants = parse_variants(variant or ("flash_attn", "unique", "flash_attn:fp8", "unique:fp8"))
    rows = parse_grid(grid or DEFAULT_GRID)
    with open_model(model) as opened:
        _check(rows, opened, new_tokens, max_num_seqs)
        if skip_ratio is not None:
            additional_config = force_routing(opened, additional_config, skip_ratio)
        all_settings = [
            DecodeSettings(
                model=model if opened.drawn_weights else str(opened.folder),
                variant=each.name,
                additional_config=each.additional_config(additional_config),
                grid=rows,
                new_tokens=new_tokens,
                repeats=repeats,
                max_num_seqs=max_num_seqs,
                gpu_memory_utilization=gpu_memory_utilization,
                block_size=block_size,
                max_num_batched_tokens=max_num_batched_tokens,
                one_token=one_token,
                noise_cache=noise_cache,
                output=str(output.absolute()),
            )
            for each in variants
        ]
        about = describe_run(opened.folder, commit)
        measure_variants("decode-variant", all_settings, about, output, lambda: end - time.monotonic(), table)


def _check(grid: tuple[GridRow, ...], model: Model, new_tokens: int, max_num_seqs: int) -> None:
    """Raise ConfigurationError for bad input before an engine starts."""
    limit = int(model.config["max_position_embeddings"])
    for row in grid:
        if not new_tokens + 64 <= row.context <= limit:
            raise ConfigurationError(
                f"grid: got a context of {row.context} tokens, allowed: from new_tokens + 64 = {new_tokens + 64} to "
                f"the model's {limit}"
            )
        check_batches(row, max_num_seqs)


def fill_records(llm: LLM, prompt: list[int]) -> None:
    """Fills the records of offloaded pages with noise: zeros would select the same pages in every step."""
    # The first step makes the records.
    generator(llm)([prompt[:64]], 2)
    llm.collective_rpc("fill_page_records")


def table(rows: list[dict[str, Any]]) -> Table:
    """Return one line for each context and batch, one column for each variant."""
    times = {(row["context_tokens"], row["batch"], variant_name(row)): row.get("ms_per_token") for row in rows}
    variants = list(dict.fromkeys(variant_name(row) for row in rows))
    lines = Table("context", "batch", *variants, title="Decode: ms per token")
    for context, batch in sorted({key[:2] for key in times}):
        found = [times.get((context, batch, variant)) for variant in variants]
        lines.add_row(str(context), str(batch), *("-" if ms is None else f"{ms:.2f}" for ms in found))
    return lines


def variant_name(row: Row) -> str:
    """The variant of a row, and whether its steps select alike."""
    return f"{row['variant']}, one token" if row.get("one_token") else str(row["variant"])
