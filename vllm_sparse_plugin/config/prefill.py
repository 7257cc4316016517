"""Settings of sparse prefill: what the tokens of a prompt attend to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from vllm_sparse_plugin.policies.base import Section

if TYPE_CHECKING:
    from sparse_kernels.block_prefill import BlockRule
    from sparse_kernels.token_prefill import TokenRule


class BlockPrefill(Section):
    """Each tile of a prompt attends to the past key blocks with the largest estimated attention weight, from the page
    statistics in the cache."""

    method: Literal["blocks"] = "blocks"
    """Name of the method."""
    density: Annotated[float | None, Field(ge=0.001, le=1.0)] = 0.1
    """Share of its past key blocks that a tile reads per KV head; 1: all."""
    coverage: Annotated[float | None, Field(ge=0.001, le=1.0)] = None
    """Replaces `density`: read key blocks until they hold this estimated share of the attention weight."""
    tile_tokens: Literal[64, 128] = 64
    """Prompt tokens that choose key blocks together: a tile."""
    block_tokens: Literal[64, 128] = 64
    """Tokens of a key block."""
    measure: Literal["mass", "maximum"] = "mass"
    """Score of a key block: `mass`, its estimated attention weight, or `maximum`, its best page score."""
    query_stride: Literal[1, 2, 4, 8, 16] = 8
    """One in this many queries of a tile scores the key blocks."""
    first_dense_layers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of leading layers with dense prefill."""
    min_context_tokens: Annotated[int, Field(ge=0, le=1 << 24)] = 8192
    """Tiles before this position are dense."""
    min_blocks: Annotated[int, Field(ge=1, le=1 << 16)] = 16
    """Smallest number of past key blocks that a tile reads, if it has that many."""
    sink_blocks: Annotated[int, Field(ge=0, le=64)] = 1
    """First key blocks that are always read; they hold the attention sinks."""
    recent_blocks: Annotated[int, Field(ge=0, le=64)] = 1
    """Newest past key blocks that are always read; a tile also reads its own key blocks."""

    @field_validator("query_stride", mode="before")
    @classmethod
    def _no_boolean(cls, value: Any) -> Any:
        if isinstance(value, bool):  # which equals 1
            raise ValueError
        return value

    @model_validator(mode="before")
    @classmethod
    def _coverage_replaces_density(cls, values: Any) -> Any:
        return _replace(values, "density", "coverage")

    @model_validator(mode="after")
    def _one_measure(self) -> Self:
        _require_one(self, "density", "coverage")
        if self.coverage is not None and self.measure != "mass":
            raise PydanticCustomError(
                "sentence",
                "measure: got '{measure}' beside coverage {coverage}, allowed: mass",
                {"measure": self.measure, "coverage": self.coverage},
            )
        return self

    @property
    def dense_tokens(self) -> int:
        """Tokens of a context in whose tiles every past key block is read: the first tiles."""
        blocks = max(-(-self.min_context_tokens // self.block_tokens), max(self.min_blocks, self.always_read) + 1)
        return -(-blocks * self.block_tokens // self.tile_tokens) * self.tile_tokens

    @property
    def always_read(self) -> int:
        """Past key blocks that a tile always reads."""
        return self.sink_blocks + self.recent_blocks

    def rule(self) -> BlockRule:
        """Returns the rule as the operation takes it."""
        from sparse_kernels.block_prefill import BlockRule

        return BlockRule(
            tile_tokens=self.tile_tokens,
            block_tokens=self.block_tokens,
            density=1.0 if self.density is None else self.density,
            coverage=self.coverage,
            sink_blocks=self.sink_blocks,
            recent_blocks=self.recent_blocks,
            least_blocks=self.min_blocks,
            dense_tokens=self.min_context_tokens,
            measure=self.measure,
            query_stride=self.query_stride,
        )


class ZipVLPrefill(Section):
    """ZipVL (arXiv 2410.08584): in each layer, some probe rows vote for the important tokens. Every token attends to
    the important tokens and to the newest tokens before it."""

    method: Literal["zipvl"] = "zipvl"
    """Name of the method."""
    tau: Annotated[float | None, Field(ge=0.001, le=1.0)] = 0.975
    """Share of the probe rows' attention that the important tokens carry (tau in the paper); 1: all are important."""
    fixed_ratio: Annotated[float | None, Field(ge=0.001, le=1.0)] = None
    """Replaces `tau`: share of a context's tokens that is important, in every layer; the paper's control."""
    others: Literal["attend", "zero"] = "attend"
    """What the other tokens do: `attend` to the important tokens and their newest tokens, or have an output of `zero`,
    as published."""
    local_tokens: Annotated[int, Field(ge=1, le=1 << 16)] = 64
    """Newest tokens that each token attends to at least (up to 127 more), itself included; only with `attend`."""
    sink_tokens: Annotated[int, Field(ge=0, le=4096)] = 4
    """First tokens of a context that are always important: the attention sinks."""
    recent_probes: Annotated[int, Field(ge=1, le=4096)] = 64
    """Newest tokens of a chunk that are probe rows."""
    random_probes: Annotated[int, Field(ge=0, le=4096)] = 64
    """Earlier tokens, drawn at random, that are probe rows too."""
    seed: Annotated[int, Field(ge=0, le=(1 << 32) - 1)] = 0
    """Seed of the draw."""
    first_dense_layers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of leading layers with dense prefill."""
    min_context_tokens: Annotated[int, Field(ge=0, le=1 << 24)] = 1024
    """Shorter contexts are prefilled dense."""

    @model_validator(mode="before")
    @classmethod
    def _ratio_replaces_tau(cls, values: Any) -> Any:
        return _replace(values, "tau", "fixed_ratio")

    @model_validator(mode="after")
    def _one_share(self) -> Self:
        _require_one(self, "tau", "fixed_ratio")
        return self

    def rule(self) -> TokenRule:
        """Returns the rule as the operation takes it."""
        from sparse_kernels.token_prefill import TokenRule

        return TokenRule(
            tau=1.0 if self.tau is None else self.tau,
            fixed_ratio=self.fixed_ratio,
            recent_probes=self.recent_probes,
            random_probes=self.random_probes,
            seed=self.seed,
            dense_tokens=max(self.min_context_tokens - 1, 0),
            others=self.others,
            local_tokens=self.local_tokens,
            sink_tokens=self.sink_tokens,
        )


PREFILLS: tuple[type[Section], ...] = (BlockPrefill, ZipVLPrefill)
"""Every method of sparse prefill. The schema, the documentation and the tests use this table."""


def _replace(values: Any, name: str, by: str) -> Any:
    """Returns the values without the default of a setting that another one replaces."""
    if isinstance(values, dict) and values.get(by) is not None and name not in values:
        return {**values, name: None}
    return values


def _require_one(section: Section, name: str, other: str) -> None:
    """Refuses a section with both of two settings, or with neither."""
    got = getattr(section, name), getattr(section, other)
    if (got[0] is None) == (got[1] is None):
        raise PydanticCustomError(
            "sentence",
            "{name}: got {got} beside {other} {beside}, allowed: one of the two",
            {"name": name, "other": other, "got": _shown(got[0]), "beside": _shown(got[1])},
        )


def _shown(number: float | None) -> str:
    return "none" if number is None else f"{number:g}"
