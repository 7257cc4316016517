"""Compiles kernels and reserves memory when an engine starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
from vllm_sparse_plugin.compaction.step import StepCompaction
from vllm_sparse_plugin.config import BlockPrefill
from vllm_sparse_plugin.metrics.sampling import UNMEASURED, Sample, dropping
from vllm_sparse_plugin.notices import EIGHT_BIT_CACHES

_TOKEN_SCRATCH = 300 * 2**20
"""Bytes beside queries and outputs that a choice of tokens takes in a layer; it grows with the longest context by about
100 bytes a token."""


_WINDOW_SCRATCH = 256 * 2**20
"""Bytes of the queries that all layers keep of prompts until their tokens are chosen: eight megabytes a prompt in a
model of 32 layers with 32 heads of 128 and windows of 32 tokens."""


_COLD = "its kernels are compiled when a prompt needs them"
"""What the log says where the warm-up of compaction fails."""


def reserve_scratch(impl: SparseImpl, layer: Any, query: torch.Tensor) -> None:
    """Takes the memory of sparse prefill, compaction and dense requests for a moment: vLLM's profile of its memory
    then leaves room for it."""
    backend: type[SparseBackend] = layer.attn_backend
    config, wanted, longest = backend.config(), 0, impl.model_size.longest_context
    if config.moves_tokens:
        assert config.compaction is not None
        # Votes and their order, and the queries of prompts that end in one step.
        wanted = _WINDOW_SCRATCH + 40 * impl.num_kv_heads * longest
        if config.compaction.retention().counts_every_query:
            # The votes of a prompt that is still being computed, in all layers.
            wanted += 4 * impl.num_kv_heads * longest * impl.model_size.num_layers
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
        # Queries and outputs are gathered, and outputs are put back token by token.
        wanted = max(wanted, 3 * query.numel() * 2 + _TOKEN_SCRATCH)
    if config.selector is not None and not config.selector.reads_every_page:
        # It is taken when layers are planned, after the profile, and kept.
        wanted += WHOLE_SCRATCH
    if not wanted:
        return
    torch.empty(wanted, dtype=torch.uint8, device=query.device)


def warm_up_meter(layer: Any, spec: AttentionSpec, longest: int, device: torch.device) -> None:
    """Compiles what measuring needs, on a cache of its own, so that no step waits for it.

    Args:
        layer: vLLM's.
        spec: the layer's specification.
        longest: tokens of the longest context that the engine serves.
        device: where the layer runs.
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
        # Nobody asked for this token.
        plan.quality.counts.zero_()


def warm_up_compaction(
    layer: Any, spec: AttentionSpec, model: ModelConfig, compaction: StepCompaction, device: torch.device
) -> None:
    """Compiles what the compaction of a prompt launches, on a cache of its own, so that no prompt waits for it.

    Args:
        layer: vLLM's.
        spec: the layer's specification.
        model: says what dtype queries have, and how long contexts are.
        compaction: of the layers that share the metadata builder.
        device: where the layer runs.
    """
    impl: SparseImpl = layer.impl
    with dropping(_COLD, "compaction"), _on_one_block(impl, spec, model.max_model_len, device) as table:
        dtype = model.dtype if layer.query_quant is None else torch.float8_e4m3fn
        for tokens, observed in compaction.rehearse(table):
            query = torch.zeros(tokens, layer.num_heads, impl.head_size, dtype=dtype, device=device)
            impl.observe(layer, query, observed)
            impl.compact_ended(layer, observed)


@contextmanager
def _on_one_block(impl: SparseImpl, spec: AttentionSpec, longest: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Binds a cache of one block, for what an engine compiles when it starts.

    Args:
        spec: the layer's specification.
        longest: tokens of a context, at most.
        device: where the layer runs.

    Yields:
        `[max_blocks]` int32, the block table of a context: every block is the only one there is.
    """
    rows = 1, impl.num_kv_heads, spec.num_states, 2 * impl.head_size
    impl.bind_cache(torch.zeros(rows, dtype=spec.dtype, device=device))
    try:
        yield torch.zeros(-(-longest // impl.plan.block_size), dtype=torch.int32, device=device)
    finally:
        impl._bound_cache = None
