"""The tokens that a request with compaction keeps: a model in float64, without blocks of a cache."""

import torch

from vllm_sparse_plugin.evictions import Compaction

_NEARLY = 2e-3
"""Difference of two scores, relative to the largest score, below which either token may be kept."""


class KeptError(Exception):
    """A request keeps other tokens than it should."""


class Kept:
    """The tokens of one request. Positions are those of the text."""

    def __init__(
        self, compaction: Compaction, block_size: int, scale: float, prompt_tokens: int, keys: torch.Tensor
    ) -> None:
        """Begins with the tokens of a prefix-cache hit.

        Args:
            compaction: the settings.
            block_size: tokens of a block.
            scale: factor of logits.
            prompt_tokens: P.
            keys: `[num_tokens, num_kv_heads, head_size]` of the hit.
        """
        self.compaction, self.retention, self.rule = compaction, compaction.retention(), compaction.rule()
        self.block_size, self.scale, self.prompt_tokens = block_size, scale, prompt_tokens
        self.keys = keys.double()
        """`[num_tokens, num_kv_heads, head_size]`, of all tokens so far, kept or not."""
        self.held = torch.arange(len(keys)).repeat(keys.shape[1], 1)
        """`[num_kv_heads, num_held]` int64, ascending positions of the tokens that attention reads."""
        self.left = 0
        """Blocks that were given back."""
        self._queries: list[torch.Tensor] = []
        self._sums = torch.zeros(self.held.shape, dtype=torch.float64)

    @property
    def sinks(self) -> int:
        """First blocks that stay; the blocks that were given back follow."""
        return self.retention.sink_blocks(self.block_size)

    @property
    def moves_at_once(self) -> bool:
        """Whether tokens move in the step that ends the prompt, not when the next one begins."""
        return not self.retention.slides and not self.compaction.evicts_between_steps

    def due(self, computed: int) -> int:
        """Returns how many blocks a step does not read that begins after `computed` tokens."""
        if computed < self.prompt_tokens:
            # A window too begins to slide behind the prompt.
            return 0
        return len(self.retention.left_out(self.prompt_tokens, computed + 1, self.block_size))

    def slide(self, left: int) -> None:
        """Drops the blocks that a sliding window has left."""
        block = self.held[0] // self.block_size
        stays = (block < self.sinks) | (block >= self.sinks + left)
        self.held, self._sums, self.left = self.held[:, stays], self._sums[:, stays], left

    def targets(self, left: int) -> range:
        """Returns the places of the kept tokens, counted from the first held token, if `left` blocks are gone."""
        kept = self.retention.kept_blocks(self.prompt_tokens, self.block_size)
        return range((left - self.left) * self.block_size, (left - self.left + kept) * self.block_size)

    def evict(self, left: int, moved: torch.Tensor) -> None:
        """Checks an eviction before a step, and follows it.

        Args:
            left: blocks that are given back then.
            moved: `[num_kv_heads, kept]` int64, the positions found at the places of the kept tokens.

        Raises:
            KeptError: if the rule keeps others.
        """
        assert self.rule is not None
        tokens = self.held.shape[1]
        if not self.compaction.evicts_between_steps:
            # The step that ended the prompt may have gone on into the output.
            tokens = self.prompt_tokens - self.left * self.block_size
        places, scores = self.targets(left), self._scores(tokens)[:, : self.targets(left).stop]
        newest = max(self.rule.window_tokens, int(self.rule.recent_share * len(places)))
        always = torch.arange(places.stop) >= tokens - newest
        always[: self.rule.sink_tokens] = True
        sums = []
        for found, held, score, votes in zip(moved, self.held, scores, self._sums, strict=True):
            chosen = torch.isin(held[: places.stop], found)
            if not bool((found.diff() > 0).all()) or int(chosen.sum()) != len(found):
                raise KeptError("kept tokens are not held tokens in the order of the text")
            if not bool(chosen[always].all()):
                raise KeptError("an eviction drops a token that is always kept")
            kept, dropped = score[chosen & ~always], score[~chosen]
            if len(kept) and bool(kept.min() < dropped.max() - _NEARLY * score.abs().max()):
                raise KeptError("an eviction keeps another token than that of the best score")
            sums.append(torch.cat([votes[: places.stop][chosen], votes[places.stop :]]))
        self._sums, self.left = torch.stack(sums), left
        self.held = torch.cat([moved, self.held[:, places.stop :]], dim=1)

    def add(self, query: torch.Tensor, keys: torch.Tensor) -> None:
        """Adds the tokens of a step.

        Args:
            query: `[num_tokens, num_query_heads, head_size]`.
            keys: `[num_tokens, num_kv_heads, head_size]`.
        """
        first, heads = len(self.keys), keys.shape[1]
        self.keys = torch.cat([self.keys, keys.double()])
        self.held = torch.cat([self.held, torch.arange(first, len(self.keys)).expand(heads, -1)], dim=1)
        self._queries += query.double().unflatten(1, (heads, -1)).unbind(0)
        self._sums = torch.nn.functional.pad(self._sums, (0, len(keys)))
        if self.rule is None or not self.rule.every_query:
            return
        voting = len(keys) if self.compaction.evicts_between_steps else min(len(keys), self.prompt_tokens - first)
        if voting > 0:
            self._sums += self._votes(torch.stack(self._queries[-len(keys) :])[:voting], first, self.held.shape[1])

    def _votes(self, query: torch.Tensor, first: int, tokens: int) -> torch.Tensor:
        """Attention of consecutive queries on the first held tokens, summed: `[num_kv_heads, tokens]`.

        Args:
            query: `[num_queries, num_kv_heads, group, head_size]`.
            first: position of the first query.
            tokens: number of held tokens.
        """
        held = self.held[:, :tokens]
        keys = self.keys[held, torch.arange(len(held))[:, None]]
        logits = torch.einsum("qhgd,hnd->hgqn", query, keys) * self.scale
        position = torch.arange(first, first + len(query))
        hidden = held[:, None, None] > position[:, None]
        return logits.masked_fill(hidden, -torch.inf).softmax(dim=-1).sum(dim=(1, 2))

    def _scores(self, tokens: int) -> torch.Tensor:
        """The scores of the first held tokens, `[num_kv_heads, tokens]`."""
        rule, held = self.rule, self.held[:, :tokens]
        assert rule is not None
        if rule.every_query:
            return self._sums[:, :tokens]
        end = int(held[0, -1]) + 1
        skipped = len(self.keys) - len(self._queries)
        query = torch.stack(self._queries[end - rule.window_tokens - skipped : end - skipped])
        votes = self._votes(query, end - rule.window_tokens, tokens)
        before = tokens - rule.window_tokens
        pooled = torch.zeros_like(votes)
        pooled[:, :before] = torch.nn.functional.max_pool1d(
            votes[:, :before], rule.pool_tokens, stride=1, padding=rule.pool_tokens // 2
        )
        return pooled
