"""Texts to run the model on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_sparse_plugin.tools.arguments import read_prompts
from vllm_sparse_plugin.tools.needles import QUESTIONS_PER_DOCUMENT, build_questions, check_questions


class Text(NamedTuple):
    """One forward pass."""

    document: str
    """Texts of the same document are not independent."""
    tokens: list[int]
    queries: int
    """Number of newest tokens whose queries are measured."""


def needle_texts(tokenizer: Any, tasks: Sequence[str], context: int, count: int, seed: int) -> Iterator[Text]:
    """Yield needle questions. The queries are those of the tokens that produce the answer.

    Raises:
        ConfigurationError: a task is unknown, or a context is too short.
    """
    check_questions(tasks, [context], count)
    for task in tasks:
        for number, question in enumerate(build_questions(tokenizer, task, context, count, seed)):
            document = f"{task}-{context}-{seed}-{number // QUESTIONS_PER_DOCUMENT}"
            yield _text(tokenizer, document, question.prompt, f" {question.answer}", 1)


def read_texts(tokenizer: Any, path: Path, queries: int) -> Iterator[Text]:
    """Yield the prompts of a JSON lines file in the format of `vllm-sparse diagnose`.

    Args:
        tokenizer: of the model.
        path: lines with `prompt` and an optional `completion`.
        queries: number of newest tokens to measure without a completion.

    Raises:
        ConfigurationError: a line is not such a prompt.
    """
    for entry in read_prompts(path):
        yield _text(tokenizer, entry["name"], entry["prompt"], entry["completion"], queries)


def _text(tokenizer: Any, document: str, prompt: str, completion: str, queries: int) -> Text:
    tokens = tokenizer.encode(prompt)
    if completion:
        answer = tokenizer.encode(completion, add_special_tokens=False)
        # The last token of the answer predicts nothing that is measured.
        tokens, queries = [*tokens, *answer[:-1]], len(answer)
    return Text(document, tokens, min(queries, len(tokens)))
