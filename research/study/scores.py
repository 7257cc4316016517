"""Page scores: what is kept of a page, and how it is scored.

Every score estimates the largest logit q . k over the keys k of a page, or the mass of its softmax, up to what is the
same for all pages. Arithmetic is float32 on what the stored bytes mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from sparse_kernels.page_statistics import KINDS
from sparse_kernels.page_statistics.codes import finite_words
from sparse_kernels.page_statistics.kinds.quarters import rotate
from sparse_kernels.page_statistics.reference import quantise, summarise

Summary = tuple[Any, ...]
"""What is kept of pages, each `[..., num_pages, *]`; of two levels the summary of the coarse one comes last, whole."""

MeanFormat = Literal["bf16", "fp8", "int8", "int4"]


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes below `2**bits` as bytes, lowest bits first: `[..., n]` to `[..., n * bits // 8]` uint8."""
    per_byte = 8 // bits
    shifts = torch.arange(per_byte, device=codes.device) * bits
    packed: torch.Tensor = (codes.long().unflatten(-1, (-1, per_byte)) << shifts).sum(dim=-1)
    return packed.to(torch.uint8)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack`, uint8."""
    shifts = torch.arange(0, 8, bits, device=packed.device, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def stored(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes as they are read back after a stay in memory, float32."""
    return unpack(finite_words(pack(codes, bits)), bits).float()


def _mean_and_std(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    vectors, std = summarise(KINDS["mean_and_spread"], keys)
    assert std is not None
    return vectors.squeeze(-2), std


def matmul(query: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """`[..., num_rows, size]` with `[..., num_pages, size]` to `[..., num_rows, num_pages]`."""
    return query @ kept.transpose(-1, -2)


def row(kept: torch.Tensor) -> torch.Tensor:
    """One number per page, `[..., num_pages]`, to be combined with `[..., num_rows, num_pages]`."""
    return kept.unsqueeze(-2)


@dataclass(frozen=True)
class PageScore:
    """One way to keep and score pages."""

    family: ClassVar[str]

    @property
    def label(self) -> str:
        """Name in result files."""
        return self.family

    @property
    def summary_key(self) -> Any:
        """Scores with equal keys keep the same of a page."""
        return self

    def summarise(self, keys: torch.Tensor) -> Summary:
        """What is kept of pages.

        Args:
            keys: `[..., num_pages, page_size, head_size]` float32 that bfloat16 can hold.
        """
        raise NotImplementedError

    def score(self, query: torch.Tensor, summary: Summary) -> torch.Tensor:
        """Scores of rows of queries `[..., num_rows, head_size]` float32: `[..., num_rows, num_pages]` float32."""
        raise NotImplementedError

    def record_bytes(self, page_size: int, head_size: int) -> int:
        """Bytes read per page and KV head to score it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Mean(PageScore):
    """UNIQUE (Eq. 1-3): q . mean + weight * ||q|| * std; `mean` alone for a weight of 0."""

    family: ClassVar[str] = "unique"
    format: MeanFormat = "int8"
    weight: float = 0.75
    slow: bool = False
    """Whether the spread, and the query's norm, leave out the half of the dimensions that rotates fastest."""

    @property
    def label(self) -> str:
        name = f"unique-{self.format}-{self.weight:g}" if self.weight else f"mean-{self.format}"
        return name + "-slow" * self.slow

    @property
    def summary_key(self) -> Any:
        return self.family, self.format, self.slow

    def _spreading(self, x: torch.Tensor) -> torch.Tensor:
        quarter = x.shape[-1] // 4
        return torch.cat([x[..., quarter : 2 * quarter], x[..., 3 * quarter :]], dim=-1) if self.slow else x

    def summarise(self, keys: torch.Tensor) -> Summary:
        mean, std = _mean_and_std(keys)
        if self.slow:
            std = _mean_and_std(self._spreading(keys))[1]
        std = std.bfloat16().float()
        if self.format == "bf16":
            return mean.bfloat16().float(), torch.ones_like(std), std
        if self.format == "int4":
            scale = (mean.abs().amax(dim=-1) / 7.5 * (1 + 2**-8)).bfloat16().float()
            codes = (mean / scale.clamp(min=1e-30).unsqueeze(-1) + 7.5).round().clamp(0, 15)
            return stored(codes, 4) - 7.5, scale, std
        dtype = torch.int8 if self.format == "int8" else torch.float8_e4m3fn
        codes, scale = quantise(mean, dtype)
        return codes.float(), scale.float(), std

    def score(self, query: torch.Tensor, summary: Summary) -> torch.Tensor:
        mean, scale, std = summary
        raw = matmul(query, mean).mul_(row(scale))
        if self.weight == 0:
            return raw
        return torch.addcmul(raw, self.weight * self._spreading(query).norm(dim=-1, keepdim=True), row(std))

    def record_bytes(self, page_size: int, head_size: int) -> int:
        spread = 2 if self.weight else 0
        bits = {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4}[self.format]
        return head_size * bits // 8 + (0 if self.format == "bf16" else 2) + spread


@dataclass(frozen=True)
class Interval(PageScore):
    """Quest: sum_d max(q_d min_d, q_d max_d) = q . centre + |q| . half_width, the second times `factor`."""

    family: ClassVar[str] = "quest"
    bits: int = 16
    factor: float = 1.0

    @property
    def label(self) -> str:
        return f"quest{self.bits}" + ("" if self.factor == 1 else f"-{self.factor:g}")

    @property
    def summary_key(self) -> Any:
        return self.family, self.bits

    def summarise(self, keys: torch.Tensor) -> Summary:
        low, high = keys.amin(dim=-2), keys.amax(dim=-2)
        centre, half = (low + high) / 2, (high - low) / 2
        if self.bits == 16:
            return centre, half
        top = 2**self.bits - 1
        # One scale for both: a step of the half width is half a step of the centre.
        scale = torch.maximum(centre.abs().amax(dim=-1), half.amax(dim=-1)) / (top / 2) * (1 + 2**-8)
        scale = scale.bfloat16().float().clamp(min=1e-30).unsqueeze(-1)
        middle = stored((centre / scale + top / 2).round().clamp(0, top), self.bits) - top / 2
        wide = stored((half / scale * 2).round().clamp(0, top), self.bits) / 2
        return middle * scale, wide * scale

    def score(self, query: torch.Tensor, summary: Summary) -> torch.Tensor:
        centre, half = summary
        return matmul(query, centre).add_(matmul(query.abs() * self.factor, half))

    def record_bytes(self, page_size: int, head_size: int) -> int:
        return 2 * head_size * self.bits // 8 + (0 if self.bits == 16 else 2)


@dataclass(frozen=True)
class Moments(PageScore):
    """Mean and per-dimension standard deviation, the latter in few bits.

    diag: q . mean + weight * sqrt(sum_d q_d^2 var_d). gauss: q . mean + weight * sum_d q_d^2 var_d / sqrt(head_size),
    which for 1/2 is the second-order expansion of log mean exp(q . k / sqrt(head_size)), times sqrt(head_size).
    """

    family: ClassVar[str] = "moments"
    kind: Literal["diag", "gauss"] = "gauss"
    weight: float = 0.25
    spread_bits: int = 8

    @property
    def label(self) -> str:
        return f"{self.kind}{self.spread_bits}-{self.weight:g}"

    @property
    def summary_key(self) -> Any:
        return self.family, self.spread_bits

    def summarise(self, keys: torch.Tensor) -> Summary:
        mean = keys.mean(dim=-2)
        std = (keys - mean.unsqueeze(-2)).square().mean(dim=-2).sqrt()
        codes, scale = quantise(mean, torch.int8)
        top = 2**self.spread_bits - 1
        step = (std.amax(dim=-1) / top * (1 + 2**-8)).bfloat16().float().clamp(min=1e-30).unsqueeze(-1)
        spread = stored((std / step).round().clamp(0, top), self.spread_bits) * step
        return codes.float() * scale.float().unsqueeze(-1), spread.square()

    def score(self, query: torch.Tensor, summary: Summary) -> torch.Tensor:
        mean, variance = summary
        spread = matmul(query.square(), variance)
        spread = spread.sqrt_() if self.kind == "diag" else spread.div_(math.sqrt(query.shape[-1]))
        return matmul(query, mean).add_(spread, alpha=self.weight)

    def record_bytes(self, page_size: int, head_size: int) -> int:
        return head_size + head_size * self.spread_bits // 8 + 4


GAUSSIAN_STEP = {1: 1.5958, 2: 0.9957, 4: 0.3352}
"""Step of the uniform quantiser with the least squared error for a standard normal, by its bits."""


@dataclass(frozen=True)
class Parts(PageScore):
    """Means of `count` runs of the page's tokens in `bits` bits each; the largest product counts.

    With `count` equal to the page size these are the keys themselves. A kept value is `(code - (2**bits - 1) / 2)`
    times a step that follows from the root mean square of what shares it.
    """

    family: ClassVar[str] = "parts"
    count: int = 4
    bits: int = 4
    rotated: bool = False
    """Whether keys and queries are rotated first, as sketches are."""
    steps: int = 1
    """Steps kept per page, each shared by `count / steps` parts."""
    dropped: int = 0
    """Leading elements that are not kept: the steps take their place."""
    base: bool = False
    """Whether the page's mean is kept in int8 as well, and the parts are differences from it."""

    @property
    def label(self) -> str:
        options = "r" * self.rotated + f"s{self.steps}" * (self.steps > 1) + f"d{self.dropped}" * (self.dropped > 0)
        return f"{'mean+' if self.base else ''}parts{self.count}x{self.bits}{options}"

    def summarise(self, keys: torch.Tensor) -> Summary:
        if self.rotated:
            keys = rotate(keys)
        parts = keys.unflatten(-2, (self.count, -1)).mean(dim=-2)
        base = parts.new_zeros(())
        if self.base:
            codes, scale = quantise(keys.mean(dim=-2), torch.int8)
            base = (codes.float() * scale.float().unsqueeze(-1)).unsqueeze(-2)
        rest = parts - base
        rest[..., : self.dropped] = 0
        if self.bits == 16:
            rest = rest.bfloat16().float()
        else:
            top = 2**self.bits - 1
            shared = rest.unflatten(-2, (self.steps, -1))
            if self.bits == 8:
                step = shared.abs().amax(dim=(-2, -1), keepdim=True) / (top / 2) * (1 + 2**-8)
            else:
                kept = rest.shape[-1] - self.dropped
                square = shared.square().sum(dim=(-2, -1), keepdim=True) / (shared.shape[-2] * kept)
                step = square.sqrt() * GAUSSIAN_STEP[self.bits]
            step = step.bfloat16().float().clamp(min=1e-30)
            codes = stored((shared / step + top / 2).round().clamp(0, top), self.bits)
            rest = ((codes - top / 2) * step).flatten(-3, -2)
            rest[..., : self.dropped] = 0
        # Part-major, so that the largest over the parts is taken over runs.
        return ((base + rest).transpose(-2, -3).flatten(-3, -2).contiguous(),)

    def score(self, query: torch.Tensor, summary: Summary) -> torch.Tensor:
        if self.rotated:
            query = rotate(query)
        products: torch.Tensor = matmul(query, summary[0]).unflatten(-1, (self.count, -1))
        return products.amax(dim=-2)

    def record_bytes(self, page_size: int, head_size: int) -> int:
        steps = 2 * self.steps if self.bits < 16 else 0
        return self.count * (head_size - self.dropped) * self.bits // 8 + steps + (head_size + 2) * self.base


@dataclass(frozen=True)
class TwoLevel(PageScore):
    """Coarse pages prune, fine pages decide.

    Each query head keeps the best `share` of the coarse pages, of `ratio` pages each; the rest is not scored.
    """

    family: ClassVar[str] = "two-level"
    coarse: PageScore
    fine: PageScore
    ratio: int = 4
    share: float = 0.25

    @property
    def label(self) -> str:
        return f"{self.coarse.label}>{self.fine.label}-{self.share:g}"

    @property
    def summary_key(self) -> Any:
        return self.family, self.coarse.summary_key, self.fine.summary_key, self.ratio

    def summarise(self, keys: torch.Tensor) -> Summary:
        # Pages that do not fill a coarse one are not pruned.
        whole = keys.shape[-3] // self.ratio * self.ratio
        grouped = keys[..., :whole, :, :].unflatten(-3, (-1, self.ratio)).flatten(-3, -2)
        return *self.fine.summarise(keys), self.coarse.summarise(grouped)

    def score(self, query: torch.Tensor, summary: Summary) -> torch.Tensor:
        fine = self.fine.score(query, summary[:-1])
        coarse = self.coarse.score(query, summary[-1])
        number = coarse.shape[-1]
        if number < self.ratio:
            return fine
        least = coarse.topk(math.ceil(number * self.share), dim=-1).values[..., -1:]
        pruned = (coarse < least).repeat_interleave(self.ratio, dim=-1)
        fine[..., : pruned.shape[-1]].masked_fill_(pruned, -torch.inf)
        return fine

    def record_bytes(self, page_size: int, head_size: int) -> int:
        coarse = self.coarse.record_bytes(page_size * self.ratio, head_size) / self.ratio
        return round(coarse + self.share * self.fine.record_bytes(page_size, head_size))


@dataclass(frozen=True)
class Oracle(PageScore):
    """The true logits: the largest of a page (`logit`), or the log of its softmax mass (`mass`)."""

    family: ClassVar[str] = "oracle"
    kind: Literal["logit", "mass"] = "logit"

    @property
    def label(self) -> str:
        return f"oracle-{self.kind}"

    @property
    def summary_key(self) -> Any:
        return self.family

    def summarise(self, keys: torch.Tensor) -> Summary:
        return keys.transpose(-2, -3).flatten(-3, -2).contiguous(), keys.new_zeros(keys.shape[-2])

    def score(self, query: torch.Tensor, summary: Summary) -> torch.Tensor:
        keys, tokens = summary
        logits: torch.Tensor = matmul(query, keys).unflatten(-1, (len(tokens), -1))
        if self.kind == "logit":
            return logits.amax(dim=-2)
        root = math.sqrt(query.shape[-1])
        return torch.logsumexp(logits / root, dim=-2) * root

    def record_bytes(self, page_size: int, head_size: int) -> int:
        return 2 * page_size * head_size


@dataclass(frozen=True)
class Newest(PageScore):
    """StreamingLLM: no scores; a setting's `recent_pages` take the whole budget."""

    family: ClassVar[str] = "streaming_llm"

    def summarise(self, keys: torch.Tensor) -> Summary:
        return (keys.new_zeros(keys.shape[:-2]),)

    def score(self, query: torch.Tensor, summary: Summary) -> torch.Tensor:
        return query.new_zeros(1).expand(*query.shape[:-1], summary[0].shape[-1])

    def record_bytes(self, page_size: int, head_size: int) -> int:
        return 0
