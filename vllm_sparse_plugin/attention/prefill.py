"""Decides which prompts of a step attend sparsely, by lengths on the host, and runs their attention.

The prompts of a step are cut into rounds, so that scratch has a bound. Tiles or probe rows of a round are found once
for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from sparse_kernels.batch import PrefillBatch, Prompts, Softmax
from sparse_kernels.block_prefill import BlockRule, ScoringRows, Tiles, VarlenAttention, plan_tiles, prefill_blocks
from sparse_kernels.cache import KVCache
from sparse_kernels.token_prefill import ListedAttention, TokenRule, attended_pairs, draw_probes, token_prefill

PromptRule = BlockRule | TokenRule
"""Key blocks that tiles choose, or important tokens of a layer."""


@dataclass(frozen=True)
class PrefillPlan:
    """Sparse prefill of one attention layer."""

    rule: PromptRule
    counters: torch.Tensor
    """`[num_kv_heads, COUNTERS]` int64, see `block_prefill.COUNTERS`. Under a `TokenRule` all heads share the numbers:
    important tokens, tokens of the contexts, pairs that attend, and pairs of dense attention."""


class PromptRound(NamedTuple):
    """Consecutive prompts of a step that attend together."""

    tokens: slice
    """Their query tokens among those of all prompts of the step."""
    prompts: Prompts
    """Where they are in the cache."""
    tiles: dict[int, Tiles]
    """Their tiles, by query heads per KV head; empty under a `TokenRule`."""
    probes: torch.Tensor | None
    """`[num_requests, num_probes]` int32, see `draw_probes`; None under a `BlockRule`."""


class PromptKernels(NamedTuple):
    """GPU kernels that replace the default kernels of the operations; None for the default."""

    blocks: VarlenAttention | None = None
    """Attends over virtual sequences."""
    tokens: Callable[[ListedAttention], None] | None = None
    """Attends to lists of tokens."""


def reads_less(rule: PromptRule, context_tokens: int) -> bool:
    """Returns whether a prompt may attend sparsely.

    Args:
        rule: the sparse prefill.
        context_tokens: tokens of the context, or an upper bound.
    """
    if isinstance(rule, TokenRule):
        return context_tokens > rule.dense_tokens
    past = rule.past_blocks(max(context_tokens - 1, 0))
    return past * rule.block_tokens >= rule.dense_tokens and past > rule.fewest_blocks


def plan_rounds(
    prompts: Prompts, rule: PromptRule, group_sizes: Collection[int], bounds: Sequence[tuple[int, int]]
) -> list[PromptRound]:
    """Finds the tiles or probe rows of the rounds of a step. The host does not wait for the device.

    Args:
        prompts: the prompts.
        rule: the sparse prefill.
        group_sizes: query heads per KV head of the layers.
        bounds: the first prompt of each round, and the first one after it, see `round_bounds`.
    """
    rounds, token = [], 0
    for first, last in bounds:
        part = prompts.part(first, last)
        if part.num_tokens:
            tokens = slice(token, token + part.num_tokens)
            if isinstance(rule, TokenRule):
                # Probes depend on lengths alone, so the batch needs no queries.
                probes = draw_probes(part.batch(part.seq_lens[:0]), rule)
                rounds.append(PromptRound(tokens, part, {}, probes))
            else:
                tiles = {group: plan_tiles(part, rule, group) for group in group_sizes}
                rounds.append(PromptRound(tokens, part, tiles, None))
        token += part.num_tokens
    return rounds


def round_bounds(
    prompts: Prompts, rule: PromptRule, group_sizes: Collection[int], most_tokens: int, longest: int
) -> list[tuple[int, int]]:
    """Cuts the prompts of a step into rounds that take no more memory than one prompt may take.

    Args:
        prompts: the prompts.
        rule: the sparse prefill.
        group_sizes: query heads per KV head of the layers.
        most_tokens: the most query tokens of a step.
        longest: tokens of the longest context.

    Returns:
        The first prompt of each round, and the first one after it.
    """
    lengths, ones = prompts.longest, [1] * len(prompts.longest)
    if isinstance(rule, TokenRule):
        return _parts([_Bound(ones, lengths, longest)])
    block = rule.block_tokens
    blocks, most_blocks = [-(-length // block) for length in lengths], -(-longest // block)
    bounds = [_Bound(blocks, ones, most_blocks)]
    for group_size in group_sizes:
        scoring = ScoringRows.of(rule, group_size)
        groups = [scoring.groups(length, rule) for length in prompts.query_lens]
        bounds.append(_Bound(groups, blocks, scoring.groups(most_tokens, rule) * most_blocks))
    return _parts(bounds)


def rehearse(rule: PromptRule, block_table: torch.Tensor, group_size: int, longest: int) -> Iterator[PromptRound]:
    """Yields dummy rounds. Together they launch every kernel that prompts may need.

    Args:
        rule: the sparse prefill.
        block_table: `[max_blocks]` int32, room for the longest context.
        group_size: query heads per KV head.
        longest: tokens of the longest context.
    """
    contexts = [min(rule.tile_tokens, longest)] if isinstance(rule, TokenRule) else rule.contexts_of_kernels(longest)
    for context in contexts:
        tokens = min(rule.tile_tokens, context)
        starts, lengths = (torch.tensor(of, dtype=torch.int32).to(block_table) for of in ([0, tokens], [context]))
        prompts = Prompts(starts, block_table[None], lengths, (tokens,), (context,))
        yield from plan_rounds(prompts, rule, {group_size}, [(0, 1)])


class _Bound(NamedTuple):
    """A bound on the memory of a round: the sum of the counts of its prompts, times their largest size."""

    counts: Sequence[int]
    sizes: Sequence[int]
    most: int


def _parts(bounds: Sequence[_Bound]) -> list[tuple[int, int]]:
    """Returns ranges of consecutive prompts. A range is within all bounds, or has one prompt."""
    starts, prompts = [0], len(bounds[0].counts)
    totals, largest = [0] * len(bounds), [0] * len(bounds)
    for index in range(prompts):
        for number, (counts, sizes, _) in enumerate(bounds):
            totals[number] += counts[index]
            largest[number] = max(largest[number], sizes[index])
        exceeds = any(totals[number] * largest[number] > each.most for number, each in enumerate(bounds))
        if exceeds and index > starts[-1]:
            starts.append(index)
            totals, largest = [each.counts[index] for each in bounds], [each.sizes[index] for each in bounds]
    return list(pairwise([*starts, prompts]))


def attend_prompts(
    plan: PrefillPlan,
    part: PromptRound,
    batch: PrefillBatch,
    cache: KVCache,
    softmax: Softmax,
    output: torch.Tensor,
    kernels: PromptKernels,
) -> None:
    """Attends with a round of prompts. Other methods of sparse prefill are called here.

    Args:
        plan: the sparse prefill of the layer.
        part: the round.
        batch: the queries of the round.
        cache: the layer's cache; under a `BlockRule` in the pages of its statistics.
        softmax: how logits become weights.
        output: `[num_tokens, num_query_heads, head_size]`, written.
        kernels: GPU kernels.
    """
    if isinstance(plan.rule, TokenRule):
        assert batch.copies is None
        kept = token_prefill(batch, cache, softmax, plan.rule, output, probes=part.probes, attend=kernels.tokens)
        in_contexts = torch.where(batch.query_lens > 0, batch.seq_lens, 0)
        tokens = torch.stack([kept.counts.sum(), in_contexts.sum()])
        plan.counters.add_(torch.cat([tokens, attended_pairs(kept, batch, plan.rule)]))
        return
    tiles = part.tiles[batch.query.shape[1] // cache.num_kv_heads]
    prefill_blocks(
        batch, cache, softmax, plan.rule, tiles, output=output, attend=kernels.blocks, counters=plan.counters
    )  # fmt: skip
