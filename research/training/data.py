"""Prepares training rows, held-out texts and questions as tokens, so a machine without texts can train."""

from __future__ import annotations

import ast
import base64
import json
import lzma
import random
import sysconfig
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from itertools import islice
from pathlib import Path
from typing import Any

from sparse_kernels.masked_attention import Packing

from research.real.texts import TASK_NAMES
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.eval.items import Item, Prompter
from vllm_sparse_plugin.tools.eval.ruler import TASKS, build_item
from vllm_sparse_plugin.tools.needles import MIN_CONTEXT_TOKENS, build_questions
from vllm_sparse_plugin.tools.training.data import Row

PROSE, CODE = "prose", "code"
"""Kinds of held-out texts."""
_HELD_OUT_SEED, _TRAINING_SEED = 0, 1
"""Seeds of questions. Answers are drawn, so no answer of one is in the other."""
_MANY_QUESTIONS = ("multikey", "manykeys", "multiquery")
"""Tasks with eight questions per document."""
_HELD_OUT_SHARE = 8
"""One of so many files is held out."""
_SHORTEST_DOCSTRING = 400
_NO_TEXT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "pydoc_data", "encodings"}
_LONGEST_FILE = 1 << 20
_CHARS_PER_TOKEN = 6


@dataclass(frozen=True)
class Text:
    """A held-out text."""

    kind: str
    tokens: list[int]


@dataclass(frozen=True)
class Question:
    """A held-out question."""

    task: str
    context_tokens: int
    """Maximum tokens of prompt and answer."""
    context: list[int]
    question: list[int]
    """The tokens from the question on. They are decoded."""
    answers: tuple[str, ...]
    answer_tokens: int
    """Maximum tokens of the answer."""


@dataclass(frozen=True)
class Data:
    """Everything that an arm trains on and is measured on."""

    rows: list[Row]
    """The last one is measured during training."""
    texts: list[Text]
    questions: list[Question]


@dataclass(frozen=True)
class Amounts:
    """How much of everything `prepare` writes."""

    row_tokens: int
    rows: int
    """Training rows: a quarter prose, a quarter code, half questions."""
    learned_tokens: int
    """The last tokens of a text, which are learned. A question's answers are learned."""
    contexts: tuple[int, ...]
    """Tokens of held-out questions with their answers."""
    questions: int
    """Held-out questions per task and context."""
    texts: int
    """Held-out texts per kind."""


def prepare(tokenizer: Any, amounts: Amounts, prose: str) -> Data:
    """Return the data.

    Args:
        tokenizer: of the model.
        amounts: how much.
        prose: the held-out prose.

    Raises:
        ConfigurationError: there is too little text, or a row is too short for a document with questions.
    """
    shortest = MIN_CONTEXT_TOKENS + max(map(_room_of, _MANY_QUESTIONS))
    if amounts.row_tokens < shortest:
        raise ConfigurationError(f"row_tokens: got {amounts.row_tokens}, allowed: {shortest} or more")
    prompter = Prompter(tokenizer)
    tokens, quarter = amounts.row_tokens, amounts.rows // 4
    code, held_out_code = (_pieces(prompter, _library(held_out), tokens) for held_out in (False, True))
    manuals, held_out_manuals = (_pieces(prompter, _docstrings(held_out), tokens) for held_out in (False, True))
    rows = [_text_row([piece], amounts.learned_tokens) for piece in _take(PROSE, manuals, quarter)]
    rows += [_text_row([piece], amounts.learned_tokens) for piece in _take(CODE, code, quarter)]
    rows += islice(_question_rows(prompter, tokens), amounts.rows - len(rows))
    random.Random(0).shuffle(rows)
    half = tokens // 2
    measured = [next(pieces)[:half] for pieces in (held_out_manuals, held_out_code)]
    texts = [Text(CODE, piece) for piece in _take(CODE, held_out_code, amounts.texts)]
    texts += [Text(PROSE, piece) for piece in _take(PROSE, _pieces(prompter, iter([prose]), tokens), amounts.texts)]
    asked = [
        _question(build_item(TASKS[task], task, prompter, context, index, _HELD_OUT_SEED))
        for context in amounts.contexts
        for task in TASK_NAMES
        for index in range(amounts.questions)
    ]
    return Data([*rows, _text_row(measured, amounts.learned_tokens)], texts, asked)


