"""Compares every decode step of an engine in this process with the reference pipeline."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from sparse_kernels.batch import DecodeBatch, DecodeOutput, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.page_score import score_pages
from sparse_kernels.page_score.reference import score_pages as reference_scores
from sparse_kernels.page_statistics import PageStatistics
from sparse_kernels.page_statistics.reference import update_page_statistics
from sparse_kernels.paging import PagedTensor
from sparse_kernels.sparse_decode import reference as decode_reference
from sparse_kernels.split_attention.reference import split_attention

from vllm_sparse_plugin.attention.base import SparseImpl
from vllm_sparse_plugin.attention.plan import LayerPlan

OUTPUT_TOLERANCE = 2**-7
"""Largest error of a head's output, relative to its norm: weights and outputs are rounded to bfloat16, 2^-9 each."""
STOP_TOLERANCE = 2**-5
"""Largest relative error of a test interval's change of an output: it is a difference of rounded outputs."""
RECORD_TOLERANCE = 2**-4
"""Largest error of a vector of a record, relative to its norm: an element between codes may be rounded up or down."""


class JudgementError(Exception):
    """A decode step differs from the reference pipeline."""


@dataclass
class Referee:
    """The results of comparisons so far."""

    steps: int = 0
    """Compared calls of a layer with decoding tokens."""
    output_error: float = 0.0
    """The largest error of a head's output, relative to its norm."""
    dense_steps: int = 0
    """Compared calls of a full-attention layer that decoded densely, by its statistics."""
    faults: list[str] = field(default_factory=list)
    """The faults, one sentence for each kind."""

    def judge(
        self, plan: LayerPlan, batch: DecodeBatch, cache: KVCache, softmax: Softmax, output: torch.Tensor
    ) -> None:
        """Compares a layer's output for decoding tokens, `[num_tokens, num_heads, head_size]`, with the reference's."""
        self.steps += 1
        try:
            if cache.statistics is not None:
                _check_records(batch.block_table, batch.seq_lens, cache.keys, cache.statistics)
            expected = [reference_output(each, batch, cache, softmax) for each in _borderline(plan)]
            self._compare(output.float(), torch.stack(expected))
        except JudgementError as error:
            self.note(str(error))

    def judge_statistics(self, block_table: torch.Tensor, seq_lens: torch.Tensor, cache: KVCache) -> None:
        """Compares the statistics of a dense layer's pages with those of its keys."""
        assert cache.statistics is not None
        self.dense_steps += 1
        try:
            _check_records(block_table, seq_lens, cache.keys, cache.statistics)
        except JudgementError as error:
            self.note(str(error))

    def note(self, fault: str) -> None:
        """Adds a fault, once."""
        if fault not in self.faults:
            self.faults.append(fault)

    def _compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Compares outputs with the allowed ones, `[allowed, ...]`: each head with the nearest."""
        error, norm = (actual - expected).norm(dim=-1), expected.norm(dim=-1)
        if not bool(torch.isfinite(actual).all()):
            raise JudgementError("an output that is not finite")
        skipped = (norm == 0).any(dim=0)
        if not bool((error[:, skipped] == 0).all()):
            raise JudgementError("an output of a skipped group that is not zero")
        relative = (error[:, ~skipped] / norm[:, ~skipped]).amin(dim=0)
        self.output_error = max(self.output_error, float(relative.max()) if len(relative) else 0.0)
        if self.output_error > OUTPUT_TOLERANCE:
            raise JudgementError("an output that differs from the reference's")


def _borderline(plan: LayerPlan) -> list[LayerPlan]:
    """A layer's plan; with early stopping also plans that stop slightly sooner and later. A stop test near its
    tolerance may have either result, so attention may read a few more or fewer intervals."""
    rule = plan.stop_rule
    if rule is None:
        return [plan]
    factors = 1.0, 1 - STOP_TOLERANCE, 1 + STOP_TOLERANCE
    rules = [
        rule._replace(
            scale_tolerance=rule.scale_tolerance * factor, direction_tolerance=rule.direction_tolerance * factor
        )
        for factor in factors
    ]
    return [replace(plan, stop_rule=each) for each in rules]


def reference_output(plan: LayerPlan, batch: DecodeBatch, cache: KVCache, softmax: Softmax) -> torch.Tensor:
    """The reference pipeline's output for decoding tokens: `[num_tokens, num_heads, head_size]` float32."""
    output = DecodeOutput(torch.empty(batch.query.shape, device=batch.query.device))
    routing = None if plan.routing is None else replace(plan.routing, counts=None)
    selection = plan.selection_of(batch)
    if selection is None:
        split_attention(batch, cache, softmax, routing, plan.stopping(), 0, output)
    else:
        decode_reference.sparse_decode(batch, cache, softmax, selection, routing, plan.stop_rule, output)
    return output.heads


def checked_scores(
    query: torch.Tensor,
    statistics: PageStatistics,
    table: torch.Tensor,
    lengths: torch.Tensor,
    std_weight: float,
    refined: float = 1.0,
) -> torch.Tensor:
    """The layer's scores, checked against the reference's. Of two pages with similar scores, either may be read."""
    expected = reference_scores(query, statistics, table, lengths, std_weight)
    actual = score_pages(query.bfloat16(), statistics, table, lengths, std_weight, refined)[..., : expected.shape[2]]
    if statistics.kind.is_leveled:
        # The reference has scored all pages. Those that are not refined have no score.
        expected = torch.where(actual == -torch.inf, actual, expected)
    if not scores_are_close(actual, expected, lengths):
        raise JudgementError("scores that differ from the reference's")
    return actual


