"""Evictions from the context that a request holds, in all layers of one shape at once.

A request evicts again and again while it decodes, so the time of launches counts. On a GPU each step is one Triton
launch for all layers; only page statistics are written layer by layer. Elsewhere layers follow each other in torch. The
host does not wait for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from sparse_kernels.batch import Softmax
from sparse_kernels.compaction import reference
from sparse_kernels.compaction.api import ObservationWindow, add_votes, choose_tokens
from sparse_kernels.compaction.layers import HeldBlocks, LayerCaches
from sparse_kernels.compaction.rule import CompactionRule
from sparse_kernels.token_prefill.probes import hash_words

_SMALL = 1 << 24
"""Integers below this are exact in float32."""


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


def redundancy(block_table: torch.Tensor, num_tokens: int, caches: LayerCaches) -> torch.Tensor:
    """Measures how similar the key of each token is to the other keys (R-KV, arXiv 2505.24133).

    S_ij is the cosine of the keys i and j, and S_ii = 0. Row i counts its newest similar token as 0: the largest j with
    S_ij > 0.5. So one of several similar tokens has no redundancy. The result is the softmax over j of the mean of S_ij
    over i.

    Args:
        block_table: `[max_blocks]` integer, physical block ids.
        num_tokens: tokens of these blocks.
        caches: keys.

    Returns:
        `[num_layers, num_kv_heads, num_tokens]` float32; sums to 1 over tokens.
    """
    if block_table.is_cuda:
        from sparse_kernels.compaction import held_triton

        means = held_triton.mean_similarity(block_table, num_tokens, caches)
    else:
        means = torch.stack([reference.mean_similarity(block_table, num_tokens, cache) for cache in caches.caches])
    return means.softmax(dim=-1)


def mixed_scores(votes: torch.Tensor, redundant: torch.Tensor, num_weights: int, rule: CompactionRule) -> torch.Tensor:
    """Mixes votes and redundancy: `lambda * I - (1 - lambda) * R` (R-KV, arXiv 2505.24133).

    I is the mean attention on a token, or the largest mean among its neighbours, as `rule.pool_tokens` says. The newest
    `rule.window_tokens` tokens are kept anyway, and are neighbours of no token.

    Args:
        votes: `[num_layers, num_kv_heads, num_tokens]` float32, sums of attention.
        redundant: like `votes`, the result of `redundancy`.
        num_weights: attention weights in a sum: queries times query heads of a KV head.
        rule: the share lambda, and the pooling.

    Returns:
        Like `votes`, the scores.
    """
    assert rule.importance_share is not None
    end = max(votes.shape[-1] - rule.window_tokens, 0)
    pooled = votes.clone()
    if end:
        pooled[..., :end] = torch.nn.functional.max_pool1d(
            votes[..., :end], rule.pool_tokens, stride=1, padding=rule.pool_tokens // 2
        )
    return rule.importance_share / max(num_weights, 1) * pooled - (1 - rule.importance_share) * redundant


def random_votes(
    positions: range, layers: Sequence[int], heads: range, seed: int, device: torch.device
) -> torch.Tensor:
    """Draws votes by hashes of position, layer and KV head: the control of methods that look at the attention.

    A token has the same vote in every eviction, so the kept tokens are a uniform sample of all earlier tokens.

    Args:
        positions: of the tokens, in the whole context.
        layers: numbers of the layers in the model.
        heads: numbers of the KV heads in the model.
        seed: of the draw.
        device: the device of the result.

    Returns:
        `[num_layers, num_kv_heads, num_tokens]` float32, from 0 on and below 1.
    """
    word = _words_of_heads(tuple(layers), heads, seed, device)
    word = hash_words(word ^ torch.arange(positions.start, positions.stop, device=device))
    return (word % _SMALL).float() / _SMALL


@functools.cache
def _words_of_heads(layers: tuple[int, ...], heads: range, seed: int, device: torch.device) -> torch.Tensor:
    """Returns a hash of each layer and KV head, `[num_layers, num_kv_heads, 1]`. It is kept, because a copy to a GPU
    would wait for the steps before it."""
    word = hash_words(torch.tensor([seed]))
    for axis in (torch.tensor(layers)[:, None, None], torch.tensor(list(heads))[:, None]):
        word = hash_words(word ^ axis)
    return word.to(device)


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
