"""The blocks that pages may hold, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common.pages import Block
from bench.pages import (
    compaction,
    deployments,
    families,
    frontier,
    kernels,
    prefill,
    quality,
    serving,
    settings,
    states,
    training,
)


@dataclass(frozen=True)
class Section:
    """A block that pages may hold."""

    make: Callable[[], Block]
    """Makes the block."""
    may_be_unused: bool = False
    """Whether it is no mistake that no page holds it."""
    waits_for: Sequence[Path] = ()
    """Result files of runs that are still to be made: until all of them are there, the block is empty."""

    def block(self) -> Block:
        """Makes the block, without a text while it waits."""
        return self.make() if all(path.exists() for path in self.waits_for) else Block("")


SECTIONS: dict[str, Section] = {
    "configuration": Section(settings.configuration),
    "presets": Section(settings.presets, may_be_unused=True),
    "statistics-memory": Section(settings.statistics_memory),
    "needles": Section(quality.needles),
    "readme-answers": Section(quality.answers_in_short),
    "look-alikes": Section(quality.look_alikes),
    "accuracy-gpu": Section(quality.accuracy_gpu),
    "formats": Section(quality.formats),
    "served": Section(quality.served),
    "next-tokens": Section(quality.next_tokens),
    "tuned": Section(quality.tuned),
    "frontier": Section(frontier.frontier, waits_for=frontier.AWAITED),
    "lossless": Section(quality.lossless),
    "lossless-answers-gpu": Section(quality.lossless_answers_gpu),
    "mixes": Section(quality.mixes),
    "stopped-answers": Section(quality.stopped_answers),
    "calibrated": Section(quality.calibrated),
    "first-values": Section(quality.first_values),
    "fuzz": Section(states.fuzz),
    "soak": Section(states.soak),
    "decode": Section(serving.decode_cpu),
    "operations": Section(serving.operations),
    "threads-cpu": Section(serving.threads_cpu),
    "meter": Section(serving.meter),
    "meter-gpu": Section(serving.meter_gpu, waits_for=serving.METER),
    "decode-gpu": Section(serving.decode_gpu),
    "decode-batches": Section(serving.decode_batches),
    "decode-routed": Section(serving.decode_routed),
    "decode-more": Section(serving.decode_more),
    "decode-stopping": Section(serving.decode_stopping),
    "lossless-gpu": Section(serving.lossless_gpu),
    "lossless-adaptive": Section(serving.lossless_adaptive, waits_for=[serving.ADAPTIVE]),
    "serve-gpu": Section(serving.serve_gpu),
    "serve-prefill": Section(serving.serve_prefill),
    "serve-few-clients": Section(serving.serve_few_clients, waits_for=[serving.FEW_CLIENTS]),
    "prefill-gpu": Section(prefill.prefill_gpu),
    "zipvl-gpu": Section(prefill.zipvl_gpu, waits_for=[prefill.ZIPVL]),
    "prefill-kernels": Section(kernels.prefill_kernels),
    "kernels-gpu": Section(kernels.kernels_gpu),
    "kernels-budgets": Section(kernels.kernels_budgets),
    "budgets-by-request": Section(kernels.budgets_by_request, waits_for=[kernels.BUDGETS]),
    "coverage-cost": Section(kernels.coverage_cost, waits_for=[kernels.COVERAGE]),
    "kernels-groups": Section(kernels.kernels_groups),
    "routing-gpu": Section(kernels.routing_gpu),
    "stop-gpu": Section(kernels.stop_gpu),
    "compaction-answers": Section(compaction.answers),
    "training-passes": Section(training.passes),
    "training-steps": Section(training.steps),
    "compaction-users": Section(compaction.users),
    "compaction-soak": Section(compaction.soak, waits_for=[compaction.SOAK]),
    "compaction-time": Section(compaction.times),
    "compaction-identical": Section(compaction.identical),
    "compaction-stream": Section(compaction.streams),
    "families": Section(families.families),
    "features": Section(families.features),
    "deployments": Section(deployments.deployments),
}
