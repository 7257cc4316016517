"""Says from lengths alone which blocks of a request are kept, so that scheduler and workers agree without a message.

Lengths are in tokens, blocks are counted from the beginning of a request. P is the length of its prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Pyramid:
    """Budgets that fall from layer to layer, evenly, with the same sum (PyramidKV, arXiv 2406.02069)."""

    beta: float
    """The last layer keeps the average divided by this."""
    classes: int
    """Consecutive layers share a budget, the average of theirs, so that there are so many budgets at most."""

    def shares(self, num_layers: int) -> list[float]:
        """Returns the factor of the average budget for each layer, from the first to the last."""
        last = 1 / self.beta
        step = 2 * (1 - last) / max(num_layers - 1, 1)
        of_layers = [2 - last - step * layer for layer in range(num_layers)] if num_layers > 1 else [1.0]
        # Classes of one size: vLLM pads the others.
        classes = max(number for number in range(1, self.classes + 1) if num_layers % number == 0)
        size = num_layers // classes
        return [sum(of_layers[layer // size * size : (layer // size + 1) * size]) / size for layer in range(num_layers)]


@dataclass(frozen=True)
class Retention:
    """What the layers of one class keep of a request once its prompt has been computed."""

    slides: bool
    """Whether the kept blocks are the first and the newest ones, at any time; else kept tokens of the prompt move into
    its last full blocks, and what is decoded stays."""
    budget_tokens: int | None
    """Tokens kept; None where a ratio says it."""
    budget_ratio: float | None
    """Tokens kept, as a share of P; None where a number says it."""
    sink_tokens: int
    """First tokens of the context, which are kept always."""
    min_context_tokens: int
    """Shortest prompt of which something is given back; where the window slides, the shortest context."""
    reserved_tokens: int = 0
    """Tokens that are kept whatever the prompt says, besides the sinks."""
    share: float = 1.0
    """Factor of what the budget leaves beside the tokens that are kept always, for a class of layers that keeps more or
    less than the average."""
    pyramid: Pyramid | None = None
    """How layers share the budget; None for equally."""
    counts_every_query: bool = False
    """Whether what is kept depends on queries all over a prompt, so that none of it may come from the prefix cache."""

    def budget(self, prompt_tokens: int) -> int:
        """Returns the tokens that are kept of a prompt, at least those that are kept always and one more."""
        budget = self.budget_tokens if self.budget_ratio is None else math.ceil(self.budget_ratio * prompt_tokens)
        assert budget is not None
        always = self.sink_tokens + self.reserved_tokens
        # What is a whole number but for the rounding of the share is not rounded up.
        return always + max(math.ceil(round((budget - always) * self.share, 6)), 1)

    def of_layers(self, num_layers: int) -> list[Retention]:
        """Returns what each layer of a model keeps, where the layers share the budget."""
        if self.pyramid is None:
            return [self] * num_layers
        return [replace(self, share=share, pyramid=None) for share in self.pyramid.shares(num_layers)]

    def kept_blocks(self, prompt_tokens: int, block_size: int) -> int:
        """Returns K, the blocks that kept tokens move into: the last K full blocks of the prompt."""
        return -(-self.budget(prompt_tokens) // block_size)

    def sink_blocks(self, block_size: int) -> int:
        """Returns the first blocks that stay where they are; none where tokens move."""
        return -(-self.sink_tokens // block_size) if self.slides else 0

    def left_out(self, prompt_tokens: int, context_tokens: int, block_size: int) -> range:
        """Returns the blocks that a token behind the prompt does not read.

        It never shrinks while a context grows, so what one token does not read no later one does.

        Args:
            prompt_tokens: P.
            context_tokens: tokens up to the token, itself included.
            block_size: tokens of a block.
        """
        first = self.sink_blocks(block_size)
        if self.slides:
            if context_tokens < self.min_context_tokens:
                return range(first, first)
            window = self.budget(prompt_tokens) - self.sink_tokens
            return range(first, max(first, (context_tokens - window) // block_size))
        if prompt_tokens < self.min_context_tokens:
            return range(0)
        return range(max(0, prompt_tokens // block_size - self.kept_blocks(prompt_tokens, block_size)))

    def moves(self, prompt_tokens: int, block_size: int) -> bool:
        """Returns whether tokens of a prompt move, which takes blocks that no other request reads."""
        return not self.slides and len(self.left_out(prompt_tokens, prompt_tokens + 1, block_size)) > 0

    def shared_tokens(self, prompt_tokens: int, block_size: int) -> int:
        """Returns the first tokens whose blocks other requests may share: those that are never written again, and whose
        keys and values are those of a dense prompt."""
        if not self.moves(prompt_tokens, block_size):
            return prompt_tokens
        return len(self.left_out(prompt_tokens, prompt_tokens + 1, block_size)) * block_size

    def longest_hit(self, prompt_tokens: int, block_size: int) -> int:
        """Returns the most tokens of a prompt that may be taken from the blocks of others."""
        if self.counts_every_query and self.moves(prompt_tokens, block_size):
            return 0
        return min(self.shared_tokens(prompt_tokens, block_size), max(prompt_tokens - 1, 0))

    def held_blocks(self, prompt_tokens: int, context_tokens: int, block_size: int) -> int:
        """Returns the blocks that a request holds whose context has this length, at least P + 1; two more than that
        while it slides, where a block is given back a step after the last token that read it."""
        every = -(-context_tokens // block_size)
        return every - len(self.left_out(prompt_tokens, context_tokens, block_size))


def requests_at_once(
    retentions: Sequence[Retention | None], num_blocks: int, prompt_tokens: int, block_size: int
) -> int:
    """Returns how many requests of one prompt length fit the cache, all of them decoding but one that prefills.

    Args:
        retentions: what the layers keep by block table of a request, of which there may be one or several; None for
            everything.
        num_blocks: blocks of the pool, of as many layers as share a table.
        prompt_tokens: P.
        block_size: tokens of a block.
    """
    whole = -(-(prompt_tokens + 1) // block_size)
    every = whole * len(retentions)
    held = sum(
        whole if retention is None else retention.held_blocks(prompt_tokens, prompt_tokens + 1, block_size)
        for retention in retentions
    )
    return 1 + (num_blocks - every) // held if num_blocks >= every else 0
