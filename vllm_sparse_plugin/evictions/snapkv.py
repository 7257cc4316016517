"""SnapKV (arXiv 2404.14469) keeps the tokens that the end of a prompt attends to most."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from vllm_sparse_plugin.evictions.base import COMPACTIONS, RepeatedCompaction


@COMPACTIONS.built_in
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
    def window(self) -> int:
        return self.window_tokens

    @property
    def pool(self) -> int:
        return self.pool_tokens
