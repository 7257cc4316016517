"""Time per emitted token in lossless mode and in dense decoding, at a given acceptance of drafts.

    python -m bench.serving lossless --acceptance 0.9,0.95,0.97 --output lossless.jsonl

Drafts of random weights are never right. vLLM therefore accepts each draft with a given probability, in the synthetic
mode of its rejection sampler. The time is that of an engine whose drafts are right this often. The cache holds prompts
as in `decode`. Requests decode in the same steps. After all have begun, whole steps are timed, and the time is divided
by the emitted tokens per request. One process for dense decoding and for each length of drafts, one after the other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import count
from typing import Annotated, Any

import typer
from rich.table import Table

from bench.common.engine import DECODE_GRAPHS, Variant, engine
from bench.common.models import SHAPES, Model, open_model
from bench.common.options import Commit, Output, TimeLimit, parse_sizes, split_values
from bench.common.results import Row
from bench.serving.batches import ALLOWED, Batch, Runner, check_batches, draw_text, make_prompts, parse_batches
from bench.serving.variants import VariantSettings, measure_variants, open_variant, per_token, variant_columns
from vllm_sparse_plugin.config import KEY
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import parse_additional_config
from vllm_sparse_plugin.tools.provenance import describe_run

LOADS = ("24x32K", "1x128K", "6x128K")
_RATES = ("0.9", "0.95", "0.97")
_BY_MODEL = "model"
_SETTLED = 2
"""Steps in which every request has decoded before timing begins."""
_LEARNED = 32
"""The same with adaptive draft lengths, which depend on earlier steps."""


class LosslessSettings(VariantSettings):
    """The input of the process of one draft length."""

    draft_tokens: int | None
    """None for dense decoding."""
    adaptive: bool
    acceptance: tuple[float | None, ...]
    """Probabilities of accepting a draft; None for the model's decision."""
    loads: tuple[Batch, ...]
    new_tokens: int
    room: int
    """Most tokens that a request may emit."""

    @property
    def label(self) -> str:
        """The name in messages."""
        drafts = f", {'up to ' * self.adaptive}{self.draft_tokens} drafts"
        return self.variant + (drafts if self.draft_tokens else "")

    @property
    def settled(self) -> int:
        """Steps before timing begins."""
        return _LEARNED if self.adaptive else _SETTLED


class Requests:
    """Requests that decode together, and their number of emitted tokens."""

    numbers = count()

    def __init__(self, engine: Any, prompts: list[Any], new_tokens: int) -> None:
        """Adds vLLM's prompts to an engine."""
        from vllm import SamplingParams

        self.engine = engine
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        self.names = [f"lossless-{next(self.numbers)}" for _ in prompts]
        self.emitted = dict.fromkeys(self.names, 0)
        self.updates = dict.fromkeys(self.names, 0)
        for name, prompt in zip(self.names, prompts, strict=True):
            engine.add_request(name, prompt, sampling)

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


def measure_requests(engine: Any, prompts: list[Any], settings: LosslessSettings) -> Row:
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
        for row in _measure_variant(settings, model):
            file.write(row)
            print(f"{settings.label}: {row['load']}: {row.get('ms_per_token', 'skipped')} ms per token", flush=True)


def _measure_variant(settings: LosslessSettings, model: Model) -> Iterator[Row]:
    variant, config = Variant.parse(settings.variant), settings.additional_config
    longest, most = max(each.longest for each in settings.loads), max(each.count for each in settings.loads)
    with engine(
        model,
        variant,
        config,
        skip_tokenizer_init=True,
        max_model_len=longest,
        max_num_seqs=most,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        enable_prefix_caching=True,
        compilation_config=DECODE_GRAPHS,
    ) as (llm, backend):
        lossless = parse_additional_config(config)[KEY]["lossless"] if config else {}
        about = {
            **variant_columns(variant, backend, config, model),
            "draft_tokens": settings.draft_tokens,
            "draft_length": lossless.get("draft_length"),
            "score_every": lossless.get("score_every", 1) if lossless else None,
        }
        runner, text = Runner(llm, sparse=False), draw_text(model, longest, most)
        for batch in settings.loads:
            about |= {"load": batch.name, "context_tokens": batch.longest, "batch": batch.count}
            if not runner.fits(batch):
                yield about | {"skipped": f"the KV cache holds {runner.room} tokens", "acceptance": None}
                continue
            prompts = make_prompts(batch, *text, settings.room)
            about |= runner.fill(batch, prompts)
            for acceptance in settings.acceptance if settings.draft_tokens else (None,):
                if settings.draft_tokens:
                    llm.collective_rpc("accept_drafts", args=(acceptance,))
                asked = [each.for_vllm() for each in prompts]
                yield about | {"acceptance": acceptance} | measure_requests(llm.llm_engine, asked, settings)


