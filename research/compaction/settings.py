"""What is measured: methods of compaction with their budgets, and the selection that reads as many bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from sparse_kernels.compaction.api import choose_tokens

from research.compaction.prompt import Prompt
from research.study.plan import PAIRS
from research.study.settings import Setting as Policy
from vllm_sparse_plugin.config.compaction import COMPACTIONS, Compaction
from vllm_sparse_plugin.config.retention import Retention

BLOCK = 32
"""Tokens of a block, as a cache on a CPU may have them."""
SHARES = (1 / 4, 1 / 8, 1 / 16, 1 / 32)
"""Of the prompt: what a method keeps."""
POOLS = (5, 13)
"""Widths of the pooling of votes: the paper's, and one that a number of several tokens takes."""
UNIQUE = "unique"
_METHODS = {method.name(): method for method in COMPACTIONS}


@dataclass(frozen=True)
class Setting:
    """A method with its budget."""

    method: str
    """Of compaction; `unique`, or `dense`."""
    share: float = 1.0
    """Tokens kept, or bytes read, over those of the prompt."""
    pool_tokens: int | None = None
    """Of methods that pool votes."""

    @property
    def name(self) -> str:
        """For result files."""
        pool = f", pool {self.pool_tokens}" if self.pool_tokens else ""
        return self.method + pool

    def reading(self, prompt_tokens: int) -> Reading | None:
        """What decode steps read after a prompt; None where the budget is less than what is always read."""
        if self.method == "dense":
            return Reading()
        if self.method == UNIQUE:
            return _same_bytes(self.share, prompt_tokens)
        budget, method = round(self.share * prompt_tokens), _METHODS[self.method]
        pool = {"pool_tokens": self.pool_tokens} if self.pool_tokens else {}
        given = {"method": self.method, "min_context_tokens": 0, **pool}
        if budget <= method.model_validate(given).reserved_tokens:
            return None
        return Reading(method.model_validate(given | {"budget_tokens": budget}))


@dataclass(frozen=True)
class Reading:
    """What decode steps read of a prompt: everything, unless something is given."""

    compaction: Compaction | None = None
    """What is kept of the prompt."""
    policy: Policy | None = None
    """Selects pages for each token."""

    @cached_property
    def _retention(self) -> Retention | None:
        return self.compaction.retention() if self.compaction else None

    def kept(self, prompt: Prompt) -> list[torch.Tensor | None]:
        """Positions of the kept tokens by layer, `[num_kv_heads, kept]` int64 ascending; None for all.

        The choice is the operation's own (`choose_tokens`), over votes that are computed here.
        """
        if self.compaction is None or self._retention is None or self._retention.slides:
            return [None] * len(prompt.layers)
        rule, tokens = self.compaction.rule(), prompt.num_tokens
        assert rule is not None
        whole = tokens // BLOCK * BLOCK
        found: list[torch.Tensor | None] = []
        for layer, retention in zip(prompt.layers, self._retention.of_layers(len(prompt.layers)), strict=True):
            before = len(retention.left_out(tokens, tokens + 1, BLOCK)) * BLOCK
            if not before:
                found.append(None)
                continue
            chosen = choose_tokens(layer.votes(rule), tokens, whole, before, rule)
            tail = torch.arange(whole, tokens, device=chosen.device).expand(len(chosen), -1)
            found.append(torch.cat([chosen, tail], dim=1))
        return found

    def left_out(self, where: torch.Tensor, position: torch.Tensor, prompt_tokens: int) -> torch.Tensor:
        """Which tokens a window that slides has left behind.

        Args:
            where: positions of tokens, `[num_kv_heads, 1, num_tokens]`.
            position: of the query tokens, `[num_queries]`.
            prompt_tokens: P.

        Returns:
            Bool that expands to `[num_kv_heads, num_queries, num_tokens]`.
        """
        if self._retention is None or not self._retention.slides:
            return torch.zeros_like(where, dtype=torch.bool)
        ranges = [self._retention.left_out(prompt_tokens, int(each) + 1, BLOCK) for each in position]
        begin, end = (
            torch.tensor([getattr(blocks, edge) * BLOCK for blocks in ranges], device=where.device)[:, None]
            for edge in ("start", "stop")
        )
        return (where >= begin) & (where < end)


def _same_bytes(share: float, prompt_tokens: int) -> Reading | None:
    """UNIQUE in its default format, reading a share of the bytes of the prompt's keys and values, its statistics
    included: pages are as small as leaves at least half of the share to them."""
    # A record has the bytes of one key, so a page of n tokens costs 1 / 2n of its keys and values.
    for page_size in (8, 16, 32):
        scoring = 1 / (2 * page_size)
        pages = int((share - scoring) * prompt_tokens) // page_size
        if scoring <= share / 2 and pages >= 2:
            return Reading(policy=Policy(PAIRS, page_size, pages * page_size))
    return None


def all_settings() -> list[Setting]:
    """Every method with every budget."""
    settings = [Setting("dense")]
    for share in SHARES:
        for name, method in _METHODS.items():
            pools = POOLS if "pool_tokens" in method.model_fields else (None,)
            settings += [Setting(name, share, pool) for pool in pools]
        settings.append(Setting(UNIQUE, share))
    return settings
