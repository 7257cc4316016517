"""Chooses the tokens that a layer keeps and gathers them, on any device, without waiting for the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparse_kernels.batch import PrefillBatch, Softmax
from sparse_kernels.token_prefill.rule import TokenRule

_STEPS = float(1 << 40)
"""Units of a weight of 1. Sums are integers of this unit: they are exact, so the order of additions does not matter."""


@dataclass(frozen=True)
class KeptTokens:
    """The set T of each request in one layer (ZipVL, Eq. 9), on the device.

    A smaller KV cache would keep these tokens: the paper drops the keys and values of all others.
    """

    mask: torch.Tensor
    """`[num_requests, max_seq_tokens]` bool, whether T contains each position."""
    positions: torch.Tensor
    """`[num_requests, max_seq_tokens]` int32, the positions in T, ascending, then -1."""
    counts: torch.Tensor
    """`[num_requests]` int32, tokens in T: p, and those that join because they are first or last."""
    important: torch.Tensor
    """`[num_requests]` int32, the paper's p (Eq. 7). A small p means concentrated attention."""

    @classmethod
    def join(cls, parts: list[KeptTokens]) -> KeptTokens:
        """Returns the tokens of the requests of all parts."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            torch.cat([part.mask for part in parts]),
            torch.cat([part.positions for part in parts]),
            torch.cat([part.counts for part in parts]),
            torch.cat([part.important for part in parts]),
        )


@dataclass(frozen=True)
class KeptAttention:
    """Causal attention of the queries in T to the keys and values in T.

    The cache appears as pages of one token, and a table says where the tokens of T are. Attention kernels that support
    such pages (FlashAttention 3) need nothing else. The queries of a chunk are the last tokens of T, so a causal mask
    aligned at the bottom right matches the positions.
    """

    query: torch.Tensor
    """`[num_tokens, num_query_heads, head_size]` contiguous: the queries in T by request, then undefined rows."""
    query_start: torch.Tensor
    """`[num_requests + 1]` int32, where the queries of each request begin, then the end of the last request's."""
    keys: torch.Tensor
    """`[num_rows, 1, num_kv_heads, head_size]`, a view of the cache whose rows overlap."""
    values: torch.Tensor
    """As the keys."""
    rows: torch.Tensor
    """`[num_requests, max_seq_tokens]` int32, the rows of the tokens in T in order, then 0."""
    counts: torch.Tensor
    """`[num_requests]` int32, tokens in T."""
    max_query_tokens: int
    """Largest number of queries of a request."""
    max_seq_tokens: int
    """Largest number of tokens in T."""
    softmax: Softmax
    """How logits become weights."""
    query_scale: torch.Tensor | None
    """One float32: a float8 query times this is the query."""
    key_scale: torch.Tensor | None
    """One float32: a float8 key times this is the key."""
    value_scale: torch.Tensor | None
    """One float32: a float8 value times this is the value."""
    output: torch.Tensor
    """Where to write, of the query's shape, contiguous, float16 or bfloat16."""


def choose_tokens(sums: torch.Tensor, probes: torch.Tensor, batch: PrefillBatch, rule: TokenRule) -> KeptTokens:
    """Chooses T of each request (ZipVL, Eq. 7 to 9).

    p is the smallest number of tokens whose accumulated attention reaches the share tau of the total. T is the p tokens
    of highest normalised attention (ties go to the first), the first `rule.sink_tokens` tokens of the context, and the
    chunk's last token, which predicts the next one.

    Args:
        sums: `[num_requests, max_seq_tokens]` float32, a_j: attention on each token, summed over probe rows and query
            heads (Eq. 6). Entries beyond a context may hold anything.
        probes: the result of `draw_probes`.
        batch: the requests that prefill.
        rule: the share tau, the attention sinks, and the contexts that are attended whole.

    Returns:
        The tokens in T; none for a request without query tokens.
    """
    width, device = sums.shape[1], sums.device
    position = torch.arange(width, device=device)
    lengths = batch.seq_lens.long()[:, None]
    lengths = torch.where(batch.query_lens[:, None] > 0, lengths, 0)
    exists = position < lengths
    if rule.tau >= 1:
        mask, important = exists, lengths.squeeze(1)
    else:
        steps = torch.where(exists, sums, 0).nan_to_num(0, 0, 0).double().mul(_STEPS).round().long()
        covered = steps.sort(dim=1, descending=True).values.cumsum(dim=1)
        short = (covered < covered[:, -1:].double() * rule.tau) & exists
        important = torch.minimum(short.sum(dim=1) + 1, lengths.squeeze(1))
        important = torch.where(lengths.squeeze(1) <= rule.dense_tokens, lengths.squeeze(1), important)
        # A context's last token is a probe row, so every token is seen.
        normalised = torch.where(exists, sums / rows_that_see(probes, width).clamp(min=1), -1)
        best = normalised.sort(dim=1, descending=True, stable=True).indices
        mask = torch.zeros_like(exists).scatter_(1, best, position < important[:, None])
        mask |= exists & (position < rule.sink_tokens)
        mask |= position == lengths - 1
    positions, counts = _in_a_row(mask)
    return KeptTokens(mask, positions, counts, important.int())


def rows_that_see(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Counts the rows that see each token (ZipVL, Eq. 8): rows at the token's position or after it.

    Args:
        rows: `[num_requests, num_rows]` integer, positions; -1 for none.
        width: number of first tokens of a context.

    Returns:
        `[num_requests, width]` int64.
    """
    order = rows.long().sort(dim=1).values
    position = torch.arange(width, device=rows.device).expand(len(order), -1).contiguous()
    return rows.shape[1] - torch.searchsorted(order, position)


def attended_pairs(kept: KeptTokens, batch: PrefillBatch, rule: TokenRule) -> torch.Tensor:
    """Counts the pairs of a query and a key that attend.

    Args:
        kept: T of each request.
        batch: the requests that prefill.
        rule: what queries attend to besides T.

    Returns:
        `[2]` int64: the pairs of all requests, and those of dense attention.
    """
    position = torch.arange(kept.mask.shape[1], device=kept.mask.device)
    lengths, chunks = batch.seq_lens.long()[:, None], batch.query_lens.long()[:, None]
    is_query = (position >= lengths - chunks) & (position < lengths)
    until = kept.mask.cumsum(dim=1)
    if rule.others == "zero":
        pairs = torch.where(kept.mask, until, 0)
    else:
        # Tokens in T before a query's newest tokens, and these.
        before = torch.nn.functional.pad(until, (rule.local_tokens, 0))[:, : len(position)]
        pairs = before + (position + 1).clamp(max=rule.local_tokens)
    return torch.stack([torch.where(is_query, pairs, 0).sum(), torch.where(is_query, position + 1, 0).sum()])


def _in_a_row(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the positions where each row of a mask is set, ascending and then -1, and their number; int32."""
    height, width = mask.shape
    place = mask.cumsum(dim=1)
    counts = place[:, -1].int() if width else mask.sum(dim=1).int()
    # Positions that are not set are written to an extra column.
    positions = torch.full((height, width + 1), -1, dtype=torch.int32, device=mask.device)
    position = torch.arange(width, dtype=torch.int32, device=mask.device).expand(height, -1)
    positions.scatter_(1, torch.where(mask, place - 1, width), position)
    return positions[:, :width].contiguous(), counts


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
    tokens, _ = _in_a_row(mask[None])
    before = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.cumsum(dim=0)])
    starts = before[start.clamp(max=batch.num_tokens)]
    return KeptQueries(mask, tokens[0].clamp(min=0).long(), (before[1:] - 1).clamp(min=0), (starts - starts[0]).int())
