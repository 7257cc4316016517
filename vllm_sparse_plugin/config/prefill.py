"""The settings of sparse prefill say what the tokens of a prompt attend to, by one of two methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from vllm_sparse_plugin.policies.base import Section

if TYPE_CHECKING:
    from sparse_kernels.block_prefill import BlockRule
    from sparse_kernels.token_prefill import TokenRule


class BlockPrefill(Section):
    """Tiles of a prompt attend to the blocks of their past that their queries look for, by the page statistics in the
    cache."""

    method: Literal["blocks"] = "blocks"
    """Name of the method."""
    density: Annotated[float | None, Field(ge=0.001, le=1.0)] = 0.1
    """Share of its past blocks that a tile reads, per KV head; 1 for all. A `coverage` replaces it."""
    coverage: Annotated[float | None, Field(ge=0.001, le=1.0)] = None
    """Instead of `density`: share of a tile's estimated attention weight that what it reads must reach, so that each
    tile and KV head reads as much as it needs."""
    tile_tokens: Literal[64, 128] = 64
    """Positions of a prompt that choose together."""
    block_tokens: Literal[64, 128] = 64
    """Tokens of a block, the unit that a tile chooses."""
    measure: Literal["mass", "maximum"] = "mass"
    """What a block is chosen by: the estimated attention weight on it, summed over a tile's queries, or the largest
    score that a query gives one of its pages. A `coverage` needs the mass."""
    query_stride: Literal[1, 2, 4, 8, 16] = 8
    """One in so many of a tile's queries scores the blocks."""
    first_dense_layers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Leading layers whose prefill stays dense."""
    min_context_tokens: Annotated[int, Field(ge=0, le=1 << 24)] = 8192
    """Position from which a tile that begins there chooses; tiles before it read everything. Prompts that end before
    it are served as without this section."""
    min_blocks: Annotated[int, Field(ge=1, le=1 << 16)] = 16
    """Past blocks that a tile reads at least, if it has so many."""
    sink_blocks: Annotated[int, Field(ge=0, le=64)] = 1
    """Leading blocks that are always read: they hold the attention sinks."""
    recent_blocks: Annotated[int, Field(ge=0, le=64)] = 1
    """Newest past blocks that are always read. A tile's own blocks are read on top, causally."""

    @field_validator("query_stride", mode="before")
    @classmethod
    def _no_boolean(cls, value: Any) -> Any:
        if isinstance(value, bool):  # which equals 1
            raise ValueError
        return value

    @model_validator(mode="before")
    @classmethod
    def _coverage_replaces_density(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("coverage") is not None and "density" not in values:
            return {**values, "density": None}
        return values

    @model_validator(mode="after")
    def _one_measure(self) -> Self:
        if (self.density is None) == (self.coverage is None):
            raise PydanticCustomError(
                "sentence",
                "density: got {density} beside coverage {coverage}, allowed: one of the two",
                {"density": _shown(self.density), "coverage": _shown(self.coverage)},
            )
        if self.coverage is not None and self.measure != "mass":
            raise PydanticCustomError(
                "sentence",
                "measure: got '{measure}' beside coverage {coverage}, allowed: mass",
                {"measure": self.measure, "coverage": self.coverage},
            )
        return self

    def rule(self) -> BlockRule:
        """Returns the settings as the operation takes them."""
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
    """ZipVL (arXiv 2410.08584): in each layer the tokens that carry most of the attention of some probe rows attend to
    each other; the attention of the others is left out."""

    method: Literal["zipvl"] = "zipvl"
    """Name of the method."""
    tau: Annotated[float, Field(ge=0.001, le=1.0)] = 0.975
    """Share of the probe rows' attention that the tokens which are kept must carry (the paper's tau); 1 for all."""
    recent_probes: Annotated[int, Field(ge=1, le=4096)] = 64
    """Newest tokens of a chunk that are probe rows."""
    random_probes: Annotated[int, Field(ge=0, le=4096)] = 64
    """Tokens drawn from those before them that are probe rows as well."""
    seed: Annotated[int, Field(ge=0, le=(1 << 32) - 1)] = 0
    """Seed of the draw."""
    first_dense_layers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Leading layers whose prefill stays dense."""
    min_context_tokens: Annotated[int, Field(ge=0, le=1 << 24)] = 1024
    """Shortest context whose chunk attends sparsely. The paper has none."""

    def rule(self) -> TokenRule:
        """Returns the settings as the operation takes them."""
        from sparse_kernels.token_prefill import TokenRule

        return TokenRule(
            tau=self.tau,
            recent_probes=self.recent_probes,
            random_probes=self.random_probes,
            seed=self.seed,
            dense_tokens=max(self.min_context_tokens - 1, 0),
        )


PREFILLS: tuple[type[Section], ...] = (BlockPrefill, ZipVLPrefill)
"""Every method of sparse prefill; the schema, the documentation and the tests follow from this table."""


def _shown(number: float | None) -> str:
    return "none" if number is None else f"{number:g}"
