"""Says until what share of the attention weight query tokens read pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Coverage:
    """Until what estimated share of its attention weight each query token reads pages, best first."""

    share: torch.Tensor
    """`[num_tokens]` float32, above 0; from 1 on a token reads as many pages as it may."""
    least: torch.Tensor
    """`[num_tokens]` int64, pages that are read at least, per KV head; the pages that are always read fit into them."""
    most: torch.Tensor
    """`[num_tokens]` int64, pages that are read at most."""

    def __len__(self) -> int:
        return len(self.share)

    def __getitem__(self, tokens: slice | torch.Tensor) -> Coverage:
        return Coverage(self.share[tokens], self.least[tokens], self.most[tokens])

    def check(self, num_tokens: int, always: int) -> None:
        """Raises ValueError unless there are as many of each, and the pages that are always read fit.

        Args:
            num_tokens: query tokens of the batch.
            always: pages that are read whatever the query.
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
