"""Time to first token of whole engines, with dense and with sparse prefill. `serve` measures several clients.

    python -m bench.serving prefill --variant flash_attn,unique_prefill --grid 32K,128K --output prefill.jsonl

Prefix caching is on, as in a server. Every prompt has a distinct first token, so nothing is shared except in the
measurement of prefix hits. A row is one of

- `first_token`: prompts of a context, one after the other, with one output token each, after one that is not counted.
- `prefix_hit`: the same with three quarters of each prompt in the prefix cache.

Weights are random unless the model is a folder. At a fixed density, the number of blocks that sparse prefill reads
depends only on the length of the prompt. A setting that depends on the text, such as `coverage`, must be measured with
a real model.

A `chunk` of the longest context prefills each prompt in one piece.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated

import typer

from bench.common import options
from bench.common.console import print_beside
from bench.common.engine import DECODE_GRAPHS, Variant, engine, parse_variants
from bench.common.models import Model, open_model
from bench.common.results import Row
from bench.serving.variants import VariantSettings, measure_variants, shared_settings, variant_columns
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import parse_additional_config

VARIANTS = ["flash_attn", "unique", "unique_prefill"]
GRID = ["8K", "32K", "64K", "128K"]
_SHORTEST = 256
_ROOM = 256
"""Tokens of an engine beyond the longest context."""
FIRST_TOKEN, PREFIX_HIT = "first_token", "prefix_hit"
Ask = Callable[[list[int]], int]
"""Generates a token for a prompt and returns the number of cached tokens."""


class PrefillSettings(VariantSettings):
    """The input of the process of one variant."""

    contexts: tuple[int, ...]
    prefix_hit: bool
    """Whether the longest context is also measured after a prefix hit."""
    chunk: int
    """Tokens of an engine's step."""

    def measure(self, model: Model) -> Iterator[Row]:
        """Yields a row for each measurement, short contexts first."""
        from vllm import SamplingParams, TokensPrompt

        begin, variant, contexts = time.perf_counter(), Variant.parse(self.variant), sorted(self.contexts)
        max_model_len = min(contexts[-1] + _ROOM, model.longest)
        arguments = {
            "skip_tokenizer_init": True, "max_model_len": max_model_len, "max_num_seqs": 1,
            "max_num_batched_tokens": self.chunk, "enable_prefix_caching": True, "compilation_config": DECODE_GRAPHS,
        }  # fmt: skip
        with engine(model, variant, self.additional_config, **(arguments | self.engine_args)) as (llm, backend):
            cache = llm.llm_engine.vllm_config.cache_config
            about = {
                **variant_columns(variant, backend, self.additional_config, model),
                "chunk_tokens": self.chunk,
                "block_size": cache.block_size,
                "kv_cache_tokens": ((cache.num_gpu_blocks or 1) - 1) * cache.block_size,  # vLLM reserves one block
                "start_seconds": round(time.perf_counter() - begin, 1),
                "requests": 1,
            }
            sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

            def ask(prompt: list[int]) -> int:
                (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
                return output.num_cached_tokens or 0

            draw = fresh_prompts(model.vocabulary)
            kinds = [(FIRST_TOKEN, context) for context in contexts]
            for kind, context in kinds + [(PREFIX_HIT, contexts[-1])] * self.prefix_hit:
                length = min(context, max_model_len - 1)
                row = {"measurement": kind, "context_tokens": context, "prompt_tokens": length}
                yield about | row | measure(kind, length, ask, draw, self.repeats)


def fresh_prompts(vocabulary: int) -> Callable[[int], list[int]]:
    """Return a function that draws prompts of a given length with distinct first tokens."""
    firsts: Iterator[int] = iter(range(3, vocabulary))

    def draw(length: int) -> list[int]:
        first = next(firsts)
        return [first, *random.Random(first).choices(range(3, vocabulary), k=length - 1)]

    return draw


def measure(kind: str, length: int, ask: Ask, draw: Callable[[int], list[int]], repeats: int) -> Row:
    """Return the columns of prompts of a length; the first one does not count.

    Raises:
        RuntimeError: if a prompt has unexpected cached tokens, or too few of them.
    """
    times, found, prefix = [], [], length * 3 // 4 if kind == PREFIX_HIT else 0
    for repeat in range(1 + repeats):
        prompt = draw(length)
        if prefix:
            ask(prompt[:prefix])
        begin = time.perf_counter()
        cached = ask(prompt)
        seconds = time.perf_counter() - begin
        # The last, incomplete block of a prefix is not hit.
        if not prefix // 2 <= cached <= prefix:
            raise RuntimeError(f"{cached} of a prompt's tokens came from the prefix cache, not about {prefix}")
        if repeat:
            times.append(seconds)
            found.append(cached)
    return {
        "cached_tokens": min(found),
        "seconds": [round(seconds, 4) for seconds in times],
        "seconds_median": round(statistics.median(times), 4),
    }


def prefill(
    output: options.Output,
    variant: options.Variants = VARIANTS,
    model: options.ModelName = "llama-3.1-8b",
    grid: Annotated[list[str], typer.Option(help="Contexts of the time to first token, repeatable.")] = GRID,
    prefix_hit: Annotated[
        bool, typer.Option("--prefix-hit", help="Also measure the longest context with 3/4 of it in the prefix cache.")
    ] = False,
    additional_config: options.AdditionalConfig = None,
    repeats: options.Repeats = 2,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of an engine's step.")] = 8192,
    engine_args: options.EngineArgs = "{}",
    time_limit: options.TimeLimit = 3600,
    commit: options.Commit = None,
) -> None:
    """Measure time to first token of each variant; exit code 3 if one fails or does not finish."""
    end, contexts = time.monotonic() + time_limit, options.parse_sizes("grid", grid)
    arguments = parse_additional_config(engine_args, "engine_args")
    with open_model(model) as opened:
        for context in contexts:
            if not _SHORTEST <= context <= opened.longest:
                allowed = f"from {_SHORTEST} to the model's {opened.longest}"
                raise ConfigurationError(f"grid: got a context of {context} tokens, allowed: {allowed}")
        all_settings = [
            PrefillSettings(
                **shared_settings(each, opened, additional_config), engine_args=arguments, repeats=repeats,
                contexts=contexts, prefix_hit=prefix_hit, chunk=chunk,
            )
            for each in parse_variants(variant)
        ]  # fmt: skip
        lines, value = ["measurement", "context_tokens"], "seconds_median"
        show = partial(print_beside, lines=lines, column="variant", value=value, form="{seconds_median:.3f}")
        measure_variants(all_settings, opened, commit, output, end, show)
