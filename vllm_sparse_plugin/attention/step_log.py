"""Connects metadata builders to the log of what requests read."""

from __future__ import annotations

from functools import partial

from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_plugin.config import ResolvedConfig
from vllm_sparse_plugin.metrics import request_log
from vllm_sparse_plugin.metrics.live import LogOfStep
from vllm_sparse_plugin.requests import rows


class StepLog:
    """Connects a group of layers to the log of their model runner, if the settings and this worker have one."""

    def __init__(self, sparse: ResolvedConfig, vllm_config: VllmConfig) -> None:
        """Finds the log of the model runner that is loading."""
        runner = rows.loading_runner()
        logs = sparse.config.diagnostics.log_requests and vllm_config.parallel_config.rank == 0
        self._log = request_log.of_runner(runner) if logs and runner is not None else None
        self._rows = rows.current_if_any()

    def of(self, common: CommonAttentionMetadata) -> LogOfStep | None:
        """Returns a function that logs the reads of a step; None if requests are not logged, or not on this worker."""
        if self._log is None or self._rows is None:
            return None
        names = [None if row is None else row.request_id for row in self._rows.of(common)]
        return partial(self._log.add, names)
