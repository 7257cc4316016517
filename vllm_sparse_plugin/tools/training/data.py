"""Documents of a file, packed into rows of tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sparse_kernels.masked_attention import Packing

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.files import read_json_lines


class Document(NamedTuple):
    """A text in tokens."""

    tokens: list[int]
    prompt_tokens: int
    """Number of first tokens that are read, not learned."""


class Row(NamedTuple):
    """Documents that are trained on together, one after the other."""

    tokens: list[int]
    learned: list[bool]
    """For each token, whether it is learned. The first token of a document and prompts are not learned."""
    packing: Packing
    prompts: tuple[int, ...]
    """Number of tokens at the start of each document that a server would prefill."""


def join(rows: Sequence[Row]) -> Row:
    """Return one row with the documents of one or more rows."""
    return Row(
        [token for row in rows for token in row.tokens],
        [is_learned for row in rows for is_learned in row.learned],
        Packing(tuple(length for row in rows for length in row.packing.lengths)),
        tuple(prompt for row in rows for prompt in row.prompts),
    )


def read_documents(path: Path, tokenizer: Any) -> list[Document]:
    """Return the documents of a file. A line has a `text`, or a `prompt` and a `completion`.

    Raises:
        ConfigurationError: a line is invalid, or the file cannot be read.
    """
    documents = []
    for number, line, entry in read_json_lines(path, "data"):
        texts = (
            [entry.get(name) for name in ("text", "prompt", "completion")] if isinstance(entry, dict) else [None] * 3
        )
        text, prompt, completion = (found if isinstance(found, str) and found else None for found in texts)
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        if text is not None and prompt is None and completion is None:
            documents.append(Document(tokenizer.encode(text) + end, 0))
        elif text is None and prompt is not None and completion is not None:
            prompt_ids = tokenizer.encode(prompt)
            answer = tokenizer.encode(completion, add_special_tokens=False)
            documents.append(Document(prompt_ids + answer + end, len(prompt_ids)))
        else:
            raise ConfigurationError(
                f"data: got {line[:60]!r} in line {number}, allowed: a JSON object with a `text`, or with a `prompt` "
                "and a `completion`"
            )
    if not any(len(document.tokens) > max(document.prompt_tokens, 1) for document in documents):
        raise ConfigurationError(f"data: got {str(path)!r} without a text to learn, allowed: a line or more with one")
    return documents


def pack(
    documents: Sequence[Document],
    row_tokens: int,
    seed: int,
    decoded_tokens: int | None = None,
    begin: Sequence[int] = (),
) -> list[Row]:
    """Return rows of documents in random order. A document longer than a row is cut.

    Rows without a token to learn are left out.

    Args:
        documents: at least one of two or more tokens.
        row_tokens: maximum tokens of a row.
        seed: of the order.
        decoded_tokens: for each piece of a document without a prompt, the number of last tokens that follow its prompt,
            at most half of the piece. None: the piece has no prompt.
        begin: tokens that begin every text of the model, including each piece of a cut document.
    """
    order = list(documents)
    random.Random(seed).shuffle(order)
    rows: list[list[Document]] = []
    room = 0
    for tokens, prompt_tokens in order:
        for piece in _pieces(tokens, prompt_tokens, row_tokens, list(begin)):
            if decoded_tokens is not None and not prompt_tokens:
                length = len(piece.tokens)
                piece = piece._replace(prompt_tokens=length - min(decoded_tokens, length // 2))
            if len(piece.tokens) > room:
                rows.append([])
                room = row_tokens
            rows[-1].append(piece)
            room -= len(piece.tokens)
    return [row for row in map(_row, rows) if any(row.learned)]


def _pieces(tokens: list[int], prompt_tokens: int, most: int, begin: list[int]) -> Iterator[Document]:
    """Yield a document in pieces of at most `most` tokens."""
    yield Document(tokens[:most], prompt_tokens)
    step = most - len(begin)
    for start in range(most, len(tokens), step):
        rest = max(prompt_tokens - start, 0)
        # Nothing predicts the first token of a later piece.
        read = len(begin) + max(rest, 1) if begin else rest
        yield Document(begin + tokens[start : start + step], read)


def _row(documents: Sequence[Document]) -> Row:
    tokens, learned = [], []
    for document in documents:
        tokens += document.tokens
        learned += [position >= max(document.prompt_tokens, 1) for position in range(len(document.tokens))]
    lengths = tuple(len(document.tokens) for document in documents)
    prompts = tuple(min(document.prompt_tokens, len(document.tokens)) for document in documents)
    return Row(tokens, learned, Packing(lengths), prompts)
