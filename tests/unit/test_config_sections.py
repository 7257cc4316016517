from dataclasses import replace

import pytest
import torch
from sparse_kernels.stopping import StopRule
from sparse_kernels.token_prefill import TokenRule
from support.settings import refusal, write

from vllm_sparse_plugin.config import (
    KEY,
    resolve,
)
from vllm_sparse_plugin.config.prefill import BlockPrefill, ZipVLPrefill
from vllm_sparse_plugin.config.routing import Routing
from vllm_sparse_plugin.evictions.streaming_llm import StreamingLLMCompaction
from vllm_sparse_plugin.names import BACKENDS
from vllm_sparse_plugin.policies import (
    DensePolicy,
    EveryPage,
    UniqueSelection,
)

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
    settings = {"routing": {name: value}}
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
        sparse = preset in ("unique_prefill", "zipvl")
        assert (resolve(None, preset).config.prefill is not None) == sparse
    assert resolve(None, "unique_prefill").block_prefill == BlockPrefill()
    assert resolve(None, "zipvl").config.prefill == ZipVLPrefill()
    assert resolve(None, "zipvl_paper").config.prefill == ZipVLPrefill(others="zero", sink_tokens=0)
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


@pytest.mark.parametrize("tokens", [1, 25, 99])
def test_votes_are_pooled_over_any_odd_number_of_tokens(tokens):
    assert resolve({"compaction": {"pool_tokens": tokens}}, "pyramidkv").compaction.rule().pool_tokens == tokens


def test_snapkv_pools_over_25_tokens_and_its_published_form_over_5():
    for method in ("snapkv", "pyramidkv"):
        assert resolve(None, method).compaction.pool_tokens == 25
        published = resolve(None, f"{method}_paper").config
        assert resolve({"compaction": {"pool_tokens": 5}}, method).config == published


def test_budgets_of_compaction_replace_each_other_by_source(tmp_path):
    file = write(tmp_path, "selection: {policy: dense}\ncompaction: {budget_ratio: 0.25}\n")
    share = resolve({"config": file}, "streaming_llm").compaction
    assert (share.budget_ratio, share.budget_tokens, share.sink_tokens) == (0.25, None, 8)
    number = resolve({"config": file, "compaction": {"budget_tokens": 256}}, "streaming_llm").compaction
    assert (number.budget_ratio, number.budget_tokens) == (None, 256)
    assert resolve({"compaction": {"budget_ratio": None}}, "snapkv").compaction.budget_tokens == 1024


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
    "newest tokens of tokens that attend to nothing": (
        "zipvl", {"prefill": {"others": "zero", "local_tokens": 32}},
        "prefill.local_tokens: got a value with others zero, allowed: none, or with others attend",
    ),
    "newest tokens where every token is important": (
        "zipvl", {"prefill": {"tau": 1, "local_tokens": 32}},
        "prefill.local_tokens: got a value with tau 1, where every token is important, allowed: none, or with a "
        "smaller tau",
    ),
    "newest tokens where the ratio makes every token important": (
        "zipvl", {"prefill": {"fixed_ratio": 1, "local_tokens": 32}},
        "prefill.local_tokens: got a value with fixed_ratio 1, where every token is important, allowed: none, or with "
        "a smaller fixed_ratio",
    ),
    "sinks where every token is important": (
        "unique", {"prefill": {"method": "zipvl", "tau": 1.0, "sink_tokens": 0}},
        "prefill.sink_tokens: got a value with tau 1, where every token is important, allowed: none, or with a "
        "smaller tau",
    ),
    "sink blocks where every block is read": (
        "unique_prefill", {"prefill": {"density": 1, "sink_blocks": 2}},
        "prefill.sink_blocks: got a value with density 1, where every key block is read, allowed: none, or with a "
        "smaller density",
    ),
    "newest blocks where every block is read": (
        "unique_prefill", {"prefill": {"coverage": 1, "recent_blocks": 2}},
        "prefill.recent_blocks: got a value with coverage 1, where every key block is read, allowed: none, or with a "
        "smaller coverage",
    ),
    "fewest blocks where every block is read": (
        "unique_prefill", {"prefill": {"density": 1, "min_blocks": 4}},
        "prefill.min_blocks: got a value with density 1, where every key block is read, allowed: none, or with a "
        "smaller density",
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
    "log of requests that stop": (
        "art", {"diagnostics": {"log_requests": True}},
        "diagnostics.log_requests: got true with stopping, where no request has a line, allowed: false",
    ),
    "log of requests in lossless mode": (
        "unique", {"diagnostics": {"log_requests": True}, "lossless": {}},
        "diagnostics.log_requests: got true with lossless mode, where no request has a line, allowed: false",
    ),
    "votes for pages that a policy chooses": (
        "unique", {"stopping": {"dense_order": "votes"}, "compaction": {"method": "snapkv"}},
        "stopping.dense_order: got votes with policy unique, allowed: newest",
    ),
    "votes without a compaction": (
        "art", {"stopping": {"dense_order": "votes"}},
        "stopping.dense_order: got votes with no votes of a compaction, allowed: newest",
    ),
    "votes in a window that slides": (
        "art", {"stopping": {"dense_order": "votes"}, "compaction": {"method": "streaming_llm"}},
        "stopping.dense_order: got votes with no votes of a compaction, allowed: newest",
    ),
    "votes that later evictions would change": (
        "art", {"stopping": {"dense_order": "votes"}, "compaction": {"method": "snapkv", "every": 64}},
        "stopping.dense_order: got votes with a compaction that evicts between steps, allowed: newest",
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


def test_tau_and_a_fixed_ratio_replace_each_other_by_source(tmp_path):
    file = write(tmp_path, "prefill: {fixed_ratio: 0.4}\n")
    fixed = resolve({"config": file}, "zipvl_paper")
    assert fixed.config.prefill == ZipVLPrefill(fixed_ratio=0.4, others="zero", sink_tokens=0)
    assert "prefill.tau" not in fixed.sources
    assert fixed.config.prefill.rule().fixed_ratio == 0.4
    again = resolve({"config": file, "prefill": {"tau": 0.9}}, "zipvl")
    assert again.config.prefill == ZipVLPrefill(tau=0.9)


def test_another_method_drops_the_settings_of_the_previous_one():
    changed = resolve({"prefill": {"method": "zipvl", "tau": 0.9}}, "unique_prefill")
    assert changed.config.prefill == ZipVLPrefill(tau=0.9)
    assert {name for name in changed.sources if name.startswith("prefill")} == {"prefill.method", "prefill.tau"}
    kept = resolve({"prefill": {"density": 0.2}}, "unique_prefill")
    assert kept.config.prefill == BlockPrefill(density=0.2)


def test_the_rule_of_tokens_is_what_the_settings_say():
    given_settings = {
        "tau": 0.5, "recent_probes": 3, "random_probes": 5, "seed": 7, "others": "attend", "local_tokens": 9,
        "sink_tokens": 2,
    }  # fmt: skip
    rule = ZipVLPrefill(**given_settings, min_context_tokens=4096).rule()
    assert {name: getattr(rule, name) for name in given_settings} == given_settings
    # The shortest context that is made sparse.
    assert rule.dense_tokens == 4095
    assert ZipVLPrefill(min_context_tokens=0).rule() == TokenRule()
    assert ZipVLPrefill(others="zero").rule().others == "zero"


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
