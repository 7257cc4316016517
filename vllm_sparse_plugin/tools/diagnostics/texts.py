"""Texts that fit values for one model, and other texts that judge them. Importing this module needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import read_prompts
from vllm_sparse_plugin.tools.needles import QUESTIONS_PER_DOCUMENT, build_questions

DEFAULT_TASKS = ("multikey", "kv")
"""Default tasks of needle documents."""
SAMPLES = 50
"""Default minimum number of continuations to fit to."""
LENGTHS = 4
"""Default number of contexts to fit thresholds for: a cubic has four coefficients."""
MIN_TEXT_TOKENS = 4
"""Shortest beginning of a text of which a token is predicted: of two decoded tokens the first predicts the second."""
_TEXT_QUERIES = 64


class Text(NamedTuple):
    """A document and its continuations."""

    task: str
    length: int
    """Requested tokens of the context."""
    document: list[int]
    """Ids of the beginning, which is prefilled densely."""
    rest: list[list[int]]
    """Ids of each continuation. Each is decoded after the same beginning."""
    asked: list[int]
    """For each continuation, the number of newest tokens to predict."""


class Documents(NamedTuple):
    """Texts that fit values, and texts that judge them."""

    fitting: list[Text]
    judging: list[Text]
    data: str
    """Description for the report."""

    @property
    def num_tokens(self) -> int:
        """Total tokens of all contexts."""
        return sum(text.length for text in (*self.fitting, *self.judging))


def read_texts(prompts: Path | None) -> list[str] | None:
    """Return the texts of a file, None without a file.

    Raises:
        ConfigurationError: the file has fewer than two texts.
    """
    if prompts is None:
        return None
    texts = [entry["prompt"] + entry["completion"] for entry in read_prompts(prompts)]
    if len(texts) < 2:
        raise ConfigurationError(f"prompts: got one in {str(prompts)!r}, allowed: two or more")
    return texts


def build_documents(
    tokenizer: Any,
    given: list[str] | None,
    prompts: Path | None,
    tasks: Sequence[str],
    lengths: list[int],
    samples: int,
    seed: int,
) -> Documents:
    """Return the texts to fit to and to judge by: every other text of a file, or needle documents.

    Args:
        tokenizer: of the model.
        given: texts of the file, None without a file.
        prompts: the file.
        tasks: of needle documents.
        lengths: contexts in tokens.
        samples: least number of needle questions to fit to.
        seed: of needle documents.

    Raises:
        ConfigurationError: a text is shorter than the longest context, or a text that judges begins like one that fits.
    """
    # A task that is named twice would count the same questions twice.
    tasks = list(dict.fromkeys(tasks))
    plural = "contexts" if len(lengths) > 1 else "a context"
    contexts = f"{plural} of {', '.join(map(str, lengths))} tokens"
    if given is None or prompts is None:
        fitting, judging = (list(_needles(tokenizer, tasks, lengths, samples, 2 * seed + part)) for part in (0, 1))
        parts = f"{count_continuations(fitting)} questions to fit to, {count_continuations(judging)} to judge by"
        kind = f"needle documents ({', '.join(tasks)}), {parts}, seed {seed}"
        return Documents(fitting, judging, f"{kind}, {contexts}")
    texts = [tokenizer.encode(text) for text in given]
    fitting, judging = (list(cut_texts(texts[part::2], lengths)) for part in (0, 1))
    fitted = {(*text.document, *text.rest[0]) for text in fitting}
    for text in judging:
        if (*text.document, *text.rest[0]) in fitted:
            raise ConfigurationError(
                f"prompts: got texts with the same first {text.length} tokens, of which one fits and one judges, "
                "allowed: texts that differ"
            )
    kind = f"{prompts.name}, {count_continuations(fitting)} texts to fit to, {count_continuations(judging)} to judge by"
    return Documents(fitting, judging, f"{kind}, {contexts}")


def count_continuations(texts: Sequence[Text]) -> int:
    """Return the number of continuations."""
    return sum(len(text.rest) for text in texts)


def are_few(fitted: int, lengths: int) -> bool:
    """Return whether thresholds are fitted to fewer continuations or lengths than a server should rely on."""
    return fitted < SAMPLES or lengths < LENGTHS


def _needles(tokenizer: Any, tasks: Sequence[str], lengths: Sequence[int], samples: int, seed: int) -> Iterator[Text]:
    """Yield needle documents with their questions: the same number per length and task, `samples` questions or more."""
    from vllm_sparse_plugin.tools.eval.items import Prompter

    prompter = Prompter(tokenizer)
    for length in lengths:
        for task in tasks:
            by_document = 1 if task == "single" else QUESTIONS_PER_DOCUMENT
            number = by_document * math.ceil(samples / (len(lengths) * len(tasks) * by_document))
            texts: dict[tuple[int, ...], Text] = {}
            for question in build_questions(tokenizer, task, length, number, seed):
                # If a token spans the end of the document, the questions do not share the document.
                document, asked = prompter.split(*question.parts)
                answer = prompter.encode_plain(f" {question.answer}")
                text = texts.setdefault(tuple(document), Text(task, length, document, [], []))
                text.rest.append(asked + answer)
                text.asked.append(len(answer))
            yield from texts.values()


def cut_texts(texts: list[list[int]], lengths: Sequence[int]) -> Iterator[Text]:
    """Yield the beginnings of texts. The queries of their last tokens are measured.

    Raises:
        ConfigurationError: a text is shorter than the longest context.
    """
    for length in lengths:
        for tokens in texts:
            if len(tokens) < length:
                raise ConfigurationError(
                    f"prompts: got a text of {len(tokens)} tokens, allowed: the longest context's {lengths[-1]} or more"
                )
            rest = min(_TEXT_QUERIES, length // 2)
            yield Text("text", length, tokens[: length - rest], [tokens[length - rest : length]], [rest - 1])
