"""An answer may end behind its drafts once it has the least number of tokens."""

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from vllm_sparse_plugin import compat

END = 3


@pytest.fixture
def metadata(monkeypatch):
    """Requests that have 5, 4 and 5 tokens and must have 8, with 3, 3 and no drafts."""
    monkeypatch.setattr(Sampler, "apply_logits_processors", Sampler.apply_logits_processors)
    compat.mend_min_tokens()
    compat.mend_min_tokens()
    processor = MinTokensLogitsProcessor(None, torch.device("cpu"), False)
    added = []
    for request, tokens in enumerate((5, 4, 5)):
        sampling = SamplingParams(min_tokens=8, stop_token_ids=[END])
        added.append((request, sampling, [1], [7] * tokens))
    processor.update_state(BatchUpdate(3, [], added, []))
    nothing = torch.zeros(3)
    return SamplingMetadata(
        temperature=None, all_greedy=True, all_random=False, top_p=None, top_k=None, generators={},
        max_num_logprobs=None, no_penalties=True, prompt_token_ids=None, frequency_penalties=nothing,
        presence_penalties=nothing, repetition_penalties=nothing, output_token_ids=[], allowed_token_ids_mask=None,
        bad_words_token_ids={}, logitsprocs=LogitsProcessors([processor]), spec_token_ids=[[7] * 3, [7] * 3, []],
    )  # fmt: skip


@pytest.mark.parametrize(("behind_drafts", "may_end"), [(True, [True, False, False]), (False, [False] * 3)])
def test_drafts_count_for_the_token_behind_them(metadata, behind_drafts, may_end):
    for _ in range(2):
        logits = torch.zeros(3, 10)
        logits[:, END] = 1
        Sampler().apply_logits_processors(logits, metadata, behind_drafts)
        assert (logits[:, END] == 1).tolist() == may_end
        assert logits.isfinite().sum() == 27 + sum(may_end)
