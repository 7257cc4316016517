"""Shares that decode steps of an engine in this process read, and that its KV cache keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_sparse_plugin.config import KEY, ResolvedConfig, resolve
from vllm_sparse_plugin.config.account import Counted, ModelKeys, Shares
from vllm_sparse_plugin.metrics.live import READS, SKIPPED, count_totals
from vllm_sparse_plugin.names import BACKENDS

COUNTING_WORKER = "vllm_sparse_plugin.tools.eval.reading.CountingWorker"
"""For vLLM's `worker_extension_cls`."""
COUNT_METHOD = "sparse_count_totals"
"""The method of `CountingWorker`, for `LLM.collective_rpc`."""
Totals = Mapping[str, tuple[float, int]]
"""Sum and count of metrics by their names."""
_SKIPPED = SKIPPED[0].name
_TOKENS_READ = READS[1].name


class CountingWorker:
    """A vLLM worker extension. It returns the counts of the worker's kernels."""

    def sparse_count_totals(self) -> dict[str, tuple[float, int]]:
        """Return the sum and count of every metric that this worker's kernels count."""
        return count_totals()


def resolve_arguments(arguments: Mapping[str, Any], trained: Mapping[str, Any] | None = None) -> ResolvedConfig | None:
    """Return the configuration in arguments of `vllm.LLM`; None for a backend of another package.

    Args:
        arguments: of `vllm.LLM`.
        trained: the section in the model's config.json, if any.

    Raises:
        ConfigurationError: as `resolve`.
    """
    preset = BACKENDS.get(str(arguments.get("attention_backend")).upper())
    if preset is None:
        return None
    additional = arguments.get("additional_config")
    return resolve(additional.get(KEY) if isinstance(additional, Mapping) else None, preset, trained)


@dataclass(frozen=True)
class EngineShares:
    """Shares that the decode steps of an engine read and its cache keeps, over the layers of a model.

    Kernels count skipped groups and stops. The rest follows from lengths, see `config.account`.
    """

    keys: ModelKeys

    @property
    def is_counted(self) -> bool:
        """Whether the shares depend on kernel counts."""
        return not self.keys.by_length

    def of(
        self, prompt_tokens: int, decoded_tokens: int, before: Sequence[Totals], after: Sequence[Totals]
    ) -> Shares | None:
        """Return the shares of a request; None if they depend on counts and no worker counts.

        Args:
            prompt_tokens: length of the prompt.
            decoded_tokens: number of decoded tokens.
            before: counts of each worker before them; empty if nothing is counted.
            after: counts of each worker after them.
        """
        if self.is_counted and not after:
            return None
        skipped = _ratio(_SKIPPED, before, after)
        return self.keys.shares(
            prompt_tokens, decoded_tokens, Counted(_ratio(_TOKENS_READ, before, after), skipped or 0.0)
        )


def _ratio(name: str, before: Sequence[Totals], after: Sequence[Totals]) -> float | None:
    """Return the growth of a metric's sum divided by that of its count; None if nothing was counted."""

    def grown(column: int) -> float:
        return sum(worker[name][column] for worker in after if name in worker) - sum(
            worker[name][column] for worker in before if name in worker
        )

    return grown(0) / grown(1) if grown(1) else None
