"""The number of pages that each request of a step reads, also in tensors that CUDA graphs may read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_plugin.config import ResolvedConfig
from vllm_sparse_plugin.requests.arguments import EVERY_PAGE, READS, pages_of_request, takes_budgets
from vllm_sparse_plugin.requests.rows import BatchRows

logger = init_logger(f"vllm.{__name__}")
_MOST_KNOWN = 1024
"""Arguments whose reads a worker remembers. Clients may name any number of wrong values."""


class RequestedPages:
    """The complete pages that the requests of a step ask for."""

    def __init__(self, config: ResolvedConfig, rows: BatchRows | None, on_gpu: bool) -> None:
        """Initialises without requests.

        Args:
            config: the settings of the server.
            rows: the requests of the batches; None if requests cannot ask for anything.
            on_gpu: whether the server runs on a GPU.
        """
        self._config, self._rows, self._on_gpu = config, rows, on_gpu
        self._known: dict[tuple[Any, ...], int | None] = {}

    def of_step(self, common: CommonAttentionMetadata) -> list[int | None]:
        """Returns the pages that each request of a step asks for, in order; None for a request that asks for nothing.

        The list is empty if no request asks. Rows that pad the batch are left out.
        """
        arguments = [] if self._rows is None else self._rows.arguments(common)
        requested = [self._look_up(each) if each else None for each in arguments]
        # A dummy run may be smaller than the last batch of the runner.
        return requested[: common.num_reqs] if any(requested) else []

    def _look_up(self, arguments: Mapping[str, Any]) -> int | None:
        values = tuple(arguments.get(name) for name in READS)
        try:
            key = tuple(map(repr, values))
        except ValueError:
            # Python refuses to print integers of more than 4,300 digits. No budget is as large.
            return None
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            try:
                self._known[key] = pages_of_request(arguments, self._config, on_gpu=self._on_gpu)
            except ValueError as error:
                # The frontend refuses such a request. A request that skipped the check must not end the engine for
                # others.
                logger.warning("%s; the request runs with the settings of the server", error)
                self._known[key] = None
        return self._known[key]


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
            rows: see `RequestedPages`.
            max_requests: the most requests of a step.
            device: the device of the tensor.
        """
        self._requested = RequestedPages(config, rows, on_gpu=True)
        self._default = EVERY_PAGE if config.selector is None else config.selector.budget_pages
        if config.selector is not None and takes_budgets(config):
            self.numbers = StepNumbers(self._default, max_requests, torch.int32, device)

    def step(self, common: CommonAttentionMetadata) -> Sequence[int | None]:
        """Writes the budgets of a step's requests; returns what they ask for, see `RequestedPages.of_step`."""
        requested = self._requested.of_step(common)
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
