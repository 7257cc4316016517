"""Computes page statistics as in serving, with gradients to the keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparse_kernels.masked_attention.packing import Packing
from sparse_kernels.page_statistics import RecordFormat, StatisticsKind
from sparse_kernels.page_statistics.reference import quantise

TRAINABLE = ("mean_and_spread", "quarters")
"""Kinds of statistics that a model can be trained with. The score of a page is the largest product of the query with a
vector of its record, plus the deviation's part. (The largest of one vector is its sum.)"""


@dataclass(frozen=True)
class PageRecords:
    """The records of the complete pages of a batch.

    Rounding is straight-through: the values are rounded as in a cache, and gradients pass unchanged.
    """

    vectors: torch.Tensor
    """`[num_pages, num_kv_heads, vectors, head_size]`, float32 or float64."""
    spread: torch.Tensor | None
    """`[num_pages, num_kv_heads]`; None for a kind without a spread."""
    stored: torch.Tensor
    """`vectors` in units of `scales`, without gradient. Rounded values are exact in bfloat16."""
    scales: torch.Tensor | None
    """`[num_pages, num_kv_heads, vectors]` float32; None without scales."""

    def __getitem__(self, pages: slice) -> PageRecords:
        spread, scales = (None if part is None else part[pages] for part in (self.spread, self.scales))
        return PageRecords(self.vectors[pages], spread, self.stored[pages], scales)


class _Rounded(torch.autograd.Function):
    """Returns the value of one tensor and passes the gradient to another."""

    @staticmethod
    def forward(ctx: object, exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        return rounded.to(exact.dtype)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def page_records(
    key: torch.Tensor, packing: Packing, page_size: int, kind: StatisticsKind, record_format: RecordFormat | None
) -> PageRecords:
    """Computes the records of all complete pages, as `update_page_statistics` writes them.

    For a page of equal keys, the gradient of the deviation is zero.

    Args:
        key: `[num_tokens, num_kv_heads, head_size]`, with positions applied.
        packing: the lengths of the sequences.
        page_size: tokens of a page.
        kind: one of `TRAINABLE`.
        record_format: how the vectors are stored; None for no rounding.

    Returns:
        The records, float64 for float64 keys, float32 for others.

    Raises:
        ValueError: if the kind cannot be trained or does not have the format.
    """
    if kind.name not in TRAINABLE:
        raise ValueError(f"kind: got {kind.name!r}, allowed: {', '.join(TRAINABLE)}")
    if record_format is not None and record_format not in kind.formats:
        raise ValueError(f"format: got {record_format!r}, allowed for {kind.name}: {', '.join(kind.formats)}")
    exact = torch.float64 if key.dtype == torch.float64 else torch.float32
    tokens = packing.page_tokens(page_size, key.device)
    # Indexing would add gradients up after sorting the tokens. Each token belongs to one page, so this is not needed.
    pages = key.index_select(0, tokens.flatten()).unflatten(0, tokens.shape).to(exact).transpose(1, 2)
    vectors, spread = kind.summarise(pages)
    if record_format is None:
        return PageRecords(vectors, spread, vectors.detach(), None)
    stored, scales = _round(vectors.detach().float(), kind, record_format)
    served = stored if scales is None else stored * scales[..., None]
    if spread is not None:
        spread = _Rounded.apply(spread, spread.detach().bfloat16())
    return PageRecords(_Rounded.apply(vectors, served), spread, stored, scales)


def _round(
    vectors: torch.Tensor, kind: StatisticsKind, record_format: RecordFormat
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the rounded vectors in units of their scales, and the scales; float32."""
    if kind.codes is not None:
        packed, steps = kind.codes.pack(vectors)
        return kind.codes.unpack(packed), kind.codes.per_vector(steps.float())
    if record_format == "bf16":
        return vectors.bfloat16().float(), None
    stored, scales = quantise(vectors, torch.int8 if record_format == "int8" else torch.float8_e4m3fn)
    return stored.float(), scales.float()
