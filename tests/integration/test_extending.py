"""What the pages of docs/extending show works in a package of its own, in the layers of a CPU and of a GPU."""

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Literal

import pytest
import torch
from sparse_kernels.compaction import CompactionRule, HeldTokens
from support.layer import LayerHarness, Request
from support.paged import dense_attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_sparse_plugin import methods
from vllm_sparse_plugin.attention.cuda import SparseCUDAMetadataBuilder
from vllm_sparse_plugin.attention.cuda import builder as builder_module
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.evictions import COMPACTIONS
from vllm_sparse_plugin.policies import POLICIES, Selection
from vllm_sparse_plugin.requests.arguments import pages_of_request

PAGES = Path(__file__).parents[2] / "docs" / "extending"
LENGTHS = (30, 64, 71, 72, 73, 300, 517, 999)
SIZE = 8


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    if request.param != current_platform.device_type:
        pytest.skip(f"vLLM runs on {current_platform.device_type}")
    return request.param


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """An empty folder where Python finds packages. What it imports from there is forgotten."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    methods._announced.cache_clear()
    yield tmp_path
    methods._announced.cache_clear()
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def install(folder: Path, project: dict) -> None:
    """Writes what pip writes for a package whose modules lie in the folder already."""
    about = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project.get("entry-points", {}).items()
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items()) for group, points in groups
    ]
    (about / "entry_points.txt").write_text("\n".join(lines))
    methods._announced.cache_clear()


def follow(page: str, folder: Path) -> ModuleType:
    """Writes the files of a page, installs them, and returns the module with its tests."""
    for name, code in re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", (PAGES / page).read_text(), re.DOTALL):
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(code)
    described = folder / "pyproject.toml"
    if described.exists():
        install(folder, tomllib.loads(described.read_text())["project"])
    (tests,) = folder.glob("test_*.py")
    return importlib.import_module(tests.stem)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("page", ["policy.md", "eviction.md", "statistics.md", "kernel.md"])
def test_the_test_of_a_page_passes(page, folder):
    module = follow(page, folder)
    tests = [each for name, each in vars(module).items() if name.startswith("test_")]
    assert tests
    for each in tests:
        each()


def selecting(policy: str, **more: object) -> dict:
    return {"selection": {"policy": policy, "budget_tokens": 64, **more}, "min_context_tokens": 0}


def visible_tokens(harness: LayerHarness, request: Request) -> torch.Tensor:
    """The tokens that `select` chooses for the newest token of a request: `[num_kv_heads, context]` bool."""
    impl, context = harness.layer.impl, len(request.keys)
    query = request.fresh[-1:].to(harness.cache.device).unflatten(1, (harness.num_kv_heads, -1))
    table = torch.tensor([request.blocks], device=harness.cache.device)
    num_pages = torch.tensor([context // SIZE], device=harness.cache.device)
    pages = impl.plan.selector.select(query, impl.cache.statistics, table, num_pages)[0].cpu()
    visible = torch.zeros(harness.num_kv_heads, context, dtype=torch.bool)
    visible[:, context // SIZE * SIZE :] = True
    for head, chosen in enumerate(pages):
        for page in chosen[(chosen >= 0) & (chosen < context // SIZE)].tolist():
            visible[head, page * SIZE : (page + 1) * SIZE] = True
    return visible


@pytest.mark.parametrize(
    ("page", "policy", "in_torch"),
    [
        ("policy.md", "half_spread", False),
        ("policy.md", "evenly_spaced", True),
        ("policy.md", "with_neighbours", True),
        ("statistics.md", "largest", False),
    ],
)
def test_a_layer_reads_what_a_policy_of_a_page_selects(model, device, folder, page, policy, in_torch):
    follow(page, folder)
    harness = LayerHarness(model, settings=selecting(policy), device=device)
    impl = harness.layer.impl
    assert impl.plan.selector.name() == policy
    assert impl.plan.selects_in_torch == in_torch
    requests = [harness.request(length) for length in LENGTHS]
    for request, length in zip(requests, LENGTHS, strict=True):
        harness.step([(request, length)])
    outputs = harness.step([(request, 1) for request in requests])
    for request, output in zip(requests, outputs, strict=True):
        visible = visible_tokens(harness, request)
        assert visible.all() == (len(request.keys) // SIZE <= 8)
        query = request.fresh[-1].unflatten(0, (harness.num_kv_heads, -1))
        expected = dense_attention(query, request.keys, request.values, impl.scale, visible)
        torch.testing.assert_close(output[0].double(), expected, atol=1e-2, rtol=2e-2)


class BeyondSelection(Selection):
    """Names pages that are not complete, too."""

    policy: Literal["beyond"] = "beyond"

    def select(self, query, statistics, block_table, num_pages):
        offsets = torch.arange(self.budget_pages, device=query.device) - self.budget_pages // 2
        return (num_pages[:, None] + offsets)[:, None].expand(-1, query.shape[1], -1)


def announce(folder: Path, group: str, name: str, value: str, package: str = "another") -> None:
    install(folder, {"name": package, "version": "1", "entry-points": {f"vllm_sparse_plugin.{group}": {name: value}}})


def test_pages_that_are_not_complete_stand_for_no_page(model, device, folder, monkeypatch):
    beyond = ModuleType("beyond")
    beyond.BeyondSelection = BeyondSelection
    monkeypatch.setitem(sys.modules, "beyond", beyond)
    announce(folder, "policies", "beyond", "beyond:BeyondSelection")
    harness = LayerHarness(model, settings=selecting("beyond"), device=device)
    request = harness.request(300)
    harness.step([(request, 300)])
    (output,) = harness.step([(request, 1)])
    visible = torch.zeros(harness.num_kv_heads, 301, dtype=torch.bool)
    visible[:, (301 // SIZE - 4) * SIZE :] = True
    query = request.fresh[-1].unflatten(0, (harness.num_kv_heads, -1))
    expected = dense_attention(query, request.keys, request.values, harness.layer.impl.scale, visible)
    torch.testing.assert_close(output[0].double(), expected, atol=1e-2, rtol=2e-2)


def test_a_class_that_replaces_the_select_of_a_kernel_says_whether_it_has_one(folder):
    follow("policy.md", folder)
    names = {"__module__": __name__, "select": BeyondSelection.select}
    with pytest.raises(TypeError, match=r"^Silent\.has_kernel: got none beside a `select`, allowed: True or False$"):
        type("Silent", (POLICIES.find("half_spread"),), dict(names))


def test_requests_have_no_budget_where_select_has_no_kernel(folder):
    follow("policy.md", folder)
    sentence = r"^sparse_budget_tokens: got 64 with policy evenly_spaced, which selects pages in torch, allowed: none$"
    with pytest.raises(ValueError, match=sentence):
        pages_of_request({"sparse_budget_tokens": 64}, resolve(selecting("evenly_spaced"), "unique"))
    config = resolve(selecting("half_spread"), "unique")
    assert pages_of_request({"sparse_budget_tokens": 64}, config) == 8


def test_a_select_that_no_graph_can_hold_runs_outside_full_graphs(folder, monkeypatch):
    follow("policy.md", folder)
    monkeypatch.setattr(builder_module.compat, "chosen_backend", lambda *_: "UNIQUE")
    cases = {"evenly_spaced": AttentionCGSupport.NEVER, "half_spread": AttentionCGSupport.UNIFORM_BATCH}
    for capturable in (False, True):
        monkeypatch.setattr(POLICIES.find("evenly_spaced"), "capturable", capturable)
        for policy, support in cases.items():
            config = resolve(selecting(policy), "unique")
            monkeypatch.setattr(builder_module, "resolved", lambda *_, config=config: config)
            expected = AttentionCGSupport.UNIFORM_BATCH if capturable else support
            assert SparseCUDAMetadataBuilder.get_cudagraph_support(SimpleNamespace(), None) == expected


@pytest.mark.parametrize("every", [None, 40])
@pytest.mark.parametrize("method", ["small_keys", "voted_values"])
def test_a_layer_keeps_the_tokens_with_the_best_scores_of_a_page(model, folder, method, every):
    follow("eviction.md", folder)
    compaction = {"method": method, "budget_tokens": 64, "min_context_tokens": 0, "every": every}
    harness = LayerHarness(model, settings={"compaction": compaction}, backend="dense", block_size=32)
    scored, rule = [], CompactionRule.scores

    def noted(self, tokens: HeldTokens) -> torch.Tensor:
        scores = rule(self, tokens)
        scored.append((scores, tokens.keys, tokens.values))
        return scores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompactionRule, "scores", noted)
        request = harness.request(300)
        for new in (200, 100, 1, 1):
            (output,) = harness.step([(request, new)])
    ((scores, keys, values),) = scored
    held = scores.shape[1]
    assert torch.equal(keys, request.keys[:held].transpose(0, 1).float())
    assert torch.equal(values, request.values[:held].transpose(0, 1).float())
    # 9 full blocks are 288 tokens. Two of them keep 64 tokens; the newest 12 tokens stay.
    window, always = (32 if method == "voted_values" else 0), torch.zeros(2, 302, dtype=torch.bool)
    always[:, :4] = always[:, 300 - window : 288] = True
    ranked = scores[:, :288].masked_fill(always[:, :288], torch.inf).argsort(descending=True, stable=True)[:, :64]
    visible = torch.zeros(2, 302, dtype=torch.bool).scatter(1, ranked, True)
    visible[:, 288:] = True
    query = request.fresh[-1].unflatten(0, (2, -1))
    expected = dense_attention(query, request.keys, request.values, harness.layer.impl.scale, visible)
    torch.testing.assert_close(output[0].double(), expected, atol=2e-2, rtol=2e-2)


FAULTS = {
    "missing": ("missing_module:Class", r"got 'missing_module:Class' of another, which does not load \(ModuleNotFound"),
    "no class": ("json:dumps", "got 'json:dumps' of another, allowed: a subclass of vllm_sparse_plugin"),
    "another class": ("json:JSONDecoder", "got 'json:JSONDecoder' of another, allowed: a subclass of vllm_sparse_plu"),
}


@pytest.mark.parametrize(
    ("group", "section", "tag"), [("policies", "selection", "policy"), ("evictions", "compaction", "method")]
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_entry_point_is_refused_when_it_is_named(folder, fault, group, section, tag):
    value, sentence = FAULTS[fault]
    announce(folder, group, "broken", value)
    assert resolve(None, "unique")  # nothing names it
    with pytest.raises(ConfigurationError, match=rf"^entry point vllm_sparse_plugin\.{group}: {sentence}"):
        resolve({section: {tag: "broken"}}, "unique")
    with pytest.raises(ConfigurationError, match=r"allowed: .*broken, .* or "):
        resolve({section: {tag: "unknown"}}, "unique")


def test_a_name_belongs_to_one_package(folder):
    announce(folder, "policies", "quest", "beyond:BeyondSelection")
    sentence = (
        r"^entry point vllm_sparse_plugin\.policies: got 'quest' from another and vllm-sparse-plugin, allowed: one"
    )
    with pytest.raises(ConfigurationError, match=sentence):
        resolve(None, "quest")
    for package in ("first", "second"):
        announce(folder, "evictions", "mine", "beyond:BeyondSelection", package)
    with pytest.raises(ConfigurationError, match=r": got 'mine' from first and second, allowed: one of them$"):
        resolve({"compaction": {"method": "mine"}}, "dense")


def test_an_entry_point_has_the_name_of_its_class(folder):
    follow("policy.md", folder)
    announce(folder, "policies", "other_name", "my_policies.half_spread:HalfSpreadSelection")
    with pytest.raises(ConfigurationError, match=r"got 'other_name' for .*, allowed: 'half_spread', the name in the"):
        resolve(selecting("other_name"), "unique")


def test_settings_of_a_package_are_refused_like_those_of_the_project(folder):
    follow("policy.md", folder)
    for settings, sentence in (
        ({"spread_weight": 17}, "spread_weight: got 17, allowed: a number from 0 to 16"),
        ({"spread": 1}, r"spread: unknown key \(did you mean 'spread_weight'\?\), allowed: policy, "),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            resolve(selecting("half_spread", **settings), "unique")


def test_only_what_a_configuration_names_is_imported(folder):
    follow("policy.md", folder)
    for name in [name for name in sys.modules if name.startswith("my_policies")]:
        del sys.modules[name]
    assert "half_spread" in POLICIES.names()
    assert {policy.name() for policy in POLICIES} < set(POLICIES.names())
    assert resolve(selecting("evenly_spaced"), "unique").selection.name() == "evenly_spaced"
    assert "my_policies.evenly_spaced" in sys.modules
    assert "my_policies.half_spread" not in sys.modules
    assert not set(COMPACTIONS.names()) - {method.name() for method in COMPACTIONS}
