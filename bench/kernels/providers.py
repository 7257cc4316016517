"""The operations, and for each the provider under test and its rivals.

A provider is loaded once. If this fails, the reason is recorded for each of its cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from sparse_kernels.batch import LongDenseRequests
from sparse_kernels.limits import MAX_K
from sparse_kernels.split_attention import Stopping, stop_scratch
from sparse_kernels.stopping import StopRule

from bench.kernels import checks, prefill, rivals, token_prefill
from bench.kernels.rivals import Call, imported
from bench.kernels.workload import DecodeInputs, PrefillInputs, TopKInputs, Workload

Inputs = TypeVar("Inputs")

ART = StopRule(scale_tolerance=1e-5, direction_tolerance=1e-3, patience=5, block_tokens=512)
"""The paper's rule, with test intervals that a thread block reads in a few microseconds."""
IN_VAIN = ART._replace(scale_tolerance=0.0)
"""Tests after every interval and never stops."""


@dataclass(frozen=True)
class Provider(Generic[Inputs]):
    """One way to compute an operation."""

    name: str
    load: Callable[[], Any]
    """Imports and builds. If it raises, the provider is unavailable for the whole run."""
    prepare: Callable[[Any, Inputs], Call]
    """Takes the result of `load` and returns the call to check and to time."""
    check: Callable[[Inputs, checks.Calls], None]


@dataclass(frozen=True)
class Op(Generic[Inputs]):
    """An operation: the source of its inputs, and its providers, the one under test first."""

    inputs: Callable[[Workload, Any], Inputs]
    providers: Sequence[Provider[Inputs]]

    @property
    def subject(self) -> str:
        """The provider whose speed-up over its rivals is reported."""
        return self.providers[0].name


def score(loaded: list[Any], inputs: DecodeInputs) -> Call:
    """The scores of all complete pages."""
    (score_pages,) = loaded
    num_pages, weight = inputs.num_pages, inputs.geometry.std_weight
    return lambda: score_pages(inputs.grouped_query, inputs.statistics, inputs.block_table, num_pages, weight)


def step(loaded: list[Any], inputs: DecodeInputs) -> Call:
    """A decode step: the write of its keys and values with the records of full pages, then attention."""
    sparse_decode, write_cache = loaded
    batch, cache, softmax, geometry = inputs.batch, inputs.cache, inputs.softmax, inputs.geometry

    def call() -> Any:
        write_cache(
            inputs.new_keys, inputs.new_values, inputs.token_rows, inputs.statistics, inputs.slots, geometry.page_size
        )
        return sparse_decode(batch, cache, softmax, geometry.selection)

    return call


def whole(loaded: list[Any], inputs: DecodeInputs) -> Call:
    """A decode step without the write, of requests that read their whole context. All thread blocks share them."""
    (sparse_decode,) = loaded
    batch, cache, softmax, geometry = inputs.batch, inputs.cache, inputs.softmax, inputs.geometry
    device, requests, rows = batch.query.device, len(batch.seq_lens), geometry.num_kv_heads
    numbers = requests * LongDenseRequests.scratch_numbers(rows, inputs.case.group, geometry.head_size)
    batch = replace(
        batch,
        dense_requests=torch.ones(requests, dtype=torch.bool, device=device),
        whole=LongDenseRequests(
            torch.tensor([requests, *range(requests)], dtype=torch.int32, device=device),
            torch.empty(numbers, device=device),
            torch.zeros(LongDenseRequests.arrived_numbers(requests, rows), dtype=torch.int32, device=device),
        ),
    )
    return lambda: sparse_decode(batch, cache, softmax, geometry.selection)


def together(loaded: list[Any], inputs: DecodeInputs) -> Call:
    """Dense attention by the kernel that verifies drafts."""
    (multi_token_decode,) = loaded
    batch, cache, softmax = inputs.batch, inputs.cache, inputs.softmax
    return lambda: multi_token_decode(batch, cache, softmax)


def budgets(loaded: list[Any], inputs: DecodeInputs, most_pages: int | None) -> Call:
    """A decode step without the write, with a budget per request; None for one budget of all.

    All budgets are equal, so the same pages are read. There is room for the largest budget of a request.
    """
    (sparse_decode,) = loaded
    batch, selection = inputs.batch, inputs.geometry.selection
    if most_pages is not None:
        budgets = torch.full((len(batch.seq_lens),), selection.k, dtype=torch.int32, device=batch.query.device)
        batch, selection = replace(batch, budgets=budgets), replace(selection, k=max(selection.k, most_pages))
    cache, softmax = inputs.cache, inputs.softmax
    return lambda: sparse_decode(batch, cache, softmax, selection)


