"""Runs the sparse pipeline on NVIDIA GPUs.

Short prompts, sliding-window layers, leading dense layers and, unless it is sparse, prefill run vLLM's FlashAttention
on the token rows of the cache; sparse prefill runs it on blocks that the tiles of long prompts choose, or on the tokens
that a layer keeps of them. Decoding tokens
run one fused kernel, which attends short contexts whole, or, where they are routed or may stop but select no pages, one
that splits long contexts. Steps that verify drafts attend densely, with all tokens of a request at once. Where
positions roll, all tokens run one kernel. What a step does is decided by the shape of its batch alone, so a batch of
decoding requests is one full CUDA graph.
"""

from vllm_sparse_plugin.attention.cuda.backend import SparseCUDABackend as SparseCUDABackend
from vllm_sparse_plugin.attention.cuda.builder import SparseCUDAMetadataBuilder as SparseCUDAMetadataBuilder
from vllm_sparse_plugin.attention.cuda.layer import SparseCUDAImpl as SparseCUDAImpl
from vllm_sparse_plugin.attention.cuda.metadata import DecodeRequests as DecodeRequests
from vllm_sparse_plugin.attention.cuda.metadata import SparseCUDAMetadata as SparseCUDAMetadata
