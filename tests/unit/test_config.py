from dataclasses import replace
from pathlib import Path
from typing import Literal, get_origin

import pytest
import torch
import yaml
from annotated_types import Ge, Le
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_kernels.stopping import StopRule
from sparse_kernels.token_prefill import TokenRule

from vllm_sparse_plugin.config import (
    KEY,
    Diagnostics,
    Lossless,
    ResolvedConfig,
    SparseAttentionConfig,
    Speculation,
    check_additional_config,
    describe_fields,
    describe_policies,
    preset_names,
    resolve,
)
from vllm_sparse_plugin.config.compaction import COMPACTIONS, StreamingLLMCompaction
from vllm_sparse_plugin.config.prefill import PREFILLS, BlockPrefill, ZipVLPrefill
from vllm_sparse_plugin.config.routing import Routing
from vllm_sparse_plugin.config.stopping import Stopping
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.names import BACKENDS
from vllm_sparse_plugin.policies import (
    POLICIES,
    DensePolicy,
    EveryPage,
    Selection,
    StreamingLLMSelection,
    UniqueSelection,
)

SELECTIONS = [policy for policy in POLICIES if issubclass(policy, Selection)]
SECTIONS = {
    "routing": Routing.model_fields,
    "stopping": Stopping.model_fields,
    "lossless": Lossless.model_fields,
    "speculation": Speculation.model_fields,
    "diagnostics": Diagnostics.model_fields,
}
METHODS = {
    (section, method.model_fields["method"].default): method.model_fields
    for section, methods in (("prefill", PREFILLS), ("compaction", COMPACTIONS))
    for method in methods
}
CONFIGS = Path(__file__).parents[2] / "configs"


def all_fields() -> list[tuple[str | tuple[str, str] | None, str, object]]:
    """(policy, section and method, section or None for the top level; key as the user writes it; pydantic's field)."""
    top = SparseAttentionConfig.model_fields
    variants = ("selection", "prefill", "compaction")
    found = [(None, name, field) for name, field in top.items() if name not in (*variants, *SECTIONS)]
    for sections in (SECTIONS, METHODS):
        found += [(key, name, field) for key, of_section in sections.items() for name, field in of_section.items()]
    for policy in POLICIES:
        found += [(policy.name(), field.alias or name, field) for name, field in policy.model_fields.items()]
    return found


FIELDS = all_fields()
BOUNDED = [row for row in FIELDS if row[2].annotation in (int, float)]
LITERAL = [row for row in FIELDS if get_origin(row[2].annotation) is Literal and row[1] not in ("policy", "method")]


def ids(rows: list[tuple]) -> list[str]:
    return [f"{policy or 'top'}-{name}" for policy, name, _ in rows]


def fields_of(policy: str) -> list[str]:
    return [name for owner, name, _ in FIELDS if owner == policy]


def bounds(field) -> tuple[float, float]:
    (least,) = (bound.ge for bound in field.metadata if isinstance(bound, Ge))
    (most,) = (bound.le for bound in field.metadata if isinstance(bound, Le))
    return least, most


def setting(policy: str | None, name: str, value: object) -> dict:
    if policy == "routing":
        # Some threshold must be there, and the range of a cubic must not be empty.
        cubic = {} if name in ("threshold", "cubic") else {"cubic": [0.5, 0, 0, 0]}
        ends = {"longest": 1 << 24, "shortest": 1}
        return {policy: {**cubic, **ends, name: value}}
    if policy in METHODS:
        section, method = policy
        return {section: {"method": method, name: value}}
    if policy is None or policy in SECTIONS:
        return {policy: {name: value}} if policy else {name: value}
    return {"selection": {"policy": policy, name: value}}


def path_of(policy: str | None, name: str) -> str:
    section = "" if policy is None else f"{policy}." if policy in SECTIONS else "selection."
    section = f"{policy[0]}." if policy in METHODS else section
    return f"{KEY}.{section}{name}"


def refusal(given_settings: object, preset: str = "unique") -> str:
    with pytest.raises(ConfigurationError) as caught:
        resolve(given_settings, preset)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert "allowed: " in message
    return message


def resolved_or_message(given_settings: object, preset: str) -> ResolvedConfig | str:
    try:
        return resolve(given_settings, preset)
    except ConfigurationError as error:
        return str(error)


def write(folder: Path, text: str) -> str:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_defaults_equal_the_preset_unique():
    assert SparseAttentionConfig() == resolve(None, "unique").config
    assert resolve({}, "unique").config == resolve(None, "unique").config


