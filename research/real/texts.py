"""Prepares inputs as tokens, so a machine without texts or tokenizers can run the model."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.eval.items import Prompter
from vllm_sparse_plugin.tools.eval.ruler import TASKS, build_item

RULER = "ruler"
"""The kind of prompts with an answer. Other kinds are texts."""
TASK_NAMES = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multivalue",
    "niah_multiquery", "vt",
)  # fmt: skip
_END_OF_TURN = "<|im_end|>"


@dataclass(frozen=True)
class Prompt:
    """One text or question in tokens."""

    kind: str
    """`RULER`, or the kind of text."""
    name: str
    context_tokens: int
    tokens: list[int]
    task: str = ""
    answers: tuple[str, ...] = ()
    answer_tokens: int = 0
    """Maximum tokens of the answer."""
    spans: tuple[tuple[int, int], ...] = ()
    """Token spans of the answers in the prompt, if each occurs once: first token, and the token after the last."""
    tail_tokens: int = 0
    """Tokens of the chat template after the question."""
    gold: tuple[int, ...] = ()
    """Ids of the right answer."""


def ruler_prompts(tokenizer: Any, tasks: Sequence[str], context: int, count: int, seed: int) -> Iterator[Prompt]:
    """Yield RULER questions in the model's chat template, with the question in the prompt."""
    prompter = Prompter(tokenizer, chat=True)
    for task in tasks:
        for index in range(count):
            item = build_item(TASKS[task], task, prompter, context, index, seed)
            tokens = [*item.context, *item.question]
            text = tokenizer.decode(tokens, skip_special_tokens=False)
            encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            offsets = encoded["offset_mapping"] if encoded["input_ids"] == tokens else []
            tail = len(tokenizer.encode(text[text.rindex(_END_OF_TURN) :], add_special_tokens=False))
            spans = find_spans(text, offsets, item.answers) if task != "vt" else ()
            gold = tokenizer.encode(f" {', '.join(item.answers)}", add_special_tokens=False)
            yield Prompt(
                RULER, item.id, context, tokens, task, item.answers, item.answer_tokens, spans, tail, tuple(gold)
            )


def find_spans(text: str, offsets: Sequence[tuple[int, int]], answers: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return the token span of each answer; empty unless each answer occurs exactly once.

    Args:
        text: the prompt.
        offsets: start and end of each token in characters.
        answers: texts to find.
    """
    found = []
    for answer in answers:
        begin = text.find(answer)
        if not offsets or begin < 0 or text.find(answer, begin + 1) >= 0:
            return ()
        end = begin + len(answer)
        inside = [i for i, (first, last) in enumerate(offsets) if first < end and last > begin]
        found.append((inside[0], inside[-1] + 1))
    return tuple(found)


def text_prompts(tokenizer: Any, kind: str, text: str, context: int, count: int) -> Iterator[Prompt]:
    """Yield spans of a text that do not overlap, spread evenly over it, after what a tokenizer puts before texts.

    Raises:
        ConfigurationError: the text is too short.
    """
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) < count * context:
        raise ConfigurationError(f"{kind}: got {len(tokens)} tokens, allowed: at least {count * context}")
    stride, before = len(tokens) // count, tokenizer.encode("")
    for index in range(count):
        yield Prompt(kind, f"{kind}/{context}/{index}", context, [*before, *tokens[index * stride :]][:context])


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Write compressed JSON lines."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for prompt in prompts:
            print(json.dumps(asdict(prompt), separators=(",", ":")), file=file)


def read_prompts(path: Path) -> list[Prompt]:
    """Read a file of `write_prompts`.

    Raises:
        ConfigurationError: the file has another format.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        tuples = "answers", "gold"
        return [
            Prompt(**row | {name: tuple(row[name]) for name in tuples} | {"spans": tuple(map(tuple, row["spans"]))})
            for row in rows
        ]
    except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(f"prompts: got {path} ({error}), allowed: a file of `prepare`") from None
