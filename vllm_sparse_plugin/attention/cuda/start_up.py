"""Compiles kernels and reserves memory when an engine starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from sparse_kernels.batch import DecodeBatch
from sparse_kernels.block_prefill import scratch_bytes
from vllm.config import ModelConfig
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sparse_plugin.attention.base import SparseBackend, SparseImpl
from vllm_sparse_plugin.attention.cuda.measure import measure_token
from vllm_sparse_plugin.attention.cuda.metadata import SampledToken
from vllm_sparse_plugin.attention.cuda.scales import scaled
from vllm_sparse_plugin.attention.cuda.whole import WHOLE_SCRATCH
from vllm_sparse_plugin.attention.prefill import PrefillPlan, rehearse
from vllm_sparse_plugin.compaction.evictions import StepEvictions
from vllm_sparse_plugin.compaction.step import StepCompaction
from vllm_sparse_plugin.config import BlockPrefill
from vllm_sparse_plugin.metrics.sampling import UNMEASURED, Sample, dropping
from vllm_sparse_plugin.notices import EIGHT_BIT_CACHES
from vllm_sparse_plugin.policies import reads_selection
from vllm_sparse_plugin.requests.arguments import kept_page_bytes

_TOKEN_SCRATCH = 300 * 2**20
"""Bytes that choosing tokens takes in one layer, in addition to gathered queries and outputs. It grows with the
longest context, by about 100 bytes per token."""
_WINDOW_SCRATCH = 256 * 2**20
"""Bytes of the queries that all layers keep until a prompt ends. A prompt takes 8 MB in a model of 32 layers with 32
heads of 128 elements and windows of 32 tokens."""
_COLD = "its kernels are compiled when a prompt needs them"
"""The message if the warm-up of compaction or sparse prefill fails."""


def reserve_scratch(impl: SparseImpl, layer: Any, query: torch.Tensor) -> None:
    """Allocates and frees the scratch of sparse prefill, compaction, drafts and long dense requests, so that vLLM's
    memory profile leaves room for it."""
    backend: type[SparseBackend] = layer.attn_backend
    config, wanted, size = backend.config(), 0, impl.model_size
    longest = size.longest_context
    if config.moves_tokens:
        assert config.compaction is not None
        # Votes, their order, and the queries of prompts that end in one step.
        wanted = _WINDOW_SCRATCH + 40 * impl.num_kv_heads * longest
        if config.compaction.retention().counts_every_query:
            # The votes of a prompt that is still in prefill, in all layers.
            wanted += 4 * impl.num_kv_heads * longest * size.num_layers
        itemsize = query.dtype.itemsize
        of_request = config.compaction.query_bytes(size.num_layers, impl.num_heads, impl.head_size, itemsize)
        wanted += size.requests * of_request
    if isinstance(config.prefill, BlockPrefill):
        itemsize = 1 if impl.kv_cache_dtype in EIGHT_BIT_CACHES else query.dtype.itemsize
        layout = config.statistics_layout(impl.head_size, itemsize)
        assert layout is not None
        tiles = scratch_bytes(
            config.prefill.rule(), layout, impl.num_kv_heads, impl.num_queries_per_kv, len(query),
            longest,
        )  # fmt: skip
        wanted = max(wanted, tiles)
    elif config.prefill is not None:
        # With outputs of zero also gathered queries, gathered outputs, and outputs in token order.
        gathered = 3 * query.numel() * 2 if config.prefill.others == "zero" else 0
        wanted = max(wanted, gathered + _TOKEN_SCRATCH)
    if reads_selection(config.selector):
        # Planning allocates it after the profile, and keeps it.
        wanted += WHOLE_SCRATCH
    wanted += kept_page_bytes(config, impl.num_kv_heads * size.num_layers, size.requests)
    if not wanted:
        return
    torch.empty(wanted, dtype=torch.uint8, device=query.device)


def warm_up_meter(layer: Any, spec: AttentionSpec, longest: int, device: torch.device) -> None:
    """Compiles the kernels of a measurement on a temporary cache, before the first step.

    Args:
        layer: vLLM's layer.
        spec: the layer's spec.
        longest: tokens of the longest context that the engine serves.
        device: the device of the layer.
    """
    impl: SparseImpl = layer.impl
    with dropping(UNMEASURED), _on_one_block(impl, spec, longest, device) as table:
        plan = impl.plan
        assert plan.selector is not None
        assert plan.quality is not None
        lengths = torch.full((1,), plan.block_size, dtype=torch.int32, device=device)
        heads = impl.num_kv_heads * impl.num_queries_per_kv
        itemsize = impl.cache.keys.view.dtype.itemsize
        query = torch.zeros(
            1, heads, impl.head_size, dtype=torch.bfloat16 if itemsize == 1 else spec.dtype, device=device
        )
        batch = DecodeBatch(query, table[None], lengths)
        most = min(plan.selector.budget_pages, longest // plan.page_size)
        sampled = SampledToken(0, plan.block_size, most, Sample(plan.quality.place, plan.quality.place))
        measure_token(impl.plan, impl.softmax, batch, scaled(impl.cache, layer), 0, sampled)
        # This token is not of a request.
        plan.quality.counts.zero_()


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
