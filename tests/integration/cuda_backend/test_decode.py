"""Steps of decoding requests beside prompts."""

from dataclasses import replace

import pytest
import torch
from sparse_kernels.group_routing import GroupRouting
from support.cuda_layer import GROUP, HEADS, common_metadata, plan_of, run
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

from vllm_sparse_plugin.config import resolve


@pytest.mark.parametrize("layer", ["unique", "quest", "infllm", "mean", "streaming_llm"], indirect=True)
def test_a_mixed_batch_decodes_sparsely_and_prefills_densely(layer, builder):
    common = common_metadata([4, 4, 1, 70], [300, 40, 500, 200], [False, False, False, True])
    output, dense, metadata = run(layer, builder, common)
    assert [decode.tokens for decode in metadata.decode] == [slice(0, 8), slice(8, 9)]
    assert metadata.prefill.num_actual_tokens == 70
    # The second request fits the budget; the last one is a prompt.
    torch.testing.assert_close(output[4:8], dense[4:8], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(output[9:], dense[9:], atol=2e-2, rtol=2e-2)
    for tokens in (slice(0, 4), slice(8, 9)):
        assert output[tokens].isfinite().all()
        assert not torch.allclose(output[tokens], dense[tokens], atol=2e-2, rtol=2e-2)


def test_single_tokens_of_a_prompt_attend_densely(layer, builder):
    common = common_metadata([1, 1], [300, 500], [False, True])
    output, dense, metadata = run(layer, builder, common)
    torch.testing.assert_close(output[1], dense[1], atol=2e-2, rtol=2e-2)
    assert not torch.allclose(output[0], dense[0], atol=2e-2, rtol=2e-2)
    assert metadata.prefill is None
    # The flags are a buffer that graphs read: the next step clears them.
    address = metadata.decode[0].dense.data_ptr()
    (later,) = builder.build(0, common_metadata([1, 1], [300, 500], [False, False])).decode
    assert not later.dense.any()
    assert later.dense.data_ptr() == address


@pytest.mark.parametrize("prompts", [0, 1])
def test_a_launch_has_no_more_tokens_than_a_grid_has_places(builder, prompts):
    """The tokens of a launch are a dimension of its grid that ends at 65,535."""
    builder.reorder_batch_threshold = 65
    common = common_metadata([65] * 1100 + [70] * prompts, [300] * (1100 + prompts), [False] * 1100 + [True] * prompts)
    metadata = builder.build(0, common)
    assert [decode.tokens for decode in metadata.decode] == [slice(0, 65 * 1008), slice(65 * 1008, 65 * 1100)]
    assert [len(decode.seq_lens) for decode in metadata.decode] == [1008, 92]
    assert torch.equal(torch.cat([decode.block_table for decode in metadata.decode]), common.block_table_tensor[:1100])
    assert metadata.num_decode_tokens == 65 * 1100


def test_a_decode_batch_needs_no_plan_of_flash_attention(builder, monkeypatch):
    def fail(*arguments, **more):
        raise AssertionError("planned")

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", fail)
    metadata = builder.build(0, common_metadata([4, 4], [300, 40], [False, False]))
    assert [decode.tokens for decode in metadata.decode] == [slice(0, 8)]


def test_dense_attention_that_stops_reads_no_further_and_counts(layer, builder):
    loose = {"scale_tolerance": 1000.0, "direction_tolerance": 16.0, "block_tokens": 64}
    for patience in (0, 1):
        settings = {"stopping": loose | {"patience": patience}, "min_context_tokens": 0}
        counters = torch.zeros(HEADS, 4, dtype=torch.int64)
        layer.bind(plan_of(resolve(settings, "art"), counters=counters))
        output, dense, _ = run(layer, builder, common_metadata([1, 1], [300, 500], [False, False]))
        close = [torch.allclose(mine, whole, atol=2e-2, rtol=2e-2) for mine, whole in zip(output, dense, strict=True)]
        assert close == [patience == 0] * 2
        # All of 18 and 31 pages of 16 tokens, in blocks of 4; or two blocks of each.
        tokens = 2 * 128 + 300 % 16 + 500 % 16 if patience else 800
        assert counters.tolist() == [[2, 4 if patience else 13, tokens, 800]] * HEADS


@pytest.mark.parametrize("prefilling", [[False] * 4, [False, True], [False, True, False, False]])
def test_padded_requests_of_a_graph_are_one_run_with_the_rest(builder, prefilling):
    common = common_metadata([1, 1], [300, 500], [False, False])
    start = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32)
    padded = common.replace(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=torch.tensor([300, 500, 0, 0], dtype=torch.int32),
        block_table_tensor=common.block_table_tensor.repeat(2, 1),
        is_prefilling=torch.tensor(prefilling),
        num_reqs=4,
        num_actual_tokens=4,
    )
    builder.dense_requests.write([True] * 16)
    (decode,) = builder.build(0, padded).decode
    assert decode.tokens == slice(0, 4)
    assert decode.dense.tolist() == [False, any(prefilling), False, False]
    assert decode.seq_lens.tolist() == [300, 500, 0, 0]


def test_a_dense_layer_leaves_everything_to_flash_attention(layer, builder):
    builder.any_dense_layer = True
    layer.bind(replace(layer.plan, selector=None))
    output, dense, _ = run(layer, builder, common_metadata([1, 70], [300, 200], [False, True]))
    assert torch.equal(output, dense)


@pytest.mark.parametrize("layer", ["unique", "quest", "streaming_llm", "dense", "art"], indirect=True)
@pytest.mark.parametrize("selects", [True, False])
def test_skipped_groups_are_zero_and_others_keep_their_bits(layer, builder, selects):
    if selects and layer.plan.selector is None:
        pytest.skip("a dense policy selects nothing")
    common = common_metadata([4, 4, 1, 1, 70], [300, 40, 500, 90, 200], [False, False, False, True, True])
    selector = layer.plan.selector if selects else None
    nothing = GroupRouting(torch.tensor([[2.0, 0, 0, 0], [2.0, 0, 0, 0]]))
    layer.bind(replace(layer.plan, selector=selector, dense_tokens=50, routing=nothing))
    plain, dense, metadata = run(layer, builder, common)
    first = GroupRouting(torch.tensor([[-2.0, 0, 0, 0], [2.0, 0, 0, 0]]))
    layer.bind(replace(layer.plan, routing=first))
    routed, _, _ = run(layer, builder, common)
    # Short contexts, prompts' single tokens and prompts are not routed.
    skips = torch.tensor([True] * 4 + [False] * 4 + [True] + [False] * 71)
    assert len(metadata.decode) == 2
    assert routed[skips, :GROUP].eq(0).all()
    assert torch.equal(routed[skips, GROUP:], plain[skips, GROUP:])
    assert torch.equal(routed[~skips], plain[~skips])
    if not selects:
        torch.testing.assert_close(plain, dense, atol=2e-2, rtol=2e-2)


def test_a_dense_policy_leaves_everything_to_flash_attention(layer, builder):
    layer.bind(plan_of(resolve(None, "dense")))
    builder.any_sparse_layer = False
    builder.any_dense_layer = True
    output, dense, metadata = run(layer, builder, common_metadata([1, 70], [300, 200], [False, True]))
    assert torch.equal(output, dense)
    assert metadata.decode == []
