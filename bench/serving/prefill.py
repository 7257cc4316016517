"""Time to first token and throughput of whole engines, with dense and with sparse prefill.

    python -m bench.serving prefill --variant flash_attn,unique_prefill --load 32K=32,128K=4 --output prefill.jsonl

Prefix caching is on, as in a server. Every prompt has a distinct first token, so nothing is shared except in the
measurement of prefix hits. A row is one of

- `first_token`: prompts of a context, one after the other, with one output token each, after one that is not counted.
- `prefix_hit`: the same with three quarters of each prompt in the prefix cache.
- `load`: several prompts at once with 128 output tokens each.

Weights are random unless the model is a folder. Answers of such a model have no meaning, but its time is that of a real
one: at a fixed density, the number of blocks that sparse prefill reads depends only on the length of the prompt. A
setting that depends on the text, such as `coverage`, must be measured with a real model.

Rows of sparse prefill have the shares that the layers count, over the timed prompts: `prefill_density` of the key
blocks read or, with zipvl, of the important tokens, and `prefill_pairs` of the pairs that attend. A `chunk` of the
longest context prefills each prompt in one piece.

One process per variant, one after the other.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from bench.common.engine import DECODE_GRAPHS, Variant, engine, parse_variants
from bench.common.models import SHAPES, Model, open_model
from bench.common.options import ClientRow, Commit, Output, parse_loads, parse_sizes, size_text
from bench.common.results import Row
from bench.serving.variants import (
    BackendSettings,
    Generate,
    generator,
    measure_variants,
    open_variant,
    variant_columns,
)
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.metrics.live import BLOCK_READS, TOKEN_READS, count_totals
from vllm_sparse_plugin.tools.provenance import describe_run

VARIANTS = ("flash_attn", "unique", "unique_prefill")
GRID = ("8K", "32K", "64K", "128K")
OUTPUT_TOKENS = 128
"""Output tokens of each request of a load."""
FIRST_TOKEN: Literal["first_token"] = "first_token"
PREFIX_HIT: Literal["prefix_hit"] = "prefix_hit"
LOAD: Literal["load"] = "load"
_ROOM = 256
"""Tokens of an engine beyond the longest context."""
_READS = {each.name: each.name.removeprefix("vllm_sparse_") for each in (*BLOCK_READS, *TOKEN_READS)}
"""Columns by the names of metrics."""
_Reads = Mapping[str, tuple[float, int]]
"""A result of `count_totals`."""
_GRACE = 90
"""Seconds to finish the current measurement after a variant's time is over."""


class PrefillSettings(BackendSettings):
    """The input of the process of one variant."""

    contexts: tuple[int, ...]
    prefix_hit: bool
    """Whether the longest context is also measured after a prefix hit."""
    loads: tuple[ClientRow, ...]
    chunk: int
    """Tokens of an engine's step."""
    time_limit: float
    """Seconds after which no measurement begins."""

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return max((*self.contexts, *(load.context for load in self.loads)))


@dataclass(frozen=True)
class Measurement:
    """A measured row."""

    kind: Literal["first_token", "prefix_hit", "load"]
    context: int
    prompt_tokens: int
    """The context, shortened if the model's limit leaves no room for the answer."""
    requests: int = 1

    def fields(self) -> Row:
        """The columns of the measurement in result files."""
        return {
            "measurement": self.kind,
            "context_tokens": self.context,
            "prompt_tokens": self.prompt_tokens,
            "requests": self.requests,
        }


def plan(settings: PrefillSettings, max_model_len: int) -> list[Measurement]:
    """The measurements in order. A prompt leaves room for its answer in an engine of `max_model_len` tokens."""
    alone = [(context, min(context, max_model_len - 1)) for context in sorted(settings.contexts)]
    loads = [(load.context, min(load.context, max_model_len - OUTPUT_TOKENS), load.requests) for load in settings.loads]
    return [
        *(Measurement(FIRST_TOKEN, *each) for each in alone),
        *(Measurement(LOAD, *each) for each in loads),
        *(Measurement(PREFIX_HIT, *each) for each in alone[-1:] if settings.prefix_hit),
    ]


def fresh_prompts(vocabulary: int) -> Callable[[int], list[int]]:
    """Return a function that draws prompts of a given length with distinct first tokens."""
    firsts: Iterator[int] = iter(range(3, vocabulary))

    def draw(length: int) -> list[int]:
        first = next(firsts)
        return [first, *random.Random(first).choices(range(3, vocabulary), k=length - 1)]

    return draw


