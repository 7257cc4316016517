"""Decides which prompts of a step attend sparsely, from lengths that the host knows, and calls what attends.

A step's prompts are cut into rounds, so that what an operation keeps of their contexts stays bounded. The tiles of
each round, or its probe rows, are found once for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from sparse_kernels.batch import PrefillBatch, Prompts, Softmax
from sparse_kernels.block_prefill import BlockRule, Tiles, VarlenAttention, plan_tiles, prefill_blocks
from sparse_kernels.cache import KVCache
from sparse_kernels.token_prefill import KeptAttention, TokenRule, draw_probes, token_prefill

PromptRule = BlockRule | TokenRule
"""What prompts attend to: the blocks that their tiles choose, or the tokens that a layer keeps."""


@dataclass(frozen=True)
class PrefillPlan:
    """How the prompts of one attention layer attend."""

    rule: PromptRule
    """What they attend to."""
    counters: torch.Tensor
    """`[num_kv_heads, COUNTERS]` int64, see `block_prefill.COUNTERS`; under a rule of tokens, which all heads share,
    the first two are tokens kept and tokens of the contexts."""


class PromptRound(NamedTuple):
    """Consecutive prompts of a step that attend together."""

    tokens: slice
    """Their query tokens among those of the step's prompts."""
    prompts: Prompts
    """Where they lie."""
    tiles: dict[int, Tiles]
    """Their tiles, by the number of query heads to a KV head of the layers that take them; none where the rule is one
    of tokens."""
    probes: torch.Tensor | None
    """`[num_requests, num_probes]` int32, see `draw_probes`; None where the rule is one of blocks."""


class PromptKernels(NamedTuple):
    """What attends on a GPU in place of the operations' own kernels, by method; None for those."""

    blocks: VarlenAttention | None = None
    """Attends over virtual sequences."""
    tokens: Callable[[KeptAttention], None] | None = None
    """Attends within the tokens that are kept."""


def reads_less(rule: PromptRule, context_tokens: int) -> bool:
    """Returns whether something of a context may be left out: a tile of it chooses, or it is long enough to be sparse.

    Args:
        rule: what prompts attend to.
        context_tokens: tokens of the context, or an upper bound of them.
    """
    if isinstance(rule, TokenRule):
        return context_tokens > rule.dense_tokens
    past = rule.past_blocks(max(context_tokens - 1, 0))
    return past * rule.block_tokens >= rule.dense_tokens and past > rule.fewest_blocks


def plan_rounds(
    prompts: Prompts, rule: PromptRule, group_sizes: Collection[int], most_tokens: int
) -> list[PromptRound]:
    """Cuts the prompts of a step into rounds, and finds their tiles or probe rows. The host does not wait for the
    device.

    Args:
        prompts: the prompts.
        rule: what they attend to.
        group_sizes: query heads to a KV head of the layers.
        most_tokens: tokens that the contexts of a round have together, unless it is one request. For a rule of tokens
            all contexts of a round count as the longest, because that is the memory they take.
    """
    rounds, token = [], 0
    for first, last in _parts(prompts.longest, most_tokens, padded=isinstance(rule, TokenRule)):
        part = prompts.part(first, last)
        if part.num_tokens:
            tokens = slice(token, token + part.num_tokens)
            if isinstance(rule, TokenRule):
                # The draw asks the batch for lengths alone; each layer has its own queries.
                probes = draw_probes(part.batch(part.seq_lens[:0]), rule)
                rounds.append(PromptRound(tokens, part, {}, probes))
            else:
                tiles = {group: plan_tiles(part, rule, group) for group in group_sizes}
                rounds.append(PromptRound(tokens, part, tiles, None))
        token += part.num_tokens
    return rounds


def _parts(lengths: Sequence[int], most: int, padded: bool) -> list[tuple[int, int]]:
    """Returns ranges of consecutive lengths that add up to no more than `most`, or are one.

    Args:
        lengths: the lengths.
        most: the bound.
        padded: whether every length of a range counts as the longest of them.
    """
    bounds, total, longest = [0], 0, 0
    for index, length in enumerate(lengths):
        grown = max(longest, length) * (index - bounds[-1] + 1) if padded else total + length
        if grown > most and index > bounds[-1]:
            bounds.append(index)
            total = longest = 0
        total, longest = total + length, max(longest, length)
    return list(zip(bounds, [*bounds[1:], len(lengths)], strict=True))


def attend_prompts(
    plan: PrefillPlan,
    part: PromptRound,
    batch: PrefillBatch,
    cache: KVCache,
    softmax: Softmax,
    output: torch.Tensor,
    kernels: PromptKernels,
) -> None:
    """Attends with a round of prompts; here another method of prefill would be called.

    Args:
        plan: what the layer does.
        part: the round.
        batch: its queries.
        cache: what is attended to; for a rule of blocks in the pages of its statistics.
        softmax: how logits become weights.
        output: `[num_tokens, num_query_heads, head_size]`, where to write.
        kernels: what attends on a GPU.
    """
    if isinstance(plan.rule, TokenRule):
        kept = token_prefill(batch, cache, softmax, plan.rule, output, probes=part.probes, attend=kernels.tokens)
        in_contexts = torch.where(batch.query_lens > 0, batch.seq_lens, 0)
        plan.counters[:, :2].add_(torch.stack([kept.counts.sum(), in_contexts.sum()]))
        return
    tiles = part.tiles[batch.query.shape[1] // cache.num_kv_heads]
    prefill_blocks(
        batch, cache, softmax, plan.rule, tiles, output=output, attend=kernels.blocks, counters=plan.counters
    )  # fmt: skip
