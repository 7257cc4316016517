"""Entry point of the compaction of a prompt.

The votes are attention sums of `token_prefill`. On a GPU all steps run in Triton, elsewhere in torch. The host does not
wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparse_kernels.batch import PrefillBatch, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.compaction import reference
from sparse_kernels.compaction.rule import CompactionRule
from sparse_kernels.compaction.scores import HeldTokens
from sparse_kernels.token_prefill import TokenRule, attention_sums, draw_probes, rows_that_see

ROWS_AT_ONCE = (32, 128, 512, 1024)
"""Numbers of rows that one call adds up. A call takes the smallest number with room for its queries. Triton compiles
kernels for each number."""
_QUERIES_AT_ONCE = {"cuda": ROWS_AT_ONCE[-1], "cpu": 128}
"""Queries whose attention one call adds up, by kind of device."""


@dataclass(frozen=True)
class ObservationWindow:
    """Consecutive queries of a prompt that vote."""

    query: torch.Tensor
    """`[num_queries, num_query_heads, head_size]`; may be empty."""
    first_position: int
    """Position of the first query."""
    query_scale: torch.Tensor | None = None
    """One float32: a float8 query times this is the query."""


@dataclass(frozen=True)
class PromptBlocks:
    """The blocks of a prompt, and the blocks that the kept tokens move into."""

    block_table: torch.Tensor
    """`[max_blocks]` integer, physical block ids of the request."""
    num_tokens: int
    """P, tokens of the prompt."""
    first_block: int
    """The first block that kept tokens move into. The last one is the last full block of the prompt."""
    protected: torch.Tensor | None = None
    """`[num_tokens]` bool, tokens that are kept before all others; None for none."""


def compact_prompt(
    window: ObservationWindow,
    prompt: PromptBlocks,
    cache: KVCache,
    softmax: Softmax,
    rule: CompactionRule,
    earlier: torch.Tensor | None = None,
) -> torch.Tensor:
    """Chooses tokens of a prompt for each KV head, and moves their keys and values into its last full blocks.

    1. *Votes*: the attention of the window's queries, causal softmax over the whole prompt, summed over queries and
       over the query heads of a KV head. The vote of a token before the window is the largest vote among its
       neighbours.
       `rule.score` may turn votes, keys and values into other scores.
    2. *Choice*: as many tokens as the target blocks hold, from all full blocks. First the `sink_tokens` first tokens,
       the window and protected tokens, then tokens by their votes. Ties go to the lowest token.
    3. *Move*: in text order or by votes, to `[first_block, P // block_size)`. The tokens of an incomplete last block
       stay and are kept in addition. The statistics of the target pages are computed again; on a GPU, by the kernel
       that writes the cache.

    Args:
        window: the queries that vote.
        prompt: its blocks.
        cache: keys, values and statistics; the keys and values of the whole prompt are written.
        softmax: how logits become weights. A sink logit takes its share of a query's weights, and gets no vote.
        rule: how many tokens vote and are kept.
        earlier: `[num_kv_heads, P]` float32, the sums of `add_votes` for queries before the window.

    Returns:
        `[num_kv_heads, kept]` int64, the positions that were moved, in the order of their places.

    Raises:
        ValueError: if shapes disagree, there are no tokens or no blocks to move to, or a cache on a GPU does not store
            one row per token.
    """
    rule.check()
    cache.check()
    block_size = cache.page_size * cache.keys.pages_per_block
    last_block = prompt.num_tokens // block_size
    if not 0 < prompt.first_block < last_block:
        raise ValueError(f"first_block: got {prompt.first_block}, allowed: 1 to {last_block - 1}, before the last")
    shape = cache.num_kv_heads, prompt.num_tokens
    if earlier is None:
        votes = torch.zeros(shape, device=prompt.block_table.device)
    elif earlier.shape == shape:
        votes = earlier.clone()
    else:
        raise ValueError(f"earlier: got {list(earlier.shape)}, allowed: {list(shape)}")
    add_votes(votes, window, prompt.block_table, cache, softmax)
    scores = rule.scores(HeldTokens(votes, prompt.block_table, cache))
    kept = choose_tokens(
        scores, prompt.num_tokens, last_block * block_size, prompt.first_block * block_size, rule, prompt.protected
    )
    _move(kept, prompt, cache)
    return kept


def voting_rows(num_tokens: int, probes: TokenRule, device: torch.device) -> torch.Tensor:
    """Draws the probe rows of a whole prompt: its newest tokens, and others by their hashes.

    The rows do not depend on how the prompt is cut into chunks.

    Args:
        num_tokens: P.
        probes: the number of rows, and the seed.
        device: the device of the result; the host does not wait for it.

    Returns:
        `[probes.num_probes]` int32, positions; -1 if a prompt has fewer tokens.
    """
    starts = num_tokens * torch.arange(2, dtype=torch.int32, device=device)
    # The draw needs only lengths.
    batch = PrefillBatch(
        query=starts,
        query_start=starts,
        block_table=starts,
        seq_lens=starts[1:],
        max_query_tokens=num_tokens,
        max_seq_tokens=num_tokens,
    )
    return draw_probes(batch, probes)[0]


def add_votes(
    votes: torch.Tensor,
    window: ObservationWindow,
    block_table: torch.Tensor,
    cache: KVCache,
    softmax: Softmax,
    voting: torch.Tensor | None = None,
) -> None:
    """Adds the attention of some queries on each token: causal softmax, summed over queries and query heads.

    Several calls give the same sums as one call, except for rounding.

    If only some rows vote, a token's votes are divided by the number of rows that see it, and all KV heads get the sum
    of their votes (ZipVL, Eq. 6 and 8).

    Args:
        votes: `[num_kv_heads, num_tokens]` float32, at least as many tokens as the last query sees; added to.
        window: the queries.
        block_table: `[max_blocks]` integer, physical block ids of their request.
        cache: keys, including those of the queries' own tokens.
        softmax: how logits become weights.
        voting: `[num_rows]` int32, positions of the prompt that vote, from `voting_rows`. Positions outside the window
            do not vote in this call. None if all queries vote.

    Raises:
        ValueError: if `votes` has too few tokens.
    """
    heads, device = cache.num_kv_heads, window.query.device
    if votes.shape[0] != heads or votes.shape[1] < window.first_position + len(window.query):
        least = [heads, window.first_position + len(window.query)]
        raise ValueError(f"votes: got {list(votes.shape)}, allowed: at least {least}")
    if len(window.query) == 0:
        return
    begin, table = window.first_position, block_table.int()[None]
    for query in window.query.split(_QUERIES_AT_ONCE[device.type]):
        count, seen = len(query), begin + len(query)
        starts = torch.arange(0, count + 1, count, dtype=torch.int32, device=device)
        lengths = torch.full((1,), seen, dtype=torch.int32, device=device)
        batch = PrefillBatch(
            query=query,
            query_start=starts,
            block_table=table,
            seq_lens=lengths,
            max_query_tokens=count,
            max_seq_tokens=seen,
            query_scale=window.query_scale,
        )
        if voting is None:
            padded = next(number for number in ROWS_AT_ONCE if number >= count)
            rows = torch.arange(begin, seen, dtype=torch.int32, device=device)
            rows = torch.nn.functional.pad(rows, (0, padded - count), value=-1)
            votes[:, :seen] += attention_sums(batch, cache, softmax, rows[None])[0]
        else:
            here = torch.where((voting >= begin) & (voting < seen), voting, -1)
            sums = attention_sums(batch, cache, softmax, here[None])[0]
            votes[:, :seen] += sums.sum(dim=0) / rows_that_see(voting[None], seen).clamp(min=1)
        begin = seen


def choose_tokens(
    votes: torch.Tensor,
    num_tokens: int,
    candidates: int,
    before: int,
    rule: CompactionRule,
    protected: torch.Tensor | None = None,
) -> torch.Tensor:
    """Chooses the tokens that are kept.

    Args:
        votes: `[num_kv_heads, num_tokens]` float32.
        num_tokens: P.
        candidates: tokens of the prompt's full blocks; these are the first tokens.
        before: tokens of the blocks before the target blocks. This many candidates are dropped.
        rule: says which tokens are always kept.
        protected: `[num_tokens]` or like `votes`, bool, tokens that are kept too; with those of the rule at most as
            many as are kept.

    Returns:
        `[num_kv_heads, candidates - before]` int64, ascending, or in the order of `rule.in_order_of_votes`.
    """
    kept = candidates - before
    first_of_window = max(num_tokens - rule.newest_tokens(kept), 0)
    if not votes.is_cuda:
        return reference.choose_tokens(votes, kept, candidates, first_of_window, rule, protected)
    from sparse_kernels.compaction import triton

    return triton.choose_tokens(votes, kept, candidates, first_of_window, rule, protected)


def _move(kept: torch.Tensor, prompt: PromptBlocks, cache: KVCache) -> None:
    """Moves the kept tokens to their places, and computes the statistics of the pages there."""
    if not kept.is_cuda:
        return reference.move_tokens(kept, prompt.block_table, prompt.first_block, cache)
    from sparse_kernels.compaction import triton

    return triton.move_tokens(kept, prompt.block_table, prompt.first_block, cache)
