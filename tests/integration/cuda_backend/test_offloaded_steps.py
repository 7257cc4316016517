"""Steps of a layer whose keys and values lie in host memory. A CPU has one memory, so only addresses differ."""

import gc
from dataclasses import replace

import pytest
import torch
from sparse_kernels.block_prefill import COUNTERS, BlockRule
from sparse_kernels.compaction import QueryRing
from sparse_kernels.hot_pages import HotPool
from support.cuda_layer import BLOCK, GROUP, HEADS, SIZE, common_metadata, run
from torch.multiprocessing.reductions import StorageWeakRef

from vllm_sparse_plugin.attention.prefill import PrefillPlan
from vllm_sparse_plugin.offload.staging import Staging

BATCHES = {
    "prompts": ([70, 3, 130], [70, 300, 640], [True] * 3),
    "prompts beside decoding requests": ([1, 1, 64, 65, 2], [500, 40, 64, 400, 129], [False, False, True, True, True]),
    "decoding requests": ([1, 1], [300, 500], [False, False]),
}


def poisoned(capacity: int) -> torch.Tensor:
    return torch.full((2, capacity, HEADS, BLOCK, 2 * SIZE), torch.nan, dtype=torch.bfloat16)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("capacity", [10, 64])
def test_a_step_gives_the_bits_of_a_cache_on_the_device(batch, capacity, layer, builder):
    """Buffers of 10 blocks hold the longest context alone, so the prompts attend in groups."""
    builder.reorder_batch_threshold = 1
    expected, _, _ = run(layer, builder, common_metadata(*BATCHES[batch]))
    layer.bind(replace(layer.plan, offloads=True))
    layer.staging = builder.staging = Staging([layer], poisoned(capacity))
    output, _, metadata = run(layer, builder, common_metadata(*BATCHES[batch]))
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    prompts = sum(length > 1 for length in BATCHES[batch][0])
    assert len(metadata.staged) == (0 if not prompts else 1 if capacity == 64 else 2)


LONG_PROMPTS = {
    "alone": ([70], [640], [True]),
    "beside short prompts": ([70, 3, 130], [70, 300, 640], [True] * 3),
    "beside decoding requests": ([1, 1, 64, 130], [500, 40, 400, 640], [False, False, True, True]),
}


@pytest.mark.parametrize("batch", LONG_PROMPTS)
@pytest.mark.parametrize("capacity", [10, 64])
def test_sparse_prompts_give_the_bits_of_a_cache_on_the_device(batch, capacity, layer, builder):
    builder.reorder_batch_threshold = 1
    rule = BlockRule(density=0.01, least_blocks=2, dense_tokens=256)
    counters = torch.zeros(HEADS, COUNTERS, dtype=torch.int64)
    builder.prefill_rule, plan = rule, replace(layer.plan, prefill=PrefillPlan(rule, counters))
    layer.bind(plan)
    expected, dense, _ = run(layer, builder, common_metadata(*LONG_PROMPTS[batch]))
    once = counters.clone()
    assert not torch.allclose(expected[-40:], dense[-40:], atol=2e-2, rtol=2e-2)
    layer.bind(replace(plan, offloads=True))
    layer.staging = builder.staging = Staging([layer], poisoned(capacity))
    builder.vllm_config.model_config.max_model_len = capacity * BLOCK
    output, _, metadata = run(layer, builder, common_metadata(*LONG_PROMPTS[batch]))
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    assert torch.equal(counters, 2 * once)
    assert len(metadata.rounds) == len(metadata.staged) == (1 if capacity == 64 or batch == "alone" else 2)


@pytest.mark.parametrize("bound", ["exact", "without padding", "unknown"])
def test_blocks_that_a_step_writes_are_not_copied_ahead(bound, layer, builder):
    common = common_metadata([70, 3, 130], [70, 300, 640], [True] * 3)
    if bound == "without padding":
        lengths = common.seq_lens.tolist()
        starts = torch.tensor([0, 70, 73, 203, 203], dtype=torch.int32)
        table = torch.cat([common.block_table_tensor, torch.zeros(1, 10, dtype=torch.int32)])
        common = common.replace(
            num_reqs=4, query_start_loc=starts, query_start_loc_cpu=starts, block_table_tensor=table,
            seq_lens=torch.tensor([*lengths, 0], dtype=torch.int32),
        )  # fmt: skip
    elif bound == "unknown":
        common = common.replace(seq_lens_cpu_upper_bound=None)
    layer.bind(replace(layer.plan, offloads=True))
    builder.staging = Staging([layer], poisoned(64))
    (staged,) = builder.build(0, common).staged
    written = set((common.slot_mapping // BLOCK).tolist())
    assert not written & set(staged.early.blocks.tolist())
    assert written <= set(staged.late.blocks.tolist())


def test_statistics_of_a_cache_stay_when_the_layer_is_bound_again(layer):
    layer.bind(replace(layer.plan, offloads=True))
    cache, other = (torch.zeros(blocks, HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16) for blocks in (3, 4))
    layer.bind_cache(cache)
    layer.cache.statistics.vectors.fill_(7)
    # Another tensor of the same memory is the same cache.
    layer.bind_cache(cache[:])
    assert (layer.cache.statistics.vectors == 7).all()
    layer.bind_cache(other)
    assert layer.cache.statistics.vectors.shape[0] == 4
    assert not layer.cache.statistics.vectors.any()


def test_a_released_layer_holds_no_memory_of_its_engine(layer):
    ring = QueryRing(1, 2, 8, (HEADS * GROUP, SIZE), 16, torch.bfloat16, torch.device("cpu"))
    copies = HotPool.empty(1, HEADS, 2, 16, SIZE, torch.bfloat16, torch.device("cpu"))
    buffers, scratch = poisoned(2), torch.zeros(8)
    cache = torch.zeros(3, HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16)
    layer.bind(replace(layer.plan, offloads=True))
    layer.keep_queries(ring, 0)
    layer.hot, layer.staging, layer.scratch = (copies, 0), Staging([layer], buffers), scratch
    layer.bind_cache(cache)
    tensors = [*vars(ring).values(), copies.rows, buffers, scratch, cache, layer.statistics_beside]
    memory = [StorageWeakRef(each.untyped_storage()) for each in tensors if isinstance(each, torch.Tensor)]
    del ring, copies, buffers, scratch, cache, tensors
    layer.release()
    gc.collect()
    assert len(memory) > 5
    assert all(each.expired() for each in memory)
