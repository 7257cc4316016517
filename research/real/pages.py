"""Compares page statistics of equal size: the attention weight of the pages that they select."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from sparse_kernels.page_statistics.codes import Codes
from sparse_kernels.page_statistics.kinds.rotation import rotate

from research.real.model import Cache, Llama, causal_weights, read
from research.real.texts import RULER, Prompt

PAGE = 8
"""Tokens of a page."""
QUERIES = 96
"""Number of newest queries of a text that are measured; for questions, the queries of the answer."""
BUDGETS = (16, 64, 256)
"""Pages that are read, including the first and the newest complete page. The incomplete page is read in addition."""
REFINED = (0.125, 0.25, 0.5)
"""Shares of the pages that the second level scores."""
QUARTERS = Codes(bits=4, vectors=4, spacing=0.3352, dropped=2)
"""Quarters with the step that a normal distribution asks for."""
WIDE, WIDER = replace(QUARTERS, spacing=0.5), replace(QUARTERS, spacing=0.7)
"""Quarters with larger steps, for keys with heavy tails. The statistics `quarters` have the codes `WIDER`."""
ALL_KEYS = Codes(bits=2, vectors=PAGE, spacing=0.9957, dropped=2)
"""All keys of a page in the bytes of quarters."""
_BELOW = 1e4
"""Subtracted from scores of the first level, which puts them below those of the second level."""
SUPER = 4
"""Pages per record of a coarse first level."""

Estimate = Callable[[torch.Tensor], torch.Tensor]
"""Takes scaled queries `[rows, num_kv_heads, group_size, head_size]` float32. Returns the estimated log weight of each
page: `[rows, num_kv_heads, group_size, num_pages]`."""


@dataclass(frozen=True)
class Kind:
    """A record of a page."""

    make: Callable[[torch.Tensor], Estimate]
    """Takes keys `[num_kv_heads, num_pages, PAGE, head_size]` float32."""
    record_bytes: Callable[[int], int]
    """Bytes of a record, by head size."""


def in_8_bits(rows: torch.Tensor) -> torch.Tensor:
    """Round rows `[..., head_size]` to 8 bits, with one step size per row."""
    step = rows.abs().amax(dim=-1, keepdim=True).clamp(min=1e-8) / 127
    return (rows / step).round() * step


def in_codes(codes: Codes, vectors: torch.Tensor) -> torch.Tensor:
    """Round vectors `[..., codes.vectors, head_size]` by storing and reading them."""
    packed, steps = codes.pack(vectors)
    return codes.unpack(packed) * codes.per_vector(steps.float())[..., None]


def _dot(query: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Return products with `[num_kv_heads, num_pages, vectors, head_size]`: `[..., num_pages, vectors]`."""
    return torch.einsum("rhgd,hpvd->rhgpv", query, vectors)


def _split(keys: torch.Tensor, parts: int) -> torch.Tensor:
    means: torch.Tensor = keys.unflatten(-2, (parts, -1)).mean(dim=-2)
    return means


def _by_direction(keys: torch.Tensor) -> torch.Tensor:
    """Sort the keys of each page along the direction from the mean to the farthest key."""
    centred = keys - keys.mean(dim=-2, keepdim=True)
    far = centred.norm(dim=-1).argmax(dim=-1)
    direction = centred.gather(-2, far[..., None, None].expand(*far.shape, 1, keys.shape[-1]))
    order = (centred * direction).sum(dim=-1).argsort(dim=-1)
    return keys.gather(-2, order[..., None].expand_as(keys))


def _centred(keys: torch.Tensor) -> torch.Tensor:
    """Subtract the mean of all keys of a head. It adds the same value to all logits of a query."""
    return keys - keys.mean(dim=(1, 2), keepdim=True)


def _best_of(vectors: torch.Tensor) -> Estimate:
    return lambda query: _dot(query, vectors).amax(dim=-1) + math.log(PAGE)


def _sum_of(vectors: torch.Tensor) -> Estimate:
    return lambda query: _dot(query, vectors).logsumexp(dim=-1) + math.log(PAGE / vectors.shape[-2])


def _with_deviation(vectors: torch.Tensor, deviation: torch.Tensor, weight: float) -> Estimate:
    """Score the best vector, plus `weight` times query norm times deviation `[num_kv_heads, num_pages]`."""
    return lambda query: (
        _dot(query, vectors).amax(dim=-1) + weight * query.norm(dim=-1, keepdim=True) * deviation[None, :, None]
    )


