"""Traits of an engine that some sections are not proven right with, in the words of their refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_sparse_plugin import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_FULL, _WINDOW = "full_attention", "sliding_attention"
"""Names of layers that attend to the whole context, and to a window of it, in `layer_types`."""
_EVERY = "attention"
"""Name of layers with attention in `layers_block_type`, beside those without."""


def architecture_of(vllm_config: VllmConfig) -> str:
    """Returns the names of the model's architectures."""
    return ", ".join(getattr(vllm_config.model_config.hf_config, "architectures", None) or ["unknown"])


def unlike_layers_or_engines(vllm_config: VllmConfig) -> Iterator[str]:
    """Yields the traits of models whose layers do not all attend to the whole context, and of engines in parts."""
    architecture = architecture_of(vllm_config)
    if vllm_config.model_config.is_hybrid:
        yield f"{architecture} with state-space layers"
    elif _layer_kinds(vllm_config) - {_FULL}:
        yield f"{architecture} with layers of a sliding window or a chunk"
    yield from engines_in_parts(vllm_config)


def engines_in_parts(vllm_config: VllmConfig) -> Iterator[str]:
    """Yields the traits of engines that split a model or its requests, or run several backends."""
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        yield f"{parallel.pipeline_parallel_size} pipeline stages"
    if parallel.data_parallel_size > 1:
        yield f"{parallel.data_parallel_size} data-parallel engines"
    if vllm_config.attention_config.backend_per_kind:
        yield "a backend by kind of attention"


def unmixed_blocks(vllm_config: VllmConfig) -> Iterator[str]:
    """Yields the traits of models in which no layer can give blocks back while others keep theirs."""
    kinds, architecture = _layer_kinds(vllm_config), architecture_of(vllm_config)
    if vllm_config.model_config.is_hybrid:
        if vllm_config.cache_config.enable_prefix_caching:
            # A hit needs the states of its last token too.
            yield f"{architecture} with state-space layers and prefix caching"
    elif _FULL not in kinds:
        yield f"{architecture} without a layer that attends to the whole context"
    elif kinds - {_FULL, _WINDOW}:
        # Their blocks of decoded tokens would be hits of prompts.
        yield f"{architecture} with layers of a chunk"
    elif kinds > {_FULL} and vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        # vLLM then gives all layers the blocks of those that attend to the whole context.
        yield f"{architecture} with layers of a sliding window and one block table for all layers"


def layers_over_everything(vllm_config: VllmConfig) -> int:
    """Returns how many layers of a worker attend to the whole context; all layers if the model does not tell.

    Layers without attention do not count: PyramidKV shares the budget among the others.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    text = model.hf_text_config
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    first, end = model.get_layers_start_end_indices(parallel) if kinds else (0, 0)
    if found := sum(kind in (_FULL, _EVERY) for kind in kinds[first:end]):
        return found
    # Pruned models have layers without attention in `block_configs`.
    return int(model.get_num_layers_by_block_type(parallel) if model.has_noops else model.get_num_layers(parallel))


def room_for_prompts(vllm_config: VllmConfig) -> int:
    """Returns how many tokens a step always has for one prompt, whatever other requests decode."""
    scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    drafts = 0 if speculative is None else speculative.num_speculative_tokens
    tokens = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    room = tokens - (scheduler.max_num_seqs - 1) * (1 + drafts)
    threshold = scheduler.long_prefill_token_threshold
    return int(min(room, threshold) if threshold > 0 else room)


def _layer_kinds(vllm_config: VllmConfig) -> set[str]:
    """Returns the kinds of a model's layers, as transformers names them."""
    model = vllm_config.model_config
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
    return kinds or {_FULL if model.get_sliding_window() is None else _WINDOW}


def shared_caches(vllm_config: VllmConfig) -> Iterator[str]:
    """Yields the traits of engines whose blocks have other readers or writers than one layer of one request."""
    if getattr(vllm_config.model_config.hf_text_config, "num_kv_shared_layers", 0):
        yield f"{architecture_of(vllm_config)} with layers that share a cache"
    if vllm_config.speculative_config is not None and not compat.drafts_for_itself(vllm_config):
        yield "speculation"


def moved_blocks(vllm_config: VllmConfig) -> Iterator[str]:
    """Yields the trait of engines whose blocks other stores or engines write."""
    if vllm_config.cache_config.kv_offloading_size is not None or vllm_config.kv_transfer_config is not None:
        yield "a KV connector"
