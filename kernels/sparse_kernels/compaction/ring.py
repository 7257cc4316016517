"""Keeps the newest queries of each request, so that they can vote later."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


class QueryRing:
    """The newest queries of some requests in all layers, in tensors that are never reallocated.

    A query is at its position modulo the length of the ring. CUDA graphs may write to the ring.
    """

    def __init__(
        self, num_layers: int, slots: int, length: int, query: tuple[int, int], tokens: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Allocates the tensors.

        Args:
            num_layers: number of layers.
            slots: the most requests that have queries in the ring.
            length: queries of each request.
            query: query heads, and their size.
            tokens: the most query tokens of a step.
            dtype: of queries.
            device: of queries.
        """
        self.slots = slots
        self.length = length
        self._queries = torch.zeros(num_layers, slots, length, *query, dtype=dtype, device=device)
        self._places = torch.full((tokens,), -1, dtype=torch.int32, device=device)
        self._written = 0

    @staticmethod
    def place(slot: int, position: int, length: int) -> int:
        """Returns the place of a query for `begin_step`."""
        return slot * length + position % length

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of queries."""
        return self._queries.dtype

    def begin_step(self, places: NDArray[np.int32]) -> None:
        """Sets where the queries of a step go.

        Args:
            places: `[num_tokens]`, `place` of each query token; -1 for none.
        """
        kept = np.flatnonzero(places >= 0)
        used = int(kept[-1]) + 1 if len(kept) else 0
        count = max(used, self._written)
        if not count:
            return
        # A new host tensor for each copy: torch does not reuse its memory before the copy ends.
        host = torch.full((count,), -1, dtype=torch.int32, pin_memory=self._places.is_cuda)
        host[:used] = torch.from_numpy(places[:used])
        self._places[:count].copy_(host, non_blocking=True)
        self._written = used

    def write(self, layer: int, query: torch.Tensor) -> None:
        """Keeps the queries of a layer that have a place.

        Args:
            layer: number of the layer.
            query: `[num_tokens, num_heads, head_size]`; the tokens may end with padding.
        """
        places, ring = self._places[: len(query)], self._queries[layer]
        if query.is_cuda:
            from sparse_kernels.compaction import held_triton

            held_triton.write_queries(query, places, ring)
            return
        tokens = (places >= 0).nonzero()[:, 0]
        if len(tokens):
            ring.flatten(0, 1)[places[tokens].long()] = query[tokens]

    def newest(self, slot: int, end: int, count: int) -> torch.Tensor:
        """Copies consecutive queries.

        Args:
            slot: of the request.
            end: end of their positions.
            count: number of queries, at most the length of the ring.

        Returns:
            `[num_layers, count, num_heads, head_size]`.
        """
        of_request, first = self._queries[:, slot], (end - count) % self.length
        until = min(first + count, self.length)
        return torch.cat([of_request[:, first:until], of_request[:, : first + count - until]], dim=1)
