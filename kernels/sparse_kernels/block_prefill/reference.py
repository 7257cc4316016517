"""Block-sparse prefill in torch: the specification, and the path for devices without kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from sparse_kernels.batch import Copies, PrefillBatch, Softmax
from sparse_kernels.block_prefill.rule import SHARE_UNITS, BlockRule
from sparse_kernels.block_prefill.tiles import Tiles
from sparse_kernels.cache import KVCache
from sparse_kernels.page_statistics import PageStatistics

_LARGEST = 2.0**90
"""Summaries are clamped to this, so that no product with a query overflows. A page with keys that are not finite is
then read."""
_LARGEST_LOGIT = 60000.0
"""Logits of key blocks are clamped to this."""


def page_summaries(statistics: PageStatistics, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the summary keys and spreads of every page of some cache blocks.

    Args:
        statistics: views of the cache's statistics.
        blocks: `[num_blocks]` integer, physical block ids.

    Returns:
        `[num_kv_heads, num_blocks * pages_per_block, summary_keys, head_size]` bfloat16 and
        `[num_kv_heads, num_blocks * pages_per_block]` float32, or None for a kind without a spread.
    """
    keys, spread = statistics.summaries(blocks)
    return keys.clamp(-_LARGEST, _LARGEST).bfloat16(), None if spread is None else spread.clamp(max=_LARGEST)


def scoring_queries(query: torch.Tensor, rule: BlockRule) -> torch.Tensor:
    """Returns the tokens of a tile that score its past: every `query_stride`-th token, backwards from the last one.

    Args:
        query: `[num_tokens, ...]`.
        rule: the rule.
    """
    return query.flip(0)[:: rule.query_stride]


