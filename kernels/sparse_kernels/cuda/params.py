"""Fills the structs that are the arguments of the kernels. The CUDA sources declare them, see `Struct`."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any, ClassVar

import torch

from sparse_kernels.batch import DecodeBatch, DecodeOutput, PageSelection, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.cuda.launch import SINK_FORMATS
from sparse_kernels.page_statistics import PageStatistics
from sparse_kernels.rules import GROUP_SCORES, GroupRouting, StopRule

_SOURCES = Path(__file__).parents[1]
_NUMBERS = {"int": ctypes.c_int32, "i64": ctypes.c_int64, "float": ctypes.c_float}


class Struct(ctypes.Structure):
    """A struct of the CUDA sources. Without values all pointers are null and all numbers 0. Values are given by name,
    and a test compares their names with the declaration."""

    known: ClassVar[dict[str, type[Struct]]] = {}
    """Structs by name."""

    def __init_subclass__(cls) -> None:
        Struct.known[cls.__name__] = cls


@functools.cache
def declarations() -> dict[str, str]:
    """Returns the members of all structs of the CUDA sources whose name ends in `Params`, by name."""
    texts = (path.read_text(encoding="utf-8") for path in sorted(_SOURCES.rglob("*.cu*")))
    return dict(each for text in texts for each in re.findall(r"^struct (\w+Params) {\n(.*?)^};", text, re.M | re.S))


def fields_of(name: str) -> list[tuple[str, Any]]:
    """Returns names and types of the fields of a struct of the CUDA sources, for ctypes.

    Raises:
        ValueError: if a field is neither a number, nor a pointer, nor such a struct.
    """
    fields: list[tuple[str, Any]] = []
    for line in declarations()[name].splitlines():
        declared = line.partition("//")[0].strip()
        # Functions have parentheses.
        if not declared or "(" in declared:
            continue
        found = re.fullmatch(r"(?:const )?(\w+)(\*?) (\w+(?:, \w+)*);", declared)
        if found is None or not (found[2] or found[1] in _NUMBERS or found[1] in declarations()):
            raise ValueError(f"{name}: got {declared!r}, allowed: int, i64, float, a pointer or a struct")
        of: Any = ctypes.c_void_p if found[2] else _NUMBERS.get(found[1]) or struct_of(found[1])
        fields += [(field, of) for field in found[3].split(", ")]
    return fields


def struct_of(name: str) -> type[Struct]:
    """Returns a struct of the CUDA sources by its name."""
    return Struct.known.get(name) or type(name, (Struct,), {"_fields_": fields_of(name)})


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


class QueryParams(Struct):
    """The query heads of a batch; strides in elements."""

    _fields_ = fields_of("QueryParams")

    @classmethod
    def of(cls, query: torch.Tensor, scale: torch.Tensor | None = None) -> QueryParams:
        """Takes a query, `[num_tokens, num_query_heads, head_size]`."""
        return cls(
            heads=pointer(query), scale=pointer(scale), token_stride=query.stride(0), head_stride=query.stride(1)
        )


class CacheParams(Struct):
    """Keys and values of a cache of token rows; strides in bytes."""

    _fields_ = fields_of("CacheParams")

    @classmethod
    def of(cls, cache: KVCache) -> CacheParams:
        """Takes a cache.

        Raises:
            ValueError: if the cache does not store one contiguous row per token.
        """
        cache.check_rows()
        view, item = cache.keys.view, cache.keys.view.element_size()
        return cls(
            keys=pointer(view), values=pointer(cache.values.view), key_scale=pointer(cache.key_scale),
            value_scale=pointer(cache.value_scale), block_stride=view.stride(0) * item,
            head_stride=view.stride(1) * item, token_stride=view.stride(-2) * item,
        )  # fmt: skip


class StatisticsParams(Struct):
    """The statistics of all pages; strides in bytes."""

    _fields_ = fields_of("StatisticsParams")

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
        return cls(
            vectors=pointer(vectors), scales=pointer(scales), spread=pointer(spread), block_stride=block,
            head_stride=head, std_weight=weight, refined=refined,
        )  # fmt: skip


class ContextParams(Struct):
    """The contexts of a batch of requests."""

    _fields_ = fields_of("ContextParams")

    @classmethod
    def of(cls, batch: DecodeBatch) -> ContextParams:
        """Takes decoding requests."""
        return cls(
            block_table=pointer(batch.block_table), seq_lens=pointer(batch.seq_lens),
            dense_requests=pointer(batch.dense_requests), table_stride=batch.block_table.stride(0),
            tokens_per_request=batch.tokens_per_request, dense_tokens=batch.dense_tokens,
        )  # fmt: skip


class WholeParams(Struct):
    """Long dense requests. All thread blocks of a launch share their stripes."""

    _fields_ = fields_of("WholeParams")

    @classmethod
    def of(cls, batch: DecodeBatch, num_kv_heads: int) -> WholeParams:
        """Takes the long dense requests of a batch; null pointers if it lists none."""
        listed = batch.whole
        if listed is None:
            return cls()
        rows = batch.tokens_per_request * num_kv_heads
        room = listed.room(rows, batch.group_size(num_kv_heads), batch.head_size)
        return cls(
            requests=pointer(listed.requests), values=pointer(room.values), weights=pointer(room.weights),
            arrived=pointer(listed.arrived), first_request=listed.first_request,
            most_requests=min(len(listed.requests) - 1, room.requests),
        )  # fmt: skip


class HotParams(Struct):
    """Copies of pages of a cache in host memory."""

    _fields_ = fields_of("HotParams")

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
        return cls(
            rows=pointer(rows), tags=pointer(hot.tags), counters=pointer(hot.counters), clock=pointer(hot.clock),
            sets=hot.sets,
        )  # fmt: skip


class RoutingParams(Struct):
    """The routing of one layer."""

    _fields_ = fields_of("RoutingParams")

    @classmethod
    def of(cls, routing: GroupRouting | None) -> RoutingParams:
        """Takes thresholds, score, range of the cubic and counts; null pointers without routing."""
        if routing is None:
            return cls()
        first, step = routing.log_range
        return cls(
            coefficients=pointer(routing.coefficients), counts=pointer(routing.counts),
            score=GROUP_SCORES.index(routing.score), first=first, step=step,
        )  # fmt: skip


class SoftmaxParams(Struct):
    """How logits become weights."""

    _fields_ = fields_of("SoftmaxParams")

    @classmethod
    def of(cls, softmax: Softmax) -> SoftmaxParams:
        """Takes a softmax. Its sink logits, if any, are bfloat16, float16 or float32."""
        logits = softmax.sink_logits
        return cls(
            sink_logits=pointer(logits), scale=softmax.scale, softcap=softmax.softcap,
            sink_format=0 if logits is None else SINK_FORMATS[logits.dtype],
        )  # fmt: skip


class SelectionParams(Struct):
    """Which pages are read."""

    _fields_ = fields_of("SelectionParams")

    @classmethod
    def of(cls, selection: PageSelection, budgets: torch.Tensor | None) -> SelectionParams:
        """Takes a selection, and the contiguous int32 budgets of its requests or rows, if any."""
        by_row = budgets is not None and budgets.dim() == 2
        return cls(
            k=selection.k, sink_pages=selection.sink_pages, recent_pages=selection.recent_pages, by_row=by_row,
            budgets=pointer(budgets),
        )  # fmt: skip


class StopParams(Struct):
    """When attention stops."""

    _fields_ = fields_of("StopParams")

    @classmethod
    def of(cls, rule: StopRule | None) -> StopParams:
        """Takes a stop rule; without one attention never stops."""
        if rule is None:
            return cls()
        return cls(
            scale_tolerance=rule.scale_tolerance, direction_tolerance=rule.direction_tolerance, patience=rule.patience,
            least_pages=rule.least_pages,
        )  # fmt: skip


class OutputParams(Struct):
    """Where a decode step writes; the stride in elements."""

    _fields_ = fields_of("OutputParams")

    @classmethod
    def of(cls, output: DecodeOutput) -> OutputParams:
        """Takes an output."""
        heads = output.heads
        return cls(
            heads=pointer(heads), pages_read=pointer(output.pages_read), counters=pointer(output.counters),
            token_stride=heads.stride(0),
        )  # fmt: skip
