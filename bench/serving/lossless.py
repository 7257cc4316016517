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
from functools import partial
from itertools import count
from typing import Annotated, Any

import typer

from bench.common import options
from bench.common.console import print_rows
from bench.common.engine import DECODE_GRAPHS, Variant, engine
from bench.common.models import Model, open_model
from bench.common.results import Row
from bench.serving.batches import Batch, Loads, Runner, check_batches, draw_text, make_prompts, parse_batches
from bench.serving.variants import VariantSettings, measure_variants, per_token, shared_settings, variant_columns
from vllm_sparse_plugin.config import KEY
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import parse_additional_config

LOADS = ["24x32K", "1x128K", "6x128K"]
DRAFTS, RATES = ["8", "16"], ["0.9", "0.95", "0.97"]
_BY_MODEL = "model"
_SETTLED = {"fixed": 2, "adaptive": 32}
"""Steps in which every request has decoded before timing begins. Adaptive draft lengths depend on earlier steps."""


class LosslessSettings(VariantSettings):
    """The input of the process of one draft length."""

    draft_tokens: int | None
    """None for dense decoding."""
    draft_length: str
    acceptance: tuple[float | None, ...]
    """Probabilities of accepting a draft; None for the model's decision."""
    loads: tuple[Batch, ...]
    new_tokens: int
    room: int
    """Most tokens that a request may emit."""

    @property
    def label(self) -> str:
        """The name in messages."""
        return self.variant + (f", {self.draft_length}, {self.draft_tokens} drafts" if self.draft_tokens else "")

    def measure(self, model: Model) -> Iterator[Row]:
        """Yields a row for each load and acceptance."""
        variant, config = Variant.parse(self.variant), self.additional_config
        arguments = {
            "skip_tokenizer_init": True, "max_model_len": max(each.longest for each in self.loads),
            "max_num_seqs": max(each.count for each in self.loads), "enable_prefix_caching": True,
            "compilation_config": DECODE_GRAPHS,
        }  # fmt: skip
        with engine(model, variant, config, **(arguments | self.engine_args)) as (llm, backend):
            lossless = parse_additional_config(config)[KEY]["lossless"] if config else {}
            about = {
                **variant_columns(variant, backend, config, model),
                "draft_tokens": self.draft_tokens,
                "draft_length": lossless.get("draft_length"),
                "score_every": lossless.get("score_every", 1) if lossless else None,
            }
            runner, text = Runner(llm, sparse=False), draw_text(model, self.loads)
            for batch in self.loads:
                about |= {"load": batch.name, "context_tokens": batch.longest, "batch": batch.count}
                if not runner.fits(batch):
                    yield about | {"skipped": f"the KV cache holds {runner.room} tokens", "acceptance": None}
                    continue
                prompts = make_prompts(batch, *text, self.room)
                about |= runner.fill(batch, prompts)
                for acceptance in self.acceptance if self.draft_tokens else (None,):
                    if self.draft_tokens:
                        llm.collective_rpc("accept_drafts", args=(acceptance,))
                    asked = [each.for_vllm() for each in prompts]
                    yield about | {"acceptance": acceptance} | measure_requests(llm.llm_engine, asked, self)


_numbers = count()


def measure_requests(engine: Any, prompts: list[Any], settings: LosslessSettings) -> Row:
    """Time per emitted token of requests that decode together, as columns of a row.

    Raises:
        RuntimeError: if a request ends within the measurement.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=settings.room, ignore_eos=True, detokenize=False)
    emitted = {f"lossless-{next(_numbers)}": 0 for _ in prompts}
    updates = dict.fromkeys(emitted, 0)
    for name, prompt in zip(emitted, prompts, strict=True):
        engine.add_request(name, prompt, sampling)

    def step() -> None:
        for output in engine.step():
            tokens = len(output.outputs[0].token_ids)
            if output.finished:
                raise RuntimeError(f"a request ended after {tokens} tokens")
            emitted[output.request_id] = tokens
            updates[output.request_id] += 1

    while min(updates.values()) < 1 + _SETTLED[settings.draft_length]:
        step()
    found = []
    for _ in range(settings.repeats):
        tokens, steps, begin = sum(emitted.values()), sum(updates.values()), time.perf_counter()
        # Whole steps, until each request has emitted the tokens on average.
        while sum(emitted.values()) < tokens + settings.new_tokens * len(emitted):
            step()
        seconds = time.perf_counter() - begin
        found.append((seconds, (sum(emitted.values()) - tokens) / len(emitted), sum(updates.values()) - steps))
    engine.abort_request(list(emitted))
    while engine.has_unfinished_requests():
        engine.step()
    all_seconds, all_tokens, all_steps = map(sum, zip(*found, strict=True))
    steps_each = all_steps / len(emitted)
    return {
        **per_token([seconds / tokens * 1e3 for seconds, tokens, _ in found]),
        "ms_per_step": round(all_seconds / steps_each * 1e3, 4),
        "tokens_per_step": round(all_tokens / steps_each, 4),
        "repeats": settings.repeats,
        "new_tokens": settings.new_tokens,
    }


def lossless(
    output: options.Output,
    model: options.ModelName = "llama-3.1-8b",
    load: Loads = LOADS,
    draft_tokens: Annotated[list[str], typer.Option(help="Tokens of a draft, repeatable.")] = DRAFTS,
    adaptive: Annotated[bool, typer.Option("--adaptive", help="Adapt the draft length, up to --draft-tokens.")] = False,
    additional_config: Annotated[
        str, typer.Option(help="For the backend `lossless`, such as `score_every`.", metavar="JSON")
    ] = "{}",
    acceptance: Annotated[list[str], typer.Option(help=f"Of drafts, or {_BY_MODEL}, repeatable.")] = RATES,
    new_tokens: options.NewTokens = 96,
    repeats: options.Repeats = 3,
    engine_args: options.EngineArgs = "{}",
    time_limit: options.TimeLimit = 3600,
    commit: options.Commit = None,
) -> None:
    """Measure time per emitted token of lossless mode and of FlashAttention; exit code 3 if an engine fails."""
    end = time.monotonic() + time_limit
    loads, lengths = parse_batches(load), options.parse_sizes("draft_tokens", draft_tokens)
    rates = tuple(map(_parse_rate, options.split_values(acceptance)))
    given, arguments = parse_additional_config(additional_config), parse_additional_config(engine_args, "engine_args")
    kind = "adaptive" if adaptive else "fixed"
    # Twice the average, because acceptance is random. All engines of a run get the same prompts.
    room = 2 * (repeats * new_tokens + 2 * _SETTLED[kind] * (1 + max(lengths)))
    with open_model(model) as opened:
        check_batches(loads, room, opened.longest)
        all_settings = []
        for length in (None, *lengths):
            ours = given.get(KEY) or {}
            section = (ours.get("lossless") or {}) | {"draft_tokens": length, "draft_length": kind}
            config = json.dumps(given | {KEY: ours | {"lossless": section}})
            variant = Variant.parse("lossless" if length else "flash_attn")
            settings = LosslessSettings(
                **shared_settings(variant, opened, config), engine_args=arguments, repeats=repeats,
                draft_tokens=length, draft_length=kind, acceptance=rates, loads=loads, new_tokens=new_tokens, room=room,
            )  # fmt: skip
            all_settings.append(settings)
        columns = ("load", "draft_tokens", "acceptance", "tokens_per_step", "ms_per_step", "ms_per_token")
        measure_variants(all_settings, opened, commit, output, end, partial(print_rows, columns=columns))


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
