"""The cost of compaction: for a prompt's prefill, and for requests that decode at the same time.

    python -m bench.serving compaction --variant dense,snapkv,pyramidkv,h2o --context 32K --output compaction.jsonl

Requests with short prompts, which keep everything, decode all the time. Prompts of one context follow each other and
decode a few tokens at the same time. The gaps between tokens of the decoding requests give the time of each step.
The first steps after the prompt, one of which moves its tokens, are compared with later steps. The cost of observing
the queries of a prompt is the difference of the times to first token of two variants.

One process per variant, one after the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from bench.common.engine import DECODE_GRAPHS, Variant, engine, parse_variants
from bench.common.models import SHAPES, Model, open_model
from bench.common.options import Commit, Output, TimeLimit, parse_sizes, size_text
from bench.common.results import Row
from bench.serving.prefill import fresh_prompts
from bench.serving.variants import VariantSettings, measure_variants, open_variant, variant_columns
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.provenance import describe_run

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

VARIANTS = ("dense", "snapkv", "pyramidkv", "h2o", "streaming_llm")
_FIRST = 4
"""Steps after a prompt that are compared with later steps. The engine decides which of them moves the tokens."""
_LATER = 24
_SHORT = 128
"""Tokens of the short prompts."""


class CompactionSettings(VariantSettings):
    """The input of the process of one variant."""

    contexts: tuple[int, ...]
    running: int
    """Requests that decode at the same time."""
    chunk: int
    """Tokens of an engine's step."""

    @property
    def answer_tokens(self) -> int:
        """Tokens that are decoded after a prompt."""
        return 1 + _FIRST + _LATER

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        # The short requests decode until all prompts are done. Each prompt takes a step per chunk.
        steps = sum((1 + self.repeats) * (-(-size // self.chunk) + self.answer_tokens + 8) for size in self.contexts)
        return max(max(self.contexts) + self.answer_tokens, _SHORT + 64 + 2 * steps)


@dataclass
class Timed:
    """Arrival times of tokens, in seconds."""

    asked: float
    prompt: list[float] = field(default_factory=list)
    """Tokens of the request with the long prompt."""
    beside: list[float] = field(default_factory=list)
    """Tokens of a request that decodes at the same time."""


def columns(timed: Sequence[Timed]) -> Row:
    """The columns of a row, from consecutive prompts of one context.

    The prefill is the time to first token. The compaction is the extra time of the first steps after it over as many
    later steps. The pause of decoding requests is the extra time of the longest of them.
    """
    prefill, step, extra, pause = [], [], [], []
    for each in timed:
        first = each.prompt[0]
        times = [first, *(when for when in each.beside if when > first)]
        gaps = [after - before for before, after in pairwise(times)]
        later = statistics.median(gaps[_FIRST : _FIRST + _LATER])
        prefill.append(first - each.asked)
        step.append(later)
        extra.append(sum(gaps[:_FIRST]) - _FIRST * later)
        pause.append(max(gaps[:_FIRST]) - later)
    median = {
        "prefill_seconds": statistics.median(prefill),
        "step_ms": 1e3 * statistics.median(step),
        "compaction_ms": 1e3 * statistics.median(extra),
        "pause_ms": 1e3 * statistics.median(pause),
    }
    return {
        **{name: round(value, 4) for name, value in median.items()},
        "share_of_prefill": round(statistics.median(extra) / statistics.median(prefill), 5),
        "pause_in_steps": round(statistics.median(pause) / statistics.median(step), 3),
    }


def compaction_variant(text: Annotated[str, typer.Argument(metavar="JSON")]) -> None:
    """Measure one variant in this process for `compaction`, and append a row for each context."""
    settings = CompactionSettings.model_validate_json(text)
    with open_variant(settings) as (model, file):
        for row in _measure_variant(settings, model):
            file.write(row)
            print(
                f"{row['variant']}: {size_text(row['context_tokens'])} tokens: prefill {row['prefill_seconds']:.3f} s, "
                f"a step {row['step_ms']:.2f} ms, compaction {row['compaction_ms']:.2f} ms",
                flush=True,
            )


def _measure_variant(settings: CompactionSettings, model: Model) -> Iterator[Row]:
    """Yields a row for each context."""
    variant = Variant.parse(settings.variant)
    with engine(
        model,
        variant,
        settings.additional_config,
        skip_tokenizer_init=True,
        max_model_len=min(settings.longest + 64, int(model.config["max_position_embeddings"])),
        max_num_seqs=settings.running + 1,
        max_num_batched_tokens=settings.chunk,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        compilation_config=DECODE_GRAPHS,
    ) as (llm, backend):
        about = variant_columns(variant, backend, settings.additional_config, model)
        yield from (about | row for row in _measure_contexts(llm.llm_engine, settings, model))


def _measure_contexts(steps: LLMEngine, settings: CompactionSettings, model: Model) -> Iterator[Row]:
    """Yields the columns of each context, measured by one engine."""
    from vllm import SamplingParams, TokensPrompt

    draw = fresh_prompts(model.vocabulary)

    def add(name: str, length: int, tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        steps.add_request(name, TokensPrompt(prompt_token_ids=draw(length)), sampling)

    def step() -> tuple[dict[str, Any], float]:
        outputs: Any = steps.step()
        return {output.request_id: output for output in outputs}, time.perf_counter()

    beside = [f"beside-{number}" for number in range(settings.running)]
    for name in beside:
        add(name, _SHORT, settings.longest - _SHORT)
    waiting = set(beside)
    while waiting:
        waiting -= step()[0].keys()
    for context in settings.contexts:
        timed = []
        for repeat in range(1 + settings.repeats):
            found, name = Timed(time.perf_counter()), f"prompt-{context}-{repeat}"
            add(name, context, settings.answer_tokens)
            done = False
            while not done:
                outputs, now = step()
                if name in outputs:
                    found.prompt.append(now)
                    done = outputs[name].finished
                if beside[0] in outputs:
                    found.beside.append(now)
            timed.append(found)
        # The first prompt compiles kernels.
        yield {
            "context_tokens": context,
            "running": settings.running,
            "chunk_tokens": settings.chunk,
            "repeats": settings.repeats,
            **columns(timed[1:]),
            "first_time": columns(timed[:1]),
        }
    steps.abort_request(beside)


def compaction(
    output: Output,
    variant: Annotated[
        list[str] | None,
        typer.Option(help=f"BACKEND or BACKEND:KV_CACHE_DTYPE, repeatable. Default: {', '.join(VARIANTS)}."),
    ] = None,
    model: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)} (random weights), or a folder.")] = "llama-3.1-8b",
    context: Annotated[list[str] | None, typer.Option(help="Tokens of a prompt, repeatable. Default: 32K.")] = None,
    running: Annotated[int, typer.Option(min=1, help="Requests that decode at the same time.")] = 8,
    additional_config: Annotated[str | None, typer.Option(help="For the plugin's backends.", metavar="JSON")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each context that count.")] = 5,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of an engine's step.")] = 8192,
    gpu_memory_utilization: Annotated[float, typer.Option(min=0.05, max=1, help="As for vLLM.")] = 0.9,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Measure the compaction of prompts next to decoding requests; exit code 3 if a variant fails."""
    end = time.monotonic() + time_limit
    variants, contexts = parse_variants(variant or VARIANTS), parse_sizes("context", context or ["32K"])
    with open_model(model) as opened:
        all_settings = [
            CompactionSettings(
                model=model if opened.drawn_weights else str(opened.folder),
                variant=each.name,
                additional_config=each.additional_config(additional_config),
                contexts=contexts,
                running=running,
                repeats=repeats,
                chunk=chunk,
                gpu_memory_utilization=gpu_memory_utilization,
                output=str(output.absolute()),
            )
            for each in variants
        ]
        limit = int(opened.config["max_position_embeddings"]) - 64
        if all_settings[0].longest > limit:
            raise ConfigurationError(
                f"context: got {size_text(max(contexts))}, allowed with {repeats} repeats: what takes at most {limit} "
                "tokens of a request, of those that decode meanwhile as well"
            )
        about = describe_run(opened.folder, commit)
        measure_variants("compaction-variant", all_settings, about, output, lambda: end - time.monotonic(), table)


def table(rows: list[Row]) -> Table:
    """Return one line for each context and variant."""
    lines = Table("context", "variant", title="Compaction")
    for heading in ("prefill s", "step ms", "compaction ms", "% of prefill", "pause, steps"):
        lines.add_column(heading, justify="right")
    for row in sorted(rows, key=lambda row: row["context_tokens"]):
        lines.add_row(
            size_text(row["context_tokens"]), row["variant"], f"{row['prefill_seconds']:.3f}", f"{row['step_ms']:.2f}",
            f"{row['compaction_ms']:.2f}", f"{100 * row['share_of_prefill']:.2f}", f"{row['pause_in_steps']:.2f}",
        )  # fmt: skip
    return lines
