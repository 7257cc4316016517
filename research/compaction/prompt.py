"""What a model has of a prompt that it has read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sparse_kernels.compaction import CompactionRule, voting_rows
from sparse_kernels.token_prefill import rows_that_see

from research.prefill.pipeline import parts


def column_sums(
    query: torch.Tensor, keys: torch.Tensor, position: torch.Tensor, elements: int = 1 << 24
) -> torch.Tensor:
    """Adds up the causal attention of queries on each token.

    Args:
        query: `[num_kv_heads, group, num_queries, head_size]` float32.
        keys: `[num_kv_heads, num_tokens, head_size]` float32; the last query sees them all.
        position: `[num_queries]` int64, ascending.
        elements: of logits that are in memory at a time, about.

    Returns:
        `[num_kv_heads, num_tokens]` float32.
    """
    heads, group, count, size = query.shape
    sums = torch.zeros(heads, keys.shape[1], device=keys.device)
    for some in parts(elements, count, heads * group * keys.shape[1]):
        here = position[some]
        end = int(here[-1]) + 1
        logits = (query[:, :, some].flatten(1, 2) @ keys[:, :end].transpose(1, 2)) * size**-0.5
        logits = logits.unflatten(1, (group, -1))
        hidden = torch.arange(end, device=keys.device) > here[:, None]
        sums[:, :end] += logits.masked_fill_(hidden, -torch.inf).softmax(dim=-1).sum(dim=(1, 2))
    return sums


@dataclass(frozen=True, eq=False)
class Layer:
    """What one layer has of a prompt."""

    keys: torch.Tensor
    """`[num_kv_heads, P, head_size]` float32 that bfloat16 can hold, with positions."""
    values: torch.Tensor
    """Like `keys`."""
    queries: torch.Tensor
    """`[num_kv_heads, group, P, head_size]` float32."""
    sums: torch.Tensor
    """`[num_kv_heads, P]` float32: attention of all queries on each token, summed over the query heads."""

    def votes(self, rule: CompactionRule) -> torch.Tensor:
        """Votes on each token, `[num_kv_heads, P]` float32."""
        tokens, device = self.keys.shape[1], self.keys.device
        if rule.probes is not None:
            rows = voting_rows(tokens, rule.probes, device)
            rows = rows[rows >= 0].long().sort().values
            sums = column_sums(self.queries[:, :, rows], self.keys, rows).sum(dim=0)
            return (sums / rows_that_see(rows[None], tokens).clamp(min=1)).expand(len(self.keys), -1)
        if rule.every_query:
            return self.sums
        position = torch.arange(tokens, device=device)[-rule.window_tokens :]
        return column_sums(self.queries[:, :, position], self.keys, position)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt that has been read."""

    layers: list[Layer]
    likely: torch.Tensor
    """`[vocabulary]` float32 on the host: log probabilities of what follows."""

    @property
    def num_tokens(self) -> int:
        """P."""
        return self.layers[0].keys.shape[1]
