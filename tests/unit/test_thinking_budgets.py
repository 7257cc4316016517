"""With drafts, thinking ends where it does without them, and no other request has its end."""

from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from vllm_sparse_plugin import compat

START, END = 30, (31, 32)
TOKENS = 16
REQUESTS = {
    "alone": [([1, START], 4)],
    "beside another": [([1, 2], None), ([1, START, 3], 4)],
    "two": [([1, START], 6), ([2, START], 9)],
    "none": [([1, START], 0), ([1, 2], 3)],
}


@pytest.fixture(autouse=True)
def mended(monkeypatch):
    for name in ("update_state", "_apply_forcing_to_logits"):
        monkeypatch.setattr(ThinkingBudgetStateHolder, name, getattr(ThinkingBudgetStateHolder, name))
    compat.mend_thinking_budgets()
    compat.mend_thinking_budgets()


def logits_after(request: int, context: Sequence[int]) -> torch.Tensor:
    """The logits of a model whose tokens depend on the whole context."""
    random = Random(str((request, context)))
    favourite = random.choice([*range(20), START, END[0]])
    return torch.zeros(40).index_fill(0, torch.tensor(favourite), 5)


def answers(
    requests: Sequence[tuple[list[int], int | None]],
    most_drafts: int = 0,
    draft: Callable[[int, list[int]], list[int]] = lambda request, context: [],
    end: Sequence[int] = END,
) -> list[list[int]]:
    """The answers of a greedy server with drafts that are checked as in vLLM's first model runner."""
    marks = SimpleNamespace(reasoning_start_token_ids=[START], reasoning_end_token_ids=list(end))
    holder = ThinkingBudgetStateHolder(marks, 8, most_drafts, torch.device("cpu"), False)
    outputs: list[list[int]] = [[] for _ in requests]
    added = [
        (row, SamplingParams(thinking_token_budget=budget), prompt, outputs[row])
        for row, (prompt, budget) in enumerate(requests)
    ]
    holder.sync_batch(BatchUpdate(len(requests), [], added, []))
    while min(map(len, outputs)) < TOKENS:
        contexts = [[*prompt, *output] for (prompt, _), output in zip(requests, outputs, strict=True)]
        drafts = [draft(row, context) for row, context in enumerate(contexts)]
        holder.update_state(outputs, drafts)
        last = torch.stack([logits_after(row, [*contexts[row], *drafts[row]]) for row in range(len(requests))])
        last = holder.apply_to_logits(last, any(drafts), drafts).argmax(dim=-1).tolist()
        places = [(row, place) for row, each in enumerate(drafts) for place in range(len(each))]
        verified = {}
        if places:
            rows = torch.stack([logits_after(row, [*contexts[row], *drafts[row][:place]]) for row, place in places])
            found = holder.apply_to_logits(rows, False, drafts).argmax(dim=-1).tolist()
            verified = dict(zip(places, found, strict=True))
        for row, drafted in enumerate(drafts):
            for place, token in enumerate(drafted):
                outputs[row].append(verified[row, place])
                if outputs[row][-1] != token:
                    break
            else:
                outputs[row].append(last[row])
    return [output[:TOKENS] for output in outputs]


@pytest.mark.parametrize("requests", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("end", [END, END[:1]], ids=["two tokens", "one token"])
def test_a_server_that_drafts_nothing_forces_the_end_in_the_right_row(requests, end):
    assert answers(requests, 4, end=end) == answers(requests, end=end)


@pytest.mark.parametrize("requests", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("end", [END, END[:1]], ids=["two tokens", "one token"])
def test_drafts_do_not_move_the_end(requests, end):
    plain = answers(requests, end=end)
    for seed in range(40):
        random = Random(seed)

        def draft(row, context, random=random):
            drafts: list[int] = []
            for _ in range(random.randrange(5)):
                likeliest = int(logits_after(row, [*context, *drafts]).argmax())
                drafts.append(likeliest if random.random() < 0.7 else random.choice([*end, 3]))
            return drafts

        assert answers(requests, 4, draft, end) == plain