def measure(
    measurement: Measurement, generate: Generate, draw: Callable[[int], list[int]], settings: PrefillSettings
) -> Row:
    """Return the columns of a measurement.

    Raises:
        RuntimeError: if a prompt has unexpected cached tokens, or too few of them.
    """
    if measurement.kind == LOAD:
        return _measure_load(measurement, generate, draw, settings)
    times, found, reads = [], [], []
    for repeat in range(1 + settings.repeats):
        prompt = draw(measurement.prompt_tokens)
        if measurement.kind == PREFIX_HIT:
            generate([prompt[: _prefix(prompt)]], 1)
        seconds, cached, read = _timed(generate, [prompt], 1)
        _require_cached(measurement, cached[0], _prefix(prompt))
        if repeat:
            times.append(seconds)
            found.append(cached[0])
            reads.append(read)
    return {
        "cached_tokens": min(found),
        "seconds": [round(seconds, 4) for seconds in times],
        "seconds_median": round(statistics.median(times), 4),
        **read_shares(reads),
    }


def _measure_load(
    measurement: Measurement, generate: Generate, draw: Callable[[int], list[int]], settings: PrefillSettings
) -> Row:
    # Steps that prefill one request and decode another need a warm-up.
    warm_up = min(measurement.prompt_tokens, 2 * settings.chunk)
    generate([draw(warm_up) for _ in range(2)], 4)
    prompts = [draw(measurement.prompt_tokens) for _ in range(measurement.requests)]
    seconds, cached, read = _timed(generate, prompts, OUTPUT_TOKENS)
    _require_cached(measurement, max(cached), 0)
    answers = measurement.requests * OUTPUT_TOKENS
    total = answers + measurement.requests * measurement.prompt_tokens
    return {
        "output_tokens": OUTPUT_TOKENS,
        "seconds": [round(seconds, 4)],
        "seconds_median": round(seconds, 4),
        "output_tokens_per_second": round(answers / seconds, 2),
        "total_tokens_per_second": round(total / seconds, 1),
        **read_shares([read]),
    }


def read_shares(reads: Sequence[tuple[_Reads, _Reads]]) -> Row:
    """The columns of what prompts have read, by the counts before and after each; none with dense prefill."""
    shares = {}
    for name, column in _READS.items():
        amount, count = (
            sum(after.get(name, (0.0, 0))[part] - before.get(name, (0.0, 0))[part] for before, after in reads)
            for part in (0, 1)
        )
        if count:
            shares[column] = round(amount / count, 4)
    return shares


def _prefix(prompt: list[int]) -> int:
    return len(prompt) * 3 // 4


def _timed(generate: Generate, prompts: list[list[int]], tokens: int) -> tuple[float, list[int], tuple[_Reads, _Reads]]:
    """Seconds, cached tokens of each prompt, and the counts before and after."""
    before, begin = count_totals(), time.perf_counter()
    cached = generate(prompts, tokens)
    return time.perf_counter() - begin, cached, (before, count_totals())


def _require_cached(measurement: Measurement, cached: int, prefix: int) -> None:
    """Requires that most of a cached prefix is hit. Its last, incomplete block is not."""
    if measurement.kind == PREFIX_HIT:
        if not prefix // 2 < cached <= prefix:
            raise RuntimeError(f"{cached} of a prompt's tokens came from the prefix cache, not about {prefix}")
    elif cached:
        raise RuntimeError(f"{cached} tokens of a new prompt came from the prefix cache")


def prefill_variant(text: Annotated[str, typer.Argument(metavar="JSON")]) -> None:
    """Measure one variant in this process for `prefill`, and append a row for each measurement."""
    settings = PrefillSettings.model_validate_json(text)
    with open_variant(settings) as (model, file):
        _measure_variant(settings, model, file.write)


