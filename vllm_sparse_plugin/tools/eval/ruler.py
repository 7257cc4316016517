"""Generators of RULER's eleven tasks that need no file (arXiv 2404.06654), in the words that needle-8m was trained on.

Sizes, counts, answer lengths and scoring are RULER's. The haystack is source code of the standard library instead of
essays. A task draws its random parts and returns a function that writes the prompt at any size. This makes prompts as
long as allowed.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.eval.items import Item, Prompter
from vllm_sparse_plugin.tools.needles import library_text, longest_fit, made_up_word, magic_needles, with_needles

_NOISE = "The river runs past the mill. Rain falls on the hills. A cart waits at the gate. So the day goes on.\n"
_CHARS_PER_TOKEN = 8
_FEWEST_TOKENS_PER_NEEDLE = 8
_FEWEST_TOKENS_PER_WORD = 2
_HOPS = 4
_COMMON_WORDS, _COMMON_COUNT, _UNCOMMON_COUNT = 10, 30, 3
_TOKENS_PER_CODED_WORD = 50
_ANSWER = " Answer:"
METRIC = "string_match_all"
"""Metric of every task."""


@dataclass(frozen=True)
class Draft:
    """A prompt at one size."""

    context: str
    question: str
    answers: tuple[str, ...]
    prefix: str = _ANSWER
    """Beginning of the model's answer."""


@dataclass(frozen=True)
class Drawn:
    """The random parts of a prompt."""

    write: Callable[[int], Draft]
    """Writes the prompt at a size of 1 or more. A larger size gives a longer prompt."""
    largest: int


@dataclass(frozen=True)
class Task:
    """One of the tasks."""

    draw: Callable[[random.Random, int], Drawn]
    """Takes the random generator and the context in tokens."""
    answer_tokens: int


def build_item(task: Task, name: str, prompter: Prompter, context_tokens: int, index: int, seed: int) -> Item:
    """Return question `index` of a task, as long as prompt and answer fit in `context_tokens`.

    Raises:
        ConfigurationError: the context is too small for the task.
    """
    drawn = task.draw(random.Random(f"{seed} {name} {context_tokens} {index}"), context_tokens)

    def tokens(size: int) -> int:
        draft = drawn.write(size)
        return len(prompter.encode(draft.context + draft.question, draft.prefix))

    limit = context_tokens - task.answer_tokens
    size = longest_fit(drawn.largest, tokens, limit)
    if size == 0:
        raise ConfigurationError(f"context: got {context_tokens} tokens, allowed: more for the task {name}")
    draft = drawn.write(size)
    context, question = prompter.split(draft.context, draft.question, draft.prefix)
    return Item(
        id=f"{name}/{context_tokens}/{index}",
        task=name,
        context_tokens=context_tokens,
        context=context,
        question=question,
        answers=draft.answers,
        answer_tokens=task.answer_tokens,
        metric=METRIC,
    )


def _needles_in_text(
    rng: random.Random,
    context_tokens: int,
    *,
    noise: bool = False,
    keys: int = 1,
    values_per_key: int = 1,
    asked: int = 1,
    values: str = "number",
) -> Drawn:
    """Needles at random depths of a text. The question asks for all values of some keys."""
    size = context_tokens * _CHARS_PER_TOKEN
    text = _noise(size) if noise else library_text(rng.randrange(1 << 30), size)
    needles = magic_needles(rng, keys, values=values, values_per_key=values_per_key)
    order = rng.sample(needles, len(needles))
    placed = sorted((rng.random(), needle.text) for needle in order)
    wanted = rng.sample(list(dict.fromkeys(needle.key for needle in needles)), asked)
    answers = tuple(needle.value for key in wanted for needle in needles if needle.key == key)
    question = _magic_question(wanted, values, values_per_key)

    def write(size: int) -> Draft:
        return Draft(_magic_header(values) + with_needles(text[:size], placed), question, answers)

    return Drawn(write, size)


