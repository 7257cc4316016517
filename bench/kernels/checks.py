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
from sparse_kernels.page_score.levels import FLAT_PAGES, LEAST_OF_STRIPE, SHARE_UNITS, STRIPES, in_units
from sparse_kernels.page_score.reference import score_pages
from sparse_kernels.page_statistics.reference import quantise, summarise
from sparse_kernels.page_topk.reference import select_pages
from sparse_kernels.sparse_attention.reference import attend_pages

from bench.kernels.cases import Geometry
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
            if inputs.statistics.kind.is_leveled:
                # Pages that are not refined have no score.
                refined, least = found != -torch.inf, _least_refined(pages, geometry)
                if not bool((refined.sum(dim=-1) >= least).all()):
                    raise CheckError(f"{name}: request {rows[row]} has fewer than {least} refined pages")
                wanted, found = (each.masked_fill(~refined, 0) for each in (wanted, found))
            error = (found - wanted).abs()
            allowed = _BF16_STEP * wanted.abs() + 1e-4 * wanted.abs().max()
            if not bool((error <= allowed).all()):
                raise CheckError(f"{name}: a score of request {rows[row]} is off by {_largest(error):.3g}")


def _least_refined(pages: int, geometry: Geometry) -> int:
    """Pages of a row that leveled statistics score whole, if no two pages are equally good."""
    if pages <= FLAT_PAGES:
        return pages
    stripes = torch.bincount(torch.arange(pages) // geometry.pages_per_block % STRIPES).tolist()
    units = in_units(geometry.refined)
    return sum(min(stripe, max(-(-stripe * units // SHARE_UNITS), LEAST_OF_STRIPE)) for stripe in stripes)


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


def attended(inputs: DecodeInputs, calls: Calls) -> None:
    """The output over the given pages."""
    expected = _attend(inputs, list(range(inputs.case.batch)), inputs.pages)
    for name, call in calls.items():
        require_close(call(), expected, name)


def sparse_decode(inputs: DecodeInputs, calls: Calls, skipped: torch.Tensor | None = None) -> None:
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
        expected = _attend(inputs, rows, pages)
        for name, call in calls.items():
            _require_routed(call(), rows, expected, skipped, name)


def dense(inputs: DecodeInputs, calls: Calls) -> None:
    """Attention over the whole context."""
    _dense(inputs, calls, inputs.lengths)


def routed(inputs: DecodeInputs, calls: Calls) -> None:
    """Attention over the whole context, zero for skipped groups."""
    skipped = _skipped(inputs)
    _dense(inputs, calls, inputs.lengths, skipped)


def routed_sparse_decode(inputs: DecodeInputs, calls: Calls) -> None:
    """The same for a fused decode step over selected pages."""
    sparse_decode(inputs, calls, _skipped(inputs))


def dense_prefix(inputs: DecodeInputs, calls: Calls) -> None:
    """Attention over the first tokens, as many as a selection holds."""
    _dense(inputs, calls, selected_lengths(inputs))


def written(inputs: DecodeInputs, calls: Calls) -> None:
    """New tokens are stored, completed pages have statistics, everything else in their blocks is untouched."""
    _written(inputs, calls, with_statistics=True)


def copied(inputs: DecodeInputs, calls: Calls) -> None:
    """New tokens are stored, every other token of their blocks is untouched."""
    _written(inputs, calls, with_statistics=False)


def selected_lengths(inputs: DecodeInputs) -> list[int]:
    """Tokens that sparse attention reads for each request."""
    page, k = inputs.geometry.page_size, inputs.geometry.k
    return [min(length // page, k) * page + length % page for length in inputs.lengths]


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


def _skipped(inputs: DecodeInputs) -> torch.Tensor:
    """`[batch, num_query_heads]` bool, the heads of groups to skip: those of the largest scores."""
    scores = inputs.group_scores.flatten()
    skipped = torch.zeros_like(scores, dtype=torch.bool)
    skipped[scores.topk(inputs.case.skipped_groups(inputs.geometry)).indices] = True
    return skipped.view(inputs.case.batch, -1).repeat_interleave(inputs.case.group, dim=1)


def _require_routed(
    output: torch.Tensor, rows: list[int], expected: torch.Tensor, skipped: torch.Tensor | None, name: str
) -> None:
    """Outputs are finite, and zero exactly for skipped groups, in every request; some requests are compared."""
    if skipped is None:
        require_close(output[rows], expected, name)
    elif torch.equal(output.eq(0).all(dim=-1), skipped):
        active = ~skipped[rows]
        require_close(output[rows][active], expected[active], name)
    else:
        raise CheckError(f"{name}: the groups with zero output are not the groups to skip")
    require_finite(output, name)


def _attend(inputs: DecodeInputs, rows: list[int], pages: torch.Tensor) -> torch.Tensor:
    tokens = QueryTokens(
        inputs.grouped_query[rows].float(), inputs.block_table[rows].long(), inputs.seq_lens[rows].long()
    )
    return attend_pages(tokens, inputs.cache, pages.long(), inputs.softmax)


def _dense(inputs: DecodeInputs, calls: Calls, lengths: list[int], skipped: torch.Tensor | None = None) -> None:
    # Of several query tokens the first sees the shortest context.
    tokens = inputs.case.tokens
    rows = sorted({0, tokens - 1, inputs.case.batch * tokens - 1})
    expected = torch.stack(
        [_dense_row(inputs, row, lengths[row // tokens] - (tokens - 1 - row % tokens)) for row in rows]
    )
    for name, call in calls.items():
        _require_routed(call(), rows, expected, skipped, name)


def _dense_row(inputs: DecodeInputs, token: int, length: int) -> torch.Tensor:
    """`[num_query_heads, head_size]` float32, head by head: a context of 512K tokens takes gigabytes in float32."""
    geometry = inputs.geometry
    blocks = inputs.block_table[token // inputs.case.tokens, : -(-length // geometry.block_size)].long()
    outputs = []
    for head, query in enumerate(inputs.grouped_query[token].float()):
        tokens = inputs.token_rows[:, head].index_select(0, blocks).flatten(0, 1)[:length].float()
        keys, values = tokens.split(geometry.head_size, dim=-1)
        outputs.append((query @ keys.T * geometry.scale).softmax(dim=-1) @ values)
    return torch.cat(outputs)


def _written(inputs: DecodeInputs, calls: Calls, with_statistics: bool) -> None:
    geometry, statistics = inputs.geometry, inputs.statistics
    block, offset = inputs.slots // geometry.block_size, inputs.slots % geometry.block_size
    page = offset // geometry.page_size
    completed = (offset % geometry.page_size == geometry.page_size - 1).nonzero().squeeze(1)
    # Views of the same memory, to compare and to restore.
    tables = [inputs.token_rows, *statistics.parts]
    before = [_gathered(table, block) for table in tables]
    keys = inputs.keys.gather(
        block[completed, None], torch.arange(geometry.num_kv_heads, device=block.device), page[completed, None]
    )
    record = summarise(statistics.kind, keys)
    try:
        for name, call in calls.items():
            inputs.token_rows[block, :, offset] = torch.nan
            if with_statistics:
                for table in tables[1:]:
                    _bytes(table)[block[completed], :, page[completed]] = 0x7F
            call()
            if not torch.equal(_gathered(inputs.token_rows, block), before[0]):
                raise CheckError(f"{name}: the cache does not hold the new tokens beside the old ones")
            if not with_statistics:
                continue
            for table, old in zip(tables[1:], before[1:], strict=True):
                new, kept = _gathered(table, block), torch.ones(old.shape[:3], dtype=torch.bool, device=old.device)
                kept[torch.arange(len(block), device=block.device), :, page] = False
                if not torch.equal(new[kept], old[kept]):
                    raise CheckError(f"{name}: statistics of another page changed")
            _require_statistics(inputs, block[completed], page[completed], *record, name)
    finally:
        for table, old in zip(tables, before, strict=True):
            _bytes(table)[block] = old


def _bytes(table: torch.Tensor) -> torch.Tensor:
    """Bits compare equal for NaN, and can be gathered; 8-bit floats cannot."""
    return table.view(torch.uint8 if table.element_size() == 1 else torch.int16)


def _gathered(table: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    return _bytes(table)[blocks]


def _require_statistics(
    inputs: DecodeInputs,
    blocks: torch.Tensor,
    pages: torch.Tensor,
    vectors: torch.Tensor,
    spread: torch.Tensor | None,
    name: str,
) -> None:
    table = inputs.statistics
    codes = table.kind.codes
    found = table.vectors[blocks, :, pages]
    found = codes.unpack(found) if codes else found.float().unflatten(-1, vectors.shape[-2:])
    step = _BF16_STEP * vectors.abs()
    if table.scales is not None:
        scale = table.scales[blocks, :, pages].float()
        if codes:
            packed, steps = codes.pack(vectors)
            wanted_scale = steps.float()
            # Codes of few bits clip the outer elements.
            vectors = codes.unpack(packed) * codes.per_vector(wanted_scale).unsqueeze(-1)
        else:
            wanted_scale = quantise(vectors, table.vectors.dtype)[1].float()
        if not bool(((scale - wanted_scale).abs() <= 2 * _BF16_STEP * wanted_scale).all()):
            raise CheckError(f"{name}: the scale of a completed page is off")
        scale = (codes.per_vector(scale) if codes else scale).unsqueeze(-1)
        found, step = found * scale, 1.02 * scale
    if not bool(((found - vectors).abs() <= step).all()):
        raise CheckError(f"{name}: a vector of a completed page is off by {_largest((found - vectors).abs()):.3g}")
    if spread is None or table.spread is None:
        return
    found = table.spread[blocks, :, pages].float()
    if not bool(((found - spread).abs() <= 2 * _BF16_STEP * spread).all()):
        raise CheckError(f"{name}: the spread of a completed page is off by {_largest((found - spread).abs()):.3g}")
