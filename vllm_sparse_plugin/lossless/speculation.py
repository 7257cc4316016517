"""Has vLLM speculate in lossless mode, though the user has set up no speculation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_sparse_plugin.compat import DRAFTING_METHOD
from vllm_sparse_plugin.names import DRAFTER

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_sparse_plugin.config import Lossless


def speculate(vllm_config: VllmConfig, lossless: Lossless) -> None:
    """Fills in the configuration of speculation. Scheduler, rejection sampler and metrics follow from it."""
    from vllm.config import SpeculativeConfig

    vllm_config.speculative_config = SpeculativeConfig(
        method=DRAFTING_METHOD,
        model=DRAFTER,
        num_speculative_tokens=lossless.draft_tokens,
        target_model_config=vllm_config.model_config,
        target_parallel_config=vllm_config.parallel_config,
    )
