"""Draws the probe rows of a chunk: the same rows on every device, without waiting for the host."""

from __future__ import annotations

import torch

from sparse_kernels.batch import PrefillBatch
from sparse_kernels.token_prefill.rule import TokenRule

_WORD = 0xFFFFFFFF
_LAST = torch.iinfo(torch.int64).max


def draw_probes(batch: PrefillBatch, rule: TokenRule) -> torch.Tensor:
    """Draws the probe rows of each request (ZipVL, supplement A): its newest query tokens, and random others.

    The draw ranks the other query tokens by a hash of their position. The hash depends only on the seed, the position
    of the chunk's first token and the length of the context. A request therefore has the same probe rows in every
    batch, on every device and in every layer. The layers of a step may share the result.

    Args:
        batch: the requests that prefill.
        rule: the number of probe rows, and the seed.

    Returns:
        `[num_requests, rule.num_probes]` int32, positions in the context: random ones in the order of their hashes,
        then recent ones in text order. -1 if a chunk has fewer tokens.
    """
    lengths, chunks = batch.seq_lens.long()[:, None], batch.query_lens.long()[:, None]
    device = batch.query.device
    # A request without a context has no rows.
    first = (lengths - chunks).clamp(min=0)
    offset = torch.arange(rule.recent_probes, device=device)
    newest = lengths - rule.recent_probes + offset
    recent = torch.where(newest >= first, newest, -1)
    if rule.random_probes == 0:
        return recent.int()
    position = first + torch.arange(max(batch.max_query_tokens, rule.random_probes), device=device)
    key = hash_words(hash_words(hash_words(torch.full_like(first, rule.seed & _WORD)) ^ first) ^ lengths)
    # The position in the lower half makes every rank unique, so no sort has ties.
    rank = hash_words(key ^ position) << 31 | position
    rank = torch.where(position < lengths - rule.recent_probes, rank, _LAST)
    best = rank.topk(rule.random_probes, largest=False, sorted=True).values
    random = torch.where(best == _LAST, -1, best & 0x7FFFFFFF)
    return torch.cat([random, recent], dim=1).int()


def hash_words(word: torch.Tensor) -> torch.Tensor:
    """Mixes 32-bit words, int64 each. Both factors are below 2**31, so that no product exceeds 63 bits."""
    word = word ^ (word >> 16)
    word = (word * 0x21F0AAAD) & _WORD
    word = word ^ (word >> 15)
    word = (word * 0x735A2D97) & _WORD
    return word ^ (word >> 15)
