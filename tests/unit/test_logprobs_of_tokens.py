"""A request may ask for the log probabilities of some tokens while it or another request has drafts."""

import pytest
import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_sparse_plugin import compat

VOCABULARY = 40


@pytest.mark.parametrize("most", [None, 3], ids=["alone", "beside a request with logprobs"])
def test_log_probabilities_of_tokens_are_those_of_the_logits(monkeypatch, most):
    """The first request has no drafts; the second has two, of which the second is wrong."""
    sampled = torch.tensor([[9, -1, -1], [7, 6, -1]], dtype=torch.int32)
    monkeypatch.setattr(rejection_sampler, "rejection_sample", lambda *_, **__: sampled)
    monkeypatch.setattr(RejectionSampler, "forward", RejectionSampler.forward)
    compat.mend_logprobs_of_tokens()
    compat.mend_logprobs_of_tokens()
    nothing, logits, asked = torch.zeros(2), torch.randn(4, VOCABULARY), [[5, 6], [1]]
    sampling = SamplingMetadata(
        temperature=None, all_greedy=True, all_random=False, top_p=None, top_k=None, generators={},
        max_num_logprobs=most, no_penalties=True, prompt_token_ids=None, frequency_penalties=nothing,
        presence_penalties=nothing, repetition_penalties=nothing, output_token_ids=[], allowed_token_ids_mask=None,
        bad_words_token_ids={}, logitsprocs=LogitsProcessors(), logprob_token_ids=dict(enumerate(asked)),
    )  # fmt: skip
    drafts = SpecDecodeMetadata(
        torch.tensor([7, 8], dtype=torch.int32), [0, 2], torch.tensor([0, 2]), torch.tensor([1, 4]),
        torch.tensor([1, 2]), torch.tensor([0, 3]), torch.arange(4),
    )  # fmt: skip
    output = RejectionSampler(Sampler())(drafts, None, logits, sampling)
    found, expected = output.logprobs_tensors, logits.log_softmax(-1)
    # Rows of results, and rows of logits.
    for row, place, token, given in ((0, 0, 9, asked[0]), (3, 1, 7, asked[1]), (4, 2, 6, asked[1])):
        places = slice(0, 1 + len(given))
        assert found.logprob_token_ids[row, places].tolist() == [token, *given]
        torch.testing.assert_close(found.logprobs[row, places], expected[place, [token, *given]])
    assert found.logprobs.shape == (6, 1 + (most or 2))
