"""Steps that draft and steps that verify, in lossless mode."""

from unittest import mock

import pytest
import torch
from support.cuda_layer import common_metadata, run

from vllm_sparse_plugin.attention.cuda import layer as layer_module


def test_in_lossless_mode_drafting_steps_select_and_steps_that_answer_attend_densely(builder, layer):
    builder.answers_sparsely = False
    builder.reads = reads = CountedSteps()
    output, dense, metadata = run(layer, builder, common_metadata([3, 2], [300, 500], [False, False]))
    assert (metadata.num_decode_tokens, metadata.prefill.num_actual_tokens, reads.steps) == (0, 5, 0)
    assert metadata.verified is None
    assert torch.equal(output, dense)
    output, dense, metadata = run(layer, builder, common_metadata([1, 1], [300, 500], [False, False]), drafts=True)
    assert [(part.tokens, part.seq_lens.tolist()) for part in metadata.decode] == [(slice(0, 2), [300, 500])]
    assert (metadata.prefill, reads.steps) == (None, 1)
    assert output.isfinite().all()
    assert not any(torch.allclose(*rows, atol=2e-2, rtol=2e-2) for rows in zip(output, dense, strict=True))


@pytest.mark.parametrize("has_dense_layers", [False, True])
def test_a_step_that_verifies_as_many_drafts_of_every_request_attends_at_once(
    builder, layer, monkeypatch, has_dense_layers
):
    builder.answers_sparsely, builder.verifies_at_once, builder.any_dense_layer = False, True, has_dense_layers
    common = common_metadata([3, 3], [300, 500], [False, False])
    kernel = mock.Mock(side_effect=layer_module.multi_token_decode)
    monkeypatch.setattr(layer_module, "multi_token_decode", kernel)
    output, dense, metadata = run(layer, builder, common)
    assert kernel.call_count == 1
    assert (metadata.decode, metadata.prefill) == ([], None)
    torch.testing.assert_close(output, dense, atol=1e-2, rtol=1e-2)
    # A graph must read the original buffers, not copies.
    assert metadata.verified.seq_lens.data_ptr() == common.seq_lens.data_ptr()
    assert metadata.verified.block_table.data_ptr() == common.block_table_tensor.data_ptr()


@pytest.mark.parametrize(
    ("queries", "drafting"), [([1, 1], False), ([5, 5], False), ([3, 3, 2], False), ([3, 3], True)]
)
def test_other_steps_do_not_verify(builder, queries, drafting):
    """One token decodes, five exceed the number of drafts plus one, and drafting steps choose pages."""
    builder.answers_sparsely, builder.verifies_at_once = False, True
    common = common_metadata(queries, [300] * len(queries), [False] * len(queries))
    built = builder.build_for_drafting(common, 0) if drafting else builder.build(0, common)
    assert built.verified is None


def test_tokens_over_a_cache_of_8_bits_are_verified_by_the_kernel_that_they_would_run_alone(builder, layer):
    """This kernel rounds weights to 8 bits. Another kernel could make other tokens the likeliest."""
    builder.answers_sparsely, builder.verifies_at_once = False, False
    output, dense, metadata = run(layer, builder, common_metadata([3, 3], [300, 500], [False, False]))
    assert (metadata.verified, metadata.prefill.num_actual_tokens) == (None, 6)
    assert torch.equal(output, dense)


class CountedSteps:
    """Counts the steps that are counted."""

    steps = 0

    def step(self, *_: object) -> None:
        self.steps += 1
