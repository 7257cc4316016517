"""Sparse attention in vLLM's CPU build.

vLLM's own CPU attention runs short contexts, sliding-window layers, leading dense layers, and dense prefill. Decoding
tokens of long contexts are routed, select pages and attend to them. With sparse prefill, long prompts attend to chosen
key blocks or to the kept tokens of a layer. The metadata builder assigns the requests once per step, by their lengths.
"""

from vllm_sparse_plugin.attention.cpu.backend import SparseCPUBackend as SparseCPUBackend
from vllm_sparse_plugin.attention.cpu.builder import SparseCPUMetadataBuilder as SparseCPUMetadataBuilder
from vllm_sparse_plugin.attention.cpu.layer import SparseCPUImpl as SparseCPUImpl
from vllm_sparse_plugin.attention.cpu.metadata import DecodeTokens as DecodeTokens
from vllm_sparse_plugin.attention.cpu.metadata import SparseCPUMetadata as SparseCPUMetadata
