"""Whether an engine answers as the model in torch does that stands for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.common.engine import Variant, start_engine
from bench.common.models import load_tokenizer, open_model
from bench.common.results import Row
from research.compaction.questions import TASKS, Asker
from research.compaction.settings import BLOCK, Reading, Setting
from research.study.documents import load_documents
from vllm_sparse_plugin.config import KEY


def first_choices(best: list[int], answer: list[int]) -> list[int]:
    """What a greedy decode says up to its first wrong token, `best` being the choices after the right ones."""
    wrong = next((place for place, pair in enumerate(zip(best, answer, strict=True)) if len(set(pair)) == 2), None)
    return best if wrong is None else best[: wrong + 1]


def verify(folder: Path, setting: Setting, context_tokens: int, seed: int) -> Row:
    """Ask an engine with a method what `answers` asks, with the question in the prompt; returns how often they agree.

    Args:
        folder: of the model.
        setting: a method of compaction; its budget is that of a prompt of `context_tokens`.
        context_tokens: of the documents, one for each task.
        seed: of documents and needles.
    """
    reading = setting.reading(context_tokens)
    assert reading is not None
    assert reading.compaction is not None
    asker, prompts, expected = Asker(folder), [], []
    for task in TASKS:
        (document,) = load_documents(None, load_tokenizer(folder), task, context_tokens, 1, seed)
        read = asker.model.read(document.tokens)
        for tail in document.tails:
            question, answer = tail.tokens[: -tail.answer_tokens], tail.tokens[-tail.answer_tokens :]
            prompt = asker.model.read(question, after=read)
            says = asker.model.decode_kept(prompt, answer[:-1], Reading(reading.compaction))
            expected.append(first_choices([int(prompt.likely.argmax()), *says.best], answer))
            prompts.append([*document.tokens, *question])
    settings = {"compaction": reading.compaction.model_dump(exclude_none=True), "selection": {"policy": "dense"}}
    with open_model(str(folder)) as model:
        engine, _ = start_engine(
            model, Variant.parse(setting.method), json.dumps({KEY: settings}), max_model_len=context_tokens + 32,
            max_num_seqs=4, max_num_batched_tokens=1024, block_size=BLOCK, enforce_eager=True,
            enable_prefix_caching=False,
        )  # fmt: skip
    from vllm import SamplingParams

    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    sampling: Any = [SamplingParams(temperature=0, max_tokens=len(each), ignore_eos=True) for each in expected]
    answers = [list(done.outputs[0].token_ids) for done in engine.generate(inputs, sampling, use_tqdm=False)]
    agree = sum(found == wanted for found, wanted in zip(answers, expected, strict=True))
    return {"setting": setting.name, "share": setting.share, "context_tokens": context_tokens,
            "questions": len(prompts), "agree": agree}  # fmt: skip
