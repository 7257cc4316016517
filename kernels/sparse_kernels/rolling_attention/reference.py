"""Attends with rolling positions in torch, some queries of a request at a time: the specification, and the CPU path.

It reads whole blocks of keys and values, so it supports any packing of the cache.
"""

from __future__ import annotations

import torch

from sparse_kernels.batch import PrefillBatch, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.paging import PagedTensor
from sparse_kernels.rolling_attention.rule import RollingWindow, Rotation

_QUERIES_AT_ONCE = 128
"""Query tokens whose logits are in memory at the same time."""


def attend_rolling(
    batch: PrefillBatch,
    cache: KVCache,
    softmax: Softmax,
    window: RollingWindow,
    rotation: Rotation,
    output: torch.Tensor,
) -> None:
    """See `api.attend_rolling`."""
    starts = batch.query_start.tolist()
    for request, (start, end, length) in enumerate(zip(starts, starts[1:], batch.seq_lens.tolist(), strict=False)):
        for first in range(start, end, _QUERIES_AT_ONCE):
            tokens = slice(first, min(first + _QUERIES_AT_ONCE, end))
            position = torch.arange(tokens.start, tokens.stop, device=output.device) + (length - end)
            query, blocks = batch.query[tokens].float(), batch.block_table[request]
            output[tokens] = _attend(query, position, blocks, cache, softmax, window, rotation).to(output.dtype)


def _attend(
    query: torch.Tensor,
    position: torch.Tensor,
    blocks: torch.Tensor,
    cache: KVCache,
    softmax: Softmax,
    window: RollingWindow,
    rotation: Rotation,
) -> torch.Tensor:
    """Returns the attention of consecutive query tokens of a request, `[num_tokens, num_query_heads, head_size]`.

    Args:
        query: `[num_tokens, num_query_heads, head_size]` float32.
        position: `[num_tokens]` int64.
        blocks: `[max_blocks]` integer, physical block ids.
        cache: see `api.attend_rolling`.
        softmax: see `api.attend_rolling`.
        window: see `api.attend_rolling`.
        rotation: see `api.attend_rolling`.
    """
    oldest, end = int(position[0]), int(position[-1]) + 1
    leaves_out = window.leaves_out(position)
    # Tokens that no query reads may have been given back.
    others = oldest + 1 - window.newest_tokens if bool(leaves_out.all()) else 0
    num_sinks = min(window.sink_tokens, end)
    others = max(others, num_sinks)
    token = torch.cat([torch.arange(num_sinks), torch.arange(others, end)]).to(position.device)
    is_sink = token < window.sink_tokens
    in_window = token > position[:, None] - window.newest_tokens
    visible = (token <= position[:, None]) & (is_sink | in_window | ~leaves_out[:, None])

    def read(paged: PagedTensor) -> torch.Tensor:
        return torch.cat([_tokens(paged, blocks, 0, num_sinks), _tokens(paged, blocks, others, end)], dim=1)

    def by_head(query: torch.Tensor) -> torch.Tensor:
        grouped: torch.Tensor = query.unflatten(1, (cache.num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        return grouped

    keys = read(cache.keys).transpose(1, 2)
    to_sinks = by_head(rotation.turn_back(query, window.nearer(position))) @ keys[:, :, :num_sinks]
    to_others = by_head(query) @ keys[:, :, num_sinks:]
    logits = torch.cat([to_sinks, to_others], dim=-1) * softmax.scale
    if softmax.softcap:
        logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
    logits = logits.unflatten(1, (-1, len(position))).masked_fill(~visible, -torch.inf)
    attended = logits.softmax(dim=-1).flatten(1, 2) @ read(cache.values)
    by_token: torch.Tensor = attended.unflatten(1, (-1, len(position))).permute(2, 0, 1, 3).flatten(1, 2)
    return by_token


def _tokens(paged: PagedTensor, blocks: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Returns the keys or values of the tokens in `[first, last)`, `[num_kv_heads, last - first, head_size]` float32.
    It reads no other tokens."""
    block_size = paged.page_size * paged.pages_per_block
    before = first // block_size
    read = paged.gather_blocks(blocks[before : -(-last // block_size)].long())
    return read[:, first - before * block_size : last - before * block_size].float()
