"""Notices about a supported configuration: one sentence each, logged at start and shown by `show-config`.

`admission.py` refuses unsupported configurations. A notice describes a supported setting with a surprising effect.
A setting of the user without an effect is refused.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
from collections.abc import Callable, Iterable
from typing import NamedTuple

from vllm_sparse_plugin.config import KEY, ResolvedConfig, ZipVLPrefill
from vllm_sparse_plugin.config.sources import ADDITIONAL_CONFIG, FILE
from vllm_sparse_plugin.config.trained import SWITCH, TRAINED, is_beside_a_model
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.evictions.h2o import H2OCompaction
from vllm_sparse_plugin.evictions.snapkv import SnapKVCompaction
from vllm_sparse_plugin.policies import MeanSelection, Selection, UniqueSelection
from vllm_sparse_plugin.policies.scored import ScoredSelection
from vllm_sparse_plugin.policies.unique import CODES

EIGHT_BIT_CACHES = ("fp8", "fp8_e4m3")
"""vLLM's names of the supported 8-bit types of the KV cache."""
WIDE_POOL = 25
"""Tokens over which `snapkv` pools votes. Narrower pools were measured to lose answers of several tokens."""
FEW_PAGES = 64
"""With pages of more than 8 tokens, smaller selections than this number of pages miss single facts. 64 pages are the
paper's budget; the study of page scores measured the effect."""

FEW_TOKENS = 1024
"""Selections of fewer tokens were measured to change 3 to 15 % of the next tokens of texts."""


def is_from_user(config: ResolvedConfig, field: str) -> bool:
    """Returns whether the user, not a preset, gave the value of a field such as `selection.lambda`."""
    source = config.sources.get(field, "")
    return source == ADDITIONAL_CONFIG or source.startswith(FILE)


class Situation(NamedTuple):
    """The configuration that notices depend on."""

    config: ResolvedConfig
    cache_itemsize: int
    """Bytes of an element of the KV cache."""

    @property
    def unique(self) -> UniqueSelection | None:
        """The selection if its policy is UNIQUE; else None."""
        selection = self.config.selection
        return selection if isinstance(selection, UniqueSelection) else None

    @property
    def statistics(self) -> str | None:
        """The format of UNIQUE's statistics in this cache; None for another policy."""
        return self.unique.statistics_in(self.cache_itemsize) if self.unique else None

    @property
    def has_few_large_pages(self) -> bool:
        """Whether a policy that scores reads fewer than `FEW_PAGES` pages of more than 8 tokens, by its budget."""
        selection = self.config.selection
        if not isinstance(selection, ScoredSelection):
            return False
        return selection.page_size > 8 and selection.budget_pages < FEW_PAGES

    @property
    def has_lambda_without_effect(self) -> bool:
        """Whether the user set a lambda without an effect."""
        return is_from_user(self.config, "selection.lambda") and self.statistics in CODES

    @property
    def has_statistics_of_its_cache(self) -> bool:
        """Whether UNIQUE stores other statistics than in a 16-bit cache."""
        return self.unique is not None and self.statistics != self.unique.statistics_in(cache_itemsize=2)

    @property
    def has_threshold_of_no_model(self) -> bool:
        """Whether routing uses thresholds that are not calibrated."""
        return self.config.routing is not None and self.config.routing.objection == "uncalibrated"

    @property
    def has_few_tokens(self) -> bool:
        """Whether tokens are decoded from a selection of fewer than `FEW_TOKENS` tokens, by its budget."""
        config, selection = self.config, self.config.selection
        # Dense attention verifies the drafts of lossless mode. Tokens that a prompt has lost are another notice.
        if config.lossless is not None or config.compaction is not None:
            return False
        return isinstance(selection, Selection) and selection.budget_tokens < FEW_TOKENS

    @property
    def has_narrow_pools(self) -> bool:
        """Whether votes of a prompt's tokens are pooled over fewer tokens than a number or a name has."""
        compaction = self.config.compaction
        return isinstance(compaction, SnapKVCompaction) and compaction.pool_tokens < WIDE_POOL

    @property
    def has_other_representatives(self) -> bool:
        """Whether pages are scored by representative keys that are not those of InfLLM's paper."""
        selection = self.config.selection
        return isinstance(selection, MeanSelection) and selection.keys == "representative"

    @property
    def has_heavy_hitters(self) -> bool:
        """Whether all queries of a prompt say which tokens are kept."""
        return isinstance(self.config.compaction, H2OCompaction)

    @property
    def settings_beside_the_model(self) -> list[str]:
        """The settings in force that the model's config.json or a file beside a model sets, each with its value."""
        values, found = self.config.config.model_dump(by_alias=True), []
        for name, source in self.config.sources.items():
            if source == TRAINED or (source.startswith(FILE) and is_beside_a_model(source.removeprefix(FILE))):
                section, _, key = name.partition(".")
                found.append(f"{name} {json.dumps(values[section][key] if key else values[section]):.80}")
        return found

    @property
    def has_zero_outputs(self) -> bool:
        """Whether tokens that are not important have an output of zero in the prefill."""
        prefill = self.config.prefill
        return isinstance(prefill, ZipVLPrefill) and prefill.others == "zero"


