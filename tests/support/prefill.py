"""Prefilling requests in a cache with garbage elsewhere, and ZipVL as defined in the paper, in loops."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from sparse_kernels.batch import PrefillBatch, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.token_prefill import KeptTokens, TokenRule
from support.paged import dense_attention, make_batch


@dataclass
class Prefill:
    """Requests of one batch; their last tokens are the queries."""

    batch: PrefillBatch
    cache: KVCache
    keys: list[torch.Tensor]
    """Per request `[context, num_kv_heads, head_size]`."""
    values: list[torch.Tensor]

    @property
    def chunks(self) -> list[slice]:
        starts = self.batch.query_start.tolist()
        return [slice(*bounds) for bounds in pairwise(starts)]

    def alone(self, request: int) -> "Prefill":
        """One request in a separate batch, with its own bounds."""
        batch, chunk = self.batch, self.chunks[request]
        length = int(batch.seq_lens[request])
        blocks = -(-length // (self.cache.page_size * self.cache.keys.pages_per_block))
        single = replace(
            batch.requests(request, request + 1),
            query=batch.query[chunk],
            query_start=torch.tensor([0, chunk.stop - chunk.start], dtype=torch.int32, device=batch.query.device),
            block_table=batch.block_table[request : request + 1, :blocks],
            max_query_tokens=chunk.stop - chunk.start,
            max_seq_tokens=length,
        )
        return Prefill(single, self.cache, self.keys[request : request + 1], self.values[request : request + 1])

    def output(self) -> torch.Tensor:
        """Poisoned memory for an output."""
        query = self.batch.query
        return torch.full(query.shape, torch.nan, dtype=torch.bfloat16 if query.itemsize == 1 else query.dtype).to(
            query.device
        )


def make_prefill(
    requests: list[tuple[int, int]],
    num_kv_heads: int = 2,
    group: int = 2,
    head_size: int = 16,
    block_size: int = 32,
    padding: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Prefill:
    """Requests with given context and chunk lengths, and padding tokens. A context of 0 is also padding."""
    contexts, chunks = zip(*requests, strict=True)
    paged = make_batch([max(1, n) for n in contexts], num_kv_heads, head_size, block_size, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    # A slice of a wider tensor, as vLLM's query is. Queries with a common direction prefer some keys.
    wide = torch.randn(sum(chunks) + padding, num_kv_heads * group + 3, head_size, generator=generator)
    wide += 1.5 * torch.randn(head_size, generator=generator)
    starts = torch.tensor([0, *chunks]).cumsum(0).int()
    batch = PrefillBatch(
        wide.to(dtype)[:, : num_kv_heads * group],
        starts,
        paged.block_table.int(),
        torch.tensor(contexts, dtype=torch.int32),
        max(chunks) + 5,
        # As wide as the block table: columns beyond a context are garbage.
        paged.block_table.shape[1] * block_size,
    )
    return Prefill(batch, paged.cache, paged.keys, paged.values)


def papers_tokens(
    query: torch.Tensor, key: torch.Tensor, probes: list[int], rule: TokenRule, softmax: Softmax
) -> tuple[set[int], int]:
    """T of the context of a request, and p (ZipVL, Eq. 6 to 9), in float64.

    Args:
        query: `[chunk, num_query_heads, head_size]`.
        key: `[context, num_kv_heads, head_size]`.
        probes: positions of the probe rows.
        rule: how many tokens are important.
        softmax: how logits become weights.
    """
    context, chunk = len(key), len(query)
    group = query.shape[1] // key.shape[1]
    accumulated, seen = [0.0] * context, [0] * context
    for row in probes:
        for head in range(query.shape[1]):
            logits = key[: row + 1, head // group].double() @ query[row - (context - chunk), head].double()
            logits = logits * softmax.scale
            if softmax.softcap:
                logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
            if softmax.sink_logits is not None:
                logits = torch.cat([logits, softmax.sink_logits[head].double()[None]])
            for column, weight in enumerate(logits.softmax(dim=0).tolist()[: row + 1]):
                accumulated[column] += weight
        for column in range(row + 1):
            seen[column] += 1
    p, covered = 0, 0.0
    if rule.fixed_ratio is not None:
        p = math.ceil(rule.fixed_ratio * context)
    else:
        for weight in sorted(accumulated, reverse=True):
            if covered >= rule.tau * sum(accumulated):
                break
            p, covered = p + 1, covered + weight
    normalised = [weight / count for weight, count in zip(accumulated, seen, strict=True)]
    best = sorted(range(context), key=lambda column: (-normalised[column], column))
    return {*best[:p], context - 1}, p


def attention_within(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tokens: set[int],
    softmax: Softmax,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Attention of the queries in T to the keys and values in T, token by token; 0 for the others."""
    context, chunk = len(key), len(query)
    seen = [
        [row in tokens and column in tokens and column <= row for column in range(context)]
        for row in range(context - chunk, context)
    ]
    return attention_of(query, key, value, torch.tensor(seen), softmax, dtype)


def is_near(row: int, column: int, rule: TokenRule) -> bool:
    """Whether a token is among the newest tokens of a query's tile: those of its first position, and the later ones."""
    first_of_tile = row - row % rule.tile_tokens
    return first_of_tile - column < rule.local_tokens


def attention_beside(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tokens: set[int],
    rule: TokenRule,
    softmax: Softmax,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Attention of every query to the keys and values in T and to those near it, token by token."""
    context, chunk = len(key), len(query)
    seen = [
        [column <= row and (column in tokens or is_near(row, column, rule)) for column in range(context)]
        for row in range(context - chunk, context)
    ]
    return attention_of(query, key, value, torch.tensor(seen), softmax, dtype)


def attention_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    softmax: Softmax,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Attention of each query to the keys that it sees, `[chunk, context]` bool; 0 for a query that sees none."""
    output = torch.zeros(query.shape, dtype=dtype)
    grouped = query.unflatten(1, (key.shape[1], -1))
    for index, visible in enumerate(seen):
        if visible.any():
            output[index] = dense_attention(
                grouped[index], key, value, softmax.scale, visible.expand(key.shape[1], -1), softmax.sink_logits,
                softmax.softcap, dtype,
            )  # fmt: skip
    return output


def rows_of(probes: torch.Tensor, request: int) -> list[int]:
    """The probe rows of a request."""
    return [row for row in probes[request].tolist() if row >= 0]


def tokens_of(kept: KeptTokens, request: int) -> set[int]:
    """T of a request; all forms of it agree."""
    positions = kept.positions[request].tolist()
    count = int(kept.counts[request])
    assert positions[:count] == sorted(set(positions[:count]))
    assert set(positions[count:]) <= {-1}
    assert kept.mask[request].nonzero().flatten().tolist() == positions[:count]
    return set(positions[:count])


SMALL_RULE = TokenRule(tau=0.8, recent_probes=8, random_probes=8, others="zero", sink_tokens=0)
"""The published form: queries outside T have an output of zero."""
ATTENDING = replace(SMALL_RULE, others="attend", local_tokens=8, tile_tokens=16, sink_tokens=4)