def scores_are_close(actual: torch.Tensor, expected: torch.Tensor, lengths: torch.Tensor) -> bool:
    """Whether scores differ by no more than a step of bfloat16, and the rounding error of a query in 16-bit fixed
    point, in each row."""
    for row, count in enumerate(lengths.tolist()):
        wanted, found = expected[row, :, :count].float(), actual[row, :, :count].float()
        unscored = (wanted == -torch.inf) & (found == -torch.inf)
        wanted, found = wanted.masked_fill(unscored, 0), found.masked_fill(unscored, 0)
        allowed = 2**-7 * wanted.abs() + 2**-11 * (wanted.abs().max() if count else 0)
        if not bool(((found - wanted).abs() <= allowed).all()):
            return False
    return True


def _check_records(
    block_table: torch.Tensor, seq_lens: torch.Tensor, keys: PagedTensor, statistics: PageStatistics
) -> None:
    """Computes the records of all complete pages from the keys again, and compares them with the stored records."""
    per_block = keys.pages_per_block
    for request, length in enumerate(seq_lens.tolist()):
        page = torch.arange(length // keys.page_size, device=block_table.device)
        if not len(page):
            continue
        blocks = block_table[request, : int(page[-1]) // per_block + 1].long()
        stored = _taken(statistics, blocks)
        fresh = _taken(statistics, blocks)
        for part in (fresh.vectors, fresh.scales, fresh.spread):
            if part is not None:
                part.view(torch.uint8).zero_()
        taken_keys = replace(keys, view=keys.view.index_select(0, blocks))
        update_page_statistics(taken_keys, fresh, page // per_block, page % per_block)
        for found, wanted in zip(_values(stored), _values(fresh), strict=True):
            found, wanted = (part.transpose(1, 2).flatten(0, 1)[: len(page)] for part in (found, wanted))
            error = (found - wanted).norm(dim=-1)
            if not bool((error <= RECORD_TOLERANCE * wanted.norm(dim=-1)).all()):
                raise JudgementError("page statistics that are not those of the keys")


def _taken(statistics: PageStatistics, blocks: torch.Tensor) -> PageStatistics:
    """A copy of the statistics of some blocks."""

    def taken(part: torch.Tensor | None) -> Any:
        if part is None:
            return None
        # torch cannot gather 8-bit floats, but it can gather their bytes.
        bits = part.view(torch.uint8) if part.itemsize == 1 else part
        return bits.index_select(0, blocks).view(part.dtype)

    return replace(
        statistics,
        vectors=taken(statistics.vectors),
        scales=taken(statistics.scales),
        spread=taken(statistics.spread),
    )


def _values(statistics: PageStatistics) -> Iterator[torch.Tensor]:
    """The vectors `[num_blocks, num_kv_heads, pages, vectors, head_size]` of records and their spread."""
    kind = statistics.kind
    vectors = statistics.vectors
    vectors = kind.codes.unpack(vectors.flatten(3)) if kind.codes else vectors.float().unflatten(-1, (kind.vectors, -1))
    if statistics.scales is not None:
        scales = statistics.scales.float()
        vectors = vectors * scales.repeat_interleave(kind.vectors // scales.shape[-1], dim=-1).unsqueeze(-1)
    yield vectors
    if statistics.spread is not None:
        yield statistics.spread.float()[..., None, None]


@contextmanager
def watch() -> Iterator[Referee]:
    """Compares the decode steps of every layer of the plugin in this process, within the context."""
    referee = Referee()
    with _watch_layers(referee), mock.patch.object(decode_reference, "score_pages", checked_scores):
        yield referee


def _watch_layers(referee: Referee) -> AbstractContextManager[object]:
    attend = SparseImpl.attend_decoding

    def watched(
        layer: SparseImpl, batch: DecodeBatch, cache: KVCache, output: DecodeOutput, wants_pages: bool
    ) -> torch.Tensor | None:
        pages = attend(layer, batch, cache, output, wants_pages)
        referee.judge(layer.plan, batch, cache, layer.softmax, output.heads)
        return pages

    return mock.patch.object(SparseImpl, "attend_decoding", watched)


@contextmanager
def watch_dense_layers(referee: Referee) -> Iterator[None]:
    """Compares also the statistics of layers that write but do not read them: layers that decode densely."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm_sparse_plugin.attention.cpu import SparseCPUImpl as Impl
    else:
        from vllm_sparse_plugin.attention.cuda import SparseCUDAImpl as Impl
    forward = Impl.forward

    def watched(layer: Any, module: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, *rest: Any,
                **named: Any) -> Any:  # fmt: skip
        output = forward(layer, module, query, key, value, kv_cache, metadata, *rest, **named)
        # With several query tokens, a request's length may count rejected drafts, which are not written.
        decodes = metadata is not None and metadata.max_query_len == 1
        if decodes and not layer.plan.is_sparse and layer.statistics_cache is not None:
            referee.judge_statistics(metadata.block_table, metadata.seq_lens, layer.statistics_cache)
        return output

    with mock.patch.object(Impl, "forward", watched):
        yield
