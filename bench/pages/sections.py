"""The blocks that pages may hold, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench.common.pages import Block
from bench.pages import (
    compaction,
    deployments,
    families,
    frontier,
    kernels,
    prefill,
    quality,
    real,
    recipes,
    serving,
    settings,
    states,
    training,
)

SECTIONS: Mapping[str, Callable[[], Block]] = {
    "configuration": settings.configuration,
    "statistics-memory": settings.statistics_memory,
    "readme-answers": quality.answers_in_short,
    "look-alikes": quality.look_alikes,
    "accuracy-gpu": quality.accuracy_gpu,
    "real-decode": real.decode,
    "real-prefill": real.prefill,
    "real-answers": real.answers,
    "real-routing": real.routing,
    "served": quality.served,
    "recipe-gains": recipes.recipe_gains,
    "frontier": frontier.frontier,
    "lossless-answers": quality.lossless_answers,
    "mixes": quality.mixes,
    "stopped-answers": quality.stopped_answers,
    "calibrated": quality.calibrated,
    "fuzz": states.fuzz,
    "soak": states.soak,
    "decode": serving.decode_cpu,
    "meter": serving.meter,
    "decode-gpu": serving.decode_gpu,
    "decode-steps": serving.decode_steps,
    "loads": serving.loads,
    "decode-routed": serving.decode_routed,
    "decode-stopping": serving.decode_stopping,
    "lossless-adaptive": serving.lossless_adaptive,
    "serving": serving.serving,
    "serve-prefill": serving.serve_prefill,
    "prefill-gpu": prefill.prefill_gpu,
    "zipvl-gpu": prefill.zipvl_gpu,
    "kernels-gpu": kernels.kernels_gpu,
    "budgets-by-request": kernels.budgets_by_request,
    "coverage-cost": kernels.coverage_cost,
    "stop-gpu": kernels.stop_gpu,
    "compaction-answers": compaction.answers,
    "trained-served": quality.trained_served,
    "training-passes": training.passes,
    "training-steps": training.steps,
    "compaction-speed": compaction.speed,
    "compaction-checks": compaction.checks,
    "compaction-stream": compaction.streams,
    "families": families.families,
    "deployments": deployments.deployments,
}
"""The function that makes each block."""
