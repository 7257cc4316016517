"""Rules that choose which tokens of a prompt each KV head keeps.

A rule states whose attention votes, how votes of queries, heads and neighbours are combined, and how the budget is
distributed. `RULES` contains the compared rules; a new rule needs an entry there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812

SINKS = 4
"""Number of first tokens that are always kept."""
BLOCK = 16
"""Tokens of a block. A budget is a whole number of blocks."""

Source = Literal["window", "h2o", "expected", "repeat", "answer", "newest"]
"""Source of the votes: the newest queries, all queries of the prompt, expected later queries, a second reading of the
prompt, the queries of the dense answer (no server has them), or no votes: the newest tokens are kept."""


@dataclass(frozen=True)
class Rule:
    """A rule that chooses the tokens of a prompt."""

    source: Source = "window"
    window: int = 32
    """Number of newest tokens that are kept. Their queries vote if the source is `window`."""
    skip_tail: bool = False
    """Whether the tokens of the chat template after the question do not vote. They are kept in addition."""
    queries: Literal["sum", "max"] = "sum"
    """How to combine the votes of queries."""
    group: Literal["mean", "max"] = "mean"
    """How to combine the votes of the query heads of a KV head."""
    values: bool = False
    """Whether a vote is multiplied with the norm of the token's value (VATP)."""
    pool: int = 5
    """Size of the neighbourhood, token included, from which a token takes its vote."""
    ahead: int = 0
    """A token takes the largest vote of this many tokens before it, and of two after it. Replaces `pool`."""
    average: bool = False
    """Whether a token takes the average instead of the largest vote."""
    page: int = 1
    """Tokens of a page. Whole pages are kept, by the sum of their votes."""
    across: Literal["none", "layer", "model"] = "none"
    """Heads that keep the same tokens, by the mean of their votes: those of a layer, or all."""
    strongest: bool = False
    """Whether heads that keep the same tokens take the largest vote instead of the mean."""
    adaptive: bool = False
    """Whether the heads of a layer share one budget by their votes, each at least a fifth of its share (AdaKV)."""
    whole_layers: int = 0
    """Number of first layers that keep everything. The others keep less."""
    pyramid: float = 0.0
    """Average budget of the layers over that of the last one (PyramidKV's beta); 0 for equal budgets."""
    recent_share: float = 0.0
    """Share of the budget for the newest tokens (H2O)."""

    @property
    def serves(self) -> str:
        """What the serving code needs for the rule: `setting`, `code`, or the reason why it cannot be built."""
        if self.adaptive:
            return "no: budgets of heads differ, and all heads of a layer share blocks"
        if self.source == "answer":
            return "no: the answer is not known"
        today = replace(self, window=32, pool=5, pyramid=0.0, recent_share=0.0)
        built = self.source in ("window", "h2o", "newest") and replace(today, source="window") == Rule()
        return "setting" if built else "code"

    def newest(self, budget: int, tail: int) -> int:
        """Return the number of newest tokens that are kept regardless of votes.

        Args:
            budget: tokens that a head keeps.
            tail: tokens of the chat template after the question.
        """
        return max(self.window + (tail if self.skip_tail else 0), int(self.recent_share * budget))


_SNAPKV = Rule()
RULES: dict[str, Rule] = {
    "snapkv": _SNAPKV,
    "pool13": Rule(pool=13),
    "pool25": Rule(pool=25),
    "pool49": Rule(pool=49),
    "model25": Rule(pool=25, across="model"),
    "layer25": Rule(pool=25, across="layer"),
    "ahead25": Rule(ahead=25),
    "answer5": Rule(source="answer"),
    "answer25": Rule(source="answer", pool=25),
    "question25": Rule(pool=25, skip_tail=True),
    "repeat": Rule(source="repeat", pool=1),
    "expected": Rule(source="expected", values=True, pool=1),
    "gmax25": Rule(pool=25, group="max"),
    "qmax25": Rule(pool=25, queries="max"),
    "page16": Rule(pool=1, page=16),
    "page8": Rule(pool=1, page=8),
    "page32": Rule(pool=1, page=32),
    "vatp25": Rule(pool=25, values=True),
    "whole2": Rule(pool=25, whole_layers=2),
    "ada25": Rule(pool=25, adaptive=True),
    "window64_25": Rule(pool=25, window=64),
    "window128_25": Rule(pool=25, window=128),
    "modelmax25": Rule(pool=25, across="model", strongest=True),
    "layermax25": Rule(pool=25, across="layer", strongest=True),
    "model13": Rule(pool=13, across="model"),
    "model49": Rule(pool=49, across="model"),
    "model_ahead25": Rule(ahead=25, across="model"),
    "model_qmax25": Rule(pool=25, across="model", queries="max"),
    "model_question25": Rule(pool=25, across="model", skip_tail=True),
    "question_qmax25": Rule(pool=25, queries="max", skip_tail=True),
    "avg7": Rule(pool=7, average=True),
    "avg13": Rule(pool=13, average=True),
    "avg25": Rule(pool=25, average=True),
    "avg49": Rule(pool=49, average=True),
    "ahead13": Rule(ahead=13),
    "ahead49": Rule(ahead=49),
    "question": Rule(skip_tail=True),
    "gmax": Rule(group="max"),
    "vatp": Rule(values=True),
    "ada": Rule(adaptive=True),
    "window8_25": Rule(pool=25, window=8),
    "window16_25": Rule(pool=25, window=16),
    "window64": Rule(window=64),
    "window128": Rule(window=128),
    "repeat13": Rule(source="repeat", pool=13),
    "repeat_model": Rule(source="repeat", pool=1, across="model"),
    "expected13": Rule(source="expected", values=True, pool=13),
    "h2o": Rule(source="h2o", pool=1, recent_share=0.5),
    "h2o25": Rule(source="h2o", pool=25),
    "pyramid": Rule(window=128, pyramid=20.0),
    "pyramid25": Rule(window=128, pyramid=20.0, pool=25),
    "whole4": Rule(pool=25, whole_layers=4),
    "newest": Rule(source="newest"),
}
"""By name of the arm, the most important first."""


