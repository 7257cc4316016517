"""Time per emitted token in lossless mode and in dense decoding, at a given acceptance of drafts.

    python -m bench.serving lossless --acceptance 0.9,0.95,0.97 --output lossless.jsonl

Drafts of random weights are never right. vLLM therefore accepts each draft with a given probability, in the synthetic
mode of its rejection sampler. The time is that of an engine whose drafts are right this often. The KV cache is filled
with noise, which takes no time. Requests decode in the same steps. After all have begun, whole steps are
timed, and the time is divided by the emitted tokens per request. One process for dense decoding and for each length of
drafts, one after the other.
"""

from __future__ import annotations

import json
import random
import time
from itertools import count, product
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from bench.common.engine import DECODE_GRAPHS, Variant, engine
from bench.common.models import SHAPES, Model, open_model
from bench.common.options import Commit, GridRow, Output, TimeLimit, parse_grid, parse_sizes, split_values
from bench.common.results import ResultFile, Row
from bench.serving.variants import (
    EngineSettings,
    check_batches,
    measure_variants,
    open_variant,
    per_token,
)
from vllm_sparse_plugin.config import KEY
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.provenance import describe_run

NOISE = {
    "kv_connector": "DecodeBenchConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"startup_fill": True, "fill_mean": 0.0, "fill_std": 1.0},
}
"""Fills the KV cache of an engine with noise, for vLLM's `--kv-transfer-config`."""
DEFAULT_GRID = ("32K=24", "128K=1,6")
DEFAULT_ACCEPTANCE = ("0.9,0.95,0.97",)
DraftLength = Literal["fixed", "adaptive"]
_DENSE = "flash_attn"
_BY_MODEL = "model"
"""Value of `--acceptance`: drafts are accepted by the model. It is the only value on a CPU."""
_SETTLED = 2
"""Steps in which every request has decoded before timing begins."""
_LEARNED = 32
"""The same with adaptive draft lengths, which depend on earlier steps."""


class LosslessSettings(EngineSettings):
    """The input of the process of one draft length."""

    backend: str
    """The sparse backend, or the dense one."""
    draft_tokens: int | None
    """None for dense decoding."""
    most_draft_tokens: int
    """Of all engines of the run."""
    draft_length: DraftLength
    min_context_tokens: int
    """Shortest context with drafts."""
    score_every: int
    """Steps of a draft that read pages of one choice."""
    budget_tokens: int
    acceptance: tuple[float | None, ...]
    """Probabilities of accepting a draft; None for the model's decision."""
    grid: tuple[GridRow, ...]
    new_tokens: int
    max_num_seqs: int
    block_size: int | None

    @property
    def variant(self) -> str:
        """The name in sentences and tables."""
        if self.draft_tokens is None:
            return self.backend
        name = f"lossless, {'' if self.draft_length == 'fixed' else 'up to '}{self.draft_tokens} drafts"
        return name if self.score_every == 1 else f"{name}, scored every {self.score_every}"

    @property
    def additional_config(self) -> str | None:
        """The JSON for vLLM's `--additional-config`."""
        if self.draft_tokens is None:
            return None
        lossless = {
            "draft_tokens": self.draft_tokens,
            "draft_length": self.draft_length,
            "min_context_tokens": self.min_context_tokens,
            "score_every": self.score_every,
        }
        return json.dumps({KEY: {"selection": {"budget_tokens": self.budget_tokens}, "lossless": lossless}})

    @property
    def settled(self) -> int:
        """Steps before timing begins."""
        return _SETTLED if self.draft_length == "fixed" else _LEARNED

    @property
    def room(self) -> int:
        """Most tokens that a request may emit: twice the average, because acceptance is random.

        It is that of the longest drafts, so that all engines of a run get the same prompts.
        """
        return 2 * (self.repeats * self.new_tokens + 2 * self.settled * (1 + self.most_draft_tokens))


class Requests:
    """Requests that decode together, and their number of emitted tokens."""

    numbers = count()

    def __init__(self, engine: Any, prompts: list[list[int]], new_tokens: int) -> None:
        """Adds the prompts to a vLLM engine."""
        from vllm import SamplingParams, TokensPrompt

        self.engine = engine
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        self.names = [f"lossless-{next(self.numbers)}" for _ in prompts]
        self.emitted = dict.fromkeys(self.names, 0)
        self.updates = dict.fromkeys(self.names, 0)
        for name, prompt in zip(self.names, prompts, strict=True):
            engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)

    def step(self) -> None:
        """Runs one step of the engine.

        Raises:
            RuntimeError: if a request has ended.
        """
        for output in self.engine.step():
            if output.finished:
                raise RuntimeError(f"a request ended after {len(output.outputs[0].token_ids)} tokens")
            self.emitted[output.request_id] = len(output.outputs[0].token_ids)
            self.updates[output.request_id] += 1

    def settle(self, steps: int) -> None:
        """Runs `steps` steps in which all requests decode."""
        while min(self.updates.values()) < 1 + steps:
            self.step()

    def measure(self, new_tokens: int) -> tuple[float, float, float]:
        """Runs steps until each request has emitted that many tokens on average.

        Returns:
            Seconds, emitted tokens per request, and steps per request.
        """
        tokens, steps, begin = sum(self.emitted.values()), sum(self.updates.values()), time.perf_counter()
        while sum(self.emitted.values()) < tokens + new_tokens * len(self.names):
            self.step()
        seconds = time.perf_counter() - begin
        emitted, updates = sum(self.emitted.values()) - tokens, sum(self.updates.values()) - steps
        return seconds, emitted / len(self.names), updates / len(self.names)

    def end(self) -> None:
        """Aborts the requests."""
        self.engine.abort_request(self.names)
        while self.engine.has_unfinished_requests():
            self.engine.step()


