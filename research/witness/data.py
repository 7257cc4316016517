"""What the witness is trained on: text of this interpreter's environment, and documents with questions."""

from __future__ import annotations

import hashlib
import os
import random
import site
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.common.models import NEEDLE_8M
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.needles import Needle, ask, kv_needles, magic_needles, with_needles

TEXT, DOCUMENT, ANSWER = range(3)
"""Where a token that is to be predicted comes from; an answer ends with `<|eos|>`."""
SOURCES = ("text", "document", "answer")
BOS, EOS = 0, 1
TRAINED_TASKS = ("mixed", "multikey", "kv")
ASKED_TASKS = ("single", "multikey", "kv")
TOGETHER = {"multiquery": 3}
"""Needles that are asked for at once, where that is more than one."""
MIN_TEXT_BYTES = 1_000_000

_SUFFIXES = (".py", ".rst", ".md", ".txt")
_SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>")
_HELD_OUT = 0.02
_FILE_BYTES = range(256, 2_000_000)
_LONGEST_LINE = 1000
_READERS = 32
_READ_AT_ONCE = 512
_FULL = 0.99  # of the limit: the next file may be larger than what is left
_CHUNK_CHARS = 1 << 18
_TASK_TOKENS = 1 << 18
# Of source code and its documentation: the usual number, and one that hardly any stretch exceeds.
_CHARS_PER_TOKEN, _MAX_CHARS_PER_TOKEN = 3, 5
_MOST_QUESTIONS = 12
_PROBE_SECONDS = 60

Tokens = npt.NDArray[np.uint16]
Kinds = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Corpus:
    """Text, in two parts that share no file."""

    files: list[str]
    """Those to train on, in an order that says nothing."""
    held_out: str
    """What is kept for measuring."""

    @property
    def digest(self) -> str:
        """Of the part that is held out: two environments with the same one hold out the same text."""
        return hashlib.sha256(self.held_out.encode()).hexdigest()[:16]


def installed_text() -> list[Path]:
    """The folders of this interpreter's standard library and packages."""
    named = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    # An environment may see the packages of another.
    others = [*map(Path, site.getsitepackages()), Path(np.__file__).parents[1]]
    return [folder for folder in dict.fromkeys([*named, *others]) if folder.is_dir()]


def collect_text(roots: Sequence[Path], limit: int, seed: int) -> Corpus:
    """Read source code and documentation, the same for the same folders and arguments.

    Args:
        roots: folders to look in.
        limit: bytes to read at most.
        seed: of the order of the files; those that come last are held out.

    Raises:
        ConfigurationError: for a folder that is not there, or too little text in all of them.
    """
    found: dict[Path, None] = {}
    for root in roots:
        if not root.is_dir():
            raise ConfigurationError(f"text: got {str(root)!r}, allowed: folders")
        for folder, subfolders, names in os.walk(root):
            subfolders.sort()
            found.update(dict.fromkeys(Path(folder, name) for name in sorted(names) if name.endswith(_SUFFIXES)))
    paths = list(found)
    random.Random(seed).shuffle(paths)
    files: list[str] = []
    seen: set[str] = set()
    size = 0
    # Threads, as small files on a slow disk are read one round trip after the other.
    with ThreadPoolExecutor(_READERS) as readers:
        for begin in range(0, len(paths), _READ_AT_ONCE):
            for text in readers.map(_read, paths[begin : begin + _READ_AT_ONCE]):
                bytes_more = len(text.encode())
                if text and text not in seen and size + bytes_more <= limit:
                    seen.add(text)
                    files.append(text)
                    size += bytes_more
            if size >= _FULL * limit:
                break
    if size < MIN_TEXT_BYTES:
        raise ConfigurationError(
            f"text: got {size} bytes in files of {', '.join(_SUFFIXES)}, allowed: {MIN_TEXT_BYTES} or more"
        )
    held_out: list[str] = []
    while sum(map(len, held_out)) < _HELD_OUT * size:
        held_out.append(files.pop())
    return Corpus(files, "".join(held_out))


def _read(path: Path) -> str:
    """A file's text, empty if it is none to learn from."""
    try:
        data = path.read_bytes()
        if len(data) not in _FILE_BYTES:
            return ""
        text = data.decode().replace("\r\n", "\n").rstrip() + "\n"
    except (OSError, ValueError):
        return ""
    # A sequence has one <|bos|>: a file that spells it would be tokenised to another.
    if any(token in text for token in _SPECIAL) or max(map(len, text.split("\n"))) > _LONGEST_LINE:
        return ""
    return text


