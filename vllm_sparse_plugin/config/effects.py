"""Copies settings that must agree, and refuses settings without an effect.

Only values of a user are refused. A preset or the config.json of a trained model may have values that another setting
of the user makes ineffective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm_sparse_plugin.config.prefill import BlockPrefill, ZipVLPrefill
from vllm_sparse_plugin.config.schema import KEY, ResolvedConfig, SparseAttentionConfig
from vllm_sparse_plugin.config.trained import TRAINED
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.evictions.streaming_llm import StreamingLLMCompaction
from vllm_sparse_plugin.policies import DensePolicy, StreamingLLMSelection
from vllm_sparse_plugin.policies.base import Section
from vllm_sparse_plugin.policies.scored import ScoredSelection

_NOT_OF_A_USER = ("preset ", "backend preset ", TRAINED)
"""Prefixes of source names that are not the user's."""


def with_one_window(config: SparseAttentionConfig, sources: Mapping[str, str]) -> ResolvedConfig:
    """Returns the configuration with the same window in the policy `streaming_llm` and in the compaction of that name.

    The policy says what decode steps read, and the compaction says what the cache keeps. The compaction's settings
    follow the policy's.
    Args:
        config: valid settings.
        sources: the sources of their values.

    Raises:
        ConfigurationError: if a user gave the compaction another window than the policy.
    """
    resolved = ResolvedConfig(config, dict(sources))
    selection, compaction = resolved.selection, resolved.compaction
    if not isinstance(selection, StreamingLLMSelection) or not isinstance(compaction, StreamingLLMCompaction):
        return resolved
    expect, policy = _expectation(sources), selection.name()
    shortest = config.min_context_tokens
    wanted = {
        "budget_tokens": ("selection.budget_tokens", selection.budget_tokens),
        "sink_tokens": ("selection.sink_pages", selection.sink_pages * selection.page_size),
        "min_context_tokens": ("min_context_tokens", shortest),
    }
    ratio, budget, sinks = compaction.budget_ratio, selection.budget_tokens, wanted["sink_tokens"][1]
    expect(ratio is None, f"{KEY}.compaction.budget_ratio", f"{ratio} with policy {policy}",
           "null, since selection.budget_tokens says how large the window is")  # fmt: skip
    got = compaction.budget_tokens
    expect(got == budget, f"{KEY}.compaction.budget_tokens", f"{got} with policy {policy}",
           f"none, or {budget} as selection.budget_tokens")  # fmt: skip
    got = compaction.sink_tokens
    expect(got == sinks, f"{KEY}.compaction.sink_tokens", f"{got} with policy {policy}",
           f"none, or {sinks} as selection.sink_pages")  # fmt: skip
    got = compaction.min_context_tokens
    expect(got == shortest, f"{KEY}.compaction.min_context_tokens", f"{got} with policy {policy}",
           f"none, or {shortest} as min_context_tokens")  # fmt: skip
    changed = {name: tokens for name, (_, tokens) in wanted.items() if getattr(compaction, name) != tokens}
    where = {name: source for name, source in sources.items() if name != "compaction.budget_ratio"}
    where |= {f"compaction.{name}": wanted[name][0] for name in changed}
    update = {"compaction": compaction.model_copy(update={"budget_ratio": None, **changed})}
    return ResolvedConfig(config.model_copy(update=update), where)


_OBJECTIONS = {
    "uncalibrated": "of no calibration", "not_recommended": "calibrated and not recommended", None: "recommended",
}  # fmt: skip
"""What thresholds are, by `Routing.objection`."""


