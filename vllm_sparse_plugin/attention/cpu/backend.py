"""The CPU backend class."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
)

from vllm_sparse_plugin.attention.base import SparseBackend
from vllm_sparse_plugin.attention.cpu.builder import SparseCPUMetadataBuilder
from vllm_sparse_plugin.attention.cpu.layer import SparseCPUImpl

if TYPE_CHECKING:
    from vllm.config.cache import CacheDType


class SparseCPUBackend(SparseBackend, CPUAttentionBackend):
    """Sparse decode attention in vLLM's CPU build. Each registered name is a subclass."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["auto", "bfloat16"]

    @classmethod
    def get_impl_cls(cls) -> type[SparseCPUImpl]:
        cls.hook_runner()
        return SparseCPUImpl

    @staticmethod
    def get_builder_cls() -> type[SparseCPUMetadataBuilder]:
        return SparseCPUMetadataBuilder

    @classmethod
    def supports_sink(cls) -> bool:
        return True
