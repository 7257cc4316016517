"""How many pages each query token may read."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Limits:
    """Limits on the pages that each query token reads.

    A token reads its best pages until their estimated share of its attention weight reaches `share`. It reads at least
    `least` and at most `most` pages per KV head. A token with a fixed budget has `least` equal to `most` and share 0.
    """

    share: torch.Tensor
    """`[num_tokens]` float32, at least 0. From 1 on, a token reads `most` pages, or its whole context if shorter."""
    least: torch.Tensor
    """`[num_tokens]` int64, the smallest number of pages. It counts the pages that are always read."""
    most: torch.Tensor
    """`[num_tokens]` int64, the largest number of pages, at least `least`."""

    def __len__(self) -> int:
        return len(self.share)

    def __getitem__(self, tokens: slice | torch.Tensor) -> Limits:
        return Limits(self.share[tokens], self.least[tokens], self.most[tokens])

    def check(self, num_tokens: int, always: int) -> None:
        """Checks shapes, dtypes and bounds.

        Args:
            num_tokens: query tokens of the batch.
            always: the number of pages that are always read.

        Raises:
            ValueError: if a tensor has another shape or dtype, `least` is below `always`, or `most` is below `least`.
        """
        for name, part, dtype in (
            ("share", self.share, torch.float32),
            ("least", self.least, torch.int64),
            ("most", self.most, torch.int64),
        ):
            if part.shape != (num_tokens,) or part.dtype != dtype:
                raise ValueError(f"{name}: got {list(part.shape)} {part.dtype}, allowed: [{num_tokens}] {dtype}")
        if num_tokens and int(self.least.min()) < max(always, 1):
            raise ValueError(f"least: got {int(self.least.min())}, allowed: at least {max(always, 1)}")
        if num_tokens and bool((self.most < self.least).any()):
            raise ValueError("most: got less than least, allowed: at least as many")
