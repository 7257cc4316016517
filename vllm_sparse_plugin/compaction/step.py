"""Shortens the block tables of a step to the kept blocks, in the worker.

Attention then sees shorter contexts in fewer blocks and needs no other change. The positions and slots of tokens do not
change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from sparse_kernels.compaction import ROWS_AT_ONCE, CompactionRule, ObservationWindow, PromptBlocks, voting_rows
from sparse_kernels.page_statistics import FEW_SLOTS
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_plugin.evictions import Retention
from vllm_sparse_plugin.requests.protected import ranges_of
from vllm_sparse_plugin.requests.rows import BatchRows, Row

_keeping: WeakSet[Any] = WeakSet()
"""Model runners whose layers keep the queries of a prompt in the step that computes them."""


def keep_queries(runner: Any) -> None:
    """Notes that the layers of a model runner keep the queries of prompts. A replayed graph would keep none."""
    _keeping.add(runner)


def keeps_queries(runner: Any) -> bool:
    """Returns whether the layers of a model runner keep the queries of prompts."""
    return runner in _keeping


@dataclass
class RequestState:
    """State of a request since its computation began, or began again after a preemption."""

    prompt_tokens: int
    computed: int = 0
    """Tokens computed before its latest step."""
    until: int = 0
    """Tokens computed at the end of its latest step."""
    is_whole: bool = False
    """Whether some layers still have to move tokens of the prompt."""
    moved: set[str] = field(default_factory=set)
    """Layers that have moved their tokens."""
    windows: dict[str, ObservationWindow] = field(default_factory=dict)
    """The newest queries of the prompt so far, by layer, while `is_whole`."""
    votes: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sums of `add_votes` over the queries so far, by layer, while `is_whole`."""
    voting: torch.Tensor | None = None
    """Positions of the prompt that vote, see `voting_rows`; None if all vote."""
    ranges: tuple[range, ...] = ()
    """Positions of the prompt that are kept, whoever votes for others."""
    marks: torch.Tensor | None = None
    """`[prompt_tokens]` bool on the host, these positions, while layers move tokens."""

    def protected(self, device: torch.device) -> torch.Tensor | None:
        """Returns the tokens of the prompt that are kept, `[prompt_tokens]` bool; None if the request names none."""
        if not self.ranges:
            return None
        if self.marks is None:
            self.marks = torch.zeros(self.prompt_tokens, dtype=torch.bool, pin_memory=device.type == "cuda")
            # A request may name thousands of ranges, and each call of torch takes microseconds.
            marks = self.marks.numpy()
            for each in self.ranges:
                marks[each.start : each.stop] = True
        return self.marks.to(device, non_blocking=True)

    def move(self, name: str, layer: Any, impl: Any, prompt: PromptBlocks, rule: CompactionRule) -> None:
        """Moves the kept tokens of a layer, unless it has moved them.

        Args:
            name: of the layer.
            layer: vLLM's attention layer.
            impl: the attention implementation of the layer.
            prompt: the blocks of the prompt, without the tokens that the request protects.
            rule: says which tokens are kept.
        """
        if name in self.moved:
            return
        # The device has marks of one request for one layer at a time, however many prompts end in a step.
        prompt = replace(prompt, protected=self.protected(prompt.block_table.device))
        window = self.windows.pop(name, None)
        if window is None:
            nobody = torch.empty(0, layer.num_heads, layer.head_size, device=prompt.block_table.device)
            window = ObservationWindow(nobody, 0)
        impl.compact(layer, window, prompt, rule, self.votes.pop(name, None))
        self.moved.add(name)


