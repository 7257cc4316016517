"""`vllm_sparse_settings_info` at `/metrics`."""

import json

from prometheus_client import REGISTRY

from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.metrics.settings import SETTINGS, state_settings


def stated() -> list[dict[str, str]]:
    return [sample.labels for family in REGISTRY.collect() if family.name == SETTINGS for sample in family.samples]


def test_the_last_settings_are_stated_and_survive_vllm():
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    state_settings("UNIQUE", resolve(None, "unique"))
    assert [labels["backend"] for labels in stated()] == ["unique"]
    state_settings("QUEST", resolve({"selection": {"budget_tokens": 512}}, "quest"))
    # vLLM removes its metrics, by their names, when it starts another engine.
    unregister_vllm_metrics()
    (labels,) = stated()
    assert labels["backend"] == "quest"
    assert json.loads(labels["settings"])["selection"]["policy"] == "quest"
    assert json.loads(labels["settings"])["selection"]["budget_tokens"] == 512
