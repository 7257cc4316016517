"""Metadata of a step for the layers on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from sparse_kernels.batch import LongDenseRequests
from sparse_kernels.page_lists import with_next_pages
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionMetadata,
)

from vllm_sparse_plugin.attention.prefill import PromptRound
from vllm_sparse_plugin.compaction.step import Observed
from vllm_sparse_plugin.offload.staging import StagedPrompts


@dataclass
class DecodeRequests:
    """Consecutive decoding requests with the same number of query tokens."""

    tokens: slice
    """Their query tokens in the batch."""
    block_table: torch.Tensor
    """`[num_requests, max_blocks]` int32."""
    seq_lens: torch.Tensor
    """`[num_requests]` int32; 0 for padding."""
    dense: torch.Tensor
    """`[num_requests]` bool, requests that attend densely: one-token chunks of a prompt, and requests with a dense
    argument."""
    budgets: torch.Tensor | None = None
    """`[num_requests]` int32, pages that each request reads; None if all have the settings' budget."""
    whole: LongDenseRequests | None = None
    """The long requests among the dense ones; None if no layer selects pages."""


class ChosenPages(NamedTuple):
    """The pages that an anchor layer chose, for the layers that read them."""

    pages: torch.Tensor
    """`[num_tokens, num_kv_heads, k]` int32, see `DecodeBatch.pages`."""
    budgets: torch.Tensor | None
    """See `DecodeBatch.budgets`."""

    def of_heads(self, heads: torch.Tensor | None) -> ChosenPages:
        """Returns the pages of the given KV heads, `[num_kv_heads]` int64; None for all in order."""
        if heads is None:
            return self
        return ChosenPages(self.pages[:, heads].contiguous(), self.budgets)


class KeptPages(NamedTuple):
    """The pages that a step of a draft chooses and later steps read."""

    of_layers: Mapping[str, torch.Tensor]
    """`[max_requests, num_kv_heads, k + n]` int32 for each layer that chooses: its pages, then the `n` pages that the
    context completes next. CUDA graphs read them."""
    are_read: bool
    """Whether this step reads the pages; otherwise it chooses them."""

    def keep(self, layer: str, pages: torch.Tensor, num_pages: torch.Tensor) -> None:
        """Keeps the pages of a layer, `[num_requests, num_kv_heads, k]` int32, for contexts with so many pages."""
        kept = self.of_layers[layer][: len(pages)]
        with_next_pages(pages, num_pages, kept.shape[2] - pages.shape[2], out=kept)

    def of(self, layer: str, requests: int) -> ChosenPages:
        """Returns the pages of a layer for the first `requests` requests."""
        return ChosenPages(self.of_layers[layer][:requests], None)


@dataclass
class SparseCUDAMetadata(FlashAttentionMetadata):
    """FlashAttention's metadata of the whole batch, with the parts for sparse layers."""

    decode: list[DecodeRequests] = field(default_factory=list)
    """The decoding requests, the first `num_decode_tokens` tokens of the batch. More than one entry only if their
    numbers of query tokens differ."""
    prefill: FlashAttentionMetadata | None = None
    """Metadata of the batch of the other requests; None if there are none."""
    staged: list[StagedPrompts] = field(default_factory=list)
    """With offloading, the other requests in groups; empty without."""
    dense_decode: FlashAttentionMetadata | None = None
    """Metadata of the decoding requests, for layers that are sparse in prefill only; None if `rounds` is empty."""
    rounds: list[PromptRound] = field(default_factory=list)
    """The prompts, for layers with sparse prefill; empty if all of them attend densely."""
    observed: list[Observed] = field(default_factory=list)
    """Tokens of prompts whose queries are kept for a vote."""
    chosen: dict[tuple[str, int], ChosenPages] = field(default_factory=dict)
    """The pages of this step by anchor layer and index in `decode`. An anchor layer runs before the layers that read
    its pages."""
    kept: KeptPages | None = None
    """The pages of the draft; None in other steps, and if each step of a draft chooses."""
    verified: DecodeRequests | None = None
    """All requests of a step that only verifies drafts, densely; None in other steps."""

    def of_reading_steps(self) -> SparseCUDAMetadata:
        """Returns the metadata of the steps that read the pages which steps with this metadata choose."""
        assert self.kept is not None
        return replace(self, kept=self.kept._replace(are_read=True))


def without_first(common: CommonAttentionMetadata, requests: int, tokens: int) -> CommonAttentionMetadata:
    """Returns the batch without its first requests."""
    start = common.query_start_loc_cpu[requests:] - tokens
    bound = common.seq_lens_cpu_upper_bound
    return common.replace(
        query_start_loc=common.query_start_loc[requests:] - tokens,
        query_start_loc_cpu=start,
        seq_lens=common.seq_lens[requests:],
        seq_lens_cpu_upper_bound=None if bound is None else bound[requests:],
        is_prefilling=None if common.is_prefilling is None else common.is_prefilling[requests:],
        num_reqs=common.num_reqs - requests,
        num_actual_tokens=common.num_actual_tokens - tokens,
        max_query_len=int((start[1:] - start[:-1]).max()),
        block_table_tensor=common.block_table_tensor[requests:],
        slot_mapping=common.slot_mapping[tokens:],
    )


def first_requests(common: CommonAttentionMetadata, requests: int, tokens: int) -> CommonAttentionMetadata:
    """Returns the batch of the first requests."""
    start = common.query_start_loc_cpu[: requests + 1]
    bound = common.seq_lens_cpu_upper_bound
    return common.replace(
        query_start_loc=common.query_start_loc[: requests + 1],
        query_start_loc_cpu=start,
        seq_lens=common.seq_lens[:requests],
        seq_lens_cpu_upper_bound=None if bound is None else bound[:requests],
        is_prefilling=None if common.is_prefilling is None else common.is_prefilling[:requests],
        num_reqs=requests,
        num_actual_tokens=tokens,
        max_query_len=int((start[1:] - start[:-1]).max()),
        block_table_tensor=common.block_table_tensor[:requests],
        slot_mapping=common.slot_mapping[:tokens],
    )