def open_workers(processes: int) -> Executor:
    """Processes that tokenise; threads where processes cannot be started or one is enough."""
    if processes > 1:
        pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
        try:
            pool.submit(os.getpid).result(timeout=_PROBE_SECONDS)
            return pool
        except (OSError, ImportError, BrokenProcessPool, TimeoutError) as error:
            print(f"no worker processes ({error!r}): threads tokenise instead", flush=True)
            pool.shutdown(wait=False, cancel_futures=True)
    return ThreadPoolExecutor(processes)


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(NEEDLE_8M / "tokenizer.json"))


def encode(text: str) -> list[int]:
    """The ids of a text, without `<|bos|>`."""
    ids: list[int] = _tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def _encode_chunk(text: str) -> Tokens:
    return np.array(encode(text), dtype=np.uint16)


def encode_files(files: Sequence[str], workers: Executor) -> Tokens:
    """The ids of all files, one after the other: `[num_tokens]`."""
    return np.concatenate(list(workers.map(_encode_chunk, _chunks(files))))


def _chunks(files: Sequence[str]) -> Iterator[str]:
    chunk: list[str] = []
    for text in files:
        chunk.append(text)
        if sum(map(len, chunk)) >= _CHUNK_CHARS:
            yield "".join(chunk)
            chunk = []
    if chunk:
        yield "".join(chunk)


def stretches(stream: Tokens, length: int, count: int, rng: np.random.Generator) -> Tokens:
    """Contiguous parts of a text, each after `<|bos|>`: `[count, length]`."""
    starts = rng.integers(0, len(stream) - length + 2, size=(count, 1))
    rows = np.full((count, length), BOS, dtype=np.uint16)
    rows[:, 1:] = stream[starts + np.arange(length - 1)]
    return rows


class Document(NamedTuple):
    """A text with needles, and questions about them with their answers."""

    tokens: list[int]
    kinds: list[int]
    """`DOCUMENT` or `ANSWER` for each token."""


