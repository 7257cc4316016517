import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import BatchUpdate, validate_logits_processors_parameters
from vllm.v1.sample.logits_processor import MoveDirectionality as Move
from vllm.v1.worker.gpu.sample.logits_processor import (
    build_custom_logits_processors,
    build_custom_logits_processors_params_validator,
)

from vllm_sparse_plugin.tools.eval import FORCED_TOKENS_ARGUMENT, FORCED_TOKENS_PROCESSOR
from vllm_sparse_plugin.tools.forced_tokens import ForcedTokens

VOCABULARY = 12
PLAIN = SimpleNamespace(speculative_config=None)


def forcing(*tokens: object) -> SamplingParams:
    return SamplingParams(extra_args={FORCED_TOKENS_ARGUMENT: list(tokens)})


def chosen(logits: torch.Tensor) -> list[int | None]:
    """The only token that a row permits; None if it permits all."""
    return [None if row.isfinite().all() else row.argmax().item() for row in logits]


class TestV1:
    def processor(self) -> ForcedTokens:
        return ForcedTokens(PLAIN, torch.device("cpu"), False)

    def test_rows_follow_their_own_output_and_are_free_afterwards(self):
        processor = self.processor()
        first, second = [], [4, 4]
        added = [(0, forcing(7, 8), [1], first), (1, SamplingParams(), [1], []), (2, forcing(1, 2, 3), [1], second)]
        processor.update_state(BatchUpdate(batch_size=3, removed=[], added=added, moved=[]))
        assert chosen(processor.apply(torch.zeros(3, VOCABULARY))) == [7, None, 3]
        first.append(7)
        second.append(3)
        processor.update_state(None)
        assert chosen(processor.apply(torch.zeros(3, VOCABULARY))) == [8, None, None]

    def test_rows_move_and_leave_with_their_requests(self):
        processor = self.processor()
        added = [(0, forcing(7), [1], []), (1, SamplingParams(), [1], []), (2, forcing(5), [1], [])]
        processor.update_state(BatchUpdate(batch_size=3, removed=[], added=added, moved=[]))
        processor.update_state(BatchUpdate(batch_size=2, removed=[0], added=[], moved=[(2, 0, Move.UNIDIRECTIONAL)]))
        assert chosen(processor.apply(torch.zeros(2, VOCABULARY))) == [5, None]

    def test_nothing_changes_for_requests_that_ask_for_nothing(self):
        processor = self.processor()
        processor.update_state(BatchUpdate(batch_size=1, removed=[], added=[(0, SamplingParams(), [1], [])], moved=[]))
        logits = torch.randn(1, VOCABULARY)
        assert torch.equal(processor.apply(logits.clone()), logits)

    def test_a_token_beyond_the_vocabulary_is_skipped(self):
        processor = self.processor()
        added = [(0, forcing(VOCABULARY), [1], [])]
        processor.update_state(BatchUpdate(batch_size=1, removed=[], added=added, moved=[]))
        assert chosen(processor.apply(torch.zeros(1, VOCABULARY))) == [None]


class TestV2:
    def processor(self, prompt_lens: list[int]) -> ForcedTokens:
        states = SimpleNamespace(
            device=torch.device("cpu"), max_num_reqs=len(prompt_lens), vocab_size=VOCABULARY, all_token_ids=None,
            prompt_len=SimpleNamespace(np=np.array(prompt_lens)), prefill_len=None, total_len=None,
        )  # fmt: skip
        (built,) = build_custom_logits_processors(PLAIN, states, False, [FORCED_TOKENS_PROCESSOR])
        assert type(built) is ForcedTokens
        return built

    def context(self, slots: list[int], lengths: list[int]) -> SimpleNamespace:
        # The padding of a CUDA graph has lengths, too.
        return SimpleNamespace(idx_mapping_np=np.array(slots), seq_lens_upper_bound_np=np.array([*lengths, 0, 0]))

    def test_slots_follow_their_own_length_and_are_free_afterwards(self):
        processor = self.processor([10, 3, 5])
        assert [processor.add_request(0, forcing(7, 8)), processor.add_request(1, SamplingParams())] == [True, False]
        assert processor.add_request(2, forcing(1, 2, 3))
        steps = [[5, 10, 3], [7, 11, 4], [8, 12, 5]]  # lengths of slots 2, 0 and 1
        found = [chosen(processor.apply(torch.zeros(3, VOCABULARY), self.context([2, 0, 1], each))) for each in steps]
        assert found == [[1, 7, None], [3, 8, None], [None, None, None]]

    def test_a_prompt_that_is_prefilled_in_chunks_waits_for_its_end(self):
        processor = self.processor([10])
        processor.add_request(0, forcing(7))
        found = [chosen(processor.apply(torch.zeros(1, VOCABULARY), self.context([0], [n]))) for n in (4, 8, 10, 11)]
        assert found == [[None], [None], [7], [None]]

    def test_a_slot_forgets_its_last_request(self):
        processor = self.processor([10])
        processor.add_request(0, forcing(7))
        processor.add_request(0, SamplingParams())
        logits = torch.randn(1, VOCABULARY)
        assert torch.equal(processor.apply(logits.clone(), self.context([0], [10])), logits)


def admit_v1(params: SamplingParams) -> None:
    validate_logits_processors_parameters([FORCED_TOKENS_PROCESSOR], params)


def admit_v2(params: SamplingParams) -> None:
    build_custom_logits_processors_params_validator([FORCED_TOKENS_PROCESSOR])(params)


@pytest.mark.parametrize("admit", [admit_v1, admit_v2])
@pytest.mark.parametrize("tokens", [["7"], [1.5], [-1], "text", {"a": 1}], ids=repr)
def test_a_request_with_something_else_than_ids_is_refused_at_its_admission(admit, tokens):
    params = SamplingParams(extra_args={FORCED_TOKENS_ARGUMENT: tokens})
    with pytest.raises(VLLMValidationError, match=r"forced_token_ids: got .*, allowed: a list of token ids"):
        admit(params)


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(extra_args={"other": 1}), forcing(), forcing(1, 2)]
)
def test_other_requests_are_admitted(params):
    admit_v1(params)
    admit_v2(params)


@pytest.mark.parametrize("runner", [(torch.device("cpu"), False), (SimpleNamespace(prompt_len=None),)])
def test_speculation_is_refused(runner):
    with pytest.raises(ValueError, match=f"got {FORCED_TOKENS_PROCESSOR} with speculation, allowed: without"):
        ForcedTokens(SimpleNamespace(speculative_config="ngram"), *runner)


def test_vllm_can_hand_the_class_to_its_workers():
    assert pickle.loads(pickle.dumps(ForcedTokens)) is ForcedTokens
