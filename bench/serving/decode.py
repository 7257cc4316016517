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
from functools import partial
from typing import Annotated

import typer

from bench.common import options
from bench.common.console import print_beside
from bench.common.engine import DECODE_GRAPHS, Variant, engine, force_routing, parse_variants
from bench.common.host_reads import host_reads, host_share
from bench.common.models import Model, open_model
from bench.common.results import Row
from bench.serving.batches import Batch, Loads, Prompt, Runner, check_batches, draw_text, make_prompts, parse_batches
from bench.serving.variants import VariantSettings, measure_variants, per_token, shared_settings, variant_columns
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import parse_additional_config

VARIANTS = ["flash_attn", "unique"]
LOADS = ["1x2K", "24x2K", "128x4K", "64x8K", "16x32K", "24x32K", "1x128K", "4x128K", "5x128K", "6x128K"]
MIXED = ("16x32K", "16x32K+1x128K", "16x32K+1x128K:dense")
_WARM_UP = 16
"""Tokens of the first, unmeasured generation."""


class DecodeSettings(VariantSettings):
    """The input of the process of one variant."""

    loads: tuple[Batch, ...]
    new_tokens: int
    compile: bool
    """Whether torch.compile and all graphs are on, as in a server."""

    def measure(self, model: Model) -> Iterator[Row]:
        """Yields a row for each load, in an order in which prompts are found in the cache: the longest first."""
        variant, begin = Variant.parse(self.variant), time.perf_counter()
        arguments = {
            "skip_tokenizer_init": True, "max_model_len": max(each.longest for each in self.loads),
            "enable_prefix_caching": True, "compilation_config": None if self.compile else DECODE_GRAPHS,
        }  # fmt: skip
        with engine(model, variant, self.additional_config, **(arguments | self.engine_args)) as (llm, backend):
            config = llm.llm_engine.vllm_config
            runner = Runner(llm, variant.sparse)
            about = {
                **variant_columns(variant, backend, self.additional_config, model),
                "block_size": runner.block_size,
                "kv_cache_tokens": runner.room,
                "max_model_len": config.model_config.max_model_len,
                "max_num_seqs": config.scheduler_config.max_num_seqs,
                "compile_mode": int(config.compilation_config.mode or 0),
                "cuda_graphs": getattr(config.compilation_config.cudagraph_mode, "name", None),
                "start_seconds": round(time.perf_counter() - begin, 1),
            }
            text = draw_text(model, self.loads)
            found: dict[tuple[int, ...], Row] = {}
            for batch in sorted(self.loads, key=lambda each: (-each.longest, -each.tokens)):
                about |= {
                    "load": batch.name, "context_tokens": batch.longest, "batch": batch.count,
                    "kv_gib": round(batch.tokens * model.kv_bytes_per_token(variant.kv_cache_dtype) / 2**30, 3),
                }  # fmt: skip
                if not runner.fits(batch):
                    yield {**about, "skipped": f"the KV cache holds {runner.room} tokens"}
                    continue
                plain = tuple(batch.contexts)
                # Arguments of requests change nothing in a backend of vLLM.
                if variant.sparse or plain not in found:
                    prompts = make_prompts(batch, *text, self.new_tokens)
                    try:
                        found[plain] = measure_batch(runner, batch, prompts, self)
                    except RuntimeError as error:
                        yield {**about, "skipped": str(error)}
                        continue
                yield {**about, **found[plain]}


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


def decode(
    output: options.Output,
    variant: options.Variants = VARIANTS,
    model: options.ModelName = "llama-3.1-8b",
    load: Loads = LOADS,
    mixed: Annotated[bool, typer.Option("--mixed", help=f"Measure also {', '.join(MIXED)}.")] = False,
    additional_config: options.AdditionalConfig = None,
    skip_ratio: Annotated[
        float | None,
        typer.Option(help="Share of the KV groups that routing skips in the plugin's backends, for any data."),
    ] = None,
    new_tokens: options.NewTokens = 512,
    repeats: options.Repeats = 3,
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="Start without torch.compile, with decode graphs only.")
    ] = False,
    engine_args: options.EngineArgs = "{}",
    time_limit: options.TimeLimit = 3600,
    commit: options.Commit = None,
) -> None:
    """Measure decode time per token of each variant; exit code 3 if one fails or does not finish in time."""
    end = time.monotonic() + time_limit
    loads, arguments = (
        parse_batches([*load, *(MIXED if mixed else ())]),
        parse_additional_config(engine_args, "engine_args"),
    )
    variants = parse_variants(variant)
    with open_model(model) as opened:
        check_batches(loads, new_tokens, arguments.get("max_model_len") or opened.longest)
        most, allowed = max(batch.count for batch in loads), arguments.get("max_num_seqs")
        if allowed is not None and most > allowed:
            raise ConfigurationError(f"load: got {most} requests, allowed: at most max_num_seqs = {allowed}")
        if skip_ratio is not None:
            additional_config = force_routing(opened, additional_config, skip_ratio)
        all_settings = [
            DecodeSettings(
                **shared_settings(each, opened, additional_config), engine_args=arguments, repeats=repeats,
                loads=loads, new_tokens=new_tokens, compile=not no_compile,
            )
            for each in variants
        ]  # fmt: skip
        form = "{ms_per_token:.2f} ({ms_per_token_min:.2f} to {ms_per_token_max:.2f})"
        show = partial(print_beside, lines=["load"], column="variant", value="ms_per_token", form=form)
        measure_variants(all_settings, opened, commit, output, end, show)