def _measure_variant(settings: PrefillSettings, model: Model, write: Callable[[Row], None]) -> None:
    begin = time.perf_counter()
    variant = Variant.parse(settings.variant)
    max_model_len = min(settings.longest + _ROOM, int(model.config["max_position_embeddings"]))
    with engine(
        model,
        variant,
        settings.additional_config,
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        max_num_seqs=max((load.requests for load in settings.loads), default=1),
        max_num_batched_tokens=settings.chunk,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        enable_prefix_caching=True,
        compilation_config=DECODE_GRAPHS,
    ) as (llm, backend):
        start_seconds = time.perf_counter() - begin
        generate = generator(llm)
        cache = llm.llm_engine.vllm_config.cache_config
        about = {
            **variant_columns(variant, backend, settings.additional_config, model),
            "chunk_tokens": settings.chunk,
            "block_size": cache.block_size,
            "kv_cache_tokens": (cache.num_gpu_blocks - 1) * cache.block_size,  # vLLM reserves one block
            "start_seconds": round(start_seconds, 1),
        }
        draw = fresh_prompts(model.vocabulary)
        for measurement in plan(settings, max_model_len):
            row = about | measurement.fields()
            spent = time.perf_counter() - begin
            if spent > settings.time_limit:
                write({**row, "skipped": "the time limit was reached"})
                continue
            row |= measure(measurement, generate, draw, settings)
            write(row)
            print(
                f"{variant.name}: {measurement.kind} of {measurement.requests} x "
                f"{size_text(measurement.context)} tokens: "
                f"{row['seconds_median']:.3f} s, {time.perf_counter() - begin:.0f} s since the start",
                flush=True,
            )


def prefill(
    output: Output,
    variant: Annotated[
        list[str] | None,
        typer.Option(help=f"BACKEND or BACKEND:KV_CACHE_DTYPE, repeatable. Default: {', '.join(VARIANTS)}."),
    ] = None,
    model: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)} (random weights), or a folder.")] = "llama-3.1-8b",
    grid: Annotated[
        list[str] | None,
        typer.Option(help=f"Contexts of the time to first token, repeatable. Default: {', '.join(GRID)}."),
    ] = None,
    load: Annotated[
        list[str] | None,
        typer.Option(
            help="CONTEXT=REQUESTS: prompts of a context asked at once, repeatable. Default: none.", show_default=False
        ),
    ] = None,
    prefix_hit: Annotated[
        bool, typer.Option("--prefix-hit", help="Also measure the longest context with 3/4 of it in the prefix cache.")
    ] = False,
    additional_config: Annotated[str | None, typer.Option(help="For the plugin's backends.", metavar="JSON")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measured prompts per context.")] = 2,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of an engine's step.")] = 8192,
    gpu_memory_utilization: Annotated[float, typer.Option(min=0.05, max=1, help="As for vLLM.")] = 0.9,
    time_limit: Annotated[
        float, typer.Option(min=1, help="Seconds per variant, its start included. No measurement begins later.")
    ] = 600,
    commit: Commit = None,
) -> None:
    """Measure time to first token and throughput of each variant; exit code 3 if one fails or does not finish."""
    variants = parse_variants(variant or VARIANTS)
    contexts, loads = parse_sizes("grid", grid or GRID), parse_loads(load or ())
    with open_model(model) as opened:
        all_settings = [
            PrefillSettings(
                model=model if opened.drawn_weights else str(opened.folder),
                variant=each.name,
                additional_config=each.additional_config(additional_config),
                contexts=contexts,
                prefix_hit=prefix_hit,
                loads=loads,
                repeats=repeats,
                chunk=chunk,
                gpu_memory_utilization=gpu_memory_utilization,
                time_limit=time_limit,
                output=str(output.absolute()),
            )
            for each in variants
        ]
        _check(all_settings[0], opened)
        about = describe_run(opened.folder, commit)
        measure_variants("prefill-variant", all_settings, about, output, lambda: time_limit + _GRACE, table)


def _check(settings: PrefillSettings, model: Model) -> None:
    """Raise ConfigurationError for bad input before an engine starts."""
    limit, least = int(model.config["max_position_embeddings"]), 2 * OUTPUT_TOKENS
    for option, contexts in (("grid", settings.contexts), ("load", tuple(load.context for load in settings.loads))):
        for context in contexts:
            if not least <= context <= limit:
                raise ConfigurationError(
                    f"{option}: got a context of {context} tokens, allowed: from {least} to the model's {limit}"
                )


def table(rows: list[Row]) -> Table:
    """Return one line for each measurement: seconds of each variant, and tokens per second of a load."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    lines = Table("measurement", "context", "requests", *variants, title="Prefill: seconds (tokens per second)")
    found: dict[tuple[str, int, int], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["measurement"], row["context_tokens"], row["requests"]), {})[row["variant"]] = row
    for (kind, context, requests), here in found.items():
        lines.add_row(kind, size_text(context), str(requests), *(_cell(here.get(variant, {})) for variant in variants))
    return lines


def _cell(row: dict[str, Any]) -> str:
    if "seconds_median" not in row:
        return "-"
    rate = f" ({row['total_tokens_per_second']:,.0f})" if "total_tokens_per_second" in row else ""
    return f"{row['seconds_median']:.3f}{rate}"
