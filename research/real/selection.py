"""Measures what two levels of scores, and copies of pages, miss of what a decode step selects."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from sparse_kernels.hot_pages import WAYS
from sparse_kernels.page_score import score_pages
from sparse_kernels.page_statistics import KINDS, PageStatistics
from sparse_kernels.page_statistics.reference import summarise
from sparse_kernels.page_topk import select_pages

from research.real.copies import count_misses
from research.real.model import Llama, causal_attention
from research.real.pages import PAGE, Layer
from research.real.texts import Prompt

LEVELS, COPIES, LOSS = "levels", "copies", "loss"
ARMS = (LEVELS, COPIES)
QUERIES = 128
"""Number of newest queries of `LEVELS`."""
FLAT, LEVELED, ORACLE = "quarters", "leveled_quarters", "oracle"
"""What ranks pages: both kinds of records, and the true weight."""
REFINED = (0.125, 0.25, 0.5, 1.0)
"""Shares of the pages whose records are read whole."""
BUDGETS = (64, 128, 256, 512)
"""Pages that `LEVELS` selects."""
COLD, STEADY = 128, 512
"""Number of steps of `COPIES`: the first ones, which start without copies, and the others."""
READ_BUDGETS = (64, 128, 256)
"""Pages that a step of `COPIES` reads."""
MULTIPLES = (1, 2, 4, 8)
"""Room for copies, in multiples of the budget."""
BLOCK_PAGES = 8
"""Pages of a block of the cache. A stripe consists of blocks."""
_ALWAYS = 1
"""Pages at the start, and complete pages at the end, that are always selected."""


class Captured(NamedTuple):
    """Attention inputs of a layer that reads all tokens, with positions: float32, on the CPU."""

    layer: int
    query: torch.Tensor
    """`[num_query_heads, newest, head_size]`, of the newest tokens."""
    keys: torch.Tensor
    """`[num_kv_heads, num_tokens, head_size]`."""


class Context(NamedTuple):
    """The first tokens of a text, as a text of its own."""

    tokens: int
    layers: list[Captured]
    """Those without windows."""
    hidden: torch.Tensor
    """`[newest, hidden_size]`."""


def capture(model: Llama, tokens: Sequence[int], ends: Sequence[int], newest: int) -> list[Context]:
    """Read a text densely in one piece. Its first tokens do not see the others, so it holds shorter contexts.

    Args:
        model: the model.
        tokens: ids.
        ends: numbers of tokens of the contexts.
        newest: tokens of each context whose queries and hidden states are returned.
    """
    rows = [slice(max(end - newest, 0), end) for end in ends]
    layers: list[list[Captured]] = [[] for _ in ends]

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if model.windows[layer] is not None:
            return model.attend(layer, query, key, value)
        keys = key[0].float().cpu().clone()
        for to, some, end in zip(layers, rows, ends, strict=True):
            to.append(Captured(layer, query[0, :, some].float().cpu().clone(), keys[:, :end]))
        if layer < model.num_layers - 1:
            return model.attend(layer, query, key, value)
        output = torch.zeros_like(query)  # no layer reads the other tokens
        for some, end in zip(rows, ends, strict=True):
            output[:, :, some] = causal_attention(query[:, :, some], key[:, :, :end], value[:, :, :end], model.scale)
        return output

    hidden = model.hidden_of(tokens, attend)
    return [Context(end, found, hidden[some]) for end, found, some in zip(ends, layers, rows, strict=True)]


def stored(kind: str, keys: torch.Tensor) -> PageStatistics:
    """Return the records of pages as a bfloat16 cache has them, in blocks in the order of the text.

    Args:
        kind: of `KINDS`, with codes.
        keys: `[num_kv_heads, num_tokens, head_size]`. What the last block lacks is zero.
    """
    record = KINDS[kind]
    assert record.codes is not None
    padded = F.pad(keys, (0, 0, 0, -keys.shape[1] % (BLOCK_PAGES * PAGE))).bfloat16()
    pages = padded.unflatten(1, (-1, BLOCK_PAGES, PAGE)).transpose(0, 1)
    packed, steps = record.codes.pack(summarise(record, pages)[0])
    if record.is_leveled:
        packed = packed.unflatten(-1, (record.codes.rows, -1))
    return PageStatistics(record, packed, steps, None)


def scores_of(statistics: PageStatistics, query: torch.Tensor, complete: torch.Tensor, refined: float) -> torch.Tensor:
    """Return the scores of a server: `[rows, num_kv_heads, num_pages]` bfloat16, -inf where a row has no page.

    Args:
        statistics: see `stored`.
        query: `[num_query_heads, rows, head_size]`.
        complete: `[rows]`, complete pages of each query.
        refined: share of the pages whose records are read whole, if the records have levels.
    """
    blocks, kv_heads = statistics.vectors.shape[:2]
    grouped = query.bfloat16().unflatten(0, (kv_heads, -1)).permute(2, 0, 1, 3).contiguous()
    table = torch.arange(blocks).expand(len(complete), -1).contiguous()
    return score_pages(grouped, statistics, table, complete, 0.0, refined)


def chosen(scores: torch.Tensor, complete: torch.Tensor, budget: int) -> torch.Tensor:
    """Return the pages that a server selects: `[rows, num_kv_heads, budget]`, -1 where a row has fewer."""
    return select_pages(scores, complete, budget, _ALWAYS, _ALWAYS)


def measure_levels(found: Captured, scale: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each ranking and budget: means over heads and the newest queries.

    Args:
        found: the layer.
        scale: factor of the logits.
    """
    query = found.query[:, -QUERIES:]
    layer = Layer.of(query, found.keys, scale)
    for budget in BUDGETS:
        mass = layer.read(layer.mass, budget).mean().item()
        yield {"ranked_by": ORACLE, "refined": 1.0, "scored": 1.0, "pages": budget, "mass": mass, "shared": 1.0}
    first: dict[int, torch.Tensor] = {}
    for kind, shares in ((FLAT, (1.0,)), (LEVELED, REFINED)):
        statistics = stored(kind, found.keys)
        for refined in shares:
            scores = scores_of(statistics, query, layer.complete, refined)
            scored = (scores > -torch.inf).sum(dim=-1) / layer.complete[:, None]
            for budget in BUDGETS:
                pages = chosen(scores, layer.complete, budget)
                taken = torch.zeros_like(layer.mass).scatter_add(-1, pages.clamp(min=0), (pages >= 0).float())
                flat = first.setdefault(budget, taken)
                masses = (layer.mass * taken).sum(dim=-1) + layer.rest
                yield {
                    "ranked_by": kind, "refined": refined, "scored": scored.mean().item(), "pages": budget,
                    "mass": masses.mean().item(), "shared": ((flat * taken).sum() / flat.sum()).item(),
                }  # fmt: skip