def best_products(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Returns for each row and page the largest product of the row with the page's summary keys.

    Args:
        rows: `[num_kv_heads, num_rows, head_size]` float32.
        keys: `[num_kv_heads, num_pages, summary_keys, head_size]`.

    Returns:
        `[num_kv_heads, num_rows, num_pages]` float32.
    """
    products = rows @ keys.float().flatten(1, 2).transpose(1, 2)
    best: torch.Tensor = products.unflatten(2, keys.shape[1:3]).amax(dim=3)
    return best


def block_logits(
    query: torch.Tensor,
    keys: torch.Tensor,
    spread: torch.Tensor | None,
    visible: torch.Tensor,
    pages_per_block: int,
    scale: float,
    rule: BlockRule,
) -> torch.Tensor:
    """Returns the logit of every key block for each scoring query: the largest logit of the block's summary keys.

        l_b = max over pages p of b and their summary keys x of  s (q . x + w ||q||_2 sigma_p)

    The estimate ignores the softcap and learned sink logits. Attention over the chosen blocks uses both.

    Args:
        query: `[num_tokens, num_kv_heads, group_size, head_size]` bfloat16 or float16, of one tile.
        keys: `[num_kv_heads, num_pages, summary_keys, head_size]` bfloat16, of whole blocks.
        spread: `[num_kv_heads, num_pages]` float32, or None.
        visible: `[num_scoring_tokens]` integer, complete pages up to each of the `scoring_queries`.
        pages_per_block: pages of a block, the unit of selection.
        scale: s, the factor of logits.
        rule: which tokens score, and w.

    Returns:
        `[num_kv_heads, num_scoring_tokens * group_size, num_blocks]` float32, -inf for blocks without a visible page.
    """
    chosen = scoring_queries(query, rule)
    rows = chosen.float().movedim(1, 0).flatten(1, 2)
    logits = best_products(rows, keys)
    if spread is not None:
        logits += rule.std_weight * rows.norm(dim=-1, keepdim=True) * spread[:, None]
    pages = torch.arange(keys.shape[1], device=query.device)
    hidden = pages >= visible.repeat_interleave(chosen.shape[2])[:, None]
    logits = (logits * scale).clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT).masked_fill(hidden, -torch.inf)
    best: torch.Tensor = logits.unflatten(2, (-1, pages_per_block)).amax(dim=3)
    # Kernels keep these numbers as float16.
    return best.half().float()


def measure_blocks(logits: torch.Tensor, rule: BlockRule) -> torch.Tensor:
    """Reduces the logits of a tile's scoring queries to one number per key block.

        mass: sum over queries of  e^(l_b) / sum over blocks c of e^(l_c)        maximum: max over queries of l_b

    Args:
        logits: see `block_logits`.
        rule: says which of the two measures.

    Returns:
        `[num_kv_heads, num_blocks]` float32. Masses add up to the number of rows that see a block.
    """
    if rule.measure == "maximum":
        return logits.amax(dim=1)
    masses: torch.Tensor = logits.softmax(dim=-1).nan_to_num(0.0).sum(dim=1)
    return masses


def choose_blocks(scores: torch.Tensor, reads: int, rule: BlockRule, total: float | None = None) -> torch.Tensor:
    """Chooses the past blocks that a tile reads: those always read, then the best. Ties go to the lowest block.

    Args:
        scores: `[num_kv_heads, past_blocks]` float32, of every past block; masses under an adaptive rule.
        reads: blocks to read; under an adaptive rule the smallest number.
        rule: the rule.
        total: under an adaptive rule, the mass of the tile with its own blocks. The best blocks are read until at most
            (1 - coverage) of this mass is unread.

    Returns:
        `[num_kv_heads, past_blocks]` bool.
    """
    past = scores.shape[1]
    block = torch.arange(past, device=scores.device)
    always = (block < rule.sink_blocks) | (block >= past - rule.recent_blocks)
    ranked = scores.masked_fill(always, torch.inf).sort(dim=1, descending=True, stable=True).indices
    rank = ranked.argsort(dim=1)
    count = torch.full_like(rank[:, :1], reads)
    if rule.coverage is not None and total is not None:
        left = scores.sum(dim=1, keepdim=True) - scores.gather(1, ranked).cumsum(dim=1)
        enough = (left > (1 - rule.coverage) * total).sum(dim=1, keepdim=True) + 1
        count = torch.maximum(count, enough)
    return rank < count


def read_share(masses: torch.Tensor, read: torch.Tensor, total: float) -> torch.Tensor:
    """Returns the estimated share of a tile's attention weight on the blocks that it reads, its own blocks included.

        1 - sum over past blocks b that are not read of  mass_b / total

    Args:
        masses: `[num_kv_heads, past_blocks]` float32.
        read: `[num_kv_heads, past_blocks]` bool.
        total: mass of the tile, its own blocks included: the number of rows that scored.

    Returns:
        `[num_kv_heads]` float32.
    """
    return 1 - masses.masked_fill(read, 0.0).sum(dim=1) / total


def attend_blocks(
    query: torch.Tensor,
    cache: KVCache,
    block_table: torch.Tensor,
    read: torch.Tensor,
    end: int,
    block_tokens: int,
    softmax: Softmax,
) -> torch.Tensor:
    """Attends with the tokens of a tile to chosen past blocks and, causally, to the tile's own blocks.

    Args:
        query: `[num_tokens, num_kv_heads, group_size, head_size]`; its tokens are the last before `end`.
        cache: keys and values.
        block_table: `[max_blocks]` integer, of the tile's request.
        read: `[num_kv_heads, past_blocks]` bool.
        end: one past the position of the tile's last token.
        block_tokens: tokens of a key block.
        softmax: how logits become weights; its scale includes those of queries and keys.

    Returns:
        `[num_tokens, num_kv_heads * group_size, head_size]` float32.
    """
    num_tokens, heads, group, _ = query.shape
    device, own_tokens = query.device, read.shape[1] * block_tokens
    pages_per_block = block_tokens // cache.page_size
    # Heads may read different numbers of blocks. Places beyond a head's own number are masked.
    most = int(read.sum(dim=1).max()) if read.shape[1] else 0
    chosen = torch.where(read, torch.arange(read.shape[1], device=device), read.shape[1]).sort(dim=1).values[:, :most]
    exists = chosen < read.shape[1]
    pages = torch.where(exists, chosen, 0)[..., None] * pages_per_block + torch.arange(pages_per_block, device=device)
    own_pages = torch.arange(own_tokens // cache.page_size, -(-end // cache.page_size), device=device)
    pages = torch.cat([pages.flatten(1), own_pages.expand(heads, -1)], dim=1)
    blocks = block_table.long()[pages // cache.keys.pages_per_block]
    head = torch.arange(heads, device=device)[:, None]
    keys, values = (
        paged.gather(blocks, head, pages % cache.keys.pages_per_block).flatten(1, 2).float()
        for paged in (cache.keys, cache.values)
    )
    position = torch.arange(own_tokens, own_tokens + own_pages.shape[0] * cache.page_size, device=device)
    causal = position < torch.arange(end - num_tokens + 1, end + 1, device=device)[:, None]
    past = exists.repeat_interleave(block_tokens, dim=1)
    visible = torch.cat(
        [past[:, None].expand(-1, num_tokens, -1), causal.expand(heads, -1, -1)], dim=2
    ).repeat_interleave(group, dim=1)  # fmt: skip
    rows = query.float().transpose(0, 1).flatten(1, 2)
    logits = rows @ keys.transpose(1, 2) * softmax.scale
    if softmax.softcap:
        logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
    # Memory beyond the context is stale and may hold NaN. A weight of 0 would not hide NaN.
    logits = logits.masked_fill(~visible, -torch.inf)
    values = values.masked_fill(~visible.any(dim=1)[..., None], 0.0)
    if softmax.sink_logits is not None:
        sinks = softmax.sink_logits.float().view(heads, 1, group).expand(-1, num_tokens, -1).reshape(heads, -1, 1)
        logits = torch.cat([logits, sinks], dim=2)
    attended = logits.softmax(dim=-1)[..., : keys.shape[1]] @ values
    output: torch.Tensor = attended.unflatten(1, (num_tokens, group)).transpose(0, 1).flatten(1, 2)
    return output


def prefill_blocks(
    batch: PrefillBatch,
    cache: KVCache,
    softmax: Softmax,
    rule: BlockRule,
    tiles: Tiles,
    output: torch.Tensor,
    counters: torch.Tensor | None,
    copies: Copies,
) -> None:
    """See `api.prefill_blocks`."""
    assert cache.statistics is not None
    copied = KVCache(copies.keys, copies.values)
    heads = cache.num_kv_heads
    scale = cache.scaled_by_keys(softmax.scale) * (1.0 if batch.query_scale is None else float(batch.query_scale))
    softmax = replace(softmax, scale=scale)
    grouped = batch.grouped(heads)
    tokens_per_block = cache.keys.pages_per_block * cache.page_size
    summaries: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    parts = (tiles.request, tiles.first_token, tiles.num_tokens, tiles.past_blocks, tiles.reads, tiles.end)
    for request, first, num_tokens, past, reads, end in torch.stack(parts, dim=1).tolist():
        if not num_tokens:
            continue
        table = batch.block_table[request]
        if request not in summaries:
            blocks = table[: -(-int(batch.seq_lens[request]) // tokens_per_block)]
            summaries[request] = page_summaries(cache.statistics, blocks.long())
        query = grouped[first : first + num_tokens]
        if query.dtype.itemsize == 1:
            query = query.bfloat16()
        read = torch.ones(heads, past, dtype=torch.bool, device=query.device)
        if reads < past:
            scores, rows = _measure(query, *summaries[request], cache.page_size, past, end, scale, rule)
            read = choose_blocks(scores, reads, rule, total=rows)
            if counters is not None and rule.measure == "mass":
                counters[:, 2] += (read_share(scores, read, rows).clamp(min=0) * SHARE_UNITS).round().long()
                counters[:, 3] += 1
        attended = attend_blocks(query, copied, copies.block_table[request], read, end, rule.block_tokens, softmax)
        if cache.value_scale is not None:
            attended = attended * cache.value_scale
        output[first : first + num_tokens] = attended.to(output.dtype)
        if counters is not None:
            counters[:, 0] += read.sum(dim=1)
            counters[:, 1] += past


def _measure(
    query: torch.Tensor,
    keys: torch.Tensor,
    spread: torch.Tensor | None,
    page_size: int,
    past: int,
    end: int,
    scale: float,
    rule: BlockRule,
) -> tuple[torch.Tensor, int]:
    """Returns the scores of the past blocks of a tile, `[num_kv_heads, past]`, and the number of rows that scored."""
    pages_per_block, complete = rule.block_tokens // page_size, end // page_size
    padding = -complete % pages_per_block
    keys = torch.nn.functional.pad(keys[:, :complete], (0, 0, 0, 0, 0, padding))
    spread = None if spread is None else torch.nn.functional.pad(spread[:, :complete], (0, padding))
    position = torch.arange(end - len(query) + 1, end + 1, device=query.device)
    visible = scoring_queries(position, rule) // page_size
    logits = block_logits(query, keys, spread, visible, pages_per_block, scale, rule)
    return measure_blocks(logits, rule)[:, :past], logits.shape[1]
