"""The copies, and which page each copy is of."""

from __future__ import annotations

from typing import NamedTuple

import torch

WAYS = 8
"""Places of a set, as in hot.cuh."""
FACTOR = 2654435761
"""Factor of the hash of pages."""
LAST_STEP = (1 << 31) - 1
"""The step after it has the number 0, because a tag has 31 bits for a step."""


class HotPages(NamedTuple):
    """Copies of the pages of one layer. A decode step finds pages there, and replaces copies that are not read."""

    rows: torch.Tensor
    """`[num_kv_heads, places, page_size, 2 * head_size]` of the cache's dtype: the token rows of a page."""
    tags: torch.Tensor
    """`[num_kv_heads, places]` int64: the low 32 bits are 1 + the number of the page in the cache, or 0 for no page.
    The high 32 bits are twice the last step that read the page, plus 1 if the step made the copy."""
    counters: torch.Tensor
    """`[num_kv_heads, 2]` int64: pages read, and those of them read from the host."""
    clock: torch.Tensor
    """`[1]` int32: the number of the step."""

    @property
    def sets(self) -> int:
        """Sets of places. A page has copies in one set only."""
        return self.tags.shape[1] // WAYS


class HotPool(NamedTuple):
    """The copies of all layers of a model."""

    rows: torch.Tensor
    """`[num_layers, num_kv_heads, places, page_size, 2 * head_size]`."""
    tags: torch.Tensor
    """`[num_layers, num_kv_heads, places]` int64."""
    clock: torch.Tensor
    """`[1]` int32: the number of the step."""

    @classmethod
    def empty(
        cls, layers: int, kv_heads: int, sets: int, page_size: int, head_size: int, dtype: torch.dtype,
        device: torch.device,
    ) -> HotPool:  # fmt: skip
        """Returns a pool without copies.

        Args:
            layers: layers of the model.
            kv_heads: KV heads of a layer.
            sets: sets of `WAYS` places, for each layer and KV head.
            page_size: tokens of a page.
            head_size: elements of a key.
            dtype: dtype of keys and values.
            device: where the copies are.
        """
        shape = layers, kv_heads, sets * WAYS
        return cls(
            torch.empty(*shape, page_size, 2 * head_size, dtype=dtype, device=device),
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )

    def of_layer(self, layer: int, counters: torch.Tensor) -> HotPages:
        """Returns the copies of a layer, whose reads are counted in `counters`."""
        return HotPages(self.rows[layer], self.tags[layer], counters, self.clock)


def set_of(pages: torch.Tensor, sets: int) -> torch.Tensor:
    """Returns the set of each page, `pages` and the result int64 of any shape. hot.cuh and triton.py have the same
    formula."""
    return (pages * FACTOR & 0xFFFFFFFF) * sets >> 32
