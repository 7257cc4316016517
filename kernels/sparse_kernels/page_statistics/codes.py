"""Stores vectors with fewer than 8 bits per element."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST_BF16: float = torch.finfo(torch.bfloat16).max
"""Largest finite number of bfloat16, 3.3895313892515355e38."""


def finite_words(packed: torch.Tensor) -> torch.Tensor:
    """Changes packed codes so that no 16-bit word is a bfloat16 infinity or NaN.

    If bits 7 to 14 of a word are all set, bit 8 is cleared: the lowest bit of a code of 1, 2, 4 or 8 bits.

    Args:
        packed: `[..., num_bytes]` uint8, an even number of bytes.
    """
    words = packed.contiguous().view(torch.int16)
    return torch.where((words & 0x7F80) == 0x7F80, words & ~0x0100, words).view(torch.uint8)


@dataclass(frozen=True)
class Codes:
    """The vectors of a record with `bits` bits per element.

    An element is stored as a code c from 0 to `top` and stands for `(c - top / 2) * step`. Rows of `head_size` bytes
    follow each other. Byte d of a row holds dimension d of `8 / bits` vectors, the first vector in its lowest bits.
    These vectors share a step. Words are finite (see `finite_words` and `StatisticsLayout`). A row with keys that are
    not finite gets the largest step, and codes that give it a high score for every query.
    """

    bits: int
    """Bits of an element: 2 or 4."""
    vectors: int
    """Vectors of a record, a multiple of `8 / bits`."""
    spacing: float
    """The step for elements of root mean square 1. For a normal distribution, .3352 with four bits and .9957 with two
    bits have the smallest squared error."""
    dropped: int = 0
    """Leading dimensions that are not stored. The step takes the two bytes of their codes, unless it is 0."""

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def per_byte(self) -> int:
        """Vectors that share a byte and a step."""
        return 8 // self.bits

    @property
    def elements_per_byte(self) -> int:
        """Elements of one vector that share a byte."""
        return 1

    def record_bytes(self, head_size: int) -> int:
        """Returns the bytes of all rows."""
        return head_size * self.vectors * self.bits // 8

    @property
    def rows(self) -> int:
        """Rows of `head_size` bytes, each with one step."""
        return self.vectors // self.per_byte

    def _shifts(self, device: torch.device) -> torch.Tensor:
        return torch.arange(0, 8, self.bits, dtype=torch.uint8, device=device)[:, None]

    def pack(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes codes and steps of vectors.

        Args:
            vectors: `[..., vectors, head_size]` float32, an even head size.

        Returns:
            `[..., rows * head_size]` uint8 and the steps `[..., rows]` bfloat16.
        """
        shared = vectors.unflatten(-2, (self.rows, self.per_byte))
        power = shared[..., self.dropped :].double().square().mean(dim=(-2, -1))
        finite = power <= LARGEST_BF16
        step = torch.where(finite, (power.sqrt() * self.spacing).float(), LARGEST_BF16).bfloat16()
        divisor = torch.where(step > 0, step, 1.0).float()[..., None, None]
        codes = (shared / divisor + self.top / 2).round().clamp(0, self.top)
        both_signs = torch.tensor([float(self.top), 0.0] * (self.per_byte // 2), device=vectors.device)[:, None]
        codes = torch.where(finite[..., None, None], codes, both_signs).to(torch.uint8)
        packed = finite_words((codes << self._shifts(vectors.device)).sum(dim=-2, dtype=torch.uint8))
        if self.dropped:
            packed[..., : self.dropped] = step.unsqueeze(-1).view(torch.uint8)
        return packed.flatten(-2), step

    def per_vector(self, steps: torch.Tensor) -> torch.Tensor:
        """Returns the step of each vector: `[..., rows]` to `[..., vectors]`."""
        return steps.repeat_interleave(self.per_byte, dim=-1)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Undoes `pack`. The result is in units of the steps.

        Args:
            packed: `[..., rows * head_size]` uint8.

        Returns:
            `[..., vectors, head_size]` float32, zero in the dropped dimensions.
        """
        rows = packed.unflatten(-1, (self.rows, 1, -1))
        values = ((rows >> self._shifts(packed.device)) & self.top).float() - self.top / 2
        values[..., : self.dropped] = 0
        vectors: torch.Tensor = values.flatten(-3, -2)
        return vectors


@dataclass(frozen=True)
class RowCodes(Codes):
    """Four-bit codes with a row and a step for each vector.

    Byte b of a row of `head_size / 2` bytes holds dimensions 2b and 2b + 1, the first in its low bits. If a vector of a
    record is not finite, the first vector gets the largest step and codes, and the others the step zero.
    """

    dropped: int = 4

    @property
    def per_byte(self) -> int:
        """Vectors that share a byte and a step: one."""
        return 1

    @property
    def elements_per_byte(self) -> int:
        """See `Codes.elements_per_byte`."""
        return 2

    def pack(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Codes.pack`: `[..., rows * head_size / 2]` uint8, and the steps."""
        power = vectors[..., self.dropped :].double().square().mean(dim=-1)
        finite = (power <= LARGEST_BF16).all(dim=-1, keepdim=True)
        otherwise = torch.zeros_like(power, dtype=torch.float32)
        otherwise[..., 0] = LARGEST_BF16
        step = torch.where(finite, (power.sqrt() * self.spacing).float(), otherwise).bfloat16()
        divisor = torch.where(step > 0, step, 1.0).float()[..., None]
        codes = (vectors / divisor + self.top / 2).round().clamp(0, self.top)
        codes = torch.where(finite[..., None], codes, float(self.top)).to(torch.uint8)
        packed = finite_words(codes[..., 0::2] | codes[..., 1::2] << self.bits)
        packed[..., :2] = step.unsqueeze(-1).view(torch.uint8)
        return packed.flatten(-2), step

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """See `Codes.unpack`."""
        rows = packed.unflatten(-1, (self.rows, -1))
        codes = torch.stack([rows & self.top, rows >> self.bits], dim=-1).flatten(-2)
        values = codes.float() - self.top / 2
        values[..., : self.dropped] = 0
        return values
