"""Attends with large groups in parts. A part has at most as many query heads as a thread block supports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from sparse_kernels.batch import DecodeBatch, DecodeOutput, Softmax
from sparse_kernels.limits import MAX_GROUP


def parts_of(group_size: int) -> list[slice]:
    """Returns the parts of a group: at most `MAX_GROUP` heads each, and sizes that differ by at most one."""
    count = -(-group_size // MAX_GROUP)
    return [slice(i * group_size // count, (i + 1) * group_size // count) for i in range(count)]


def part_of(heads: torch.Tensor, num_kv_heads: int, part: slice) -> torch.Tensor:
    """Returns a copy of one part of each group.

    Args:
        heads: `[..., num_query_heads]` or `[..., num_query_heads, head_size]`. The heads are in the last dimension if
            the tensor has one dimension, otherwise in the last but one.
        num_kv_heads: number of groups.
        part: one of `parts_of`.
    """
    dim = max(heads.dim() - 2, 0)
    grouped = heads.unflatten(dim, (num_kv_heads, -1))
    picked: torch.Tensor = grouped.narrow(dim + 1, part.start, part.stop - part.start)
    return picked.flatten(dim, dim + 1).contiguous()


def queries_in_parts(batch: DecodeBatch, num_kv_heads: int) -> Iterator[DecodeBatch]:
    """Yields a batch with the query heads of each part; the batch itself if groups need no parts."""
    parts = parts_of(batch.group_size(num_kv_heads))
    if len(parts) == 1:
        yield batch
        return
    for part in parts:
        yield replace(batch, query=part_of(batch.query, num_kv_heads, part))


def attend_in_parts(
    batch: DecodeBatch,
    num_kv_heads: int,
    softmax: Softmax,
    output: DecodeOutput,
    attend: Callable[[DecodeBatch, Softmax, DecodeOutput], None],
) -> None:
    """Calls `attend` with the query heads, the sink logits and the output of each part."""
    parts = parts_of(batch.group_size(num_kv_heads))
    if len(parts) == 1:
        attend(batch, softmax, output)
        return
    grouped = output.heads.unflatten(1, (num_kv_heads, -1))
    for part, of_part in zip(parts, queries_in_parts(batch, num_kv_heads), strict=True):
        logits = None if softmax.sink_logits is None else part_of(softmax.sink_logits, num_kv_heads, part)
        room = torch.empty(of_part.query.shape, dtype=output.heads.dtype, device=output.heads.device)
        attend(of_part, replace(softmax, sink_logits=logits), DecodeOutput(room))
        grouped[:, :, part].copy_(room.unflatten(1, (num_kv_heads, -1)))
