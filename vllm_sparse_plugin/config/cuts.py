"""Where the prompts of an engine with sparse prefill are cut into chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from vllm_sparse_plugin.config.prefill import BlockPrefill, ZipVLPrefill


@dataclass(frozen=True)
class PromptCuts:
    """The positions where a prompt may be cut. They depend on the prompt and the settings of the server alone.

    vLLM cuts a prompt where the step has no more room, so other requests decide. What a token of sparse prefill attends
    to depends on the cuts, and the prefix cache keeps the result for all requests.
    """

    every: int
    """Cuts are at multiples of this position."""
    together: bool
    """Whether all tokens of a chunk choose together. A chunk then ends at the next multiple."""
    dense_tokens: int
    """Another cut: kernels of dense attention compute the tokens before it."""
    short_tokens: int
    """Chunks of up to this many tokens run like decoding tokens. So the end of a prompt after its last cut is a chunk
    of its own if it is that short."""

    @classmethod
    def of(cls, prefill: BlockPrefill | ZipVLPrefill, room: int, block_tokens: int, short_tokens: int) -> Self:
        """Returns the cuts of a server.

        Args:
            prefill: the sparse prefill.
            room: tokens that a step always has for a prompt, at least `least_room(prefill)`.
            block_tokens: tokens of a KV block.
            short_tokens: see the field.
        """
        if isinstance(prefill, BlockPrefill):
            return cls(prefill.tile_tokens, False, prefill.dense_tokens, short_tokens)
        unit = math.lcm(least_room(prefill), block_tokens)
        if unit > room:
            unit = least_room(prefill)
        return cls(room // unit * unit, True, 0, short_tokens)

    def end(self, start: int, end: int, prompt_tokens: int) -> int:
        """Returns where a chunk ends: a cut, or the end of the prompt.

        Args:
            start: tokens of the request that are computed, fewer than those of its prompt.
            end: where the chunk may end at most.
            prompt_tokens: tokens of the prompt.

        Returns:
            `start` if there is no cut between `start` and `end`.
        """
        tail = prompt_tokens % self.every
        last = prompt_tokens - tail
        end = prompt_tokens if end >= prompt_tokens else end // self.every * self.every
        if start < last and tail <= self.short_tokens:
            end = min(end, last)
        if self.together:
            end = min(end, (start // self.every + 1) * self.every)
        if start < self.dense_tokens:
            end = min(end, self.dense_tokens)
        return max(start, end)

    def shared(self, prompt_tokens: int) -> int:
        """Returns how many tokens of a prompt other requests may read from the prefix cache, if all tokens of a chunk
        choose together: those of whole chunks."""
        return prompt_tokens // self.every * self.every


def least_room(prefill: BlockPrefill | ZipVLPrefill) -> int:
    """Returns the tokens of the smallest chunk."""
    return prefill.tile_tokens if isinstance(prefill, BlockPrefill) else 128
