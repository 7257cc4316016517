"""Requests with different budgets in the batches of one attention layer."""

import random

import pytest
import torch
from support.engines import Engine, run_engine, save_shallow
from support.layer import LayerHarness, Request
from vllm.exceptions import VLLMValidationError

KINDS = (None, {"sparse_budget_tokens": 128}, {"sparse": "dense"}, {"sparse_budget_tokens": 24})
DENSE_TOLERANCE = 2e-2
"""vLLM's CPU kernel rounds probabilities to bfloat16; outputs here are averages of unit normals."""
SETTINGS = {"selection": {"budget_tokens": 64}, "min_context_tokens": 0}


def harness_of(model: str, policy: str = "unique", **settings: object) -> LayerHarness:
    selection = {"policy": policy, "budget_tokens": 64}
    # A sliding window has given back what a larger budget would read, so budgets are refused with it.
    settings = SETTINGS | {"selection": selection, "compaction": None} | settings
    return LayerHarness(model, settings=settings, backend=policy, num_blocks=60)


def is_dense(harness: LayerHarness, request: Request, output: torch.Tensor) -> bool:
    return bool((output[-1].double() - harness.dense(request)).abs().max() < DENSE_TOLERANCE)


def prompts_of(harness: LayerHarness, lengths: tuple[int, ...] = (900, 700, 800, 600)) -> list[Request]:
    """Requests of every kind, after their prompts."""
    requests = [harness.request(length) for length in lengths]
    for request, arguments in zip(requests, KINDS, strict=True):
        request.arguments = arguments
        harness.step([(request, request.prompt_tokens)])
    return requests


def forked(request: Request) -> Request:
    """The same request, to repeat a step: it writes what the earlier step wrote."""
    return Request(request.blocks, request.prompt_tokens, request.keys, request.values, arguments=request.arguments)


@pytest.mark.parametrize("policy", ["unique", "streaming_llm", "quest"])
@pytest.mark.parametrize("new", [1, 2])
def test_requests_of_all_kinds_in_a_batch_have_the_bits_they_have_alone(model, policy, new):
    """Two new tokens form a step with a draft."""
    harness = harness_of(model, policy)
    harness.builder.reorder_batch_threshold = new
    requests = prompts_of(harness)
    for _ in range(4):
        before = [forked(request) for request in requests]
        together = harness.step([(request, new) for request in requests])
        for index, request in enumerate(before):
            mixed = requests[index]
            data = mixed.fresh, mixed.keys[-new:], mixed.values[-new:]
            (alone,) = harness.step([(request, new)], {0: data})
            assert torch.equal(alone, together[index])


def taken(request: Request, new: int) -> dict[int, tuple]:
    """Queries, keys and values of a request's latest step, to take it again."""
    return {0: (request.fresh, request.keys[-new:], request.values[-new:])}


def test_each_request_reads_its_own_budget(model):
    """It reads what a layer with this budget as setting reads."""
    harness = harness_of(model)
    requests = [harness.request(length) for length in (900, 700, 800)]
    budgets = (64, 128, 512)
    steps: list[list[dict]] = [[], [], []]
    outputs: list[list[torch.Tensor]] = [[], [], []]
    for request, tokens in zip(requests, budgets, strict=True):
        request.arguments = {"sparse_budget_tokens": tokens}
    for new in (None, 1, 1, 1):
        for index, request in enumerate(requests if new is None else ()):
            harness.step([(request, request.prompt_tokens)])
            steps[index].append(taken(request, request.prompt_tokens))
        for index, output in enumerate(harness.step([(request, 1) for request in requests])):
            steps[index].append(taken(requests[index], 1))
            outputs[index].append(output)
    for index, tokens in enumerate(budgets):
        settings = SETTINGS | {"selection": {"budget_tokens": tokens}}
        plain = LayerHarness(model, settings=settings, num_blocks=60)
        request = plain.request(requests[index].prompt_tokens)
        replies = [plain.step([(request, len(step[0][0]))], step)[0] for step in steps[index]]
        assert torch.equal(torch.cat(replies[1:]), torch.cat(outputs[index]))


def test_a_request_with_the_budget_of_the_settings_has_the_bits_of_one_that_says_nothing(model):
    harness = harness_of(model)
    request, data = harness.request(900), None
    harness.step([(request, 900)])
    outputs = []
    for arguments in (None, {"sparse_budget_tokens": 64}, {"sparse_budget_tokens": 512}, {"other": 1}):
        step = forked(request)
        step.arguments = arguments
        (output,) = harness.step([(step, 1)], data)
        data = {0: (step.fresh, step.keys[-1:], step.values[-1:])}
        outputs.append(output)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[3])
    assert not torch.equal(outputs[0], outputs[2])


