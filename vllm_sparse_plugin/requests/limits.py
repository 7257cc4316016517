"""Keeps what the requests of a step read where captured CUDA graphs find it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sparse_kernels.page_coverage import Coverage
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_plugin.config import ResolvedConfig
from vllm_sparse_plugin.policies.base import PagesRead
from vllm_sparse_plugin.requests.arguments import ARGUMENTS, EVERY_PAGE, pages_of_request, takes_budgets
from vllm_sparse_plugin.requests.rows import BatchRows


class StepNumbers:
    """A number for each request of a step, in a tensor that is never reallocated."""

    def __init__(self, usual: float, count: int, dtype: torch.dtype, device: torch.device) -> None:
        """Takes the number of a request of which nothing is said, and the requests of a step at most."""
        self.tensor = torch.full((count,), usual, dtype=dtype, device=device)
        self._usual = usual
        self._written: list[float] = []

    def write(self, numbers: Sequence[float]) -> None:
        """Writes the numbers of a step's first requests, unless they are there; the others get the usual one."""
        wanted = list(numbers)
        while wanted and wanted[-1] == self._usual:
            wanted.pop()
        if wanted == self._written:
            return
        every = [*wanted, *[self._usual] * (len(self.tensor) - len(wanted))]
        # Memory of its own for each copy: torch gives it to nobody else before the copy is over.
        host = torch.tensor(every, dtype=self.tensor.dtype, pin_memory=self.tensor.is_cuda)
        self.tensor.copy_(host, non_blocking=True)
        self._written = wanted


class StepBudgets:
    """What the requests of a step say of the pages that they read."""

    pages: StepNumbers | None
    """Complete pages that a selection reads of each request; None where no request has a budget of its own, and under a
    coverage."""
    limits: tuple[StepNumbers, StepNumbers, StepNumbers] | None
    """Under a coverage the share of each request, and the pages that it reads at least and at most."""

    def __init__(self, config: ResolvedConfig, rows: BatchRows | None, max_requests: int, device: torch.device) -> None:
        """Takes our configuration, the requests of the batches, and how many of them a step has at most."""
        self._config, self._rows = config, rows
        self._pages_of: dict[tuple[Any, ...], PagesRead | None] = {}
        self._usual = EVERY_PAGE if config.selector is None else config.selector.budget_pages
        self.pages, self.limits = None, None
        if config.selector is not None and config.coverage is not None:
            read = config.selector.pages_read
            self.limits = (
                StepNumbers(read.share, max_requests, torch.float32, device),
                StepNumbers(read.least, max_requests, torch.int64, device),
                StepNumbers(read.most, max_requests, torch.int64, device),
            )
        elif config.selector is not None and takes_budgets(config):
            self.pages = StepNumbers(self._usual, max_requests, torch.int32, device)

    def step(self, common: CommonAttentionMetadata) -> Sequence[PagesRead | None]:
        """Writes the budgets of a step's requests.

        Returns:
            What each request reads, in order, None for what the settings say; empty if none says anything. Rows that
            pad the batch are left out.
        """
        arguments = [] if self._rows is None else self._rows.arguments(common)
        own = [self._look_up(each) if each else None for each in arguments]
        # A dummy run may be smaller than the batch that the runner still has.
        own = own[: common.num_reqs] if any(own) else []
        if self.pages is not None:
            # A request that reads everything is attended whole, whatever its budget.
            self.pages.write([self._usual if of is None or of.least >= EVERY_PAGE else of.most for of in own])
        if self.limits is not None:
            assert self._config.selector is not None
            usual = self._config.selector.pages_read
            given = [usual if of is None or of.least >= EVERY_PAGE else of for of in own]
            share, least, most = self.limits
            share.write([of.share for of in given])
            least.write([of.least for of in given])
            most.write([of.most for of in given])
        return own

    def coverage_of(self, requests: slice) -> Coverage | None:
        """Returns until what share some of the requests read; None without a coverage."""
        if self.limits is None:
            return None
        return Coverage(*(numbers.tensor[requests] for numbers in self.limits))

    def _look_up(self, arguments: Mapping[str, Any]) -> PagesRead | None:
        given = tuple(arguments.get(name) for name in ARGUMENTS)
        if given not in self._pages_of:
            self._pages_of[given] = pages_of_request(arguments, self._config, on_gpu=True)
        return self._pages_of[given]

    def by_request(self, own: Sequence[PagesRead | None], num_reqs: int) -> NDArray[np.int64] | None:
        """Returns the pages that each request of a step reads, `[num_reqs]`; None for those of the settings.

        Args:
            own: what `step` returned.
            num_reqs: requests of the step, those that pad it included.
        """
        if not own:
            return None
        pages = np.full(num_reqs, self._usual, dtype=np.int64)
        pages[: len(own)] = [self._usual if of is None else of.most for of in own]
        return pages