def _question(item: Item) -> Question:
    return Question(item.task, item.context_tokens, item.context, item.question, item.answers, item.answer_tokens)


def _library(held_out: bool) -> Iterator[str]:
    """Yield source files of the standard library in random order: those that are held out, or the others."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in root.rglob("*.py") if not _NO_TEXT & set(file.relative_to(root).parts))
    for file in _split(files, held_out):
        if file.stat().st_size <= _LONGEST_FILE:
            yield file.read_text(encoding="utf-8", errors="ignore")


def _docstrings(held_out: bool) -> Iterator[str]:
    """Yield the long docstrings of a file of an installed package, files in random order."""
    files = sorted(
        {
            Path(str(path.locate()))
            for distribution in distributions()
            for path in distribution.files or ()
            if path.suffix == ".py" and not _NO_TEXT & set(path.parts)
        }
    )
    seen = set[str]()
    for file in _split(files, held_out):
        if file.exists() and file.stat().st_size <= _LONGEST_FILE:
            found = [text for text in _long_docstrings(file) if text not in seen]
            seen.update(found)
            if found:
                yield "\n\n".join(found)


def _split(files: Sequence[Path], held_out: bool) -> list[Path]:
    shuffled = random.Random(0).sample(files, len(files))
    return [file for number, file in enumerate(shuffled) if (number % _HELD_OUT_SHARE == 0) == held_out]


def _long_docstrings(file: Path) -> list[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, RecursionError):
        return []
    defined = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, defined)]
    return [text for text in texts if text and len(text) >= _SHORTEST_DOCSTRING]


def _pieces(prompter: Prompter, texts: Iterator[str], tokens: int) -> Iterator[list[int]]:
    """Yield the texts, joined, in pieces of `tokens` tokens, each as the model begins a text."""
    begin, room = prompter.begin, list[int]()
    for text in texts:
        room += prompter.encode_plain(text + "\n\n")
        while len(room) >= tokens - len(begin):
            yield begin + room[: tokens - len(begin)]
            room = room[tokens - len(begin) :]


def _take(kind: str, pieces: Iterator[list[int]], count: int) -> list[list[int]]:
    found = list(islice(pieces, count))
    if len(found) < count:
        raise ConfigurationError(f"{kind}: got text for {len(found)} pieces, allowed: at least {count}")
    return found


def _text_row(pieces: Sequence[list[int]], learned_tokens: int) -> Row:
    prompts = tuple(len(piece) - min(learned_tokens, len(piece) // 2) for piece in pieces)
    learned = [place >= prompt for piece, prompt in zip(pieces, prompts, strict=True) for place in range(len(piece))]
    return Row([token for piece in pieces for token in piece], learned, Packing(tuple(map(len, pieces))), prompts)


def _question_rows(prompter: Prompter, tokens: int) -> Iterator[Row]:
    """Yield rows of questions without end: by turns a document with many questions, one of RULER, and two of RULER."""
    seed, number = _TRAINING_SEED, 0
    while True:
        task = _MANY_QUESTIONS[number % len(_MANY_QUESTIONS)]
        yield _answered([_many_questions(prompter, task, tokens, seed + number)])
        for context, count in ((tokens, 1), (tokens // 2, 2)):
            drawn = []
            for _ in range(count):
                name = TASK_NAMES[number % len(TASK_NAMES)]
                item = build_item(TASKS[name], name, prompter, context, number, seed)
                drawn.append((item.context, [(item.question, _completion(prompter, ", ".join(item.answers)))]))
                number += 1
            yield _answered(drawn)


_Answered = tuple[list[int], list[tuple[list[int], list[int]]]]
"""A document, and the tokens of its questions and of their answers."""


def _many_questions(prompter: Prompter, task: str, tokens: int, seed: int) -> _Answered:
    """Return a document of `tokens` tokens with its questions, one after the other."""
    questions = build_questions(_Encoder(prompter), task, tokens - _room_of(task), 8, seed)
    document = prompter.encode(questions[0].parts[0])
    asked = [(prompter.encode_plain(each.parts[1]), _completion(prompter, each.answer)) for each in questions]
    return document, asked


def _room_of(task: str) -> int:
    """Return the tokens of the further questions of a document, at most."""
    return 7 * (128 if task == "multiquery" else 64)


class _Encoder:
    """A prompter as the generator of needles takes it."""

    def __init__(self, prompter: Prompter) -> None:
        self._prompter = prompter

    def encode(self, text: str, /) -> list[int]:
        return self._prompter.encode(text)


def _completion(prompter: Prompter, answer: str) -> list[int]:
    """Return the tokens of an answer and the first id that ends it."""
    return [*prompter.encode_plain(f" {answer}"), min(prompter.end_tokens)]


def _answered(documents: Sequence[_Answered]) -> Row:
    """Return a row of documents with questions. Answers are learned."""
    tokens, learned, lengths, prompts = list[int](), list[bool](), list[int](), list[int]()
    for document, asked in documents:
        begin = len(tokens)
        tokens += document
        for question, answer in asked:
            learned += [False] * (len(tokens) + len(question) - len(learned)) + [True] * len(answer)
            tokens += question + answer
        lengths.append(len(tokens) - begin)
        prompts.append(len(document))
    return Row(tokens, learned, Packing(tuple(lengths)), tuple(prompts))


def write_data(path: Path, data: Data) -> None:
    """Write compressed JSON lines. Token ids must be below 65,536."""
    with lzma.open(path, "wt", encoding="utf-8") as file:
        for row in data.rows:
            learned = [place for place, is_learned in enumerate(row.learned) if is_learned]
            line = {"tokens": _packed(row.tokens), "learned": _packed(learned), "lengths": row.packing.lengths}
            print(json.dumps({"row": line | {"prompts": row.prompts}}), file=file)
        held_out: list[Text | Question] = [*data.texts, *data.questions]
        for each in held_out:
            name = "text" if isinstance(each, Text) else "question"
            values = {key: _packed(value) if isinstance(value, list) else value for key, value in asdict(each).items()}
            print(json.dumps({name: values}), file=file)


def read_data(path: Path) -> Data:
    """Read a file of `write_data`.

    Raises:
        ConfigurationError: the file has another format.
    """
    data = Data([], [], [])
    try:
        with lzma.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                ((kind, value),) = json.loads(line).items()
                if kind == "row":
                    data.rows.append(_row(value))
                elif kind == "text":
                    data.texts.append(Text(value["kind"], _unpacked(value["tokens"])))
                else:
                    lists = {name: _unpacked(value[name]) for name in ("context", "question")}
                    data.questions.append(Question(**value | lists | {"answers": tuple(value["answers"])}))
        return data
    except (OSError, EOFError, lzma.LZMAError, ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(f"data: got {path} ({error}), allowed: a file of `prepare`") from None


def _row(value: dict[str, Any]) -> Row:
    tokens, learned = _unpacked(value["tokens"]), set(_unpacked(value["learned"]))
    flags = [place in learned for place in range(len(tokens))]
    return Row(tokens, flags, Packing(tuple(value["lengths"])), tuple(value["prompts"]))


def _packed(numbers: list[int]) -> str:
    return base64.b64encode(array("H", numbers).tobytes()).decode()


def _unpacked(text: str) -> list[int]:
    return array("H", base64.b64decode(text)).tolist()
