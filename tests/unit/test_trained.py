"""What a model was trained with is a source of settings, which its user does not contradict unawares."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from vllm_sparse_plugin.config import read_trained_section, resolve, section_of, trained_section
from vllm_sparse_plugin.config.account import ModelKeys
from vllm_sparse_plugin.config.messages import describe_fields
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.notices import notices_of
from vllm_sparse_plugin.policies import DensePolicy
from vllm_sparse_plugin.tools.cli import diagnose, needle_test
from vllm_sparse_plugin.tools.cli.app import app
from vllm_sparse_plugin.tools.eval.reading import resolve_arguments

SELECTION = {"policy": "unique", "page_size": 16, "budget_tokens": 256, "statistics": "int8", "lambda": 0.5}
SECTION = {"selection": SELECTION, "first_dense_layers": 1, "min_context_tokens": 300}
ORIGIN = "the model's config.json"


def refusal(settings: dict, preset: str = "unique") -> str:
    with pytest.raises(ConfigurationError) as error:
        resolve(settings, preset, SECTION)
    return str(error.value)


def test_a_trained_model_is_served_as_it_was_trained():
    for preset in ("unique", "unique_paper"):
        resolved = resolve(None, preset, SECTION)
        assert section_of(resolved)["selection"].items() >= SELECTION.items()
        assert (resolved.config.first_dense_layers, resolved.config.min_context_tokens) == (1, 300)
        assert resolved.sources["selection.budget_tokens"] == ORIGIN
        assert resolved.sources["first_dense_layers"] == ORIGIN


def test_what_is_trained_is_what_is_written():
    resolved = resolve({"selection": SELECTION}, "unique")
    assert resolve(None, "unique", section_of(resolved)).config == resolved.config


def test_its_user_may_read_more_or_less():
    resolved = resolve({"selection": {"budget_tokens": 512}, "min_context_tokens": 0}, "unique", SECTION)
    assert resolved.selection.budget_tokens == 512
    assert resolved.sources["selection.budget_tokens"] == "additional config"
    assert resolved.selection.page_size == 16
    assert resolved.config.min_context_tokens == 0


ALLOWED = (
    "selection.policy", "selection.page_size", "selection.statistics", "selection.lambda", "selection.budget_tokens",
    "selection.sink_pages", "selection.recent_pages", "first_dense_layers", "min_context_tokens",
)  # fmt: skip
"""All that a model's config.json may set."""
ALLOWED_BESIDE = (
    *ALLOWED, "selection.anchor_layers", "selection.anchor_heads", "selection.fingerprint", "routing.score",
    "routing.threshold", "routing.cubic", "routing.shortest", "routing.longest", "routing.dense_layers",
    "routing.fingerprint", "routing.recommended", "routing.model", "routing.data", "routing.date",
)  # fmt: skip
"""All that a file beside a model may set."""
KEYS = [name for name, *_ in describe_fields()] + ["preset", "config", "trained", "selection.unknown", "unknown"]
KEYS += ["routing", "stopping", "compaction", "prefill", "offload", "lossless", "diagnostics"]


def with_key(name: str) -> dict:
    section, _, key = name.partition(".")
    value = {key: None} if key else None
    return {"selection": {"policy": "unique"}} | (
        {section: {"policy": "unique"} | value} if section == "selection" else {section: value}
    )


@pytest.mark.parametrize("name", sorted(set(KEYS) - set(ALLOWED)))
def test_a_downloaded_config_sets_nothing_that_training_does_not_write(name):
    with pytest.raises(ConfigurationError) as error:
        resolve(None, "unique", with_key(name))
    refused = name.partition(".")[0] if not name.startswith("selection.") else name
    assert str(error.value) == (
        f"sparse_attention: got {refused} in the model's config.json, allowed there: "
        f'{", ".join(ALLOWED[:-1])} or {ALLOWED[-1]}; or "trained": false'
    )
    resolve({"trained": False}, "unique", with_key(name))


@pytest.mark.parametrize("name", sorted(set(KEYS) - set(ALLOWED_BESIDE) - {"routing"}))
def test_a_file_beside_a_model_sets_nothing_that_no_command_writes(name, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "presets").mkdir()
    for folder in (tmp_path, tmp_path / "presets"):
        path = folder / "found.yaml"
        path.write_text(json.dumps(with_key(name)))
        with pytest.raises(ConfigurationError, match=r"a file beside a model, allowed there: selection\.p") as error:
            resolve({"config": str(path)}, "unique")
        assert str(error.value).startswith(f"sparse_attention: got {name.partition('.')[0]}")
    link = tmp_path.parent / f"{tmp_path.name}.yaml"
    link.symlink_to(path)
    with pytest.raises(ConfigurationError, match="a file beside a model"):
        resolve({"config": str(link)}, "unique")


