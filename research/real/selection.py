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
    """Attention inputs of a layer that reads all tokens, with positions."""

    layer: int
    query: torch.Tensor
    """`[num_query_heads, newest, head_size]`, of the newest tokens."""
    keys: torch.Tensor
    """`[num_kv_heads, num_tokens, head_size]`."""


def capture(model: Llama, tokens: Sequence[int], newest: int) -> tuple[list[Captured], torch.Tensor]:
    """Read a text densely in one piece.

    Args:
        model: the model.
        tokens: ids.
        newest: tokens whose queries and hidden states are returned.

    Returns:
        The layers without windows, and hidden states `[newest, hidden_size]`.
    """
    found: list[Captured] = []

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if model.windows[layer] is None:
            found.append(Captured(layer, query[0, :, -newest:].clone(), key[0].clone()))
            if layer == model.num_layers - 1:
                # No layer reads what the older tokens would add.
                output = causal_attention(query[:, :, -newest:], key, value, model.scale)
                return F.pad(output, (0, 0, query.shape[2] - output.shape[2], 0))
        return model.attend(layer, query, key, value)

    ids = torch.tensor(tokens, device=model.device)
    hidden = model.hidden(ids[None], torch.arange(len(ids), device=model.device), attend)[0]
    return found, hidden[-newest:]


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
    """Return the scores of a server: `[rows, num_kv_heads, num_pages]` bfloat16.

    Args:
        statistics: see `stored`.
        query: `[num_query_heads, rows, head_size]`.
        complete: `[rows]`, complete pages of each query.
        refined: share of the pages whose records are read whole, if the records have levels.
    """
    blocks, kv_heads = statistics.vectors.shape[:2]
    grouped = query.bfloat16().unflatten(0, (kv_heads, -1)).permute(2, 0, 1, 3).contiguous()
    table = torch.arange(blocks, device=query.device).expand(len(complete), -1).contiguous()
    return score_pages(grouped, statistics, table, complete, 0.0, refined)


def chosen(scores: torch.Tensor, complete: torch.Tensor, budget: int) -> torch.Tensor:
    """Return the pages that a server selects: `[rows, num_kv_heads, budget]`, -1 where a row has fewer."""
    return select_pages(scores, complete, budget, _ALWAYS, _ALWAYS).long()


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
                mass = (layer.mass * taken).sum(dim=-1) + layer.rest
                yield {
                    "ranked_by": kind, "refined": refined, "scored": scored.mean().item(), "pages": budget,
                    "mass": mass.mean().item(), "shared": ((flat * taken).sum() / flat.sum()).item(),
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
        complete = (torch.arange(total - each.query.shape[1], total, device=each.keys.device) + 1) // PAGE
        scores = scores_of(stored(FLAT, each.keys), each.query, complete, 1.0)
        of_layer.append([chosen(scores, complete, budget).transpose(0, 1).cpu() for budget in READ_BUDGETS])
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


def measure_selection(model: Llama, texts: Sequence[Prompt], arms: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield rows for each text: its loss, and those of `measure_levels` by layer and of `measure_copies`.

    Args:
        model: the model.
        texts: texts to read.
        arms: names in `ARMS`.
    """
    for text in texts:
        begin = time.monotonic()
        about = {"study": "selection", "text": text.name, "kind": text.kind, "context_tokens": text.context_tokens}
        newest = min(COLD + STEADY, len(text.tokens))
        layers, hidden = capture(model, text.tokens, newest)
        targets = torch.tensor(text.tokens[-newest + 1 :], device=model.device)
        yield about | {"arm": LOSS, "nats": round(model.nats(hidden[:-1], targets), 4)}
        if LEVELS in arms:
            for each in layers:
                for row in measure_levels(each, model.scale):
                    yield about | {"arm": LEVELS, "layer": each.layer} | _rounded(row)
        if COPIES in arms:
            for row in measure_copies(layers):
                yield about | {"arm": COPIES} | _rounded(row)
        yield about | {"seconds": round(time.monotonic() - begin, 1)}


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in row.items()}
