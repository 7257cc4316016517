"""Retrieval questions over long code, in the formats that `needle-8m` was trained on.

A document is source code of the running interpreter's standard library, with needles on separate lines. The needles
that are asked for are spread evenly over the document. None is in the last `TAIL_TOKENS` tokens, so a model that reads
only the newest tokens cannot answer.
"""

import importlib.util
import random
import uuid
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from vllm_sparse_plugin.errors import ConfigurationError, expect_known

TASKS = ("single", "multikey", "manykeys", "multiquery", "kv")
"""Code with 1, 16 or 64 needles, three needles per question, and key-value pairs."""
STRESS_TASKS = ("denseneedle",)
"""Only needles: hundreds of similar ones, more than a small budget can distinguish."""
ALL_TASKS = (*TASKS, *STRESS_TASKS)
QUICK_TASKS = ("multikey", "manykeys", "multiquery", "kv")
"""Tasks with several questions per document. Prefix caching lets a server read a document once."""
MIN_CONTEXT_TOKENS = 4096
QUESTIONS_PER_DOCUMENT = 8
TAIL_TOKENS = 768

_NEEDLES_PER_DOCUMENT = {"single": 1, "multikey": 16, "manykeys": 64, "multiquery": 24, "kv": 16}
_DENSENEEDLE_CHARS = 58  # one needle: two words of six letters and seven digits
_KEYS_PER_QUESTION = 3
_MAX_CHARS_PER_TOKEN = 6
# fmt: off
_MODULES = (
    "argparse", "ast", "asyncio.base_events", "bdb", "calendar", "collections", "configparser", "csv",
    "dataclasses", "_pydecimal", "difflib", "dis", "doctest", "email.message", "enum", "fractions", "ftplib",
    "functools", "gettext", "gzip", "heapq", "html.parser", "http.client", "http.cookiejar", "http.server",
    "imaplib", "inspect", "ipaddress", "json.decoder", "locale", "logging", "mailbox", "mimetypes", "optparse",
    "pdb", "pickle", "pickletools", "platform", "plistlib", "pprint", "pydoc", "random", "shutil", "smtplib",
    "socketserver", "ssl", "statistics", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "tokenize",
    "traceback", "typing", "unittest.mock", "urllib.parse", "urllib.request", "uuid", "weakref", "xml.dom.minidom",
    "zipfile",
)
# fmt: on


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that this module uses."""

    def encode(self, text: str, /) -> list[int]:
        """Return the token ids of `text`, including the special tokens that a server adds to a prompt."""
        ...


@dataclass(frozen=True)
class Question:
    """One prompt with its only right answer.

    `context_tokens` is the size that prompt and answer fill together. `prompt` lacks the leading `<|bos|>`, which the
    tokenizer adds. `answer` has no surrounding whitespace.
    """

    task: str
    context_tokens: int
    prompt: str
    answer: str

    @property
    def parts(self) -> tuple[str, str]:
        """The document, and the question: the last line with the line break before it."""
        end = self.prompt.rindex("\n")
        return self.prompt[:end], self.prompt[end:]


@dataclass(frozen=True)
class Needle:
    """A key, its value, and the line that states both."""

    key: str
    value: str
    text: str


def answer_tokens(task: str) -> int:
    """Return the number of tokens for the answer of a question of `task`, `<|eos|>` included."""
    return 32 if task == "multiquery" else 16


def check_contexts(contexts: Sequence[int], longest: int | None = None) -> None:
    """Refuse contexts in tokens that no document can have, or that are longer than the model's longest.

    Raises:
        ConfigurationError: for a context below `MIN_CONTEXT_TOKENS` or above `longest`.
    """
    allowed = (
        f"{MIN_CONTEXT_TOKENS} or more" if longest is None else f"from {MIN_CONTEXT_TOKENS} to the model's {longest}"
    )
    for tokens in contexts:
        if tokens < MIN_CONTEXT_TOKENS or (longest is not None and tokens > longest):
            raise ConfigurationError(f"context: got {tokens} tokens, allowed: {allowed}")


def check_questions(tasks: Sequence[str], contexts: Sequence[int], count: int, longest: int | None = None) -> None:
    """Refuse arguments that `build_questions` cannot handle, and contexts longer than the model's longest.

    Raises:
        ConfigurationError: for an unknown task, a context that `check_contexts` refuses, or a count below 1.
    """
    expect_known("task", tasks, ALL_TASKS)
    check_contexts(contexts, longest)
    if count < 1:
        raise ConfigurationError(f"questions: got {count}, allowed: 1 or more")


def build_questions(tokenizer: Tokenizer, task: str, context_tokens: int, count: int, seed: int) -> list[Question]:
    """Return `count` questions of `task`, equal for equal arguments and interpreter version.

    Prompt, `<|bos|>` and answer have at most `context_tokens` tokens. The prompt alone has at least 98 % of them.
    Questions about one document are consecutive and differ only in their last line, so a server with prefix caching
    reads a document once. A document of `single` has one needle and one question.

    Raises:
        ConfigurationError: for an unknown task, a context below `MIN_CONTEXT_TOKENS` or a count below 1.
    """
    check_questions([task], [context_tokens], count)

    rng = random.Random(f"{seed} {task} {context_tokens}")
    per_document = 1 if task == "single" else QUESTIONS_PER_DOCUMENT
    start = rng.randrange(len(_library_source()))
    asked_share = 1 - TAIL_TOKENS / context_tokens
    limit = context_tokens - answer_tokens(task)
    size = context_tokens * _MAX_CHARS_PER_TOKEN

    questions: list[Question] = []
    for first in range(0, count, per_document):
        in_document = min(per_document, count - first)
        if task == "denseneedle":
            needles = magic_needles(rng, size // _DENSENEEDLE_CHARS)
            haystack = "".join(needle.text for needle in needles)
            placed = []
        else:
            needles = (kv_needles if task == "kv" else magic_needles)(rng, _NEEDLES_PER_DOCUMENT[task])
            haystack = library_text(start + first * size, size)
            depths = (
                [(i + 0.5) / len(needles) for i in range(len(needles))] if task != "single" else [(first + 0.5) / count]
            )
            placed = [(depth * asked_share, needle.text) for depth, needle in zip(depths, needles, strict=True)]
        longest = max((ask(task, needles, i)[0] for i in range(len(needles))), key=lambda q: len(tokenizer.encode(q)))
        document = _longest_document(tokenizer, haystack, placed, longest, limit)
        if task == "denseneedle":
            # Cut between needles: the model does not end its answer after half a needle.
            ends = list(accumulate(len(needle.text) for needle in needles))
            document = document[: ends[bisect_right(ends, len(document)) - 1]]
            needles = needles[: bisect_right(ends, len(document) * asked_share)]
        for i in range(in_document):
            question, answer = ask(task, needles, int((i + 0.5) * len(needles) / in_document))
            questions.append(Question(task, context_tokens, document + question, answer))
    return questions


def is_correct(question: Question, completion: str) -> bool:
    """Return whether the first line of `completion`, stripped of whitespace, is exactly the answer."""
    return first_line(completion) == question.answer


def first_line(completion: str) -> str:
    """Return the first line that is not empty, stripped of whitespace."""
    return completion.strip().split("\n", 1)[0].strip()


def longest_fit(largest: int, tokens: Callable[[int], int], limit: int) -> int:
    """Return the largest size from 0 to `largest` with at most `limit` tokens; 0 if there is none."""
    return bisect_right(range(1, largest + 1), False, key=lambda size: tokens(size) > limit)


def ask(task: str, needles: list[Needle], index: int) -> tuple[str, str]:
    """Return the text of the question for needle `index` and its answer."""
    if task == "kv":
        return f'\nKey "{needles[index].key}" has the value:', needles[index].value
    if task == "multiquery":
        # A third of the needles lies between two of the needles asked for, so every question spans the document.
        third = len(needles) // _KEYS_PER_QUESTION
        chosen = [needles[(index + i * third) % len(needles)] for i in range(_KEYS_PER_QUESTION)]
        keys = ", ".join(needle.key for needle in chosen)
        return f"\nWhat are the special magic numbers for {keys}? Answer:", ", ".join(needle.value for needle in chosen)
    return f"\nWhat is the special magic number for {needles[index].key}? Answer:", needles[index].value


def made_up_word(rng: random.Random) -> str:
    """Return a word of three syllables that most likely exists in no language."""
    return "".join(rng.choice("bdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(3))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


_KEYS: dict[str, Callable[[random.Random], str]] = {
    "words": lambda rng: f"{made_up_word(rng)} {made_up_word(rng)}",
    "uuid": _uuid,
}
_VALUES: dict[str, Callable[[random.Random], str]] = {
    "number": lambda rng: str(rng.randrange(1_000_000, 10_000_000)),
    "uuid": _uuid,
}


def magic_needles(
    rng: random.Random, count: int, keys: str = "words", values: str = "number", values_per_key: int = 1
) -> list[Needle]:
    """Return needles of `count` keys (words or uuid) with values (number or uuid), grouped by key."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[_KEYS[keys](rng)] = None
    pairs = [(key, _VALUES[values](rng)) for key in drawn for _ in range(values_per_key)]
    return [Needle(key, value, f"\nThe special magic {values} for {key} is: {value}.\n") for key, value in pairs]


