"""The metadata builder and a layer of the CUDA backend without a GPU.

Torch replaces FlashAttention. The kernels run their references.
"""

from types import SimpleNamespace

import pytest
import torch
from support.cuda_layer import GROUP, HEADS, SCALE, SIZE, budgets_of, plan_of
from support.paged import dense_attention
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from vllm_sparse_plugin.attention.cuda import SparseCUDAImpl, SparseCUDAMetadataBuilder
from vllm_sparse_plugin.attention.step_log import StepLog
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.requests.limits import StepNumbers


@pytest.fixture
def builder(monkeypatch):
    def build(self, common_prefix_len, common, fast_build=False):
        return FlashAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", build)
    made = object.__new__(SparseCUDAMetadataBuilder)
    made.reorder_batch_threshold = 4
    made.any_dense_layer = False
    made.any_sparse_layer = True
    made.answers_sparsely, made.verifies_at_once = True, False
    made.rolls = False
    made.log = object.__new__(StepLog)
    made.log._log = None
    made.counts = []
    made.compaction = None
    made.reads = None
    made.prefill_rule = None
    made.group_sizes = {GROUP}
    made.any_dense_decode = False
    made.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=1000), scheduler_config=SimpleNamespace(max_num_batched_tokens=2048)
    )
    made.dense_requests = StepNumbers(False, 16, torch.bool, torch.device("cpu"))
    made.budgets = budgets_of("dense")
    made.whole = made.staging = made.kept_pages = made.rows = None
    return made


@pytest.fixture
def layer(request, monkeypatch):
    """A layer with torch as its dense attention; a test may name another backend."""

    def forward(self, layer, query, key, value, kv_cache, metadata, output, *scales):
        start = metadata.query_start_loc.tolist()
        for request, length in enumerate(metadata.seq_lens.tolist()):
            blocks = metadata.block_table[request].long()
            tokens = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length].transpose(0, 1)
            for token in range(start[request], start[request + 1]):
                seen = tokens[: length - (start[request + 1] - 1 - token)]
                rows = query[token].unflatten(0, (HEADS, GROUP))
                output[token] = dense_attention(rows, seen[..., :SIZE], seen[..., SIZE:], SCALE)
        return output

    monkeypatch.setattr(FlashAttentionImpl, "forward", forward)
    made = object.__new__(SparseCUDAImpl)
    made.num_heads, made.num_kv_heads, made.head_size = HEADS * GROUP, HEADS, SIZE
    made.scale, made.logits_soft_cap = SCALE, 0.0
    made.sinks, made.splits, made.scratch = None, 64, None
    preset = getattr(request, "param", "unique")
    budget = {} if preset in ("dense", "art") else {"selection": {"budget_tokens": 64}}
    made.bind(plan_of(resolve({**budget, "min_context_tokens": 0}, preset)))
    return made
