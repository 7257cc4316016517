"""Computes the kept blocks of a request from lengths only, so that scheduler and workers agree without messages.

Lengths are in tokens. Blocks are counted from the beginning of a request. P is the length of its prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Pyramid:
    """Budgets that decrease linearly over the layers, with a constant sum (PyramidKV, arXiv 2406.02069)."""

    beta: float
    """The last layer keeps the average budget divided by this."""
    classes: int
    """Largest number of different budgets. Consecutive layers form a class and share their average budget."""

    def shares(self, num_layers: int) -> list[float]:
        """Returns the factor of the average budget for each layer, first to last."""
        last = 1 / self.beta
        step = 2 * (1 - last) / max(num_layers - 1, 1)
        of_layers = [2 - last - step * layer for layer in range(num_layers)] if num_layers > 1 else [1.0]
        # Classes have equal size, because vLLM pads smaller ones.
        classes = max(number for number in range(1, self.classes + 1) if num_layers % number == 0)
        size = num_layers // classes
        return [sum(of_layers[layer // size * size : (layer // size + 1) * size]) / size for layer in range(num_layers)]


@dataclass(frozen=True)
class Retention:
    """What the layers of one class keep of a request."""

    slides: bool
    """Whether the window slides: the kept blocks are the first and the newest ones. Otherwise kept tokens move into the
    last full blocks of the prompt, or of the context at an eviction, and later tokens stay."""
    budget_tokens: int | None
    """Tokens kept; None if `budget_ratio` is set."""
    budget_ratio: float | None
    """Tokens kept, as a share of P; None if `budget_tokens` is set."""
    sink_tokens: int
    """First tokens of the context, which are always kept."""
    min_context_tokens: int
    """Shortest prompt that gives blocks back; with a sliding window or `every`, the shortest context."""
    reserved_tokens: int = 0
    """Tokens that are always kept besides the sinks."""
    share: float = 1.0
    """Factor of the remaining budget, after the tokens that are always kept, for this class of layers."""
    pyramid: Pyramid | None = None
    """How layers share the budget; None for equal budgets."""
    counts_every_query: bool = False
    """Whether the kept tokens depend on queries of the whole prompt. The prompt then uses no prefix cache."""
    every: int | None = None
    """Tokens between the evictions of a request; None for one eviction, at the end of the prompt."""

    def budget(self, prompt_tokens: int) -> int:
        """Returns the number of kept prompt tokens: at least one more than those always kept."""
        budget = self.budget_tokens if self.budget_ratio is None else _rounded_up(self.budget_ratio * prompt_tokens)
        assert budget is not None
        always = self.sink_tokens + self.reserved_tokens
        return always + max(_rounded_up((budget - always) * self.share), 1)

    def of_layers(self, num_layers: int) -> list[Retention]:
        """Returns what each layer of a model keeps, if the layers share the budget."""
        if self.pyramid is None:
            return [self] * num_layers
        return [replace(self, share=share, pyramid=None) for share in self.pyramid.shares(num_layers)]

    def kept_blocks(self, prompt_tokens: int, block_size: int) -> int:
        """Returns K, the blocks that kept tokens move into: the last K full blocks of the prompt."""
        return -(-self.budget(prompt_tokens) // block_size)

    def sink_blocks(self, block_size: int) -> int:
        """Returns the number of first blocks that stay in place; 0 if tokens move."""
        return -(-self.sink_tokens // block_size) if self.slides else 0

    def left_out(self, prompt_tokens: int, context_tokens: int, block_size: int) -> range:
        """Returns the blocks that a token after the prompt does not read.

        The range never shrinks while a context grows: later tokens do not read these blocks either.

        With `every`, evictions begin where the prompt has ended and the context has `min_context_tokens` and fills the
        kept blocks. They follow after every `every` tokens. Each leaves the kept blocks and the incomplete last block.

        Args:
            prompt_tokens: P.
            context_tokens: tokens up to and including the token.
            block_size: tokens of a block.
        """
        first = self.sink_blocks(block_size)
        if self.slides:
            if context_tokens < self.min_context_tokens:
                return range(first, first)
            window = self.budget(prompt_tokens) - self.sink_tokens
            return range(first, max(first, (context_tokens - window) // block_size))
        kept = self.kept_blocks(prompt_tokens, block_size)
        if self.every is not None:
            begin = self._first_eviction(prompt_tokens, block_size)
            rounds = (context_tokens - 1 - begin) // self.every
            return range((begin + rounds * self.every) // block_size - kept if rounds >= 0 else 0)
        if prompt_tokens < self.min_context_tokens:
            return range(0)
        return range(max(0, prompt_tokens // block_size - kept))

    def _first_eviction(self, prompt_tokens: int, block_size: int) -> int:
        """Returns the tokens of a context at its first eviction, which may find nothing to give back."""
        return max(prompt_tokens, self.kept_blocks(prompt_tokens, block_size) * block_size, self.min_context_tokens)

    def first_left_out(self, prompt_tokens: int, block_size: int) -> range:
        """Returns what `left_out` is after the first eviction that gives blocks back; empty if there is none."""
        if self.every is None:
            return self.left_out(prompt_tokens, prompt_tokens + 1, block_size)
        begin = self._first_eviction(prompt_tokens, block_size)
        least = (self.kept_blocks(prompt_tokens, block_size) + 1) * block_size
        rounds = max(0, -(-(least - begin) // self.every))
        return self.left_out(prompt_tokens, begin + rounds * self.every + 1, block_size)

    def moves(self, prompt_tokens: int, block_size: int) -> bool:
        """Returns whether tokens of a prompt ever move. They need blocks that no other request reads."""
        return not self.slides and len(self.first_left_out(prompt_tokens, block_size)) > 0

    def shared_tokens(self, prompt_tokens: int, block_size: int) -> int:
        """Returns the number of first tokens whose blocks other requests may share. These blocks are never written
        again, and hold keys and values of dense attention."""
        if not self.moves(prompt_tokens, block_size):
            return prompt_tokens
        return len(self.first_left_out(prompt_tokens, block_size)) * block_size

    def longest_hit(self, prompt_tokens: int, block_size: int) -> int:
        """Returns the largest number of prompt tokens that may come from shared blocks."""
        if self.counts_every_query and self.moves(prompt_tokens, block_size):
            return 0
        return min(self.shared_tokens(prompt_tokens, block_size), max(prompt_tokens - 1, 0))

    def held_blocks(self, prompt_tokens: int, context_tokens: int, block_size: int) -> int:
        """Returns the number of blocks that a request with this context, at least P + 1, holds. With a sliding window
        it holds up to two more, because a block is freed one step after its last read."""
        every = -(-context_tokens // block_size)
        return every - len(self.left_out(prompt_tokens, context_tokens, block_size))

    def most_held_blocks(self, prompt_tokens: int, block_size: int) -> int:
        """Returns the number of blocks that a decoding request holds: with `every` the most in its whole life, up to
        the step after an eviction; otherwise those after its prompt, without decoded tokens."""
        after_prompt = self.held_blocks(prompt_tokens, prompt_tokens + 1, block_size)
        if self.every is None:
            return after_prompt
        before_first = -(-(self._first_eviction(prompt_tokens, block_size) + 1) // block_size)
        between = self.kept_blocks(prompt_tokens, block_size) + -(-self.every // block_size) + 1
        return max(after_prompt, between, before_first if prompt_tokens < self.min_context_tokens else 0)


def _rounded_up(tokens: float) -> int:
    # Rounding first avoids rounding up a whole number with a floating-point error.
    return math.ceil(round(tokens, 6))


def requests_at_once(
    retentions: Sequence[Retention | None], num_blocks: int, prompt_tokens: int, block_size: int
) -> int:
    """Returns how many requests of one prompt length fit the cache, if one prefills and all others decode.

    Args:
        retentions: what the layers keep, one entry per block table of a request; None for everything.
        num_blocks: blocks of the pool, each for the layers that share a table. vLLM gives all but one to requests.
        prompt_tokens: P.
        block_size: tokens of a block.
    """
    prompt_blocks = -(-(prompt_tokens + 1) // block_size)
    every = prompt_blocks * len(retentions)
    held = sum(
        prompt_blocks if retention is None else retention.most_held_blocks(prompt_tokens, block_size)
        for retention in retentions
    )
    free = num_blocks - 1
    return 1 + (free - every) // held if free >= every else 0
