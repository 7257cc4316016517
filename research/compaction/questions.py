"""Questions about documents, asked within the prompt or behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common.models import load_tokenizer
from bench.common.results import Row
from research.compaction.model import CompactingModel, Says
from research.compaction.prompt import Prompt
from research.compaction.settings import Setting, all_settings
from research.study.documents import Document, Tail, load_documents

TASKS = ("multikey", "kv")
"""Those that both models answer reliably, several questions to a document."""
ASKED = {"inside": "the question ends the prompt, and votes", "behind": "the question comes behind the prompt"}


@dataclass
class Tally:
    """What a setting answered."""

    right: dict[str, str] = field(default_factory=dict)
    """By document: 1 for a right answer and 0 for a wrong one, in the order of its questions."""
    losses: list[float] = field(default_factory=list)
    """Mean negative log probability of a token of each right answer."""

    def add(self, document: str, is_right: bool, loss: float) -> None:
        """Count an answer."""
        self.right[document] = self.right.get(document, "") + "01"[is_right]
        self.losses.append(loss)

    def row(self) -> Row:
        """The columns of a result file."""
        return {"right": self.right, "answer_loss": round(sum(self.losses) / len(self.losses), 4)}


class Asker:
    """Asks a model the questions of documents under every setting."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self.model, self._tokenizer = CompactingModel(folder, device), load_tokenizer(folder)

    def ask(self, document: Document, settings: Iterable[Setting], tallies: dict[tuple[str, Setting], Tally]) -> None:
        """Ask all questions of a document.

        Args:
            document: is read once.
            settings: what decode steps read.
            tallies: gets the answers, by where the question is asked and setting.
        """
        settings = list(settings)
        read = self.model.read(document.tokens)
        for tail in document.tails:
            question, answer = tail.tokens[: -tail.answer_tokens], tail.tokens[-tail.answer_tokens :]
            whole = self.model.read(question, after=read)
            for setting in settings:
                for asked, prompt, tokens in (("inside", whole, answer), ("behind", read, tail.tokens)):
                    reading = setting.reading(prompt.num_tokens)
                    if reading is None:
                        continue
                    says = self.model.decode_kept(prompt, tokens, reading)
                    judged = self._judge(tail, prompt, says)
                    tallies.setdefault((asked, setting), Tally()).add(document.name, *judged)

    def _judge(self, tail: Tail, prompt: Prompt, says: Says) -> tuple[bool, float]:
        """Whether an answer is right, and its loss, where the decoded tokens end the tail."""
        decoded = len(says.best)
        # The first token of an answer is the prompt's own where the question is part of it.
        best = [0] * (len(tail.tokens) - decoded - 1) + [int(prompt.likely.argmax())] + says.best
        begin = len(tail.tokens) - tail.answer_tokens
        likely = [prompt.likely, *says.likely][decoded - tail.answer_tokens : -1]
        nats = [row[token].item() for row, token in zip(likely, tail.tokens[begin:], strict=True)]
        return tail.is_right(best[-len(tail.tokens) :], self._tokenizer), -sum(nats) / len(nats)


def measure(asker: Asker, folder: Path, context_tokens: int, documents: int, seed: int) -> list[Row]:
    """Ask about documents of one length; returns a row for each setting and place of the question.

    Args:
        asker: of the model.
        folder: the model's, for its tokenizer.
        context_tokens: of document, question and answer.
        documents: of each task.
        seed: of documents and needles.
    """
    tokenizer: Any = load_tokenizer(folder)
    settings = all_settings()
    tallies: dict[tuple[str, Setting], Tally] = {}
    for task in TASKS:
        for document in load_documents(None, tokenizer, task, context_tokens, documents, seed):
            asker.ask(document, settings, tallies)
    return [
        {"context_tokens": context_tokens, "question": asked, "setting": setting.name, "method": setting.method,
         "share": setting.share, "pool_tokens": setting.pool_tokens, **tally.row()}
        for (asked, setting), tally in tallies.items()
    ]  # fmt: skip
