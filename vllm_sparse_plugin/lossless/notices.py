"""Notices about an engine in lossless mode that depend on more than its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_sparse_plugin.config import KEY, DraftRule, ResolvedConfig
from vllm_sparse_plugin.lossless.speculation import other_scheduler

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def lossless_notices(vllm_config: VllmConfig, config: ResolvedConfig) -> list[str]:
    """Returns the sentences that apply to an engine; none without lossless mode.

    Args:
        vllm_config: vLLM's configuration, with the sizes of its CUDA graphs.
        config: the settings of the plugin.
    """
    if config.draft_rule is None:
        return []
    sentences = _about_scheduler(vllm_config, config.draft_rule), _about_graphs(vllm_config, config.draft_rule)
    return [sentence for sentence in sentences if sentence is not None]


def _about_scheduler(vllm_config: VllmConfig, rule: DraftRule) -> str | None:
    other = other_scheduler(vllm_config)
    if other is None:
        return None
    return (
        f"{KEY}.lossless.draft_length: {other} every decoding request drafts and verifies {rule.draft_tokens} tokens "
        "in each step on a GPU, even if drafts gain nothing."
    )


def _about_graphs(vllm_config: VllmConfig, rule: DraftRule) -> str | None:
    from vllm.config import CUDAGraphMode

    compilation, requests = vllm_config.compilation_config, vllm_config.scheduler_config.max_num_seqs
    largest, width = compilation.max_cudagraph_capture_size or 0, 1 + rule.draft_tokens
    if compilation.cudagraph_mode.decode_mode() != CUDAGraphMode.FULL or largest >= requests * width:
        return None
    return (
        f"max_cudagraph_capture_size: {largest} holds {largest // width} requests of {rule.draft_tokens} drafts each; "
        f"larger batches (max_num_seqs is {requests}) verify that many drafts outside of CUDA graphs; set it to "
        f"{requests * width}, or lower max_num_seqs or draft_tokens."
    )
