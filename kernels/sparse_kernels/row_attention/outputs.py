"""The result of the row-attention operation."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RowAttention(NamedTuple):
    """The attention of query tokens on each page, and the outputs; float32."""

    page_sums: torch.Tensor
    """`[num_queries, num_kv_heads, group_size, num_pages]`: log of the sum over a page's tokens of e^logit, -inf beyond
    the context."""
    sparse: torch.Tensor
    """`[num_queries, num_kv_heads, group_size, head_size]`: the output of attention over the pages read."""
    dense: torch.Tensor
    """`[num_queries, num_kv_heads, group_size, head_size]`: the output of attention over the whole context."""
