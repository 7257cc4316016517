"""Compares numbers of important tokens that adapt to layer and text with fixed shares of the same mean (ZipVL, arXiv
2410.08584, Table 3), and the ways to vote for them (Tables A and B)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from research.real.answers import answer
from research.real.model import Cache, Llama, read
from research.real.prefill import NOISE, PROBES, SCORED, Form, Prefill, flops_share, predictions
from research.real.texts import RULER, Prompt
from research.real.votes import Read
from vllm_sparse_plugin.tools.eval.metrics import string_match_all

DENSE = "dense"
"""Arm that attends to everything."""
ADAPTIVE, FIXED, FIXED_BY_TEXT = "adaptive", "fixed", "fixed by text"
"""How many tokens are important: by `tau`; the mean of this over layers and texts; its mean over the layers of each
text."""
ARMS: dict[str, Form] = {
    f"{name}_{tau}": replace(form, tau=tau)
    for name, form in (("attend", Form("rows", sinks=True, local=64)), ("zero", Form("zero")))
    for tau in (0.975, 0.95, 0.99)
}
"""By name, with the `others` of the server's setting."""
VOTES: dict[str, dict[str, Any]] = {
    "newest rows": {"newest": 2 * PROBES, "drawn": 0},
    "random rows": {"newest": 0, "drawn": 2 * PROBES},
    "ranked by sums": {"ranked": "sums"},
}
"""Other votes, at the fixed share of the default `tau`."""
COUNTED = "counted by means"
"""Adapts by the means, at the default `tau`."""


@dataclass(frozen=True)
class Item:
    """A text, or a question with the answer of dense attention."""

    prompt: Prompt
    number: int
    """Seed of its random rows."""
    tokens: torch.Tensor
    """What is read, and then the tokens that are decoded."""
    before: int
    """Tokens that are read at once."""
    dense: torch.Tensor
    """The likeliest next tokens with dense attention, from the last one that is read."""

    @property
    def about(self) -> dict[str, Any]:
        """Columns of a row."""
        prompt = self.prompt
        return {
            "study": "adaptive", "text": prompt.name, "kind": prompt.kind, "task": prompt.task,
            "context_tokens": prompt.context_tokens,
        }  # fmt: skip


