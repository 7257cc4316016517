"""Turns on vLLM's speculation for lossless mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_sparse_plugin import compat
from vllm_sparse_plugin.engine_settings import resolved
from vllm_sparse_plugin.names import DRAFTER, SCHEDULER

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def speculate_if_lossless(vllm_config: VllmConfig, backends: Mapping[str, str]) -> None:
    """Sets vLLM's speculative configuration for lossless mode, if no other speculation is set.

    vLLM derives the scheduler, the rejection sampler, the sizes of CUDA graphs and the metrics from it.

    Args:
        vllm_config: vLLM's configuration, while vLLM sets its defaults.
        backends: names and presets of this plugin's backends.

    Raises:
        ConfigurationError: if the settings are wrong.
    """
    from vllm.config import SpeculativeConfig
    from vllm.platforms import current_platform

    name, model = compat.chosen_backend(vllm_config, backends), vllm_config.model_config
    if name is None or model is None or model.runner_type == "draft" or vllm_config.speculative_config is not None:
        return
    lossless = resolved(vllm_config, backends[name]).lossless
    if lossless is None:
        return
    speculative = SpeculativeConfig(
        method=compat.DRAFTING_METHOD,
        model=DRAFTER,
        num_speculative_tokens=lossless.draft_tokens,
        target_model_config=model,
        target_parallel_config=vllm_config.parallel_config,
    )
    if current_platform.is_cuda():
        # vLLM would look for a second model if this method were given at construction.
        speculative.method = compat.GPU_DRAFTING_METHOD
        scheduler = vllm_config.scheduler_config
        if scheduler.scheduler_cls is None and scheduler.async_scheduling:
            scheduler.scheduler_cls = SCHEDULER
    vllm_config.speculative_config = speculative


def other_scheduler(vllm_config: VllmConfig) -> str | None:
    """Returns the reason why `PacedScheduler` does not schedule the steps on a GPU. Each step then drafts and verifies
    `draft_tokens` for every request.

    Args:
        vllm_config: vLLM's configuration in lossless mode.

    Returns:
        None if `PacedScheduler` schedules the steps, and on a CPU.
    """
    from vllm.platforms import current_platform

    scheduler = vllm_config.scheduler_config
    if not current_platform.is_cuda() or scheduler.scheduler_cls == SCHEDULER:
        return None
    if scheduler.scheduler_cls is not None:
        return f"with the scheduler {scheduler.scheduler_cls}"
    return "without asynchronous scheduling"
