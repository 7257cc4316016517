"""The texts that a model is run over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_sparse_plugin.errors import ConfigurationError, expect_known
from vllm_sparse_plugin.tools.arguments import read_prompts
from vllm_sparse_plugin.tools.needles import (
    MIN_CONTEXT_TOKENS,
    QUESTIONS_PER_DOCUMENT,
    STRESS_TASKS,
    TASKS,
    build_questions,
)


class Text(NamedTuple):
    """One forward pass."""

    document: str
    """Texts with the same one are not independent."""
    tokens: list[int]
    queries: int
    """Newest tokens whose queries are measured."""


def needle_texts(tokenizer: Any, tasks: Sequence[str], context: int, count: int, seed: int) -> Iterator[Text]:
    """Needle questions; the queries are those of the tokens that produce the answer.

    Raises:
        ConfigurationError: for a task that does not exist, or a context that is too short.
    """
    expect_known("task", tasks, (*TASKS, *STRESS_TASKS))
    if context < MIN_CONTEXT_TOKENS:
        raise ConfigurationError(f"context: got {context} tokens, allowed: {MIN_CONTEXT_TOKENS} or more")
    for task in tasks:
        for number, question in enumerate(build_questions(tokenizer, task, context, count, seed)):
            document = f"{task}-{context}-{seed}-{number // QUESTIONS_PER_DOCUMENT}"
            yield _text(tokenizer, document, question.prompt, f" {question.answer}", 1)


def read_texts(tokenizer: Any, path: Path, queries: int) -> Iterator[Text]:
    """The prompts of a JSON lines file, as `vllm-sparse diagnose` takes it.

    Args:
        tokenizer: of the model.
        path: lines with `prompt` and perhaps `completion`.
        queries: newest tokens that are measured where there is no completion.

    Raises:
        ConfigurationError: for a line that is no such prompt.
    """
    for entry in read_prompts(path):
        yield _text(tokenizer, entry["name"], entry["prompt"], entry["completion"], queries)


def _text(tokenizer: Any, document: str, prompt: str, completion: str, queries: int) -> Text:
    tokens = tokenizer.encode(prompt)
    if completion:
        answer = tokenizer.encode(completion, add_special_tokens=False)
        # The last token asks for what comes after it.
        tokens, queries = [*tokens, *answer[:-1]], len(answer)
    return Text(document, tokens, min(queries, len(tokens)))
