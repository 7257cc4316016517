"""The calls of the kernels that this project is compared with: those of vLLM, FlashInfer and torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from bench.kernels.cases import Geometry
from bench.kernels.workload import DecodeInputs, TopKInputs

_NUM_SPLITS = 32
"""vLLM's `flash_attn_max_num_splits_for_cuda_graph`."""
_FLASHINFER_WORKSPACE = 512 << 20


Call = Callable[[], Any]


def imported(*names: str) -> Callable[[], list[Any]]:
    """A loader of `module:attribute` names."""

    def load() -> list[Any]:
        return [getattr(import_module(module), name) for module, _, name in (each.partition(":") for each in names)]

    return load


def load_flash_attention() -> list[Any]:
    """FlashAttention 3 and its scheduler."""
    loaded = imported("vllm.vllm_flash_attn:flash_attn_varlen_func", "vllm.vllm_flash_attn:get_scheduler_metadata")()
    (reason,) = imported("vllm.vllm_flash_attn.flash_attn_interface:FA3_UNAVAILABLE_REASON")()
    if reason is not None:
        raise ImportError(reason)
    return loaded


def flash_attention(loaded: list[Any], inputs: DecodeInputs) -> Call:
    """The call of vLLM's FLASH_ATTN backend in a decode step under full CUDA graphs.

    The schedule is made outside, as vLLM makes it once per step for all layers.
    """
    attention, get_scheduler_metadata = loaded
    geometry, case, query, seq_lens = inputs.geometry, inputs.case, inputs.query, inputs.seq_lens
    # `[num_blocks, block_size, num_kv_heads, head_size]`, as vLLM passes them.
    keys, values = inputs.token_rows.transpose(1, 2).split(geometry.head_size, dim=-1)
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=query.device)
    schedule = get_scheduler_metadata(
        batch_size=case.batch,
        max_seqlen_q=1,
        max_seqlen_k=max(inputs.lengths),
        num_heads_q=query.shape[1],
        num_heads_kv=geometry.num_kv_heads,
        headdim=geometry.head_size,
        cache_seqlens=seq_lens,
        qkv_dtype=query.dtype,
        cu_seqlens_q=starts,
        page_size=geometry.block_size,
        causal=True,
        window_size=(-1, -1),
        num_splits=_NUM_SPLITS,
    )
    one = torch.ones((), dtype=torch.float32, device=query.device).expand(case.batch, geometry.num_kv_heads)

    def call() -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        attention(
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=seq_lens,
            max_seqlen_k=max(inputs.lengths),
            softmax_scale=geometry.scale,
            causal=True,
            alibi_slopes=None,
            window_size=[-1, -1],
            block_table=inputs.block_table,
            softcap=0,
            scheduler_metadata=schedule,
            fa_version=3,
            q_descale=one,
            k_descale=one,
            v_descale=one,
            num_splits=_NUM_SPLITS,
        )
        return out

    return call


def load_flashinfer_decode() -> Any:
    """The wrapper and its workspace. Builds or loads the kernels now instead of in the first case."""
    wrapper, get_module = imported(
        "flashinfer:BatchDecodeWithPagedKVCacheWrapper", "flashinfer.prefill:get_batch_prefill_module"
    )()
    geometry, bf16 = Geometry(), torch.bfloat16
    sizes = (geometry.head_size, geometry.head_size)
    get_module("fa2", bf16, bf16, bf16, torch.int32, *sizes, 0, False, False, False)
    return wrapper, torch.zeros(_FLASHINFER_WORKSPACE, dtype=torch.uint8, device="cuda")


def flashinfer_decode(loaded: Any, inputs: DecodeInputs) -> Call:
    """Dense attention by FlashInfer, planned outside."""
    wrapper_class, workspace = loaded
    geometry, query = inputs.geometry, inputs.query
    counts = [-(-length // geometry.block_size) for length in inputs.lengths]
    starts = torch.tensor([0, *counts], dtype=torch.int32, device=query.device).cumsum(0, dtype=torch.int32)
    blocks = torch.cat([row[:count] for row, count in zip(inputs.block_table, counts, strict=True)])
    last = (inputs.seq_lens - 1) % geometry.block_size + 1
    wrapper = wrapper_class(
        workspace,
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=torch.empty_like(starts),
        paged_kv_indices_buffer=torch.empty_like(blocks),
        paged_kv_last_page_len_buffer=torch.empty_like(last),
    )
    wrapper.plan(
        starts,
        blocks,
        last,
        query.shape[1],
        geometry.num_kv_heads,
        geometry.head_size,
        geometry.block_size,
        q_data_type=query.dtype,
        kv_data_type=query.dtype,
        sm_scale=geometry.scale,
    )
    caches = inputs.token_rows.split(geometry.head_size, dim=-1)
    return lambda: wrapper.run(query, caches)


def load_flashinfer_topk() -> list[Any]:
    """`top_k_page_table_transform`. Builds or loads its module now instead of in the first case."""
    (get_module,) = imported("flashinfer.topk:get_topk_module")()
    get_module()
    return imported("flashinfer.topk:top_k_page_table_transform")()


def flashinfer_topk(loaded: list[Any], inputs: TopKInputs) -> Call:
    """The best scores of each row, mapped to pages by the block table."""
    (transform,), geometry = loaded, inputs.geometry
    rows, heads = inputs.rows, geometry.num_kv_heads
    lengths = inputs.num_pages.repeat_interleave(heads)
    tokens = torch.arange(len(inputs.num_pages), dtype=torch.int32, device=rows.device).repeat_interleave(heads)
    return lambda: transform(
        rows, inputs.block_table, lengths, geometry.k, row_to_batch=tokens, page_size=geometry.pages_per_block
    )


def torch_topk(loaded: list[Any], inputs: TopKInputs) -> Call:
    """The best scores of each row."""
    (topk,) = loaded
    return lambda: topk(inputs.rows, inputs.geometry.k, dim=-1, sorted=False)[1]