def test_a_file_beside_no_model_has_the_rights_of_its_user(tmp_path):
    (tmp_path / "config.json").write_text('{"port": 8000}')
    (tmp_path / "mine.yaml").write_text("lossless: {draft_tokens: 3}\n")
    assert resolve({"config": str(tmp_path / "mine.yaml")}, "unique").lossless is not None


def test_what_came_with_a_model_is_said_at_start(tmp_path):
    told = (
        'sparse_attention.trained: files beside the model set selection.policy "unique", selection.page_size 16, '
        'selection.budget_tokens 256, selection.statistics "int8", selection.lambda 0.5, first_dense_layers 1, '
        'min_context_tokens 300; "trained": false ignores those of its config.json.'
    )
    assert notices_of(resolve(None, "unique", SECTION), "auto")[0] == told
    less = notices_of(resolve({"first_dense_layers": 0}, "unique", SECTION), "auto")[0]
    assert "first_dense_layers" not in less
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "found.yaml").write_text("routing: {threshold: 0.5, dense_layers: 1}\n")
    resolved = resolve({"config": str(tmp_path / "found.yaml")}, "sinkrouter")
    assert "routing.threshold 0.5, routing.dense_layers 1" in " ".join(notices_of(resolved, "auto"))


@pytest.mark.parametrize(
    ("settings", "name", "got", "trained"),
    [
        ({"selection": {"page_size": 8}}, "page_size", "8", "16"),
        ({"preset": "unique_wide"}, "page_size", "8", "16"),
        ({"selection": {"statistics": "quarters"}}, "statistics", "'quarters'", "'int8'"),
        ({"selection": {"policy": "quest"}}, "policy", "'quest'", "'unique'"),
    ],
)
def test_its_user_may_not_read_by_something_else_unawares(settings, name, got, trained):
    wanted = f"sparse_attention.selection.{name}: got {got}, allowed: {trained}, with which the model was trained, or "
    assert refusal(settings) == wanted + '"trained": false'
    assert resolve(settings | {"trained": False}, "unique", SECTION) == resolve(settings, "unique")


def test_backends_of_another_selection_are_refused_and_dense_ones_are_not():
    assert refusal({}, "quest").startswith("sparse_attention.selection.policy: got 'quest', allowed: 'unique'")
    for preset in ("dense", "sinkrouter", "art", "zipvl", "zipvl_paper"):
        assert resolve(None, preset, SECTION) == resolve(None, preset)
    assert isinstance(resolve({"selection": {"policy": "dense"}}, "unique", SECTION).selection, DensePolicy)


def test_bad_sections_end_in_a_sentence():
    with pytest.raises(ConfigurationError) as error:
        resolve(None, "unique", SECTION | {"selection": SELECTION | {"page_size": 7}})
    assert str(error.value) == (
        "sparse_attention.selection.page_size (from the model's config.json): got 7, allowed: 8, 16 or 32"
    )
    assert refusal({"trained": "no"}) == "sparse_attention.trained: got 'no', allowed: true or false"


def test_the_section_is_found_in_a_folder_and_in_a_configuration(tmp_path):
    assert trained_section(SimpleNamespace(sparse_attention=SECTION)) == SECTION
    for other in (
        SimpleNamespace(),
        SimpleNamespace(sparse_attention=True),
        SimpleNamespace(sparse_attention={"a": 1}),
    ):
        assert trained_section(other) is None
    with pytest.raises(ConfigurationError, match=r"^model: got .*, allowed: a folder with a config\.json$"):
        read_trained_section(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"sparse_attention": SECTION}))
    assert read_trained_section(tmp_path) == SECTION
    shown = CliRunner().invoke(app, ["show-config", "--model", str(tmp_path)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    (row,) = (line for line in shown.output.splitlines() if "│ selection.page_size" in line)
    assert "16" in row
    assert ORIGIN in row


def test_what_commands_say_of_a_trained_model_is_what_its_engine_does(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"sparse_attention": SECTION, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 128})
    )
    served = resolve(None, "unique", SECTION)
    keys = ModelKeys(served, 2, 64, 64)
    assert keys.shares(4096) != ModelKeys(resolve(None, "unique"), 2, 64, 64).shares(4096)
    # `eval` in process, `needles` and `diagnose`.
    assert resolve_arguments({"attention_backend": "UNIQUE"}, SECTION) == served
    shares = needle_test._keys_of(tmp_path, ["unique"], "{}")
    assert shares["unique"].shares(4096) == keys.shares(4096)
    (selection,) = diagnose._compared("unique", "{}", [128], SECTION).budgets
    assert (selection.page_size, selection.statistics, selection.budget_tokens) == (16, "int8", 128)
