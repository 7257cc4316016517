"""Time to first token of whole engines, with dense and with sparse prefill. `serve` measures several clients.

    python -m bench.serving prefill --variant flash_attn,unique_prefill --grid 32K,128K --output prefill.jsonl

Prefix caching is on, as in a server. Every prompt has a distinct first token, so nothing is shared except in the
measurement of prefix hits. A row is one of

- `first_token`: prompts of a context, one after the other, with one output token each, after one that is not counted.
- `prefix_hit`: the same with three quarters of each prompt in the prefix cache.

Weights are random unless the model is a folder. At a fixed density, the number of blocks that sparse prefill reads
depends only on the length of the prompt. A setting that depends on the text, such as `coverage`, must be measured with
a real model.

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
from typing import Annotated

import typer
from rich.table import Table

from bench.common.engine import DECODE_GRAPHS, Variant, engine, parse_variants
from bench.common.models import SHAPES, Model, open_model
from bench.common.options import Commit, Output, TimeLimit, parse_sizes, size_text
from bench.common.results import Row
from bench.serving.variants import VariantSettings, measure_variants, open_variant, variant_columns
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.metrics.live import BLOCK_READS, TOKEN_READS, count_totals
from vllm_sparse_plugin.tools.provenance import describe_run

VARIANTS = ("flash_attn", "unique", "unique_prefill")
GRID = ("8K", "32K", "64K", "128K")
_SHORTEST = 256
_ROOM = 256
"""Tokens of an engine beyond the longest context."""
FIRST_TOKEN, PREFIX_HIT = "first_token", "prefix_hit"
_READS = {each.name: each.name.removeprefix("vllm_sparse_") for each in (*BLOCK_READS, *TOKEN_READS)}
"""Columns by the names of metrics."""
_Reads = Mapping[str, tuple[float, int]]
"""A result of `count_totals`."""
Ask = Callable[[list[int]], int]
"""Generates a token for a prompt and returns the number of cached tokens."""


class PrefillSettings(VariantSettings):
    """The input of the process of one variant."""

    contexts: tuple[int, ...]
    prefix_hit: bool
    """Whether the longest context is also measured after a prefix hit."""
    chunk: int
    """Tokens of an engine's step."""


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
    times, found, reads, prefix = [], [], [], length * 3 // 4 if kind == PREFIX_HIT else 0
    for repeat in range(1 + repeats):
        prompt = draw(length)
        if prefix:
            ask(prompt[:prefix])
        before, begin = count_totals(), time.perf_counter()
        cached = ask(prompt)
        seconds, read = time.perf_counter() - begin, (before, count_totals())
        # The last, incomplete block of a prefix is not hit.
        if not prefix // 2 <= cached <= prefix:
            raise RuntimeError(f"{cached} of a prompt's tokens came from the prefix cache, not about {prefix}")
        if repeat:
            times.append(seconds)
            found.append(cached)
            reads.append(read)
    return {
        "cached_tokens": min(found),
        "seconds": [round(seconds, 4) for seconds in times],
        "seconds_median": round(statistics.median(times), 4),
        **read_shares(reads),
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


def prefill_variant(text: Annotated[str, typer.Argument(metavar="JSON")]) -> None:
    """Measure one variant in this process for `prefill`, and append a row for each measurement."""
    settings = PrefillSettings.model_validate_json(text)
    with open_variant(settings) as (model, file):
        for row in _measure_variant(settings, model):
            file.write(row)
            about = f"{settings.variant}: {row['measurement']}, {size_text(row['context_tokens'])}"
            print(f"{about}: {row['seconds_median']:.3f} s", flush=True)


def _measure_variant(settings: PrefillSettings, model: Model) -> Iterator[Row]:
    """Yields a row for each measurement, short contexts first."""
    from vllm import SamplingParams, TokensPrompt

    begin, variant = time.perf_counter(), Variant.parse(settings.variant)
    max_model_len = min(max(settings.contexts) + _ROOM, int(model.config["max_position_embeddings"]))
    with engine(
        model,
        variant,
        settings.additional_config,
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        max_num_seqs=1,
        max_num_batched_tokens=settings.chunk,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        enable_prefix_caching=True,
        compilation_config=DECODE_GRAPHS,
    ) as (llm, backend):
        cache = llm.llm_engine.vllm_config.cache_config
        about = {
            **variant_columns(variant, backend, settings.additional_config, model),
            "chunk_tokens": settings.chunk,
            "block_size": cache.block_size,
            "kv_cache_tokens": (cache.num_gpu_blocks - 1) * cache.block_size,  # vLLM reserves one block
            "start_seconds": round(time.perf_counter() - begin, 1),
            "requests": 1,
        }
        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

        def ask(prompt: list[int]) -> int:
            (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
            return output.num_cached_tokens or 0

        draw, contexts = fresh_prompts(model.vocabulary), sorted(settings.contexts)
        kinds = [(FIRST_TOKEN, context) for context in contexts]
        for kind, context in [*kinds, *((PREFIX_HIT, each) for each in contexts[-1:] if settings.prefix_hit)]:
            length = min(context, max_model_len - 1)
            row = {"measurement": kind, "context_tokens": context, "prompt_tokens": length}
            yield about | row | measure(kind, length, ask, draw, settings.repeats)


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
    prefix_hit: Annotated[
        bool, typer.Option("--prefix-hit", help="Also measure the longest context with 3/4 of it in the prefix cache.")
    ] = False,
    additional_config: Annotated[str | None, typer.Option(help="For the plugin's backends.", metavar="JSON")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measured prompts per context.")] = 2,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of an engine's step.")] = 8192,
    gpu_memory_utilization: Annotated[float | None, typer.Option(min=0.05, max=1, help="As for vLLM.")] = None,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Measure time to first token of each variant; exit code 3 if one fails or does not finish."""
    end, contexts = time.monotonic() + time_limit, parse_sizes("grid", grid or GRID)
    with open_model(model) as opened:
        limit = int(opened.config["max_position_embeddings"])
        for context in contexts:
            if not _SHORTEST <= context <= limit:
                raise ConfigurationError(
                    f"grid: got a context of {context} tokens, allowed: from {_SHORTEST} to the model's {limit}"
                )
        all_settings = [
            PrefillSettings(
                model=model if opened.drawn_weights else str(opened.folder),
                variant=each.name,
                additional_config=each.additional_config(additional_config),
                contexts=contexts,
                prefix_hit=prefix_hit,
                repeats=repeats,
                chunk=chunk,
                gpu_memory_utilization=gpu_memory_utilization,
                output=str(output.absolute()),
            )
            for each in parse_variants(variant or VARIANTS)
        ]
        about = describe_run(opened.folder, commit)
        measure_variants("prefill-variant", all_settings, about, output, lambda: end - time.monotonic(), table)


def table(rows: list[Row]) -> Table:
    """Return one line for each measurement, with the seconds of each variant."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    lines = Table("measurement", "context", *variants, title="Prefill: seconds")
    found = {(row["measurement"], row["context_tokens"], row["variant"]): row["seconds_median"] for row in rows}
    for kind, context in dict.fromkeys((row["measurement"], row["context_tokens"]) for row in rows):
        times = [found.get((kind, context, variant)) for variant in variants]
        lines.add_row(kind, size_text(context), *("-" if each is None else f"{each:.3f}" for each in times))
    return lines
