"""The memory of layers that stop early over all pages, where the pieces of one request exceed its bound."""

from types import SimpleNamespace

import torch
from sparse_kernels.split_attention import pieces_of, row_bytes, scratch_numbers
from support.cuda_layer import BLOCK, plan_of

from vllm_sparse_plugin.attention.base import ModelSize
from vllm_sparse_plugin.attention.cuda import SparseCUDAMetadataBuilder
from vllm_sparse_plugin.attention.cuda.start_up import scratch_of
from vllm_sparse_plugin.config import resolve

LONGEST, LAYERS, REQUESTS, DRAFTS = 1 << 20, 32, 4, 8
HEADS, GROUP, SIZE = 8, 8, 128
CONFIG = resolve({"stopping": {"block_tokens": 64}}, "art")
ROWS = (1 + DRAFTS) * HEADS
"""Of a request: a call attends to whole requests."""


def test_the_profile_of_memory_leaves_room_for_the_pieces_of_a_request():
    impl = SimpleNamespace(
        model_size=ModelSize(LONGEST, LAYERS, REQUESTS, REQUESTS * (1 + DRAFTS)), num_heads=HEADS * GROUP,
        num_kv_heads=HEADS, num_queries_per_kv=GROUP, head_size=SIZE, kv_cache_dtype="auto",
    )  # fmt: skip
    scratch = scratch_of(impl, CONFIG, torch.empty(16, HEADS * GROUP, SIZE, dtype=torch.bfloat16))
    pieces = pieces_of(LONGEST, CONFIG.stop_rule)
    assert scratch.passing == ROWS * row_bytes(pieces, GROUP, SIZE)
    assert scratch.lasting * LAYERS >= 4 * ROWS * scratch_numbers(pieces)


def test_the_marks_of_a_request_find_room():
    """Otherwise each call allocates and clears those of its whole batch."""
    builder = object.__new__(SparseCUDAMetadataBuilder)
    builder.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=LONGEST))
    builder.block_size, builder.device, builder.reorder_batch_threshold = BLOCK, torch.device("cpu"), 1 + DRAFTS
    layers = {"layer": SimpleNamespace(num_heads=HEADS * GROUP, num_kv_heads=HEADS, head_size=SIZE)}
    marks = builder._stop_scratch(layers, {"layer": plan_of(CONFIG)}, REQUESTS * (1 + DRAFTS))
    pieces = pieces_of(LONGEST + 64 * BLOCK, CONFIG.stop_rule)
    assert len(marks) == ROWS * scratch_numbers(pieces)
