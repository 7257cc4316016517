"""Settings of compaction: what the cache keeps of a request after its prefill."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from vllm_sparse_plugin.config.retention import Pyramid, Retention
from vllm_sparse_plugin.policies.base import Section

if TYPE_CHECKING:
    from sparse_kernels.compaction import CompactionRule
    from sparse_kernels.rolling_attention import RollingWindow


class Compaction(Section):
    """Settings that all methods share."""

    method: Any
    """Name of the method."""
    budget_tokens: Annotated[int | None, Field(ge=16, le=1 << 24)] = 1024
    """Prompt tokens that a layer keeps per KV head, in whole blocks; the incomplete last block is kept too."""
    budget_ratio: Annotated[float | None, Field(ge=0.001, le=1.0)] = None
    """Replaces `budget_tokens` by a share of the prompt; 1 keeps everything."""
    sink_tokens: Annotated[int, Field(ge=0, le=512)] = 4
    """First tokens that are always kept; they are the attention sinks."""
    min_context_tokens: Annotated[int, Field(ge=0, le=1 << 24)] = 1024
    """Shorter prompts keep everything; with `streaming_llm`, shorter contexts do."""

    @model_validator(mode="before")
    @classmethod
    def _ratio_replaces_tokens(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("budget_ratio") is not None and "budget_tokens" not in values:
            return {**values, "budget_tokens": None}
        return values

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if (self.budget_tokens is None) == (self.budget_ratio is None):
            raise PydanticCustomError(
                "sentence",
                "budget_ratio: got {ratio} beside budget_tokens {tokens}, allowed: one of the two",
                {"ratio": _shown(self.budget_ratio), "tokens": _shown(self.budget_tokens)},
            )
        least = self.reserved_tokens + 1
        if self.budget_tokens is not None and self.budget_tokens < least:
            raise PydanticCustomError(
                "sentence",
                "budget_tokens: got {tokens}, allowed: at least {least}, more than the tokens that are kept always",
                {"tokens": self.budget_tokens, "least": least},
            )
        return self

    @classmethod
    def name(cls) -> str:
        """Returns the name of the method, as in `compaction.method`."""
        return str(cls.model_fields["method"].default)

    @property
    def reserved_tokens(self) -> int:
        """Tokens of the budget that are always kept."""
        return self.sink_tokens

    def retention(self) -> Retention:
        """Returns what the layers keep, which depends only on lengths."""
        return self._retention(slides=False)

    def _retention(self, slides: bool) -> Retention:
        return Retention(
            slides=slides,
            budget_tokens=self.budget_tokens,
            budget_ratio=self.budget_ratio,
            sink_tokens=self.sink_tokens,
            min_context_tokens=self.min_context_tokens,
            reserved_tokens=self.reserved_tokens - self.sink_tokens,
        )

    def rule(self) -> CompactionRule | None:
        """Returns the rule for kept tokens, as the operation takes it; None if it depends only on lengths."""
        return None

    @property
    def evicts_between_steps(self) -> bool:
        """Whether all layers evict together before a step, not each layer in the step that ends a prompt."""
        return False

    def query_bytes(self, num_layers: int, query_heads: int, head_size: int, itemsize: int) -> int:
        """Returns the bytes of the queries that a worker keeps of a running request for its evictions.

        Args:
            num_layers: of the worker.
            query_heads: of a layer of the worker.
            head_size: elements of a head.
            itemsize: bytes of an element.
        """
        rule = self.rule() if self.evicts_between_steps else None
        return 0 if rule is None else rule.ring_tokens * num_layers * query_heads * head_size * itemsize

    def rolling_window(self) -> RollingWindow | None:
        """Returns the window of rolling positions, as the operation takes it; None for positions of the text."""
        return None


class RepeatedCompaction(Compaction):
    """Settings of methods that can evict while a request decodes."""

    every: Annotated[int | None, Field(ge=16, le=1 << 24)] = None
    """Decoded tokens between evictions; each keeps the budget. Null: one eviction, at the end of the prompt."""

    @model_validator(mode="after")
    def _budget_is_a_number(self) -> Self:
        if self.every is not None and self.budget_ratio is not None:
            raise PydanticCustomError(
                "sentence",
                "every: got {every} with budget_ratio {ratio}, allowed: budget_tokens, since a context grows",
                {"every": self.every, "ratio": _shown(self.budget_ratio)},
            )
        return self

    @property
    def evicts_between_steps(self) -> bool:
        """Whether all layers evict together before a step, not each layer in the step that ends a prompt."""
        return self.every is not None

    def retention(self) -> Retention:
        """Returns what the layers keep, which depends only on lengths."""
        return replace(super().retention(), every=self.every)


class StreamingLLMCompaction(Compaction):
    """StreamingLLM (arXiv 2309.17453): the first tokens and the newest ones are kept, and the window slides on while a
    request decodes, so that its memory stays constant."""

    method: Literal["streaming_llm"] = "streaming_llm"
    """Name of the method."""
    positions: Literal["text", "rolling"] = "text"
    """`rolling`: the first tokens stand directly before the window, as in the paper; policy `dense` only."""

    @model_validator(mode="after")
    def _one_window(self) -> Self:
        if self.positions == "rolling" and self.budget_ratio is not None:
            # Blocks of a cached prefix would depend on the length of the prompt.
            raise PydanticCustomError(
                "sentence",
                "positions: got rolling with budget_ratio {ratio}, allowed: text, or budget_tokens",
                {"ratio": _shown(self.budget_ratio)},
            )
        return self

    def retention(self) -> Retention:
        """Returns what the layers keep: a sliding window."""
        return self._retention(slides=True)

    def rolling_window(self) -> RollingWindow | None:
        """Returns the window of rolling positions, as the operation takes it; None for positions of the text."""
        if self.positions != "rolling":
            return None
        from sparse_kernels.rolling_attention import RollingWindow

        assert self.budget_tokens is not None
        whole_tokens = max(self.budget_tokens, self.min_context_tokens - 1)
        return RollingWindow(self.sink_tokens, self.budget_tokens, whole_tokens)


class SnapKVCompaction(RepeatedCompaction):
    """SnapKV (arXiv 2404.14469): at the end of a prompt its newest tokens vote by their attention, and each KV head
    keeps the tokens with the largest votes."""

    method: Literal["snapkv"] = "snapkv"
    """Name of the method."""
    window_tokens: Annotated[int, Field(ge=1, le=512)] = 32
    """Newest tokens; they vote and are kept."""
    pool_tokens: Annotated[int, Field(ge=1, le=99)] = 25
    """A token takes the largest vote among this many tokens around it, an odd number; 1: its own."""

    @model_validator(mode="after")
    def _pool_has_a_middle(self) -> Self:
        if self.pool_tokens % 2 == 0:
            raise PydanticCustomError(
                "sentence", "pool_tokens: got {got}, allowed: an odd number from 1 to 99", {"got": self.pool_tokens}
            )
        return self

    @property
    def reserved_tokens(self) -> int:
        """Tokens of the budget that are always kept: the sinks and the window."""
        return self.sink_tokens + self.window_tokens

    def rule(self) -> CompactionRule:
        """Returns the rule for kept tokens, as the operation takes it."""
        from sparse_kernels.compaction import CompactionRule

        return CompactionRule(
            window_tokens=self.window_tokens, pool_tokens=self.pool_tokens, sink_tokens=self.sink_tokens
        )


class PyramidKVCompaction(SnapKVCompaction):
    """PyramidKV (arXiv 2406.02069): SnapKV with budgets that fall from layer to layer and are `budget_tokens` on
    average, since the first layers attend to more places than the last ones."""

    method: Literal["pyramidkv"] = "pyramidkv"  # type: ignore[assignment]
    """Name of the method."""
    window_tokens: Annotated[int, Field(ge=1, le=512)] = 128
    """Newest tokens; they vote and are kept."""
    beta: Annotated[float, Field(ge=1.0, le=1000.0)] = 20.0
    """The last layer keeps the average budget divided by this, the first layers more; 1: equal budgets."""
    layer_classes: Annotated[int, Field(ge=1, le=16)] = 4
    """Largest number of different budgets; consecutive layers share a budget and a block table."""

    def retention(self) -> Retention:
        """Returns what the layers keep on average, and the split between layers."""
        return replace(super().retention(), pyramid=Pyramid(self.beta, self.layer_classes))


class H2OCompaction(RepeatedCompaction):
    """H2O (arXiv 2306.14048): each KV head keeps the tokens that all queries so far have attended to most, the heavy
    hitters, and the newest ones. Without `every` it evicts at the end of the prompt, and what is decoded is kept."""

    method: Literal["h2o"] = "h2o"
    """Name of the method."""
    recent_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Share of the budget for the newest tokens; sinks and chosen tokens share the rest."""

    def retention(self) -> Retention:
        """Returns what the layers keep, which depends on all queries of a prompt."""
        return replace(super().retention(), counts_every_query=True)

    def rule(self) -> CompactionRule:
        """Returns the rule for kept tokens, as the operation takes it."""
        from sparse_kernels.compaction import CompactionRule

        return CompactionRule(
            window_tokens=0, pool_tokens=1, sink_tokens=self.sink_tokens, recent_share=self.recent_share,
            every_query=True,
        )  # fmt: skip


