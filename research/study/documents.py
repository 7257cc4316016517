"""Documents with the tails that are decoded after them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vllm_sparse_plugin.tools.needles import QUESTIONS_PER_DOCUMENT, Question, build_questions, is_correct

TASKS = ("multikey", "manykeys", "multiquery", "kv")
"""Those whose documents hold several needles: a document of `single` costs a prefill for one question."""
TEXT = "text"
"""The document's own newest tokens, which hold no needle."""
TEXT_TOKENS = 256


@dataclass(frozen=True)
class Tail:
    """What follows a document: a question and its right answer."""

    tokens: list[int]
    """Question and answer."""
    answer_tokens: int
    """How many of them are the answer."""
    answer: str

    def is_right(self, best: list[int], tokenizer: Any) -> bool:
        """Whether a greedy decode gives the answer, `best[i]` being the first choice after token i."""
        begin = len(self.tokens) - self.answer_tokens
        if best[begin - 1 : len(self.tokens) - 1] != self.tokens[begin:]:
            return False
        after = tokenizer.decode([best[len(self.tokens) - 1]], skip_special_tokens=True)
        return is_correct(Question("", 0, "", self.answer), self.answer + after)


@dataclass(frozen=True)
class Document:
    """Tokens that are prefilled once, and what is decoded after them."""

    name: str
    """Unique among documents."""
    tokens: list[int]
    tails: list[Tail]


_DOCUMENTS = TypeAdapter(list[Document])


def build_documents(tokenizer: Any, task: str, context_tokens: int, count: int, seed: int) -> list[Document]:
    """`count` documents of `task`, each with `QUESTIONS_PER_DOCUMENT` questions."""
    questions = build_questions(tokenizer, task, context_tokens, count * QUESTIONS_PER_DOCUMENT, seed)
    documents = []
    for index in range(count):
        own = questions[index * QUESTIONS_PER_DOCUMENT : (index + 1) * QUESTIONS_PER_DOCUMENT]
        tails = []
        prefix: list[int] = []
        for question in own:
            encoded = tokenizer(question.prompt, return_offsets_mapping=True)
            boundary = question.prompt.rindex("\n")
            tokens, ends = encoded["input_ids"], [end for _, end in encoded["offset_mapping"]]
            # A token that lies across the boundary belongs to the question.
            begin = next(i for i, end in enumerate(ends) if end > boundary)
            answer = tokenizer.encode(f" {question.answer}", add_special_tokens=False)
            tails.append(Tail([*tokens[begin:], *answer], len(answer), question.answer))
            if prefix and prefix != tokens[:begin]:
                raise AssertionError(f"{task}: questions about one document begin differently")
            prefix = tokens[:begin]
        documents.append(Document(f"{task}-{context_tokens}-{seed}-{index}", prefix, tails))
    return documents


def load_documents(
    folder: Path | None, tokenizer: Any, task: str, context: int, count: int, seed: int
) -> list[Document]:
    """What `build_documents` returns, from `folder` if it is there, and kept there if there is one.

    Another interpreter version has another library, and would build other documents.
    """
    path = folder / f"{task}-{context}-{seed}x{count}.json" if folder else None
    if path and path.exists():
        return _DOCUMENTS.validate_json(path.read_bytes())
    documents = build_documents(tokenizer, task, context, count, seed)
    if path:
        part = path.with_suffix(".part")
        part.write_bytes(_DOCUMENTS.dump_json(documents))
        part.replace(path)
    return documents
