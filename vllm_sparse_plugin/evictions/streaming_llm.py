"""StreamingLLM (arXiv 2309.17453) keeps the first tokens and the newest ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from vllm_sparse_plugin.evictions.base import COMPACTIONS, Compaction, shown
from vllm_sparse_plugin.evictions.retention import Retention

if TYPE_CHECKING:
    from sparse_kernels.compaction import CompactionRule
    from sparse_kernels.rolling_attention import RollingWindow


@COMPACTIONS.built_in
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
                {"ratio": shown(self.budget_ratio)},
            )
        return self

    def retention(self) -> Retention:
        """Returns what the layers keep: a sliding window."""
        return replace(super().retention(), slides=True)

    def rule(self) -> CompactionRule | None:
        """Returns None: lengths alone say what is kept."""
        return None

    def rolling_window(self) -> RollingWindow | None:
        """Returns the window of rolling positions, as the operation takes it; None for positions of the text."""
        if self.positions != "rolling":
            return None
        from sparse_kernels.rolling_attention import RollingWindow

        assert self.budget_tokens is not None
        whole_tokens = max(self.budget_tokens, self.min_context_tokens - 1)
        return RollingWindow(self.sink_tokens, self.budget_tokens, whole_tokens)