def draw_prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Return random prompts with distinct first tokens; shorter prompts are prefixes of longer ones."""
    prompts = []
    for i in range(count):
        rng = random.Random(i)
        first = 3 + i % (vocabulary - 3)
        prompts.append([first, *rng.choices(range(3, vocabulary), k=length - 1)])
    return prompts


def measure_requests(engine: Any, prompts: list[list[int]], settings: LosslessSettings) -> Row:
    """Time per emitted token of requests that decode together, as columns of a row."""
    requests = Requests(engine, prompts, settings.room)
    requests.settle(settings.settled)
    found = [requests.measure(settings.new_tokens) for _ in range(settings.repeats)]
    requests.end()
    seconds, tokens, steps = map(sum, zip(*found, strict=True))
    return {
        **per_token([seconds / tokens * 1e3 for seconds, tokens, _ in found]),
        "ms_per_step": round(seconds / steps * 1e3, 4),
        "tokens_per_step": round(tokens / steps, 4),
        "repeats": settings.repeats,
        "new_tokens": settings.new_tokens,
    }


def lossless_variant(text: Annotated[str, typer.Argument(metavar="JSON")]) -> None:
    """Measure one draft length in this process for `lossless`, and append a row for each batch."""
    settings = LosslessSettings.model_validate_json(text)
    with open_variant(settings) as (model, file):
        _measure_variant(settings, model, file)


def _measure_variant(settings: LosslessSettings, model: Model, file: ResultFile) -> None:
    longest = settings.grid[-1].context
    begin = time.perf_counter()
    with engine(
        model,
        Variant.parse(settings.backend),
        settings.additional_config,
        skip_tokenizer_init=True,
        max_model_len=longest,
        max_num_seqs=settings.max_num_seqs,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        block_size=settings.block_size,
        enable_prefix_caching=True,
        kv_transfer_config=NOISE,
        compilation_config=DECODE_GRAPHS,
    ) as (llm, backend):
        start_seconds = time.perf_counter() - begin
        cache = llm.llm_engine.vllm_config.cache_config
        blocks = cache.num_gpu_blocks - 1  # vLLM reserves one
        prompts = draw_prompts(settings.max_num_seqs, longest, model.vocabulary)
        for row in settings.grid:
            fits = blocks // -(-row.context // cache.block_size)
            length = row.context - settings.room - 1
            for batch in row.batches:
                assert batch is not None
                for acceptance in settings.acceptance if settings.draft_tokens else (None,):
                    about = {
                        "variant": settings.variant,
                        "attention_backend": backend,
                        "draft_tokens": settings.draft_tokens,
                        "draft_length": settings.draft_length if settings.draft_tokens else None,
                        "budget_tokens": settings.budget_tokens if settings.draft_tokens else None,
                        "score_every": settings.score_every if settings.draft_tokens else None,
                        "acceptance": acceptance,
                        "weights": "drawn" if model.drawn_weights else "checkpoint",
                        "context_tokens": row.context,
                        "prompt_tokens": length,
                        "batch": batch,
                        "block_size": cache.block_size,
                        "start_seconds": round(start_seconds, 1),
                    }
                    if batch > fits:
                        file.write({**about, "skipped": f"the KV cache holds {fits} requests of {row.context} tokens"})
                        continue
                    if settings.draft_tokens:
                        llm.collective_rpc("accept_drafts", args=(acceptance,))
                    asked = [prompt[:length] for prompt in prompts[:batch]]
                    found = {**about, **measure_requests(llm.llm_engine, asked, settings)}
                    file.write(found)
                    print(
                        f"{settings.variant}, acceptance {acceptance}: {row.context} tokens, batch {batch}: "
                        f"{found['ms_per_token']:.2f} ms per token, "
                        f"{time.perf_counter() - begin:.0f} s since the start",
                        flush=True,
                    )


def lossless(
    output: Output,
    model: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)} (random weights), or a folder.")] = "llama-3.1-8b",
    dense: Annotated[str, typer.Option(help="Backend that decodes densely.")] = _DENSE,
    grid: Annotated[
        list[str] | None, typer.Option(help=f"CONTEXT=BATCH,..., repeatable. Default: {', '.join(DEFAULT_GRID)}.")
    ] = None,
    draft_tokens: Annotated[
        list[str] | None, typer.Option(help="Tokens of a draft, repeatable. Default: 8,16.")
    ] = None,
    adaptive: Annotated[bool, typer.Option("--adaptive", help="Adapt the draft length, up to --draft-tokens.")] = False,
    min_context_tokens: Annotated[int, typer.Option(min=0, help="Shortest context with drafts.")] = 0,
    score_every: Annotated[
        list[str] | None, typer.Option(help="Steps of a draft that read pages of one choice, repeatable. Default: 1.")
    ] = None,
    budget: Annotated[int, typer.Option(min=1, help="Tokens that a draft reads.")] = 2048,
    acceptance: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Acceptance of drafts, or {_BY_MODEL}, repeatable. Default: {', '.join(DEFAULT_ACCEPTANCE)}."
        ),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a request per measured time.")] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each measurement.")] = 3,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Largest batch of the engine.")] = 24,
    gpu_memory_utilization: Annotated[float, typer.Option(min=0.05, max=1, help="As for vLLM.")] = 0.92,
    block_size: Annotated[int | None, typer.Option(min=1, help="As for vLLM.")] = None,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Measure time per emitted token of lossless mode; exit code 3 if an engine fails or does not finish in time."""
    end = time.monotonic() + time_limit
    rows = parse_grid(grid or DEFAULT_GRID, largest=False)
    lengths = parse_sizes("draft_tokens", draft_tokens or ["8,16"])
    choices = parse_sizes("score_every", score_every or ["1"])
    rates = tuple(map(_parse_rate, split_values(acceptance or DEFAULT_ACCEPTANCE)))
    with open_model(model) as opened:
        all_settings = [
            LosslessSettings(
                model=model if opened.drawn_weights else str(opened.folder),
                backend=dense if length is None else "unique",
                draft_tokens=length,
                most_draft_tokens=max(lengths),
                draft_length="adaptive" if adaptive else "fixed",
                min_context_tokens=min_context_tokens,
                score_every=every,
                budget_tokens=budget,
                acceptance=rates,
                grid=rows,
                new_tokens=new_tokens,
                repeats=repeats,
                max_num_seqs=max_num_seqs,
                gpu_memory_utilization=gpu_memory_utilization,
                block_size=block_size,
                output=str(output.absolute()),
            )
            for length, every in ((None, 1), *product(lengths, choices))
        ]
        _check(all_settings)
        about = describe_run(opened.folder, commit)
        measure_variants("lossless-variant", all_settings, about, output, lambda: end - time.monotonic(), table)


