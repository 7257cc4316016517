"""Attends with rolling positions on a GPU: one launch for decoding requests and prompts of all lengths.

The rows of a program are the query heads of one KV head, query token by query token. The program reads the union of
its rows' windows with the unchanged queries, then the first tokens with the queries rotated back. It does not read the
tokens between them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_kernels.batch import PrefillBatch, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.rolling_attention.rule import RollingWindow, Rotation
from sparse_kernels.triton import add_tokens, arithmetic, read_rows, rows_at, to_base_2

_MOST_ROWS = 64
"""Most rows of a program, for long prompts. A matrix unit multiplies at least 16 rows."""
_SINKS = tl.constexpr(16)
"""First tokens that are read at a time."""


@triton.jit
def _tile_of(starts_ptr, num_requests, tile, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Returns the request of a program's rows, and the first of these rows within the request; -1 without rows.

    The tiles of request r begin at tile `starts[r] * GROUP // ROWS + r`. This reserves enough tiles for its rows, and
    the number of tiles depends only on the numbers of tokens and requests, which the host knows.
    """
    others = tl.arange(0, 128)
    begun = 0
    for first in range(0, num_requests, 128):
        index = first + others
        exists = index < num_requests
        start = tl.load(starts_ptr + index, mask=exists, other=0)
        begun += tl.sum((exists & (start * GROUP // ROWS + index <= tile)).to(tl.int32), axis=0)
    request = begun - 1
    start = tl.load(starts_ptr + request, mask=request >= 0, other=0)
    return request, (tile - (start * GROUP // ROWS + request)) * ROWS


@triton.jit
def _turned_back(
    query, query_place, exists, rotation_place, dim,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Returns queries `[ROWS, DIMS]` as float32, rotated back by `[ROWS]` rows of the table."""
    half: tl.constexpr = ROTARY // 2
    if INTERLEAVED:
        is_first, angle = dim % 2 == 0, dim // 2
        other = tl.where(is_first, dim + 1, dim - 1)
    else:
        is_first, angle = dim < half, dim % half
        other = tl.where(is_first, dim + half, dim - half)
    turns = exists[:, None] & (dim < ROTARY)[None, :]
    partner = tl.load(query_place[:, None] + other[None, :], mask=turns, other=0.0).to(tl.float32)
    place = rotation_place[:, None] + angle[None, :]
    cos = tl.load(place, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(place + half, mask=turns, other=0.0).to(tl.float32)
    turned = query.to(tl.float32) * cos + tl.where(is_first, 1.0, -1.0)[None, :] * partner * sin
    # Queries already contain the factor of the table.
    return turned / tl.sqrt(cos * cos + sin * sin)


# The number of requests differs between steps. No step may wait for a compilation.
@triton.jit(do_not_specialize=["num_requests"])
def _attend(
    query_ptr, keys_ptr, values_ptr, starts_ptr, lengths_ptr, table_ptr, rotation_ptr, output_ptr,
    query_strides, key_strides, output_strides, table_stride, rotation_stride, num_requests, scale,
    sink_tokens, cache_tokens, whole_tokens,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, DIMS: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Attends with the rows of a tile, see `_tile_of`."""
    request, first = _tile_of(starts_ptr, num_requests, tl.program_id(0), GROUP, ROWS)
    if request < 0:
        return
    start = tl.load(starts_ptr + request)
    num_queries = tl.load(starts_ptr + request + 1) - start
    if first >= num_queries * GROUP:
        return
    kv_head = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + request)
    table = table_ptr + request.to(tl.int64) * table_stride
    row = first + tl.arange(0, ROWS)
    exists = row < num_queries * GROUP
    position = tl.where(exists, length - num_queries + row // GROUP, -1)
    leaves_out = position >= whole_tokens
    token, head = (start + row // GROUP).to(tl.int64), kv_head * GROUP + row % GROUP
    dim = tl.arange(0, DIMS)
    real = exists[:, None] & (dim < HEAD_SIZE)[None, :]
    query_place = query_ptr + token * query_strides[0] + head * query_strides[1]
    query = tl.load(query_place[:, None] + dim[None, :], mask=real, other=0.0).to(DTYPE)
    # The positions of the rows end before `end`; a request that is padding has none.
    oldest = length - num_queries + first // GROUP
    end = tl.minimum(length - num_queries + (first + ROWS - 1) // GROUP + 1, length)

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIMS), tl.float32)

    newest_tokens = cache_tokens - sink_tokens
    # If the oldest row omits tokens, all rows do, and the omitted blocks may have been given back.
    begin = tl.maximum(tl.where(oldest >= whole_tokens, oldest + 1 - newest_tokens, 0), sink_tokens)
    for other in range(begin // KEYS * KEYS, end, KEYS):
        column = other + tl.arange(0, KEYS)
        is_read = (column >= begin) & (column < end)
        place = rows_at(key_strides, table, column, is_read, kv_head, BLOCK_TOKENS)
        keys = tl.trans(read_rows(keys_ptr, place, is_read, dim, HEAD_SIZE, DTYPE))
        logits = to_base_2(tl.dot(query, keys, input_precision="ieee") * scale, SOFTCAP)
        oldest_seen = tl.where(leaves_out, position + 1 - newest_tokens, 0)
        seen = (column[None, :] <= position[:, None]) & (column[None, :] >= oldest_seen[:, None])
        logits = tl.where(is_read[None, :] & seen, logits, float("-inf"))
        values = read_rows(values_ptr, place, is_read, dim, HEAD_SIZE, DTYPE)
        largest, total, sums = add_tokens(largest, total, sums, logits, values, DTYPE)

    # The unrotated queries are not needed any more.
    nearer = tl.where(leaves_out, position - (cache_tokens - 1), 0).to(tl.int64)
    turned = _turned_back(
        query, query_place, exists, rotation_ptr + nearer * rotation_stride, dim, ROTARY, INTERLEAVED
    )  # fmt: skip
    # The rounding error is multiplied as well: the first tokens may carry most of the weight.
    rounded = turned.to(DTYPE)
    rest = (turned - rounded.to(tl.float32)).to(DTYPE)
    for other in range(0, tl.minimum(sink_tokens, end), _SINKS):
        column = other + tl.arange(0, _SINKS)
        is_read = column < tl.minimum(sink_tokens, end)
        place = rows_at(key_strides, table, column, is_read, kv_head, BLOCK_TOKENS)
        keys = tl.trans(read_rows(keys_ptr, place, is_read, dim, HEAD_SIZE, DTYPE))
        products = tl.dot(rounded, keys, input_precision="ieee") + tl.dot(rest, keys, input_precision="ieee")
        logits = to_base_2(products * scale, SOFTCAP)
        logits = tl.where(is_read[None, :] & (column[None, :] <= position[:, None]), logits, float("-inf"))
        values = read_rows(values_ptr, place, is_read, dim, HEAD_SIZE, DTYPE)
        largest, total, sums = add_tokens(largest, total, sums, logits, values, DTYPE)

    # A request without a context has attended to no token.
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    output_place = output_ptr + token * output_strides[0] + head * output_strides[1]
    tl.store(output_place[:, None] + dim[None, :], sums.to(output_ptr.dtype.element_ty), mask=real)


def attend_rolling(
    batch: PrefillBatch,
    cache: KVCache,
    softmax: Softmax,
    window: RollingWindow,
    rotation: Rotation,
    output: torch.Tensor,
) -> None:
    """See `api.attend_rolling`."""
    cache.check_rows()
    keys, head_size, group = cache.keys.view, cache.head_size, batch.group_size(cache.num_kv_heads)
    rows = min(max(triton.next_power_of_2(batch.max_query_tokens * group), 16), _MOST_ROWS)
    tiles = batch.num_tokens * group // rows + batch.num_requests
    _attend[(tiles, cache.num_kv_heads)](
        batch.query, keys, cache.values.view, batch.query_start, batch.seq_lens, batch.block_table, rotation.table,
        output, batch.query.stride()[:2], (keys.stride(0), keys.stride(1), keys.stride(-2)), output.stride()[:2],
        batch.block_table.stride(0), rotation.table.stride(0), batch.num_requests, float(softmax.scale),
        window.sink_tokens, window.cache_tokens, window.whole_tokens,
        GROUP=group, HEAD_SIZE=head_size, DIMS=triton.next_power_of_2(head_size), ROTARY=rotation.rotary_size,
        INTERLEAVED=rotation.interleaved, BLOCK_TOKENS=cache.page_size * cache.keys.pages_per_block,
        ROWS=rows, KEYS=64 if head_size <= 128 else 32, SOFTCAP=float(softmax.softcap), DTYPE=arithmetic(batch.query),
        num_warps=4, num_stages=2,
    )  # fmt: skip
