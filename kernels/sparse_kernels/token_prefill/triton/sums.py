"""Sums the attention of the probe rows.

It takes two passes. The first computes the sums of their softmax, by parts of the context that are merged in order. The
second sums the weights on each token; one program handles some tokens and all heads that share sums. The order of every
sum depends only on the request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_kernels.batch import PrefillBatch, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.token_prefill.rule import TokenRule
from sparse_kernels.token_prefill.scratch import SPLIT_TOKENS, PrefillSizes, Scratch
from sparse_kernels.token_prefill.triton.parts import base_2_logits, logit_factor, sink_logit, tile_of
from sparse_kernels.triton import arithmetic


@triton.jit
def _log_sum(largest, total):
    """Returns the base-2 logarithm of `total * 2 ** largest`: -inf for a total of 0; NaN stays NaN."""
    some = tl.where(total > 0, largest + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    return tl.where(total != total, total, some)


@triton.jit
def _probe_rows(
    query_ptr, query_strides, probes_ptr, request, token_of_zero, first, kv_head, dim,
    GROUP: tl.constexpr, PROBES: tl.constexpr, HEAD_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Loads the probe rows of a KV head: all rows of its first query head, then of the next."""
    row = first + tl.arange(0, ROWS)
    exists = row < GROUP * PROBES
    head = kv_head * GROUP + row // PROBES
    position = tl.load(probes_ptr + request * PROBES + row % PROBES, mask=exists, other=-1)
    token = (token_of_zero + position).to(tl.int64)
    place = query_ptr + token * query_strides[0] + head * query_strides[1]
    real = (position >= 0)[:, None] & (dim < HEAD_SIZE)[None, :]
    query = tl.load(place[:, None] + dim[None, :], mask=real, other=0.0)
    return query, position, head, exists


@triton.jit
def _context_keys(
    keys_ptr, key_strides, table_ptr, position, length, kv_head, dim,
    HEAD_SIZE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Loads keys at some positions of a context, `[DIMS, positions]`."""
    exists = position < length
    block = tl.load(table_ptr + position // BLOCK_TOKENS, mask=exists, other=0).to(tl.int64)
    place = keys_ptr + block * key_strides[0] + kv_head * key_strides[1] + position % BLOCK_TOKENS * key_strides[2]
    return tl.load(place[None, :] + dim[:, None], mask=exists[None, :] & (dim < HEAD_SIZE)[:, None], other=0.0)


# No prompt may wait for a compilation. Widths, and places among other requests, differ between steps.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["probes_ptr", "starts_ptr", "lengths_ptr", "table_ptr"],
)
def _probe_sums(
    query_ptr, keys_ptr, probes_ptr, starts_ptr, lengths_ptr, table_ptr, query_scale_ptr, key_scale_ptr, partial_ptr,
    query_strides, key_strides, table_stride, scale, num_kv_heads,
    GROUP: tl.constexpr, PROBES: tl.constexpr, HEAD_SIZE: tl.constexpr, DIMS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Writes the log sums of a part of the context, `[num_requests, num_query_heads, splits, num_probes]`."""
    split = tl.program_id(0)
    blocks: tl.constexpr = (GROUP * PROBES + ROWS - 1) // ROWS
    kv_head = (tl.program_id(1) // blocks).to(tl.int64)
    request = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + request)
    end = tl.load(starts_ptr + request + 1)
    if split * SPLIT >= length or end == tl.load(starts_ptr + request):
        return
    dim = tl.arange(0, DIMS)
    query, position, head, exists = _probe_rows(
        query_ptr, query_strides, probes_ptr, request, end - length, tl.program_id(1) % blocks * ROWS, kv_head, dim,
        GROUP, PROBES, HEAD_SIZE, ROWS,
    )  # fmt: skip
    query = query.to(DTYPE)
    factor = logit_factor(scale, query_scale_ptr, key_scale_ptr)
    table = table_ptr + request * table_stride
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for first in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, length), KEYS):
        column = first + tl.arange(0, KEYS)
        keys = _context_keys(
            keys_ptr, key_strides, table, column, length, kv_head, dim, HEAD_SIZE, BLOCK_TOKENS
        ).to(DTYPE)  # fmt: skip
        logits = base_2_logits(query, keys, factor, SOFTCAP)
        # Positions of probe rows lie within the context, so the tokens that they see also do.
        logits = tl.where(column[None, :] <= position[:, None], logits, float("-inf"))
        peak = tl.maximum(largest, tl.max(logits, axis=1))
        # A row that has seen no token has a peak of -inf. Nothing can be subtracted from -inf.
        base = tl.where(peak == float("-inf"), 0.0, peak)
        total = total * tl.exp2(largest - base) + tl.sum(tl.exp2(logits - base[:, None]), axis=1)
        largest = peak
    row = tl.program_id(1) % blocks * ROWS + tl.arange(0, ROWS)
    place = ((request * num_kv_heads * GROUP + head) * tl.num_programs(0) + split) * PROBES + row % PROBES
    tl.store(partial_ptr + place, _log_sum(largest, total), mask=exists)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["starts_ptr", "lengths_ptr"])
