"""Prepares training rows, held-out texts and questions as tokens, so a machine without texts can train."""

from __future__ import annotations

import ast
import base64
import json
import lzma
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackagePath, distributions
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

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
"""One of so many packages is held out."""
_MOST_PIECES = 4
"""Pieces of one text, at most."""
_SHORTEST_DOCSTRING = 400
_NO_TEXT = {"..", "test", "tests"}
_LONGEST_FILE = 1 << 20
_CHARS_PER_TOKEN = 6
_Group = TypeVar("_Group")


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
    """The last tokens of a text, which are learned; all but the first if a text has no more. A question's answers are
    learned."""
    decoded_tokens: int
    """The last tokens of a text that follow its prompt, at most half of the text."""
    contexts: tuple[int, ...]
    """Tokens of held-out questions with their answers."""
    questions: int
    """Held-out questions per task and context."""
    texts: int
    """Held-out texts per kind."""


def prepare(tokenizer: Any, amounts: Amounts, prose: str, books: Sequence[str] = ()) -> Data:
    """Return the data.

    Args:
        tokenizer: of the model.
        amounts: how much.
        prose: the held-out prose.
        books: prose to train on. A third of the prose rows are theirs; without books, all are docstrings.

    Raises:
        ConfigurationError: there is too little text, or a row is too short for a document with questions.
    """
    shortest = MIN_CONTEXT_TOKENS + max(map(_room_of, _MANY_QUESTIONS))
    if amounts.row_tokens < shortest:
        raise ConfigurationError(f"row_tokens: got {amounts.row_tokens}, allowed: {shortest} or more")
    prompter = Prompter(tokenizer)
    tokens, quarter = amounts.row_tokens, amounts.rows // 4
    chars = _MOST_PIECES * tokens * _CHARS_PER_TOKEN
    code, held_out_code, manuals, held_out_manuals = (
        _pieces(prompter, texts(held_out, chars), tokens)
        for texts in (_sources, _docstrings)
        for held_out in (False, True)
    )
    from_books = quarter // 3 if books else 0
    told = [
        *_take(PROSE, manuals, quarter - from_books),
        *_take("books", _pieces(prompter, iter(books), tokens, from_books), from_books),
        *_take(CODE, code, quarter),
    ]
    rows = [_text_row([piece], amounts.learned_tokens, amounts.decoded_tokens) for piece in told]
    rows += islice(_question_rows(prompter, tokens), amounts.rows - len(rows))
    random.Random(0).shuffle(rows)
    half = tokens // 2
    measured = [next(pieces)[:half] for pieces in (held_out_manuals, held_out_code)]
    texts = [Text(CODE, piece) for piece in _take(CODE, held_out_code, amounts.texts)]
    stories = _pieces(prompter, iter([prose]), tokens, amounts.texts)
    texts += [Text(PROSE, piece) for piece in _take(PROSE, stories, amounts.texts)]
    asked = [
        _question(build_item(TASKS[task], task, prompter, context, index, _HELD_OUT_SEED))
        for context in amounts.contexts
        for task in TASK_NAMES
        for index in range(amounts.questions)
    ]
    return Data([*rows, _text_row(measured, amounts.decoded_tokens, amounts.decoded_tokens)], texts, asked)


def _question(item: Item) -> Question:
    return Question(item.task, item.context_tokens, item.context, item.question, item.answers, item.answer_tokens)


def _sources(held_out: bool, chars: int) -> Iterator[str]:
    """Yield the source of a folder of an installed package, its files in order, folders in random order.

    Args:
        held_out: whether to yield the held-out folders, or the others.
        chars: a text ends with the file that reaches so many characters.
    """
    for files in _split(_installed(lambda path: str(path.parent)), held_out):
        yield _joined((file.read_text(encoding="utf-8", errors="ignore") for file in files), chars)


