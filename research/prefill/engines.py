"""Asks the study's questions of whole engines, so that their answers can be held to those of torch."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.common.engine import Variant, start_engine
from bench.common.models import NEEDLE_8M, load_tokenizer, open_model
from bench.common.results import Row
from research.prefill.plan import DEFAULT, DOCUMENTS, Stage
from research.prefill.rules import Setting
from research.study.documents import Document, Tail
from research.study.run import document_source, open_results
from vllm_sparse_plugin.tools.provenance import describe_run

Platform = Literal["cpu", "gpu"]
PLATFORMS: tuple[Platform, ...] = ("cpu", "gpu")
DENSE, STUDIED, SHIPPED = "dense", "studied", "shipped"
PREFILLS: dict[str, tuple[Setting, Row | None]] = {
    DENSE: (Setting(), None),
    STUDIED: (Setting(DEFAULT), {"method": "blocks", "min_blocks": 4, "min_context_tokens": 0}),
    SHIPPED: (Setting(DEFAULT), {"method": "blocks"}),
}
"""What prompts attend to: the setting of the study in torch, and the section `prefill` of an engine. As it is shipped,
sparse prefill reads everything near the beginning of a prompt, where the study does not."""
DECODES = {"dense": "right", "sparse": "right_sparse"}
"""The column of results that answers of each kind of decode belong to."""
_ROOM = 512
"""Tokens that a question and its answer take at most."""


@dataclass(frozen=True)
class EngineSetting:
    """An engine by what its prompts and its decode steps attend to."""

    prefill: str
    """A key of `PREFILLS`."""
    decode: str
    """A key of `DECODES`."""

    @property
    def variant(self) -> Variant:
        """The backend; the platform's own where nothing is sparse."""
        if self.decode == "sparse":
            return Variant("UNIQUE")
        return Variant(None if self.prefill == DENSE else "DENSE")

    @property
    def additional_config(self) -> str | None:
        """What the backend is told."""
        _, section = PREFILLS[self.prefill]
        return json.dumps({"sparse_attention": {"prefill": section}}) if section else None


def engine_name(platform: Platform, prefill: str) -> str:
    """The name in result files of what engines answer after a prefill."""
    return f"engine/{platform}/{prefill}"


def is_right(tail: Tail, generated: list[int], tokenizer: object) -> bool:
    """Whether an engine that was asked for one token more than the answer has gave it."""
    before = len(tail.tokens) - tail.answer_tokens - 1
    return tail.is_right([*[-1] * before, *generated], tokenizer)


def measure_engine(
    output: Path, stage: Stage, setting: EngineSetting, folder: Path | None, time_limit: float, commit: str | None
) -> bool:
    """Ask what the file lacks, and return whether the time was enough.

    Args:
        output: of JSON lines; it may hold measurements already.
        stage: whose documents and questions are asked.
        setting: of the engine.
        folder: keeps the documents.
        time_limit: in seconds.
        commit: to record, if the checkout cannot say it itself.
    """
    end = time.monotonic() + time_limit
    file, done = open_results(output, describe_run(NEEDLE_8M, commit))
    source, tokenizer = document_source(0, folder), load_tokenizer(NEEDLE_8M)
    with file, open_model(NEEDLE_8M.name) as model:
        engine, _ = start_engine(
            model,
            setting.variant,
            setting.additional_config,
            skip_tokenizer_init=True,
            max_model_len=max(stage.contexts) + _ROOM,
            max_num_seqs=stage.questions,
            max_num_batched_tokens=8192,
            gpu_memory_utilization=0.2,
            kv_cache_memory_bytes=2 << 30,
            enable_prefix_caching=True,
        )
        from vllm import SamplingParams, TokensPrompt
        from vllm.platforms import current_platform

        name = engine_name("cpu" if current_platform.is_cpu() else "gpu", setting.prefill)

        def ask(document: Document, questions: Sequence[Tail]) -> Row:
            prompts = [
                TokensPrompt(prompt_token_ids=[*document.tokens, *tail.tokens[: -tail.answer_tokens]])
                for tail in questions
            ]
            sampling = [
                SamplingParams(temperature=0, max_tokens=tail.answer_tokens + 1, ignore_eos=True, detokenize=False)
                for tail in questions
            ]
            answers = engine.generate(prompts, sampling, use_tqdm=False)
            given = [list(answer.outputs[0].token_ids) for answer in answers]
            right = (is_right(tail, tokens, tokenizer) for tail, tokens in zip(questions, given, strict=True))
            return {DECODES[setting.decode]: "".join("01"[each] for each in right)}

        for context in stage.contexts:
            by_task = [source((task, context, DOCUMENTS))[: stage.documents] for task in stage.tasks]
            for document in (document for row in zip(*by_task, strict=True) for document in row):
                if (document.name, name) in done:
                    continue
                if time.monotonic() > end:
                    return False
                begin = time.perf_counter()
                asked = ask(document, document.tails[: stage.questions])
                seconds = round(time.perf_counter() - begin, 3)
                file.write({"document": document.name, "setting": name} | asked | {"seconds": seconds})
    return True
