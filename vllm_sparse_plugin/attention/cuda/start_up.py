"""Compiles kernels and reserves memory when an engine starts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from sparse_kernels.block_prefill import scratch_bytes
from sparse_kernels.limits import DecodeShape
from sparse_kernels.sparse_decode import StepSize
from sparse_kernels.sparse_decode import scratch_bytes as decode_bytes
from sparse_kernels.split_attention import pieces_of, row_bytes, rows_at_once, scratch_numbers, splits_for
from vllm.config import ModelConfig
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sparse_plugin.attention.base import SparseImpl
from vllm_sparse_plugin.attention.cuda.whole import WHOLE_SCRATCH
from vllm_sparse_plugin.attention.prefill import PrefillPlan, rehearse
from vllm_sparse_plugin.compaction.evictions import StepEvictions
from vllm_sparse_plugin.compaction.step import StepCompaction
from vllm_sparse_plugin.config import BlockPrefill, ResolvedConfig
from vllm_sparse_plugin.evictions import Compaction
from vllm_sparse_plugin.metrics.dropping import dropping
from vllm_sparse_plugin.notices import EIGHT_BIT_CACHES
from vllm_sparse_plugin.policies import Selection, reads_selection
from vllm_sparse_plugin.requests.arguments import largest_selection

_TOKEN_SCRATCH = 300 * 2**20
"""Bytes that choosing tokens takes in one layer, in addition to gathered queries and outputs. It grows with the
longest context, by about 100 bytes per token."""
_WINDOW_SCRATCH = 256 * 2**20
"""Bytes of the queries that all layers keep until a prompt ends. A prompt takes 8 MB in a model of 32 layers with 32
heads of 128 elements and windows of 32 tokens."""
_SCORED_COPIES = 4
"""Copies of a layer's keys, in float32, that a method's `score` may take."""
_COLD = "its kernels are compiled when a prompt needs them"
"""The message if the warm-up of compaction or sparse prefill fails."""


class Scratch(NamedTuple):
    """Bytes on the device that a layer takes besides its cache, inputs and outputs."""

    passing: int
    """Free again when the layer has run."""
    lasting: int
    """Not free while the rest of the model runs."""


def reserve_scratch(impl: SparseImpl, layer: Any, query: torch.Tensor) -> torch.Tensor | None:
    """Takes the scratch of a layer while vLLM profiles memory, so that the profile leaves room for it.

    Args:
        impl: the layer.
        layer: vLLM's layer.
        query: `[num_tokens, num_heads, head_size]`, as many tokens as a step may have.

    Returns:
        The lasting part, to be kept until the profile ends; None for none. Logits, for example, need their memory
        beside it.
    """
    scratch = scratch_of(impl, layer.attn_backend.config(), query)
    if scratch.passing:
        torch.empty(scratch.passing, dtype=torch.uint8, device=query.device)
    return torch.empty(scratch.lasting, dtype=torch.uint8, device=query.device) if scratch.lasting else None


def scratch_of(impl: SparseImpl, config: ResolvedConfig, query: torch.Tensor) -> Scratch:
    """Returns the scratch of a layer; for the arguments see `reserve_scratch`.

    What all layers share counts in equal parts.
    """
    size, passing, lasting, shared = impl.model_size, 0, 0, 0
    longest, layers = size.longest_context, size.num_layers
    itemsize = 1 if impl.kv_cache_dtype in EIGHT_BIT_CACHES else query.dtype.itemsize
    if config.moves_tokens:
        assert config.compaction is not None
        passing, lasting = _compaction_scratch(impl, config.compaction, query.dtype.itemsize)
    if isinstance(config.prefill, BlockPrefill):
        layout = config.statistics_layout(impl.head_size, itemsize)
        assert layout is not None
        tiles = scratch_bytes(
            config.prefill.rule(), layout, impl.num_kv_heads, impl.num_queries_per_kv, len(query),
            longest,
        )  # fmt: skip
        passing = max(passing, tiles)
    elif config.prefill is not None:
        # With outputs of zero also gathered queries, gathered outputs, and outputs in token order.
        gathered = 3 * query.numel() * 2 if config.prefill.others == "zero" else 0
        passing = max(passing, gathered + _TOKEN_SCRATCH)
    selector, rule = config.selector, config.stop_rule
    if reads_selection(selector):
        shared += WHOLE_SCRATCH
        passing = max(passing, _decode_scratch(impl, config, selector, itemsize, query.device))
    elif rule is not None or config.routing is not None:
        # Attention to all pages of a context. Rows beyond a limit wait for others, so both have a bound.
        of_head = impl.num_queries_per_kv, impl.head_size
        rows = size.decode_tokens * impl.num_kv_heads
        if rule is None:
            splits = splits_for(size.decode_tokens, impl.num_heads, impl.head_size)
        else:
            splits = pieces_of(longest, rule)
            rows_per_request = size.decode_tokens // size.requests * impl.num_kv_heads
            rows = min(rows, rows_at_once(splits, *of_head, rows_per_request))
            shared += 4 * rows * scratch_numbers(splits)
        passing = max(passing, rows * row_bytes(splits, *of_head))
    lasting += config.kept_page_bytes(impl.num_kv_heads, size.requests)
    return Scratch(passing, lasting + -(-shared // layers))


def _decode_scratch(
    impl: SparseImpl, config: ResolvedConfig, selector: Selection, itemsize: int, device: torch.device
) -> int:
    """Returns the passing bytes of a layer's largest decode step; `itemsize` is that of the cache."""
    size = impl.model_size
    shape = DecodeShape(
        group_size=impl.num_queries_per_kv,
        head_size=impl.head_size,
        max_pages=size.longest_context // selector.page_size,
        k=max(largest_selection(config), config.kept_pages),
        stopping=config.stop_rule is not None,
    )
    return decode_bytes(
        shape,
        StepSize(impl.num_kv_heads, size.requests, size.decode_tokens // size.requests),
        selector.statistics_layout(impl.head_size, itemsize),
        torch.cuda.get_device_capability(device),
        torch.cuda.get_device_properties(device).multi_processor_count,
    )


def _compaction_scratch(impl: SparseImpl, compaction: Compaction, itemsize: int) -> tuple[int, int]:
    """Returns the passing and the lasting bytes of a layer's compaction; `itemsize` is that of queries."""
    size = impl.model_size
    # A float32 number of each KV head for each token of the longest context.
    numbers = 4 * impl.num_kv_heads * size.longest_context
    # The votes of a prompt that is still in prefill.
    lasting = numbers if compaction.retention().counts_every_query else 0
    rule = compaction.rule()
    assert rule is not None
    scoring = 0 if rule.score is None else _SCORED_COPIES * numbers * impl.head_size
    if not compaction.evicts_between_steps:
        # Votes and their order; the queries of prompts that end in one step.
        return 10 * numbers + scoring, lasting + _WINDOW_SCRATCH // size.num_layers
    lasting += size.requests * compaction.query_bytes(1, impl.num_heads, impl.head_size, itemsize)
    # Votes that requests carry, and marks of the tokens that they protect.
    budget = compaction.budget_tokens or math.ceil((compaction.budget_ratio or 0) * size.longest_context)
    held = budget + (compaction.retention().every or 0)
    lasting += ((4 if rule.every_query else 0) + 1) * impl.num_kv_heads * size.requests * held
    # Layers evict together. Votes, their order, marks of protected tokens.
    return 3 * numbers * size.num_layers + scoring, lasting


def warm_up_compaction(
    layer: Any, spec: AttentionSpec, model: ModelConfig, compaction: StepCompaction, device: torch.device
) -> None:
    """Compiles the kernels of a compaction on a temporary cache, before the first prompt.

    Args:
        layer: vLLM's layer.
        spec: the layer's spec.
        model: the model, for the dtype of queries and the longest context.
        compaction: compaction of the layers that share the metadata builder.
        device: the device of the layer.
    """
    impl: SparseImpl = layer.impl
    with dropping(_COLD, "compaction"), _on_one_block(impl, spec, model.max_model_len, device) as table:
        for tokens, observed in compaction.rehearse(table):
            query = torch.zeros(
                tokens, layer.num_heads, impl.head_size, dtype=_query_dtype(layer, model), device=device
            )  # fmt: skip
            impl.observe(layer, query, observed)
            impl.compact_ended(layer, observed)


def warm_up_prompts(layer: Any, spec: AttentionSpec, model: ModelConfig, device: torch.device) -> None:
    """Compiles the kernels of a sparse prefill on a temporary cache, before the first prompt.

    Args:
        layer: vLLM's layer, with a sparse prefill.
        spec: the layer's spec.
        model: the model, for the dtype of queries and the longest context.
        device: the device of the layer.
    """
    impl, longest = layer.impl, model.max_model_len
    plan: PrefillPlan = impl.plan.prefill
    with dropping(_COLD, "prefill"), _on_one_block(impl, spec, longest, device) as table:
        for part in rehearse(plan.rule, table, impl.num_queries_per_kv, longest):
            shape = part.prompts.num_tokens, layer.num_heads, impl.head_size
            query = torch.zeros(shape, dtype=_query_dtype(layer, model), device=device)
            impl.attend_rounds(layer, query, [part], torch.empty(shape, dtype=model.dtype, device=device))
    # These tokens are not of a request.
    plan.counters.zero_()


def _query_dtype(layer: Any, model: ModelConfig) -> torch.dtype:
    """Returns the dtype of a layer's queries."""
    dtype: torch.dtype = model.dtype if layer.query_quant is None else torch.float8_e4m3fn
    return dtype


def warm_up_evictions(
    layers: Sequence[Any], spec: AttentionSpec, longest: int, evictions: StepEvictions, device: torch.device
) -> None:
    """Compiles the kernels of an eviction on temporary caches, before the first prompt.

    Args:
        layers: vLLM's layers that share the metadata builder.
        spec: the layers' spec.
        longest: tokens of the longest context that the engine serves.
        evictions: of these layers.
        device: the device of the layers.
    """
    with dropping(_COLD, "compaction"), ExitStack() as bound:
        tables = [bound.enter_context(_on_one_block(layer.impl, spec, longest, device)) for layer in layers]
        evictions.rehearse_evictions(tables[0])


@contextmanager
def _on_one_block(impl: SparseImpl, spec: AttentionSpec, longest: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Binds a cache of one block for a warm-up.

    Args:
        impl: the layer.
        spec: the layer's spec.
        longest: the most tokens of a context.
        device: the device of the layer.

    Yields:
        `[max_blocks]` int32, a block table in which every entry is this block.
    """
    rows = 1, impl.num_kv_heads, spec.num_states, 2 * impl.head_size
    impl.bind_cache(torch.zeros(rows, dtype=spec.dtype, device=device))
    try:
        yield torch.zeros(-(-longest // impl.plan.block_size), dtype=torch.int32, device=device)
    finally:
        impl.bound_cache = None
