"""Decode time per token of batches with different requests, by load, server and variant.

    python -m bench.serving loads --variant flash_attn --variant unique --output loads.jsonl

The KV cache is filled with noise, so no prompt is computed. 1 token and 1 + n tokens are generated, and the difference
is divided by n: median over repeats. An engine is started for each variant and each `max_model_len`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict
from rich.table import Table

from bench.common.engine import DECODE_GRAPHS, Variant, engine, parse_variants
from bench.common.models import SHAPES, open_model
from bench.common.options import Commit, Output, TimeLimit, parse_size, parse_sizes, size_text, split_values
from bench.common.results import Row
from bench.serving.decode import NOISE, draw_prompts, fill_records
from bench.serving.variants import (
    BackendSettings,
    measure_variants,
    open_variant,
    time_tokens,
    variant_columns,
)
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.requests.arguments import BUDGET, COVERAGE, DENSE
from vllm_sparse_plugin.tools.provenance import describe_run

DEFAULT_LOADS = (
    "1x2K", "8x4K", "24x2K", "64x2K", "128x1K", "256x200", "16x32K", "16x32K+1x128K", "16x32K+1x128K:dense",
    "16x32K+1x16K:dense", "48x2K+2x128K",
)  # fmt: skip
_ALLOWED = "COUNTxCONTEXT, with :dense, :budget=TOKENS or :coverage=SHARE, joined by +"


class Requests(BaseModel):
    """Equal requests of a load."""

    model_config = ConfigDict(frozen=True)

    count: int
    context: int
    arguments: dict[str, Any] = {}
    """Arguments for a sparse backend."""


class Load(BaseModel):
    """Requests that decode at the same time."""

    model_config = ConfigDict(frozen=True)

    name: str
    parts: tuple[Requests, ...]

    @property
    def count(self) -> int:
        """Requests of the load."""
        return sum(part.count for part in self.parts)

    @property
    def longest(self) -> int:
        """Tokens of its longest context."""
        return max(part.context for part in self.parts)

    @property
    def tokens(self) -> int:
        """Tokens of all contexts."""
        return sum(part.count * part.context for part in self.parts)


def parse_mixed_loads(texts: Iterable[str]) -> tuple[Load, ...]:
    """Parse loads such as `16x32K+1x128K:dense`, without duplicates.

    Raises:
        ConfigurationError: for anything else.
    """
    return tuple(_parse_load(text) for text in dict.fromkeys(split_values(texts)))


def _parse_load(text: str) -> Load:
    parts = []
    for part in text.split("+"):
        shape, _, argument = part.partition(":")
        count, _, context = shape.partition("x")
        name, _, value = argument.partition("=")
        try:
            arguments: dict[str, Any] = {}
            if argument == "dense":
                arguments = {DENSE: "dense"}
            elif name == "budget":
                arguments = {BUDGET: parse_size(value)}
            elif name == "coverage":
                arguments = {COVERAGE: float(value)}
            elif argument:
                raise ValueError(f"{argument!r} is not an argument")
            parts.append(Requests(count=parse_size(count), context=parse_size(context), arguments=arguments))
        except ValueError:
            raise ConfigurationError(f"load: got {text!r}, allowed: {_ALLOWED}") from None
    return Load(name=text, parts=tuple(parts))


class LoadSettings(BackendSettings):
    """The input of the process of one engine."""

    loads: tuple[Load, ...]
    max_model_len: int
    new_tokens: int
    max_num_seqs: int


def loads_variant(text: Annotated[str, typer.Argument(metavar="JSON")]) -> None:
    """Measure one engine in this process for `loads`, and append a row for each load."""
    from vllm import SamplingParams, TokensPrompt

    settings = LoadSettings.model_validate_json(text)
    # Contexts may exceed the model's training length: contents are noise.
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    variant = Variant.parse(settings.variant)
    with (
        open_variant(settings) as (model, file),
        engine(
            model,
            variant,
            settings.additional_config,
            skip_tokenizer_init=True,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            enable_prefix_caching=True,
            kv_transfer_config=NOISE,
            compilation_config=DECODE_GRAPHS,
        ) as (llm, backend),
    ):
        cache = llm.llm_engine.vllm_config.cache_config
        room = (cache.num_gpu_blocks - 1) * cache.block_size

        def generate(load: Load, tokens: int) -> float:
            prompts: list[TokensPrompt] = []
            sampling: list[SamplingParams] = []
            for part in load.parts:
                length = part.context - settings.new_tokens - 1
                for _ in range(part.count):
                    tail = drawn[len(prompts)]
                    prompts.append(TokensPrompt(prompt_token_ids=(tail * -(-length // len(tail)))[:length]))
                    sampling.append(
                        SamplingParams(
                            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False,
                            extra_args=dict(part.arguments) if variant.sparse else None,
                        )
                    )  # fmt: skip
            begin = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            return time.perf_counter() - begin

        drawn = draw_prompts(max(load.count for load in settings.loads), 1024, model.vocabulary)
        fill_records(llm, drawn[0])
        for load in settings.loads:
            about = {
                **variant_columns(variant, backend, settings.additional_config, model),
                "load": load.name,
                "batch": load.count,
                "max_model_len": settings.max_model_len,
                "kv_cache_tokens": room,
            }
            if load.tokens + load.count * cache.block_size > room:
                file.write({**about, "skipped": f"the KV cache holds {room} tokens"})
                continue
            measured = time_tokens(partial(generate, load), settings.new_tokens, settings.repeats)
            found = {**about, **measured}
            file.write(found)
            print(f"{variant.name}, {size_text(settings.max_model_len)}: {load.name}: {found['ms_per_token']:.2f} ms")


def loads(
    output: Output,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="BACKEND or BACKEND:KV_CACHE_DTYPE, repeatable. Default: flash_attn and unique."),
    ] = None,
    model: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)} (random weights), or a folder.")] = "llama-3.1-8b",
    load: Annotated[
        list[str] | None, typer.Option(help=f"{_ALLOWED}, repeatable. Default: {', '.join(DEFAULT_LOADS)}.")
    ] = None,
    max_model_len: Annotated[
        list[str] | None, typer.Option(help="Context limit of an engine, repeatable. Default: 136K.")
    ] = None,
    additional_config: Annotated[str | None, typer.Option(help="For the plugin's backends.", metavar="JSON")] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per measured time.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each measurement.")] = 5,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Largest batch of the engine.")] = 256,
    gpu_memory_utilization: Annotated[float, typer.Option(min=0.05, max=1, help="As for vLLM.")] = 0.92,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Measure decode time per token of batches of different requests; exit code 3 if an engine fails or is late."""
    end = time.monotonic() + time_limit
    wanted = parse_mixed_loads(load or DEFAULT_LOADS)
    lengths = parse_sizes("max_model_len", max_model_len or ["136K"])
    for each in wanted:
        if each.count > max_num_seqs:
            raise ConfigurationError(f"load: got {each.count} requests, allowed: at most max_num_seqs = {max_num_seqs}")
        least = min(part.context for part in each.parts)
        if least < new_tokens + 64 or each.longest > min(lengths):
            raise ConfigurationError(
                f"load: got {each.name}, allowed: contexts from new_tokens + 64 = {new_tokens + 64} to the least "
                f"max_model_len, {min(lengths)}"
            )
    with open_model(model) as opened:
        all_settings = [
            LoadSettings(
                model=model if opened.drawn_weights else str(opened.folder),
                variant=each.name,
                additional_config=each.additional_config(additional_config),
                loads=wanted,
                max_model_len=length,
                new_tokens=new_tokens,
                repeats=repeats,
                max_num_seqs=max_num_seqs,
                gpu_memory_utilization=gpu_memory_utilization,
                output=str(output.absolute()),
            )
            for length in lengths
            for each in parse_variants(variant or ("flash_attn", "unique"))
        ]
        about = describe_run(opened.folder, commit)
        measure_variants("loads-variant", all_settings, about, output, lambda: end - time.monotonic(), table)


def table(rows: list[Row]) -> Table:
    """Return one line for each load and server, one column for each variant, and the ratio to the first variant."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    times = {(row["max_model_len"], row["load"], row["variant"]): row.get("ms_per_token") for row in rows}
    lines = Table("max_model_len", "load", *variants, "worst ratio", title="Decode: ms per token")
    for length, load in dict.fromkeys(key[:2] for key in times):
        found = [times.get((length, load, variant)) for variant in variants]
        known = [ms for ms in found[1:] if ms is not None]
        ratio = f"{max(known) / found[0]:.2f}" if found[0] and known else "-"
        lines.add_row(size_text(length), load, *("-" if ms is None else f"{ms:.2f}" for ms in found), ratio)
    return lines
