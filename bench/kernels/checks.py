"""The correctness gate: compares each provider with the torch references before it is timed.

Every check takes calls by name: the provider called directly, with poisoned allocations, and the replayed graph that
will be timed. For large batches a few requests are compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from sparse_kernels.batch import QueryTokens
from sparse_kernels.page_score.reference import score_pages
from sparse_kernels.page_topk.reference import select_pages
from sparse_kernels.sparse_attention.reference import attend_pages

from bench.kernels.workload import DecodeInputs, TopKInputs, needles

Calls = Mapping[str, Callable[[], Any]]

_ATTENTION_ERROR = 1e-2
"""Largest relative error (Frobenius norm) of an attention output with weights rounded to bfloat16."""
_BF16_STEP = torch.finfo(torch.bfloat16).eps


class CheckError(Exception):
    """The result of a provider differs from the reference."""


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """`torch.empty` returns NaN or the largest integer, so results of an earlier run cannot pass."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def poison(output: Any) -> None:
    """Fills the tensors of an output with NaN or the largest integer."""
    for part in output if isinstance(output, tuple) else [output]:
        if isinstance(part, torch.Tensor):
            part.fill_(torch.nan if part.is_floating_point() else torch.iinfo(part.dtype).max)


def scores(inputs: DecodeInputs, calls: Calls) -> None:
    """Scores of the complete pages are within one bfloat16 step of the reference. Other positions are not checked."""
    rows = _requests(inputs)
    geometry = inputs.geometry
    expected = score_pages(
        inputs.grouped_query[rows],
        inputs.statistics,
        inputs.block_table[rows].long(),
        inputs.num_pages[rows],
        geometry.std_weight,
    ).float()
    for name, call in calls.items():
        actual = call()[rows].float()
        for row, pages in enumerate(inputs.num_pages[rows].tolist()):
            wanted, found = expected[row, :, :pages], actual[row, :, :pages]
            error = (found - wanted).abs()
            allowed = _BF16_STEP * wanted.abs() + 1e-4 * wanted.abs().max()
            if not bool((error <= allowed).all()):
                raise CheckError(f"{name}: a score of request {rows[row]} is off by {_largest(error):.3g}")


def exact_selection(inputs: TopKInputs, calls: Calls) -> None:
    """Pages are those of the reference, in any order."""
    expected = select_pages(inputs.scores, inputs.num_pages, inputs.geometry.k, 0, 0).sort(dim=-1).values
    for name, call in calls.items():
        actual = call().long().sort(dim=-1).values
        if not torch.equal(actual, expected):
            raise CheckError(f"{name}: the selection differs from the reference")


def equal_scores(inputs: TopKInputs, calls: Calls) -> None:
    """Distinct positions `[rows, k]` with the best scores. Rivals may use any order and break ties in any way."""
    rows = inputs.rows.float()
    best = rows.topk(min(inputs.geometry.k, inputs.case.pages), dim=-1).values
    for name, call in calls.items():
        positions = call().long().sort(dim=-1).values
        if positions.shape != best.shape or not bool(((positions >= 0) & (positions < rows.shape[1])).all()):
            raise CheckError(f"{name}: positions are not [{best.shape[0]}, {best.shape[1]}] pages of the rows")
        if bool((positions.diff(dim=-1) == 0).any()):
            raise CheckError(f"{name}: a page is selected twice")
        if not torch.equal(rows.gather(1, positions).sort(dim=-1, descending=True).values, best):
            raise CheckError(f"{name}: the selection misses one of the best scores")


def mapped_pages(inputs: TopKInputs, calls: Calls) -> None:
    """As `equal_scores`, for positions mapped through the block table."""
    per_block = inputs.geometry.pages_per_block
    logical = inputs.block_table.argsort(dim=1).repeat_interleave(inputs.geometry.num_kv_heads, dim=0)

    def unmapped(call: Callable[[], Any]) -> torch.Tensor:
        physical = call().long()
        blocks = (physical // per_block).clamp(0, logical.shape[1] - 1)
        return torch.where(physical >= 0, logical.gather(1, blocks) * per_block + physical % per_block, -1)

    equal_scores(inputs, {name: partial(unmapped, call) for name, call in calls.items()})


def sparse_decode(inputs: DecodeInputs, calls: Calls) -> None:
    """Scoring, selecting and attending end to end, with pages whose best ones are unambiguous."""
    rows = _requests(inputs)
    geometry = inputs.geometry
    with needles(inputs, rows):
        lengths = inputs.num_pages[rows]
        table = inputs.block_table[rows].long()
        found = score_pages(
            inputs.grouped_query[rows], inputs.statistics, table, lengths, geometry.std_weight, geometry.refined
        )
        pages = select_pages(found, lengths, geometry.k, geometry.sink_pages, geometry.recent_pages)
        tokens = QueryTokens(inputs.grouped_query[rows].float(), table, inputs.seq_lens[rows].long())
        expected = attend_pages(tokens, inputs.cache, pages, inputs.softmax)
        for name, call in calls.items():
            output = call()
            require_close(output[rows], expected, name)
            require_finite(output, name)


def dense(inputs: DecodeInputs, calls: Calls) -> None:
    """Attention over the whole context."""
    rows = _requests(inputs)
    expected = torch.stack([_dense_row(inputs, row) for row in rows])
    for name, call in calls.items():
        output = call()
        require_close(output[rows], expected, name)
        require_finite(output, name)


def _requests(inputs: DecodeInputs) -> list[int]:
    last = inputs.case.batch - 1
    return sorted({0, last // 2, last})


def _largest(error: torch.Tensor) -> float:
    return float(error.nan_to_num(nan=torch.inf).max())


def require_finite(output: torch.Tensor, name: str) -> None:
    """Raise CheckError if an output was not written or computed in some place, compared or not."""
    if not bool(output.isfinite().all()):
        raise CheckError(f"{name}: an output is not finite")


def require_close(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Raise CheckError unless every head of an attention output is close to the reference's."""
    if actual.shape != expected.shape:
        raise CheckError(f"{name}: the output has shape {tuple(actual.shape)}, not {tuple(expected.shape)}")
    # Requests and heads are compared separately, so that one wrong row is not lost in a sum.
    difference = (actual.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    if not bool((difference <= _ATTENTION_ERROR).all()):
        raise CheckError(f"{name}: relative error {_largest(difference):.3g}, allowed {_ATTENTION_ERROR:g}")


def _dense_row(inputs: DecodeInputs, row: int) -> torch.Tensor:
    """`[num_query_heads, head_size]` float32, head by head: a context of 512K tokens takes gigabytes in float32."""
    geometry, length = inputs.geometry, inputs.lengths[row]
    blocks = inputs.block_table[row, : -(-length // geometry.block_size)].long()
    outputs = []
    for head, query in enumerate(inputs.grouped_query[row].float()):
        tokens = inputs.token_rows[:, head].index_select(0, blocks).flatten(0, 1)[:length].float()
        keys, values = tokens.split(geometry.head_size, dim=-1)
        outputs.append((query @ keys.T * geometry.scale).softmax(dim=-1) @ values)
    return torch.cat(outputs)
