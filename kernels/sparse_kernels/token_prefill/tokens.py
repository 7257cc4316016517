"""Chooses the tokens that a layer keeps, and puts them in a row; on any device, without a word to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparse_kernels.batch import PrefillBatch, Softmax
from sparse_kernels.token_prefill.rule import TokenRule

_STEPS = float(1 << 40)
"""Sums are added up as whole numbers of this part of a row's weight: exact, so no order or width of a batch counts."""


@dataclass(frozen=True)
class KeptTokens:
    """The set T of each request in one layer (ZipVL, Eq. 9), on the device.

    It is what a smaller KV cache would keep: the paper drops the keys and values of all other tokens.
    """

    mask: torch.Tensor
    """`[num_requests, max_seq_tokens]` bool, whether T has the token of this position."""
    positions: torch.Tensor
    """`[num_requests, max_seq_tokens]` int32, the positions in T, ascending, then -1."""
    counts: torch.Tensor
    """`[num_requests]` int32, tokens in T: p, or one more where the chunk's last token is not among the p best."""
    important: torch.Tensor
    """`[num_requests]` int32, the paper's p (Eq. 7), a measure of how concentrated the layer's attention is."""

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

    The cache appears as pages of one token, whose table says where the tokens of T are: attention kernels that take
    such pages (FlashAttention 3) need nothing else. Within T the queries of a chunk are the last, so a causal mask
    that is aligned at the bottom right is that of the positions.
    """

    query: torch.Tensor
    """`[num_tokens, num_query_heads, head_size]` contiguous: the queries in T, request after request, then anything."""
    query_start: torch.Tensor
    """`[num_requests + 1]` int32, where the queries of each request begin, and where those of the last end."""
    keys: torch.Tensor
    """`[num_rows, 1, num_kv_heads, head_size]`, a view of the cache whose rows overlap."""
    values: torch.Tensor
    """As the keys."""
    rows: torch.Tensor
    """`[num_requests, max_seq_tokens]` int32, the rows of the tokens in T in order, then 0."""
    counts: torch.Tensor
    """`[num_requests]` int32, tokens in T."""
    max_query_tokens: int
    """Queries of a request, at most."""
    max_seq_tokens: int
    """Tokens in T, at most."""
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

    p is the smallest number of tokens whose accumulated attention reaches the share tau of the sum of all. T is the p
    tokens of highest normalised attention (of equal ones the first) and the chunk's last token, which decodes.

    Args:
        sums: `[num_requests, max_seq_tokens]` float32, a_j: attention on each token, added up over probe rows and
            query heads (Eq. 6). What lies beyond a context may be anything.
        probes: what `draw_probes` returns.
        batch: the requests that prefill.
        rule: the share tau, and which contexts are attended whole.

    Returns:
        The tokens in T; none of a request without query tokens.
    """
    width, device = sums.shape[1], sums.device
    position = torch.arange(width, device=device)
    lengths = batch.seq_lens.long()[:, None]
    lengths = torch.where(batch.query_lens[:, None] > 0, lengths, 0)
    exists = position < lengths
    if rule.tau >= 1:
        mask, important = exists, lengths.squeeze(1)
    else:
        whole = torch.where(exists, sums, 0).nan_to_num(0, 0, 0).double().mul(_STEPS).round().long()
        covered = whole.sort(dim=1, descending=True).values.cumsum(dim=1)
        short = (covered < covered[:, -1:].double() * rule.tau) & exists
        important = torch.minimum(short.sum(dim=1) + 1, lengths.squeeze(1))
        important = torch.where(lengths.squeeze(1) <= rule.dense_tokens, lengths.squeeze(1), important)
        # A context's last token is a probe, so no token in it is unseen.
        normalised = torch.where(exists, sums / rows_that_see(probes, width).clamp(min=1), -1)
        best = normalised.sort(dim=1, descending=True, stable=True).indices
        mask = torch.zeros_like(exists).scatter_(1, best, position < important[:, None])
        mask |= position == lengths - 1
    positions, counts = _in_a_row(mask)
    return KeptTokens(mask, positions, counts, important.int())


def rows_that_see(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Counts the rows that see each token (ZipVL, Eq. 8): those whose positions are not below its own.

    Args:
        rows: `[num_requests, num_rows]` integer, positions; -1 for none.
        width: tokens, the first ones of a context.

    Returns:
        `[num_requests, width]` int64.
    """
    order = rows.long().sort(dim=1).values
    position = torch.arange(width, device=rows.device).expand(len(order), -1).contiguous()
    return rows.shape[1] - torch.searchsorted(order, position)


def _in_a_row(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns where a mask is set in each row, ascending and then -1, and in how many places; int32."""
    height, width = mask.shape
    place = mask.cumsum(dim=1)
    counts = place[:, -1].int() if width else mask.sum(dim=1).int()
    # What is not set goes to a column of its own.
    positions = torch.full((height, width + 1), -1, dtype=torch.int32, device=mask.device)
    position = torch.arange(width, dtype=torch.int32, device=mask.device).expand(height, -1)
    positions.scatter_(1, torch.where(mask, place - 1, width), position)
    return positions[:, :width].contiguous(), counts


@dataclass(frozen=True)
class KeptQueries:
    """Which query tokens of a batch are in T."""

    mask: torch.Tensor
    """`[num_tokens]` bool."""
    tokens: torch.Tensor
    """`[num_tokens]` int64, the tokens of the mask in order, then anything."""
    places: torch.Tensor
    """`[num_tokens]` int64, where each token of the mask is among them; anything for the others."""
    starts: torch.Tensor
    """`[num_requests + 1]` int32, where those of each request begin, and where those of the last end."""


def kept_queries(kept: KeptTokens, batch: PrefillBatch) -> KeptQueries:
    """Finds the query tokens of a batch that are in T."""
    token = torch.arange(batch.num_tokens, device=kept.mask.device)
    start = batch.query_start.long()
    # The first and the last bound are those of the batch's part, before and after which are other requests.
    request = torch.searchsorted(start, token, right=True) - 1
    present = (request >= 0) & (request < batch.num_requests)
    request = request.clamp(0, batch.num_requests - 1)
    position = batch.seq_lens.long()[request] - (start[request + 1] - token)
    mask = kept.mask[request, position.clamp(0, kept.mask.shape[1] - 1)] & present & (position >= 0)
    tokens, _ = _in_a_row(mask[None])
    before = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.cumsum(dim=0)])
    starts = before[start.clamp(max=batch.num_tokens)]
    return KeptQueries(mask, tokens[0].clamp(min=0).long(), (before[1:] - 1).clamp(min=0), (starts - starts[0]).int())
