"""Computes the temporary memory of block-sparse prefill before any batch exists."""

from __future__ import annotations

from sparse_kernels.block_prefill.rule import BlockRule
from sparse_kernels.block_prefill.tiles import ScoringRows
from sparse_kernels.page_statistics import StatisticsLayout


def scratch_bytes(
    rule: BlockRule,
    layout: StatisticsLayout,
    num_kv_heads: int,
    group_size: int,
    query_tokens: int,
    context_tokens: int,
    itemsize: int = 2,
) -> int:
    """Returns the bytes that a layer needs for a round of prompts on a GPU, without its inputs and its output.

    A round may be one chunk of a prompt. The tokens of a round of several prompts are as few, their contexts together
    are as short, each in whole blocks, and the groups of their tiles times the longest context are as many.

    Args:
        rule: which blocks are read.
        layout: of the page statistics.
        num_kv_heads: KV heads of the layer.
        group_size: query heads per KV head.
        query_tokens: tokens of the chunk.
        context_tokens: tokens of the context, those of the chunk included.
        itemsize: bytes of an element of the queries.
    """
    scoring, kind = ScoringRows.of(rule, group_size), layout.kind
    blocks = -(-context_tokens // rule.block_tokens)
    pages = blocks * rule.block_tokens // layout.page_size
    groups = scoring.groups(query_tokens, rule)
    tiles = groups * scoring.tiles
    own_blocks = 2 * (-(-rule.tile_tokens // rule.block_tokens) + 1)
    regrouped = 2 * query_tokens * num_kv_heads * group_size * layout.head_size * itemsize
    logits = groups * num_kv_heads * blocks * scoring.of_group * 2
    scores = tiles * num_kv_heads * blocks * 4
    # A page of a page table may hold as few as 16 tokens.
    tables = tiles * num_kv_heads * ((blocks + own_blocks) * (rule.block_tokens // 16) + 1) * 4
    keys = num_kv_heads * pages * (kind.summary_keys * layout.head_size * 2 + 4 * kind.summary_has_spread)
    return regrouped + logits + scores + tables + keys