def _docstrings(held_out: bool, chars: int) -> Iterator[str]:
    """Yield the long docstrings of an installed package, its files in order, packages in random order. See `_sources`.

    A docstring that several places have is in one text, once.
    """
    seen = set[str]()

    def unseen(files: Iterable[Path]) -> Iterator[str]:
        for text in (text for file in files for text in _long_docstrings(file)):
            if text not in seen:
                seen.add(text)
                yield text

    for files in _split(_installed(lambda path: path.parts[0]), held_out):
        yield _joined(unseen(files), chars)


def _joined(parts: Iterator[str], chars: int) -> str:
    found, size = list[str](), 0
    while size < chars and (part := next(parts, None)) is not None:
        found.append(part)
        size += len(part)
    return "\n\n".join(found)


def _installed(group: Callable[[PackagePath], str]) -> list[list[Path]]:
    """Return the source files of all installed packages by group, sorted."""
    groups: dict[str, set[Path]] = {}
    for distribution in distributions():
        for path in distribution.files or ():
            if path.suffix == ".py" and not _NO_TEXT & set(path.parts):
                groups.setdefault(group(path), set()).add(Path(str(path.locate())))
    return [sorted(filter(_is_source, groups[name])) for name in sorted(groups)]


def _is_source(file: Path) -> bool:
    return file.exists() and file.stat().st_size <= _LONGEST_FILE


def _split(groups: Sequence[_Group], held_out: bool) -> list[_Group]:
    shuffled = random.Random(0).sample(groups, len(groups))
    return [group for number, group in enumerate(shuffled) if (number % _HELD_OUT_SHARE == 0) == held_out]


def _long_docstrings(file: Path) -> list[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, RecursionError):
        return []
    defined = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, defined)]
    return [text for text in texts if text and len(text) >= _SHORTEST_DOCSTRING]


def _pieces(prompter: Prompter, texts: Iterator[str], tokens: int, most: int = _MOST_PIECES) -> Iterator[list[int]]:
    """Yield pieces of `tokens` tokens, each of one text and as the model begins a text.

    Args:
        prompter: of the model.
        texts: a text gives no piece if it is too short.
        tokens: of a piece.
        most: pieces of one text.
    """
    begin = prompter.begin
    step = tokens - len(begin)
    for text in texts:
        ids = prompter.encode_plain(text)
        for first in range(0, min(len(ids) - step + 1, most * step), step):
            yield begin + ids[first : first + step]


def _take(kind: str, pieces: Iterator[list[int]], count: int) -> list[list[int]]:
    found = list(islice(pieces, count))
    if len(found) < count:
        raise ConfigurationError(f"{kind}: got text for {len(found)} pieces, allowed: at least {count}")
    return found


def _text_row(pieces: Sequence[list[int]], learned_tokens: int, decoded_tokens: int) -> Row:
    prompts = tuple(len(piece) - min(decoded_tokens, len(piece) // 2) for piece in pieces)
    learned = [place >= max(len(piece) - learned_tokens, 1) for piece in pieces for place in range(len(piece))]
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


def joined(parts: Sequence[Data], questions: int) -> Data:
    """Return the rows of all parts, the texts of the first, and the first `questions` of each task and context.

    The row that is measured during training is that of the first part.
    """
    asked: dict[tuple[str, int], list[Question]] = {}
    for question in (question for part in parts for question in part.questions):
        asked.setdefault((question.task, question.context_tokens), []).append(question)
    rows = [row for part in parts for row in part.rows[:-1]]
    chosen = [question for some in asked.values() for question in some[:questions]]
    return Data([*rows, parts[0].rows[-1]], parts[0].texts, chosen)


def _row(value: dict[str, Any]) -> Row:
    tokens, learned = _unpacked(value["tokens"]), set(_unpacked(value["learned"]))
    flags = [place in learned for place in range(len(tokens))]
    return Row(tokens, flags, Packing(tuple(value["lengths"])), tuple(value["prompts"]))


def _packed(numbers: list[int]) -> str:
    return base64.b64encode(array("H", numbers).tobytes()).decode()


def _unpacked(text: str) -> list[int]:
    return array("H", base64.b64decode(text)).tolist()