class Notice(NamedTuple):
    """A sentence and its condition."""

    applies: Callable[[Situation], bool]
    sentence: Callable[[Situation], str]


def _about_lambda_without_effect(situation: Situation) -> str:
    return (
        f"{KEY}.selection.lambda: it has no effect with statistics {situation.statistics!r}, which store no deviation."
    )


def _about_few_large_pages(situation: Situation) -> str:
    selection = situation.config.selection
    assert isinstance(selection, ScoredSelection)
    return (
        f"{KEY}.selection: {selection.budget_tokens} tokens in pages of {selection.page_size} are "
        f"{selection.budget_pages} pages; selections of fewer than {FEW_PAGES} large pages miss single facts; set "
        f"page_size 8, or budget_tokens {FEW_PAGES * selection.page_size} or more."
    )


def _about_few_tokens(situation: Situation) -> str:
    selection = situation.config.selection
    assert isinstance(selection, Selection)
    return (
        f"{KEY}.selection.budget_tokens: decode steps read {selection.budget_tokens} tokens; on SmolLM2-135M, 512 of "
        f"7,700 tokens change 3 to 15 % of the next tokens, and {FEW_TOKENS:,} about half as many."
    )


def _about_lost_tokens(situation: Situation) -> str:
    return (
        f"{KEY}.compaction: what a prompt does not keep is lost; on SmolLM2-135M and Gemma 3 270M, 1,024 kept tokens "
        "of 8,000 to 16,000 change 7 to 15 % of the next tokens, and a question after the prompt seldom finds its "
        "answer."
    )


def _about_statistics_of_its_cache(situation: Situation) -> str:
    assert situation.unique is not None
    in_16_bits = situation.unique.statistics_in(cache_itemsize=2)
    return (
        f"{KEY}.selection.statistics: 'auto' stores {situation.statistics} means in this 8-bit KV cache, and "
        f"{in_16_bits} in a 16-bit cache; the means choose pages less well at small budgets."
    )


def _about_threshold_of_no_model(situation: Situation) -> str:
    routing = situation.config.routing
    form = "cubic" if routing is None or routing.threshold is None else "threshold"
    return (
        f"{KEY}.routing.{form}: it was not calibrated for this model, so the number of skipped groups and the quality "
        "of answers are unknown; vllm-sparse calibrate measures both. A server refuses it without routing.accept."
    )


def _about_sparse_prefill(situation: Situation) -> str:
    return (
        f"{KEY}.prefill: prompts attend sparsely, so their log probabilities, keys and values differ from those of "
        "dense attention."
    )


