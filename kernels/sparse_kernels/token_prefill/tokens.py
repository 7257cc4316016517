"""Chooses the tokens that a layer keeps, on any device, without waiting for the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparse_kernels.batch import PrefillBatch
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

    def before(self, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Returns the number of tokens in T of some requests before some positions, int64.

        Args:
            request: integer, indices of requests.
            position: integer, at most `max_seq_tokens`; of a shape that can be broadcast with `request`.
        """
        return torch.nn.functional.pad(self.mask.cumsum(dim=1), (1, 0))[request, position]

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


def choose_tokens(sums: torch.Tensor, probes: torch.Tensor, batch: PrefillBatch, rule: TokenRule) -> KeptTokens:
    """Chooses T of each request (ZipVL, Eq. 7 to 9).

    p is the smallest number of tokens whose accumulated attention reaches the share tau of the total; with
    `rule.fixed_ratio`, this share of the context's tokens, rounded up, in every layer. T is the p tokens of highest
    normalised attention (ties go to the first), the first `rule.sink_tokens` tokens of the context, and the chunk's
    last token, which predicts the next one.

    Args:
        sums: `[num_requests, max_seq_tokens]` float32, a_j: attention on each token, summed over probe rows and query
            heads (Eq. 6). Entries beyond a context may hold anything.
        probes: the result of `draw_probes`.
        batch: the requests that prefill.
        rule: the share tau or the fixed ratio, the attention sinks, and the contexts that are attended whole.

    Returns:
        The tokens in T; none for a request without query tokens.
    """
    width, device = sums.shape[1], sums.device
    position = torch.arange(width, device=device)
    lengths = batch.seq_lens.long()[:, None]
    lengths = torch.where(batch.query_lens[:, None] > 0, lengths, 0)
    exists = position < lengths
    if rule.keeps_all:
        mask, important = exists, lengths.squeeze(1)
    else:
        if rule.fixed_ratio is None:
            steps = torch.where(exists, sums, 0).nan_to_num(0, 0, 0).double().mul(_STEPS).round().long()
            covered = steps.sort(dim=1, descending=True).values.cumsum(dim=1)
            short = (covered < covered[:, -1:].double() * rule.tau) & exists
            important = torch.minimum(short.sum(dim=1) + 1, lengths.squeeze(1))
        else:
            important = (lengths.squeeze(1).double() * rule.fixed_ratio).ceil().long()
        important = torch.where(lengths.squeeze(1) <= rule.dense_tokens, lengths.squeeze(1), important)
        # A context's last token is a probe row, so every token is seen.
        normalised = torch.where(exists, sums / rows_that_see(probes, width).clamp(min=1), -1)
        best = normalised.sort(dim=1, descending=True, stable=True).indices
        mask = torch.zeros_like(exists).scatter_(1, best, position < important[:, None])
        mask |= exists & (position < rule.sink_tokens)
        mask |= position == lengths - 1
    positions, counts = in_a_row(mask)
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
    if rule.others == "zero":
        pairs = torch.where(kept.mask, kept.mask.cumsum(dim=1), 0)
    else:
        window = rule.window_start(position)
        request = torch.arange(len(kept.mask), device=position.device)[:, None]
        pairs = kept.before(request, window) + position + 1 - window
    return torch.stack([torch.where(is_query, pairs, 0).sum(), torch.where(is_query, position + 1, 0).sum()])


def in_a_row(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the positions where each row of a mask is set, ascending and then -1, and their number; int32."""
    height, width = mask.shape
    place = mask.cumsum(dim=1)
    counts = place[:, -1].int() if width else mask.sum(dim=1).int()
    # Positions that are not set are written to an extra column.
    positions = torch.full((height, width + 1), -1, dtype=torch.int32, device=mask.device)
    position = torch.arange(width, dtype=torch.int32, device=mask.device).expand(height, -1)
    positions.scatter_(1, torch.where(mask, place - 1, width), position)
    return positions[:, :width].contiguous(), counts