def _join_sums(
    partial_ptr, sinks_ptr, starts_ptr, lengths_ptr, whole_ptr, splits,
    PROBES: tl.constexpr, PADDED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Merges the log sums of the parts in order, and adds the head's sink logit."""
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    row = request * tl.num_programs(0) + head
    length = tl.load(lengths_ptr + request)
    if tl.load(starts_ptr + request + 1) == tl.load(starts_ptr + request):
        return
    probe = tl.arange(0, PADDED)
    exists = probe < PROBES
    largest, total = sink_logit(sinks_ptr, head, PADDED)
    for split in range((length + SPLIT - 1) // SPLIT):
        part = tl.load(partial_ptr + (row * splits + split) * PROBES + probe, mask=exists, other=float("-inf"))
        peak = tl.maximum(largest, part)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        total = total * tl.exp2(largest - base) + tl.exp2(part - base)
        largest = peak
    tl.store(whole_ptr + row * PROBES + probe, _log_sum(largest, total), mask=exists)


@triton.jit(
    do_not_specialize=["table_stride", "request_stride", "set_stride"],
    do_not_specialize_on_alignment=["probes_ptr", "starts_ptr", "lengths_ptr", "table_ptr", "sums_ptr"],
)
def _column_sums(
    query_ptr, keys_ptr, probes_ptr, starts_ptr, lengths_ptr, table_ptr, query_scale_ptr, key_scale_ptr, whole_ptr,
    sums_ptr, query_strides, key_strides, table_stride, request_stride, set_stride, scale, num_kv_heads,
    heads_together,
    GROUP: tl.constexpr, PROBES: tl.constexpr, HEAD_SIZE: tl.constexpr, DIMS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Sums the weights of all probe rows on some tokens, over KV heads that share sums."""
    request = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + request)
    end = tl.load(starts_ptr + request + 1)
    column = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    if tl.program_id(0) * KEYS >= length or end == tl.load(starts_ptr + request):
        return
    dim = tl.arange(0, DIMS)
    factor = logit_factor(scale, query_scale_ptr, key_scale_ptr)
    table = table_ptr + request * table_stride
    # Weights are added element by element, and rows only once at the end: a sum over rows crosses warps.
    sums = tl.zeros((ROWS, KEYS), tl.float32)
    together = tl.program_id(2)
    for kv in range(together * heads_together, (together + 1) * heads_together):
        kv_head = tl.full((), kv, tl.int64)
        keys = _context_keys(
            keys_ptr, key_strides, table, column, length, kv_head, dim, HEAD_SIZE, BLOCK_TOKENS
        ).to(DTYPE)  # fmt: skip
        for first in range(0, GROUP * PROBES, ROWS):
            query, position, head, exists = _probe_rows(
                query_ptr, query_strides, probes_ptr, request, end - length, first, kv_head, dim,
                GROUP, PROBES, HEAD_SIZE, ROWS,
            )  # fmt: skip
            row = first + tl.arange(0, ROWS)
            place = (request * num_kv_heads * GROUP + head) * PROBES + row % PROBES
            whole = tl.load(whole_ptr + place, mask=exists, other=0.0)
            logits = base_2_logits(query.to(DTYPE), keys, factor, SOFTCAP)
            sums += tl.where(column[None, :] <= position[:, None], tl.exp2(logits - whole[:, None]), 0.0)
    place = sums_ptr + request * request_stride + together * set_stride + column
    tl.store(place, tl.sum(sums, axis=0), mask=column < length)


def launch_sums(
    batch: PrefillBatch, cache: KVCache, softmax: Softmax, probes: torch.Tensor, scratch: Scratch
) -> torch.Tensor:
    """Sums the attention of the probe rows on each token, over all heads.

    Args:
        batch: the requests that prefill.
        cache: their keys and values.
        softmax: how logits become weights.
        probes: the result of `draw_probes`.
        scratch: memory for these requests.

    Returns:
        `[num_requests, max_seq_tokens]` float32, a_j. Entries beyond a context, and for requests without query tokens,
        are not written.
    """
    sums = scratch.sums[: batch.num_requests, : batch.max_seq_tokens]
    _launch_sums(batch, cache, softmax, probes, scratch, sums[:, None])
    return sums


def _launch_sums(
    batch: PrefillBatch, cache: KVCache, softmax: Softmax, probes: torch.Tensor, scratch: Scratch, sums: torch.Tensor
) -> None:
    """Sums the attention of the probe rows on each token.

    Args:
        batch: the requests that prefill.
        cache: their keys and values.
        softmax: how logits become weights.
        probes: the result of `draw_probes`.
        scratch: memory for these requests.
        sums: where to write, `[num_requests, sets, max_seq_tokens]` float32, one set for all KV heads or one per head.
            Entries beyond a context, and for requests without query tokens, are not written.
    """
    num_requests, num_probes = probes.shape
    num_heads, head_size, num_kv_heads = batch.query.shape[1], cache.head_size, cache.num_kv_heads
    group = batch.group_size(num_kv_heads)
    keys = cache.keys.view
    splits = triton.cdiv(batch.max_seq_tokens, SPLIT_TOKENS)
    rows, columns = tile_of(head_size)
    inputs = (
        batch.query, keys, probes.contiguous(), batch.query_start, batch.seq_lens, batch.block_table,
        batch.query_scale, cache.key_scale,
    )  # fmt: skip
    strides = batch.query.stride(), (keys.stride(0), keys.stride(1), keys.stride(-2)), batch.block_table.stride(0)
    numbers = float(softmax.scale), num_kv_heads
    shape = {
        "GROUP": group,
        "PROBES": num_probes,
        "HEAD_SIZE": head_size,
        "DIMS": triton.next_power_of_2(head_size),
        "BLOCK_TOKENS": cache.page_size * cache.keys.pages_per_block,
        "ROWS": rows,
        "KEYS": columns,
        "SOFTCAP": float(softmax.softcap),
        "DTYPE": arithmetic(batch.query),
        "num_warps": 4,
        "num_stages": 2,
    }
    row_blocks = triton.cdiv(group * num_probes, rows)
    _probe_sums[(splits, num_kv_heads * row_blocks, num_requests)](
        *inputs, scratch.partial, *strides, *numbers, SPLIT=SPLIT_TOKENS, **shape
    )
    _join_sums[(num_heads, num_requests)](
        scratch.partial, softmax.sink_logits, batch.query_start, batch.seq_lens, scratch.whole, splits,
        PROBES=num_probes, PADDED=triton.next_power_of_2(num_probes), SPLIT=SPLIT_TOKENS,
    )  # fmt: skip
    sets = sums.shape[1]
    _column_sums[(triton.cdiv(batch.max_seq_tokens, columns), num_requests, sets)](
        *inputs, scratch.whole, sums, *strides, *sums.stride()[:2], *numbers, num_kv_heads // sets, **shape
    )


def attention_sums(batch: PrefillBatch, cache: KVCache, softmax: Softmax, rows: torch.Tensor) -> torch.Tensor:
    """See `api.attention_sums`."""
    _, num_heads, head_size = batch.query.shape
    sizes = PrefillSizes(0, batch.num_requests, batch.max_seq_tokens, num_heads, head_size)
    rule = TokenRule(recent_probes=rows.shape[1], random_probes=0)
    scratch = Scratch.make(sizes, rule, batch.query.dtype, batch.query.dtype, batch.query.device)
    sums = torch.empty(batch.num_requests, cache.num_kv_heads, batch.max_seq_tokens, device=batch.query.device)
    for first in range(0, batch.num_requests, len(scratch.sums)):
        last = min(first + len(scratch.sums), batch.num_requests)
        _launch_sums(batch.requests(first, last), cache, softmax, rows[first:last], scratch, sums[first:last])
    return sums
