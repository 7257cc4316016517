"""The number of pages that each request of a step reads, also in tensors that CUDA graphs may read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_plugin.config import ResolvedConfig
from vllm_sparse_plugin.requests.arguments import EVERY_PAGE, PAGES, takes_budgets
from vllm_sparse_plugin.requests.rows import BatchRows


def requested_pages(rows: BatchRows | None, common: CommonAttentionMetadata) -> list[int | None]:
    """Returns the pages that each request of a step asks for, in order; None for a request that asks for nothing.

    The list is empty if no request asks. Rows that pad the batch are left out.

    Args:
        rows: the requests of the batches; None if requests cannot ask for anything.
        common: the step.
    """
    requested = [] if rows is None else [each.get(PAGES) for each in rows.arguments(common)]
    # A dummy run may be smaller than the last batch of the runner.
    return requested[: common.num_reqs] if any(requested) else []


class StepNumbers:
    """One number per request of a step, in a tensor that is never reallocated."""

    def __init__(self, default: float, count: int, dtype: torch.dtype, device: torch.device) -> None:
        """Fills the tensor with the default.

        Args:
            default: the number of a request that asks for nothing.
            count: the most requests of a step.
            dtype: the dtype of the tensor.
            device: the device of the tensor.
        """
        self.tensor = torch.full((count,), default, dtype=dtype, device=device)
        self._default = default
        self._written: list[float] = []

    def write(self, numbers: Sequence[float]) -> None:
        """Writes the numbers of a step's first requests if they have changed; other requests get the default."""
        wanted = list(numbers)
        while wanted and wanted[-1] == self._default:
            wanted.pop()
        if wanted == self._written:
            return
        every = [*wanted, *[self._default] * (len(self.tensor) - len(wanted))]
        # Each copy has a new host tensor: torch does not reuse its memory before the copy ends.
        host = torch.tensor(every, dtype=self.tensor.dtype, pin_memory=self.tensor.is_cuda)
        self.tensor.copy_(host, non_blocking=True)
        self._written = wanted


class StepBudgets:
    """The number of pages that each request of a step reads, in a tensor that CUDA graphs may read."""

    numbers: StepNumbers | None = None
    """Complete pages that each request reads; None if requests cannot set a budget."""

    def __init__(self, config: ResolvedConfig, rows: BatchRows | None, max_requests: int, device: torch.device) -> None:
        """Allocates the tensor.

        Args:
            config: the settings of the server.
            rows: see `requested_pages`.
            max_requests: the most requests of a step.
            device: the device of the tensor.
        """
        self._rows = rows
        self._default = EVERY_PAGE if config.selector is None else config.selector.budget_pages
        if config.selector is not None and takes_budgets(config):
            self.numbers = StepNumbers(self._default, max_requests, torch.int32, device)

    def step(self, common: CommonAttentionMetadata) -> Sequence[int | None]:
        """Writes the budgets of a step's requests; returns what they ask for, see `requested_pages`."""
        requested = requested_pages(self._rows, common)
        if self.numbers is not None:
            # A request that reads everything attends densely, with any budget.
            self.numbers.write([self._default if each in (None, EVERY_PAGE) else each for each in requested])
        return requested

    def by_request(self, asked: Sequence[int | None], num_reqs: int) -> NDArray[np.int64] | None:
        """Returns the pages that each request of a step reads, `[num_reqs]`; None if no request asks.

        Args:
            asked: the result of `step`.
            num_reqs: requests of the step, padding included.
        """
        if not asked:
            return None
        pages = np.full(num_reqs, self._default, dtype=np.int64)
        pages[: len(asked)] = [self._default if each is None else each for each in asked]
        return pages
