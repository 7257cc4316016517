"""What a method of eviction sees of the tokens of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparse_kernels.cache import KVCache
from sparse_kernels.paging import PagedTensor


@dataclass(frozen=True)
class HeldTokens:
    """Tokens of a request in one layer, before some of them are evicted."""

    votes: torch.Tensor
    """`[num_kv_heads, num_tokens]` float32: the attention of the voting queries on each token, summed over queries and
    over the query heads of a KV head."""
    block_table: torch.Tensor
    """`[max_blocks]` integer, physical block ids."""
    cache: KVCache
    """Keys and values."""

    @property
    def keys(self) -> torch.Tensor:
        """A copy of the keys, `[num_kv_heads, num_tokens, head_size]` float32."""
        return self._gather(self.cache.keys, self.cache.key_scale)

    @property
    def values(self) -> torch.Tensor:
        """A copy of the values, `[num_kv_heads, num_tokens, head_size]` float32."""
        return self._gather(self.cache.values, self.cache.value_scale)

    def _gather(self, paged: PagedTensor, scale: torch.Tensor | None) -> torch.Tensor:
        heads, tokens = self.votes.shape
        token = torch.arange(tokens, device=self.votes.device)
        size = self.cache.page_size * self.cache.keys.pages_per_block
        blocks, head = self.block_table.long()[token // size], torch.arange(heads, device=token.device)[:, None]
        # A gather of 8-bit floats returns their bytes.
        found = paged.gather_tokens(blocks, head, token % size).view(paged.view.dtype).float()
        return found if scale is None else found * scale
