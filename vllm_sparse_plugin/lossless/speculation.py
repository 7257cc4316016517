"""Has vLLM speculate in lossless mode, though the user has set up no speculation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_sparse_plugin import compat
from vllm_sparse_plugin.engine_settings import resolved
from vllm_sparse_plugin.lossless.pace import lengths_of
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
        lengths = lengths_of(lossless.draft_tokens, scheduler.max_num_seqs)
        if lossless.draft_length == "adaptive" and len(lengths) > 1:
            # vLLM takes one length for each number of requests, and captures graphs of all lengths that it finds.
            schedule = [(requests, requests, length) for requests, length in enumerate(lengths, start=1)]
            speculative.num_speculative_tokens_per_batch_size = schedule
            scheduler.scheduler_cls = SCHEDULER
    vllm_config.speculative_config = speculative
