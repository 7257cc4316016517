"""Counts the keys that a decode step reads and that the cache keeps, from lengths alone.

The metrics of a server, `vllm-sparse eval`, `tune`, `plan` and `needles` use this one definition:

    read share = keys that a decode step reads / keys of its context
    kept share = keys of the context that the cache still holds / keys of the context

The keys of a context are its positions, also those that compaction has given back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_sparse_plugin.config.anchors import anchors_of_layers
from vllm_sparse_plugin.config.schema import ResolvedConfig
from vllm_sparse_plugin.evictions import Retention
from vllm_sparse_plugin.policies import reads_selection

PREFERRED_BLOCK = 64
"""Tokens of a block on a GPU unless the user says otherwise: the statistics of a block and head are then one kilobyte
in a row, which memory reads well."""
Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class LayerKeys:
    """The keys of one layer, per KV head."""

    retention: Retention | None = None
    """What the cache keeps of a request; None for everything."""
    block_size: int = 1
    """Tokens of a block, the unit in which the cache gives keys back."""
    page_size: int = 1
    """Tokens of a page."""
    budget_pages: int | None = None
    """Complete pages that a step reads; None for all that the cache keeps."""
    dense_tokens: int = 0
    """Contexts that attention reads whole, counted as attention sees them: without what was given back."""
    rolls: bool = False
    """Whether positions roll: a step then reads a window that is smaller than what the blocks keep."""

    def kept(self, prompt_tokens: int, contexts: Lengths) -> Lengths:
        """Returns the keys that the cache keeps for tokens behind a prompt.

        Args:
            prompt_tokens: length of the prompt.
            contexts: positions up to each token, itself included.
        """
        if self.retention is None:
            return contexts
        left_out = [len(self.retention.left_out(prompt_tokens, n, self.block_size)) for n in contexts.tolist()]
        return contexts - self.block_size * np.array(left_out, dtype=np.int64)

    def read(self, contexts: Lengths, kept: Lengths, budgets: Lengths | None = None) -> Lengths:
        """Returns the keys that tokens read.

        Args:
            contexts: positions up to each token, itself included.
            kept: of these, the keys that the cache keeps.
            budgets: complete pages that each token reads; None for those of the settings.
        """
        seen = contexts if self.rolls else kept
        if self.budget_pages is None:
            return seen
        budgets = np.full(len(seen), self.budget_pages) if budgets is None else budgets
        selects = (seen > self.dense_tokens) & (seen // self.page_size > budgets)
        return np.where(selects, self.page_size * budgets + seen % self.page_size, seen)


def keys_of_layer(
    config: ResolvedConfig, retention: Retention | None, block_size: int, selects: bool = True
) -> LayerKeys:
    """Returns the account of a layer.

    Args:
        config: the settings.
        retention: what the layer keeps; None for everything.
        block_size: tokens of a block.
        selects: whether the layer follows the policy; others read all that is kept.
    """
    if (window := config.rolling_window) is not None:
        return LayerKeys(retention, block_size, 1, window.cache_tokens, window.whole_tokens, rolls=True)
    selector = config.selector
    if not reads_selection(selector) or not selects:
        return LayerKeys(retention, block_size)
    shortest = config.config.min_context_tokens
    return LayerKeys(retention, block_size, selector.page_size, selector.budget_pages, shortest - 1)


class Shares(NamedTuple):
    """What decode steps read and what the cache keeps, as shares of dense attention to the whole context."""

    read: float = 1.0
    """Keys read."""
    kept: float = 1.0
    """Keys kept."""
    bytes_read: float = 1.0
    """Bytes read: keys, values and page statistics."""
    bytes_kept: float = 1.0
    """Bytes of the cache: keys, values and page statistics."""


class Counted(NamedTuple):
    """What kernels have counted, where lengths do not tell how much a step reads."""

    read: float | None = None
    """Share of the keys that are kept which selecting layers read, of tokens that do not read all; None where lengths
    tell it."""
    skipped: float = 0.0
    """Share of the KV groups that routing skips, of tokens that are routed."""


@dataclass(frozen=True)
class ModelKeys:
    """The keys of all layers of a model. All of them are taken to attend to the whole context."""

    config: ResolvedConfig | None
    """The settings; None for vLLM's own attention."""
    num_layers: int
    head_size: int
    block_size: int
    """Tokens of a block of the cache."""
    itemsize: int = 2
    """Bytes of an element of the cache."""

    @property
    def by_length(self) -> bool:
        """Whether lengths alone tell what decode steps read; else `shares` needs what kernels have counted."""
        config = self.config
        # Drafts alone are routed or stop in lossless mode.
        return config is None or config.lossless is not None or not (config.routing or config.stop_rule)

    def shares(self, prompt_tokens: int, decoded_tokens: int = 1, counted: Counted | None = None) -> Shares:
        """Returns what the decode steps of a request read and keep, together.

        The first decoded token comes from the prefill, so that steps read contexts from `prompt_tokens + 1` on. A
        request of one token has the shares of the step that would follow.

        Args:
            prompt_tokens: length of the prompt.
            decoded_tokens: tokens of the answer.
            counted: what kernels have counted; None for nothing.
        """
        config, counted = self.config, counted or Counted()
        if config is None:
            return Shares()
        contexts = prompt_tokens + np.arange(1, max(decoded_tokens, 2), dtype=np.int64)
        layout = config.statistics_layout(self.head_size, self.itemsize)
        scores = config.selection.statistics_layout(self.head_size, self.itemsize) is not None
        token_bytes = 2 * self.head_size * self.itemsize
        retention = None if config.compaction is None else config.compaction.retention()
        retentions = [None] * self.num_layers if retention is None else retention.of_layers(self.num_layers)
        first = config.config.first_dense_layers if config.lossless is None else self.num_layers
        followers = anchors_of_layers(
            ((layer, layer, 1) for layer in range(first, self.num_layers)), config.anchor_layers
        )
        selector, shortest = config.selector, config.config.min_context_tokens
        read = kept = scored = 0.0
        for layer, of_layer in enumerate(retentions):
            selects = layer >= first
            keys = keys_of_layer(config, of_layer, self.block_size, selects)
            keeps = keys.kept(prompt_tokens, contexts)
            reads = keys.read(contexts, keeps).astype(float)
            # Kernels count no token that reads all that is kept.
            sparse = keeps >= shortest
            if selects and counted.read is not None and selector is not None:
                varies = sparse & (keeps // selector.page_size > selector.budget_pages)
                reads = np.where(varies, counted.read * keeps, reads)
            attending = np.ones(len(contexts))
            if config.routing is not None and layer >= config.routing.dense_layers and config.lossless is None:
                attending[sparse] -= counted.skipped
            read += float(attending @ reads)
            kept += keeps.sum(dtype=float)
            if selects and scores and layout is not None and layer not in followers:
                pages = np.where(reads < keeps, keeps // layout.page_size, 0)
                scored += float(attending @ pages) * layout.record_bytes
        every = contexts.sum(dtype=float) * self.num_layers
        overhead = 0.0 if layout is None else layout.memory_overhead
        return Shares(
            read / every, kept / every, (read + scored / token_bytes) / every, kept / every * (1 + overhead)
        )  # fmt: skip
