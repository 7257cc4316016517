"""Split attention on CUDA: thread blocks attend to the pieces of each context, then one per query head adds up the
pieces.

The length of a context decides its pieces. A few long contexts then fill a GPU, and the result does not depend on the
batch. Thread blocks of skipped groups, or beyond the pieces of a short context, end at once. With many rows a thread
block takes several pieces.

Under a stop rule, thread blocks start with the first pieces of all rows, and those of a stopped row end at once
(scan.cuh).

A selection is cut like a context, with another piece size. Groups of many heads are attended in parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from sparse_kernels.batch import DecodeBatch, DecodeOutput, PageSelection, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.cuda.head_parts import attend_in_parts
from sparse_kernels.cuda.launch import FORMATS, kernel
from sparse_kernels.cuda.params import (
    CacheParams,
    ContextParams,
    OutputParams,
    QueryParams,
    RoutingParams,
    SelectionParams,
    SoftmaxParams,
    StopParams,
    pointer,
    struct_of,
)
from sparse_kernels.cuda.shared_memory import is_wide, piece_bytes
from sparse_kernels.group_routing.cuda import skipped_groups
from sparse_kernels.limits import MAX_GROUP, shared_bytes_of
from sparse_kernels.rules import GroupRouting
from sparse_kernels.split_attention.pieces import (
    MAX_SPLITS,
    Stopping,
    pieces_of,
    rows_at_once,
    scratch_numbers,
    stop_scratch,
)

_ATTEND = Path(__file__).with_name("attend.cu")
_MERGE = Path(__file__).with_name("merge.cu")
LEAST_TOKENS = 256
"""The fewest tokens of a piece of a context."""
LEAST_SELECTED_TOKENS = 128
"""The fewest tokens of a piece of a selection, which is shorter than a context."""
_MERGING_THREADS = 512


class Blocks(NamedTuple):
    """The thread blocks of the attending launch."""

    warps: int
    per_sm: int
    """Thread blocks that a multiprocessor has room for, with narrow heads; half as many with wide heads."""


_PLAIN = Blocks(8, 2)
_STOPPING = Blocks(4, 4)
"""While one thread block publishes or tests its piece, the others of its multiprocessor read."""


def blocks_of(stopping: bool, group_size: int, head_size: int, capability: tuple[int, int]) -> tuple[Blocks, int]:
    """Returns the thread blocks of the attending launch, and the shared memory of one."""
    warps, per_sm = _STOPPING if stopping else _PLAIN
    if is_wide(group_size, head_size):
        per_sm //= 2
    shared_bytes = piece_bytes(warps, group_size, head_size, stopping)
    while shared_bytes > shared_bytes_of(capability) and not stopping:
        warps //= 2
        shared_bytes = piece_bytes(warps, group_size, head_size, stopping)
    return Blocks(warps, per_sm), shared_bytes


_WAVES = 2
"""A launch has enough thread blocks to fill the GPU this many times, if rows and pieces suffice. The second wave
replaces thread blocks of skipped groups, and a thread block still has several pieces per start."""


class Launch(NamedTuple):
    """The launch of a batch; no output depends on it."""

    blocks: int
    """About how many thread blocks share the pieces."""
    pieces_per_test: int = 1
    """Neighbouring pieces that are tested together: a power of two, at most 32."""


_STOPPING_BLOCKS = 8192
"""About how many thread blocks a launch with stopping has. Many small ones start the pieces of a row one after the
other."""
_MOST_PIECES_PER_TEST = 4


def _launch_of(stopping: bool, rows: int, filled: int) -> Launch:
    if not stopping:
        return Launch(_WAVES * filled)
    # About this many pieces of a row are in work at the same time.
    together = max(1, min(_MOST_PIECES_PER_TEST, filled // rows))
    return Launch(_STOPPING_BLOCKS, 1 << together.bit_length() - 1)


@dataclass(frozen=True)
class Reading:
    """The part of their contexts that the rows of a batch read."""

    routing: GroupRouting | None = None
    """Which KV groups are skipped; None for none."""
    skipped: torch.Tensor | None = None
    """`[num_tokens, num_kv_heads]` uint8, 1 for a skipped group; None if `routing` decides in the launch."""
    stopping: Stopping | None = None
    """When attention stops; None for never."""
    selection: PageSelection | None = None
    """The budget in pages, unless the batch has budgets; None to read whole contexts. Dense contexts are read whole."""
    pages: torch.Tensor | None = None
    """`[num_tokens, num_kv_heads, selection.k]` int32, the pages; None for the sink pages and the newest pages."""


def split_attention(
    batch: DecodeBatch,
    cache: KVCache,
    softmax: Softmax,
    routing: GroupRouting | None,
    stopping: Stopping | None,
    splits: int,
    output: DecodeOutput,
    launch: Launch | None = None,
) -> None:
    """See `api.split_attention`."""
    group_size = batch.group_size(cache.num_kv_heads)
    if stopping is None:
        reading = Reading(routing)
        if routing is not None and group_size > MAX_GROUP:
            # The whole group decides, before its heads are split into parts.
            reading = Reading(skipped=skipped_groups(batch, cache, routing, counts=True))
        _attend_in_parts(batch, cache, softmax, reading, splits, output, launch)
        return
    if group_size > MAX_GROUP:
        raise ValueError(f"query: got {group_size} heads to a KV head, allowed with a rule on CUDA: up to {MAX_GROUP}")
    context_tokens = batch.block_table.shape[1] * cache.page_size * cache.keys.pages_per_block
    pieces = pieces_of(context_tokens, stopping.rule)
    rows_per_request = batch.tokens_per_request * cache.num_kv_heads
    scratch = stopping.scratch
    if scratch is None or len(scratch) < rows_per_request * scratch_numbers(pieces):
        rows = batch.num_requests * rows_per_request
        scratch = stop_scratch(stopping.rule, rows, context_tokens, batch.query.device)
        stopping = replace(stopping, scratch=scratch)
    most_rows = rows_at_once(pieces, group_size, cache.head_size, rows_per_request)
    at_once = max(1, min(most_rows, len(scratch) // scratch_numbers(pieces)) // rows_per_request)
    reading = Reading(routing, stopping=stopping)
    for first in range(0, batch.num_requests, at_once):
        last = min(first + at_once, batch.num_requests)
        part = output.tokens(first * batch.tokens_per_request, last * batch.tokens_per_request)
        _attend_and_merge(batch.requests(first, last), cache, softmax, reading, pieces, part, launch)


def attend_selection(
    batch: DecodeBatch,
    cache: KVCache,
    softmax: Softmax,
    reading: Reading,
    output: DecodeOutput,
    launch: Launch | None = None,
) -> None:
    """Attends to selected pages. The caller bounds the memory of the pieces with `rows_at_once`.

    Args:
        batch: the decoding requests.
        cache: keys and values.
        softmax: how logits become weights.
        reading: a selection.
        output: where to write.
        launch: the launch; None for the default.
    """
    _attend_in_parts(batch, cache, softmax, reading, MAX_SPLITS, output, launch)


def _attend_in_parts(
    batch: DecodeBatch,
    cache: KVCache,
    softmax: Softmax,
    reading: Reading,
    splits: int,
    output: DecodeOutput,
    launch: Launch | None,
) -> None:
    def attend(part: DecodeBatch, softmax: Softmax, output: DecodeOutput) -> None:
        _attend_and_merge(part, cache, softmax, reading, splits, output, launch)

    attend_in_parts(batch, cache.num_kv_heads, softmax, output, attend)


def _attend_and_merge(
    batch: DecodeBatch,
    cache: KVCache,
    softmax: Softmax,
    reading: Reading,
    splits: int,
    output: DecodeOutput,
    launch: Launch | None,
) -> None:
    stopping, selection = reading.stopping, reading.selection
    device, head_size, num_kv_heads = batch.query.device, cache.head_size, cache.num_kv_heads
    group_size, rows = batch.group_size(num_kv_heads), batch.num_tokens * num_kv_heads
    capability = torch.cuda.get_device_capability(device)
    (warps, blocks_per_sm), shared_bytes = blocks_of(stopping is not None, group_size, head_size, capability)
    if launch is None:
        filled = blocks_per_sm * torch.cuda.get_device_properties(device).multi_processor_count
        launch = _launch_of(stopping is not None, rows, filled)
    shape = {"GROUP": group_size, "HEAD_SIZE": head_size}
    macros = {
        **shape,
        "QUERY": FORMATS[batch.query.dtype],
        "KV": FORMATS[cache.keys.view.dtype],
        "PAGE_SIZE": cache.page_size,
        "BLOCK_TOKENS": cache.page_size * cache.keys.pages_per_block,
        "LEAST_TOKENS": LEAST_SELECTED_TOKENS if selection else LEAST_TOKENS,
        "WARPS": warps,
        "BLOCKS_PER_SM": blocks_per_sm,
        "STOP_TOKENS": stopping.rule.block_tokens if stopping else 0,
        "SELECTED": int(selection is not None),
        "SHARED_BYTES": shared_bytes,
    }
    attend = kernel(_ATTEND, device, macros, 32 * warps)
    attend.reserve_shared(shared_bytes, blocks_per_sm)
    parts = _MERGING_THREADS // head_size
    macros = {**shape, "OUTPUT": FORMATS[output.heads.dtype], "SPLITS": 0 if stopping else splits, "PARTS": parts}
    merge = kernel(_MERGE, device, macros, parts * head_size, "merge_pieces")

    values = torch.empty((rows, splits, group_size * head_size), dtype=torch.float32, device=device)
    weights = torch.empty((rows, splits, group_size, 2), dtype=torch.float32, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    pieces = struct_of("PieceParams")(
        values=pointer(values), weights=pointer(weights), counts=pointer(counts), most=splits
    )
    scan = struct_of("ScanParams")()
    if stopping is not None:
        states = torch.empty((rows, group_size, 32, 4), dtype=torch.float32, device=device)
        consecutive = torch.empty(rows, dtype=torch.int32, device=device)
        scan = struct_of("ScanParams")(
            marks=pointer(stopping.scratch), states=pointer(states), consecutive=pointer(consecutive),
            pieces_per_test=launch.pieces_per_test, sink_pages=stopping.sink_pages,
        )  # fmt: skip
    cache_params, softmax_params = CacheParams.of(cache), SoftmaxParams.of(softmax)
    output_params = OutputParams.of(output)
    rule = stopping.rule if stopping else None
    shares = max(1, min(splits, launch.blocks // rows))
    attend.launch(
        (num_kv_heads, batch.num_tokens, shares) if stopping else (shares, num_kv_heads, batch.num_tokens),
        struct_of("SplitParams")(
            query=QueryParams.of(batch.query, batch.query_scale), cache=cache_params, contexts=ContextParams.of(batch),
            routing=RoutingParams.of(reading.routing), softmax=softmax_params, stop=StopParams.of(rule),
            output=output_params, pieces=pieces, scan=scan, skipped=pointer(reading.skipped),
            pages=pointer(reading.pages),
            selection=SelectionParams.of(selection, batch.budgets) if selection else SelectionParams(),
        ),
        shared_bytes,
    )  # fmt: skip
    merge.launch(
        (group_size, num_kv_heads, batch.num_tokens),
        struct_of("MergeParams")(
            pieces=pieces, scan=scan, softmax=softmax_params, cache=cache_params, output=output_params
        ),
    )
