"""Every policy beside every section, in one layer on a CPU: a step agrees with its reference, or one sentence refuses
the settings."""

import pytest
from support.families.referee import watch
from support.layer import LayerHarness

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.evictions import COMPACTIONS
from vllm_sparse_plugin.policies import POLICIES

SECTIONS = {
    "alone": {},
    "anchors": {"selection": {"anchor_layers": 2}},
    "routing": {"routing": {"threshold": 0.05, "dense_layers": 0, "accept": "uncalibrated"}},
    "stopping": {"stopping": {"block_tokens": 64}},
    "routing and stopping": {
        "routing": {"threshold": 0.05, "dense_layers": 0, "accept": "uncalibrated"}, "stopping": {"block_tokens": 64},
    },
    "offload": {"offload": {"host_memory": "1GiB"}},
    "lossless": {"lossless": {}},
    "prefill by blocks": {"prefill": {"method": "blocks", "min_context_tokens": 0}},
    "prefill by tokens": {"prefill": {"method": "zipvl", "min_context_tokens": 0}},
    **{method.name(): {"compaction": {"method": method.name()}} for method in COMPACTIONS},
}  # fmt: skip
BUDGETS = ({"sparse_budget_tokens": 128}, {"sparse": "dense"}, None)


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("policy", [policy.name() for policy in POLICIES])
def test_a_step_agrees_with_its_reference_or_is_refused(model, policy, section):
    settings = {**SECTIONS[section], "min_context_tokens": 0}
    selection = {"policy": policy, **settings.pop("selection", {})}
    settings["selection"] = selection if policy == "dense" else selection | {"budget_tokens": 64}
    refused, harness = "", None
    try:
        harness = LayerHarness(model, settings=settings, num_blocks=12)
    except ConfigurationError as error:
        refused = str(error)
    if harness is None:
        assert ", allowed" in refused
        assert len(refused.splitlines()) == 1
        return
    requests = [harness.request(prompt) for prompt in (150, 120, 90)]
    with watch() as referee:
        for request in requests:
            harness.step([(request, request.prompt_tokens)])
        for budgets in ((None,) * 3, BUDGETS):
            for request, budget in zip(requests, budgets, strict=True):
                request.arguments = budget
            outputs = harness.step([(request, 1) for request in requests])
    assert referee.faults == []
    assert all(output.isfinite().all() for output in outputs)
    reads_less = policy != "dense" or {"routing", "stopping"} & settings.keys()
    assert (referee.steps > 0) == bool(reads_less and section != "lossless")
