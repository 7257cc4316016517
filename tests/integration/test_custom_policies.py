"""The policies of docs/extending/policy.md behave as the page says, on a CPU and on a GPU."""

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from support.layer import LayerHarness, Request
from support.paged import dense_attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_sparse_plugin.attention.cuda import SparseCUDAMetadataBuilder
from vllm_sparse_plugin.attention.cuda import builder as builder_module
from vllm_sparse_plugin.config import ResolvedConfig, resolve
from vllm_sparse_plugin.policies import POLICIES, Selection
from vllm_sparse_plugin.requests.arguments import pages_of_request

PAGE = Path(__file__).parents[2] / "docs" / "extending" / "policy.md"
SETTINGS = {
    "selection": {"statistics": "int8", "budget_tokens": 64, "page_size": 8},
    "min_context_tokens": 0,
}
LENGTHS = (30, 64, 71, 72, 73, 300, 517, 999)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    if request.param != current_platform.device_type:
        pytest.skip(f"vLLM runs on {current_platform.device_type}")
    return request.param


@pytest.fixture
def policies(tmp_path, monkeypatch) -> dict[str, type[Selection]]:
    """The classes of the page's examples, by the names of their files."""
    found = {}
    for name, code in re.findall(r"```python\n# policies/(\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL):
        file = tmp_path / f"{name}.py"
        file.write_text(code)
        spec = importlib.util.spec_from_file_location(f"example_{name}", file)
        module = importlib.util.module_from_spec(spec)
        # pydantic looks up the annotations of a class in its module.
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        classes = (value for value in vars(module).values() if isinstance(value, type))
        (found[name],) = (each for each in classes if issubclass(each, Selection) and each.__module__ == spec.name)
    return found


def visible_tokens(harness: LayerHarness, policy: Selection, request: Request) -> torch.Tensor:
    """The tokens that `select` chooses for the newest token of a request: `[num_kv_heads, context]` bool."""
    impl, context, size = harness.layer.impl, len(request.keys), policy.page_size
    query = request.fresh[-1:].to(harness.cache.device).unflatten(1, (harness.num_kv_heads, -1))
    table = torch.tensor([request.blocks], device=harness.cache.device)
    num_pages = torch.tensor([context // size], device=harness.cache.device)
    pages = policy.select(query, impl.cache.statistics, table, num_pages)[0].cpu()
    visible = torch.zeros(harness.num_kv_heads, context, dtype=torch.bool)
    visible[:, context // size * size :] = True
    for head, chosen in enumerate(pages):
        for page in chosen[chosen >= 0].tolist():
            visible[head, page * size : (page + 1) * size] = True
    return visible


@pytest.mark.parametrize("name", ["half_spread", "evenly_spaced"])
def test_a_decode_step_reads_what_the_policy_of_the_page_selects(model, device, policies, name):
    statistics = {"statistics": "int8"} if name == "half_spread" else {}
    policy = policies[name](budget_tokens=64, **statistics)
    harness = LayerHarness(model, settings=SETTINGS, device=device)
    impl = harness.layer.impl
    impl.bind(replace(impl.plan, selector=policy))
    assert impl.plan.selects_in_torch == (name == "evenly_spaced")
    requests = [harness.request(length) for length in LENGTHS]
    for request, length in zip(requests, LENGTHS, strict=True):
        harness.step([(request, length)])
    outputs = harness.step([(request, 1) for request in requests])
    for request, output in zip(requests, outputs, strict=True):
        visible = visible_tokens(harness, policy, request)
        assert visible.all() == (len(request.keys) // 8 <= 8)
        expected = dense_attention(
            request.fresh[-1].unflatten(0, (harness.num_kv_heads, -1)),
            request.keys,
            request.values,
            impl.scale,
            visible,
        )
        torch.testing.assert_close(output[0].double(), expected, atol=1e-2, rtol=2e-2)


class BeyondSelection(Selection):
    """Names pages that are not complete, too."""

    policy: Literal["beyond"] = "beyond"

    def select(self, query, statistics, block_table, num_pages, budgets=None):
        offsets = torch.arange(self.budget_pages, device=query.device) - self.budget_pages // 2
        return (num_pages[:, None] + offsets)[:, None].expand(-1, query.shape[1], -1)


def test_pages_that_are_not_complete_stand_for_no_page(model, device):
    policy = BeyondSelection(budget_tokens=64)
    harness = LayerHarness(model, settings=SETTINGS, device=device)
    impl = harness.layer.impl
    impl.bind(replace(impl.plan, selector=policy))
    request = harness.request(300)
    harness.step([(request, 300)])
    (output,) = harness.step([(request, 1)])
    context, pages = 301, 301 // 8
    visible = torch.zeros(harness.num_kv_heads, context, dtype=torch.bool)
    visible[:, (pages - 4) * 8 :] = True
    query = request.fresh[-1].unflatten(0, (harness.num_kv_heads, -1))
    expected = dense_attention(query, request.keys, request.values, impl.scale, visible)
    torch.testing.assert_close(output[0].double(), expected, atol=1e-2, rtol=2e-2)


def test_every_policy_of_the_project_has_a_kernel():
    assert [policy.name() for policy in POLICIES if issubclass(policy, Selection) and not policy.has_kernel] == []


def test_a_class_that_replaces_the_select_of_a_kernel_says_whether_it_has_one(policies):
    scored = policies["half_spread"]
    names = {"__module__": __name__, "select": BeyondSelection.select}
    with pytest.raises(TypeError, match=r"^Silent\.has_kernel: got none beside a `select`, allowed: True or False$"):
        type("Silent", (scored,), dict(names))
    assert not type("InTorch", (scored,), {**names, "has_kernel": False}).has_kernel


def with_policy(policy: Selection) -> ResolvedConfig:
    resolved = resolve(None, "unique")
    return ResolvedConfig(resolved.config.model_copy(update={"selection": policy}), resolved.sources)


def test_requests_have_no_budget_where_select_has_no_kernel(policies):
    config = with_policy(policies["evenly_spaced"]())
    sentence = r"^sparse_budget_tokens: got 64 with policy evenly_spaced, which selects pages in torch, allowed: none$"
    with pytest.raises(ValueError, match=sentence):
        pages_of_request({"sparse_budget_tokens": 64}, config)
    assert pages_of_request({"sparse_budget_tokens": 64}, with_policy(policies["half_spread"]())) == (8, 8, 0)


def test_a_select_that_no_graph_can_hold_runs_outside_full_graphs(policies, monkeypatch):
    evenly = policies["evenly_spaced"]

    class Capturable(evenly):
        capturable = True

    monkeypatch.setattr(builder_module.compat, "chosen_backend", lambda *_: "UNIQUE")
    for policy, support in (
        (evenly(), AttentionCGSupport.NEVER),
        (Capturable(), AttentionCGSupport.UNIFORM_BATCH),
        (policies["half_spread"](), AttentionCGSupport.UNIFORM_BATCH),
    ):
        config = with_policy(policy)
        monkeypatch.setattr(builder_module, "resolved", lambda *_, config=config: config)
        assert SparseCUDAMetadataBuilder.get_cudagraph_support(SimpleNamespace(), None) == support
