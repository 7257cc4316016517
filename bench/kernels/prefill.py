"""Sparse prefill: its calls and checks.

Its blocks must be about as good as the best by the reference's scores, because rounding decides between nearly equal
scores. Its output must be the reference's attention over these blocks. Three tiles of a chunk are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from sparse_kernels.block_prefill import (
    BlockRule,
    Tiles,
    VarlenAttention,
    VirtualSequences,
    plan_tiles,
    prefill_blocks,
    reference,
)
from sparse_kernels.block_prefill.sequences import PageEntries

from bench.kernels.checks import Calls, CheckError, require_close, require_finite
from bench.kernels.workload import PrefillInputs

DENSITY = BlockRule.density
SPARSER = 0.05
_LOST_MASS = 1e-2
"""Share of the best blocks' scores that a choice may miss. Logits are float16, so smaller differences between two
blocks' scores are not visible."""
_LAST_TOKENS = 16
"""Tokens of a chunk whose dense attention is compared. More would need gigabytes in float32 over 128K tokens."""


@dataclass(frozen=True)
class Tile:
    """A tile's numbers on the host."""

    index: int
    first_token: int
    num_tokens: int
    past_blocks: int
    reads: int
    end: int

    @property
    def tokens(self) -> slice:
        """The tile's tokens in the batch."""
        return slice(self.first_token, self.first_token + self.num_tokens)


