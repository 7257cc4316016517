"""Connects metadata builders to the meter of the engine: the sampled tokens of a step, and the log of reads."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import zip_longest

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_plugin.config import ResolvedConfig
from vllm_sparse_plugin.config.schema import SAMPLED_STEPS, SAMPLED_STEPS_ON_GPU
from vllm_sparse_plugin.metrics import request_log, sampling
from vllm_sparse_plugin.metrics.live import LogOfStep
from vllm_sparse_plugin.metrics.sampling import Sample, StepSampler
from vllm_sparse_plugin.requests import rows


def sampled_steps(sparse: ResolvedConfig) -> int:
    """Returns the sampling interval in steps: one step in so many is measured. 0 for never.

    Lossless mode is not measured, because dense attention computes its answers. With offloading, a measurement would
    read the whole context over the bus.
    """
    from vllm.platforms import current_platform

    if sparse.selector is None or sparse.lossless is not None:
        return 0
    every = sparse.config.diagnostics.sample_every
    if every is not None:
        return every
    if current_platform.is_cpu():
        return SAMPLED_STEPS
    if sparse.offload is not None:
        return 0
    # To find the stop again, torch needs at least one launch per test interval of a context, and waits for the device.
    return SAMPLED_STEPS_ON_GPU if sparse.stop_rule is None else 0


class Meter:
    """Connects a group of layers to the meter of their model runner. All groups share one meter."""

    def __init__(self, sparse: ResolvedConfig, vllm_config: VllmConfig, longest_query: int) -> None:
        """Finds the meter of the model runner that is loading.

        Args:
            sparse: the settings of the plugin.
            vllm_config: vLLM's configuration.
            longest_query: the most query tokens of a decoding request.
        """
        runner, parallel = rows.loading_runner(), vllm_config.parallel_config
        # If one data-parallel engine runs without its full graph, all of them do.
        every = sampled_steps(sparse) * parallel.data_parallel_size
        shortest = sparse.config.min_context_tokens
        if sparse.selector is not None:
            shortest = max(shortest, (sparse.selector.pages_read.least + 1) * sparse.selector.page_size)
        self.sampler = sampling.of_runner(runner, StepSampler(every, shortest, longest_query))
        logs = sparse.config.diagnostics.log_requests and sparse.lossless is None and parallel.rank == 0
        self._log = request_log.of_runner(runner) if logs and runner is not None else None
        self._rows = rows.current_if_any()

    @property
    def sample(self) -> Sample | None:
        """The measurement of this step; None for none."""
        return self.sampler.sample

    def log_of(self, common: CommonAttentionMetadata, covers: Iterable[bool] = ()) -> LogOfStep | None:
        """Returns a function that logs the reads of a step; None if requests are not logged, or not on this worker.

        Args:
            common: the step.
            covers: per row, whether a coverage decides how much it reads. Such rows are not logged, because lengths do
                not give their reads. Rows beyond the end have no coverage.
        """
        if self._log is None or self._rows is None:
            return None
        names = [None if row is None else row.request_id for row in self._rows.of(common)]
        names = [None if unknown else name for name, unknown in zip_longest(names, covers, fillvalue=None)]
        return partial(self._log.add, names)

    def masses_of(self, common: CommonAttentionMetadata, row: int) -> torch.Tensor | None:
        """Returns the sums of the estimated masses of a row's request; None if they are not logged."""
        if self._log is None or self._rows is None:
            return None
        known = self._rows.of(common)
        request = known[row] if row < len(known) else None
        return None if request is None else self._log.masses(request.request_id, common.seq_lens.device)