def _spread(keys: torch.Tensor, parts: int = 1) -> torch.Tensor:
    groups: torch.Tensor = keys.unflatten(-2, (parts, -1))
    return (groups - groups.mean(dim=-2, keepdim=True)).square().sum(dim=-1).mean(dim=(-2, -1)).sqrt()


def _bounds(keys: torch.Tensor) -> Estimate:
    most, least = in_8_bits(keys.amax(dim=-2)), in_8_bits(keys.amin(dim=-2))
    return lambda query: (
        torch.einsum("rhgd,hpd->rhgp", query.clamp(min=0), most)
        + torch.einsum("rhgd,hpd->rhgp", query.clamp(max=0), least)
    )


def _variances(keys: torch.Tensor) -> Estimate:
    mean, deviation = in_8_bits(keys.mean(dim=-2)), in_8_bits(keys.std(dim=-2, correction=0))
    return lambda query: (
        torch.einsum("rhgd,hpd->rhgp", query, mean)
        + torch.einsum("rhgd,hpd->rhgp", query.square(), deviation.square()) / 2
    )


def _by_norm(keys: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = keys.norm(dim=-1, keepdim=True)
    return (keys * norm).sum(dim=-2, keepdim=True) / norm.sum(dim=-2, keepdim=True)


def _far(keys: torch.Tensor) -> torch.Tensor:
    """Return the farthest key of a page, and the mean of the others."""
    mean = keys.mean(dim=-2, keepdim=True)
    index = (keys - mean).norm(dim=-1).argmax(dim=-1)[..., None, None].expand(-1, -1, 1, keys.shape[-1])
    far = keys.gather(-2, index)
    return torch.cat([far, (mean * PAGE - far) / (PAGE - 1)], dim=-2)


def _all_keys(keys: torch.Tensor, best: bool = False) -> Estimate:
    vectors = in_codes(ALL_KEYS, rotate(keys))
    if best:
        return lambda query: _dot(rotate(query), vectors).amax(dim=-1) + math.log(PAGE)
    return lambda query: _dot(rotate(query), vectors).logsumexp(dim=-1)


def _quarters(keys: torch.Tensor, codes: Codes = QUARTERS) -> torch.Tensor:
    return in_codes(codes, _split(keys, 4))


KINDS_OF_PAGES: dict[str, Kind] = {
    "quarters4": Kind(lambda k: _best_of(_quarters(k)), lambda d: 2 * d),
    "quest8": Kind(_bounds, lambda d: 2 * d + 4),
    "mean8_deviation": Kind(lambda k: _with_deviation(in_8_bits(_split(k, 1)), _spread(k), 1.0), lambda d: d + 4),
    "halves8": Kind(lambda k: _best_of(in_8_bits(_split(k, 2))), lambda d: 2 * d + 4),
    "quarters4_deviation": Kind(lambda k: _with_deviation(_quarters(k), _spread(k, 4), 0.25), lambda d: 2 * d + 2),
    "keys2": Kind(_all_keys, lambda d: 2 * d),
    "quarters4_wide": Kind(lambda k: _best_of(_quarters(k, WIDE)), lambda d: 2 * d),
    "quarters4_wider": Kind(lambda k: _best_of(_quarters(k, WIDER)), lambda d: 2 * d),
    "keys2_best": Kind(lambda k: _all_keys(k, best=True), lambda d: 2 * d),
    "keys_exact": Kind(_best_of, lambda d: 16 * d),
    "keys2_centred": Kind(lambda k: _all_keys(_centred(k)), lambda d: 2 * d),
    "quarters4_centred": Kind(lambda k: _best_of(_quarters(_centred(k))), lambda d: 2 * d),
    "quarters4_sum": Kind(lambda k: _sum_of(_quarters(k)), lambda d: 2 * d),
    "sorted_quarters4": Kind(lambda k: _best_of(_quarters(_by_direction(k))), lambda d: 2 * d),
    "sorted_halves8": Kind(lambda k: _best_of(in_8_bits(_split(_by_direction(k), 2))), lambda d: 2 * d + 4),
    "far8": Kind(lambda k: _best_of(in_8_bits(_far(k))), lambda d: 2 * d + 4),
    "variances8": Kind(_variances, lambda d: 2 * d + 4),
    "mean16_deviation": Kind(lambda k: _with_deviation(_split(k, 1).bfloat16().float(), _spread(k), 1.0),
                             lambda d: 2 * d + 2),
    "mean16_deviation_quarter": Kind(lambda k: _with_deviation(_split(k, 1).bfloat16().float(), _spread(k), 0.25),
                                     lambda d: 2 * d + 2),
    "mean8": Kind(lambda k: _best_of(in_8_bits(_split(k, 1))), lambda d: d + 2),
    "by_norm8": Kind(lambda k: _best_of(in_8_bits(_by_norm(k))), lambda d: d + 2),
    "quarters_exact": Kind(lambda k: _best_of(_split(k, 4)), lambda d: 8 * d),
}  # fmt: skip
"""By name of the arm. `quarters_exact` and `keys_exact` show the loss by quantisation."""
LEVELS = ("two_levels", "two_levels_super")
"""Arms with a first level: mean and spread of each page or of `SUPER` pages. Then quarters of the best pages."""
ORACLE = "oracle"


def first_level(keys: torch.Tensor) -> Estimate:
    """Return the mean in 8 bits, and half the largest distance of a quarter from it."""
    mean = _split(keys, 1)
    distance = (_split(keys, 4) - mean).norm(dim=-1).amax(dim=-1)
    return _with_deviation(in_8_bits(mean), distance, 0.5)


def over_group(estimate: torch.Tensor, reduce: str) -> torch.Tensor:
    """Return one score per KV head: the largest of the group, or the mean of the heads' estimated shares."""
    return estimate.amax(dim=2) if reduce == "max" else estimate.softmax(dim=-1).mean(dim=2)


@dataclass
class Layer:
    """Attention inputs of a layer."""

    query: torch.Tensor
    """`[rows, num_kv_heads, group_size, head_size]` float32, scaled."""
    keys: torch.Tensor
    """`[num_kv_heads, num_pages, PAGE, head_size]` float32, pages complete for the newest query."""
    mass: torch.Tensor
    """`[rows, num_kv_heads, num_pages]` float32, true weight, mean over the group."""
    rest: torch.Tensor
    """`[rows, num_kv_heads]`, weight of the incomplete page."""
    complete: torch.Tensor
    """`[rows]`, complete pages of each query."""

    @classmethod
    def of(cls, query: torch.Tensor, keys: torch.Tensor, scale: float) -> Layer:
        """Take the newest queries `[num_query_heads, rows, head_size]` and keys `[num_kv_heads, num_tokens, ...]`."""
        num_tokens = keys.shape[1]
        rows = torch.arange(num_tokens - query.shape[1], num_tokens, device=keys.device)
        weights = causal_weights(query, keys, scale, rows).mean(dim=1).transpose(0, 1)
        complete, count = (rows + 1) // PAGE, num_tokens // PAGE
        mass = weights[..., : count * PAGE].unflatten(-1, (count, PAGE)).sum(dim=-1)
        mass = mass.masked_fill((torch.arange(count, device=keys.device) >= complete[:, None])[:, None], 0)
        grouped = query.float().unflatten(0, (len(keys), -1)).permute(2, 0, 1, 3) * scale
        pages = keys[:, : count * PAGE].float().unflatten(1, (count, PAGE))
        return cls(grouped, pages, mass, 1 - mass.sum(dim=-1), complete)

    def best(self, scores: torch.Tensor, budget: int) -> torch.Tensor:
        """Return the best pages of each query: `[rows, num_kv_heads, budget]`.

        Args:
            scores: `[rows, num_kv_heads, num_pages]`.
            budget: pages, including the first and the newest.
        """
        page = torch.arange(scores.shape[-1], device=scores.device)
        always = (page == 0) | (page == self.complete[:, None] - 1)
        missing = page >= self.complete[:, None]
        ranked = scores.masked_fill(always[:, None], torch.inf).masked_fill(missing[:, None], -torch.inf)
        return ranked.topk(min(budget, ranked.shape[-1]), dim=-1).indices

    def read(self, scores: torch.Tensor, budget: int) -> torch.Tensor:
        """Return the weight of the best pages, see `best`: `[rows, num_kv_heads]`."""
        return self.mass.gather(-1, self.best(scores, budget)).sum(dim=-1) + self.rest


def measure_layer(layer: Layer, arms: Sequence[str], reduces: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each arm, combination of a group, and budget."""
    size = layer.keys.shape[-1]
    for arm in arms:
        if arm == ORACLE:
            yield from _budgets(layer, layer.mass, {"arm": arm, "reduce": "", "bytes": 2 * PAGE * size})
        elif arm in LEVELS:
            yield from _two_levels(layer, arm)
        else:
            kind = KINDS_OF_PAGES[arm]
            estimate = kind.make(layer.keys)(layer.query)
            about = {"arm": arm, "bytes": kind.record_bytes(size)}
            for reduce in reduces:
                yield from _budgets(layer, over_group(seen(layer, estimate), reduce), about | {"reduce": reduce})


def _two_levels(layer: Layer, arm: str) -> Iterator[dict[str, Any]]:
    size, count = layer.keys.shape[-1], layer.keys.shape[1]
    fine = over_group(seen(layer, KINDS_OF_PAGES["quarters4"].make(layer.keys)(layer.query)), "max")
    if arm == LEVELS[0]:
        coarse = over_group(first_level(layer.keys)(layer.query), "max")
        first_bytes = size + 4
    else:
        short = -count % SUPER
        padded = torch.cat([layer.keys, layer.keys[:, -1:].expand(-1, short, -1, -1)], dim=1)
        joined = padded.unflatten(1, (-1, SUPER)).flatten(2, 3)
        coarse = over_group(first_level(joined)(layer.query), "max")
        coarse = coarse.repeat_interleave(SUPER, dim=-1)[..., :count]
        first_bytes = (size + 4) // SUPER
    missing = torch.arange(count, device=fine.device) >= layer.complete[:, None]
    coarse = coarse.masked_fill(missing[:, None], -torch.inf)
    for share in REFINED:
        best = coarse.topk(max(int(share * count), 1), dim=-1).indices
        refined = torch.zeros_like(fine, dtype=torch.bool).scatter(-1, best, True)
        # If the budget exceeds the refined pages, other pages fill it.
        scores = torch.where(refined, fine, coarse - _BELOW)
        about = {"arm": f"{arm}_{share}", "reduce": "max", "bytes": first_bytes + round(share * 2 * size)}
        yield from _budgets(layer, scores, about)


def seen(layer: Layer, estimate: torch.Tensor) -> torch.Tensor:
    """Mask the pages that a query does not see completely: `[rows, num_kv_heads, group_size, num_pages]`."""
    page = torch.arange(estimate.shape[-1], device=estimate.device)
    return estimate.masked_fill((page >= layer.complete[:, None])[:, None, None], -torch.inf)


def _budgets(layer: Layer, scores: torch.Tensor, about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for budget in BUDGETS:
        yield about | {"pages": budget, "mass": layer.read(scores, budget).mean().item()}


def measure_pages(
    model: Llama, texts: Sequence[Prompt], arms: Sequence[str], reduces: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each text, arm, combination of a group, and budget: means over layers, heads and rows.

    Args:
        model: the model.
        texts: texts, and questions followed by their right answers.
        arms: names in `KINDS_OF_PAGES` or `LEVELS`, or `ORACLE`.
        reduces: `max`, `share`, or both.
    """
    for text in texts:
        begin = time.monotonic()
        ids = [*text.tokens, *text.gold]
        queries = min(len(text.gold), QUERIES) if text.kind == RULER else QUERIES
        sums: dict[tuple[str, str, int, int], float] = {}
        captured: list[tuple[torch.Tensor, torch.Tensor]] = []

        def watch(
            index: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, to: Any = captured,
            newest: int = queries,
        ) -> torch.Tensor:  # fmt: skip
            to.append((query[0, :, -newest:].clone(), keys[0]))
            return query

        read(model, torch.tensor(ids, device=model.device), Cache(model, len(ids)), watch)
        for query, keys in captured:
            for row in measure_layer(Layer.of(query, keys, model.scale), arms, reduces):
                key = row["arm"], row["reduce"], row["pages"], row["bytes"]
                sums[key] = sums.get(key, 0.0) + row["mass"]
        for (arm, reduce, pages, size), total in sums.items():
            yield {
                "study": "pages", "text": text.name, "kind": text.kind, "context_tokens": text.context_tokens,
                "arm": arm, "reduce": reduce, "pages": pages, "bytes": size,
                "mass": round(total / model.num_layers, 5),
            }  # fmt: skip
        yield {"study": "pages", "text": text.name, "seconds": round(time.monotonic() - begin, 3)}
