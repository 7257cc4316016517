"""Base classes of the methods: the settings that they share, and what a method says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from vllm_sparse_plugin.evictions.retention import Retention
from vllm_sparse_plugin.methods import Methods
from vllm_sparse_plugin.policies.base import Section

if TYPE_CHECKING:
    import torch
    from sparse_kernels.compaction import CompactionRule, HeldTokens
    from sparse_kernels.rolling_attention import RollingWindow


class Compaction(Section):
    """Settings that all methods share, and what a method says of tokens."""

    every_query_votes: ClassVar[bool] = False
    """Whether the attention of all queries gives votes to tokens; else that of the newest `window` queries does."""
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
                {"ratio": shown(self.budget_ratio), "tokens": shown(self.budget_tokens)},
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
    def window(self) -> int:
        """Newest tokens, which are always kept."""
        return 0

    @property
    def pool(self) -> int:
        """A token takes the largest score among this many tokens around it, an odd number."""
        return 1

    @property
    def recent_part(self) -> float:
        """Share of the kept tokens that is reserved for the newest tokens, if this is more than `window`."""
        return 0.0

    def score(self, tokens: HeldTokens) -> torch.Tensor:
        """Scores the tokens of one layer. A KV head keeps the sinks, the newest tokens and those with the best scores.

        Args:
            tokens: their votes, keys and values.

        Returns:
            `[num_kv_heads, num_tokens]` float32, higher is better; without this method, the votes.
        """
        return tokens.votes

    @property
    def reserved_tokens(self) -> int:
        """Tokens of the budget that are always kept."""
        return self.sink_tokens + self.window

    def retention(self) -> Retention:
        """Returns what the layers keep, which depends only on lengths."""
        return Retention(
            slides=False,
            budget_tokens=self.budget_tokens,
            budget_ratio=self.budget_ratio,
            sink_tokens=self.sink_tokens,
            min_context_tokens=self.min_context_tokens,
            reserved_tokens=self.window,
            counts_every_query=self.every_query_votes,
        )

    def rule(self) -> CompactionRule | None:
        """Returns the rule for kept tokens, as the operation takes it; None if it depends only on lengths."""
        from sparse_kernels.compaction import CompactionRule

        return CompactionRule(
            window_tokens=self.window,
            pool_tokens=self.pool,
            sink_tokens=self.sink_tokens,
            recent_share=self.recent_part,
            every_query=self.every_query_votes,
            score=None if type(self).score is Compaction.score else self.score,
        )

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
                {"every": self.every, "ratio": shown(self.budget_ratio)},
            )
        return self

    @property
    def evicts_between_steps(self) -> bool:
        """Whether all layers evict together before a step, not each layer in the step that ends a prompt."""
        return self.every is not None

    def retention(self) -> Retention:
        """Returns what the layers keep, which depends only on lengths."""
        return replace(super().retention(), every=self.every)


def shown(number: float | None) -> str:
    """Returns a number for a sentence; `none` for None."""
    return "none" if number is None else f"{number:g}"


COMPACTIONS: Methods[Compaction] = Methods("vllm_sparse_plugin.evictions", Compaction)
"""Every method. Iteration yields those of this package."""