def lossless(
    output: Output,
    model: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)} (random weights), or a folder.")] = "llama-3.1-8b",
    dense: Annotated[str, typer.Option(help="Backend that decodes densely.")] = "flash_attn",
    load: Annotated[list[str] | None, typer.Option(help=f"{ALLOWED}, repeatable. Default: {', '.join(LOADS)}.")] = None,
    draft_tokens: Annotated[
        list[str] | None, typer.Option(help="Tokens of a draft, repeatable. Default: 8,16.")
    ] = None,
    adaptive: Annotated[bool, typer.Option("--adaptive", help="Adapt the draft length, up to --draft-tokens.")] = False,
    additional_config: Annotated[
        str, typer.Option(help="For the backend `lossless`, such as `score_every`.", metavar="JSON")
    ] = "{}",
    acceptance: Annotated[
        list[str] | None,
        typer.Option(help=f"Acceptance of drafts, or {_BY_MODEL}, repeatable. Default: {', '.join(_RATES)}."),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a request per measured time.")] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each measurement.")] = 3,
    gpu_memory_utilization: Annotated[float | None, typer.Option(min=0.05, max=1, help="As for vLLM.")] = None,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Measure time per emitted token of lossless mode; exit code 3 if an engine fails or does not finish in time."""
    end = time.monotonic() + time_limit
    loads, lengths = parse_batches(load or LOADS), parse_sizes("draft_tokens", draft_tokens or ["8,16"])
    rates = tuple(map(_parse_rate, split_values(acceptance or _RATES)))
    given = parse_additional_config(additional_config)
    settled = _LEARNED if adaptive else _SETTLED
    # Twice the average, because acceptance is random. All engines of a run get the same prompts.
    room = 2 * (repeats * new_tokens + 2 * settled * (1 + max(lengths)))
    with open_model(model) as opened:
        check_batches(loads, room, int(opened.config["max_position_embeddings"]))
        all_settings = []
        for length in (None, *lengths):
            section = {"draft_tokens": length, "draft_length": "adaptive" if adaptive else "fixed"}
            ours = given.get(KEY) or {}
            config = given | {KEY: ours | {"lossless": (ours.get("lossless") or {}) | section}}
            variant = Variant.parse("lossless" if length else dense)
            all_settings.append(
                LosslessSettings(
                    model=model if opened.drawn_weights else str(opened.folder),
                    variant=variant.name,
                    additional_config=variant.additional_config(json.dumps(config)),
                    draft_tokens=length,
                    adaptive=adaptive,
                    acceptance=rates,
                    loads=loads,
                    new_tokens=new_tokens,
                    room=room,
                    repeats=repeats,
                    gpu_memory_utilization=gpu_memory_utilization,
                    output=str(output.absolute()),
                )
            )
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


def table(rows: list[Row]) -> Table:
    """Return one line for each load, draft length and acceptance."""
    dense = {row["load"]: row.get("ms_per_token") for row in rows if row["draft_tokens"] is None}
    lines = Table("load", "drafts", "acceptance", "tokens a step", "ms a step", "ms a token", "gain")
    for row in rows:
        ms, before, drafts = row.get("ms_per_token"), dense.get(row["load"]), row["draft_tokens"]
        lines.add_row(
            row["load"],
            "-" if drafts is None else f"{'up to ' * (row['draft_length'] == 'adaptive')}{drafts}",
            "-" if drafts is None else str(_BY_MODEL if row["acceptance"] is None else row["acceptance"]),
            *("-" if ms is None else f"{row[name]:.2f}" for name in ("tokens_per_step", "ms_per_step", "ms_per_token")),
            f"{before / ms:.2f}" if ms and before and drafts is not None else "-",
        )
    return lines