def check_effects(resolved: ResolvedConfig) -> None:
    """Checks that the settings of a user have an effect.

    Raises:
        ConfigurationError: names a setting without an effect.
    """
    config, policy, expect = resolved.config, resolved.selection.name(), _expectation(resolved.sources)
    prefill, compaction, routing = resolved.prefill, resolved.compaction, resolved.routing
    diagnostics = config.diagnostics
    # Without these sections nothing is sparse. Such a configuration serves as the dense baseline.
    is_control = prefill is None and compaction is None and routing is None
    others = ["0"]
    if routing is not None:
        others.append("or routing.dense_layers")
    if prefill is not None:
        others.append("or prefill.first_dense_layers")
    expect(resolved.selector is not None or is_control or not config.first_dense_layers, f"{KEY}.first_dense_layers",
           f"{config.first_dense_layers} with policy {policy}, which selects no pages", ", ".join(others))  # fmt: skip
    default = SparseAttentionConfig.model_fields["min_context_tokens"].default
    section = "compaction" if compaction is not None else "prefill"
    expect(resolved.is_sparse or is_control or config.min_context_tokens == default, f"{KEY}.min_context_tokens",
           f"{config.min_context_tokens} with decode steps that read the whole cache",
           f"none, or {section}.min_context_tokens")  # fmt: skip
    for section in ("routing", "stopping", "compaction"):
        # A skipped group chooses no pages, and a page has other tokens in each layer after compaction.
        expect(getattr(config, section) is None, f"{KEY}.selection.anchor_layers", f"a value with {section}", "none")
    beside = {"routing": routing, "stopping": config.stopping}
    for name, value in beside.items():
        expect(value is None, f"{KEY}.lossless.score_every", f"a value with {name}", "none")
    several = config.lossless is None or config.lossless.draft_tokens > 1
    expect(several, f"{KEY}.lossless.score_every", "a value with draft_tokens 1", "none")
    expect(isinstance(resolved.selection, ScoredSelection), f"{KEY}.lossless.score_every",
           f"a value with policy {policy}, which scores no pages", "none")  # fmt: skip
    for_cubic = "none, or with a cubic: a threshold is the same for all contexts"
    by_length = routing is None or routing.cubic is not None
    expect(by_length, f"{KEY}.routing.shortest", "a value with a threshold", for_cubic)
    expect(by_length, f"{KEY}.routing.longest", "a value with a threshold", for_cubic)
    if routing is not None:
        expect(routing.accept in (None, routing.objection), f"{KEY}.routing.accept",
               f"{routing.accept} with thresholds that are {_OBJECTIONS[routing.objection]}",
               f"{routing.objection or 'null'}")  # fmt: skip
    if prefill is not None:
        _check_prefill(prefill, expect)
    unlogged = _against_logs(resolved)
    expect(unlogged is None or not diagnostics.log_requests, f"{KEY}.diagnostics.log_requests",
           f"true with {unlogged}, where no request has a line", "false")  # fmt: skip
    expect(config.stopping is None or policy == DensePolicy.name(), f"{KEY}.stopping.dense_sink_pages",
           f"a value with policy {policy}", "none, or selection.sink_pages")  # fmt: skip
    by_votes = config.stopping is not None and config.stopping.dense_order == "votes"
    expect(resolved.reads_by_votes or not by_votes, f"{KEY}.stopping.dense_order",
           f"votes with {resolved.against_votes}", "newest")  # fmt: skip


def _check_prefill(prefill: Section, expect: Callable[[bool, str, Any, str], None]) -> None:
    """Checks that settings about what is read besides the chosen tokens have an effect; `expect` refuses a setting."""
    if isinstance(prefill, ZipVLPrefill):
        name, share = ("tau", prefill.tau) if prefill.fixed_ratio is None else ("fixed_ratio", prefill.fixed_ratio)
        beside, allowed = f"a value with {name} 1, where every token is important", f"none, or with a smaller {name}"
        expect(share != 1, f"{KEY}.prefill.local_tokens", beside, allowed)
        expect(share != 1, f"{KEY}.prefill.sink_tokens", beside, allowed)
        attends = prefill.others == "attend"
        expect(attends, f"{KEY}.prefill.local_tokens", "a value with others zero", "none, or with others attend")
    if isinstance(prefill, BlockPrefill):
        name, share = ("density", prefill.density) if prefill.coverage is None else ("coverage", prefill.coverage)
        beside, allowed = f"a value with {name} 1, where every key block is read", f"none, or with a smaller {name}"
        expect(share != 1, f"{KEY}.prefill.sink_blocks", beside, allowed)
        expect(share != 1, f"{KEY}.prefill.recent_blocks", beside, allowed)
        expect(share != 1, f"{KEY}.prefill.min_blocks", beside, allowed)


def _against_logs(resolved: ResolvedConfig) -> str | None:
    """Returns the reason why requests have no lines to log, or None."""
    if resolved.lossless is not None:
        return "lossless mode"
    if resolved.config.stopping is not None:
        return "stopping"
    return f"policy {resolved.selection.name()}" if resolved.selector is None else None


def _expectation(sources: Mapping[str, str]) -> Callable[[bool, str, Any, str], None]:
    """Returns a function that refuses a field if its condition does not hold and its value is the user's."""

    def expect(holds: bool, field: str, got: Any, allowed: str) -> None:
        source = sources.get(field.removeprefix(f"{KEY}."))
        if not holds and source is not None and not source.startswith(_NOT_OF_A_USER):
            raise ConfigurationError(f"{field}: got {got}, allowed: {allowed}")

    return expect