def _needles_only(rng: random.Random, context_tokens: int, *, keys: str = "words", values: str = "number") -> Drawn:
    """Only needles. The question asks for one of them."""
    needles = magic_needles(rng, context_tokens // _FEWEST_TOKENS_PER_NEEDLE, keys, values)
    depth = rng.random()

    def write(size: int) -> Draft:
        wanted = needles[int(depth * size)]
        text = "".join(needle.text for needle in needles[:size])
        return Draft(_magic_header(values) + text, _magic_question([wanted.key], values, 1), (wanted.value,))

    return Drawn(write, len(needles))


def _variable_tracking(rng: random.Random, context_tokens: int) -> Drawn:
    """A chain of assignments spread over a text. The question asks for all variables with the first one's value."""
    size = context_tokens * _CHARS_PER_TOKEN
    text = _noise(size)
    variables = _distinct(rng, _variable, 2 * (_HOPS + 1))
    example, names = variables[: _HOPS + 1], variables[_HOPS + 1 :]
    value = str(rng.randrange(20_000, 100_000))
    placed = list(zip(sorted(rng.random() for _ in names), _assignments(names, value), strict=True))
    shown = "".join(_assignments(example, "12345")) + f"{_variable_question('12345')}{_ANSWER} {', '.join(example)}\n\n"

    def write(size: int) -> Draft:
        return Draft(shown + with_needles(text[:size], placed), _variable_question(value), tuple(names))

    return Drawn(write, size)


def _common_words(rng: random.Random, context_tokens: int) -> Drawn:
    """A numbered list of words. Ten words are ten times as common as the others."""
    most = context_tokens // (_UNCOMMON_COUNT * _FEWEST_TOKENS_PER_WORD)
    words = _distinct(rng, made_up_word, 3 * _COMMON_WORDS + most)
    common, example, rare, uncommon = (words[i * _COMMON_WORDS :][: _COMMON_WORDS if i < 3 else None] for i in range(4))
    order = rng.getrandbits(64)
    question = f"\nWhat are the {_COMMON_WORDS} most common words in the list?"
    shown = _word_list(example * _UNCOMMON_COUNT + rare, order) + f"{question}{_ANSWER} {_numbered(example)}\n\n"

    def write(size: int) -> Draft:
        listed = common * _COMMON_COUNT + uncommon[:size] * _UNCOMMON_COUNT
        return Draft(shown + _word_list(listed, order), question, tuple(common))

    return Drawn(write, len(uncommon))


def _frequent_words(rng: random.Random, context_tokens: int) -> Drawn:
    """Coded words whose counts fall with the square of their rank. The first is noise, the next three are asked for."""
    words = ["...", *_distinct(rng, made_up_word, context_tokens // _TOKENS_PER_CODED_WORD)]
    weights = [rank**-2 for rank in range(1, len(words) + 1)]
    order = rng.getrandbits(64)
    question = "\nWhat are the three most frequent words in the coded text, apart from the dots?"

    def write(size: int) -> Draft:
        counts = [int(size * weight / sum(weights)) for weight in weights]
        coded = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
        random.Random(order).shuffle(coded)
        return Draft(f"Read the coded text.\n{' '.join(coded)}\n", question, tuple(words[1:4]))

    return Drawn(write, context_tokens)


TASKS: dict[str, Task] = {
    "niah_single_1": Task(partial(_needles_in_text, noise=True), 128),
    "niah_single_2": Task(_needles_in_text, 128),
    "niah_single_3": Task(partial(_needles_in_text, values="uuid"), 128),
    "niah_multikey_1": Task(partial(_needles_in_text, keys=4), 128),
    "niah_multikey_2": Task(_needles_only, 128),
    "niah_multikey_3": Task(partial(_needles_only, keys="uuid", values="uuid"), 128),
    "niah_multivalue": Task(partial(_needles_in_text, values_per_key=4), 128),
    "niah_multiquery": Task(partial(_needles_in_text, keys=4, asked=4), 128),
    "vt": Task(_variable_tracking, 30),
    "cwe": Task(_common_words, 120),
    "fwe": Task(_frequent_words, 50),
}
"""Tasks by name."""


def _noise(size: int) -> str:
    return (_NOISE * (size // len(_NOISE) + 1))[:size]


def _magic_header(values: str) -> str:
    return f"Remember every special magic {values} in the following text.\n\n"


def _magic_question(keys: list[str], values: str, values_per_key: int) -> str:
    if values_per_key > 1:
        return f"\nWhat are all the special magic {values}s for {', '.join(keys)}?"
    if len(keys) > 1:
        return f"\nWhat are the special magic {values}s for {', '.join(keys)}?"
    return f"\nWhat is the special magic {values} for {keys[0]}?"


def _variable(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_uppercase, k=4))


def _assignments(names: list[str], value: str) -> list[str]:
    later = [f"\nVAR {name} = VAR {before}\n" for before, name in pairwise(names)]
    return [f"\nVAR {names[0]} = {value}\n", *later]


def _variable_question(value: str) -> str:
    return f"\nFind all variables that are assigned the value {value}."


def _distinct(rng: random.Random, draw: Callable[[random.Random], str], count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(rng)] = None
    return list(found)


def _word_list(words: list[str], order: int) -> str:
    shuffled = random.Random(order).sample(words, len(words))
    return f"Some words of this list are more common than others.\n{_numbered(shuffled)}"


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
