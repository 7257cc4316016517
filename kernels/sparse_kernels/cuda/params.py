"""Builds the structs of params.cuh and of the sources from the arguments of the operations.

A test compares their sizes and offsets with those on the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from sparse_kernels.batch import DecodeBatch, DecodeOutput, PageSelection, QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.cuda.launch import SINK_FORMATS
from sparse_kernels.page_statistics import PageStatistics
from sparse_kernels.rules import GROUP_SCORES, GroupRouting, StopRule

_Pointer, _Int, _Long, _Float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_Fields = Sequence[tuple[str, Any]]


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Returns the address of a tensor's first element; None, the null pointer, for None."""
    return None if tensor is None else tensor.data_ptr()


def score_rows(scores: torch.Tensor) -> torch.Tensor:
    """Returns scores of pages, `[num_tokens, num_kv_heads, num_pages]` bfloat16, as kernels read them: rows at equal
    distances, each from a multiple of 16 bytes, since a thread reads eight scores at once. A copy has more columns if
    `num_pages` is no multiple of eight; no kernel may read them as pages.
    """
    num_tokens, num_kv_heads, num_pages = scores.shape
    # The dimension of a single head may have any stride.
    rows = scores.reshape(num_tokens * num_kv_heads, num_pages)
    if rows.stride(1) != 1 or rows.stride(0) % 8 or rows.data_ptr() % 16:
        rows = torch.nn.functional.pad(rows, (0, -num_pages % 8), value=-torch.inf).contiguous()
    found: torch.Tensor = rows.unflatten(0, (num_tokens, num_kv_heads))
    return found


class QueryParams(ctypes.Structure):
    """The query heads of a batch; strides in elements."""

    _fields_: ClassVar[_Fields] = [
        ("heads", _Pointer),
        ("scale", _Pointer),
        ("token_stride", _Long),
        ("head_stride", _Long),
    ]

    @classmethod
    def of(cls, query: torch.Tensor, scale: torch.Tensor | None = None) -> QueryParams:
        """Takes a query, `[num_tokens, num_query_heads, head_size]`."""
        return cls(pointer(query), pointer(scale), query.stride(0), query.stride(1))


class CacheParams(ctypes.Structure):
    """Keys and values of a cache of token rows; strides in bytes."""

    _fields_: ClassVar[_Fields] = [
        ("keys", _Pointer), ("values", _Pointer), ("key_scale", _Pointer), ("value_scale", _Pointer),
        ("block_stride", _Long), ("head_stride", _Long), ("token_stride", _Int),
    ]  # fmt: skip

    @classmethod
    def of(cls, cache: KVCache) -> CacheParams:
        """Takes a cache.

        Raises:
            ValueError: if the cache does not store one contiguous row per token.
        """
        cache.check_rows()
        view, item = cache.keys.view, cache.keys.view.element_size()
        strides = (view.stride(dim) * item for dim in (0, 1, -2))
        return cls(
            pointer(view), pointer(cache.values.view), pointer(cache.key_scale), pointer(cache.value_scale), *strides
        )


class StatisticsParams(ctypes.Structure):
    """The statistics of all pages; strides in bytes."""

    _fields_: ClassVar[_Fields] = [
        ("vectors", _Pointer), ("scales", _Pointer), ("spread", _Pointer), ("block_stride", _Long),
        ("head_stride", _Long), ("std_weight", _Float), ("refined", _Int),
    ]  # fmt: skip

    @classmethod
    def of(cls, statistics: PageStatistics | None, std_weight: float, refined: int = 0) -> StatisticsParams:
        """Takes the statistics of a cache, null pointers for None, and the share of `levels.in_units`."""
        if statistics is None:
            return cls()
        vectors, scales = statistics.vectors, statistics.scales
        block, head = (vectors.stride(dim) * vectors.element_size() for dim in (0, 1))
        # Records without a spread get finite numbers in its place, with weight zero.
        finite = vectors if scales is None else scales
        spread = finite if statistics.spread is None else statistics.spread
        weight = std_weight if statistics.kind.has_spread else 0.0
        return cls(pointer(vectors), pointer(scales), pointer(spread), block, head, weight, refined)


class ContextParams(ctypes.Structure):
    """The contexts of a batch of requests."""

    _fields_: ClassVar[_Fields] = [
        ("block_table", _Pointer), ("seq_lens", _Pointer), ("dense_requests", _Pointer), ("table_stride", _Long),
        ("tokens_per_request", _Int), ("dense_tokens", _Int),
    ]  # fmt: skip

    @classmethod
    def of(cls, batch: DecodeBatch) -> ContextParams:
        """Takes decoding requests."""
        return cls(
            pointer(batch.block_table), pointer(batch.seq_lens), pointer(batch.dense_requests),
            batch.block_table.stride(0), batch.tokens_per_request, batch.dense_tokens,
        )  # fmt: skip