def _parse_rate(text: str) -> float | None:
    """Returns a probability; None for the model's decision."""
    if text == _BY_MODEL:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise ConfigurationError(f"acceptance: got {text!r}, allowed: numbers from 0 to 1, or {_BY_MODEL}")
    return rate


def _check(all_settings: list[LosslessSettings]) -> None:
    """Raise ConfigurationError for bad input before an engine starts."""
    for settings in all_settings:
        for row in settings.grid:
            if row.context < settings.room + 64:
                raise ConfigurationError(
                    f"grid: got a context of {row.context} tokens, allowed: from {settings.room + 64} for repeats and "
                    "new_tokens"
                )
            check_batches(row, settings.max_num_seqs)


def drafts_text(row: Row) -> str:
    """Returns the number of draft tokens of a row's steps, as text."""
    return f"up to {row['draft_tokens']}" if row.get("draft_length") == "adaptive" else str(row["draft_tokens"])


def table(rows: list[Row]) -> Table:
    """Return one line for each context, batch, draft length, choice of pages and acceptance."""
    dense = {
        (row["context_tokens"], row["batch"]): row.get("ms_per_token") for row in rows if row["draft_tokens"] is None
    }
    lines = Table(
        "context", "batch", "drafts", "acceptance", "scored every", "tokens a step", "ms a step", "ms a token", "gain"
    )
    for row in rows:
        ms, before = row.get("ms_per_token"), dense.get((row["context_tokens"], row["batch"]))
        drafts, acceptance = row["draft_tokens"], row["acceptance"]
        lines.add_row(
            str(row["context_tokens"]),
            str(row["batch"]),
            "-" if drafts is None else drafts_text(row),
            "-" if drafts is None else str(_BY_MODEL if acceptance is None else acceptance),
            "-" if drafts is None else str(row.get("score_every", 1)),
            *("-" if ms is None else f"{row[name]:.2f}" for name in ("tokens_per_step", "ms_per_step", "ms_per_token")),
            f"{before / ms:.2f}" if ms and before and drafts is not None else "-",
        )
    return lines
