"""Random paged caches in every packing, and a reference without pages."""

from dataclasses import dataclass

import torch
from sparse_kernels.batch import QueryTokens
from sparse_kernels.cache import KVCache
from sparse_kernels.page_statistics import KINDS, PageStatistics, StatisticsLayout, update_page_statistics
from sparse_kernels.paging import PagedTensor

VECTOR_KINDS = [name for name, kind in KINDS.items() if "int8" in kind.formats]
"""Kinds of statistics whose vectors are stored one after the other, in every format."""


def garbage(*shape: int, generator: torch.Generator, finite: bool = False) -> torch.Tensor:
    """Arbitrary memory contents: huge values, and NaN and infinities unless `finite`, as bfloat16 bits."""
    bits = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator)
    memory = bits.view(torch.bfloat16)
    return memory.nan_to_num(nan=1e30, posinf=1e30, neginf=-1e30) if finite else memory


@dataclass
class PagedBatch:
    """Requests with keys and values in a shuffled paged cache, with garbage elsewhere."""

    keys: list[torch.Tensor]
    """Per request `[context, num_kv_heads, head_size]` bfloat16."""
    values: list[torch.Tensor]
    block_table: torch.Tensor
    context_lens: torch.Tensor
    paged_keys: PagedTensor
    paged_values: PagedTensor
    statistics: PageStatistics
    page_size: int

    @property
    def num_pages(self) -> torch.Tensor:
        return self.context_lens // self.page_size

    @property
    def cache(self) -> KVCache:
        return KVCache(self.paged_keys, self.paged_values, self.statistics)

    def tokens(self, query: torch.Tensor) -> QueryTokens:
        """One query token of each request, `[num_requests, num_kv_heads, group_size, head_size]`."""
        return QueryTokens(query, self.block_table, self.context_lens)


def make_batch(
    context_lens: list[int],
    num_kv_heads: int,
    head_size: int,
    block_size: int = 64,
    page_size: int = 8,
    statistics: str = "int8",
    kind: str = "mean_and_spread",
    seed: int = 0,
) -> PagedBatch:
    """A row-major paged batch, its statistics computed by the operation under test."""
    generator = torch.Generator().manual_seed(seed)
    layout = StatisticsLayout(page_size, head_size, statistics, kind=KINDS[kind])
    needed = [-(-length // block_size) for length in context_lens]
    total = sum(needed) + 3
    cache = garbage(total, num_kv_heads, block_size + layout.rows(block_size), 2 * head_size, generator=generator)
    rows = cache[:, :, :block_size]
    order = torch.randperm(total, generator=generator)
    # Columns beyond a request's own blocks hold ids of other requests, as in vLLM.
    table = torch.randint(0, total, (len(context_lens), max(needed) + 2), generator=generator)
    keys, values, used = [], [], 0
    for request, (length, count) in enumerate(zip(context_lens, needed, strict=True)):
        blocks = order[used : used + count]
        used += count
        table[request, :count] = blocks
        # A common direction and outlying dimensions, as real keys have.
        offset = torch.randn(num_kv_heads, head_size, generator=generator) * 2
        key = (torch.randn(length, num_kv_heads, head_size, generator=generator) + offset).bfloat16()
        value = torch.randn(length, num_kv_heads, head_size, generator=generator).bfloat16()
        token = torch.arange(length)
        rows[blocks[token // block_size], :, token % block_size] = torch.cat([key, value], dim=-1)
        keys.append(key)
        values.append(value)
    paged_keys = PagedTensor.from_rows(rows[..., :head_size], page_size)
    paged_values = PagedTensor.from_rows(rows[..., head_size:], page_size)
    views = layout.views(cache[:, :, block_size:], block_size)
    batch = PagedBatch(keys, values, table, torch.tensor(context_lens), paged_keys, paged_values, views, page_size)
    per_block = block_size // page_size
    for request, length in enumerate(context_lens):
        page = torch.arange(length // page_size)
        update_page_statistics(paged_keys, views, table[request, page // per_block], page % per_block)
    return batch


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    visible: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Attention of one token over a whole context, per KV head masked by `visible`.

    Args:
        query: `[num_kv_heads, group_size, head_size]`.
        key: `[context, num_kv_heads, head_size]`.
        value: like `key`.
        visible: `[num_kv_heads, context]` bool.
        sinks: `[num_kv_heads * group_size]`.

    Returns:
        `[num_kv_heads * group_size, head_size]`.
    """
    logits = torch.einsum("hgd,nhd->hgn", query.to(dtype), key.to(dtype)) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if visible is not None:
        logits = logits.masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(dtype).view(*query.shape[:2], 1)], dim=-1)
    weights = logits.softmax(dim=-1)[..., : key.shape[0]]
    return torch.einsum("hgn,nhd->hgd", weights, value.to(dtype)).flatten(0, 1)


def assert_as_accurate(
    actual: torch.Tensor, exact: torch.Tensor, low_precision: torch.Tensor, roundings: int = 1
) -> None:
    """The error against float64 is at most twice the error of rounding.

    The error of rounding is that of the same formula in the operation's precision, times `roundings` if the operation
    rounds several numbers in place of one, plus one rounding of the result to the output's dtype.
    """
    assert actual.shape == exact.shape
    band = torch.finfo(actual.dtype).eps * exact.abs().max().item()
    reference_error = (low_precision.double() - exact).abs().max().item()
    error = (actual.double() - exact).abs().max().item()
    allowed = 2 * (roundings * reference_error + band)
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