def stopping(loaded: list[Any], inputs: DecodeInputs, rule: StopRule | None) -> Call:
    """Dense attention by this project's kernel, newest tokens first under a stop rule; None for no rule."""
    (split_attention,) = loaded
    batch, cache, softmax = inputs.batch, inputs.cache, inputs.softmax
    if rule is None:
        return lambda: split_attention(batch, cache, softmax)
    geometry, table = inputs.geometry, inputs.block_table
    rows = len(inputs.query) * geometry.num_kv_heads
    scratch = stop_scratch(rule, rows, table.shape[1] * geometry.block_size, table.device)
    stop = Stopping(rule, scratch=scratch)
    return lambda: split_attention(batch, cache, softmax, stopping=stop)


def select(loaded: list[Any], inputs: TopKInputs) -> Call:
    """The pages with the best scores."""
    (select_pages,) = loaded
    return lambda: select_pages(inputs.scores, inputs.num_pages, inputs.geometry.k)


def _ours(name: str, path: str, prepare: Callable[[Any, Any], Call], check: Callable[[Any, checks.Calls], None]) -> Any:
    """A provider of a function in `sparse_kernels`."""
    return Provider(name, imported(f"sparse_kernels.{path}"), prepare, check)


_DECODE, _SPLIT = "sparse_decode:sparse_decode", "split_attention:split_attention"
_FLASH_ATTENTION: Provider[DecodeInputs] = Provider(
    "FlashAttention 3", rivals.load_flash_attention, rivals.flash_attention, checks.dense
)
_FLASH_ATTENTION_PREFILL: Provider[PrefillInputs] = Provider(
    "FlashAttention 3", rivals.load_flash_attention, prefill.dense, prefill.check_dense
)
_STEP = imported(f"sparse_kernels.{_DECODE}", "sparse_kernels.page_statistics:write_cache")
_DENSITIES = [
    Provider(
        f"unique, density {density}",
        rivals.load_flash_attention,
        partial(prefill.whole, density=density),
        partial(prefill.check_whole, density=density),
    )
    for density in (prefill.DENSITY, prefill.SPARSER)
]
_ZIPVL = [
    Provider(
        name,
        token_prefill.load_attention,
        partial(token_prefill.whole, rule=rule),
        partial(token_prefill.check_whole, rule=rule),
    )
    for name, rule in (("zipvl", token_prefill.ALL_ATTEND), ("zipvl_paper", token_prefill.PUBLISHED))
]

PROVIDERS: dict[str, Op[Any]] = {
    "decode": Op(
        Workload.decode_inputs,
        (
            Provider("unique", _STEP, step, checks.sparse_decode),
            _FLASH_ATTENTION,
            Provider("FlashInfer", rivals.load_flashinfer_decode, rivals.flashinfer_decode, checks.dense),
        ),
    ),
    "topk": Op(
        Workload.topk_inputs,
        (
            _ours("unique", "page_topk:select_pages", select, checks.exact_selection),
            Provider(
                "flashinfer.top_k_page_table_transform",
                rivals.load_flashinfer_topk,
                rivals.flashinfer_topk,
                checks.mapped_pages,
            ),
            Provider("torch.topk", imported("torch:topk"), rivals.torch_topk, checks.equal_scores),
        ),
    ),
    "score": Op(Workload.decode_inputs, (_ours("unique", "page_score:score_pages", score, checks.scores),)),
    "stop": Op(
        Workload.recent_inputs,
        (
            _ours("art", _SPLIT, partial(stopping, rule=ART), checks.dense),
            _ours("art that never stops", _SPLIT, partial(stopping, rule=IN_VAIN), checks.dense),
            _ours("sinkrouter, not routed", _SPLIT, partial(stopping, rule=None), checks.dense),
            _FLASH_ATTENTION,
        ),
    ),
    "budgets": Op(
        Workload.decode_inputs,
        (
            _ours("unique", _DECODE, partial(budgets, most_pages=MAX_K), checks.sparse_decode),
            _ours("unique, one for all", _DECODE, partial(budgets, most_pages=None), checks.sparse_decode),
        ),
    ),
    "whole": Op(
        Workload.decode_inputs,
        (
            _ours("unique", _DECODE, whole, checks.dense),
            _ours("multi_token_decode", "multi_token_decode:multi_token_decode", together, checks.dense),
            _FLASH_ATTENTION,
        ),
    ),
    "prefill": Op(Workload.prefill_inputs, (_DENSITIES[0], _FLASH_ATTENTION_PREFILL, _DENSITIES[1])),
    "tokens": Op(
        Workload.prefill_inputs,
        (
            *_ZIPVL,
            _FLASH_ATTENTION_PREFILL,
            Provider("part: probe", token_prefill.load_kernels, token_prefill.probing, token_prefill.check_sums),
            Provider("part: choice", token_prefill.load_kernels, token_prefill.choosing, token_prefill.check_choice),
        ),
    ),
}
"""Every operation and its providers."""
