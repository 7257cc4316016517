"""What a small model is trained on here: documents with questions, and text."""

from __future__ import annotations

import random
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import torch
from sparse_kernels.masked_attention import Packing

from research.witness.data import ANSWER, BOS, build_document, collect_text, cut, encode, installed_text
from vllm_sparse_plugin.tools.training.data import Row

TASKS = ("mixed", "multikey", "kv", "multiquery")
"""Questions about one needle or one pair, in turns or alone, and about three needles at once."""
TEXT_SHARE = 0.25
"""Of the rows: text without needles."""
LEARNED_SHARE = 1 / 4
"""Of the tokens behind a prompt that are no answer: those that are learned unless told otherwise, so that answers weigh
about as much as text. What is in a prompt attends densely, and has nothing to learn."""
MOST_QUESTIONS = 64
"""About one document, if it has as many needles."""
BEFORE_ANSWERS = range(64, 320)
"""Tokens before the first answer that do not belong to the prompt: its question, and text before that."""
AFTER_TEXT = range(256, 768)
"""Tokens of a text that come after what is its prompt."""
_PIECES = (1, 1, 1, 2)
"""Documents of a row, one of which is drawn."""
_TRIES = 20


@dataclass(frozen=True)
class RowOrder:
    """A row that a worker makes."""

    text: str
    """Without needles, more than the row needs."""
    tokens: int
    """Of the row."""
    pieces: int
    """Documents, all of the same length."""
    is_text: bool
    """Whether they hold no needles."""
    seed: str
    """Of needles and questions, and of the tokens that are learned."""
    learned_share: float = LEARNED_SHARE
    """Of the tokens behind a prompt that are no answer, those that are learned."""


def build_row(order: RowOrder) -> Row:
    """Makes a row of one or more documents.

    Raises:
        RuntimeError: if the text is too short for them.
    """
    rng = random.Random(order.seed)
    length, tokens, learned, prompts = order.tokens // order.pieces, [], [], []
    for _ in range(order.pieces):
        own, is_answer = _text(rng, order.text, length) if order.is_text else _document(rng, order.text, length)
        tokens += own
        last = length - rng.choice(AFTER_TEXT) if order.is_text else is_answer.index(True) - rng.choice(BEFORE_ANSWERS)
        prompts.append(max(last, 0))
        learned += [
            answer or (i > prompts[-1] and rng.random() < order.learned_share) for i, answer in enumerate(is_answer)
        ]
    return Row(tokens, learned, Packing((length,) * order.pieces), tuple(prompts))


def _text(rng: random.Random, text: str, length: int) -> tuple[list[int], list[bool]]:
    for _ in range(_TRIES):
        tokens = [BOS, *encode(cut(text, rng.randrange(len(text)), length))][:length]
        # Rulers and indentation have many characters to a token.
        if len(tokens) == length:
            return tokens, [False] * length
    raise RuntimeError(f"a stretch of text has {len(tokens)} tokens, and not {length}")


def _document(rng: random.Random, text: str, length: int) -> tuple[list[int], list[bool]]:
    for _ in range(_TRIES):
        part = cut(text, rng.randrange(len(text)), length)
        document = build_document(rng, part, length, rng.choice(TASKS), MOST_QUESTIONS)
        if document is not None:
            return document.tokens, [kind == ANSWER for kind in document.kinds]
    raise RuntimeError(f"no document of {length} tokens could be written")


def build_rows(
    files: list[str], tokens: int, count: int, seed: int, workers: Executor, learned_share: float
) -> list[Row]:
    """Makes rows to train on; documents of a row share its length evenly.

    Args:
        files: texts.
        tokens: of a row.
        count: of rows.
        seed: of everything that is drawn.
        workers: see `research.witness.data.open_workers`.
        learned_share: of the tokens behind a prompt that are no answer, those that are learned.
    """
    text, rng = "".join(files), random.Random(f"{seed} rows")
    orders = [
        RowOrder(
            cut(text, rng.randrange(len(text)), 2 * tokens), tokens, rng.choice(_PIECES), rng.random() < TEXT_SHARE,
            f"{seed} row {index}", learned_share,
        )
        for index in range(count)
    ]  # fmt: skip
    return list(workers.map(build_row, orders))


def write_rows(rows: list[Row], path: Path) -> None:
    """Keeps rows of one length in a file, for arms that are trained on the same."""
    kept = {
        "tokens": torch.tensor([row.tokens for row in rows], dtype=torch.int16),
        "learned": torch.tensor([row.learned for row in rows]),
        "lengths": [row.packing.lengths for row in rows],
        "prompts": [row.prompts for row in rows],
    }
    part = path.with_suffix(".part")
    torch.save(kept, part)
    part.replace(path)


def read_rows(path: Path) -> list[Row]:
    """Returns the rows of a file of `write_rows`."""
    kept = torch.load(path)
    return [
        Row(tokens.tolist(), learned.tolist(), Packing(lengths), prompts)
        for tokens, learned, lengths, prompts in zip(*kept.values(), strict=True)
    ]


def training_text(limit: int, seed: int, roots: list[Path] | None = None) -> list[str]:
    """Returns source code and documentation of the packages that are installed, `limit` bytes at most.

    The standard library is left out: the documents of the questions that are asked are made of it.
    """
    folders = roots or [folder for folder in installed_text() if "packages" in folder.name]
    return collect_text(folders, limit, seed).files