def _about_narrow_pools(situation: Situation) -> str:
    compaction = situation.config.compaction
    assert isinstance(compaction, SnapKVCompaction)
    return (
        f"{KEY}.compaction.pool_tokens: {compaction.pool_tokens} keeps parts of long answers only; on SmolLM2-135M a "
        "quarter of a prompt keeps 7 % of dense attention's RULER score with 5, as published, and 98 % with "
        f"{WIDE_POOL}."
    )


def _about_heavy_hitters(situation: Situation) -> str:
    return (
        f"{KEY}.compaction.method: h2o keeps tokens that all of a prompt attends to, seldom single facts; on "
        "SmolLM2-135M a quarter of a prompt keeps 11 % of dense attention's RULER score; snapkv keeps 98 %."
    )


def _about_zero_outputs(situation: Situation) -> str:
    return (
        f"{KEY}.prefill.others: zero, as published, keeps 64 % of dense attention's next-token agreement on "
        "SmolLM2-135M; attend keeps 99 %."
    )


def _about_settings_beside_the_model(situation: Situation) -> str:
    return (
        f"{KEY}.trained: files beside the model set {', '.join(situation.settings_beside_the_model)}; "
        f'"{SWITCH}": false ignores those of its config.json.'
    )


def _about_departure(situation: Situation) -> str:
    return f"{KEY}.selection.policy: {situation.config.selection.departure}"


NOTICES: tuple[Notice, ...] = (
    Notice(lambda situation: bool(situation.settings_beside_the_model), _about_settings_beside_the_model),
    Notice(lambda situation: situation.has_lambda_without_effect, _about_lambda_without_effect),
    Notice(lambda situation: situation.has_few_large_pages, _about_few_large_pages),
    Notice(lambda situation: situation.has_few_tokens, _about_few_tokens),
    Notice(lambda situation: situation.config.compaction is not None, _about_lost_tokens),
    Notice(lambda situation: situation.has_statistics_of_its_cache, _about_statistics_of_its_cache),
    Notice(lambda situation: situation.has_threshold_of_no_model, _about_threshold_of_no_model),
    Notice(lambda situation: situation.config.config.prefill is not None, _about_sparse_prefill),
    Notice(lambda situation: situation.has_narrow_pools, _about_narrow_pools),
    Notice(lambda situation: situation.has_heavy_hitters, _about_heavy_hitters),
    Notice(lambda situation: situation.has_zero_outputs, _about_zero_outputs),
    Notice(lambda situation: situation.has_other_representatives, _about_departure),
)


def notices_of(config: ResolvedConfig, cache_dtype: str) -> list[str]:
    """Returns the sentences that apply.

    Args:
        config: the configuration.
        cache_dtype: vLLM's name of the KV cache's type, such as `auto`.

    Raises:
        ConfigurationError: for a lambda of the user that has no effect.
    """
    situation = Situation(config, 1 if cache_dtype in EIGHT_BIT_CACHES else 2)
    unique = situation.unique
    if unique and situation.has_lambda_without_effect and unique.lambda_ != UniqueSelection().lambda_:
        raise ConfigurationError(
            f"{KEY}.selection.lambda: got {unique.lambda_:g} with statistics {situation.statistics!r}, which store no "
            "deviation, allowed: with statistics int8, fp8 or bf16"
        )
    return [notice.sentence(situation) for notice in NOTICES if notice.applies(situation)]


def announce(config: ResolvedConfig, cache_dtype: str, of_engine: Iterable[str] = ()) -> None:
    """Logs the sentences that apply, each once, in the process that the user started.

    Args:
        config: see `notices_of`.
        cache_dtype: see `notices_of`.
        of_engine: sentences that depend on the engine, logged after the others.

    Raises:
        ConfigurationError: see `notices_of`.
    """
    sentences = [*notices_of(config, cache_dtype), *of_engine]
    if multiprocessing.parent_process() is None:
        for sentence in sentences:
            _log_once(sentence)


@functools.cache
def _log_once(sentence: str) -> None:
    from vllm.logger import init_logger

    init_logger(f"vllm.{__name__}").warning(sentence)
