"""How much of the KV cache the decode steps of an engine in this process read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_sparse_plugin.config import KEY, ResolvedConfig, resolve
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
    """What vLLM adds to its workers, so that an engine can be asked for what its kernels have counted."""

    def sparse_count_totals(self) -> dict[str, tuple[float, int]]:
        """Sum and count of every metric that this worker's kernels count."""
        return count_totals()


def resolve_arguments(arguments: Mapping[str, Any], trained: Mapping[str, Any] | None = None) -> ResolvedConfig | None:
    """The configuration that arguments of `vllm.LLM` ask for; None for a backend that is not ours.

    Args:
        arguments: of `vllm.LLM`.
        trained: the section that the model's config.json has, if any.

    Raises:
        ConfigurationError: as `resolve`.
    """
    preset = BACKENDS.get(str(arguments.get("attention_backend")).upper())
    if preset is None:
        return None
    additional = arguments.get("additional_config")
    return resolve(additional.get(KEY) if isinstance(additional, Mapping) else None, preset, trained)


@dataclass(frozen=True)
class ReadShare:
    """The share of the cached keys and values that decode steps read, over the layers of a model.

    Kernels count what routing skips and where attention stops; a selection without these reads what its settings say,
    page statistics included. In lossless mode the steps that answer read everything; drafts do not count.
    """

    config: ResolvedConfig | None
    """None for vLLM's own attention, which reads everything."""
    num_layers: int
    """Layers of the model; all are taken to be of full attention."""
    head_size: int
    """Elements of a head."""

    @property
    def is_counted(self) -> bool:
        """Whether the share depends on what kernels count."""
        return self.config is not None and bool(self.config.routing or self.config.stop_rule or self.config.coverage)

    def of(self, context_tokens: int, before: Sequence[Totals], after: Sequence[Totals]) -> float:
        """The share that some decode steps read.

        Args:
            context_tokens: length of their context.
            before: what each worker had counted before them; empty if nothing is counted.
            after: the same after them.
        """
        if self.config is None or self.config.lossless is not None:
            return 1.0
        selecting = self.config.selection.kv_read_share(context_tokens, self.head_size)
        if self.config.stop_rule is not None or self.config.coverage is not None:
            selecting = _ratio(_TOKENS_READ, before, after, default=selecting)
        attending = 1 - _ratio(_SKIPPED, before, after, default=0.0) if self.config.routing else 1.0
        routed_from = self.config.routing.dense_layers if self.config.routing else 0
        layers = range(self.num_layers)
        return sum(
            (selecting if layer >= self.config.config.first_dense_layers else 1.0)
            * (attending if layer >= routed_from else 1.0)
            for layer in layers
        ) / len(layers)


def _ratio(name: str, before: Sequence[Totals], after: Sequence[Totals], default: float) -> float:
    """By how much a metric's sum has grown for each by which its count has."""

    def grown(column: int) -> float:
        return sum(worker[name][column] for worker in after if name in worker) - sum(
            worker[name][column] for worker in before if name in worker
        )

    return grown(0) / grown(1) if grown(1) else default
