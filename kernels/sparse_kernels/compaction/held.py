"""Evictions from the context that a request holds, in all layers of one shape at once.

A request evicts again and again while it decodes, so the time of launches counts. On a GPU each step is one Triton
launch for all layers; only page statistics are written layer by layer. Elsewhere layers follow each other in torch. The
host does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparse_kernels.batch import Softmax
from sparse_kernels.compaction import reference
from sparse_kernels.compaction.api import ObservationWindow, add_votes, choose_tokens
from sparse_kernels.compaction.layers import HeldBlocks, LayerCaches
from sparse_kernels.compaction.rule import CompactionRule


def add_votes_of_layers(
    votes: torch.Tensor,
    query: torch.Tensor,
    first_position: int,
    block_table: torch.Tensor,
    caches: LayerCaches,
    softmax: Sequence[Softmax],
    query_scales: Sequence[torch.Tensor] | None = None,
) -> None:
    """Adds the attention of consecutive queries on each token, in every layer; see `add_votes`.

    Args:
        votes: `[num_layers, num_kv_heads, num_tokens]` float32, at least as many tokens as the last query sees.
        query: `[num_layers, num_queries, num_query_heads, head_size]`; may be empty.
        first_position: of the first query, counted like the tokens.
        block_table: `[max_blocks]` integer, physical block ids.
        caches: keys, including those of the queries' tokens.
        softmax: how logits become weights in each layer. Only the values of sink logits may differ between layers.
        query_scales: of each layer, see `ObservationWindow.query_scale`; None for 16-bit queries.

    Raises:
        ValueError: if `votes` has too few tokens, or layers differ in more than the values of sink logits.
    """
    forms = {(each.scale, each.softcap, each.sink_logits is None) for each in softmax}
    if len(forms) != 1 or len(softmax) != len(caches.caches):
        got, allowed = f"{len(softmax)} of {len(forms)} forms", f"{len(caches.caches)} of one form"
        raise ValueError(f"softmax: got {got}, allowed: {allowed}")
    least = [len(caches.caches), caches.first.num_kv_heads, first_position + query.shape[1]]
    if list(votes.shape[:2]) != least[:2] or votes.shape[2] < least[2]:
        raise ValueError(f"votes: got {list(votes.shape)}, allowed: at least {least}")
    if query.shape[1] == 0:
        return
    if votes.is_cuda:
        from sparse_kernels.compaction import held_triton

        scales = None if query_scales is None else torch.stack([scale.reshape(()) for scale in query_scales])
        held_triton.add_votes(votes, query, first_position, block_table, caches, softmax, scales)
        return
    for layer, cache in enumerate(caches.caches):
        scale = None if query_scales is None else query_scales[layer]
        window = ObservationWindow(query[layer], first_position, scale)
        add_votes(votes[layer], window, block_table, cache, softmax[layer])


def keep_tokens(scores: torch.Tensor, held: HeldBlocks, caches: LayerCaches, rule: CompactionRule) -> torch.Tensor:
    """Chooses tokens for each KV head of each layer, and moves their keys and values into the target blocks.

    The choice is that of `compact_prompt`, among the tokens of the blocks before `end_block`. The statistics of the
    target pages are computed again.

    Args:
        scores: `[num_layers, num_kv_heads, num_tokens]` float32.
        held: the blocks.
        caches: keys, values and statistics.
        rule: which tokens are always kept, and the pooling of scores.

    Returns:
        `[num_layers, num_kv_heads, kept]` int64, the tokens that were moved, ascending.

    Raises:
        ValueError: if shapes disagree, `held` has no target blocks, or the rule does not keep the order of the text,
            which the next eviction needs.
    """
    if rule.in_order_of_votes:
        raise ValueError("in_order_of_votes: got true, allowed: false")
    block_size = caches.block_size
    held.check(block_size)
    shape = len(caches.caches), caches.first.num_kv_heads, held.num_tokens
    if scores.shape != shape:
        raise ValueError(f"scores: got {list(scores.shape)}, allowed: {list(shape)}")
    candidates, before = held.end_block * block_size, held.first_block * block_size
    protected = None if held.protected is None else held.protected.flatten(0, 1)
    kept: torch.Tensor = choose_tokens(scores.flatten(0, 1), held.num_tokens, candidates, before, rule, protected)
    kept = kept.unflatten(0, shape[:2])
    if not kept.is_cuda:
        for of_layer, cache in zip(kept, caches.caches, strict=True):
            reference.move_tokens(of_layer, held.block_table, held.first_block, cache)
        return kept
    from sparse_kernels.compaction import held_triton, triton

    if caches.first.statistics is None:
        held_triton.move_in_place(kept, held.block_table, held.first_block, caches)
    else:
        for of_layer, cache in zip(kept, caches.caches, strict=True):
            triton.move_tokens(of_layer, held.block_table, held.first_block, cache)
    return kept
