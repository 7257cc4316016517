"""Attends with several query tokens of each request on a GPU: pieces of contexts in parallel, then their sums.

The rows of a program are the query heads of a KV head for all query tokens of a request, token by token. Keys and
values are read once for all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_kernels.batch import DecodeBatch, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.limits import shared_bytes_of
from sparse_kernels.triton import LOG2E, add_tokens, arithmetic, read_rows, rows_at, to_base_2

_PER_MULTIPROCESSOR = 2
"""Programs that a multiprocessor runs at once."""
_WAVES = range(2, 8)
"""Number of waves of programs: more than one, so that the longest context also spreads over the GPU."""
_FULL = 0.94
"""Required share of busy programs in all waves. The smallest number of waves that reaches it is taken."""
_MAX_PIECES = 64
_LEAST_TOKENS = 512
"""Smallest number of tokens of a piece, if contexts are long."""
_PIECES_AT_ONCE = 16


# These numbers differ between batches. No batch may wait for a compilation.
@triton.jit(do_not_specialize=["query_tokens", "pieces", "tiles"])
def _attend_piece(
    query_ptr, keys_ptr, values_ptr, table_ptr, lengths_ptr, sums_ptr, totals_ptr, query_strides,
    key_strides, table_stride, query_tokens, pieces, tiles, scale,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, DIMS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Attends with a tile of a request's rows to a piece of its context."""
    piece, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    kv_head, request = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    num_rows = query_tokens * GROUP
    row = tile * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    length = tl.load(lengths_ptr + request)
    # All pieces except the last have the same length, in whole steps.
    piece_tokens = tl.cdiv(tl.cdiv(length, pieces), KEYS) * KEYS
    begin = piece * piece_tokens
    end = tl.minimum(begin + piece_tokens, length)
    part = ((request * tl.num_programs(1) + kv_head) * pieces + piece) * num_rows + row

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if begin < end:
        position = length - query_tokens + row // GROUP
        dim = tl.arange(0, DIMS)
        real = exists[:, None] & (dim < HEAD_SIZE)[None, :]
        token = request * query_tokens + row // GROUP
        query_place = token * query_strides[0] + (kv_head * GROUP + row % GROUP) * query_strides[1]
        query = tl.load(query_ptr + query_place[:, None] + dim[None, :], mask=real, other=0.0).to(DTYPE)
        table = table_ptr + request * table_stride
        # The block of the next step is loaded ahead, because addresses depend on it.
        block = tl.load(table + begin // BLOCK_TOKENS)
        sums = tl.zeros((ROWS, DIMS), tl.float32)
        for start in range(begin, end, KEYS):
            column = start + tl.arange(0, KEYS)
            # Memory beyond the context is stale and may hold NaN: it is not read.
            is_read = column < end
            if BLOCK_TOKENS % KEYS == 0:
                base = block.to(tl.int64) * key_strides[0] + kv_head * key_strides[1]
                place = base + (start % BLOCK_TOKENS) * key_strides[2] + tl.arange(0, KEYS) * key_strides[2]
                following = start + KEYS
                block = tl.load(table + following // BLOCK_TOKENS, mask=following < end, other=0)
            else:
                place = rows_at(key_strides, table, column, is_read, kv_head, BLOCK_TOKENS)
            keys = tl.trans(read_rows(keys_ptr, place, is_read, dim, HEAD_SIZE, DTYPE))
            logits = to_base_2(tl.dot(query, keys, input_precision="ieee") * scale, SOFTCAP)
            logits = tl.where(is_read[None, :] & (column[None, :] <= position[:, None]), logits, float("-inf"))
            values = read_rows(values_ptr, place, is_read, dim, HEAD_SIZE, DTYPE)
            largest, total, sums = add_tokens(largest, total, sums, logits, values, DTYPE)
        tl.store(sums_ptr + part[:, None] * HEAD_SIZE + dim[None, :], sums, mask=real)
    tl.store(totals_ptr + 2 * part, largest, mask=exists)
    tl.store(totals_ptr + 2 * part + 1, total, mask=exists)


@triton.jit(do_not_specialize=["query_tokens", "pieces"])
def _add_pieces(
    sums_ptr, totals_ptr, sinks_ptr, output_ptr, output_strides, query_tokens, pieces,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, DIMS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Adds the pieces of one query head of one token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request, kv_head = token // query_tokens, head // GROUP
    num_kv_heads, num_rows = tl.num_programs(1) // GROUP, query_tokens * GROUP
    first = (request * num_kv_heads + kv_head) * pieces * num_rows + token % query_tokens * GROUP + head % GROUP
    dim = tl.arange(0, DIMS)
    largest, total = float("-inf"), 0.0
    if sinks_ptr is not None:
        # A learned sink only joins the denominator.
        largest, total = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E, 1.0
    sums = tl.zeros((DIMS,), tl.float32)
    for start in range(0, pieces, AT_ONCE):
        piece = start + tl.arange(0, AT_ONCE)
        part = first + piece * num_rows
        peaks = tl.load(totals_ptr + 2 * part, mask=piece < pieces, other=float("-inf"))
        totals = tl.load(totals_ptr + 2 * part + 1, mask=piece < pieces, other=0.0)
        peak = tl.maximum(largest, tl.max(peaks, axis=0))
        base = tl.where(peak == float("-inf"), 0.0, peak)
        weights, shrunk = tl.exp2(peaks - base), tl.exp2(largest - base)
        # A piece beyond the context has no sums. A NaN is not 0, and must reach the output.
        there = (totals != 0)[:, None] & (dim < HEAD_SIZE)[None, :]
        of_pieces = tl.load(sums_ptr + part[:, None] * HEAD_SIZE + dim[None, :], mask=there, other=0.0)
        total = total * shrunk + tl.sum(totals * weights, axis=0)
        sums = sums * shrunk + tl.sum(of_pieces * weights[:, None], axis=0)
        largest = peak
    # A request without a context has attended to no token.
    sums = sums / tl.where(total != 0, total, 1.0)
    place = output_ptr + token * output_strides[0] + head * output_strides[1] + dim
    tl.store(place, sums.to(output_ptr.dtype.element_ty), mask=dim < HEAD_SIZE)


def multi_token_decode(batch: DecodeBatch, cache: KVCache, softmax: Softmax, output: torch.Tensor) -> None:
    """See `api.multi_token_decode`."""
    cache.check_rows()
    keys, head_size, heads = cache.keys.view, cache.head_size, cache.num_kv_heads
    tokens, group = batch.tokens_per_request, batch.group_size(cache.num_kv_heads)
    block_tokens = cache.page_size * cache.keys.pages_per_block
    stages = _stages(keys.device)
    # A warp group multiplies at least 64 rows. Small multiprocessors have no room for more rows of wide heads.
    rows = 64 if tokens * group <= 64 or (head_size > 128 and stages == 2) else 128
    tiles = triton.cdiv(tokens * group, rows)
    longest = batch.max_context or batch.block_table.shape[1] * block_tokens
    wanted = _pieces(batch.num_requests * heads * tiles, _multiprocessors(keys.device))
    pieces = max(min(wanted, triton.cdiv(longest, _LEAST_TOKENS)), 1)
    shape = batch.num_requests, heads, pieces, tokens * group
    sums = torch.empty((*shape, head_size), dtype=torch.float32, device=output.device)
    totals = torch.empty((*shape, 2), dtype=torch.float32, device=output.device)
    dims = triton.next_power_of_2(head_size)
    _attend_piece[(pieces * tiles, heads, batch.num_requests)](
        batch.query, keys, cache.values.view, batch.block_table, batch.seq_lens, sums, totals, batch.query.stride()[:2],
        (keys.stride(0), keys.stride(1), keys.stride(-2)), batch.block_table.stride(0), tokens, pieces, tiles,
        float(softmax.scale), GROUP=group, HEAD_SIZE=head_size, DIMS=dims, BLOCK_TOKENS=block_tokens, ROWS=rows,
        KEYS=64 if head_size <= 128 else 32, SOFTCAP=float(softmax.softcap), DTYPE=arithmetic(batch.query),
        num_warps=rows // 16, num_stages=stages,
    )  # fmt: skip
    _add_pieces[(batch.num_tokens, batch.query.shape[1])](
        sums, totals, softmax.sink_logits, output, output.stride()[:2], tokens, pieces, GROUP=group,
        HEAD_SIZE=head_size, DIMS=dims, AT_ONCE=_PIECES_AT_ONCE, num_warps=4,
    )  # fmt: skip


def _pieces(contexts: int, multiprocessors: int) -> int:
    """Returns the number of pieces per context: few, because their sums pass through memory, but enough to fill whole
    waves."""
    at_once = multiprocessors * _PER_MULTIPROCESSOR
    counts = [max(min(waves * at_once // contexts, _MAX_PIECES), 1) for waves in _WAVES]
    filled = {count: contexts * count / (triton.cdiv(contexts * count, at_once) * at_once) for count in counts}
    return next((count for count in counts if filled[count] >= _FULL), max(counts, key=filled.__getitem__))


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _stages(device: torch.device) -> int:
    """Returns the pipeline stages of a program: as many as fit when a multiprocessor runs two programs."""
    if device.type != "cuda":
        return 2
    return 3 if shared_bytes_of(torch.cuda.get_device_capability(device)) >= 2 * 81 * 1024 else 2
