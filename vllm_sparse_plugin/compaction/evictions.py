"""Evicts tokens of requests between two steps, in the worker, in all layers at once.

Votes come late: a ring keeps the newest queries, and they vote when the ring is full or a request evicts. Keys stay
until then, so each vote is the same as in the query's own step. Graphs of a step only write to the ring.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sparse_kernels.compaction import (
    ROWS_AT_ONCE,
    CompactionRule,
    HeldBlocks,
    HeldTokens,
    LayerCaches,
    QueryRing,
    add_votes_of_layers,
    keep_tokens,
)
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_plugin.compaction.step import Observed, RequestState, StepCompaction
from vllm_sparse_plugin.evictions import Retention
from vllm_sparse_plugin.requests.protected import ranges_of
from vllm_sparse_plugin.requests.rows import BatchRows


@dataclass
class _Held(RequestState):
    """State of a request with evictions."""

    since: int = 0
    """Position of a query. The queries from there on are in the ring and have not voted."""
    left: int = 0
    """Blocks that were given back."""
    sums: torch.Tensor | None = None
    """`[num_layers, num_kv_heads, num_tokens]` float32, votes that tokens keep from one eviction to the next."""
    still: torch.Tensor | None = None
    """`[num_layers, num_kv_heads, num_tokens]` bool, the protected tokens after the latest eviction."""
    slot: int | None = None
    """Its place in the ring."""

    def carry(self, sums: torch.Tensor, layers: Iterable[str]) -> None:
        """Sets `sums`, and `votes` to its rows."""
        self.sums, self.votes = sums, dict(zip(layers, sums.unbind(0), strict=True))


class StepEvictions(StepCompaction):
    """The evictions of the layers that share a metadata builder."""

    rule: CompactionRule

    def __init__(
        self,
        retention: Retention,
        rule: CompactionRule,
        layers: Mapping[str, Any],
        block_size: int,
        max_requests: int,
        rows: BatchRows,
        device: torch.device,
        query_dtype: torch.dtype,
        max_tokens: int,
        slots: int,
    ) -> None:
        """Allocates the ring if queries vote.

        Args:
            retention: what the layers keep.
            rule: which tokens are kept.
            layers: the layers by name, all of one shape.
            block_size: tokens of a block.
            max_requests: the most requests of a step.
            rows: the requests of a step.
            device: the device of the layers.
            query_dtype: of the layers' queries.
            max_tokens: the most query tokens of a step, padding included.
            slots: the most requests that run at once, in one step or not. Each has a place in the ring.
        """
        super().__init__(retention, rule, layers, block_size, max_requests, rows, device)
        self.rule = rule
        self._held: dict[str, _Held] = {}
        self._caches: LayerCaches | None = None
        self._bound: list[torch.Tensor | None] = []
        self._layer = next(iter(layers.values()))
        self._ring: QueryRing | None = None
        if length := rule.ring_tokens:
            heads = self._layer.num_heads, self._layer.head_size
            self._ring = QueryRing(len(layers), slots, length, heads, max_tokens, query_dtype, device)
            for index, layer in enumerate(layers.values()):
                layer.impl.keep_queries(self._ring, index)

    def rehearse(self, block_table: torch.Tensor) -> Iterator[tuple[int, list[Observed]]]:
        """Yields dummy chunks whose queries vote in their step; see `StepCompaction.rehearse`."""
        longest = len(block_table) * self.block_size
        for rows in ROWS_AT_ONCE if self.rule.every_query else ():
            count = min(rows, longest)
            request = _Held(longest, until=count)
            self._sums(request, count, block_table.device)
            yield count, [Observed(request, slice(0, count), 0, self.rule, block_table, None)]

    def rehearse_evictions(self, block_table: torch.Tensor) -> None:
        """Launches every kernel of two evictions that follow each other.

        Args:
            block_table: `[max_blocks]` int32, room for the longest context. All caches have its blocks.
        """
        size, prompt = self.block_size, self.retention.kept_blocks(1, self.block_size) * self.block_size
        request, longest = _Held(prompt, slot=0), len(block_table) * size
        if self._ring is not None:
            heads = self._layer.num_heads, self._layer.head_size
            self._ring.write(0, torch.zeros(1, *heads, dtype=self._ring.dtype, device=block_table.device))
        for computed in range(prompt, longest):
            left = self.retention.left_out(prompt, computed + 1, size).stop
            if left > request.left:
                was = request.left
                request.computed = computed
                request.since = computed - self.rule.ring_tokens
                self._evict(request, block_table, left)
                if was:
                    break
        self._caches = None

    def _left_out(self, common: CommonAttentionMetadata, lengths: list[int], query_lens: list[int]) -> list[int]:
        """Evicts from the requests that are due, and returns the number of blocks that each row does not read."""
        left_out, starts = [0] * common.num_reqs, common.query_start_loc_cpu.tolist()
        places = np.full(starts[-1], -1, dtype=np.int32)
        self.observed = []
        rows = self.rows.of_step(common)[: common.num_reqs]
        for name in [name for name in self._held if not self.rows.runs(name)]:
            del self._held[name]
        for index, row in enumerate(rows):
            if row is None or not query_lens[index]:
                continue
            computed, table = lengths[index] - query_lens[index], common.block_table_tensor[index]
            request = self._held.get(row.request_id)
            # A resumed request begins again, perhaps behind a prefix-cache hit, and so does another one of its name.
            if request is None or computed != request.until or self._is_of_another(request, row, computed):
                ranges = ranges_of(self.rows.arguments_of(row.request_id))
                request = _Held(row.prompt_tokens, ranges=ranges, since=computed)
                self._held[row.request_id] = request
            request.computed, request.until = computed, lengths[index]
            if computed >= request.prompt_tokens:
                left = self.retention.left_out(request.prompt_tokens, computed + 1, self.block_size).stop
                if left > request.left:
                    self._evict(request, table, left)
            left_out[index] = request.left
            if self._ring is not None and self.retention.moves(request.prompt_tokens, self.block_size):
                tokens = slice(starts[index], starts[index + 1])
                if self.rule.every_query and query_lens[index] > 1:
                    self._vote_now(request, table, tokens)
                else:
                    self._vote_later(request, table, places[tokens])
        if self._ring is not None:
            self._ring.begin_step(places)
        return left_out

    def _vote_now(self, request: _Held, table: torch.Tensor, tokens: slice) -> None:
        """Has the queries of a chunk vote in the step, layer by layer.

        Args:
            request: their request.
            table: its block table.
            tokens: their place in the batch.
        """
        held = self._add_ring(request, table)
        self._sums(request, held + tokens.stop - tokens.start, table.device)
        self.observed.append(Observed(request, tokens, held, self.rule, table[request.left :].clone(), None))
        request.since = request.until

    def _vote_later(self, request: _Held, table: torch.Tensor, places: NDArray[np.int32]) -> None:
        """Gives the queries of a step places in the ring.

        Args:
            request: their request.
            table: its block table.
            places: `[num_tokens]`, written.
        """
        assert self._ring is not None
        length = self._ring.length
        if self.rule.every_query and request.computed - request.since == length:
            self._add_ring(request, table)
        if request.slot is None:
            request.slot, request.since = self._free_slot(), request.computed
        first = max(request.computed, request.until - length)
        for position in range(first, request.until):
            places[position - request.computed] = self._ring.place(request.slot, position, length)
        if first > request.computed:
            request.since = first

    def _free_slot(self) -> int:
        """Returns a slot of the ring that no request has. There is one: only requests that run have a slot."""
        assert self._ring is not None
        taken = {request.slot for request in self._held.values()}
        return next(slot for slot in range(self._ring.slots) if slot not in taken)

    def _sums(self, request: _Held, tokens: int, device: torch.device) -> torch.Tensor:
        """Returns the votes that tokens of a request keep, with room for some tokens."""
        known = request.sums
        if known is None or known.shape[2] < tokens:
            # A prompt's votes grow with its chunks, those after an eviction with what is held.
            room = max(tokens, request.prompt_tokens - request.left * self.block_size)
            sums = torch.zeros(len(self.layers), self._layer.num_kv_heads, room, device=device)
            if known is not None:
                sums[..., : known.shape[2]] = known
            request.carry(sums, self.layers)
        assert request.sums is not None
        return request.sums

    def _add_ring(self, request: _Held, table: torch.Tensor) -> int:
        """Adds the votes of a request's queries in the ring; returns the number of tokens that it holds."""
        held = request.computed - request.left * self.block_size
        self._add_votes(self._sums(request, held, table.device), request, table, request.computed - request.since)
        request.since = request.computed
        return held

    def _add_votes(self, votes: torch.Tensor, request: _Held, table: torch.Tensor, count: int) -> None:
        """Adds the votes of the newest queries of a request to `[num_layers, num_kv_heads, num_tokens]`."""
        if not count:
            return
        assert self._ring is not None
        assert request.slot is not None
        query = self._ring.newest(request.slot, request.computed, count)
        scales = [layer._q_scale for layer in self.layers.values()] if query.dtype.itemsize == 1 else None
        first = request.computed - request.left * self.block_size - count
        softmax = [layer.impl.softmax for layer in self.layers.values()]
        add_votes_of_layers(votes, query, first, table[request.left :], self._layer_caches(), softmax, scales)

    def _evict(self, request: _Held, table: torch.Tensor, left: int) -> None:
        """Moves the kept tokens of a request into their blocks. The step has not written yet.

        Args:
            request: the request.
            table: its block table.
            left: blocks that are given back, all evictions counted.
        """
        end = left + self.retention.kept_blocks(request.prompt_tokens, self.block_size)
        count = request.computed - request.left * self.block_size
        caches, rule = self._layer_caches(), self.rule
        protected = self._protected(request, count, table.device)
        # A copy begins at an aligned address, for which kernels are compiled.
        held = HeldBlocks(table[request.left :].clone(), count, left - request.left, end - request.left, protected)
        votes = self._votes(request, table, held, caches)
        scores = votes
        if rule.score is not None:
            of_layers = map(HeldTokens, votes, repeat(held.block_table), caches.caches)
            scores = torch.stack([rule.scores(tokens) for tokens in of_layers])
        kept = keep_tokens(scores, held, caches, rule)
        moved_until = held.end_block * self.block_size
        if rule.every_query:
            request.carry(_moved(votes, kept, moved_until), self.layers)
        if protected is not None:
            request.still = _moved(protected, kept, moved_until)
        request.left = left

    def _protected(self, request: _Held, tokens: int, device: torch.device) -> torch.Tensor | None:
        """Returns the protected tokens among those that a request holds, `[num_layers, num_kv_heads, tokens]` bool;
        None if it protects none."""
        known = request.still
        if known is None:
            of_prompt, request.marks = request.protected(device), None
            if of_prompt is None:
                return None
            known = of_prompt.expand(len(self.layers), self._layer.num_kv_heads, -1)
        return torch.nn.functional.pad(known, (0, tokens - known.shape[2]))

    def _votes(self, request: _Held, table: torch.Tensor, held: HeldBlocks, caches: LayerCaches) -> torch.Tensor:
        """Returns the votes of the tokens that a request holds, `[num_layers, num_kv_heads, num_tokens]`."""
        rule, tokens = self.rule, held.num_tokens
        if rule.every_query:
            self._add_ring(request, table)
            return self._sums(request, tokens, table.device)[..., :tokens]
        votes = torch.zeros(len(caches.caches), caches.first.num_kv_heads, tokens, device=table.device)
        # Fewer votes would depend on other requests. The kept blocks are never a prefix-cache hit, and hold the window.
        assert request.computed - request.since >= rule.window_tokens
        self._add_votes(votes, request, table, rule.window_tokens)
        return votes

    def _layer_caches(self) -> LayerCaches:
        """Returns the caches of the layers; makes them again when vLLM has bound others."""
        bound = [layer.impl.bound_cache for layer in self.layers.values()]
        if self._caches is None or any(ours is not now for ours, now in zip(self._bound, bound, strict=True)):
            self._caches = LayerCaches(tuple(layer.impl.held_cache(layer) for layer in self.layers.values()))
            self._bound = bound
        return self._caches


def _moved(of_tokens: torch.Tensor, kept: torch.Tensor, end: int) -> torch.Tensor:
    """Returns numbers of tokens after an eviction.

    Args:
        of_tokens: `[num_layers, num_kv_heads, num_tokens]`.
        kept: `[num_layers, num_kv_heads, kept]` int64, the tokens that have moved.
        end: of the tokens that may move; later ones stay.
    """
    return torch.cat([of_tokens.gather(2, kept), of_tokens[..., end:]], dim=2)
