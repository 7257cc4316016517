"""Decides which prompts of a step attend sparsely, from lengths that the host knows, and calls what attends.

A step's prompts are cut into rounds, so that what an operation keeps of their contexts stays bounded, and each round
into tiles, once for all layers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from sparse_kernels.batch import PrefillBatch, Prompts, Softmax
from sparse_kernels.block_prefill import BlockRule, Tiles, VarlenAttention, plan_tiles, prefill_blocks
from sparse_kernels.cache import KVCache


@dataclass(frozen=True)
class PrefillPlan:
    """How the prompts of one attention layer attend."""

    rule: BlockRule
    """Which blocks their tiles read."""
    counters: torch.Tensor
    """`[num_kv_heads, 2]` int64, past blocks read and past blocks."""


class PromptRound(NamedTuple):
    """Consecutive prompts of a step that attend together."""

    tokens: slice
    """Their query tokens among those of the step's prompts."""
    prompts: Prompts
    """Where they lie."""
    tiles: dict[int, Tiles]
    """Their tiles, by the number of query heads to a KV head of the layers that take them."""


def reads_less(rule: BlockRule, context_tokens: int) -> bool:
    """Returns whether some tile of a context chooses, not reads everything.

    Args:
        rule: which blocks tiles read.
        context_tokens: tokens of the context, or an upper bound of them.
    """
    past = rule.past_blocks(max(context_tokens - 1, 0))
    return past * rule.block_tokens >= rule.dense_tokens and past > rule.fewest_blocks


def plan_rounds(prompts: Prompts, rule: BlockRule, group_sizes: Collection[int], most_tokens: int) -> list[PromptRound]:
    """Cuts the prompts of a step into rounds, and those into tiles. The host does not wait for the device.

    Args:
        prompts: the prompts.
        rule: which blocks their tiles read.
        group_sizes: query heads to a KV head of the layers.
        most_tokens: tokens that the contexts of a round have together, unless it is one request.
    """
    rounds, token = [], 0
    for first, last in _parts(prompts.longest, most_tokens):
        part = prompts.part(first, last)
        if part.num_tokens:
            tiles = {group: plan_tiles(part, rule, group) for group in group_sizes}
            rounds.append(PromptRound(slice(token, token + part.num_tokens), part, tiles))
        token += part.num_tokens
    return rounds


def _parts(lengths: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Returns ranges of consecutive lengths that add up to no more than `most`, or are one."""
    bounds, total = [0], 0
    for index, length in enumerate(lengths):
        if total + length > most and index > bounds[-1]:
            bounds.append(index)
            total = 0
        total += length
    return list(zip(bounds, [*bounds[1:], len(lengths)], strict=True))


def attend_prompts(
    plan: PrefillPlan,
    tiles: dict[int, Tiles],
    batch: PrefillBatch,
    cache: KVCache,
    softmax: Softmax,
    output: torch.Tensor,
    attend: VarlenAttention | None = None,
) -> None:
    """Attends with a round of prompts; here another method of prefill would be called.

    Args:
        plan: what the layer does.
        tiles: see `PromptRound`.
        batch: the round's queries.
        cache: what is attended to, in the pages of its statistics.
        softmax: how logits become weights.
        output: `[num_tokens, num_query_heads, head_size]`, where to write.
        attend: on a GPU what attends, over virtual sequences.
    """
    of_group = tiles[batch.query.shape[1] // cache.num_kv_heads]
    prefill_blocks(batch, cache, softmax, plan.rule, of_group, output=output, attend=attend, counters=plan.counters)
