"""SinkRouter (arXiv 2604.16883): the KV groups that a decoding token skips, as settings and as kernels take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from vllm_sparse_plugin.policies.base import Section

if TYPE_CHECKING:
    import torch
    from sparse_kernels.group_routing import GroupRouting

_MOST = 2.0
"""Thresholds reach from minus this to this: cosines are never above 1, so more than 1 skips nothing."""
_MOST_COEFFICIENT = 1e6

THRESHOLD = (
    "a number from -2 to 2, a list of one for each layer, or a list of lists with one for each KV head of a layer"
)
CUBIC = "a list of four numbers, c0 to c3"
FITTED = ("score", "threshold", "cubic", "shortest", "longest", "dense_layers")
"""Settings that `calibrate` fits or measures together."""
VERDICT = ("fingerprint", "recommended")
"""What `calibrate` says about them."""
ORIGIN = ("model", "data", "date")
"""Where they are from."""
TEXT = "a text"
ACCEPTED = "uncalibrated or not_recommended"


class Routing(Section):
    """SinkRouter: the KV groups whose attention would go to the first token, whose value is next to nothing, and
    which are therefore skipped, with an output of zero."""

    score: Literal["mean", "max", "min"] = "mean"
    """A group's score: mean, largest or smallest cosine of its query heads with the key of token 0."""
    threshold: Annotated[Any, THRESHOLD] = None
    """Skip groups with this score or more: a number, or a list by layer, or by layer and KV head; above 1: skip
    none."""
    cubic: Annotated[Any, CUBIC] = None
    """Replaces `threshold`: c0 to c3 of a cubic in x, the logarithm of the context length, 0 at `shortest`, 1 at
    `longest`."""
    shortest: Annotated[int, Field(ge=1, le=1 << 24)] = 1
    """Shortest context, in tokens, that `cubic` was fitted to; shorter contexts use its threshold."""
    longest: Annotated[int, Field(ge=2, le=1 << 24)] = 1 << 24
    """Longest context, in tokens, that `cubic` was fitted to; longer ones are refused at start."""
    dense_layers: Annotated[int, Field(ge=0, le=1024)] = 2
    """Number of leading layers that are not routed."""
    accept: Annotated[Literal["uncalibrated", "not_recommended"] | None, ACCEPTED] = None
    """Serves thresholds that are otherwise refused: those of no calibration, or those that `calibrate` advises
    against."""
    recommended: Annotated[bool | None, "true or false"] = None
    """Whether `calibrate` recommends routing for this model."""
    fingerprint: Annotated[str | None, TEXT] = None
    """Model that was calibrated, by its contents; any other is refused. Null: the thresholds are not calibrated."""
    model: Annotated[str | None, TEXT] = None
    """Name of that model."""
    data: Annotated[str | None, TEXT] = None
    """Data that the thresholds were fitted to."""
    date: Annotated[str | None, TEXT] = None
    """Date of that fit."""

    @field_validator("threshold", mode="plain")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        return None if value is None else _nested(value, depth=2, most=_MOST)

    @field_validator("cubic", mode="plain")
    @classmethod
    def _four_numbers(cls, value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or len(value) != 4:
            raise ValueError
        return tuple(_nested(number, depth=0, most=_MOST_COEFFICIENT) for number in value)

    @model_validator(mode="after")
    def _one_threshold(self) -> Self:
        if (self.threshold is None) == (self.cubic is None):
            got = "none beside cubic none" if self.cubic is None else f"{self.threshold} beside cubic {self.cubic}"
            raise PydanticCustomError(
                "sentence",
                "threshold: got {got}, allowed: one of the two; vllm-sparse calibrate finds it",
                {"got": got},
            )
        if self.longest <= self.shortest:
            raise PydanticCustomError(
                "sentence",
                "longest: got {longest}, allowed: more than shortest ({shortest})",
                {"longest": self.longest, "shortest": self.shortest},
            )
        return self

    @property
    def objection(self) -> Literal["uncalibrated", "not_recommended"] | None:
        """Why these thresholds should not be served, as `accept` names it."""
        if self.fingerprint is None:
            return "uncalibrated"
        return None if self.recommended else "not_recommended"

    @property
    def shape(self) -> tuple[int | None, tuple[int, ...]]:
        """Layers that `threshold` is a list for, None if it is one number, and KV heads of each that has a list."""
        if not isinstance(self.threshold, tuple):
            return None, ()
        return len(self.threshold), tuple(len(layer) for layer in self.threshold if isinstance(layer, tuple))

    def of_layer(
        self, layer: int, kv_heads: range, device: torch.device | str, counts: torch.Tensor | None = None
    ) -> GroupRouting:
        """Returns the thresholds of one layer, as kernels take them.

        Args:
            layer: its index.
            kv_heads: its KV heads that this process has, numbered over all processes.
            device: where the kernels run.
            counts: see `GroupRouting`.
        """
        import torch
        from sparse_kernels.group_routing import GroupRouting

        # The kernels read float32, whatever dtype a model has made the default.
        coefficients = torch.zeros(len(kv_heads), 4, dtype=torch.float32)
        if self.cubic is not None:
            coefficients[:] = torch.tensor(self.cubic)
            return GroupRouting(coefficients.to(device), self.score, self.shortest, self.longest, counts)
        level = self.threshold[layer] if isinstance(self.threshold, tuple) else self.threshold
        of_heads = [level[head] for head in kv_heads] if isinstance(level, tuple) else [level] * len(kv_heads)
        coefficients[:, 0] = torch.tensor(of_heads)
        return GroupRouting(coefficients.to(device), self.score, counts=counts)


def _nested(value: Any, depth: int, most: float) -> Any:
    """Returns the value with lists of up to `depth` levels as tuples.

    Raises:
        ValueError: for anything but finite numbers in range.
    """
    if isinstance(value, (list, tuple)) and depth and value:
        return tuple(_nested(item, depth - 1, most) for item in value)
    # NaN is within no bounds, and an integer of any length can be compared.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -most <= value <= most:
        raise ValueError
    return float(value)