class Observed(NamedTuple):
    """Query tokens of a step that vote now, or may vote as the newest tokens of a prompt."""

    request: RequestState
    tokens: slice
    """Their place in the batch."""
    first_position: int
    """Position of the first token."""
    rule: CompactionRule
    """Says which tokens are kept."""
    block_table: torch.Tensor | None
    """Block table of the request if queries vote now; None if the newest queries vote at the prompt's end."""
    ends: PromptBlocks | None
    """The blocks of the prompt, if these tokens end it; a layer then moves its tokens right after attention."""

    def votes(self, layer: str, num_kv_heads: int) -> torch.Tensor:
        """Returns the votes of a layer's earlier queries, to add to: `[num_kv_heads, P]` float32."""
        found = self.request.votes.get(layer)
        if found is None:
            assert self.block_table is not None
            found = torch.zeros(num_kv_heads, self.request.prompt_tokens, device=self.block_table.device)
            self.request.votes[layer] = found
        return found

    def keep(self, layer: str, query: torch.Tensor) -> None:
        """Keeps the queries for the vote, together with earlier queries of the same window.

        Args:
            layer: name of the layer.
            query: `[num_tokens, num_query_heads, head_size]` of the whole step.
        """
        new, first = query[self.tokens], self.first_position
        before = self.request.windows.get(layer)
        # Tokens of a replayed graph are not observed. A window must be contiguous.
        if before is not None and before.first_position + len(before.query) == first:
            new, first = torch.cat([before.query, new]), before.first_position
        dropped = max(0, len(new) - self.rule.window_tokens)
        self.request.windows[layer] = ObservationWindow(new[dropped:].clone(), first + dropped)


