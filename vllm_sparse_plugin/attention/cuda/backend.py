"""The GPU backend class."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
from sparse_kernels.limits import HEAD_SIZES
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout, KVCacheSpec

from vllm_sparse_plugin.admission import CUDA_KERNEL_BLOCK, block_multiple
from vllm_sparse_plugin.attention.base import (
    SparseBackend,
)
from vllm_sparse_plugin.attention.cuda.builder import SparseCUDAMetadataBuilder
from vllm_sparse_plugin.attention.cuda.layer import SparseCUDAImpl
from vllm_sparse_plugin.config.account import PREFERRED_BLOCK

if TYPE_CHECKING:
    from vllm.config.cache import CacheDType


class SparseCUDABackend(SparseBackend, FlashAttentionBackend):
    """Sparse decode attention on NVIDIA GPUs. Each registered name is a subclass."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @classmethod
    def get_impl_cls(cls) -> type[SparseCUDAImpl]:
        cls.hook_runner()
        return SparseCUDAImpl

    @staticmethod
    def get_builder_cls() -> type[SparseCUDAMetadataBuilder]:
        return SparseCUDAMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # A page of one head must be contiguous.
        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        selector, current = cls.config().selector, get_current_vllm_config_or_none()
        unit: int = selector.page_size if selector else 1
        if isinstance(kv_cache_spec, AttentionSpec):
            layout = cls.statistics_layout(kv_cache_spec)
            unit = layout.unit_tokens if layout else unit
        elif current is not None and current.model_config is not None:
            # vLLM asks without a spec when it looks for block sizes that several backends support.
            unit = block_multiple(current, cls.config(), unit)
        return [MultipleOf(math.lcm(CUDA_KERNEL_BLOCK, unit))]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        current = get_current_vllm_config_or_none()
        if current is None or current.model_config is None:
            return max(default_block_size, PREFERRED_BLOCK)
        multiple = math.lcm(PREFERRED_BLOCK, block_multiple(current, cls.config(), CUDA_KERNEL_BLOCK))
        return math.ceil(default_block_size / multiple) * multiple

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        if not cls.config().runs_kernels:
            return bool(super().supports_head_size(head_size))
        return head_size in HEAD_SIZES

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False