@pytest.mark.parametrize("backend_preset", BACKENDS.values())
@pytest.mark.parametrize("preset", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_every_preset_resolves_for_every_backend_to_what_its_file_says(preset, backend_preset):
    resolved = resolve({"preset": preset}, backend_preset)
    dumped = resolved.config.model_dump(by_alias=True)
    for section, text in yaml.safe_load((CONFIGS / f"{preset}.yaml").read_text()).items():
        assert {key: dumped[section][key] for key in text} == text
        assert all(resolved.sources[f"{section}.{key}"] == f"preset {preset}" for key in text)


def test_preset_names_are_the_files_and_every_backend_has_one():
    assert preset_names() == sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    for name, preset in BACKENDS.items():
        resolved = resolve(None, preset)
        dense = dict.fromkeys(("ART", "ZIPVL", "SNAPKV", "PYRAMIDKV", "H2O"), "dense")
        policies = dense | dict.fromkeys(("UNIQUE_PAPER", "UNIQUE_PREFILL", "LOSSLESS"), "unique")
        policy = policies.get(name, name.lower())
        assert ("sinkrouter" if resolved.routing else resolved.selection.name()) == policy


def test_unique_paper_is_what_was_published():
    published = resolve(None, "unique_paper").selection
    assert published == UniqueSelection(statistics="bf16", recent_pages=0)
    assert (published.page_size, published.budget_pages, published.lambda_) == (8, 64, 1.0)
    assert (published.reserved_pages, published.sink_pages) == (1, 1)
    layout = published.statistics_layout(128, 2)
    assert (layout.kind.name, layout.format) == ("mean_and_spread", "bf16")


def test_each_source_wins_over_the_ones_before_it(tmp_path):
    stages = []
    given_settings = {}
    for key, value in (
        ("preset", "unique_wide"),
        ("config", write(tmp_path, "selection: {budget_tokens: 1024, sink_pages: 2}\nfirst_dense_layers: 1\n")),
        ("selection", {"budget_tokens": 256}),
    ):
        stages.append(resolve(given_settings, "unique"))
        given_settings[key] = value
    stages.append(resolve(given_settings, "unique"))
    assert [stage.selection.budget_tokens for stage in stages] == [512, 2048, 1024, 256]
    assert [stage.sources["selection.budget_tokens"] for stage in stages] == [
        "backend preset unique",
        "preset unique_wide",
        f"file {given_settings['config']}",
        "additional config",
    ]


def test_sources_name_every_value_that_is_not_a_default(tmp_path):
    file = write(tmp_path, "selection: {sink_pages: 2}\nfirst_dense_layers: 1\n")
    resolved = resolve({"config": file, "selection": {"lambda": 0.5}}, "unique")
    assert resolved.sources == {
        "selection.policy": "backend preset unique",
        "selection.page_size": "backend preset unique",
        "selection.budget_tokens": "backend preset unique",
        "selection.sink_pages": f"file {file}",
        "selection.lambda": "additional config",
        "first_dense_layers": f"file {file}",
    }
    assert resolved.selection.lambda_ == 0.5
    assert resolved.config.min_context_tokens == SparseAttentionConfig().min_context_tokens


def test_resolving_leaves_the_settings_as_they_were():
    given_settings = {"preset": "unique_wide", "selection": {"sink_pages": 2}}
    resolve(given_settings, "unique")
    assert given_settings == {"preset": "unique_wide", "selection": {"sink_pages": 2}}


def test_another_policy_drops_the_settings_of_the_previous_one(tmp_path):
    file = write(tmp_path, "selection: {lambda: 0.5, recent_pages: 3, budget_tokens: 1024}\nfirst_dense_layers: 2\n")
    resolved = resolve({"config": file, "selection": {"policy": "streaming_llm", "sink_pages": 4}}, "unique")
    assert resolved.selection == StreamingLLMSelection(sink_pages=4)
    assert resolved.config.first_dense_layers == 2
    assert resolved.sources == {
        "first_dense_layers": f"file {file}",
        "selection.policy": "additional config",
        "selection.sink_pages": "additional config",
    }


def test_the_same_policy_keeps_the_settings_of_the_sources_before():
    resolved = resolve({"preset": "unique_wide", "selection": {"policy": "unique", "sink_pages": 4}}, "streaming_llm")
    assert resolved.selection == UniqueSelection(budget_tokens=2048, sink_pages=4)


@pytest.mark.parametrize(("policy", "name", "field"), FIELDS, ids=ids(FIELDS))
def test_every_field_has_a_description(policy, name, field):
    assert (field.description or "").strip()


def test_described_fields_are_all_fields_with_their_defaults():
    rows = describe_fields()
    names = [name for name, *_ in rows]
    assert set(names) == {path_of(policy, name).removeprefix(f"{KEY}.") for policy, name, _ in FIELDS}
    assert len(rows) == len({(name, allowed, default) for name, allowed, default, _ in rows})
    for name, allowed, default, description in rows:
        found = {field.default for _, key, field in FIELDS if key == name.rpartition(".")[2]}
        assert name in ("selection.policy", "prefill.method", "compaction.method") or default in found
        assert allowed
        assert description.rpartition(": ")[2]
        assert "\n" not in description


@pytest.mark.parametrize(("policy", "name", "field"), BOUNDED, ids=ids(BOUNDED))
@pytest.mark.parametrize("end", ["below", "above"])
def test_a_number_out_of_range_is_refused_with_the_range(policy, name, field, end):
    least, most = bounds(field)
    value = least - 1 if end == "below" else most + 1
    message = refusal(setting(policy, name, value))
    kind = "an integer" if field.annotation is int else "a number"
    assert message == f"{path_of(policy, name)}: got {value!r}, allowed: {kind} from {least:g} to {most:.10g}"


@pytest.mark.parametrize(("policy", "name", "field"), BOUNDED, ids=ids(BOUNDED))
def test_both_ends_of_a_range_are_accepted(policy, name, field):
    # Other requirements on the budget have separate tests.
    others = {"budget_tokens": 1 << 20} if "budget_tokens" in fields_of(policy) and name != "coverage" else {}
    preset = "art" if name == "dense_sink_pages" else "unique"
    for value in bounds(field):
        if name in ("shortest", "longest"):
            value += (name == "shortest" and value > 1) * -1
        if name == "budget_tokens":
            others = {"sink_pages": 0} | ({"recent_pages": 0} if "recent_pages" in fields_of(policy) else {})
        given_settings = setting(policy, name, value)
        given_settings.get("selection", {}).update({key: other for key, other in others.items() if key != name})
        config = resolve(given_settings, preset).config.model_dump(by_alias=True)
        section = path_of(policy, name).removeprefix(f"{KEY}.").rpartition(".")[0]
        assert (config[section] if section else config)[name] == value


@pytest.mark.parametrize(("policy", "name", "field"), BOUNDED, ids=ids(BOUNDED))
@pytest.mark.parametrize("value", [True, "8", None, [8], 8.5, float("nan"), float("inf"), 10**30], ids=repr)
def test_a_number_of_another_type_is_refused(policy, name, field, value):
    if field.annotation is float and value == 8.5 and bounds(field)[1] > value:
        assert resolve(setting(policy, name, value), "unique")
        return
    message = refusal(setting(policy, name, value))
    assert message.startswith(f"{path_of(policy, name)}: got {value!r}, allowed: ")


@pytest.mark.parametrize(("policy", "name", "field"), LITERAL, ids=ids(LITERAL))
@pytest.mark.parametrize("value", ["other", 12, None, True, {}], ids=repr)
def test_a_value_that_is_not_among_the_choices_is_refused_with_the_choices(policy, name, field, value):
    message = refusal(setting(policy, name, value))
    assert message.startswith(f"{path_of(policy, name)}: got {value!r}, allowed: ")
    for choice in field.annotation.__args__:
        assert str(choice) in message


ALLOWED_TOP = (
    "selection, prefill, compaction, routing, stopping, first_dense_layers, min_context_tokens, lossless, "
    "speculation, diagnostics, preset, config or trained"
)
ALLOWED_UNIQUE = (
    "policy, page_size, budget_tokens, sink_pages, recent_pages, statistics, lambda, coverage, min_budget_tokens or "
    "max_budget_tokens"
)
ALLOWED_POLICIES = "dense, infllm, mean, quest, streaming_llm or unique"
ALLOWED_PRESETS = (
    "art, dense, h2o, infllm, lossless, mean, pyramidkv, quest, sinkrouter, snapkv, streaming_llm, unique, "
    "unique_paper, unique_prefill, unique_wide or zipvl"
)
ALLOWED_BLOCKS = (
    "method, density, coverage, tile_tokens, block_tokens, measure, query_stride, first_dense_layers, "
    "min_context_tokens, min_blocks, sink_blocks or recent_blocks"
)
ALLOWED_STREAMING = "policy, page_size, budget_tokens or sink_pages"
BAD = {
    "unknown top-level key": (
        {"zzz": 1},
        f"sparse_attention.zzz: unknown key, allowed: {ALLOWED_TOP}",
    ),
    "misspelt top-level key": (
        {"first_dense_layer": 1},
        f"sparse_attention.first_dense_layer: unknown key (did you mean 'first_dense_layers'?), allowed: {ALLOWED_TOP}",
    ),
    "selection key at the top level": (
        {"budget_tokens": 512},
        f"sparse_attention.budget_tokens: unknown key, allowed: {ALLOWED_TOP}",
    ),
    "policy at the top level": (
        {"policy": "unique"},
        f"sparse_attention.policy: unknown key, allowed: {ALLOWED_TOP}",
    ),
    "name of a policy as top-level key": (
        {"unique": {"budget_tokens": 512}},
        f"sparse_attention.unique: unknown key, allowed: {ALLOWED_TOP}",
    ),
    "name of a policy as selection key": (
        {"selection": {"unique": 1}},
        f"sparse_attention.selection.unique: unknown key, allowed: {ALLOWED_UNIQUE}",
    ),
    "misspelt selection key": (
        {"selection": {"buget_tokens": 1}},
        "sparse_attention.selection.buget_tokens: unknown key (did you mean 'budget_tokens'?), "
        f"allowed: {ALLOWED_UNIQUE}",
    ),
    "attribute name instead of the key": (
        {"selection": {"lambda_": 1.0}},
        f"sparse_attention.selection.lambda_: unknown key (did you mean 'lambda'?), allowed: {ALLOWED_UNIQUE}",
    ),
    "key of another policy": (
        {"selection": {"policy": "streaming_llm", "recent_pages": 1}},
        f"sparse_attention.selection.recent_pages: unknown key (did you mean 'sink_pages'?), "
        f"allowed: {ALLOWED_STREAMING}",
    ),
    "key of a selection for dense attention": (
        {"selection": {"policy": "dense", "budget_tokens": 512}},
        "sparse_attention.selection.budget_tokens: unknown key, allowed: policy",
    ),
    "coverage by statistics that do not say what a page weighs": (
        {"selection": {"coverage": 0.9, "statistics": "int8"}},
        "sparse_attention.selection.coverage: got 0.9 with statistics 'int8', allowed: quarters or sketch",
    ),
    "part of a page under a coverage": (
        {"selection": {"min_budget_tokens": 12}},
        "sparse_attention.selection.min_budget_tokens: got 12, allowed: a multiple of page_size (8)",
    ),
    "unknown policy": (
        {"selection": {"policy": "h2o"}},
        f"sparse_attention.selection.policy: got 'h2o', allowed: {ALLOWED_POLICIES}",
    ),
    "policy of another type": (
        {"selection": {"policy": ["unique"]}},
        f"sparse_attention.selection.policy: got ['unique'], allowed: {ALLOWED_POLICIES}",
    ),
    "selection that is no mapping": (
        {"selection": "unique"},
        "sparse_attention.selection: got 'unique', allowed: a mapping of settings",
    ),
    "section of a value": (
        {"first_dense_layers": {"a": 1}},
        "sparse_attention.first_dense_layers: got {'a': 1}, allowed: an integer from 0 to 1024",
    ),
    "budget not whole pages": (
        {"selection": {"budget_tokens": 500}},
        "sparse_attention.selection.budget_tokens: got 500, "
        "allowed: a multiple of page_size (8), from 24 to 1048576",
    ),
    "budget without room beside sinks and recent pages": (
        {"selection": {"budget_tokens": 64, "page_size": 32}},
        "sparse_attention.selection.budget_tokens: got 64, "
        "allowed: a multiple of page_size (32), from 96 to 1048576",
    ),
    "budget without room beside sinks": (
        {"selection": {"policy": "streaming_llm", "budget_tokens": 16, "sink_pages": 2}},
        "sparse_attention.selection.budget_tokens: got 16, "
        "allowed: a multiple of page_size (8), from 24 to 1048576",
    ),
    "value of the speculation": (
        {"speculation": {"draft": "both"}},
        "sparse_attention.speculation.draft: got 'both', allowed: dense or sparse",
    ),
    "unknown key of the diagnostics": (
        {"diagnostics": {"sample": 5}},
        "sparse_attention.diagnostics.sample: unknown key (did you mean 'sample_every'?), allowed: sample_every or "
        "log_requests",
    ),
    "value of the diagnostics": (
        {"diagnostics": {"log_requests": 1}},
        "sparse_attention.diagnostics.log_requests: got 1, allowed: true or false",
    ),
    "number of the diagnostics": (
        {"diagnostics": {"sample_every": -1}},
        "sparse_attention.diagnostics.sample_every: got -1, allowed: an integer from 0 to 1073741824",
    ),
    "unknown key of the stopping": (
        {"stopping": {"tau": 1e-5}},
        "sparse_attention.stopping.tau: unknown key, allowed: scale_tolerance, direction_tolerance, patience, "
        "block_tokens or dense_sink_pages",
    ),
    "value of the stopping": (
        {"stopping": {"block_tokens": 100}},
        "sparse_attention.stopping.block_tokens: got 100, allowed: auto, 64, 128, 256, 512 or 1024",
    ),
    "stopping that is no mapping": (
        {"stopping": True},
        "sparse_attention.stopping: got True, allowed: a mapping of settings",
    ),
    "diagnostics that are no mapping": (
        {"diagnostics": 5},
        "sparse_attention.diagnostics: got 5, allowed: a mapping of settings",
    ),
    "routing without a threshold": (
        {"routing": {}},
        "sparse_attention.routing.threshold: got none beside cubic none, allowed: one of the two; "
        "vllm-sparse calibrate finds it",
    ),
    "routing with two thresholds": (
        {"routing": {"threshold": 0.5, "cubic": [0.5, 0, 0, 0]}},
        "sparse_attention.routing.threshold: got 0.5 beside cubic (0.5, 0.0, 0.0, 0.0), allowed: one of the two; "
        "vllm-sparse calibrate finds it",
    ),
    "no range for a cubic": (
        {"routing": {"cubic": [0.5, 0, 0, 0], "shortest": 4096, "longest": 4096}},
        "sparse_attention.routing.longest: got 4096, allowed: more than shortest (4096)",
    ),
    "unknown key of the routing": (
        {"routing": {"treshold": 0.5}},
        "sparse_attention.routing.treshold: unknown key (did you mean 'threshold'?), allowed: score, threshold, "
        "cubic, shortest, longest, dense_layers, accept, recommended, fingerprint, model, data or date",
    ),
    "routing that is no mapping": (
        {"routing": 0.5},
        "sparse_attention.routing: got 0.5, allowed: a mapping of settings",
    ),
    "compaction without a method": (
        {"compaction": {"budget_tokens": 64}},
        "sparse_attention.compaction.method: got None, allowed: h2o, pyramidkv, snapkv, streaming_llm or zipvl",
    ),
    "two budgets of compaction": (
        {"compaction": {"method": "streaming_llm", "budget_tokens": 64, "budget_ratio": 0.5}},
        "sparse_attention.compaction.budget_ratio: got 0.5 beside budget_tokens 64, allowed: one of the two",
    ),
    "no budget of compaction": (
        {"compaction": {"method": "streaming_llm", "budget_tokens": None}},
        "sparse_attention.compaction.budget_ratio: got none beside budget_tokens none, allowed: one of the two",
    ),
    "positions that roll by a share of the prompt": (
        {"compaction": {"method": "streaming_llm", "budget_ratio": 0.5, "positions": "rolling"}},
        "sparse_attention.compaction.positions: got rolling with budget_ratio 0.5, allowed: text, or budget_tokens",
    ),
    "compaction to half a token": (
        {"compaction": {"method": "streaming_llm", "budget_tokens": 64.5}},
        "sparse_attention.compaction.budget_tokens: got 64.5, allowed: an integer from 16 to 16777216",
    ),
    "compaction to its sinks": (
        {"compaction": {"method": "streaming_llm", "budget_tokens": 64, "sink_tokens": 64}},
        "sparse_attention.compaction.budget_tokens: got 64, allowed: at least 65, more than the tokens that are kept "
        "always",
    ),
    "prefill without a method": (
        {"prefill": {"density": 0.1}},
        "sparse_attention.prefill.method: got None, allowed: blocks or zipvl",
    ),
    "unknown method of prefill": (
        {"prefill": {"method": "tiles"}},
        "sparse_attention.prefill.method: got 'tiles', allowed: blocks or zipvl",
    ),
    "prefill that is no mapping": (
        {"prefill": True},
        "sparse_attention.prefill: got True, allowed: a mapping of settings",
    ),
    "misspelt key of prefill": (
        {"prefill": {"method": "blocks", "densty": 0.1}},
        "sparse_attention.prefill.densty: unknown key (did you mean 'density'?), "
        f"allowed: {ALLOWED_BLOCKS}",
    ),
    "key of the other method": (
        {"prefill": {"method": "zipvl", "density": 0.1}},
        "sparse_attention.prefill.density: unknown key, "
        "allowed: method, tau, recent_probes, random_probes, seed, first_dense_layers or min_context_tokens",
    ),
    "density out of range": (
        {"prefill": {"method": "blocks", "density": 0}},
        "sparse_attention.prefill.density: got 0, allowed: a number from 0.001 to 1",
    ),
    "coverage of another type": (
        {"prefill": {"method": "blocks", "coverage": True}},
        "sparse_attention.prefill.coverage: got True, allowed: a number from 0.001 to 1",
    ),
    "density and coverage": (
        {"prefill": {"method": "blocks", "density": 0.1, "coverage": 0.9}},
        "sparse_attention.prefill.density: got 0.1 beside coverage 0.9, allowed: one of the two",
    ),
    "neither density nor coverage": (
        {"prefill": {"method": "blocks", "density": None}},
        "sparse_attention.prefill.density: got none beside coverage none, allowed: one of the two",
    ),
    "coverage by the maximum": (
        {"prefill": {"method": "blocks", "coverage": 0.9, "measure": "maximum"}},
        "sparse_attention.prefill.measure: got 'maximum' beside coverage 0.9, allowed: mass",
    ),
    "unknown preset": (
        {"preset": "fast"},
        f"sparse_attention.preset: got 'fast', allowed: {ALLOWED_PRESETS}",
    ),
    "preset outside of configs": (
        {"preset": "../configs/unique"},
        f"sparse_attention.preset: got '../configs/unique', allowed: {ALLOWED_PRESETS}",
    ),
    "preset of another type": (
        {"preset": {}},
        f"sparse_attention.preset: got {{}}, allowed: {ALLOWED_PRESETS}",
    ),
    "file that does not exist": (
        {"config": "/nonexistent/a.yaml"},
        "sparse_attention.config: got '/nonexistent/a.yaml' (No such file or directory), "
        "allowed: a readable YAML file",
    ),
    "file of another type": (
        {"config": 5},
        "sparse_attention.config: got 5, allowed: the path of a YAML file",
    ),
    "list for all settings": ([], "sparse_attention: got [], allowed: a JSON object"),
    "number for all settings": (5, "sparse_attention: got 5, allowed: a JSON object"),
    "text for all settings": ("unique", "sparse_attention: got 'unique', allowed: a JSON object"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_get_one_sentence(case):
    given_settings, sentence = BAD[case]
    assert refusal(given_settings) == sentence


def test_a_key_with_a_line_break_still_gets_one_line():
    assert "unknown key" in refusal({"a\nb": 1})
    assert "unknown key" in refusal({"selection": {"a\nb": 1}})


def test_unknown_backend_preset_is_refused():
    assert refusal(None, "none").startswith("backend: got 'none', allowed: ")


BAD_FILES = {
    "not YAML": ("a: [1\nb: 2\n", "got text that is not YAML at line 2, allowed: a YAML mapping"),
    "list": ("- 1\n", "got a list, allowed: a YAML mapping"),
    "text": ("unique", "got a str, allowed: a YAML mapping"),
    "impossible boolean": ("selection: !!bool x\n", "got text that is not YAML, allowed: a YAML mapping"),
    "impossible date": ("selection: 2020-13-45\n", "got text that is not YAML, allowed: a YAML mapping"),
    "section twice": (
        "selection: {page_size: 16}\nmin_context_tokens: 0\nselection: {sink_pages: 2}\n",
        "got the key 'selection' a second time at line 3, allowed: each key once",
    ),
    "setting twice": (
        "selection: {page_size: 16, page_size: 8}\n",
        "got the key 'page_size' a second time at line 1, allowed: each key once",
    ),
    "aliases of aliases": (
        "a0: &a0 [0, 1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)),
        "got more than 100,000 values, allowed: up to 100,000",
    ),
    "levels within levels": ("a: " + "[" * 20 + "]" * 20, "got more than 16 nested levels, allowed: up to 16"),
    "endless levels": ("[" * 100_000, "got more than 16 nested levels, allowed: up to 16"),
    "alias of itself": ("a: &a [*a]\n", "got settings that contain themselves, allowed: a finite mapping"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_gets_one_sentence(case, tmp_path):
    text, sentence = BAD_FILES[case]
    file = write(tmp_path, text)
    assert refusal({"config": file}) == f"{KEY}.config {file!r}: {sentence}"


def test_bad_value_in_a_file_is_refused_with_the_file(tmp_path):
    file = write(tmp_path, "selection: {sink_pages: 65}\n")
    assert refusal({"config": file}) == (
        f"{KEY}.selection.sink_pages (from file {file}): got 65, allowed: an integer from 0 to 64"
    )


def test_number_as_key_in_a_file_is_refused(tmp_path):
    assert f"{KEY}.1" in refusal({"config": write(tmp_path, "1: 2\n")})


def test_folder_as_file_is_refused(tmp_path):
    assert refusal({"config": str(tmp_path)}) == (
        f"{KEY}.config: got {str(tmp_path)!r} (Is a directory), allowed: a readable YAML file"
    )


def test_binary_file_is_refused(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert refusal({"config": str(path)}) == (
        f"{KEY}.config: got {str(path)!r} (no file of UTF-8 text), allowed: a readable YAML file"
    )


@pytest.mark.parametrize("size", [(1 << 20) + 1, 3 << 20])
def test_a_large_file_is_refused(size, tmp_path):
    file = write(tmp_path, "#" + "é" * (size // 2))
    assert refusal({"config": file}) == f"{KEY}.config: got {file!r} (more than 1 MiB), allowed: a readable YAML file"


def test_a_file_without_an_end_is_refused():
    sentence = "got '/dev/zero' (more than 1 MiB), allowed: a readable YAML file"
    assert refusal({"config": "/dev/zero"}) == f"{KEY}.config: {sentence}"


def test_anchors_and_thresholds_of_a_large_model_are_within_the_bounds(tmp_path):
    heads = "[" + ", ".join(["0.5"] * 128) + "]"
    file = write(tmp_path, f"routing: {{threshold: [&a {heads}{', *a' * 127}], dense_layers: 0}}\n")
    assert resolve({"config": file}, "dense").routing.shape == (128, (128,) * 128)


@pytest.mark.parametrize(
    "given_settings",
    [
        {"routing": {"threshold": 10**400}},
        {"routing": {"threshold": 10**5000}},
        {"routing": {"threshold": [[10**400]]}},
        {"routing": {"cubic": [0, 0, 0, -(10**400)]}},
        {"min_context_tokens": 10**5000},
        {"stopping": {"scale_tolerance": 10**400}},
        {"selection": {"lambda": 10**5000}},
        {"selection": {"policy": "x" * 10**6}},
        {"y" * 10**6: 1},
    ],
    ids=range(9),
)
def test_what_is_long_is_refused_in_a_short_sentence(given_settings):
    assert len(refusal(given_settings)) < 600


OUTSIDE = {
    "sparse_atention": "did you mean 'sparse_attention'",
    "sparse-attention": "did you mean 'sparse_attention'",
    "Sparse_Attention": "did you mean 'sparse_attention'",
    "sparse_attn": "did you mean 'sparse_attention'",
    "selection": 'allowed: {"sparse_attention": {"selection": ...}}',
    "min_context_tokens": 'allowed: {"sparse_attention": {"min_context_tokens": ...}}',
}


@pytest.mark.parametrize("key", OUTSIDE)
def test_settings_outside_of_ours_are_refused(key):
    with pytest.raises(ConfigurationError, match=f"^additional_config: got the key {key!r}") as caught:
        check_additional_config({KEY: 1, key: 2})
    assert OUTSIDE[key] in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_settings_of_other_plugins_are_left_alone():
    check_additional_config({KEY: 1, "ascend_scheduler_config": 2, "config": 3, "attention": 4, "sparsity": 5, 6: 7})


@pytest.mark.parametrize("path", ["a\0b", "\ud800"], ids=ascii)
def test_text_that_cannot_be_a_path_is_refused(path):
    assert refusal({"config": path}).startswith(f"{KEY}.config: got ")


def test_empty_file_changes_nothing(tmp_path):
    assert resolve({"config": write(tmp_path, "# nothing\n")}, "unique") == resolve(None, "unique")


ROUTED = {
    "threshold": "a number from -2 to 2, a list of one for each layer, or a list of lists with one for each KV head of "
    "a layer",
    "cubic": "a list of four numbers, c0 to c3",
    "model": "a text",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("threshold", value) for value in (2.5, True, "0.5", [], [0.5, "x"], [[[0.5]]], {}, float("nan"))),
        *(("cubic", value) for value in (0.5, [1, 2, 3], [1, 2, 3, [4]], [1, 2, 3, 1e7], "abcd")),
        *(("model", value) for value in (5, ["a"])),
    ],
    ids=repr,
)
def test_bad_routing_is_refused_with_what_is_allowed(name, value):
    settings = setting("routing", name, value)
    assert refusal(settings) == f"{KEY}.routing.{name}: got {value!r}, allowed: {ROUTED[name]}"


def test_one_form_of_threshold_replaces_the_other_of_an_earlier_source(tmp_path):
    file = write(tmp_path, "routing: {cubic: [0.5, 0, 0.25, 0], shortest: 8, longest: 64, model: a}\n")
    resolved = resolve({"config": file}, "sinkrouter")
    assert resolved.routing == Routing(cubic=(0.5, 0.0, 0.25, 0.0), shortest=8, longest=64, model="a")
    assert "routing.threshold" not in resolved.sources
    again = resolve({"config": file, "routing": {"threshold": [0.25, 1]}}, "sinkrouter")
    assert again.routing == Routing(threshold=(0.25, 1.0), model="a")
    assert again.sources["routing.threshold"] == "additional config"
    assert resolve({"config": file, "routing": {"threshold": None}}, "sinkrouter").routing == resolved.routing


def test_routing_joins_any_selection_and_null_turns_it_off():
    assert resolve(None, "unique").routing is None
    joined = resolve({"routing": {"threshold": 0.75}}, "unique")
    assert joined.selector == UniqueSelection()
    assert joined.routing == Routing(threshold=0.75)
    off = resolve({"routing": None}, "sinkrouter")
    assert off.config == resolve(None, "dense").config
    assert [resolved.is_sparse for resolved in (joined, off, resolve(None, "sinkrouter"))] == [True, False, True]


def test_prefill_is_off_unless_it_is_asked_for_and_null_turns_it_off():
    for preset in BACKENDS.values():
        assert (resolve(None, preset).config.prefill is None) == (preset not in ("unique_prefill", "zipvl"))
    assert resolve(None, "unique_prefill").block_prefill == BlockPrefill()
    assert resolve(None, "zipvl").config.prefill == ZipVLPrefill()
    assert resolve(None, "zipvl").block_prefill is None
    assert (resolve(None, "zipvl").is_sparse, resolve(None, "zipvl").runs_kernels) == (False, True)
    assert resolve({"prefill": None}, "unique_prefill").config == resolve(None, "unique").config
    dense = resolve({"prefill": {"method": "blocks"}}, "dense")
    assert (dense.is_sparse, dense.runs_kernels) == (False, True)


def test_compaction_is_off_unless_it_is_asked_for_and_null_turns_it_off():
    compacting = ("streaming_llm", "snapkv", "pyramidkv", "h2o")
    for preset in BACKENDS.values():
        assert (resolve(None, preset).compaction is None) == (preset not in compacting)
    assert resolve(None, "streaming_llm").compaction == StreamingLLMCompaction(budget_tokens=512, sink_tokens=8)
    kept = resolve({"compaction": None}, "streaming_llm")
    assert (kept.compaction, kept.selection) == (None, resolve(None, "streaming_llm").selection)


def test_budgets_of_compaction_replace_each_other_by_source(tmp_path):
    file = write(tmp_path, "selection: {policy: dense}\ncompaction: {budget_ratio: 0.25}\n")
    share = resolve({"config": file}, "streaming_llm").compaction
    assert (share.budget_ratio, share.budget_tokens, share.sink_tokens) == (0.25, None, 8)
    number = resolve({"config": file, "compaction": {"budget_tokens": 256}}, "streaming_llm").compaction
    assert (number.budget_ratio, number.budget_tokens) == (None, 256)
    assert resolve({"compaction": {"budget_ratio": None}}, "snapkv").compaction.budget_tokens == 1024


def test_a_budget_and_a_coverage_replace_each_other_by_source(tmp_path):
    file = write(tmp_path, "selection: {coverage: 0.9, max_budget_tokens: 4096}\n")
    covering = resolve({"config": file}, "lossless")
    assert (covering.coverage, covering.selection.max_budget_tokens) == (0.9, 4096)
    again = resolve({"config": file, "selection": {"budget_tokens": 256}}, "lossless")
    assert (again.coverage, again.selection.budget_tokens) == (None, 256)
    assert resolve({"selection": {"coverage": None}}, "lossless").selection.budget_tokens == 2048


def test_the_compaction_of_streaming_llm_keeps_the_window_of_the_policy(tmp_path):
    """One setting determines what decode steps read and what the cache keeps."""
    settings = {"selection": {"budget_tokens": 256, "sink_pages": 2, "page_size": 16}, "min_context_tokens": 4096}
    for preset in ("streaming_llm", "unique"):
        given = {"preset": "streaming_llm"} | settings if preset == "unique" else settings
        resolved = resolve(given, preset)
        kept = resolved.compaction
        assert (kept.budget_tokens, kept.sink_tokens, kept.min_context_tokens) == (256, 32, 4096)
        assert resolved.sources["compaction.budget_tokens"] == "selection.budget_tokens"
        assert resolved.sources["compaction.sink_tokens"] == "selection.sink_pages"
        assert resolved.sources["compaction.min_context_tokens"] == "min_context_tokens"
    agreed = {"compaction": {"budget_tokens": 256, "sink_tokens": 32}} | settings
    assert resolve(agreed, "streaming_llm").compaction == kept
    # Other policies have no window, and other methods have no policy.
    for other in ({"selection": {"policy": "dense"}}, {"selection": {"policy": "unique", "budget_tokens": 64}}):
        kept = resolve(other | {"compaction": {"sink_tokens": 4}}, "streaming_llm").compaction
        assert (kept.budget_tokens, kept.sink_tokens) == (512, 4)
    assert resolve({"selection": {"policy": "streaming_llm"}}, "snapkv").compaction.budget_tokens == 1024


POINTLESS = {
    "another window": (
        "streaming_llm", {"compaction": {"budget_tokens": 1024}},
        "compaction.budget_tokens: got 1024 with policy streaming_llm, allowed: none, or 512 as "
        "selection.budget_tokens",
    ),
    "other sinks": (
        "streaming_llm", {"compaction": {"sink_tokens": 0}},
        "compaction.sink_tokens: got 0 with policy streaming_llm, allowed: none, or 8 as selection.sink_pages",
    ),
    "another shortest context": (
        "streaming_llm", {"compaction": {"min_context_tokens": 0}},
        "compaction.min_context_tokens: got 0 with policy streaming_llm, allowed: none, or 1024 as min_context_tokens",
    ),
    "window as a share": (
        "streaming_llm", {"compaction": {"budget_ratio": 0.25}},
        "compaction.budget_ratio: got 0.25 with policy streaming_llm, allowed: null, since "
        "selection.budget_tokens says how large the window is",
    ),
    "dense layers with compaction": (
        "snapkv", {"first_dense_layers": 2},
        "first_dense_layers: got 2 with policy dense, which selects no pages, allowed: 0",
    ),
    "dense layers with skipped groups": (
        "sinkrouter", {"first_dense_layers": 2},
        "first_dense_layers: got 2 with policy dense, which selects no pages, allowed: 0, or routing.dense_layers",
    ),
    "dense layers with sparse prefill": (
        "zipvl", {"first_dense_layers": 2},
        "first_dense_layers: got 2 with policy dense, which selects no pages, allowed: 0, or "
        "prefill.first_dense_layers",
    ),
    "shortest context of compaction": (
        "snapkv", {"min_context_tokens": 4096},
        "min_context_tokens: got 4096 with decode steps that read the whole cache, allowed: none, or "
        "compaction.min_context_tokens",
    ),
    "shortest context of prefill": (
        "zipvl", {"min_context_tokens": 4096},
        "min_context_tokens: got 4096 with decode steps that read the whole cache, allowed: none, or "
        "prefill.min_context_tokens",
    ),
    "budget beside a coverage": (
        "unique", {"selection": {"budget_tokens": 512, "coverage": 0.9}},
        "selection.budget_tokens: got a value beside selection.coverage 0.9, allowed: one of the two; "
        "max_budget_tokens limits a coverage",
    ),
    "shortest context of a threshold": (
        "sinkrouter", {"routing": {"shortest": 16}},
        "routing.shortest: got a value with a threshold, allowed: none, or with a cubic: a threshold is the same "
        "for all contexts",
    ),
    "longest context of a threshold": (
        "unique", {"routing": {"threshold": 0.5, "longest": 64}},
        "routing.longest: got a value with a threshold, allowed: none, or with a cubic: a threshold is the same "
        "for all contexts",
    ),
    "a word for thresholds that need another": (
        "sinkrouter", {"routing": {"accept": "not_recommended"}},
        "routing.accept: got not_recommended with thresholds that are of no calibration, allowed: uncalibrated",
    ),
    "a word for thresholds that need none": (
        "unique",
        {"routing": {"threshold": 0.5, "fingerprint": "0", "recommended": True, "accept": "uncalibrated"}},
        "routing.accept: got uncalibrated with thresholds that are recommended, allowed: null",
    ),
    "log of requests that read everything": (
        "dense", {"diagnostics": {"log_requests": True}},
        "diagnostics.log_requests: got true with policy dense, where no request has a line, allowed: false",
    ),
    "log of requests under a coverage": (
        "unique", {"diagnostics": {"log_requests": True}, "selection": {"coverage": 0.9}},
        "diagnostics.log_requests: got true with a coverage, where no request has a line, allowed: false",
    ),
    "log of requests that stop": (
        "art", {"diagnostics": {"log_requests": True}},
        "diagnostics.log_requests: got true with stopping, where no request has a line, allowed: false",
    ),
    "log of requests in lossless mode": (
        "unique", {"diagnostics": {"log_requests": True}, "lossless": {}},
        "diagnostics.log_requests: got true with lossless mode, where no request has a line, allowed: false",
    ),
    "samples of what reads everything": (
        "snapkv", {"diagnostics": {"sample_every": 8}},
        "diagnostics.sample_every: got 8 with policy dense, where nothing is measured, allowed: 0 or null",
    ),
    "samples in lossless mode": (
        "lossless", {"preset": "lossless", "diagnostics": {"sample_every": 8}},
        "diagnostics.sample_every: got 8 with lossless mode, where nothing is measured, allowed: 0 or null",
    ),
    "sinks of dense attention": (
        "unique", {"stopping": {"dense_sink_pages": 2}},
        "stopping.dense_sink_pages: got a value with policy unique, allowed: none, or selection.sink_pages",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", POINTLESS)
def test_settings_without_an_effect_are_refused(case):
    preset, given_settings, sentence = POINTLESS[case]
    assert refusal(given_settings, preset) == f"{KEY}.{sentence}"


def test_a_control_of_a_comparison_may_have_the_settings_of_what_it_is_compared_with():
    given_settings = {"min_context_tokens": 0, "first_dense_layers": 2}
    assert resolve(given_settings, "dense").selector is None
    assert resolve({"stopping": {}} | given_settings, "dense").selector is not None


def test_coverage_and_density_replace_each_other_by_source(tmp_path):
    file = write(tmp_path, "prefill: {coverage: 0.9, min_blocks: 4}\n")
    covering = resolve({"config": file}, "unique_prefill")
    assert covering.block_prefill == BlockPrefill(coverage=0.9, min_blocks=4)
    assert covering.block_prefill.density is None
    assert "prefill.density" not in covering.sources
    again = resolve({"config": file, "prefill": {"density": 0.2}}, "unique_prefill")
    assert again.block_prefill == BlockPrefill(density=0.2, min_blocks=4)
    assert again.sources["prefill.density"] == "additional config"


def test_another_method_drops_the_settings_of_the_previous_one():
    changed = resolve({"prefill": {"method": "zipvl", "tau": 0.9}}, "unique_prefill")
    assert changed.config.prefill == ZipVLPrefill(tau=0.9)
    assert {name for name in changed.sources if name.startswith("prefill")} == {"prefill.method", "prefill.tau"}
    kept = resolve({"prefill": {"density": 0.2}}, "unique_prefill")
    assert kept.config.prefill == BlockPrefill(density=0.2)


def test_the_rule_of_tokens_is_what_the_settings_say():
    given_settings = {"tau": 0.5, "recent_probes": 3, "random_probes": 5, "seed": 7}
    rule = ZipVLPrefill(**given_settings, min_context_tokens=4096).rule()
    assert {name: getattr(rule, name) for name in given_settings} == given_settings
    # The shortest context that is made sparse.
    assert rule.dense_tokens == 4095
    assert ZipVLPrefill(min_context_tokens=0).rule() == TokenRule()


def test_the_rule_of_blocks_is_what_the_settings_say():
    given_settings = {"tile_tokens": 128, "block_tokens": 128, "min_blocks": 4, "sink_blocks": 2, "recent_blocks": 3}
    more = {"query_stride": 4, "min_context_tokens": 4096}
    rule = BlockPrefill(density=0.2, **given_settings, **more).rule()
    assert (rule.density, rule.coverage, rule.least_blocks, rule.dense_tokens) == (0.2, None, 4, 4096)
    assert (rule.tile_tokens, rule.block_tokens, rule.sink_blocks, rule.recent_blocks) == (128, 128, 2, 3)
    assert rule.query_stride == 4
    covering = BlockPrefill(coverage=0.9).rule()
    assert (covering.is_adaptive, covering.is_dense) == (True, False)
    rule.check()
    covering.check()


@pytest.mark.parametrize("preset", ["dense", "streaming_llm", "sinkrouter", "art", "quest", "unique"])
@pytest.mark.parametrize("itemsize", [1, 2])
def test_statistics_are_the_policys_or_those_of_unique_where_prefill_needs_some(preset, itemsize):
    own = resolve(None, preset).selection.statistics_layout(64, itemsize)
    assert resolve(None, preset).statistics_layout(64, itemsize) == own
    layout = resolve({"prefill": {"method": "blocks"}}, preset).statistics_layout(64, itemsize)
    assert layout == (own or UniqueSelection().statistics_layout(64, itemsize))
    assert layout.page_size == 8
    assert resolve({"prefill": {"method": "zipvl"}}, preset).statistics_layout(64, itemsize) == own


def test_thresholds_of_a_layer():
    heads = range(2, 4)
    nested = Routing(threshold=[[0.0] * 4, [0.1, 0.2, 0.3, 0.4]])
    assert nested.shape == (2, (4, 4))
    assert nested.of_layer(1, heads, "cpu").coefficients.tolist() == [
        [pytest.approx(0.3), 0, 0, 0],
        [pytest.approx(0.4), 0, 0, 0],
    ]
    by_layer = Routing(threshold=[0.5, 0.25], score="max")
    assert by_layer.shape == (2, ())
    assert by_layer.of_layer(1, heads, "cpu").coefficients.tolist() == [[0.25, 0, 0, 0]] * 2
    assert by_layer.of_layer(1, heads, "cpu").score == "max"
    cubic = Routing(cubic=[0.5, 1, 2, 4], shortest=16, longest=64).of_layer(0, heads, "cpu")
    assert cubic.coefficients.tolist() == [[0.5, 1, 2, 4]] * 2
    assert (cubic.shortest, cubic.longest) == (16, 64)


def test_thresholds_are_float32_whatever_the_default_dtype():
    """Models are loaded with a 16-bit default dtype, and kernels read thresholds as float32."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        routing = Routing(threshold=0.3).of_layer(0, range(2), "cpu")
    finally:
        torch.set_default_dtype(previous)
    assert routing.coefficients.dtype == torch.float32
    routing.check(2)
    with pytest.raises(ValueError, match=r"^coefficients: got torch.bfloat16, allowed: torch.float32$"):
        replace(routing, coefficients=routing.coefficients.bfloat16()).check(2)


KEYS = st.sampled_from(
    ["selection", "preset", "config", *sorted({name for _, name, _ in FIELDS} | set(preset_names()))]
) | st.text(max_size=4)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from([8, 16, 512, "unique", "streaming_llm", "unique_wide", "fp8"])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=6
)
SECTION = st.dictionaries(KEYS, VALUES, max_size=5)


@settings(max_examples=400, deadline=None)
@given(
    given_settings=VALUES | SECTION | st.fixed_dictionaries({}, optional={"selection": SECTION, "preset": VALUES}),
    preset=st.sampled_from(sorted(BACKENDS.values())),
)
def test_any_settings_resolve_or_are_refused_in_one_line(given_settings, preset):
    outcome = resolved_or_message(given_settings, preset)
    if isinstance(outcome, str):
        assert len(outcome.splitlines()) == 1
    else:
        selector = outcome.selector
        assert isinstance(selector, EveryPage | None) or selector.budget_pages > selector.reserved_pages


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_file_resolves_or_is_refused_in_one_line(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(data)
    outcome = resolved_or_message({"config": str(path)}, "unique")
    assert not isinstance(outcome, str) or len(outcome.splitlines()) == 1


def test_a_setting_of_several_policies_is_described_once_with_their_names():
    described = {name: text for name, _, _, text in describe_fields()}
    assert described["selection.recent_pages"].startswith("unique, quest, infllm, mean: Newest complete pages")
    assert described["selection.lambda"].startswith("unique: ")
    assert described["selection.budget_tokens"].startswith("Tokens of complete pages")


def test_stopping_is_off_unless_it_is_asked_for():
    for preset in BACKENDS.values():
        resolved = resolve(None, preset)
        assert (resolved.stop_rule is None) == (preset != "art")
    assert resolve({"stopping": None}, "art").selector is None
    assert resolve({"stopping": None}, "art").stop_rule is None


def test_art_is_dense_with_the_papers_rule():
    art = resolve(None, "art")
    assert art.selection == DensePolicy()
    assert art.selector == EveryPage(sink_pages=1)
    assert art.stop_rule == StopRule(1e-5, 1e-3, 5, 512, 1)
    assert resolve({"stopping": {"dense_sink_pages": 0}}, "art").stop_rule.least_pages == 0


def test_stopping_goes_with_every_selection():
    """Pages that are always read are always visited."""
    unique = resolve({"selection": {"sink_pages": 2, "recent_pages": 3}, "stopping": {}}, "unique")
    assert unique.stop_rule == StopRule(1e-5, 1e-3, 5, 64, 5)
    streaming = resolve({"selection": {"policy": "streaming_llm", "sink_pages": 4}}, "art")
    assert streaming.stop_rule == StopRule(1e-5, 1e-3, 5, 64, 4)


@pytest.mark.parametrize("backend", sorted(set(BACKENDS.values())))
def test_blocks_of_a_rule_are_the_same_by_either_way_in(backend):
    """By the preset `art` and by a section without settings; 512 tokens if every page may be read."""
    selection = {"policy": resolve(None, backend).selection.name()}
    by_section = resolve({"stopping": {}}, backend)
    by_backend = resolve({"selection": selection}, "art")
    tokens = 512 if selection["policy"] == "dense" else 64
    assert by_section.stop_rule.block_tokens == by_backend.stop_rule.block_tokens == tokens
    # The printed configuration is the one in effect.
    assert by_section.config.stopping.block_tokens == tokens
    named = resolve({"stopping": {"block_tokens": "auto"}}, backend)
    assert named.config == by_section.config
    assert resolve({"stopping": {"block_tokens": 128}}, backend).stop_rule.block_tokens == 128


def test_traversal_is_sinks_then_newest_first():
    selection = StreamingLLMSelection(budget_tokens=40, sink_pages=2)
    lengths = torch.tensor([20, 4, 1])
    query = torch.zeros(3, 1, 1, 8)
    table = torch.zeros(3, 1).long()
    found = selection.reading_order(query, None, table, lengths)[:, 0].tolist()
    assert found == [[0, 1, 19, 18, 17], [0, 1, 3, 2, -1], [0, -1, -1, -1, -1]]
    every = EveryPage(sink_pages=1).reading_order(query, None, table, lengths.clamp(max=5))[:, 0].tolist()
    assert every == [[0, 4, 3, 2, 1], [0, 3, 2, 1, -1], [0, -1, -1, -1, -1]]


def test_policies_are_described_with_where_they_leave_their_papers():
    rows = {name: (text, departure) for name, text, departure in describe_policies()}
    assert list(rows) == [policy.name() for policy in POLICIES]
    assert rows["infllm"][1].startswith("Representative keys are those that agree most with their page's own mean")
    assert "unique_paper" in rows["unique"][1]
    assert rows["dense"][1] == ""
    for text, departure in rows.values():
        assert text.endswith(".")
        assert departure == "" or departure.endswith(".")
        assert "\n" not in text + departure
