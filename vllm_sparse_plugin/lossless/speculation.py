"""Has vLLM speculate in lossless mode, though the user has set up no speculation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_sparse_plugin import compat
from vllm_sparse_plugin.engine_settings import resolved
from vllm_sparse_plugin.names import DRAFTER, SCHEDULER

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def speculate_if_lossless(vllm_config: VllmConfig, backends: Mapping[str, str]) -> None:
    """Fills in the configuration of speculation, if lossless mode is asked for and nothing else speculates. Scheduler,
    rejection sampler, sizes of CUDA graphs and metrics follow from it.

    Args:
        vllm_config: vLLM's configuration while its defaults are being filled in.
        backends: our backends' names and presets.

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
        # Made with this method, it would look for a second model.
        speculative.method = compat.GPU_DRAFTING_METHOD
        scheduler = vllm_config.scheduler_config
        if scheduler.scheduler_cls is None and scheduler.async_scheduling:
            scheduler.scheduler_cls = SCHEDULER
    vllm_config.speculative_config = speculative


def other_scheduler(vllm_config: VllmConfig) -> str | None:
    """Returns how a GPU's steps are scheduled where the plugin does not say for whom and how much they draft: each then
    drafts and verifies `draft_tokens` for every request. None where the plugin says it, and on a CPU.

    Args:
        vllm_config: vLLM's configuration in lossless mode.
    """
    from vllm.platforms import current_platform

    scheduler = vllm_config.scheduler_config
    if not current_platform.is_cuda() or scheduler.scheduler_cls == SCHEDULER:
        return None
    if scheduler.scheduler_cls is not None:
        return f"with the scheduler {scheduler.scheduler_cls}"
    return "without asynchronous scheduling"
