"""Special calls of layers by vLLM: without keys, with sinks that are parameters, on chunks of a context."""

import pytest
import torch
from sparse_kernels.cache import KVCache
from support.layer import LayerHarness
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from vllm_sparse_plugin.attention.cpu import SparseCPUImpl
from vllm_sparse_plugin.attention.cuda import SparseCUDAImpl, SparseCUDAMetadata
from vllm_sparse_plugin.attention.plan import LayerPlan
from vllm_sparse_plugin.policies import UniqueSelection

CHUNK = 8192


@pytest.mark.parametrize("selector", [None, UniqueSelection()], ids=["dense", "selects"])
def test_a_layer_that_shares_a_cache_prefills_without_keys_of_its_own_on_cuda(selector, monkeypatch):
    seen = []
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda self, layer, *tensors: seen.append(tensors[1:3]))
    impl = object.__new__(SparseCUDAImpl)
    impl.plan = LayerPlan(block_size=64, page_size=8, dense_tokens=0, selector=selector)
    rows = torch.zeros(2, 1, 64, 128).bfloat16()
    impl.bound_cache, impl.token_rows, impl.cache = rows, rows, KVCache.from_rows(rows, 8)
    start = torch.tensor([0, 4], dtype=torch.int32)
    metadata = SparseCUDAMetadata(
        num_actual_tokens=4, max_query_len=4, query_start_loc=start, max_seq_len=4, seq_lens=start[1:],
        block_table=start[None], slot_mapping=start,
    )  # fmt: skip
    metadata.prefill = metadata
    query = torch.zeros(4, 8, 64).bfloat16()
    impl.forward(None, query, None, None, rows, metadata, torch.empty_like(query))
    assert seen == [(None, None)]


def test_sinks_that_are_weights_are_read_as_they_are_on_a_cpu(model):
    sinks = torch.nn.Parameter(torch.linspace(-1, 4, 8).bfloat16())
    settings = {"min_context_tokens": 16, "selection": {"budget_tokens": 64}}
    outputs = []
    for given in (sinks, sinks.detach()):
        # The builder warms the layer up. A parameter with a gradient must not end the start.
        harness = LayerHarness(model, settings=settings, sinks=given)
        request = harness.request(300)
        harness.step([(request, 300)])
        (output,) = harness.step([(request, 1)])
        outputs.append(output.detach())
    assert torch.equal(*outputs)


@pytest.mark.parametrize("implementation", [SparseCPUImpl, SparseCUDAImpl])
def test_sinks_that_are_replaced_in_place_are_read_from_then_on(implementation):
    impl = object.__new__(implementation)
    impl.sinks = torch.nn.Parameter(torch.ones(8).bfloat16())
    impl.scale, impl.logits_soft_cap = 1.0, 0.0
    before = impl.softmax.sink_logits
    # A reload of weights does this. A graph has captured the address.
    impl.sinks.data.copy_(torch.full((8,), 5.0))
    after = impl.softmax.sink_logits
    assert after.tolist() == [5.0] * 8
    assert after.data_ptr() == before.data_ptr() == impl.sinks.data_ptr()


@pytest.mark.parametrize("backend", ["unique", "sinkrouter"])
def test_layers_that_attend_to_a_chunk_stay_dense(backend, model):
    settings = {"routing": {"accept": "uncalibrated"}} if backend == "sinkrouter" else {}
    harness = LayerHarness(model, num_blocks=200, backend=backend, layer_index=3, settings=settings)
    assert harness.layer.impl.plan.is_sparse
    harness.layer.attention_chunk_size = CHUNK
    config = harness.builder.vllm_config
    with set_current_vllm_config(config):
        chunked = create_chunked_local_attention_backend(harness.backend, CHUNK)
        chunked.get_builder_cls()(harness.spec, [harness.layer.layer_name], config, torch.device("cpu"))
    plan = harness.layer.impl.plan
    assert not plan.is_sparse
    assert plan.statistics is None
