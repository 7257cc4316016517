"""The calls of this project's kernels, made from the inputs of a case.

A function takes what a loader has imported, and returns the call to check and to time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from sparse_kernels.batch import DecodeOutput, LongDenseRequests
from sparse_kernels.split_attention import Stopping, stop_scratch
from sparse_kernels.stopping import StopRule

from bench.kernels.workload import DecodeInputs, TopKInputs

Call = Callable[[], Any]


def imported(*names: str) -> Callable[[], list[Any]]:
    """A loader of `module:attribute` names."""

    def load() -> list[Any]:
        return [getattr(import_module(module), name) for module, _, name in (each.partition(":") for each in names)]

    return load


def write(write_cache: Any, inputs: DecodeInputs) -> Call:
    """The write of a step's keys and values, with the records of full pages."""
    page_size = inputs.geometry.page_size

    def call() -> None:
        write_cache(inputs.new_keys, inputs.new_values, inputs.token_rows, inputs.statistics, inputs.slots, page_size)

    return call


def _refined(inputs: DecodeInputs) -> dict[str, float]:
    """The share of refined pages, for statistics that have levels."""
    return {"refined": inputs.geometry.refined} if inputs.statistics.kind.is_leveled else {}


def score(loaded: list[Any], inputs: DecodeInputs) -> Call:
    """The scores of all complete pages."""
    (score_pages,) = loaded
    num_pages, std_weight, refined = inputs.num_pages, inputs.geometry.std_weight, _refined(inputs)
    return lambda: score_pages(
        inputs.grouped_query, inputs.statistics, inputs.block_table, num_pages, std_weight, **refined
    )


def attend(loaded: list[Any], inputs: DecodeInputs) -> Call:
    """Attention to given pages."""
    (attend_pages,) = loaded
    tokens, cache, softmax = inputs.tokens, inputs.cache, inputs.softmax
    return lambda: attend_pages(tokens, cache, inputs.pages, softmax)


def split(loaded: list[Any], inputs: DecodeInputs, skipped_groups: int | None) -> Call:
    """Dense attention with `skipped_groups` groups skipped; None without routing."""
    (split_attention,) = loaded
    routing = None if skipped_groups is None else inputs.routing(skipped_groups)
    batch, cache, softmax = inputs.batch, inputs.cache, inputs.softmax
    return lambda: split_attention(batch, cache, softmax, routing=routing)


def together(loaded: list[Any], inputs: DecodeInputs) -> Call:
    """Dense attention with several query tokens of each request at once."""
    (multi_token_decode,) = loaded
    batch, cache, softmax = inputs.batch, inputs.cache, inputs.softmax
    return lambda: multi_token_decode(batch, cache, softmax)


def fused(loaded: list[Any], inputs: DecodeInputs, skipped_groups: int | None = None) -> Call:
    """A decode step without the write, with `skipped_groups` groups skipped; None without routing."""
    sparse_decode = loaded[0]
    geometry = inputs.geometry
    routing = None if skipped_groups is None else inputs.routing(skipped_groups)
    batch, cache, softmax = inputs.batch, inputs.cache, inputs.softmax
    return lambda: sparse_decode(batch, cache, softmax, geometry.selection, routing=routing)


def whole(loaded: list[Any], inputs: DecodeInputs) -> Call:
    """A decode step without the write, of requests that read their whole context. All thread blocks share them."""
    (sparse_decode,) = loaded
    batch, cache, softmax, geometry = inputs.batch, inputs.cache, inputs.softmax, inputs.geometry
    device, requests, rows = batch.query.device, len(batch.seq_lens), inputs.case.tokens * geometry.num_kv_heads
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


def in_pieces(loaded: list[Any], inputs: DecodeInputs) -> Call:
    """A decode step in pieces, which another launch adds up."""
    (decode_in_pieces,) = loaded
    batch, cache, softmax, selection = inputs.batch, inputs.cache, inputs.softmax, inputs.geometry.selection
    output = torch.empty_like(inputs.query)

    def call() -> torch.Tensor:
        decode_in_pieces(batch, cache, softmax, selection, None, DecodeOutput(output))
        return output

    return call


def stopping(loaded: list[Any], inputs: DecodeInputs, rule: StopRule) -> Call:
    """Dense attention by this project's kernel, newest tokens first under a stop rule."""
    (split_attention,) = loaded
    geometry, table = inputs.geometry, inputs.block_table
    rows = len(inputs.query) * geometry.num_kv_heads
    scratch = stop_scratch(rule, rows, table.shape[1] * geometry.block_size, table.device)
    batch, cache, softmax, stopping = inputs.batch, inputs.cache, inputs.softmax, Stopping(rule, scratch=scratch)
    return lambda: split_attention(batch, cache, softmax, stopping=stopping)


def step(loaded: list[Any], inputs: DecodeInputs) -> Call:
    """A decode step with its write."""
    attend = fused(loaded, inputs)
    write_step = write(loaded[1], inputs)

    def call() -> Any:
        write_step()
        return attend()

    return call


def select(loaded: list[Any], inputs: TopKInputs) -> Call:
    """The pages with the best scores."""
    (select_pages,) = loaded
    return lambda: select_pages(inputs.scores, inputs.num_pages, inputs.geometry.k)