@dataclass(frozen=True)
class Launches:
    """The launches of a sparse prefill, each on the output of the launches before it.

    The tiles are planned here; an engine plans them once per step for all layers.
    """

    inputs: PrefillInputs
    rule: BlockRule
    kernels: ModuleType
    """`sparse_kernels.block_prefill.triton`. Import it only after Triton's compiler is chosen."""

    @cached_property
    def tiles(self) -> Tiles:
        """The tiles of the chunk."""
        return plan_tiles(self.inputs.prompts, self.rule, self.inputs.case.group)

    def rows(self) -> torch.Tensor:
        """Queries by tile and KV head."""
        rows: torch.Tensor = self.kernels.group_queries(
            self.inputs.batch, self.tiles, self.inputs.geometry.num_kv_heads
        )
        return rows

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        """Scores of past blocks, including the computation of summary keys."""
        inputs = self.inputs
        scores: torch.Tensor = self.kernels.score_past(
            rows, inputs.batch, self.tiles, inputs.cache, self.rule, inputs.softmax.scale
        )
        return scores

    @property
    def entries(self) -> PageEntries:
        """The page numbers of a head."""
        return PageEntries.of(self.inputs.cache.keys, self.rule.block_tokens)

    def choice(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page numbers and tokens of every tile and KV head."""
        pages, lengths = self.kernels.virtual_sequences(
            scores, self.inputs.batch.block_table, self.tiles, self.entries, self.inputs.case.group, self.rule, None
        )
        return pages, lengths

    def checked_tiles(self) -> Iterator[Tile]:
        """The first, the middle and the last tile with tokens."""
        tiles = self.tiles
        parts = (tiles.first_token, tiles.num_tokens, tiles.past_blocks, tiles.reads, tiles.end)
        found = [Tile(index, *numbers) for index, numbers in enumerate(torch.stack(parts, dim=1).tolist())]
        found = [tile for tile in found if tile.num_tokens]
        for index in sorted({0, len(found) // 2, len(found) - 1}):
            yield found[index]

    def reference_scores(self, tile: Tile) -> torch.Tensor:
        """`[num_kv_heads, past_blocks]` float32, the reference's scores of a tile's past."""
        inputs, rule, page_size = self.inputs, self.rule, self.inputs.geometry.page_size
        assert inputs.cache.statistics is not None
        # Chunks and contexts are whole blocks, and so is the context of a tile.
        blocks = inputs.prompts.block_table[0, : tile.end // inputs.geometry.block_size].long()
        keys, spread = reference.page_summaries(inputs.cache.statistics, blocks)
        query = inputs.batch.grouped(inputs.geometry.num_kv_heads)[tile.tokens]
        position = torch.arange(tile.end - tile.num_tokens + 1, tile.end + 1, device=query.device)
        visible = reference.scoring_queries(position, rule) // page_size
        per_block = rule.block_tokens // page_size
        logits = reference.block_logits(query, keys, spread, visible, per_block, inputs.softmax.scale, rule)
        return reference.measure_blocks(logits, rule)[:, : tile.past_blocks]

    def read_blocks(self, tile: Tile, pages: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """`[num_kv_heads, past_blocks]` bool, the blocks that a tile reads.

        Raises:
            CheckError: if the pages are not those of past blocks in order, followed by the tile's own.
        """
        inputs, entries, past = self.inputs, self.entries, tile.past_blocks
        heads, block_tokens = inputs.geometry.num_kv_heads, self.rule.block_tokens
        blocks = inputs.prompts.block_table[0, : tile.end // block_tokens].long()
        read = torch.zeros(heads, past, dtype=torch.bool, device=blocks.device)
        for head in range(heads):
            row = tile.index * heads + head
            count = int(lengths[row]) // block_tokens
            numbers = blocks * entries.block_step + head * entries.head_step
            is_read = torch.isin(numbers, pages[row, :count].long())
            if int(lengths[row]) % block_tokens or not torch.equal(numbers[is_read], pages[row, :count].long()):
                raise CheckError(f"tile {tile.index}, head {head}: page numbers are not those of blocks in order")
            if not bool(is_read[past:].all()):
                raise CheckError(f"tile {tile.index}, head {head}: its own blocks are not read")
            read[head] = is_read[:past]
        return read

    def attention(self, tile: Tile, read: torch.Tensor) -> torch.Tensor:
        """The reference's attention of a tile, `[num_tokens, num_query_heads, head_size]` float32."""
        inputs = self.inputs
        query = inputs.batch.grouped(inputs.geometry.num_kv_heads)[tile.tokens]
        table, block_tokens = inputs.prompts.block_table[0], self.rule.block_tokens
        return reference.attend_blocks(query, inputs.cache, table, read, tile.end, block_tokens, inputs.softmax)


def load_kernels() -> ModuleType:
    """The kernels of sparse prefill."""
    return import_module("sparse_kernels.block_prefill.triton")


def launches(inputs: PrefillInputs, density: float = DENSITY) -> Launches:
    """The launches at a density."""
    return Launches(inputs, BlockRule(density=density, dense_tokens=inputs.geometry.dense_tokens), load_kernels())


def varlen_attention(flash_attention: Callable[..., Any], scale: float) -> VarlenAttention:
    """FlashAttention 3 as the backends call it over virtual sequences."""

    def attend(sequences: VirtualSequences, output: torch.Tensor, wants_lse: bool) -> torch.Tensor | None:
        attended = flash_attention(
            q=sequences.queries,
            k=sequences.keys,
            v=sequences.values,
            out=output,
            cu_seqlens_q=sequences.query_rows,
            max_seqlen_q=sequences.max_rows,
            seqused_k=sequences.lengths,
            max_seqlen_k=sequences.max_length,
            softmax_scale=scale,
            causal=True,
            block_table=sequences.page_table,
            return_softmax_lse=wants_lse,
            fa_version=3,
        )
        return attended[1] if wants_lse else None

    return attend


def dense(flash_attention: Callable[..., Any], inputs: PrefillInputs) -> Callable[[], torch.Tensor]:
    """The call of vLLM's FLASH_ATTN backend for a step of a prompt."""
    keys, values = inputs.token_rows.transpose(1, 2).split(inputs.geometry.head_size, dim=-1)
    prompts, case = inputs.prompts, inputs.case

    def call() -> torch.Tensor:
        output = torch.empty(inputs.query.shape, dtype=inputs.query.dtype, device=inputs.query.device)
        flash_attention(
            q=inputs.query,
            k=keys,
            v=values,
            out=output,
            cu_seqlens_q=prompts.query_start,
            max_seqlen_q=case.chunk,
            seqused_k=prompts.seq_lens,
            max_seqlen_k=case.context,
            softmax_scale=inputs.geometry.scale,
            causal=True,
            block_table=prompts.block_table,
            fa_version=3,
        )
        return output

    return call


def whole(
    flash_attention: Callable[..., Any], inputs: PrefillInputs, density: float = DENSITY
) -> Callable[[], torch.Tensor]:
    """Sparse prefill as the backends call it."""
    plan = launches(inputs, density)
    attend = varlen_attention(flash_attention, inputs.softmax.scale)
    tiles, batch = plan.tiles, inputs.batch

    def call() -> torch.Tensor:
        output = torch.empty(inputs.query.shape, dtype=inputs.query.dtype, device=inputs.query.device)
        return prefill_blocks(batch, inputs.cache, inputs.softmax, plan.rule, tiles, output=output, attend=attend)

    return call


def check_dense(inputs: PrefillInputs, calls: Calls) -> None:
    """The last tokens attend to the whole prompt."""
    plan, case = launches(inputs), inputs.case
    past = (case.context - _LAST_TOKENS) // plan.rule.block_tokens
    last = Tile(0, case.chunk - _LAST_TOKENS, _LAST_TOKENS, past, past, case.context)
    read = torch.ones(inputs.geometry.num_kv_heads, past, dtype=torch.bool, device=inputs.query.device)
    expected = plan.attention(last, read)
    for name, call in calls.items():
        output = call()
        require_close(output[last.tokens], expected, name)
        require_finite(output, name)


def check_whole(inputs: PrefillInputs, calls: Calls, density: float = DENSITY) -> None:
    """Each tile attends to the required number of past blocks, about the best ones, and to its own blocks."""
    plan = launches(inputs, density)
    choice = plan.choice(plan.scores(plan.rows()))
    tiles = {tile: plan.read_blocks(tile, *choice) for tile in plan.checked_tiles()}
    for tile, read in tiles.items():
        _require_good(plan, tile, read)
    expected = {tile: plan.attention(tile, read) for tile, read in tiles.items()}
    for name, call in calls.items():
        output = call()
        for tile, attended in expected.items():
            require_close(output[tile.tokens], attended, f"{name}, tile {tile.index}")
        require_finite(output, name)


def _require_good(plan: Launches, tile: Tile, read: torch.Tensor) -> None:
    """Raise CheckError unless a tile reads the required number of blocks and none is worse than an unread one."""
    if not bool((read.sum(dim=1) == tile.reads).all()):
        raise CheckError(f"tile {tile.index}: reads {read.sum(dim=1).tolist()} past blocks, not {tile.reads}")
    scores = plan.reference_scores(tile)
    best = reference.choose_blocks(scores, tile.reads, plan.rule)
    found, most = ((scores * chosen).sum(dim=1) for chosen in (read, best))
    if not bool((found >= (1 - _LOST_MASS) * most).all()):
        raise CheckError(f"tile {tile.index}: reads {float((found / most).min()):.1%} of the best blocks' scores")
