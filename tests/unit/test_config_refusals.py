import os

import pytest
from support.settings import refusal, write

from vllm_sparse_plugin.config import (
    KEY,
    check_additional_config,
    preset_names,
    resolve,
)
from vllm_sparse_plugin.errors import ConfigurationError, choices
from vllm_sparse_plugin.evictions import COMPACTIONS
from vllm_sparse_plugin.policies import POLICIES

ALLOWED_TOP = (
    "selection, prefill, compaction, routing, stopping, offload, first_dense_layers, min_context_tokens, lossless, "
    "speculation, diagnostics, preset, config or trained"
)
ALLOWED_UNIQUE = (
    "policy, page_size, budget_tokens, sink_pages, recent_pages, statistics, anchor_layers, anchor_heads, fingerprint, "
    "lambda or refined"
)
ALLOWED_POLICIES = choices(POLICIES.names())
ALLOWED_PRESETS = choices(preset_names())
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
    "share of the weight in place of a budget": (
        {"selection": {"coverage": 0.9}},
        f"sparse_attention.selection.coverage: unknown key, allowed: {ALLOWED_UNIQUE}",
    ),
    "share of refined pages for statistics of one level": (
        {"selection": {"refined": 0.5}},
        "sparse_attention.selection.refined: got 0.5 with statistics 'auto', allowed: with leveled_quarters",
    ),
    "share of refined pages above all": (
        {"selection": {"refined": 1.5, "statistics": "leveled_quarters"}},
        "sparse_attention.selection.refined: got 1.5, allowed: a number from 0.01 to 1",
    ),
    "no refined pages": (
        {"selection": {"refined": 0, "statistics": "leveled_quarters"}},
        "sparse_attention.selection.refined: got 0, allowed: a number from 0.01 to 1",
    ),
    "budget above what two levels refine": (
        {"selection": {"budget_tokens": 8200, "statistics": "leveled_quarters"}},
        "sparse_attention.selection.budget_tokens: got 8200 with statistics 'leveled_quarters', allowed: up to 8192",
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
        "sparse_attention.diagnostics.sample: unknown key, allowed: log_requests",
    ),
    "value of the diagnostics": (
        {"diagnostics": {"log_requests": 1}},
        "sparse_attention.diagnostics.log_requests: got 1, allowed: true or false",
    ),
    "unknown key of the stopping": (
        {"stopping": {"tau": 1e-5}},
        "sparse_attention.stopping.tau: unknown key, allowed: scale_tolerance, direction_tolerance, patience, "
        "block_tokens, dense_sink_pages or dense_order",
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
        f"sparse_attention.compaction.method: got None, allowed: {choices(COMPACTIONS.names())}",
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
    "pool without a middle": (
        {"compaction": {"method": "snapkv", "pool_tokens": 6}},
        "sparse_attention.compaction.pool_tokens: got 6, allowed: an odd number from 1 to 99",
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
        "allowed: method, tau, fixed_ratio, others, local_tokens, sink_tokens, recent_probes, random_probes, seed, "
        "first_dense_layers or min_context_tokens",
    ),
    "tau and a fixed ratio": (
        {"prefill": {"method": "zipvl", "tau": 0.975, "fixed_ratio": 0.4}},
        "sparse_attention.prefill.tau: got 0.975 beside fixed_ratio 0.4, allowed: one of the two",
    ),
    "neither tau nor a fixed ratio": (
        {"prefill": {"method": "zipvl", "tau": None}},
        "sparse_attention.prefill.tau: got none beside fixed_ratio none, allowed: one of the two",
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


def test_only_a_regular_file_is_read(tmp_path):
    """A device has no end, and a named pipe keeps its reader waiting for another process."""
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe")):
        sentence = f"got {path!r} (no regular file), allowed: a readable YAML file"
        assert refusal({"config": path}) == f"{KEY}.config: {sentence}"


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