def test_a_budget_that_holds_the_context_is_dense(model):
    harness = harness_of(model)
    request, data, outputs = harness.request(300), None, []
    harness.step([(request, 300)])
    for arguments in ({"sparse": "dense"}, {"sparse_budget_tokens": 304}):
        step = forked(request)
        step.arguments = arguments
        (output,) = harness.step([(step, 1)], data)
        data = {0: (step.fresh, step.keys[-1:], step.values[-1:])}
        outputs.append(output)
    assert torch.equal(*outputs)
    assert is_dense(harness, step, output)


def test_routed_groups_are_those_of_the_budget_and_a_dense_request_has_none(model):
    harness = harness_of(model, routing={"threshold": -1.0, "dense_layers": 0, "accept": "uncalibrated"})
    plain, whole = harness.request(300), harness.request(300)
    whole.arguments = {"sparse": "dense"}
    for request in (plain, whole):
        harness.step([(request, 300)])
    routed, attended = harness.step([(plain, 1), (whole, 1)])
    # Every group is skipped except those of the dense request.
    assert not routed.any()
    assert is_dense(harness, whole, attended)


def test_an_engine_serves_every_kind_and_survives_a_bad_one():
    """A small budget changes tokens on text without needles, so a request with another budget would be detected."""
    rng = random.Random(3)
    prompt = [0, *(rng.randrange(3, 4000) for _ in range(1200))]
    kinds = [None, {"sparse_budget_tokens": 24}, {"sparse": "dense"}, {"sparse_budget_tokens": 4096}]
    mix = [*kinds, *reversed(kinds)]
    with run_engine("unique", {"selection": {"budget_tokens": 64}, "min_context_tokens": 0}) as engine:

        def answers(arguments: list[dict | None]) -> list[list[int]]:
            # All batches have one size, because the layers around attention may round differently in other sizes.
            return engine.answer([prompt] * len(mix), 40, True, arguments)

        # Each kind has cached blocks of its own. They are equal, because the prompt is computed in the same steps.
        for kind in kinds:
            engine.answer([prompt] * len(mix), 1, True, [kind] * len(mix))
        alone = [answers([kind] * len(mix))[0] for kind in kinds]
        mixed = answers(mix)
        with pytest.raises(VLLMValidationError, match="sparse_budget_tokens: got 12, allowed: a multiple of page_size"):
            engine.answer([prompt], arguments=[{"sparse_budget_tokens": 12}])
        assert answers(mix) == mixed
    assert mixed == [*alone, *reversed(alone)]
    assert alone[2] == alone[3]
    assert len({tuple(tokens) for tokens in alone}) == 3


SMALL_BLOCKS = {"block_size": 32, "max_num_batched_tokens": 8192}
DENSE = {"sparse": "dense"}
LOW = {"sparse_budget_tokens": 24}


def test_a_request_takes_no_cached_blocks_of_requests_that_read_less(tmp_path):
    """Follow-up requests have the log probabilities of an engine whose cache contains no decoded tokens."""
    rng = random.Random(4)
    prompt = [0, *(rng.randrange(3, 4000) for _ in range(1200))]
    config = {"selection": {"budget_tokens": 64}, "min_context_tokens": 0}
    options = {"model": str(save_shallow(tmp_path, layers=2)), **SMALL_BLOCKS}
    with run_engine("unique", config, **options) as engine:
        answers = engine.answer([prompt], 200, True, [None]) + engine.answer([prompt], 200, True, [LOW])
        usual, low = ([*prompt, *answer, 5] for answer in answers)
        asked = (low, DENSE), (usual, DENSE), (low, None)

        def follow_up(engine: Engine, turn: list[int], arguments: dict | None) -> tuple[dict[int, float], float]:
            before = engine.metric("vllm:prefix_cache_hits_total")
            (expected,) = engine.expect([turn], arguments)
            return expected, engine.metric("vllm:prefix_cache_hits_total") - before

        found = [follow_up(engine, *each) for each in asked]
        # Requests that read the same share blocks, whether an argument or the settings give the budget.
        for turn, arguments in ((low, LOW), (usual, None), (usual, {"sparse_budget_tokens": 64})):
            assert follow_up(engine, turn, arguments)[1] >= 1376
    with run_engine("unique", config, **options) as engine:
        engine.expect([prompt])
        # These have equal prompts, and use equal cached blocks.
        assert [follow_up(engine, *each) for each in asked] == found
    assert [hits for _, hits in found] == [0, 1184, 1184]
