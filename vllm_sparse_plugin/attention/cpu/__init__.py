"""Runs the sparse pipeline inside vLLM's CPU build.

Short contexts, sliding-window layers, leading dense layers and, unless it is sparse, prefill run vLLM's own CPU
attention on the token rows of the cache; decoding tokens of long contexts run route, select and attend, and long
prompts attend to blocks or to the tokens that a layer keeps. Which requests are which is decided once per step by the
metadata builder, from lengths alone.
"""

from vllm_sparse_plugin.attention.cpu.backend import SparseCPUBackend as SparseCPUBackend
from vllm_sparse_plugin.attention.cpu.builder import SparseCPUMetadataBuilder as SparseCPUMetadataBuilder
from vllm_sparse_plugin.attention.cpu.layer import SparseCPUImpl as SparseCPUImpl
from vllm_sparse_plugin.attention.cpu.metadata import DecodeTokens as DecodeTokens
from vllm_sparse_plugin.attention.cpu.metadata import SparseCPUMetadata as SparseCPUMetadata