def measure_copies(found: Sequence[Captured]) -> Iterator[dict[str, Any]]:
    """Yield a row for each budget, room for copies and number of ways: misses by selected pages.

    Each layer and KV head has copies of its own. `cold` are the first steps, `steady` the others. `again` are those
    steps if all steps are taken once more: all pages had copies before.

    Args:
        found: the layers.
    """
    of_layer = []
    for each in found:
        total = each.keys.shape[1]
        complete = (torch.arange(total - each.query.shape[1], total) + 1) // PAGE
        scores = scores_of(stored(FLAT, each.keys), each.query, complete, 1.0)
        of_layer.append([chosen(scores, complete, budget).transpose(0, 1) for budget in READ_BUDGETS])
    for index, budget in enumerate(READ_BUDGETS):
        pages = torch.cat([each[index] for each in of_layer])
        read = (pages >= 0).sum(dim=-1)
        cold = min(COLD, pages.shape[1] // 2)
        for multiple in MULTIPLES:
            for ways in (WAYS, multiple * budget):
                missed = count_misses(torch.cat([pages, pages], dim=1), -(-multiple * budget // ways), ways)
                once, twice = missed.chunk(2, dim=1)
                shares = {
                    "cold": once[:, :cold].sum() / read[:, :cold].sum(),
                    "steady": once[:, cold:].sum() / read[:, cold:].sum(),
                    "again": twice[:, cold:].sum() / read[:, cold:].sum(),
                }
                yield {"budget_tokens": budget * PAGE, "multiple": multiple, "ways": ways} | {
                    name: share.item() for name, share in shares.items()
                }


def measure_selection(
    model: Llama, texts: Sequence[Prompt], arms: Sequence[str], ends: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield rows for each text and context: its loss, and those of `measure_levels` by layer and of `measure_copies`.

    Args:
        model: the model.
        texts: texts to read.
        arms: names in `ARMS`.
        ends: numbers of first tokens that are contexts, if a text has more; a whole text always is one.
    """
    for text in texts:
        begin, length = time.monotonic(), len(text.tokens)
        contexts = capture(model, text.tokens, [*(end for end in ends if end < length), length], COLD + STEADY)
        for end, layers, hidden in contexts:
            about = {"study": "selection", "text": text.name, "kind": text.kind, "context_tokens": end}
            targets = torch.tensor(text.tokens[end - len(hidden) + 1 : end], device=model.device)
            yield about | {"arm": LOSS, "nats": round(model.nats(hidden[:-1], targets), 4)}
            if LEVELS in arms:
                for each in layers:
                    for row in measure_levels(each, model.scale):
                        yield about | {"arm": LEVELS, "layer": each.layer} | _rounded(row)
            if COPIES in arms:
                for row in measure_copies(layers):
                    yield about | {"arm": COPIES} | _rounded(row)
        yield {"study": "selection", "text": text.name, "seconds": round(time.monotonic() - begin, 1)}


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in row.items()}