class WholeParams(ctypes.Structure):
    """Long dense requests. All thread blocks of a launch share their stripes."""

    _fields_: ClassVar[_Fields] = [
        ("requests", _Pointer), ("values", _Pointer), ("weights", _Pointer), ("arrived", _Pointer),
        ("first_request", _Int), ("most_requests", _Int),
    ]  # fmt: skip

    @classmethod
    def of(cls, batch: DecodeBatch, num_kv_heads: int) -> WholeParams:
        """Takes the long dense requests of a batch; null pointers if it lists none."""
        listed = batch.whole
        if listed is None:
            return cls()
        rows = batch.tokens_per_request * num_kv_heads
        room = listed.room(rows, batch.group_size(num_kv_heads), batch.head_size)
        return cls(
            pointer(listed.requests), pointer(room.values), pointer(room.weights), pointer(listed.arrived),
            listed.first_request, min(len(listed.requests) - 1, room.requests),
        )  # fmt: skip


class CandidateParams(ctypes.Structure):
    """The best pages of each chunk of long contexts."""

    _fields_: ClassVar[_Fields] = [
        ("keys", _Pointer), ("pages", _Pointer), ("stride", _Long), ("parts", _Int), ("chunk", _Int),
        ("most_fused", _Int),
    ]  # fmt: skip


class HotParams(ctypes.Structure):
    """Copies of pages of a cache in host memory."""

    _fields_: ClassVar[_Fields] = [
        ("rows", _Pointer), ("tags", _Pointer), ("counters", _Pointer), ("clock", _Pointer), ("sets", _Int),
    ]  # fmt: skip

    @classmethod
    def of(cls, cache: KVCache) -> HotParams:
        """Takes the hot pages of a cache; null pointers without any.

        Raises:
            ValueError: if pages of the cache have another form than their copies.
        """
        hot = cache.hot
        if hot is None:
            return cls()
        rows, keys = hot.rows, cache.keys.view
        form = cache.num_kv_heads, cache.page_size, 2 * cache.head_size
        beside = cache.values.view.data_ptr() - keys.data_ptr() == cache.head_size * keys.element_size()
        if (len(rows), *rows.shape[2:]) != form or rows.dtype != keys.dtype or not rows.is_contiguous():
            raise ValueError(f"hot: got {list(rows.shape)} of {rows.dtype}, allowed: {form} of {keys.dtype}")
        if not beside or keys.stride(-2) != 2 * cache.head_size:
            raise ValueError(
                "hot: got a cache whose pages have gaps, allowed: a key and its value, then the next token"
            )
        return cls(pointer(rows), pointer(hot.tags), pointer(hot.counters), pointer(hot.clock), hot.sets)


class RoutingParams(ctypes.Structure):
    """The routing of one layer."""

    _fields_: ClassVar[_Fields] = [
        ("coefficients", _Pointer), ("counts", _Pointer), ("score", _Int), ("first", _Float), ("step", _Float),
    ]  # fmt: skip

    @classmethod
    def of(cls, routing: GroupRouting | None) -> RoutingParams:
        """Takes thresholds, score, range of the cubic and counts; null pointers without routing."""
        if routing is None:
            return cls()
        first, step = routing.log_range
        score = GROUP_SCORES.index(routing.score)
        return cls(pointer(routing.coefficients), pointer(routing.counts), score, first, step)


class SoftmaxParams(ctypes.Structure):
    """How logits become weights."""

    _fields_: ClassVar[_Fields] = [
        ("sink_logits", _Pointer), ("scale", _Float), ("softcap", _Float), ("sink_format", _Int),
    ]  # fmt: skip

    @classmethod
    def of(cls, softmax: Softmax) -> SoftmaxParams:
        """Takes a softmax. Its sink logits, if any, are bfloat16, float16 or float32."""
        logits = softmax.sink_logits
        return cls(pointer(logits), softmax.scale, softmax.softcap, 0 if logits is None else SINK_FORMATS[logits.dtype])


class SelectionParams(ctypes.Structure):
    """Which pages are read."""

    _fields_: ClassVar[_Fields] = [
        ("k", _Int), ("sink_pages", _Int), ("recent_pages", _Int), ("by_row", _Int), ("budgets", _Pointer),
    ]  # fmt: skip

    @classmethod
    def of(cls, selection: PageSelection, budgets: torch.Tensor | None) -> SelectionParams:
        """Takes a selection, and the contiguous int32 budgets of its requests or rows, if any."""
        by_row = budgets is not None and budgets.dim() == 2
        return cls(selection.k, selection.sink_pages, selection.recent_pages, by_row, pointer(budgets))


class StopParams(ctypes.Structure):
    """When attention stops."""

    _fields_: ClassVar[_Fields] = [
        ("scale_tolerance", _Float), ("direction_tolerance", _Float), ("patience", _Int), ("least_pages", _Int),
    ]  # fmt: skip

    @classmethod
    def of(cls, rule: StopRule | None) -> StopParams:
        """Takes a stop rule; without one attention never stops."""
        if rule is None:
            return cls()
        return cls(rule.scale_tolerance, rule.direction_tolerance, rule.patience, rule.least_pages)


