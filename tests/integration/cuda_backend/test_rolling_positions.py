"""Rolling positions: attention sinks directly before the window."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from sparse_kernels.rolling_attention import RollingWindow, Rotation
from support.cuda_layer import SIZE, common_metadata, plan_of, run
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

from vllm_sparse_plugin.attention.cuda import layer as layer_module
from vllm_sparse_plugin.attention.rolling import RollingPlan
from vllm_sparse_plugin.config import resolve

ANGLES = torch.arange(1000)[:, None] * 0.9 ** torch.arange(SIZE // 2)
WINDOW = RollingWindow(sink_tokens=4, cache_tokens=104, whole_tokens=104)


def rolls(layer, builder, window: RollingWindow = WINDOW) -> None:
    """Enables rolling positions in builder and layer."""
    compaction = {"method": "streaming_llm", "budget_tokens": window.cache_tokens, "positions": "rolling"}
    plan = RollingPlan(window, Rotation(torch.cat([ANGLES.cos(), ANGLES.sin()], dim=1)))
    layer.bind(plan_of(resolve({"compaction": compaction}, "dense"), rolling=plan))
    builder.rolls, builder.any_sparse_layer, builder.any_dense_layer = True, False, True


@pytest.fixture
def in_triton(interpreted):
    """Runs rolling positions in Triton's interpreter, within the context."""
    from sparse_kernels.rolling_attention import triton

    return mock.patch.object(layer_module, "attend_rolling", triton.attend_rolling)


def test_decoding_requests_and_prompts_see_their_sinks_directly_before_their_windows(layer, builder, in_triton):
    common = common_metadata([1, 1, 70, 30], [90, 500, 300, 90], [False, False, True, True])
    rolls(layer, builder, RollingWindow(4, 1000, 1000))
    with in_triton:
        output, dense, _ = run(layer, builder, common)
    torch.testing.assert_close(output, dense, atol=2e-2, rtol=2e-2)
    rolls(layer, builder)
    with in_triton:
        output, dense, metadata = run(layer, builder, common)
    assert (metadata.decode, metadata.prefill) == ([], None)
    fits = torch.tensor([True] + [False] * 71 + [True] * 30)
    close = [torch.allclose(mine, whole, atol=2e-2, rtol=2e-2) for mine, whole in zip(output, dense, strict=True)]
    assert close == fits.tolist()
    expected, _, _ = run(layer, builder, common)
    torch.testing.assert_close(output, expected, atol=2e-2, rtol=2e-2)
    # Without the rotation, the sinks would get other weights.
    window, rotation = layer.plan.rolling
    nowhere = replace(rotation, table=rotation.table[:1].expand_as(rotation.table))
    layer.bind(replace(layer.plan, rolling=RollingPlan(window, nowhere)))
    parted = (run(layer, builder, common)[0] - expected).abs().amax(dim=(1, 2)) > 2e-2
    assert not parted[fits].any()
    assert parted[~fits].float().mean() > 0.9


@pytest.mark.parametrize("start", [[0, 1, 2, 2, 2], [0, 1, 2, 4, 4]])
def test_a_graph_of_rolling_requests_is_padded_and_needs_no_plan_of_flash_attention(
    layer, builder, in_triton, monkeypatch, start
):
    starts, lengths = torch.tensor(start, dtype=torch.int32), torch.tensor([300, 500, 0, 0], dtype=torch.int32)
    common = common_metadata([1, 1, 1, 1], [300, 500, 1, 1], [False] * 4)
    padded = common.replace(query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths)
    rolls(layer, builder)
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", None)
    expected, _, _ = run(layer, builder, padded)
    with in_triton:
        output, _, metadata = run(layer, builder, padded)
    torch.testing.assert_close(output[:2], expected[:2], atol=2e-2, rtol=2e-2)
    assert output[2 : start[-1]].eq(0).all()
    assert output[start[-1] :].isnan().all()
    # They are vLLM's buffers, so a graph finds the numbers of later steps.
    assert metadata.query_start_loc is starts
    assert metadata.seq_lens is lengths
    assert metadata.block_table is padded.block_table_tensor
    assert metadata.num_decode_tokens == 0
