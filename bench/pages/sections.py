"""The blocks that pages may hold, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


SECTIONS: dict[str, Section] = {
    "configuration": Section(settings.configuration),
    "presets": Section(settings.presets, may_be_unused=True),
    "statistics-memory": Section(settings.statistics_memory),
    "needles": Section(quality.needles),
    "readme-answers": Section(quality.answers_in_short),
    "look-alikes": Section(quality.look_alikes),
    "accuracy-gpu": Section(quality.accuracy_gpu),
    "versions-gpu": Section(quality.versions_gpu),
    "formats": Section(quality.formats),
    "served": Section(quality.served),
    "next-tokens": Section(quality.next_tokens),
    "tuned": Section(quality.tuned),
    "frontier": Section(frontier.frontier),
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
    "meter-gpu": Section(serving.meter_gpu),
    "decode-gpu": Section(serving.decode_gpu),
    "decode-newer": Section(serving.decode_newer),
    "decode-batches": Section(serving.decode_batches),
    "decode-routed": Section(serving.decode_routed),
    "decode-more": Section(serving.decode_more),
    "decode-stopping": Section(serving.decode_stopping),
    "lossless-adaptive": Section(serving.lossless_adaptive),
    "verification": Section(kernels.verification),
    "serve-gpu": Section(serving.serve_gpu),
    "serve-prefill": Section(serving.serve_prefill),
    "serve-few-clients": Section(serving.serve_few_clients),
    "prefill-gpu": Section(prefill.prefill_gpu),
    "zipvl-gpu": Section(prefill.zipvl_gpu),
    "prefill-kernels": Section(kernels.prefill_kernels),
    "kernels-gpu": Section(kernels.kernels_gpu),
    "kernels-budgets": Section(kernels.kernels_budgets),
    "budgets-by-request": Section(kernels.budgets_by_request),
    "coverage-cost": Section(kernels.coverage_cost),
    "kernels-groups": Section(kernels.kernels_groups),
    "routing-gpu": Section(kernels.routing_gpu),
    "stop-gpu": Section(kernels.stop_gpu),
    "compaction-answers": Section(compaction.answers),
    "trained-served": Section(quality.trained_served),
    "training-passes": Section(training.passes),
    "training-steps": Section(training.steps),
    "compaction-users": Section(compaction.users),
    "compaction-soak": Section(compaction.soak),
    "compaction-time": Section(compaction.times),
    "compaction-identical": Section(compaction.identical),
    "compaction-stream": Section(compaction.streams),
    "families": Section(families.families),
    "features": Section(families.features),
    "deployments": Section(deployments.deployments),
}
