"""Prompts attend to copies of their blocks on the device: FlashAttention reads each key many times."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from sparse_kernels.block_copy import copy_blocks
from vllm.v1.kv_cache_interface import AttentionSpec

_MARGIN = 1
"""Blocks before a chunk that are copied after the chunk's keys are written, in addition to those of the chunk."""


def stored_dtype(spec: AttentionSpec) -> torch.dtype:
    """Returns the dtype of keys and values. vLLM has the bytes of an 8-bit cache."""
    return torch.float8_e4m3fn if spec.dtype == torch.uint8 else spec.dtype


class BlockCopies(NamedTuple):
    """Blocks to copy, and their places in the buffer."""

    blocks: torch.Tensor
    """`[n]` int32."""
    places: torch.Tensor
    """`[n]` int32."""


class StagedPrompts(NamedTuple):
    """Prompts of a step whose blocks fit the buffer together."""

    metadata: Any
    """FlashAttention's metadata, whose block table has places of the buffer."""
    requests: tuple[int, int]
    """The first of them among the step's prompts, and the first one after them."""
    tokens: slice
    """Their tokens among those of the step's prompts."""
    early: BlockCopies
    """Blocks that the step does not write."""
    late: BlockCopies
    """The other blocks."""


@dataclass(frozen=True)
class PromptLengths:
    """Lengths of the prompts of a step, on the host."""

    queries: tuple[int, ...]
    """Query tokens of each prompt."""
    contexts: tuple[int, ...]
    """Tokens of each context; no context is longer."""

    def groups(self, block_size: int, capacity: int, starts: Collection[int] = ()) -> list[tuple[int, int]]:
        """Returns the first prompt, and the first one after it, of each group that fits the buffer.

        Args:
            block_size: tokens of a block.
            capacity: blocks of the buffer. A prompt alone fits.
            starts: prompts with which a group begins in any case.
        """
        bounds, taken = [0], 0
        for index, needed in enumerate(self.blocks(block_size).tolist()):
            if taken and (index in starts or taken + needed > capacity):
                bounds.append(index)
                taken = 0
            taken += needed
        return list(pairwise([*bounds, len(self.contexts)]))

    def blocks(self, block_size: int) -> NDArray[np.int64]:
        """Returns the blocks of each context."""
        return -(-np.array(self.contexts, dtype=np.int64) // block_size)

    def finished_blocks(self, block_size: int) -> NDArray[np.int64]:
        """Returns the leading blocks of each context that the step does not write. A prompt may begin with blocks that
        other prompts write in the same step: vLLM shares a block from the step on that fills it."""
        before = np.array(self.contexts, dtype=np.int64) - sum(self.queries)
        return np.maximum(before // block_size - _MARGIN, 0)


def plan_copies(
    lengths: PromptLengths, block_table: torch.Tensor, block_size: int, capacity: int
) -> tuple[torch.Tensor, BlockCopies, BlockCopies]:
    """Plans the copies of a group of prompts.

    Args:
        lengths: of the prompts of the group.
        block_table: `[num_prompts, max_blocks]` int32.
        block_size: tokens of a block.
        capacity: blocks of the buffer.

    Returns:
        The block table over places of the buffer, `[num_prompts, max_blocks]` int32; the early and the late copies.
    """
    counts, finished = lengths.blocks(block_size), lengths.finished_blocks(block_size)
    first = np.cumsum(counts) - counts
    width = block_table.shape[1]
    # Entries behind a context name places that exist, since kernels may look at them.
    table = np.minimum(first[:, None] + np.arange(width), capacity - 1).astype(np.int32)
    inside = np.arange(width) < counts[:, None]
    early = inside & (np.arange(width) < finished[:, None])

    def copies(chosen: NDArray[np.bool_]) -> BlockCopies:
        entries = _to_device(np.stack([np.flatnonzero(chosen), table[chosen]]), block_table.device)
        return BlockCopies(block_table.flatten()[entries[0]], entries[1].int())

    return _to_device(table, block_table.device), copies(early), copies(inside & ~early)


def _to_device(numbers: NDArray[Any], device: torch.device) -> torch.Tensor:
    found = torch.from_numpy(numbers)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


class StagedLayer(Protocol):
    """A layer as staging sees it."""

    bound_cache: torch.Tensor | None
    """None until the layer has its cache."""
    token_rows: torch.Tensor
    """`[num_blocks, num_kv_heads, block_size, 2 * head_size]`, the layer's cache."""


class Staging:
    """Two buffers of blocks. While a layer attends in one, the next layer's finished blocks are copied to the other."""

    def __init__(self, layers: Sequence[StagedLayer], buffers: torch.Tensor) -> None:
        """Makes the buffers serve some layers.

        Args:
            layers: the layers, in the order in which a step runs them.
            buffers: `[2, capacity, num_kv_heads, block_size, 2 * head_size]` of the cache's dtype.
        """
        self._places = {id(layer): place for place, layer in enumerate(layers)}
        self._layers = layers
        self._buffers = buffers
        self._ahead: tuple[BlockCopies, int] | None = None
        self._stream = self._copied = None
        if buffers.is_cuda:
            self._stream, self._copied = torch.cuda.Stream(buffers.device), torch.cuda.Event()

    @property
    def capacity(self) -> int:
        """Blocks of a buffer."""
        return self._buffers.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._buffers.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return self._buffers.nbytes

    def load(self, layer: StagedLayer, part: StagedPrompts, ahead: bool) -> torch.Tensor:
        """Copies the blocks of some prompts, once their new keys are written.

        Args:
            layer: the layer that attends next.
            part: the prompts.
            ahead: whether the next layer attends to the same prompts next.

        Returns:
            `[capacity, num_kv_heads, block_size, 2 * head_size]`, the buffer that holds the blocks.
        """
        place = self._places[id(layer)]
        buffer = self._buffers[place % 2]
        if self._ahead is not None and self._ahead[0] is part.early and self._ahead[1] == place:
            if self._copied is not None:
                torch.cuda.current_stream().wait_event(self._copied)
        else:
            copy_blocks(layer.token_rows, part.early.blocks, buffer, part.early.places)
        copy_blocks(layer.token_rows, part.late.blocks, buffer, part.late.places)
        self._ahead = None
        if ahead and place + 1 < len(self._layers) and self._layers[place + 1].bound_cache is not None:
            self._load_ahead(place + 1, part.early)
        return buffer

    def _load_ahead(self, place: int, early: BlockCopies) -> None:
        """Copies the finished blocks of a later layer on a stream of its own."""
        rows, buffer = self._layers[place].token_rows, self._buffers[place % 2]
        if self._stream is None or self._copied is None:
            copy_blocks(rows, early.blocks, buffer, early.places)
        else:
            # The layer before has read the buffer, and earlier steps have written the blocks.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                copy_blocks(rows, early.blocks, buffer, early.places)
            self._copied.record(self._stream)
        self._ahead = early, place
