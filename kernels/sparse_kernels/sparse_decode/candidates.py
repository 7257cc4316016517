"""Finds the best pages of each chunk of long contexts, on CUDA, in a launch before the decode launch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from sparse_kernels.batch import DecodeBatch, PageSelection
from sparse_kernels.cache import KVCache
from sparse_kernels.cuda.launch import FORMATS, kernel
from sparse_kernels.cuda.params import (
    ContextParams,
    QueryParams,
    SelectionParams,
    StatisticsParams,
    Struct,
    pointer,
    struct_of,
)
from sparse_kernels.cuda.shared_memory import round_up
from sparse_kernels.group_routing.cuda import skipped_groups
from sparse_kernels.limits import DecodeShape
from sparse_kernels.page_score.cuda import format_of, launch_of
from sparse_kernels.rules import GroupRouting
from sparse_kernels.sparse_decode.launches import WIDE_RECORD_BYTES, Launch

_SOURCE = Path(__file__).with_name("candidates.cu")
_WAVES, _WAVES_OF_WIDE = 2, 1
"""A launch has enough thread blocks to fill the GPU this many times, if rows and chunks suffice; with wide records."""
_FEW_PARTS, _PARTS_OF_MANY_ROWS = 4, 8
"""Rows that fill the GPU with fewer thread blocks each than the first number have the second number. One long context
among short ones would otherwise occupy few multiprocessors long after the other rows have ended."""


class Candidates(NamedTuple):
    """The best pages of each chunk of long contexts."""

    keys: torch.Tensor
    """`[num_tokens * num_kv_heads, n]` int16, ordered like the scores."""
    pages: torch.Tensor
    """`[num_tokens * num_kv_heads, n]` int32."""
    parts: int
    """Thread blocks that share a row."""

    def params(self, launch: Launch) -> Struct:
        """Returns the struct of the kernels."""
        return struct_of("CandidateParams")(
            keys=pointer(self.keys), pages=pointer(self.pages), stride=self.keys.stride(0), parts=self.parts,
            chunk=launch.chunk, most_fused=launch.most_fused,
        )  # fmt: skip


def find_candidates(
    batch: DecodeBatch,
    cache: KVCache,
    selection: PageSelection,
    routing: GroupRouting | None,
    launch: Launch,
    shape: DecodeShape,
) -> Candidates:
    """Scores contexts of more than `launch.most_fused` pages in chunks, and keeps the best pages of each chunk.

    Args:
        batch: the decoding requests.
        cache: keys, values and statistics of a fused kind.
        selection: how many pages are read, and which pages always.
        routing: which KV groups are skipped; they need no candidates.
        launch: the decode launch.
        shape: the shape that the decode launch is compiled for.
    """
    statistics, device = cache.statistics, batch.query.device
    assert statistics is not None
    skipped = None if routing is None else skipped_groups(batch, cache, routing)
    rows, room = batch.num_tokens * cache.num_kv_heads, round_up(launch.candidates(shape), 8)
    scoring = launch_of(statistics)
    waves = _WAVES_OF_WIDE if statistics.vector_bytes >= WIDE_RECORD_BYTES else _WAVES
    filled = waves * scoring.blocks_per_sm * torch.cuda.get_device_properties(device).multi_processor_count
    parts = filled // rows
    found = Candidates(
        torch.empty((rows, room), dtype=torch.int16, device=device),
        torch.empty((rows, room), dtype=torch.int32, device=device),
        parts if parts >= _FEW_PARTS else _PARTS_OF_MANY_ROWS,
    )
    macros = {
        "QUERY": FORMATS[batch.query.dtype],
        "RECORD": format_of(statistics),
        "GROUP": shape.group_size,
        "HEAD_SIZE": cache.head_size,
        "PAGE_SIZE": cache.page_size,
        "PAGES_PER_BLOCK": cache.keys.pages_per_block,
        "WARPS": scoring.warps,
        "BLOCKS_PER_SM": scoring.blocks_per_sm,
        "PIPELINED": int(scoring.pipelined),
    }
    compiled = kernel(_SOURCE, device, macros, 32 * scoring.warps, "find_candidates")
    params = struct_of("FindParams")(
        query=QueryParams.of(batch.query),
        statistics=StatisticsParams.of(statistics, selection.std_weight),
        contexts=ContextParams.of(batch),
        selection=SelectionParams.of(selection, batch.budgets),
        skipped=pointer(skipped),
        candidates=found.params(launch),
    )
    chunks = -(-shape.max_pages // launch.chunk)
    compiled.launch((min(chunks, found.parts), cache.num_kv_heads, batch.num_tokens), params)
    return found
