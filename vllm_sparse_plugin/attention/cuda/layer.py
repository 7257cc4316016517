"""One attention layer on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from sparse_kernels.batch import Copies, DecodeBatch, DecodeOutput, PrefillBatch
from sparse_kernels.cache import KVCache
from sparse_kernels.compaction import ObservationWindow
from sparse_kernels.multi_token_decode import multi_token_decode
from sparse_kernels.page_statistics import write_cache
from sparse_kernels.rolling_attention import attend_rolling
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionImpl,
    FlashAttentionMetadata,
)

from vllm_sparse_plugin.attention.base import (
    SparseImpl,
)
from vllm_sparse_plugin.attention.cuda.flash import attend_listed, varlen_attention
from vllm_sparse_plugin.attention.cuda.metadata import ChosenPages, DecodeRequests, SparseCUDAMetadata
from vllm_sparse_plugin.attention.cuda.scales import query_scale, scaled
from vllm_sparse_plugin.attention.cuda.start_up import reserve_scratch
from vllm_sparse_plugin.attention.plan import LayerPlan
from vllm_sparse_plugin.attention.prefill import PromptKernels, PromptRound, attend_prompts
from vllm_sparse_plugin.offload.staging import StagedPrompts, Staging


class SparseCUDAImpl(SparseImpl, FlashAttentionImpl):
    """One attention layer."""

    supports_dcp: bool = False
    can_return_lse_for_decode: bool = False
    staging: Staging | None = None
    """With offloading, where prompts attend to their blocks."""
    is_planned: bool = False
    """Whether `bind` has been called. Only before that does vLLM profile memory."""
    reserved: torch.Tensor | None = None
    """What `reserve_scratch` returned, until the layer is planned."""

    def bind(
        self,
        plan: LayerPlan,
        splits: int | None = None,
        scratch: torch.Tensor | None = None,
        staging: Staging | None = None,
    ) -> None:
        """Also sets what the builder has allocated, None for no change, and frees the memory of `reserve_scratch`."""
        super().bind(plan)
        self.splits = splits or self.splits
        self.scratch = self.scratch if scratch is None else scratch
        self.staging = self.staging if staging is None else staging
        self.is_planned, self.reserved = True, None

    def _make_views(self, kv_cache: torch.Tensor) -> None:
        if kv_cache.dtype == torch.uint8:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        self.token_rows = kv_cache[:, :, : self.plan.block_size]
        self._make_caches(kv_cache, lambda page_size: KVCache.from_rows(self.token_rows, page_size))

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        self.bind_cache(kv_cache)
        scales: Any = layer
        cache = self.statistics_cache or self.cache
        write_cache(
            key, value, self.token_rows, cache.statistics, slot_mapping, cache.page_size, scales._k_scale,
            scales._v_scale,
        )  # fmt: skip

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            if not self.is_planned:
                self.reserved = reserve_scratch(self, layer, query)
            return output.fill_(0)
        assert isinstance(attn_metadata, SparseCUDAMetadata)
        scales = output_scale, output_block_scale
        attend = partial(self._attend_all, layer, query, key, value, attn_metadata, output, scales)
        self.run_step(layer, query, kv_cache, attn_metadata.observed, attend)
        return output

    def _attend_all(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        attn_metadata: SparseCUDAMetadata,
        output: torch.Tensor,
        output_scales: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> None:
        """Attends with all tokens of a step; for the arguments see `forward`."""

        def dense(metadata: FlashAttentionMetadata, first: int, rows: torch.Tensor = self.token_rows) -> None:
            # A layer that shares the cache of another layer has no keys and values.
            new_keys, new_values = (None if new is None else new[first:] for new in (key, value))
            super(SparseCUDAImpl, self).forward(
                layer, query[first:], new_keys, new_values, rows, metadata, output[first:], *output_scales
            )

        if self.plan.rolling is not None:
            self._attend_rolling(layer, query, attn_metadata, output)
            return
        verified = attn_metadata.verified
        if verified is not None:
            heads = DecodeOutput(output[verified.tokens])
            multi_token_decode(self._batch_of(layer, query, verified), scaled(self.cache, layer), self.softmax, heads)
            return
        rounds = attn_metadata.rounds if self.plan.prefill is not None else []
        if not self.plan.is_sparse and not rounds:
            dense(attn_metadata, 0)
            return
        first = attn_metadata.num_decode_tokens
        if self.plan.is_sparse:
            self._decode_all(layer, query, attn_metadata, output)
        elif attn_metadata.dense_decode is not None:
            dense(attn_metadata.dense_decode, 0)
        if rounds:
            self.attend_rounds(layer, query[first:], rounds, output[first:], attn_metadata.staged)
        elif self.staging is not None:
            parts = attn_metadata.staged
            for part in parts:
                rows = self.staging.load(self, part, ahead=len(parts) == 1)
                dense(part.metadata, first + part.tokens.start, rows)
        elif attn_metadata.prefill is not None:
            dense(attn_metadata.prefill, first)

    def _attend_rolling(
        self, layer: Any, query: torch.Tensor, metadata: SparseCUDAMetadata, output: torch.Tensor
    ) -> None:
        """Attends with rolling positions. The metadata tensors are vLLM's buffers, which graphs may read."""
        assert self.plan.rolling is not None
        window, rotation = self.plan.rolling
        batch = PrefillBatch(
            query=query,
            query_start=metadata.query_start_loc,
            block_table=metadata.block_table,
            seq_lens=metadata.seq_lens,
            max_query_tokens=metadata.max_query_len,
            max_seq_tokens=metadata.max_seq_len,
        )
        attend_rolling(batch, scaled(self.cache, layer), self.softmax, window, rotation, output)

    def _decode_all(self, layer: Any, query: torch.Tensor, metadata: SparseCUDAMetadata, output: torch.Tensor) -> None:
        """Attends with the decoding tokens of a step."""
        cache, kept, anchor = scaled(self.cache, layer), metadata.kept, self.plan.anchor
        for part, decode in enumerate(metadata.decode):
            batch, given = self._batch_of(layer, query, decode), None
            if kept is not None and kept.are_read:
                given = kept.of(anchor or layer.layer_name, batch.num_requests)
            elif anchor is not None:
                given = metadata.chosen[anchor, part]
            if given is not None:
                chosen = given.of_heads(self.plan.anchor_heads)
                batch = replace(batch, pages=chosen.pages, budgets=chosen.budgets)
            heads = DecodeOutput(output[decode.tokens], counters=self.plan.counters)
            wants_pages = given is None and (self.plan.is_anchor or kept is not None)
            pages = self.attend_decoding(batch, cache, heads, wants_pages)
            if pages is not None and self.plan.is_anchor:
                metadata.chosen[layer.layer_name, part] = ChosenPages(pages, batch.budgets)
            if pages is not None and kept is not None:
                kept.keep(layer.layer_name, pages, batch.num_pages(self.plan.page_size))

    def _batch_of(self, layer: Any, query: torch.Tensor, requests: DecodeRequests) -> DecodeBatch:
        """Returns the requests as a batch with the layer's queries."""
        return DecodeBatch(
            query=query[requests.tokens],
            block_table=requests.block_table,
            seq_lens=requests.seq_lens,
            dense_requests=requests.dense,
            dense_tokens=self.plan.dense_tokens,
            query_scale=query_scale(query, layer),
            max_context=self.plan.max_context,
            budgets=requests.budgets,
            whole=requests.whole,
        )

    def _voting(self, layer: Any, window: ObservationWindow) -> tuple[ObservationWindow, KVCache]:
        with_scale = replace(window, query_scale=query_scale(window.query, layer))
        return with_scale, scaled(self.prompt_cache, layer)

    def attend_rounds(
        self,
        layer: Any,
        query: torch.Tensor,
        rounds: Sequence[PromptRound],
        output: torch.Tensor,
        staged: Sequence[StagedPrompts] = (),
    ) -> None:
        """Attends with the prompts of a step; `query` and `output` contain only their tokens. With offloading, the
        blocks of each round are those of one of `staged`."""
        assert self.plan.prefill is not None
        cache, scale = scaled(self.prompt_cache, layer), query_scale(query, layer)
        kernels = PromptKernels()
        if query.is_cuda:
            # Only FlashAttention 3 takes pages of one token. Otherwise the operation runs its own kernel.
            by_token = attend_listed if self.vllm_flash_attn_version == 3 else None
            kernels = PromptKernels(varlen_attention(self, layer), by_token)
        copied: Sequence[StagedPrompts | None] = staged if staged else [None] * len(rounds)
        for part, blocks in zip(rounds, copied, strict=True):
            batch = part.prompts.batch(query[part.tokens], scale)
            if blocks is not None:
                assert self.staging is not None
                rows = self.staging.load(self, blocks, ahead=len(staged) == 1)
                chunk = KVCache.from_rows(rows, cache.page_size)
                copies = Copies(chunk.keys, chunk.values, blocks.metadata.block_table)
                batch = replace(batch, copies=copies)
            attend_prompts(self.plan.prefill, part, batch, cache, self.softmax, output[part.tokens], kernels)
