"""Chooses and moves tokens on a GPU, in Triton.

Only kept tokens may be sorted, by torch. Scores become integers of the same order. One program per KV head finds the
largest integer that at least `kept` tokens reach, two bits at a time. It then lists the tokens above it, and the first
tokens equal to it.

The same compiled kernels serve all prompt lengths and all rows of a block table. An engine can compile them at start.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_kernels.cache import KVCache
from sparse_kernels.compaction.rule import CompactionRule
from sparse_kernels.page_statistics import write_cache

_RANKED_AT_ONCE = 1024
"""Tokens that a program ranks."""
_COUNTED_AT_ONCE = 8192
"""Tokens that a program counts at a time: eight per thread."""
_COPIED_AT_ONCE = 16
"""Tokens of a KV head that a program copies."""
_LARGEST = tl.constexpr(0xFF7FFFFF)
"""The rank of the largest vote."""
_INFINITY = tl.constexpr(0xFF800000)
"""The rank of a token that is always kept."""
_INFINITY_AS_INT32 = 0xFF800000 - (1 << 32)
"""The same bits in torch's integers."""
_LEAST_INT32 = -(1 << 31)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer dtypes by size in bytes. Kernels copy their bits unchanged."""


@triton.jit
def _rank_of(votes):
    """Returns integers in the order of the votes. NaN and infinity are like the largest number, -0 is like 0."""
    bits = tl.where(votes == 0, 0.0, votes).to(tl.uint32, bitcast=True)
    ordered = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where((votes != votes) | (ordered > _LARGEST), _LARGEST, ordered).to(tl.uint32)


@triton.jit(do_not_specialize=["votes_stride", "first_of_window", "sinks"])
def _rank_tokens(
    votes_ptr, ranks_ptr, votes_stride, candidates, first_of_window, sinks, REACH: tl.constexpr, TOKENS: tl.constexpr
):
    """Writes the rank of each token's score, `[num_kv_heads, candidates]`."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rank = tl.zeros((TOKENS,), tl.uint32)
    for step in range(2 * REACH + 1):
        other = token + step - REACH
        votes_here = (other >= 0) & (other < first_of_window)
        vote = tl.load(votes_ptr + head * votes_stride + other, mask=votes_here, other=0.0)
        # No existing token has the rank 0.
        rank = tl.maximum(rank, tl.where(votes_here, _rank_of(vote), 0).to(tl.uint32))
    always = (token < sinks) | (token >= first_of_window)
    rank = tl.where(always, _INFINITY, rank).to(tl.uint32)
    tl.store(ranks_ptr + head * candidates + token, rank.to(tl.int32, bitcast=True), mask=token < candidates)


