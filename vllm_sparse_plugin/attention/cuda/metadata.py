"""What a step of a batch is told to each layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from sparse_kernels.batch import WholeRequests
from sparse_kernels.page_coverage import Limits
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionMetadata,
)

from vllm_sparse_plugin.attention.prefill import PromptRound
from vllm_sparse_plugin.compaction.step import Observed
from vllm_sparse_plugin.metrics.sampling import Sample


@dataclass
class DecodeRequests:
    """Consecutive requests of a step that decode, all with the same number of query tokens."""

    tokens: slice
    """Their query tokens in the batch."""
    block_table: torch.Tensor
    """`[num_requests, max_blocks]` int32."""
    seq_lens: torch.Tensor
    """`[num_requests]` int32; 0 for padding."""
    dense: torch.Tensor
    """`[num_requests]` bool, those that attend densely: single tokens of a prompt, and those that say so."""
    budgets: torch.Tensor | None = None
    """`[num_requests]` int32, pages that a selection reads of each; None where all have the settings' budget."""
    limits: Limits | None = None
    """How much each request reads under a coverage; None without one."""
    whole: WholeRequests | None = None
    """The long ones of the requests that attend densely; None where no layer selects pages."""


class SampledToken(NamedTuple):
    """A decoding token whose selection is measured, as far as the host knows it."""

    token: int
    """Its place in the batch."""
    longest: int
    """Its context, at most."""
    pages: int
    """Complete pages that it reads; under a coverage at most."""
    sample: Sample
    """In which layers."""
    masses: torch.Tensor | None = None
    """Where the estimated masses of its request are added up; None where nobody asks for them."""


@dataclass
class SparseCUDAMetadata(FlashAttentionMetadata):
    """FlashAttention's metadata for the whole batch, and what sparse layers do instead."""

    decode: list[DecodeRequests] = field(default_factory=list)
    """The requests that decode, at the front of the batch (`num_decode_tokens` of it): one run of them unless they
    speculate differently far."""
    prefill: FlashAttentionMetadata | None = None
    """Metadata of the batch that the other requests form; None if there are none."""
    dense_decode: FlashAttentionMetadata | None = None
    """Metadata of the requests that decode, for layers that are dense but in prefill; only beside `rounds`."""
    rounds: list[PromptRound] = field(default_factory=list)
    """The requests that prefill, for layers whose prefill is sparse; empty if they all read everything."""
    observed: list[Observed] = field(default_factory=list)
    """Tokens of prompts whose queries are kept for a vote."""
    sampled: SampledToken | None = None
    """The decoding token whose selection is measured, if one's is."""
    verified: DecodeRequests | None = None
    """All requests of a step that does nothing but verify drafts: they attend densely."""


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
