"""Cuts the queries of a batch into runs that attend to one list of tokens each, without waiting for the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparse_kernels.batch import PrefillBatch, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.token_prefill.rule import TokenRule
from sparse_kernels.token_prefill.tokens import KeptTokens, in_a_row


@dataclass(frozen=True)
class ListedAttention:
    """Causal attention of runs of queries to lists of tokens.

    The cache appears as pages of one token, and a table says where the tokens of each list are. Attention kernels that
    support such pages (FlashAttention 3) need nothing else. The queries of a run are the last tokens of its list, so a
    causal mask aligned at the bottom right matches the positions.
    """

    query: torch.Tensor
    """`[num_tokens, num_query_heads, head_size]`, contiguous in its last dimension."""
    query_start: torch.Tensor
    """`[num_runs + 1]` int32, where the queries of each run begin, then the end of the last run's."""
    keys: torch.Tensor
    """`[num_rows, 1, num_kv_heads, head_size]`, a view of the cache whose rows overlap."""
    values: torch.Tensor
    """As the keys."""
    rows: torch.Tensor
    """`[num_runs, width]` int32, the rows of the tokens of each list in order, then other rows."""
    counts: torch.Tensor
    """`[num_runs]` int32, tokens of each list."""
    max_query_tokens: int
    """Largest number of queries of a run."""
    max_seq_tokens: int
    """Largest number of tokens of a list."""
    softmax: Softmax
    """How logits become weights."""
    query_scale: torch.Tensor | None
    """One float32: a float8 query times this is the query."""
    key_scale: torch.Tensor | None
    """One float32: a float8 key times this is the key."""
    value_scale: torch.Tensor | None
    """One float32: a float8 value times this is the value."""
    output: torch.Tensor
    """Where to write the outputs of the runs, of the query's shape, contiguous in its last dimension, float16 or
    bfloat16."""


@dataclass(frozen=True)
class TokenRows:
    """A cache as pages of one token."""

    keys: torch.Tensor
    """See `ListedAttention.keys`."""
    values: torch.Tensor
    """As the keys."""
    block_rows: int
    """Rows from the first token of a block to that of the next."""
    block_tokens: int
    """Tokens of a block, at most its rows."""

    @classmethod
    def of(cls, cache: KVCache) -> TokenRows:
        """Views keys and values by token.

        Raises:
            ValueError: if the cache does not store one contiguous row per token, at equal distances.
        """
        cache.check_rows()
        keys, values = cache.keys.view, cache.values.view
        block, head, token = keys.stride(0), keys.stride(1), keys.stride(-2)
        if block % token:
            raise ValueError(f"keys: got blocks of {block} elements, allowed: a multiple of a token's {token}")
        block_rows, block_tokens = block // token, cache.page_size * cache.keys.pages_per_block
        shape = (len(keys) - 1) * block_rows + block_tokens, 1, cache.num_kv_heads, cache.head_size
        strides = token, token, head, 1
        return cls(keys.as_strided(shape, strides), values.as_strided(shape, strides), block_rows, block_tokens)

    def find(self, block_table: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Returns the rows of tokens.

        Args:
            block_table: `[n, max_blocks]` int32, physical block ids.
            position: `[n, m]` integer, positions in the contexts; negative for none.

        Returns:
            `[n, m]` int32; 0 for none.
        """
        block = block_table.gather(1, (position.clamp(min=0) // self.block_tokens).long())
        return torch.where(position >= 0, block * self.block_rows + position % self.block_tokens, 0).int()


@dataclass(frozen=True)
class KeptQueries:
    """The query tokens of a batch that are in T."""

    mask: torch.Tensor
    """`[num_tokens]` bool."""
    tokens: torch.Tensor
    """`[num_tokens]` int64, the tokens of the mask in order, then undefined entries."""
    places: torch.Tensor
    """`[num_tokens]` int64, the index of each token of the mask in `tokens`; undefined for other tokens."""
    starts: torch.Tensor
    """`[num_requests + 1]` int32, where the tokens of each request begin, then the end of the last request's."""


def kept_queries(kept: KeptTokens, batch: PrefillBatch) -> KeptQueries:
    """Finds the query tokens of a batch that are in T."""
    token = torch.arange(batch.num_tokens, device=kept.mask.device)
    start = batch.query_start.long()
    # The first and the last bound limit the batch's part; other requests may be before and after it.
    request = torch.searchsorted(start, token, right=True) - 1
    present = (request >= 0) & (request < batch.num_requests)
    request = request.clamp(0, batch.num_requests - 1)
    position = batch.seq_lens.long()[request] - (start[request + 1] - token)
    mask = kept.mask[request, position.clamp(0, kept.mask.shape[1] - 1)] & present & (position >= 0)
    tokens, _ = in_a_row(mask[None])
    before = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.cumsum(dim=0)])
    starts = before[start.clamp(max=batch.num_tokens)]
    return KeptQueries(mask, tokens[0].clamp(min=0).long(), (before[1:] - 1).clamp(min=0), (starts - starts[0]).int())


@dataclass(frozen=True)
class QueryTiles:
    """The query tokens of a batch by tiles: tokens of one request whose positions lie in one tile of its context.

    The list of a tile is the tokens in T before its window, and then all tokens from there to its end. The host knows
    an upper bound on the number of tiles. The last ones have no query tokens.
    """

    request: torch.Tensor
    """`[num_tiles]` int64, the request of each tile."""
    starts: torch.Tensor
    """`[num_tiles + 1]` int32, where the tokens of each tile begin in the batch, then the end of the last tile's."""
    window: torch.Tensor
    """`[num_tiles]` int64, the first position of a tile's window."""
    end: torch.Tensor
    """`[num_tiles]` int64, one past the position of a tile's last token."""

    def __len__(self) -> int:
        return len(self.request)

    @classmethod
    def of(cls, batch: PrefillBatch, rule: TokenRule) -> QueryTiles:
        """Cuts the query tokens of a batch into tiles."""
        tokens = rule.tile_tokens
        start, lengths = batch.query_start.long(), batch.seq_lens.long()
        begin = lengths - batch.query_lens.long()
        number = torch.where(begin < lengths, (lengths - 1) // tokens - begin // tokens + 1, 0)
        until = number.cumsum(dim=0)
        # A chunk of n tokens lies in at most 1 + (n + tokens - 2) // tokens tiles.
        most = (batch.num_tokens + batch.num_requests * (2 * tokens - 2)) // tokens
        index = torch.arange(most, device=lengths.device)
        request = torch.searchsorted(until, index, right=True).clamp(max=batch.num_requests - 1)
        tile = begin[request] // tokens + index - (until - number)[request]
        first = torch.minimum(torch.maximum(tile * tokens, begin[request]), lengths[request])
        end = torch.minimum((tile + 1) * tokens, lengths[request])
        starts = torch.cat([start[request] + first - begin[request], start[-1:]])
        return cls(request, starts.int(), rule.window_start(first), end)
