"""The configuration schema, and a configuration with the source of each value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field, PlainValidator, SerializeAsAny
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError

from vllm_sparse_plugin.config.lossless import DraftRule, Lossless
from vllm_sparse_plugin.config.offload import Offload
from vllm_sparse_plugin.config.prefill import PREFILLS, BlockPrefill, ZipVLPrefill
from vllm_sparse_plugin.config.routing import FITTED, VERDICT, Routing
from vllm_sparse_plugin.config.speculation import Speculation
from vllm_sparse_plugin.config.stopping import Stopping
from vllm_sparse_plugin.evictions import COMPACTIONS, Compaction
from vllm_sparse_plugin.names import KEY as KEY
from vllm_sparse_plugin.policies import POLICIES, DensePolicy, EveryPage, Policy, Selection, UniqueSelection
from vllm_sparse_plugin.policies.base import Section
from vllm_sparse_plugin.policies.scored import ScoredSelection

if TYPE_CHECKING:
    from sparse_kernels.page_statistics import StatisticsLayout
    from sparse_kernels.rolling_attention import RollingWindow
    from sparse_kernels.stopping import StopRule

SOURCES = ("preset", "config", "trained")
"""Keys in addition to the schema: the name of a preset, the name of a YAML file, and whether to use the settings of
the model's training."""

_PREFILLS: dict[str, type[Section]] = {str(model.model_fields["method"].default): model for model in PREFILLS}


def _by_name(tag: str, find: Callable[[str], type[Section] | None]) -> PlainValidator:
    """Returns a validator of a section whose key `tag` names its class."""

    def validate(value: Any) -> Section:
        if isinstance(value, Section):
            return value
        if not isinstance(value, dict):
            raise PydanticKnownError("dict_type")
        name = value.get(tag)
        found = find(name) if isinstance(name, str) else None
        if found is None:
            raise PydanticKnownError("union_tag_invalid", {"discriminator": tag, "tag": str(name), "expected_tags": ""})
        return found.model_validate(value)

    return PlainValidator(validate)


# The class may be that of another package, so no union of classes says what is valid.
AnySelection = Annotated[SerializeAsAny[Policy], _by_name("policy", POLICIES.find)]
AnyPrefill = Annotated[SerializeAsAny[Section], _by_name("method", _PREFILLS.get)]
AnyCompaction = Annotated[SerializeAsAny[Compaction], _by_name("method", COMPACTIONS.find)]


class Diagnostics(Section):
    """The log of a running server."""

    log_requests: bool = False
    """Log one line for each finished request: the share of its context that decode steps read."""


class SparseAttentionConfig(Section):
    """Settings of the pipeline."""

    selection: AnySelection = UniqueSelection()
    """The rule that chooses the pages of a decode step."""
    prefill: AnyPrefill | None = None
    """What the tokens of a prompt attend to; null: everything."""
    compaction: AnyCompaction | None = None
    """What the cache keeps of a prompt after its prefill; null: everything."""
    routing: Routing | None = None
    """The KV groups that a decode step skips; null: none."""
    stopping: Stopping | None = None
    """When a decode step stops reading; null: never."""
    offload: Offload | None = None
    """Keys and values in host memory; null: on the GPU."""
    first_dense_layers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of leading layers that stay dense."""
    min_context_tokens: Annotated[int, Field(ge=0, le=1 << 24)] = 1024
    """Shorter contexts are served dense."""
    lossless: Lossless | None = None
    """Sparse steps draft and dense attention verifies; null: sparse steps answer."""
    speculation: Speculation = Speculation()
    """Attention of a draft's layers."""
    diagnostics: Diagnostics = Diagnostics()
    """Measurements of a running server's selections."""

    def without_auto(self) -> SparseAttentionConfig:
        """Returns the configuration with `stopping.block_tokens: auto` replaced by its number."""
        if self.stopping is None:
            return self
        number = self.stopping.block_tokens_of(self.selection)
        stopping = self.stopping.model_copy(update={"block_tokens": number})
        return self.model_copy(update={"stopping": stopping})