class StepCompaction:
    """The compaction of the layers that share a metadata builder.

    Its results are in buffers at fixed addresses, so a CUDA graph may read them.
    """

    def __init__(
        self,
        retention: Retention,
        rule: CompactionRule | None,
        layers: Mapping[str, Any],
        block_size: int,
        max_requests: int,
        rows: BatchRows,
        device: torch.device,
    ) -> None:
        self.retention = retention
        self.rule = rule
        self.layers = layers
        self.observed: list[Observed] = []
        """Query tokens of the latest step whose queries the layers keep."""
        self.left_out = np.zeros(0, dtype=np.int64)
        """`[num_requests]`, positions of each request of the latest step that attention does not see."""
        self.block_size = block_size
        self.rows = rows
        self.sinks = retention.sink_blocks(block_size)
        self._requests: dict[str, RequestState] = {}
        self._table = torch.zeros(max_requests, 0, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(max_requests, dtype=torch.int32, device=device)

    def condense(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Returns the metadata of a step for attention.

        Rows of requests that are still in their prompt do not change.
        """
        bound = common.seq_lens_cpu_upper_bound
        # The bound is exact without speculation, and speculation is refused.
        lengths = common.seq_lens.cpu() if bound is None else bound
        starts = common.query_start_loc_cpu
        query_lens = (starts[1:] - starts[:-1]).tolist()
        left_out = self._left_out(common, lengths.tolist(), query_lens)
        self.left_out = self.block_size * np.array(left_out, dtype=np.int64)
        columns = torch.tensor(left_out, dtype=torch.int32)
        shorter = lengths[: common.num_reqs] - columns * self.block_size
        table, seq_lens = self._write(common, columns)
        return common.replace(
            block_table_tensor=table,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=None if bound is None else shorter,
            max_seq_len=int(shorter.max()) if any(left_out) else common.max_seq_len,
        )

    def _left_out(self, common: CommonAttentionMetadata, lengths: list[int], query_lens: list[int]) -> list[int]:
        """Returns the number of blocks that each row does not read."""
        left_out = [0] * common.num_reqs
        self.observed = []
        rows = self.rows.of_step(common)[: common.num_reqs]
        for index, row in enumerate(rows):
            if row is None or not query_lens[index]:
                continue
            computed = lengths[index] - query_lens[index]
            request = self._requests.get(row.request_id)
            # After a prefix-cache hit, a resumed request may begin after the step that ended its prompt, and another
            # request of the same name where this one was aborted.
            if request is None or computed < request.until or self._is_of_another(request, row, computed):
                request = RequestState(row.prompt_tokens, ranges=ranges_of(self.rows.arguments_of(row.request_id)))
                self._requests[row.request_id] = request
            request.computed, request.until = computed, lengths[index]
            if computed < request.prompt_tokens:
                first_token = int(common.query_start_loc_cpu[index])
                self._observe(request, first_token, query_lens[index], common.block_table_tensor[index])
                continue
            left = self.retention.left_out(request.prompt_tokens, computed + 1, self.block_size)
            left_out[index] = len(left)
            if request.is_whole:
                self._move(request, self._blocks(request, common.block_table_tensor[index]))
        if len(self._requests) > len(rows):
            # Remove the windows and votes of requests that have finished, or wait to be computed again.
            self._requests = {name: request for name, request in self._requests.items() if self.rows.runs(name)}
        return left_out

    def _is_of_another(self, request: RequestState, row: Row, computed: int) -> bool:
        """Returns whether a state belongs to an earlier request of the row's name, which was aborted in its prompt."""
        if request.prompt_tokens != row.prompt_tokens:
            return True
        return computed < row.prompt_tokens and request.ranges != ranges_of(self.rows.arguments_of(row.request_id))

    def _observe(self, request: RequestState, first_token: int, query_len: int, block_table: torch.Tensor) -> None:
        """Records a chunk of a prompt whose tokens move at its end."""
        if self.rule is None or not self.retention.moves(request.prompt_tokens, self.block_size):
            return
        request.is_whole = True
        in_prompt = min(query_len, request.prompt_tokens - request.computed)
        newest = in_prompt if self.rule.every_query else min(in_prompt, self.rule.window_tokens)
        tokens = slice(first_token + in_prompt - newest, first_token + in_prompt)
        position = request.computed + in_prompt - newest
        table = block_table if self.rule.every_query else None
        ends = self._blocks(request, block_table) if request.computed + in_prompt == request.prompt_tokens else None
        if self.rule.probes is not None and request.voting is None:
            request.voting = voting_rows(request.prompt_tokens, self.rule.probes, block_table.device)
        self.observed.append(Observed(request, tokens, position, self.rule, table, ends))

    def rehearse(self, block_table: torch.Tensor) -> Iterator[tuple[int, list[Observed]]]:
        """Yields dummy steps that end prompts. Together they launch every kernel that a prompt's compaction may need.

        Triton compiles kernels by the number of rows that vote, and by whether few or many tokens move.

        Args:
            block_table: `[max_blocks]` int32, room for the longest prompt.

        Yields:
            The number of query tokens of a step, all of one prompt, and the tokens that vote.
        """
        size = self.block_size
        lengths = range(size, len(block_table) * size + 1, size)
        compacted = [length for length in lengths if self.rule and self.retention.moves(length, size)]
        if not compacted:
            return

        def launches_more(length: int) -> tuple[bool, bool]:
            return length >= ROWS_AT_ONCE[-1], self.retention.kept_blocks(length, size) * size > FEW_SLOTS

        for prompt_tokens in {compacted[0], max(compacted, key=launches_more)}:
            for rows in ROWS_AT_ONCE:
                query_len = min(rows, prompt_tokens)
                self.observed = []
                self._observe(RequestState(prompt_tokens, prompt_tokens - query_len), 0, query_len, block_table)
                yield query_len, self.observed
        self.observed = []

    def _blocks(self, request: RequestState, block_table: torch.Tensor) -> PromptBlocks:
        """Returns the blocks of a prompt, and the blocks that its kept tokens move into."""
        left_out = self.retention.left_out(request.prompt_tokens, request.prompt_tokens + 1, self.block_size)
        return PromptBlocks(block_table, request.prompt_tokens, left_out.stop)

    def _move(self, request: RequestState, prompt: PromptBlocks) -> None:
        """Moves the kept tokens of layers that have not moved them. A replayed graph, which may compute the prompt's
        last token, moves none. This step has not written yet."""
        assert self.rule is not None
        for name, layer in self.layers.items():
            request.move(name, layer, layer.impl, prompt, self.rule)
        request.is_whole, request.marks = False, None

    def _write(self, common: CommonAttentionMetadata, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the shortened tables and lengths to the buffers; returns the rows of the step."""
        table, num_rows = common.block_table_tensor, common.num_reqs
        if table.shape[1] != self._table.shape[1] or num_rows > len(self._table):
            # vLLM's tables have one width, so this happens once, before any graph is captured.
            self._table = table.new_zeros(max(num_rows, len(self._table)), table.shape[1])
            self._lengths = self._lengths.new_zeros(len(self._table))
        skipped = columns.to(table.device, non_blocking=True)
        column = torch.arange(table.shape[1], device=table.device)
        source = column + torch.where(column < self.sinks, 0, skipped[:, None])
        torch.gather(table[:num_rows], 1, source.clamp_(max=table.shape[1] - 1), out=self._table[:num_rows])
        torch.sub(common.seq_lens[:num_rows], skipped * self.block_size, out=self._lengths[:num_rows])
        return self._table[:num_rows], self._lengths[:num_rows]