def build_document(rng: random.Random, text: str, length: int, task: str, questions: int) -> Document | None:
    """A document of exactly `length` tokens, the first of them `<|bos|>`.

    Args:
        rng: draws needles, where they are and which are asked for.
        text: without needles, of more than `length` tokens; what is too much of its beginning is left out.
        length: in tokens.
        task: of `TRAINED_TASKS`, `ASKED_TASKS` or `TOGETHER`.
        questions: at most; each asks for other needles.

    Returns:
        None if the text is too short, or no needle is left.
    """
    needles = _draw_needles(rng, task, length)
    begin = max(0.0, 1 - _CHARS_PER_TOKEN * length / len(text))
    depths = sorted(rng.uniform(begin, 1) for _ in needles)
    placed = [(depth, needle.text) for depth, (_, needle) in zip(depths, needles, strict=True)]
    # Ends before whitespace, so that a question is tokenised as it is after any document.
    document = with_needles(text, placed).rstrip()
    together = TOGETHER.get(task, 1)
    asked = rng.sample(needles, min(questions, len(needles) // together) * together)
    groups = [asked[i : i + together] for i in range(0, len(asked), together)]
    rounds = list(map(_question, groups))
    encoding = _tokenizer().encode(document, add_special_tokens=False)
    room = length - 1 - sum(len(question) + len(answer) for question, answer in rounds)
    if room <= 0 or len(encoding.ids) < room:
        return None
    first = encoding.offsets[len(encoding.ids) - room][0]
    kept = [all(document.find(needle.text.rstrip()) >= first for _, needle in group) for group in groups]
    if not any(kept):
        return None
    rounds = [each for each, inside in zip(rounds, kept, strict=True) if inside]
    # The room of a question that cannot be asked goes to the text.
    room = length - 1 - sum(len(question) + len(answer) for question, answer in rounds)
    if len(encoding.ids) < room:
        return None
    tokens = [BOS, *encoding.ids[-room:]]
    kinds = [DOCUMENT] * len(tokens)
    for question, answer in rounds:
        tokens += question + answer
        kinds += [DOCUMENT] * len(question) + [ANSWER] * len(answer)
    return Document(tokens, kinds)


def _draw_needles(rng: random.Random, task: str, length: int) -> list[tuple[str, Needle]]:
    """Needles with the name of their question's form, in the order in which they are placed."""
    most = max(4, min(64, length // 64))
    count = 1 if task == "single" else rng.randint(4, most)
    pairs = count if task == "kv" else count // 2 if task == "mixed" else 0
    needles = [("kv", needle) for needle in kv_needles(rng, pairs)]
    needles += [("single", needle) for needle in magic_needles(rng, count - pairs)]
    rng.shuffle(needles)
    return needles


def _question(group: list[tuple[str, Needle]]) -> tuple[list[int], list[int]]:
    form = "multiquery" if len(group) > 1 else group[0][0]
    question, answer = ask(form, [needle for _, needle in group], 0)
    return encode(question), [*encode(f" {answer}"), EOS]


def cut(text: str, start: int, length: int) -> str:
    """Text for a document of `length` tokens, from `start` on and going round."""
    size = _MAX_CHARS_PER_TOKEN * length
    begin = start % len(text)
    return (text * (1 + (begin + size) // len(text)))[begin : begin + size]


class _Task(NamedTuple):
    """Documents that a worker writes."""

    text: str
    length: int
    documents: int
    seed: str


def _build_documents(task: _Task) -> tuple[Tokens, Kinds]:
    """Tokens and kinds, each `[num_documents, length]`; texts that are too short give no document."""
    rng = random.Random(task.seed)
    size = len(task.text) // task.documents
    most = max(1, min(_MOST_QUESTIONS, task.length // 128))
    written = [
        build_document(
            rng, task.text[i * size : (i + 1) * size], task.length, rng.choice(TRAINED_TASKS),
            rng.randint(min(4, most), most),
        )
        for i in range(task.documents)
    ]  # fmt: skip
    found = [document for document in written if document is not None]
    shape = (len(found), task.length)
    return (
        np.array([document.tokens for document in found], dtype=np.uint16).reshape(shape),
        np.array([document.kinds for document in found], dtype=np.uint8).reshape(shape),
    )


class DocumentPool:
    """Documents of several lengths, written in the background; they are used again when none is new."""

    def __init__(self, files: Sequence[str], lengths: Sequence[int], tokens: int, seed: int, workers: Executor) -> None:
        """Order the documents.

        Args:
            files: texts to put needles into.
            lengths: in tokens, in the order in which they will be needed.
            tokens: of the documents of each length.
            seed: of needles and of the places in the text.
            workers: see `open_workers`.
        """
        text = "".join(files)
        rng = random.Random(f"{seed} documents")
        self._pending: dict[int, set[Future[tuple[Tokens, Kinds]]]] = {}
        self._ready: dict[int, list[tuple[Tokens, Kinds]]] = {length: [] for length in lengths}
        self._next = dict.fromkeys(lengths, 0)
        for length in lengths:
            count = max(1, min(_TASK_TOKENS, tokens) // length)
            tasks = [
                _Task(cut(text, rng.randrange(len(text)), count * length), length, count, f"{seed} {length} {i}")
                for i in range(max(1, tokens // (count * length)))
            ]
            self._pending[length] = {workers.submit(_build_documents, task) for task in tasks}

    def take(self, length: int, count: int) -> tuple[Tokens, Kinds]:
        """Tokens and kinds of `count` documents, each `[count, length]`; waits only for the first of a length.

        Raises:
            RuntimeError: if no document of this length could be written.
        """
        ready = self._ready[length]
        self._collect(length)
        if not ready:
            raise RuntimeError(f"no document of {length} tokens could be written")
        rows = [ready[(self._next[length] + i) % len(ready)] for i in range(count)]
        self._next[length] += count
        tokens, kinds = zip(*rows, strict=True)
        return np.stack(tokens), np.stack(kinds)

    def _collect(self, length: int) -> None:
        ready, pending = self._ready[length], self._pending[length]
        while pending:
            done, _ = wait(pending, timeout=0 if ready else None, return_when=FIRST_COMPLETED)
            for future in done:
                pending.discard(future)
                try:
                    ready += zip(*future.result(), strict=True)
                except Exception as error:  # what is there already is enough to go on with
                    print(f"documents of {length} tokens are missing: {error!r}", flush=True)
            if ready:
                break