class ZipVLCompaction(Compaction):
    """ZipVL (arXiv 2410.08584) at the end of a prompt: each layer keeps the keys and values of the tokens with the
    largest attention of some probe rows, divided by the number of rows that see the token. A budget says how many."""

    method: Literal["zipvl"] = "zipvl"
    """Name of the method."""
    recent_probes: Annotated[int, Field(ge=1, le=4096)] = 64
    """Newest tokens of the prompt that are probe rows."""
    random_probes: Annotated[int, Field(ge=0, le=4096)] = 64
    """Earlier tokens, drawn at random, that are probe rows too."""
    seed: Annotated[int, Field(ge=0, le=(1 << 32) - 1)] = 0
    """Seed of the draw."""

    @property
    def reserved_tokens(self) -> int:
        """Tokens of the budget that are always kept: the sinks and the last token."""
        return self.sink_tokens + 1

    def retention(self) -> Retention:
        """Returns what the layers keep, which depends on queries of the whole prompt."""
        return replace(self._retention(slides=False), counts_every_query=True)

    def rule(self) -> CompactionRule:
        """Returns the rule for kept tokens, as the operation takes it."""
        from sparse_kernels.compaction import CompactionRule
        from sparse_kernels.token_prefill import TokenRule

        return CompactionRule(
            window_tokens=1, pool_tokens=1, sink_tokens=self.sink_tokens, every_query=True,
            probes=TokenRule(recent_probes=self.recent_probes, random_probes=self.random_probes, seed=self.seed),
        )  # fmt: skip


COMPACTIONS: tuple[type[Compaction], ...] = (
    StreamingLLMCompaction, SnapKVCompaction, PyramidKVCompaction, H2OCompaction, ZipVLCompaction,
)  # fmt: skip
"""Every method of compaction. The schema, the documentation and the tests use this table."""


def _shown(number: float | None) -> str:
    return "none" if number is None else f"{number:g}"
