"""Sparse prefill: its calls and checks.

The output must be the reference's attention over the blocks that the kernels choose, as many as the rule says. Three
tiles of a chunk are compared. Tests of the kernels compare the choice: rounding decides between nearly equal scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sparse_kernels.block_prefill import BlockRule, VirtualSequences, plan_tiles, prefill_blocks, reference
from sparse_kernels.block_prefill.sequences import PageEntries

from bench.kernels.checks import Calls, CheckError, require_close, require_finite
from bench.kernels.rivals import Call
from bench.kernels.workload import PrefillInputs

DENSITY = BlockRule.density
SPARSER = 0.05
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


def _rule(inputs: PrefillInputs, density: float) -> BlockRule:
    return BlockRule(density=density, dense_tokens=inputs.geometry.dense_tokens)


def dense(loaded: list[Any], inputs: PrefillInputs) -> Call:
    """The call of vLLM's FLASH_ATTN backend for a step of a prompt."""
    keys, values = inputs.token_rows.transpose(1, 2).split(inputs.geometry.head_size, dim=-1)
    prompts, case = inputs.prompts, inputs.case

    def call() -> torch.Tensor:
        output = torch.empty(inputs.query.shape, dtype=inputs.query.dtype, device=inputs.query.device)
        loaded[0](
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


def whole(loaded: list[Any], inputs: PrefillInputs, density: float) -> Call:
    """Sparse prefill as the backends call it. The tiles are planned outside, as once per step for all layers."""
    rule = _rule(inputs, density)
    tiles, batch = plan_tiles(inputs.prompts, rule, inputs.case.group), inputs.batch

    def attend(sequences: VirtualSequences, output: torch.Tensor, wants_lse: bool) -> None:
        loaded[0](
            q=sequences.queries,
            k=sequences.keys,
            v=sequences.values,
            out=output,
            cu_seqlens_q=sequences.query_rows,
            max_seqlen_q=sequences.max_rows,
            seqused_k=sequences.lengths,
            max_seqlen_k=sequences.max_length,
            softmax_scale=inputs.softmax.scale,
            causal=True,
            block_table=sequences.page_table,
            fa_version=3,
        )

    def call() -> torch.Tensor:
        output = torch.empty(inputs.query.shape, dtype=inputs.query.dtype, device=inputs.query.device)
        return prefill_blocks(batch, inputs.cache, inputs.softmax, rule, tiles, output=output, attend=attend)

    return call


def check_dense(inputs: PrefillInputs, calls: Calls) -> None:
    """The last tokens attend to the whole prompt."""
    case = inputs.case
    past = (case.context - _LAST_TOKENS) // BlockRule.block_tokens
    last = Tile(0, case.chunk - _LAST_TOKENS, _LAST_TOKENS, past, past, case.context)
    read = torch.ones(inputs.geometry.num_kv_heads, past, dtype=torch.bool, device=inputs.query.device)
    expected = _attention(inputs, last, read)
    for name, call in calls.items():
        output = call()
        require_close(output[last.tokens], expected, name)
        require_finite(output, name)


def check_whole(inputs: PrefillInputs, calls: Calls, density: float) -> None:
    """Each tile attends to the required number of past blocks and to its own blocks."""
    rule = _rule(inputs, density)
    expected = {}
    for tile, read in _read_blocks(inputs, rule).items():
        if not bool((read.sum(dim=1) == tile.reads).all()):
            raise CheckError(f"tile {tile.index}: reads {read.sum(dim=1).tolist()} past blocks, not {tile.reads}")
        expected[tile] = _attention(inputs, tile, read)
    for name, call in calls.items():
        output = call()
        for tile, attended in expected.items():
            require_close(output[tile.tokens], attended, f"{name}, tile {tile.index}")
        require_finite(output, name)


def _attention(inputs: PrefillInputs, tile: Tile, read: torch.Tensor) -> torch.Tensor:
    """The reference's attention of a tile, `[num_tokens, num_query_heads, head_size]` float32."""
    query = inputs.batch.grouped(inputs.geometry.num_kv_heads)[tile.tokens]
    table = inputs.prompts.block_table[0]
    return reference.attend_blocks(query, inputs.cache, table, read, tile.end, BlockRule.block_tokens, inputs.softmax)


def _read_blocks(inputs: PrefillInputs, rule: BlockRule) -> dict[Tile, torch.Tensor]:
    """`[num_kv_heads, past_blocks]` bool, the blocks that the first, the middle and the last tile read.

    Raises:
        CheckError: if the pages are not those of past blocks in order, followed by the tile's own.
    """
    found: list[VirtualSequences] = []
    tiles = plan_tiles(inputs.prompts, rule, inputs.case.group)
    prefill_blocks(
        inputs.batch, inputs.cache, inputs.softmax, rule, tiles, output=torch.empty_like(inputs.query),
        attend=lambda sequences, *_: found.append(sequences),
    )  # fmt: skip
    (sequences,), entries = found, PageEntries.of(inputs.cache.keys, rule.block_tokens)
    parts = (tiles.first_token, tiles.num_tokens, tiles.past_blocks, tiles.reads, tiles.end)
    planned = [Tile(index, *numbers) for index, numbers in enumerate(torch.stack(parts, dim=1).tolist())]
    planned = [tile for tile in planned if tile.num_tokens]
    heads, read = inputs.geometry.num_kv_heads, {}
    for tile in (planned[index] for index in sorted({0, len(planned) // 2, len(planned) - 1})):
        blocks = inputs.prompts.block_table[0, : tile.end // rule.block_tokens].long()
        read[tile] = torch.zeros(heads, tile.past_blocks, dtype=torch.bool, device=blocks.device)
        for head in range(heads):
            row = tile.index * heads + head
            length = int(sequences.lengths[row])
            pages = sequences.page_table[row, : length // rule.block_tokens].long()
            numbers = blocks * entries.block_step + head * entries.head_step
            is_read = torch.isin(numbers, pages)
            if length % rule.block_tokens or not torch.equal(numbers[is_read], pages):
                raise CheckError(f"tile {tile.index}, head {head}: page numbers are not those of blocks in order")
            if not bool(is_read[tile.past_blocks :].all()):
                raise CheckError(f"tile {tile.index}, head {head}: its own blocks are not read")
            read[tile][head] = is_read[: tile.past_blocks]
    return read
