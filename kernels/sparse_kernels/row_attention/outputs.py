"""What the row-attention operation returns."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RowAttention(NamedTuple):
    """What query tokens attend to, page by page, and what comes of it; float32."""

    page_sums: torch.Tensor
    """`[num_queries, num_kv_heads, group_size, num_pages]`: log of the sum over a page's tokens of e^logit, -inf beyond
    the context."""
    sparse: torch.Tensor
    """`[num_queries, num_kv_heads, group_size, head_size]`: the output of attention over the pages read."""
    dense: torch.Tensor
    """The same over the whole context."""
