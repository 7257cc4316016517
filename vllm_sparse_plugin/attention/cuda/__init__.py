"""Sparse attention on NVIDIA GPUs.

vLLM's FlashAttention runs short prompts, sliding-window layers, leading dense layers, and dense prefill. Sparse prefill
runs it on the key blocks that tiles choose, or on the kept tokens of a layer. Decoding tokens run one fused kernel,
which attends to the whole of short contexts. Decoding tokens that are routed or may stop, but select no pages, run
`split_attention`. Steps that verify drafts attend densely, with all tokens of a request at once. With rolling
positions, all tokens run one kernel. The shape of a batch alone decides what a step runs, so a batch of decoding
requests is one full CUDA graph.
"""

from vllm_sparse_plugin.attention.cuda.backend import SparseCUDABackend as SparseCUDABackend
from vllm_sparse_plugin.attention.cuda.builder import SparseCUDAMetadataBuilder as SparseCUDAMetadataBuilder
from vllm_sparse_plugin.attention.cuda.layer import SparseCUDAImpl as SparseCUDAImpl
from vllm_sparse_plugin.attention.cuda.metadata import DecodeRequests as DecodeRequests
from vllm_sparse_plugin.attention.cuda.metadata import SparseCUDAMetadata as SparseCUDAMetadata
