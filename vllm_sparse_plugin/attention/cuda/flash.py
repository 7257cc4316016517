"""Calls vLLM's FlashAttention for sparse prefill."""

from __future__ import annotations

from typing import Any

import torch
from sparse_kernels.block_prefill import VarlenAttention, VirtualSequences
from sparse_kernels.token_prefill import ListedAttention
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl


def attend_listed(listed: ListedAttention) -> None:
    """Runs vLLM's FlashAttention 3 over lists of tokens, as pages of one token."""

    def by_head(scale: torch.Tensor | None) -> torch.Tensor | None:
        return None if scale is None else scale.expand(len(listed.counts), listed.keys.shape[2])

    fa_utils.flash_attn_varlen_func(
        q=listed.query,
        k=listed.keys,
        v=listed.values,
        out=listed.output,
        cu_seqlens_q=listed.query_start,
        max_seqlen_q=listed.max_query_tokens,
        seqused_k=listed.counts,
        max_seqlen_k=listed.max_seq_tokens,
        softmax_scale=listed.softmax.scale,
        causal=True,
        softcap=listed.softmax.softcap,
        block_table=listed.rows,
        fa_version=3,
        s_aux=listed.softmax.sink_logits,
        q_descale=by_head(listed.query_scale),
        k_descale=by_head(listed.key_scale),
        v_descale=by_head(listed.value_scale),
        # With more pieces the result would depend on the batch.
        num_splits=1,
    )


def varlen_attention(impl: FlashAttentionImpl, layer: Any) -> VarlenAttention:
    """Returns vLLM's FlashAttention over virtual sequences."""

    def attend(sequences: VirtualSequences, output: torch.Tensor, wants_lse: bool) -> torch.Tensor | None:
        shape = len(sequences.lengths), 1
        # A virtual sequence has one set of learned sinks for all heads. The operation adds those of each head
        # afterwards.
        attended = fa_utils.flash_attn_varlen_func(
            q=sequences.queries,
            k=sequences.keys,
            v=sequences.values,
            out=output,
            cu_seqlens_q=sequences.query_rows,
            max_seqlen_q=sequences.max_rows,
            seqused_k=sequences.lengths,
            max_seqlen_k=sequences.max_length,
            softmax_scale=impl.scale,
            causal=True,
            softcap=impl.logits_soft_cap,
            block_table=sequences.page_table,
            return_softmax_lse=wants_lse,
            fa_version=impl.vllm_flash_attn_version,
            q_descale=layer._q_scale.expand(shape) if impl.supports_quant_query_input else None,
            k_descale=layer._k_scale.expand(shape),
            v_descale=layer._v_scale.expand(shape),
        )
        return attended[1] if wants_lse else None

    return attend
