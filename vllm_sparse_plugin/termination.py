"""When a decode step stops reading: ART (arXiv 2606.00024)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from sparse_kernels.batch import QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.stopping import StopRule, count_reads, pages_until_stable

from vllm_sparse_plugin.policies.base import Section, Selection


class Termination(Section):
    """ART: read what is selected block by block and stop when the output no longer changes.

    The incomplete last page is read first. A scored policy goes on with the pages that it always reads and then best
    score first, the others with the sink pages and then newest first. The probe is 32 evenly spread elements of each
    query head's output; the query heads of a KV head stop together. See `StopRule`.
    """

    scale_tolerance: Annotated[float, Field(ge=0.0, le=1000.0)] = 1e-5
    """Largest change of the output's probe, by its norm, that a block may make and still count as stable (the paper's
    tau)."""
    direction_tolerance: Annotated[float, Field(ge=0.0, le=16.0)] = 1e-3
    """The same of its direction, as 1 - cosine (the paper's phi); above 2 every direction passes."""
    patience: Annotated[int, Field(ge=0, le=1 << 20)] = 5
    """Consecutive stable blocks after which a step stops reading (the paper's p); 0 for never."""
    block_tokens: Literal[64, 128, 256, 512, 1024] = 64
    """Tokens read between two tests."""
    dense_sink_pages: Annotated[int, Field(ge=0, le=64)] = 1
    """Leading pages of 16 tokens that are read before the newest where the policy is dense: heads that rest on the
    first token are not stable before they have seen it. The paper has none. Other policies have
    `selection.sink_pages`."""

    def rule(self, selection: Selection) -> StopRule:
        """The rule for what a policy selects."""
        return StopRule(
            self.scale_tolerance, self.direction_tolerance, self.patience, self.block_tokens, selection.reserved_pages
        )


def select_until_stable(
    selection: Selection, rule: StopRule, tokens: QueryTokens, cache: KVCache, softmax: Softmax
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages that are read before the output is stable. Contexts within the budget are read to the end.

    Args:
        selection: what would be read without termination.
        rule: when reading stops.
        tokens: the query tokens.
        cache: what they attend to.
        softmax: how logits become weights.

    Returns:
        Like that of `Selection.select`, ascending behind the -1s: attention adds the pages up as without termination;
        and what `count_reads` says of the rows that may stop, zeros for the others.
    """
    num_pages = tokens.num_pages(selection.page_size)
    may_stop = (num_pages > selection.budget_pages)[:, None]
    pages = selection.reading_order(tokens.query, cache.statistics, tokens.block_table, num_pages)
    pages_read = pages_until_stable(tokens, cache, pages, softmax, rule)
    slot = torch.arange(pages.shape[-1], device=pages.device)
    is_read = (slot < pages_read.unsqueeze(-1)) | ~may_stop.unsqueeze(-1)
    reads = count_reads(pages_read, tokens.context_lens, selection.page_size, rule.block_tokens)
    return torch.where(is_read, pages, -1).sort(dim=-1).values, reads * may_stop.unsqueeze(-1)
