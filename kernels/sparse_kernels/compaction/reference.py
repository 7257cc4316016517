"""Chooses and moves tokens in torch: the specification, and the path on a CPU."""

from __future__ import annotations

import torch

from sparse_kernels.cache import KVCache
from sparse_kernels.compaction.rule import CompactionRule
from sparse_kernels.page_statistics import update_page_statistics

_LARGEST = torch.finfo(torch.float32).max


def choose_tokens(
    votes: torch.Tensor,
    kept: int,
    candidates: int,
    first_of_window: int,
    rule: CompactionRule,
    protected: torch.Tensor | None = None,
) -> torch.Tensor:
    """Chooses the tokens of the highest scores. Ties go to the lowest token.

    NaN and infinity score like the largest number, below the tokens that are always kept: without its newest tokens a
    request with NaN would have finite outputs.

    Args:
        votes: `[num_kv_heads, num_tokens]` float32.
        kept: number of tokens to choose, 1 to `candidates`.
        candidates: the choice is among this many first tokens.
        first_of_window: the first of the newest tokens, which are kept like the sinks. Other tokens score the largest
            vote among their neighbours outside the window.
        rule: the sinks, and the range of neighbours.
        protected: `[num_tokens]` or like `votes`, bool, tokens that are kept like the sinks.

    Returns:
        `[num_kv_heads, kept]` int64, ascending, or in the order of `rule.in_order_of_votes`.
    """
    score = torch.full((len(votes), candidates), torch.inf, device=votes.device)
    voted = votes[:, :first_of_window]
    if first_of_window:
        reach = rule.pool_tokens // 2
        voted = torch.nn.functional.max_pool1d(voted[:, None], rule.pool_tokens, stride=1, padding=reach)[:, 0]
    end = min(first_of_window, candidates)
    score[:, :end] = voted[:, :end].nan_to_num(_LARGEST, _LARGEST, -torch.inf)
    score[:, : rule.sink_tokens] = torch.inf
    if protected is not None:
        score.masked_fill_(protected[..., :candidates], torch.inf)
    # Stable: ties go to the lowest token.
    order = score.sort(dim=-1, descending=True, stable=True).indices
    chosen = order[:, :kept].sort(dim=-1).values
    if rule.in_order_of_votes:
        score[:, : rule.sink_tokens] = -torch.inf
        chosen = chosen.gather(1, score.gather(1, chosen).sort(dim=-1, stable=True).indices)
    return chosen


def move_tokens(kept: torch.Tensor, block_table: torch.Tensor, first_block: int, cache: KVCache) -> None:
    """Copies the kept tokens out, then to their new places, which may overlap the old ones.

    Args:
        kept: `[num_kv_heads, num_kept]` int64, positions in the order of their places; whole blocks of them.
        block_table: `[max_blocks]` integer, physical block ids.
        first_block: the first target block.
        cache: keys, values and statistics; the statistics of the target pages are computed again.
    """
    block_size = cache.page_size * cache.keys.pages_per_block
    table = block_table.long()
    head = torch.arange(len(kept), device=kept.device)[:, None]
    target = first_block * block_size + torch.arange(kept.shape[1], device=kept.device)[None]
    sources = table[kept // block_size], head, kept % block_size
    targets = table[target // block_size], head, target % block_size
    for paged in (cache.keys, cache.values):
        paged.scatter_tokens(*targets, paged.gather_tokens(*sources))
    if cache.statistics is not None:
        blocks = table[first_block : first_block + kept.shape[1] // block_size]
        pages = torch.arange(cache.keys.pages_per_block, device=blocks.device)
        update_page_statistics(
            cache.keys, cache.statistics, blocks.repeat_interleave(len(pages)), pages.repeat(len(blocks))
        )
