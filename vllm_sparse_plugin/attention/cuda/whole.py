"""Lists the long dense requests of a decode step, so that all thread blocks share them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from numpy.typing import NDArray
from sparse_kernels.batch import WHOLE_TOKENS, LongDenseRequests

from vllm_sparse_plugin.requests.limits import StepNumbers

WHOLE_SCRATCH = 64 * 2**20
"""Bytes of scratch: 63 requests of a layer with 32 query heads of 128 elements."""


class LayerHeads(NamedTuple):
    """The attention heads of a layer."""

    num_kv_heads: int
    group_size: int
    head_size: int


class WholeList:
    """The list of long dense requests, in tensors that CUDA graphs may read."""

    def __init__(
        self,
        layers: Iterable[LayerHeads],
        tokens_per_request: int,
        dense_tokens: int,
        device: torch.device,
        runner: Any | None = None,
    ) -> None:
        """Allocates the tensors.

        Args:
            layers: the layers that select pages in decode steps; at least one.
            tokens_per_request: the most query tokens of a decoding request.
            dense_tokens: contexts of up to this many tokens attend densely.
            device: the device of the tensors.
            runner: the model runner, whose lists share the scratch; None for a scratch of this list.
        """
        heads, numbers = set(layers), WHOLE_SCRATCH // 4
        self.most = min(
            numbers // LongDenseRequests.scratch_numbers(tokens_per_request * kv_heads, group, size)
            for kv_heads, group, size in heads
        )
        rows = tokens_per_request * max(each.num_kv_heads for each in heads)
        self._scratch = _scratch_of(runner, device) if self.most else torch.empty(0, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(
            LongDenseRequests.arrived_numbers(self.most, rows), dtype=torch.int32, device=device
        )
        self._listed = StepNumbers(0, 1 + self.most, torch.int32, device)
        self._dense_tokens, self._tokens_per_request = dense_tokens, tokens_per_request

    def write(self, dense: NDArray[np.bool_], longest: NDArray[np.int32] | None) -> None:
        """Lists the long requests of a step.

        Args:
            dense: `[num_requests]` bool, requests that attend densely at any length.
            longest: upper bounds of the contexts, in tokens; None if they are not known.
        """
        may_be_long = dense
        if longest is not None:
            # The requests that pad a batch may have no bound.
            count = min(len(dense), len(longest))
            longest = longest[:count]
            # A bound counts all drafts of a step as accepted.
            shortest = longest - 2 * self._tokens_per_request
            may_be_long = (longest > WHOLE_TOKENS) & (dense[:count] | (shortest <= self._dense_tokens))
        listed = np.flatnonzero(may_be_long)[: self.most].tolist()
        self._listed.write([len(listed), *listed])

    def of_run(self, first_request: int) -> LongDenseRequests | None:
        """Returns the list for decoding requests from `first_request` on; None if there is no room for a request."""
        if not self.most:
            return None
        return LongDenseRequests(self._listed.tensor, self._scratch, self._arrived, first_request)


_scratches: WeakKeyDictionary[Any, ref[torch.Tensor]] = WeakKeyDictionary()
"""The scratch of each model runner, as long as a list has it."""


def _scratch_of(runner: Any | None, device: torch.device) -> torch.Tensor:
    """Returns the scratch of a model runner, whose layers run one after the other; a new one without a runner."""
    known = None if runner is None or runner not in _scratches else _scratches[runner]()
    if known is not None:
        return known
    made = torch.empty(WHOLE_SCRATCH // 4, dtype=torch.float32, device=device)
    if runner is not None:
        _scratches[runner] = ref(made)
    return made
