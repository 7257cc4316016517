"""Metadata of a step for the layers on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from sparse_kernels.batch import Prompts
from sparse_kernels.page_lists import with_next_pages
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionMetadata,
)

from vllm_sparse_plugin.attention.prefill import PromptRound
from vllm_sparse_plugin.compaction.step import Observed


@dataclass
class DecodeTokens:
    """The query tokens of a step that attend sparsely."""

    tokens: torch.Tensor
    """`[num_tokens]` int64, positions in the batch."""
    block_table: torch.Tensor
    """`[num_tokens, max_blocks]` int32."""
    context_lens: torch.Tensor
    """`[num_tokens]` int32, tokens of each context, the query token included."""
    budgets: torch.Tensor | None
    """`[num_tokens]` int32, pages that each token reads; None if all read the budget of the settings."""
    chosen: dict[str, torch.Tensor] = field(default_factory=dict)
    """The pages that layers chose in this step, see `DecodeOutput.pages`. An anchor layer runs before the layers that
    read its pages."""
    keeps_pages: bool = False
    """Whether every layer that chooses pages notes them in `chosen`, for later steps of a draft."""
    chosen_before: DecodeTokens | None = None
    """The step of the draft that chose the pages of this step. Its first tokens are of the same requests. None if this
    step chooses."""

    def pages_of(self, layer: str, page_size: int) -> torch.Tensor:
        """Returns the pages that `layer` chose in this step or before, with the pages that are complete since.

        Returns:
            `[num_tokens, num_kv_heads, n]` int32, see `DecodeBatch.pages`.
        """
        before = self.chosen_before
        if before is None:
            return self.chosen[layer]
        rows = slice(len(self.tokens))
        num_pages, known = self.context_lens // page_size, before.context_lens[rows] // page_size
        return with_next_pages(before.chosen[layer][rows], known, int((num_pages - known).max()))


class PromptTokens(NamedTuple):
    """The prompts of a step that attend sparsely."""

    tokens: torch.Tensor
    """`[num_tokens]` int64, positions in the batch."""
    part: PromptRound
    """Where they are, and their tiles or probe rows."""


class DenseTokens(NamedTuple):
    """The query tokens of a step that attend densely in some layers."""

    tokens: torch.Tensor
    """`[num_tokens]` int64, positions in the batch."""
    metadata: CPUAttentionMetadata
    """Metadata of the batch of these tokens."""


class RollingTokens(NamedTuple):
    """The requests of a step whose newest token does not read its whole context. Their positions roll."""

    tokens: torch.Tensor
    """`[num_tokens]` int64, positions in the batch."""
    prompts: Prompts
    """Where they are, decoding requests included."""
    rest: DenseTokens | None
    """The other requests; None for none."""


@dataclass
class SparseCPUMetadata(CPUAttentionMetadata):
    """vLLM's CPU metadata of the whole batch, with the parts for sparse layers."""

    filled: tuple[torch.Tensor, torch.Tensor] | None = None
    """Blocks, and indices within the blocks, of the pages that this step completes: `[num_filled]` int64 each."""
    decode: DecodeTokens | None = None
    """Tokens that attend sparsely; None if there are none."""
    prompts: PromptTokens | None = None
    """Prompts that attend sparsely; None if there are none."""
    rolling: RollingTokens | None = None
    """Requests that attend with rolling positions, in all layers; None if there are none."""
    observed: list[Observed] = field(default_factory=list)
    """Tokens of prompts whose queries are kept for a vote."""
    rest: dict[tuple[bool, bool], DenseTokens | None] = field(default_factory=dict)
    """The dense tokens if `decode` (first key) and `prompts` (second key) attend sparsely; None for none."""


def prompts_of(common: CommonAttentionMetadata) -> Prompts:
    """Returns where the tokens of a batch are."""
    start, lengths = common.query_start_loc.int(), common.seq_lens.int()
    query_lens = tuple((start[1:] - start[:-1]).tolist())
    return Prompts(start, common.block_table_tensor.int(), lengths, query_lens, tuple(lengths.tolist()))


def subset(
    common: CommonAttentionMetadata, requests: torch.Tensor, query_lens: torch.Tensor, tokens: torch.Tensor
) -> CommonAttentionMetadata:
    """Returns the batch of the leading tokens of some requests.

    Args:
        common: the whole batch.
        requests: `[num_reqs]` bool.
        query_lens: `[num_reqs]` integer, tokens of each request; a context ends at the last of them.
        tokens: `[num_tokens]` int64, these tokens in the batch.
    """
    lens, every = query_lens[requests], common.query_start_loc[1:] - common.query_start_loc[:-1]
    start = torch.zeros(len(lens) + 1, dtype=common.query_start_loc.dtype)
    torch.cumsum(lens, 0, out=start[1:])
    seq_lens = common.seq_lens[requests] - (every[requests] - lens)
    return common.replace(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=seq_lens,
        num_reqs=len(lens),
        num_actual_tokens=len(tokens),
        max_query_len=int(lens.max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=common.block_table_tensor[requests],
        slot_mapping=common.slot_mapping[tokens],
    )