class Reader:
    """Reads texts and questions in one form, decodes the texts and answers the questions."""

    def __init__(
        self, model: Llama, decode: Callable[[list[int]], str], end_tokens: Collection[int], longest: int
    ) -> None:
        """Take a model, a decoder of ids, the ids that end an answer and the maximum tokens of an answer."""
        self.model = model
        self._decode, self._end_tokens, self._longest = decode, end_tokens, longest

    def items(self, texts: Sequence[Prompt], asked: Sequence[Prompt]) -> tuple[list[Item], list[dict[str, Any]]]:
        """Read everything densely. Return the items, and the rows of dense attention."""
        model, items, caches = self.model, [], []
        for number, prompt in enumerate(texts):
            tokens = torch.tensor(prompt.tokens, device=model.device)
            found = _next(model, tokens, len(tokens) - SCORED)
            items.append(Item(prompt, number, tokens, len(tokens) - SCORED, found))
        for prompt in asked:
            cache = Cache(model, len(prompt.tokens))
            hidden = read(model, torch.tensor(prompt.tokens, device=model.device), cache)
            caches.append((prompt, cache, int(model.logits(hidden[-1:]).argmax())))
        said = self._answers(caches)
        for number, (prompt, _, first) in enumerate(caches):
            tokens = torch.tensor([*prompt.tokens, *(said[number] or [first])], device=model.device)
            found = _next(model, tokens, len(prompt.tokens))
            items.append(Item(prompt, number, tokens, len(prompt.tokens), found))
        rows = [each.about | {"arm": DENSE} for each in items]
        self._score(rows[len(texts) :], asked, said)
        return items, rows

    def rows(self, items: Sequence[Item], arm: str, choice: str, forms: Sequence[Form]) -> list[dict[str, Any]]:
        """Return a row for each item, and the seconds of all.

        Args:
            items: what to read.
            arm: name in `ARMS`.
            choice: how many tokens are important, or who votes.
            forms: of the items.
        """
        begin, rows, caches, of_questions = time.monotonic(), [], [], []
        for item, form in zip(items, forms, strict=True):
            cache = Cache(self.model, len(item.tokens))
            prefill = Prefill(self.model, form, cache, item.before, item.number)
            found = _next(self.model, item.tokens, item.before, prefill, cache)
            row = item.about | {
                "arm": arm, "choice": choice, "ratio": form.ratio,
                "agreement": _same(item.dense, found),
                "kept": round(sum(prefill.kept) / len(prefill.kept), 4),
                "kept_by_layer": [round(share, 3) for share in prefill.kept],
                **flops_share(self.model, item.before, form, prefill.pairs),
            }  # fmt: skip
            rows.append(row)
            if item.prompt.kind == RULER:
                of_questions.append(row)
                caches.append((item.prompt, cache, int(found[0])))
        self._score(of_questions, [prompt for prompt, *_ in caches], self._answers(caches))
        spent = {"study": "adaptive", "arm": arm, "choice": choice, "seconds": round(time.monotonic() - begin, 2)}
        return [*rows, spent]

    def _answers(self, caches: Sequence[tuple[Prompt, Cache, int]]) -> list[list[int]]:
        """Answer questions that are read."""
        if not caches:
            return []
        reads = [Read(prompt, cache, cache.keys[:, :, :0], first) for prompt, cache, first in caches]
        rooms = [min(prompt.answer_tokens, self._longest) for prompt, *_ in caches]
        return answer(self.model, reads, [None] * len(reads), rooms, self._end_tokens)

    def _score(self, rows: Sequence[dict[str, Any]], asked: Sequence[Prompt], said: Sequence[list[int]]) -> None:
        """Add the scores of answers to the rows of their questions."""
        for row, prompt, ids in zip(rows, asked, said, strict=True):
            text = self._decode(ids)
            row |= {"score": round(string_match_all(text, prompt.answers), 4), "said": text[:60]}


def measure_adaptive(
    reader: Reader, exact: Llama | None, texts: Sequence[Prompt], asked: Sequence[Prompt], arms: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield rows of each arm: first with adaptive shares, then with fixed ones that have their mean.

    With the default `tau`, rows with other votes follow.

    Args:
        reader: the model and its answers.
        exact: the model in float32, for the noise of dense attention; None to omit the noise.
        texts: texts to read and decode.
        asked: questions of RULER.
        arms: names in `ARMS`.
    """
    items, rows = reader.items(texts, asked)
    yield from rows
    if exact is not None:
        for item in items:
            yield item.about | {"arm": NOISE, "agreement": _same(item.dense, _next(exact, item.tokens, item.before))}
    for arm in arms:
        form = ARMS[arm]
        adaptive = reader.rows(items, arm, ADAPTIVE, [form] * len(items))
        yield from adaptive
        shares = [row["kept"] for row in adaptive[:-1]]
        fixed = replace(form, ratio=round(sum(shares) / len(shares), 4))
        yield from reader.rows(items, arm, FIXED, [fixed] * len(items))
        if form.tau != Form.tau:
            continue
        yield from reader.rows(items, arm, FIXED_BY_TEXT, [replace(form, ratio=share) for share in shares])
        for name, changes in VOTES.items():
            yield from reader.rows(items, arm, name, [replace(fixed, **changes)] * len(items))
        yield from reader.rows(items, arm, COUNTED, [replace(form, counted="means")] * len(items))


def _next(
    model: Llama, tokens: torch.Tensor, before: int, prefill: Prefill | None = None, cache: Cache | None = None
) -> torch.Tensor:
    """Return the likeliest tokens after the last one that is read and after each one that is decoded."""
    within, decoded = predictions(model, tokens, before, prefill, cache)
    return torch.cat([within[-1:], decoded])


def _same(dense: torch.Tensor, found: torch.Tensor) -> float:
    return round((dense == found.to(dense.device)).float().mean().item(), 4)