def combine(votes: torch.Tensor, values: torch.Tensor, rule: Rule, tail: int = 0) -> torch.Tensor:
    """Combine the votes of query heads into one score per KV head and token.

    Args:
        votes: `[layers, num_kv_heads, group_size, num_tokens]` float32, non-negative.
        values: `[layers, num_kv_heads, num_tokens, head_size]`.
        rule: how to combine heads and neighbours.
        tail: tokens of the chat template after the question.

    Returns:
        `[layers, num_kv_heads, num_tokens]` float32.
    """
    # A token that is always kept gives no neighbour its vote.
    votes = votes.clone()
    votes[..., max(votes.shape[-1] - rule.newest(0, tail), 0) :] = 0
    scores = votes.mean(dim=2) if rule.group == "mean" else votes.amax(dim=2)
    if rule.values:
        scores = scores * values.float().norm(dim=-1)
    if rule.across != "none":
        dims = (0, 1) if rule.across == "model" else (1,)
        shared = scores.amax(dim=dims, keepdim=True) if rule.strongest else scores.mean(dim=dims, keepdim=True)
        scores = shared.expand_as(scores)
    return pool(scores, rule)


def pool(scores: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Return the largest or average score of each token's neighbours, or the sum of its page: `[..., num_tokens]`."""
    if rule.page > 1:
        short = -scores.shape[-1] % rule.page
        pages: torch.Tensor = F.pad(scores, (0, short)).unflatten(-1, (-1, rule.page)).sum(dim=-1)
        return pages.repeat_interleave(rule.page, dim=-1)[..., : scores.shape[-1]]
    rows = scores.flatten(0, -2)
    if rule.ahead:
        # Votes are not negative, so padding with zeros changes nothing.
        rows = F.max_pool1d(F.pad(rows, (rule.ahead - 1, 2)), rule.ahead + 2, stride=1)
    elif rule.average:
        rows = F.avg_pool1d(rows, rule.pool, stride=1, padding=rule.pool // 2)
    elif rule.pool > 1:
        rows = F.max_pool1d(rows, rule.pool, stride=1, padding=rule.pool // 2)
    return rows.view_as(scores)


def layer_budgets(rule: Rule, budget: int, num_tokens: int, num_layers: int) -> list[int]:
    """Return the number of tokens that each layer keeps, `budget` on average."""
    if rule.whole_layers:
        whole = min(rule.whole_layers, num_layers - 1)
        each = (budget * num_layers - num_tokens * whole) / (num_layers - whole)
        return [num_tokens] * whole + [max(_blocks(each), rule.window + SINKS)] * (num_layers - whole)
    if rule.pyramid:
        least = budget / rule.pyramid
        step = 2 * (budget - least) / max(num_layers - 1, 1)
        linear = [2 * budget - least - step * layer for layer in range(num_layers)]
        return [min(max(_blocks(size), rule.window + SINKS), num_tokens) for size in linear]
    return [min(budget, num_tokens)] * num_layers


def choose(scores: torch.Tensor, rule: Rule, budget: int, tail: int = 0) -> torch.Tensor:
    """Choose the tokens of each layer.

    Args:
        scores: `[layers, num_kv_heads, num_tokens]`, finite.
        rule: which tokens are always kept, and how the budget is distributed.
        budget: tokens per head, mean of all layers.
        tail: tokens of the chat template, kept in addition to the window if they do not vote.

    Returns:
        `[layers, num_kv_heads, num_tokens]` bool.
    """
    num_layers, num_heads, num_tokens = scores.shape
    scores = scores.clone()
    newest = rule.newest(budget, tail)
    if rule.source == "newest":
        scores[:] = torch.arange(num_tokens, dtype=scores.dtype, device=scores.device)
    else:
        scores[..., num_tokens - min(newest, num_tokens) :] = torch.inf
    scores[..., :SINKS] = torch.inf
    kept = []
    for layer, size in enumerate(layer_budgets(rule, budget, num_tokens, num_layers)):
        of_layer = scores[layer]
        if rule.adaptive:
            floor = max(size // 5, min(newest + SINKS, size))
            of_layer = of_layer.masked_fill(mask_of_best(of_layer, floor), torch.inf)
            kept.append(mask_of_best(of_layer.flatten()[None], size * num_heads).view(num_heads, num_tokens))
        else:
            kept.append(mask_of_best(of_layer, size))
    return torch.stack(kept)


def budget_of(num_tokens: int, ratio: float) -> int:
    """Return the tokens of a share of a prompt, in whole blocks."""
    return _blocks(num_tokens * ratio)


def survival(kept: torch.Tensor, spans: tuple[tuple[int, int], ...]) -> float:
    """Return the share of layers and KV heads that keep all tokens of an answer, mean over answers."""
    if not spans:
        return math.nan
    shares = [kept[..., first:end].all(dim=-1).float().mean() for first, end in spans]
    return torch.stack(shares).mean().item()


def _blocks(tokens: float) -> int:
    return max(int(tokens) // BLOCK, 1) * BLOCK


def mask_of_best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return where the largest `count` scores of each row are; of equal ones the first."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)