@triton.jit
def _load_ranks(ranks_ptr, token, candidates):
    """Loads the ranks of some tokens; 0, the lowest, for tokens that do not exist."""
    return tl.load(ranks_ptr + token, mask=token < candidates, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _list_tokens(ranks_ptr, kept_ptr, candidates, kept, TOKENS: tl.constexpr):
    """Writes the tokens of the `kept` highest ranks in text order. Ties go to the first tokens."""
    head = tl.program_id(0).to(tl.int64)
    ranks_ptr += head * candidates
    kept_ptr += head * kept
    # The largest number that at least `kept` ranks reach, and how many are above it.
    least = tl.zeros((), tl.uint32)
    above = tl.zeros((), tl.int32)
    for step in range(16):
        unit = tl.full((), 1, tl.uint32) << (30 - 2 * step)
        reach_one = tl.zeros((TOKENS,), tl.int32)
        reach_two = tl.zeros((TOKENS,), tl.int32)
        reach_three = tl.zeros((TOKENS,), tl.int32)
        for first in range(0, candidates, TOKENS):
            rank = _load_ranks(ranks_ptr, first + tl.arange(0, TOKENS), candidates)
            reach_one += (rank >= least + unit).to(tl.int32)
            reach_two += (rank >= least + unit * 2).to(tl.int32)
            reach_three += (rank >= least + unit * 3).to(tl.int32)
        one, two, three = tl.sum(reach_one), tl.sum(reach_two), tl.sum(reach_three)
        above = tl.where(one < kept, one, tl.where(two < kept, two, tl.where(three < kept, three, above)))
        digit = (one >= kept).to(tl.uint32) + (two >= kept).to(tl.uint32) + (three >= kept).to(tl.uint32)
        least += unit * digit

    room = kept - above
    higher_before = tl.zeros((), tl.int32)
    equal_before = tl.zeros((), tl.int32)
    for first in range(0, candidates, TOKENS):
        token = first + tl.arange(0, TOKENS)
        rank = _load_ranks(ranks_ptr, token, candidates)
        higher = (rank > least).to(tl.int32)
        equal = (rank == least).to(tl.int32)
        equal_until = equal_before + tl.cumsum(equal, axis=0)
        place = higher_before + tl.cumsum(higher, axis=0) + tl.minimum(equal_until, room) - 1
        chosen = (higher == 1) | ((equal == 1) & (equal_until <= room))
        tl.store(kept_ptr + place, token.to(tl.int64), mask=chosen)
        higher_before += tl.sum(higher)
        equal_before += tl.sum(equal)


def choose_tokens(
    votes: torch.Tensor,
    kept: int,
    candidates: int,
    first_of_window: int,
    rule: CompactionRule,
    protected: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.choose_tokens`."""
    heads, device = len(votes), votes.device
    ranks = torch.empty(heads, candidates, dtype=torch.int32, device=device)
    _rank_tokens[(triton.cdiv(candidates, _RANKED_AT_ONCE), heads)](
        votes, ranks, votes.stride(0), candidates, first_of_window, rule.sink_tokens,
        REACH=rule.pool_tokens // 2, TOKENS=_RANKED_AT_ONCE,
    )  # fmt: skip
    if protected is not None:
        # Requests seldom protect tokens. One kernel more here leaves one form of the Triton kernel to compile.
        ranks.masked_fill_(protected[..., :candidates], _INFINITY_AS_INT32)
    chosen = torch.empty(heads, kept, dtype=torch.int64, device=device)
    _list_tokens[(heads,)](ranks, chosen, candidates, kept, TOKENS=_COUNTED_AT_ONCE, num_warps=32)
    if rule.in_order_of_votes:
        # Signed integers in the order of the unsigned ranks.
        signed = ranks ^ _LEAST_INT32
        signed[:, : rule.sink_tokens] = _LEAST_INT32
        chosen = chosen.gather(1, signed.gather(1, chosen).sort(dim=-1, stable=True).indices)
    return chosen


@triton.jit(do_not_specialize_on_alignment=["table_ptr"])
def _copy_out(
    rows_ptr, kept_ptr, table_ptr, copies_ptr, row_strides, kept,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Copies rows of the cache, `[kept, num_kv_heads, WIDTH]`."""
    head = tl.program_id(1).to(tl.int64)
    index = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    exists = index < kept
    position = tl.load(kept_ptr + head * kept + index, mask=exists, other=0)
    block = tl.load(table_ptr + position // BLOCK_TOKENS, mask=exists, other=0).to(tl.int64)
    source = rows_ptr + block * row_strides[0] + head * row_strides[1] + position % BLOCK_TOKENS * row_strides[2]
    target = copies_ptr + (index * tl.num_programs(1) + head) * WIDTH
    element = tl.arange(0, PADDED)
    mask = exists[:, None] & (element < WIDTH)[None, :]
    row = tl.load(source[:, None] + element[None, :], mask=mask, other=0)
    tl.store(target[:, None] + element[None, :], row, mask=mask)


def move_tokens(kept: torch.Tensor, block_table: torch.Tensor, first_block: int, cache: KVCache) -> None:
    """See `reference.move_tokens`; keys, values and statistics are written by `write_cache`.

    Raises:
        ValueError: if the cache does not store one row per token.
    """
    rows = cache.rows
    heads, count = kept.shape
    _, _, block_size, width = rows.shape
    copies = torch.empty(count, heads, width, dtype=rows.dtype, device=rows.device)
    word = _WORDS[rows.itemsize]
    bits = rows.view(word)
    _copy_out[(triton.cdiv(count, _COPIED_AT_ONCE), heads)](
        bits, kept, block_table, copies.view(word), bits.stride(), count,
        WIDTH=width, PADDED=triton.next_power_of_2(width), BLOCK_TOKENS=block_size, TOKENS=_COPIED_AT_ONCE,
    )  # fmt: skip
    blocks = block_table[first_block : first_block + count // block_size].long()
    slots = (blocks[:, None] * block_size + torch.arange(block_size, device=blocks.device)).flatten()
    keys, values = copies.tensor_split(2, dim=-1)
    write_cache(keys, values, rows, cache.statistics, slots, cache.page_size)
