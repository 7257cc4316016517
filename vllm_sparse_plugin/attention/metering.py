"""How an engine measures itself, as metadata builders see it: which token of a step, and whose reads are logged."""

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
    """Returns in one of how many steps tokens are measured; 0 for none, as in lossless mode, whose answers come of
    dense attention."""
    from vllm.platforms import current_platform

    if sparse.selector is None or sparse.lossless is not None:
        return 0
    every = sparse.config.diagnostics.sample_every
    if every is not None:
        return every
    if current_platform.is_cpu():
        return SAMPLED_STEPS
    # Looking for the stop again takes torch a launch or more to each block of a context, and waits for the device.
    return SAMPLED_STEPS_ON_GPU if sparse.stop_rule is None else 0


class Meter:
    """The part of a model runner's meter that a group of its layers needs; all groups share what it points to."""

    def __init__(self, sparse: ResolvedConfig, vllm_config: VllmConfig, longest_query: int) -> None:
        """Takes our configuration, vLLM's, and the most query tokens of a request that decodes."""
        runner, parallel = rows.loading_runner(), vllm_config.parallel_config
        # Where one data-parallel engine runs without its full graph, all of them do.
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
        """What is measured of the step that runs; None for nothing."""
        return self.sampler.sample

    def log_of(self, common: CommonAttentionMetadata, covers: Iterable[bool] = ()) -> LogOfStep | None:
        """Returns what logs a step; None where nobody asks for it, and on other workers than the first.

        Args:
            common: the step.
            covers: of the first rows, whether a coverage decides how much they read, which lengths do not tell; they
                are left out.
        """
        if self._log is None or self._rows is None:
            return None
        names = [None if row is None else row.request_id for row in self._rows.of(common)]
        names = [None if unknown else name for name, unknown in zip_longest(names, covers, fillvalue=None)]
        return partial(self._log.add, names)

    def masses_of(self, common: CommonAttentionMetadata, row: int) -> torch.Tensor | None:
        """Returns where estimated masses of a row's request are added up; None where nobody asks for them."""
        if self._log is None or self._rows is None:
            return None
        known = self._rows.of(common)
        request = known[row] if row < len(known) else None
        return None if request is None else self._log.masses(request.request_id, common.seq_lens.device)