class OutputParams(ctypes.Structure):
    """Where a decode step writes; the stride in elements."""

    _fields_: ClassVar[_Fields] = [
        ("heads", _Pointer), ("pages_read", _Pointer), ("counters", _Pointer), ("token_stride", _Long),
    ]  # fmt: skip

    @classmethod
    def of(cls, output: DecodeOutput) -> OutputParams:
        """Takes an output."""
        heads = output.heads
        return cls(pointer(heads), pointer(output.pages_read), pointer(output.counters), heads.stride(0))


class PieceParams(ctypes.Structure):
    """Stored pieces of contexts, for the next launch."""

    _fields_: ClassVar[_Fields] = [("values", _Pointer), ("weights", _Pointer), ("counts", _Pointer), ("most", _Int)]


class ScanParams(ctypes.Structure):
    """Data that the thread blocks of a row share under a stop rule."""

    _fields_: ClassVar[_Fields] = [
        ("marks", _Pointer), ("states", _Pointer), ("consecutive", _Pointer), ("pieces_per_test", _Int),
        ("sink_pages", _Int),
    ]  # fmt: skip


class DecodeParams(ctypes.Structure):
    """Argument of `sparse_decode`."""

    _fields_: ClassVar[_Fields] = [
        ("query", QueryParams), ("cache", CacheParams), ("statistics", StatisticsParams), ("scores", _Pointer),
        ("scores_stride", _Long), ("contexts", ContextParams), ("selection", SelectionParams),
        ("routing", RoutingParams), ("softmax", SoftmaxParams), ("stop", StopParams), ("output", OutputParams),
        ("pages", _Pointer), ("chosen", _Pointer), ("whole", WholeParams), ("num_tokens", _Int),
        ("candidates", CandidateParams), ("hot", HotParams),
    ]  # fmt: skip


class FindParams(ctypes.Structure):
    """Argument of `find_candidates`."""

    _fields_: ClassVar[_Fields] = [
        ("query", QueryParams), ("statistics", StatisticsParams), ("contexts", ContextParams),
        ("selection", SelectionParams), ("skipped", _Pointer), ("candidates", CandidateParams),
    ]  # fmt: skip


class SplitParams(ctypes.Structure):
    """Argument of `split_attention`."""

    _fields_: ClassVar[_Fields] = [
        ("query", QueryParams), ("cache", CacheParams), ("contexts", ContextParams), ("routing", RoutingParams),
        ("softmax", SoftmaxParams), ("stop", StopParams), ("output", OutputParams), ("pieces", PieceParams),
        ("scan", ScanParams), ("skipped", _Pointer), ("pages", _Pointer), ("selection", SelectionParams),
    ]  # fmt: skip


class MergeParams(ctypes.Structure):
    """Argument of `merge_pieces`."""

    _fields_: ClassVar[_Fields] = [
        ("pieces", PieceParams), ("scan", ScanParams), ("softmax", SoftmaxParams), ("cache", CacheParams),
        ("output", OutputParams),
    ]  # fmt: skip


class AttendParams(ctypes.Structure):
    """Argument of `sparse_attention`."""

    _fields_: ClassVar[_Fields] = [
        ("query", QueryParams), ("cache", CacheParams), ("contexts", ContextParams), ("pages", _Pointer), ("k", _Int),
        ("softmax", SoftmaxParams), ("output", OutputParams),
    ]  # fmt: skip


class RouteParams(ctypes.Structure):
    """Argument of `route_groups`."""

    _fields_: ClassVar[_Fields] = [
        ("query", QueryParams), ("cache", CacheParams), ("contexts", ContextParams), ("routing", RoutingParams),
        ("skipped", _Pointer),
    ]  # fmt: skip


class ScoreParams(ctypes.Structure):
    """Argument of `page_score`."""

    _fields_: ClassVar[_Fields] = [
        ("query", QueryParams), ("statistics", StatisticsParams), ("contexts", ContextParams), ("skipped", _Pointer),
        ("scores", _Pointer), ("scores_stride", _Long), ("page_size", _Int),
    ]  # fmt: skip


class TopkParams(ctypes.Structure):
    """Argument of `page_topk`."""

    _fields_: ClassVar[_Fields] = [
        ("scores", _Pointer), ("num_pages", _Pointer), ("candidates", _Pointer), ("block_table", _Pointer),
        ("pages", _Pointer), ("counts", _Pointer), ("scores_stride", _Long), ("table_stride", _Long),
        ("row_stride", _Long), ("segment_stride", _Long), ("selection", SelectionParams), ("segment", _Int),
        ("width", _Int), ("num_candidates", _Int),
    ]  # fmt: skip


class ListParams(ctypes.Structure):
    """Argument of `list_pages`."""

    _fields_: ClassVar[_Fields] = [
        ("scores", _Pointer), ("skipped", _Pointer), ("pages", _Pointer), ("scores_stride", _Long),
        ("contexts", ContextParams), ("selection", SelectionParams), ("page_size", _Int),
    ]  # fmt: skip


def batch_of(tokens: QueryTokens) -> DecodeBatch:
    """Returns query tokens as a batch of requests of one token each, for the kernels."""
    return DecodeBatch(tokens.query.flatten(1, 2), tokens.block_table.int(), tokens.context_lens.int())
