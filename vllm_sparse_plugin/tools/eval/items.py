"""Items: prompts in a model's tokens, cut before the question, and the scoring of the answers."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from typing import Any

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools import needles

PERPLEXITY = "perplexity"
"""The task that scores text."""
COMPLETION = "completion"
"""The task of prompts with known completions."""
TEXT_TASKS = (PERPLEXITY, COMPLETION)
"""Tasks that score given tokens by the metric `NLL`. The model does not answer freely."""
NLL = "nll"
"""Not a score: mean negative log likelihood of a token in nats. `exp` of its mean is the perplexity."""


@dataclass(frozen=True)
class Item:
    """One prompt and how its answer is scored."""

    id: str
    """Task, context and number; identical in every run."""
    task: str
    context_tokens: int
    """Maximum tokens of prompt and answer together."""
    context: list[int]
    """Token ids up to the question."""
    question: list[int]
    """Token ids from the question on; for perplexity the text to score."""
    answers: tuple[str, ...]
    answer_tokens: int
    """Maximum tokens of the answer; 0 for perplexity."""
    metric: str
    """Name in `METRICS`, or `NLL`."""

    @property
    def digest(self) -> str:
        """Return 16 hexadecimal digits that identify the prompt and the answers."""
        parts = [array("q", self.context + self.question).tobytes(), *(answer.encode() for answer in self.answers)]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]

    @property
    def document(self) -> str:
        """Return 16 hexadecimal digits that identify the text before the question."""
        return hashlib.sha256(array("q", self.context).tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class PlannedItem:
    """An item that is built only when it is asked."""

    id: str
    build: Callable[[], Item]


class Prompter:
    """Turns texts into prompts with the model's special tokens and, if enabled, its chat template."""

    def __init__(self, tokenizer: Any, chat: bool = False, end_tokens: Collection[int] = ()) -> None:
        """Take a transformers tokenizer.

        Args:
            tokenizer: of the model.
            chat: whether to use its chat template.
            end_tokens: ids that end an answer, besides the tokenizer's.

        Raises:
            ConfigurationError: `chat` is set and the tokenizer has no chat template.
        """
        if chat and not tokenizer.chat_template:
            raise ConfigurationError("chat: got a tokenizer without a chat template, allowed: one with a template")
        self._tokenizer = tokenizer
        self._chat = chat
        self.end_tokens = frozenset({*end_tokens, tokenizer.eos_token_id} - {None})
        """Ids that end an answer."""

    @property
    def begin(self) -> list[int]:
        """The ids at the start of every text: the model's `bos`, if its tokenizer adds it."""
        return [token for token in self._tokenizer.encode("")[:1] if token == self._tokenizer.bos_token_id]

    def encode(self, text: str, prefix: str = "") -> list[int]:
        """Return the ids of a whole prompt. The model's answer begins with `prefix`."""
        return self._encode(self._render(text) + prefix)

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens or template."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ids, without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def split(self, context: str, question: str, prefix: str = "") -> tuple[list[int], list[int]]:
        """Return the ids before the question and from the question on. Together they are the whole prompt.

        A token that spans the end of the context and the beginning of the question belongs to the question.

        Raises:
            ConfigurationError: the chat template changes the text of the question.
        """
        prompt = self._render(context + question) + prefix
        begin = prompt.rfind(question.rstrip()) if self._chat else len(context)
        if begin < 0:
            raise ConfigurationError("chat: got a template that changes the question, allowed: one that keeps it")
        ids = self._encode(prompt)
        shared = sum(takewhile(bool, map(eq, ids, self._encode(prompt[:begin]))))
        return ids[:shared], ids[shared:]

    def _render(self, text: str) -> str:
        if not self._chat:
            return text
        message = [{"role": "user", "content": text}]
        return str(self._tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))

    def _encode(self, text: str) -> list[int]:
        # A chat template adds the special tokens.
        return list(self._tokenizer.encode(text, add_special_tokens=not self._chat))


def string_match_all(completion: str, answers: Sequence[str]) -> float:
    """RULER: share of the answers that occur in the completion, ignoring case."""
    return sum(answer.lower() in completion.lower() for answer in answers) / len(answers)


def exact_first_line(completion: str, answers: Sequence[str]) -> float:
    """Whether the first line equals the answer, as in `vllm-sparse needles`."""
    return float(needles.first_line(completion) in answers)


METRICS: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "string_match_all": string_match_all,
    "exact_first_line": exact_first_line,
}
"""By the names in items and result files."""


def score(item: Item, completion: str) -> float:
    """Return the score of an item's completion by the item's own metric."""
    return METRICS[item.metric](completion, item.answers)
