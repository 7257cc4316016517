from pathlib import Path
from typing import Literal, get_origin

import pytest
import yaml
from annotated_types import Ge, Le
from hypothesis import given, settings
from hypothesis import strategies as st
from support.settings import refusal, resolved_or_message, write

from vllm_sparse_plugin.config import (
    KEY,
    Diagnostics,
    Lossless,
    Offload,
    SparseAttentionConfig,
    Speculation,
    describe_fields,
    describe_policies,
    preset_names,
    resolve,
)
from vllm_sparse_plugin.config.prefill import PREFILLS
from vllm_sparse_plugin.config.routing import Routing
from vllm_sparse_plugin.config.stopping import Stopping
from vllm_sparse_plugin.evictions import COMPACTIONS
from vllm_sparse_plugin.names import BACKENDS
from vllm_sparse_plugin.policies import (
    POLICIES,
    EveryPage,
    Selection,
    StreamingLLMSelection,
    UniqueSelection,
)
from vllm_sparse_plugin.policies.scored import ScoredSelection

SELECTIONS = [policy for policy in POLICIES if issubclass(policy, Selection)]
SECTIONS = {
    "routing": Routing.model_fields,
    "stopping": Stopping.model_fields,
    "offload": Offload.model_fields,
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
        policies = dict.fromkeys(("ART", "ZIPVL", "SNAPKV", "PYRAMIDKV", "H2O"), "dense")
        policies |= dict.fromkeys(("UNIQUE_PREFILL", "LOSSLESS"), "unique")
        policy = policies.get(name, name.lower())
        assert ("sinkrouter" if resolved.routing else resolved.selection.name()) == policy


def test_unique_paper_is_what_was_published():
    published = resolve(None, "unique_paper").selection
    assert published == UniqueSelection(budget_tokens=512, statistics="bf16", recent_pages=0)
    assert (published.page_size, published.budget_pages, published.lambda_) == (8, 64, 1.0)
    assert (published.reserved_pages, published.sink_pages) == (1, 1)
    layout = published.statistics_layout(128, 2)
    assert (layout.kind.name, layout.format) == ("mean_and_spread", "bf16")


def test_each_source_wins_over_the_ones_before_it(tmp_path):
    stages = []
    given_settings = {}
    for key, value in (
        ("preset", "unique_wide"),
        ("config", write(tmp_path, "selection: {budget_tokens: 512, sink_pages: 2}\nfirst_dense_layers: 1\n")),
        ("selection", {"budget_tokens": 256}),
    ):
        stages.append(resolve(given_settings, "unique"))
        given_settings[key] = value
    stages.append(resolve(given_settings, "unique"))
    assert [stage.selection.budget_tokens for stage in stages] == [1024, 2048, 512, 256]
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
    others = {"budget_tokens": 1 << 20} if "budget_tokens" in fields_of(policy) else {}
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


def test_empty_file_changes_nothing(tmp_path):
    assert resolve({"config": write(tmp_path, "# nothing\n")}, "unique") == resolve(None, "unique")


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
    scored = [policy.name() for policy in POLICIES if issubclass(policy, ScoredSelection)]
    assert described["selection.recent_pages"].startswith(f"{', '.join(scored)}: Newest complete pages")
    assert described["selection.lambda"].startswith("unique: ")
    assert described["selection.sink_pages"].startswith("First pages that are always read")


def test_a_setting_with_several_defaults_names_the_policies_of_each():
    rows = [row for row in describe_fields() if row[0] == "selection.budget_tokens"]
    named = [(default, text.partition(": ")[0]) for _, _, default, text in rows]
    others = [policy.name() for policy in SELECTIONS if policy is not UniqueSelection]
    assert named == [(512, ", ".join(others)), (1024, "unique")]


def test_policies_are_described_with_where_they_leave_their_papers():
    rows = {name: (text, departure) for name, text, departure in describe_policies()}
    assert list(rows) == [policy.name() for policy in POLICIES]
    assert rows["mean"][1].startswith("Representative keys are those that agree most with their page's own mean")
    assert "unique_paper" in rows["unique"][1]
    assert rows["dense"][1] == ""
    for text, departure in rows.values():
        assert text.endswith(".")
        assert departure == "" or departure.endswith(".")
        assert "\n" not in text + departure
