"""Measures a model as it is served: dense prompts, then tokens that read the selected pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from sparse_kernels.masked_attention import Packing, PageMask, newest_attention, page_records
from sparse_kernels.page_statistics import StatisticsLayout

from bench.common.arms import POSITIONS, QUESTIONS, TEXT
from research.real.model import Cache, Llama, read
from research.training.data import Question, Text
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.eval.metrics import string_match_all
from vllm_sparse_plugin.tools.training.attention import ServedSelection

DENSE = None
"""The budget of dense attention."""
SCORED = 512
"""The last tokens of a text. They are decoded."""
_STEPS_BETWEEN_READS = 8


@dataclass(frozen=True)
class Predicted:
    """What a model says about the scored tokens of a text."""

    loss: float
    """Mean over the scored tokens, in nats."""
    best: torch.Tensor
    """`[SCORED - 1]`, the likeliest token after each scored token but the last."""


class ReadText:
    """A text whose prompt is in the cache of a model."""

    def __init__(self, model: Llama, text: Text) -> None:
        tokens = torch.tensor(text.tokens, device=model.device)
        self._model, self._before, self._after = model, tokens[:-SCORED], tokens[-SCORED:]
        self._cache = Cache(model, len(tokens))
        read(model, self._before, self._cache)

    def predict(self, mask: PageMask | None, layout: StatisticsLayout) -> Predicted:
        """Decode the scored tokens.

        Args:
            mask: the hard mask; None for dense attention.
            layout: of the statistics.
        """
        model, cache = self._model, self._cache
        before = cache.length
        if mask is None:
            hidden = read(model, self._after, cache)
        else:
            positions = torch.arange(before, before + SCORED, device=model.device)
            hidden = model.hidden(self._after[None], positions, self._selecting(mask, layout))[0]
        cache.length = before
        logits = model.logits(hidden[:-1])
        return Predicted(F.cross_entropy(logits, self._after[1:]).item(), logits.argmax(dim=-1))

    def _selecting(self, mask: PageMask, layout: StatisticsLayout) -> Callable[..., torch.Tensor]:
        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys, values = (part.transpose(0, 1) for part in self._cache.put(layer, key, value))
            records = page_records(keys, Packing((len(keys),)), mask.page_size, layout.kind, layout.format)
            tokens = query[0].transpose(0, 1)
            output = newest_attention(tokens, keys, values, records, mask, self._model.scale)
            return output.transpose(0, 1)[None]

        return attend


class Answering:
    """Prompts of questions, read densely, whose questions and answers are decoded together."""

    def __init__(self, model: Llama, questions: Sequence[Question], layout: StatisticsLayout, page_size: int) -> None:
        """Read the prompts.

        Args:
            model: the model.
            questions: answered at the same time. Keys, values and records of all are in memory.
            layout: of the statistics.
            page_size: tokens of a page.
        """
        self._model, self._questions, self._layout, self._page_size = model, questions, layout, page_size
        longest = max(len(each.context) + len(each.question) + each.answer_tokens for each in questions)
        self._pages = -(-longest // page_size)
        rows, room = len(questions), self._pages * page_size
        shape = model.num_layers, rows, model.num_kv_heads, room, model.head_size
        self._keys, self._values = (torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2))
        cache = Cache(model, 0)
        for row, question in enumerate(questions):
            cache.keys, cache.values, cache.length = self._keys[:, row], self._values[:, row], 0
            read(model, torch.tensor(question.context, device=model.device), cache)
        self._lengths = torch.tensor([len(each.context) for each in questions], device=model.device)
        self._row = torch.arange(rows, device=model.device)
        self._records = [self._records_of(keys.unflatten(2, (self._pages, page_size))) for keys in self._keys]

    def answer(self, mask: PageMask | None, end_tokens: frozenset[int], longest: int) -> list[list[int]]:
        """Return the greedy answers, without the token that ends them.

        Args:
            mask: the hard mask; None for dense attention. No prompt may be short enough to be read whole.
            end_tokens: ids that end an answer.
            longest: maximum tokens of an answer.
        """
        model, device = self._model, self._model.device
        asked = [each.question for each in self._questions]
        rooms = torch.tensor([min(each.answer_tokens, longest) for each in self._questions], device=device)
        counts, ends = (
            torch.tensor(list(map(len, asked)), device=device),
            torch.tensor(sorted(end_tokens), device=device),
        )
        most = max(map(len, asked))
        given = torch.tensor([each + [0] * (most - len(each)) for each in asked], device=device)
        token, done = given[:, 0], torch.zeros(len(asked), dtype=torch.bool, device=device)
        written = []
        for step in range(most + int(rooms.max()) - 1):
            position = self._lengths + step
            # Rows that are done go on without effect, within their room.
            position = torch.minimum(position, self._lengths + counts + rooms - 1)
            hidden = model.hidden(token[:, None], position[:, None], self._attending(mask, position))
            best = model.logits(hidden[:, 0]).argmax(dim=-1)
            answers = step + 1 >= counts
            written.append(torch.where(answers & ~done, best, -1))
            done = done | (answers & torch.isin(best, ends)) | (step + 2 > counts + rooms - 1)
            token = torch.where(answers, best, given[:, min(step + 1, most - 1)])
            # Reading the device at each step would make the host wait.
            if step % _STEPS_BETWEEN_READS == _STEPS_BETWEEN_READS - 1 and bool(done.all()):
                break
        rows = torch.stack(written, dim=1).tolist()
        return [[token for token in row if token >= 0 and token not in end_tokens] for row in rows]

    def _attending(self, mask: PageMask | None, position: torch.Tensor) -> Callable[..., torch.Tensor]:
        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys, values = self._keys[layer], self._values[layer]
            keys[self._row, :, position], values[self._row, :, position] = key[:, :, 0], value[:, :, 0]
            grouped = query[:, :, 0].unflatten(1, (keys.shape[1], -1))
            if mask is None:
                read_keys, read_values = keys, values
                seen = (torch.arange(keys.shape[2], device=keys.device) <= position[:, None])[:, None, None]
            else:
                self._update(layer, position)
                place = self._places(self._read(layer, grouped, position + 1, mask))
                read_keys, read_values = (_gather(x, place) for x in (keys, values))
                seen = (place <= position[:, None, None])[:, :, None]
            seen = seen.expand(*grouped.shape[:3], seen.shape[-1])
            output = F.scaled_dot_product_attention(grouped, read_keys, read_values, seen, scale=self._model.scale)
            return output.flatten(1, 2)[:, :, None]

        return attend

    def _records_of(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return vectors `[rows, num_kv_heads, pages, vectors, head_size]` and spreads `[rows, num_kv_heads, pages]`.

        Args:
            pages: `[rows, num_kv_heads, pages, page_size, head_size]` keys.
        """
        rows, _, count, size, _ = pages.shape
        tokens = pages.permute(0, 2, 3, 1, 4).flatten(0, 2)
        records = page_records(tokens, Packing((rows * count * size,)), size, self._layout.kind, self._layout.format)
        vectors = records.vectors.unflatten(0, (rows, count)).transpose(1, 2).contiguous()
        spread = records.spread
        return vectors, None if spread is None else spread.unflatten(0, (rows, count)).transpose(1, 2).contiguous()

    def _update(self, layer: int, position: torch.Tensor) -> None:
        """Write the records of the newest tokens' pages. A record counts once its page is complete."""
        page, size = position // self._page_size, self._page_size
        tokens = (page * size)[:, None] + torch.arange(size, device=page.device)
        newest = self._keys[layer][self._row[:, None], :, tokens].transpose(1, 2)
        for records, record in zip(self._records[layer], self._records_of(newest[:, :, None]), strict=True):
            if records is not None and record is not None:
                records[self._row, :, page] = record[:, :, 0]

    def _read(self, layer: int, query: torch.Tensor, context: torch.Tensor, mask: PageMask) -> torch.Tensor:
        """Return the complete pages that each row reads, then the incomplete page: `[rows, num_kv_heads, K + 1]`.

        As in `sparse_kernels.masked_attention`, scores are rounded to bfloat16, and ties go to the lowest pages.
        """
        (vectors, spread), selection = self._records[layer], mask.selection
        wide = query.to(vectors.dtype)
        flat = vectors.flatten(2, 3).transpose(-1, -2)
        scores = (wide @ flat).unflatten(-1, vectors.shape[2:4]).amax(dim=-1)
        if spread is not None:
            scores = scores + selection.std_weight * wide.norm(dim=-1)[..., None] * spread[:, :, None]
        best = scores.amax(dim=2).bfloat16()
        page = torch.arange(best.shape[-1], device=best.device)
        complete = (context // mask.page_size)[:, None, None]
        always = (page < selection.sink_pages) | (page >= complete - selection.recent_pages)
        best = best.masked_fill(always, torch.inf).masked_fill(page >= complete, -torch.inf)
        chosen = best.sort(dim=-1, descending=True, stable=True).indices[..., : selection.k]
        return torch.cat([chosen, complete.expand(-1, best.shape[1], 1)], dim=-1)

    def _places(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the positions of the pages' tokens: `[rows, num_kv_heads, tokens]`."""
        offset = torch.arange(self._page_size, device=pages.device)
        return (pages[..., None] * self._page_size + offset).flatten(2)


def _gather(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return `[rows, num_kv_heads, tokens, head_size]`: the tokens of x at places `[rows, num_kv_heads, tokens]`."""
    rows, heads, room, size = x.shape
    first = torch.arange(rows * heads, device=x.device).view(rows, heads, 1) * room
    # The incomplete page may begin after the last one of the cache. None of its tokens is seen then.
    index = (place.clamp(max=room - 1) + first).flatten()
    return x.view(-1, size).index_select(0, index).view(*place.shape, size)


def measure_texts(
    model: Llama,
    texts: Sequence[Text],
    served: ServedSelection,
    budgets: Sequence[int | None],
    before: Sequence[torch.Tensor],
) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of text and budget, with a value for each text.

    Args:
        model: the model.
        texts: to read.
        served: the selection.
        budgets: in tokens; None is dense attention and must be the first.
        before: for each text, the likeliest tokens of the dense model before training.
    """
    layout = served.layout(model.head_size)
    found: dict[tuple[str, int | None], dict[str, list[float]]] = {}
    for number, text in enumerate(texts):
        reading = ReadText(model, text)
        dense: torch.Tensor | None = None
        for budget in budgets:
            prediction = reading.predict(None if budget is None else served.mask(None, budget), layout)
            dense = prediction.best if dense is None else dense
            row = found.setdefault((text.kind, budget), {"losses": [], "same_as_before": [], "same_as_dense": []})
            row["losses"].append(round(prediction.loss, 5))
            row["same_as_before"].append(_equal(prediction.best, before[number]))
            row["same_as_dense"].append(_equal(prediction.best, dense))
    for (kind, budget), values in found.items():
        yield {"part": TEXT, "text": kind, "budget_tokens": budget, **values}


def measure_positions(model: Llama, texts: Sequence[Text], part_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each text: the loss of dense attention by position, in nats.

    Args:
        model: the model.
        texts: to read.
        part_tokens: a loss is the mean over so many tokens.
    """
    for text in texts:
        tokens = torch.tensor(text.tokens, device=model.device)
        hidden = model.hidden(tokens[None], torch.arange(len(tokens), device=model.device), model.attend)[0, :-1]
        parts = zip(hidden.split(part_tokens), tokens[1:].split(part_tokens), strict=True)
        losses = [round(model.nats(some, expected), 5) for some, expected in parts]
        yield {"part": POSITIONS, "text": text.kind, "part_tokens": part_tokens, "losses": losses}


def dense_tokens(model: Llama, texts: Sequence[Text], served: ServedSelection) -> list[torch.Tensor]:
    """Return the likeliest tokens of dense attention for each text."""
    layout = served.layout(model.head_size)
    return [ReadText(model, text).predict(None, layout).best for text in texts]


def measure_noise(
    before: Sequence[torch.Tensor], texts: Sequence[Text], served: ServedSelection, exact: Llama
) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of text: the tokens that dense attention keeps in float32.

    Args:
        before: see `measure_texts`.
        texts: to read.
        served: the selection.
        exact: the model before training in float32.
    """
    pairs = list(zip(texts, before, dense_tokens(exact, texts, served), strict=True))
    for kind in dict.fromkeys(text.kind for text in texts):
        same = [_equal(a, b) for text, a, b in pairs if text.kind == kind]
        yield {"part": "noise", "text": kind, "same_as_before": same}


def check_budgets(questions: Sequence[Question], served: ServedSelection, budgets: Sequence[int | None]) -> None:
    """Refuse budgets that read a whole prompt.

    Raises:
        ConfigurationError: names the budget.
    """
    shortest = min((len(each.context) for each in questions), default=0)
    for budget in budgets:
        if budget is not None and questions and served.mask(None, budget).reads_all(shortest):
            raise ConfigurationError(f"budgets: got {budget}, allowed: below the prompts of {shortest} tokens")


def measure_questions(
    model: Llama,
    questions: Sequence[Question],
    served: ServedSelection,
    budgets: Sequence[int | None],
    decode: Callable[[list[int]], str],
    end_tokens: frozenset[int],
    longest: int,
    at_once: int,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each context, task and budget, with the score of each question.

    Args:
        model: the model.
        questions: to answer.
        served: the selection.
        budgets: in tokens; None is dense attention.
        decode: returns the text of ids.
        end_tokens: ids that end an answer.
        longest: maximum tokens of an answer.
        at_once: maximum questions that are answered at the same time.
    """
    layout, page_size = served.layout(model.head_size), served.selection.page_size
    scores: dict[tuple[int, str, int | None], list[float]] = {}
    ordered = sorted(questions, key=lambda question: question.context_tokens)
    for first in range(0, len(ordered), at_once):
        part = ordered[first : first + at_once]
        answering = Answering(model, part, layout, page_size)
        for budget in budgets:
            mask = None if budget is None else served.mask(None, budget)
            for question, answer in zip(part, answering.answer(mask, end_tokens, longest), strict=True):
                score = string_match_all(decode(answer), question.answers)
                scores.setdefault((question.context_tokens, question.task, budget), []).append(round(score, 4))
    for (context, task, budget), values in scores.items():
        about = {"part": QUESTIONS, "context_tokens": context, "task": task, "budget_tokens": budget}
        yield {**about, "scores": values}


def _equal(a: torch.Tensor, b: torch.Tensor) -> float:
    return round((a == b).float().mean().item(), 5)