def fields_by_key(section: type[Section]) -> dict[str, FieldInfo]:
    """Returns the fields of a section by the keys that a user writes."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


class Variants(NamedTuple):
    """A section with several models; one of its keys names the model."""

    tag: str
    """The key."""
    models: Sequence[type[Section]]
    """The models of this package."""
    find: Callable[[str], type[Section] | None]
    """Returns the model of a name, which may be that of another package."""
    names: Callable[[], Sequence[str]]
    """Returns the names of all models."""
    common: type[Section]
    """Base class with the settings that all models share."""
    default: str | None
    """Value of the key if a configuration does not name it; None if the section is then absent."""

    @property
    def by_name(self) -> dict[str, type[Section]]:
        """The models of this package by their value of the key."""
        return {str(model.model_fields[self.tag].default): model for model in self.models}

    @property
    def fields(self) -> dict[str, FieldInfo]:
        """The fields of all models, by the keys that a user writes."""
        return {key: field for model in self.models for key, field in fields_by_key(model).items()}


VARIANTS: dict[str, Variants] = {
    "selection": Variants("policy", tuple(POLICIES), POLICIES.find, POLICIES.names, Selection, UniqueSelection.name()),
    "prefill": Variants("method", PREFILLS, _PREFILLS.get, lambda: sorted(_PREFILLS), Section, None),
    "compaction": Variants("method", tuple(COMPACTIONS), COMPACTIONS.find, COMPACTIONS.names, Compaction, None),
}
"""The sections with several models."""
SECTIONS: dict[str, dict[str, FieldInfo]] = {
    **{section: variants.fields for section, variants in VARIANTS.items()},
    "routing": fields_by_key(Routing),
    "stopping": fields_by_key(Stopping),
    "offload": fields_by_key(Offload),
    "lossless": fields_by_key(Lossless),
    "speculation": fields_by_key(Speculation),
    "diagnostics": fields_by_key(Diagnostics),
}
"""Fields of the sections, by the keys that a user writes."""
REPLACED: dict[str, tuple[tuple[str, str], ...]] = {
    "routing": (
        ("threshold", "cubic"), ("threshold", "shortest"), ("threshold", "longest"), ("cubic", "threshold"),
    ),
    "prefill": (
        ("density", "coverage"), ("coverage", "density"), ("tau", "fixed_ratio"), ("fixed_ratio", "tau"),
    ),
    "compaction": (("budget_tokens", "budget_ratio"), ("budget_ratio", "budget_tokens")),
}  # fmt: skip
"""Pairs of keys of a section. If a later source gives the first key, it replaces the second key, which is an
alternative or belongs to an alternative."""
MEASURED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {"routing": (FITTED, VERDICT)}
"""Keys of a section that were measured together, and those of the verdict on them. If a later source changes one of the
former, the verdict no longer holds."""


@dataclass(frozen=True)
class ResolvedConfig:
    """A valid configuration and the source of each of its values."""

    config: SparseAttentionConfig
    sources: dict[str, str]
    """Dotted field name to source, for values that are not the schema's defaults."""

    @property
    def selection(self) -> Policy:
        """The section `selection`."""
        return self.config.selection

    @property
    def routing(self) -> Routing | None:
        """The section `routing`, or None."""
        return self.config.routing

    @property
    def prefill(self) -> BlockPrefill | ZipVLPrefill | None:
        """The section `prefill`, or None."""
        prefill = self.config.prefill
        assert prefill is None or isinstance(prefill, (BlockPrefill, ZipVLPrefill))
        return prefill

    @property
    def block_prefill(self) -> BlockPrefill | None:
        """The section `prefill` with the method `blocks`, or None."""
        prefill = self.prefill
        return prefill if isinstance(prefill, BlockPrefill) else None

    @property
    def compaction(self) -> Compaction | None:
        """The section `compaction`, or None."""
        return self.config.compaction

    @property
    def moves_tokens(self) -> bool:
        """Whether compaction moves kept prompt tokens to other blocks."""
        return self.compaction is not None and not self.compaction.retention().slides

    @property
    def reads_by_votes(self) -> bool:
        """Whether decode steps read the tokens with most votes first, and compaction stores them in this order."""
        stopping: Stopping | None = self.config.stopping
        return stopping is not None and stopping.dense_order == "votes" and self.against_votes is None

    @property
    def against_votes(self) -> str | None:
        """The reason why kept tokens cannot lie in the order of their votes, or None."""
        policy, compaction = self.selection.name(), self.compaction
        if policy != DensePolicy.name():
            # Statistics are of neighbours in the text.
            return f"policy {policy}"
        if compaction is None or not self.moves_tokens:
            return "no votes of a compaction"
        if compaction.evicts_between_steps:
            # Later evictions take the last tokens for the newest, and neighbours for neighbours in the text.
            return "a compaction that evicts between steps"
        return None

    @property
    def rolling_window(self) -> RollingWindow | None:
        """The window of rolling positions; None for positions of the text."""
        return None if self.compaction is None else self.compaction.rolling_window()

    @property
    def selector(self) -> Selection | None:
        """The policy that chooses pages, or all pages if dense attention may stop; None if everything is read."""
        if isinstance(self.selection, Selection):
            return self.selection
        stopping = self.config.stopping
        return EveryPage(sink_pages=stopping.dense_sink_pages) if stopping else None

    @property
    def stop_rule(self) -> StopRule | None:
        """The rule by which attention to selected pages stops; None if it never stops."""
        stopping, selector = self.config.stopping, self.selector
        return stopping.rule(selector) if stopping and selector else None

    @property
    def anchor_layers(self) -> int | tuple[int, ...]:
        """The layers that choose pages: every how manyth, or their indices; 1 if each layer chooses."""
        alone = self.routing is None and self.compaction is None and self.config.stopping is None
        return self.selection.anchor_layers if alone and isinstance(self.selection, ScoredSelection) else 1

    @property
    def anchor_heads(self) -> tuple[tuple[int, ...], ...] | None:
        """For each layer the KV heads of its anchor that its KV heads read; None for the same heads."""
        return self.selection.anchor_heads if isinstance(self.selection, ScoredSelection) else None

    @property
    def anchor_fingerprint(self) -> str | None:
        """The model that the anchors were found for; None for any model."""
        return self.selection.fingerprint if isinstance(self.selection, ScoredSelection) else None

    @property
    def is_sparse(self) -> bool:
        """Whether decode steps of some layers use this plugin's kernels."""
        return self.selector is not None or self.routing is not None

    @property
    def runs_kernels(self) -> bool:
        """Whether this plugin's kernels read or write the cache."""
        rolls = self.rolling_window is not None
        return self.is_sparse or self.moves_tokens or self.prefill is not None or rolls

    @property
    def lossless(self) -> Lossless | None:
        """The section `lossless`, or None."""
        return self.config.lossless

    @property
    def offload(self) -> Offload | None:
        """The section `offload`, or None."""
        return self.config.offload

    @property
    def draft_rule(self) -> DraftRule | None:
        """The rule for the number of drafted tokens; None without lossless mode. Contexts read whole have no drafts."""
        lossless, selector = self.lossless, self.selector
        if lossless is None:
            return None
        shortest = max(lossless.min_context_tokens, self.config.min_context_tokens)
        if selector is not None and self.routing is None:
            shortest = max(shortest, (selector.budget_pages + 1) * selector.page_size)
        # A skipped group chooses no pages. A stop decides for one token alone.
        alone = self.routing is None and self.config.stopping is None
        alone = alone and isinstance(self.selection, ScoredSelection)
        return DraftRule(
            lossless.draft_tokens, shortest, lossless.draft_length == "adaptive", lossless.score_every if alone else 1
        )

    @property
    def kept_pages(self) -> int:
        """The most pages of a row that a step of a draft reads because an earlier step has chosen them; 0 if each step
        chooses."""
        rule, selector = self.draft_rule, self.selector
        if rule is None or selector is None or not rule.keeps_pages:
            return 0
        return selector.budget_pages + rule.next_pages(selector.page_size)

    def kept_page_bytes(self, heads: int, requests: int) -> int:
        """Returns the GPU memory of the pages that a step of a draft chooses for later steps, in bytes; 0 for none.

        Args:
            heads: KV heads of all layers.
            requests: the most requests that run at once.
        """
        # int32
        return 4 * heads * requests * self.kept_pages

    @property
    def draft_is_sparse(self) -> bool:
        """Whether the layers of a draft model read selected pages."""
        return self.config.speculation.draft == "sparse"

    def statistics_layout(self, head_size: int, cache_itemsize: int) -> StatisticsLayout | None:
        """Returns the layout of page statistics in the KV block: the policy's; or, if only prefill needs statistics,
        the layout of UNIQUE; None if neither needs them.

        Args:
            head_size: elements of a key.
            cache_itemsize: bytes of an element of the KV cache.
        """
        layout: StatisticsLayout | None = self.selection.statistics_layout(head_size, cache_itemsize)
        if layout is None and self.block_prefill is not None:
            return UniqueSelection().statistics_layout(head_size, cache_itemsize)
        return layout
