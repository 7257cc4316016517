"""Shares that decode steps of an engine in this process read, and that its KV cache keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def shares_of(
    keys: ModelKeys, prompt_tokens: int, decoded_tokens: int, before: Sequence[Totals], after: Sequence[Totals]
) -> Shares | None:
    """Return the shares of a request; None if they depend on counts of kernels and no worker counts.

    Kernels count skipped groups and stops. The rest follows from lengths, see `config.account`.

    Args:
        keys: of the model.
        prompt_tokens: length of the prompt.
        decoded_tokens: number of decoded tokens.
        before: counts of each worker before them; empty if nothing is counted.
        after: counts of each worker after them.
    """
    if not keys.by_length and not after:
        return None
    counted = Counted(_ratio(_TOKENS_READ, before, after), _ratio(_SKIPPED, before, after) or 0.0)
    return keys.shares(prompt_tokens, decoded_tokens, counted)


def _ratio(name: str, before: Sequence[Totals], after: Sequence[Totals]) -> float | None:
    """Return the growth of a metric's sum divided by that of its count; None if nothing was counted."""
    grown = [0.0, 0.0]
    for workers, sign in ((after, 1), (before, -1)):
        for worker in workers:
            for column, value in enumerate(worker.get(name, (0, 0))):
                grown[column] += sign * value
    return grown[0] / grown[1] if grown[1] else None