def kv_needles(rng: random.Random, count: int) -> list[Needle]:
    """Return `count` pairs of keys and values of eight hexadecimal digits."""
    pairs = [(f"{rng.getrandbits(32):08x}", f"{rng.getrandbits(32):08x}") for _ in range(count)]
    return [Needle(key, value, f'\n"{key}": "{value}",\n') for key, value in pairs]


def with_needles(code: str, placed: list[tuple[float, str]]) -> str:
    """Return `code` with each needle in place of the line break at or before its depth (0 to 1, ascending)."""
    parts = []
    begin = 0
    for depth, text in placed:
        end = max(code.rfind("\n", 0, int(depth * len(code))), begin)
        parts += [code[begin:end], text]
        begin = min(end + 1, len(code))
    return "".join([*parts, code[begin:]])


def _longest_document(
    tokenizer: Tokenizer, haystack: str, placed: list[tuple[float, str]], question: str, limit: int
) -> str:
    """Return the longest start of `haystack`, with needles, that has at most `limit` tokens with `question`."""

    def tokens(size: int) -> int:
        return len(tokenizer.encode(with_needles(haystack[:size], placed) + question))

    return with_needles(haystack[: longest_fit(len(haystack), tokens, limit)], placed)


@cache
def _library_source() -> str:
    sources = []
    for name in _MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise RuntimeError(f"the interpreter has no source of the standard library's module {name}")
        sources.append(Path(spec.origin).read_text(encoding="utf-8"))
    return "".join(sources)


def library_text(start: int, size: int) -> str:
    """Return `size` characters of the library's source from the first whole line after `start`, with wrap-around."""
    source = _library_source()
    begin = source.find("\n", start % len(source)) + 1
    repeats = 1 + (begin + size) // len(source)
    return (source * repeats)[begin : begin + size]
