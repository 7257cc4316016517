"""A worker's part of a step: it keeps block tables, and runs one layer in place of a model."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sparse_kernels.batch import DecodeBatch, DecodeOutput
from sparse_kernels.split_attention.reference import split_attention
from support.bare_layer import BareLayer, LayerBatch
from support.families.referee import reference_output
from support.state_fuzz.cases import MAX_MODEL_LEN, Case
from support.state_fuzz.kept import Kept, KeptError
from support.state_fuzz.truth import Tokens, Truth
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_sparse_plugin.attention.plan import LayerPlan
from vllm_sparse_plugin.requests import rows

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 64
OUTPUT_TOLERANCE = 2**-6
"""Largest error of a head's output, relative to its norm. vLLM's kernel rounds weights to bfloat16. Queries, values and
outputs are also bfloat16, 2^-9 each."""
_JUDGED_STEPS = 0.25
"""Share of steps in which the outputs of one random request are compared. A comparison takes as long as a step.
Statistics are compared for all requests in all steps."""
_BANK = 64


class FaultError(Exception):
    """State or output of a layer is wrong."""


@dataclass
class Row:
    """The worker's record of a request."""

    place: int
    """Place of the request in the truth."""
    blocks: list[int] = field(default_factory=list)
    values: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """`[num_tokens, num_kv_heads, head_size]`, with compaction of all tokens so far."""
    written: int = 0
    """Tokens that were computed, or came from the prefix cache."""
    kept: Kept | None = None
    """What it keeps; None without compaction."""

    @property
    def dropped(self) -> int:
        """Tokens that are no longer in the truth."""
        return 0 if self.kept is None else self.written - self.kept.held.shape[1]

    def columns(self) -> list[int]:
        """The blocks that attention reads."""
        if self.kept is None:
            return self.blocks
        return self.blocks[: self.kept.sinks] + self.blocks[self.kept.sinks + self.kept.left :]


@dataclass(frozen=True)
class Scheduled:
    """A request's part of a step."""

    request: Request
    row: Row
    computed: int
    """Tokens of its context before the step."""
    tokens: list[int]
    """Its query tokens: the request's tokens, then drafts."""

    @property
    def context(self) -> int:
        """Tokens of its context with those of the step."""
        return self.computed + len(self.tokens)

    @property
    def seen(self) -> int:
        """Tokens of its context after the step, without those that it has given back."""
        return self.context - self.row.dropped

    @property
    def is_prefilling(self) -> bool:
        """Whether its prompt is not finished."""
        return bool(self.computed < self.request.num_prompt_tokens)


class Worker:
    """Runs steps of a scheduler through one layer, and compares with the truth."""

    def __init__(self, case: Case, config: Any, seed: int) -> None:
        """Makes the layer and its cache, filled with arbitrary old contents."""
        self.case, self.rng = case, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        # It acts as its model runner, which knows the requests.
        self.requests: dict[str, Request] = {}
        """The requests that have not finished."""
        self.input_batch = SimpleNamespace(num_reqs=0, req_ids=[], num_prompt_tokens=np.zeros(0, dtype=np.int64))
        with rows.building(self):
            self.layer = BareLayer.build(config, (NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE), case.block_size)
        self.plan: LayerPlan = self.layer.layer.impl.plan
        self.compaction = self.layer.builder.sparse.compaction
        self.longest_decode: int = self.layer.builder.reorder_batch_threshold
        shape = NUM_KV_HEADS, self.layer.spec.num_states, 2 * HEAD_SIZE
        # Finite, because vLLM's attention requires this beyond the context.
        noise = torch.randint(-(1 << 15), 1 << 15, (_BANK, *shape), dtype=torch.int16, generator=self.generator)
        self._garbage = noise.view(torch.bfloat16).nan_to_num(nan=1e30, posinf=1e30, neginf=-1e30)
        self.cache = torch.zeros(case.num_blocks, *shape, dtype=torch.bfloat16)
        self.poison(range(case.num_blocks))
        self.rows: dict[str, Row] = {}
        self.free_places = list(range(case.max_requests))
        self.table = np.zeros((case.max_requests, -(-MAX_MODEL_LEN // case.block_size)), np.int32)
        self.tokens = Tokens(NUM_KV_HEADS, HEAD_SIZE, self.generator)
        self.truth = Truth(self.plan.statistics, (NUM_KV_HEADS, HEAD_SIZE), case.max_requests, case.block_size)
        self.queries = torch.randn(2048, NUM_HEADS, HEAD_SIZE, generator=self.generator).bfloat16()
        self.counts: Counter[str] = Counter()

    def poison(self, blocks: Sequence[int]) -> None:
        """Overwrites blocks (keys, values and statistics) with noise."""
        if blocks:
            noise = torch.tensor([self.rng.randrange(_BANK) for _ in blocks])
            self.cache[torch.tensor(blocks)] = self._garbage[noise]

    def step(
        self, output: SchedulerOutput, requests: Mapping[str, Request], unknown: Mapping[str, Sequence[int]]
    ) -> None:
        """Computes a step. One without tokens may still end or preempt requests.

        Args:
            output: what the scheduler says.
            requests: its requests by name.
            unknown: tokens of earlier steps that the scheduler does not know yet, by request.

        Raises:
            FaultError: describes a fault after the step.
            KeptError: describes a fault of an eviction.
        """
        rows.preempt(self, output.preempted_req_ids or (), output.num_scheduled_tokens)
        scheduled = self._update(output, requests, unknown)
        if not scheduled:
            return
        lengths = [len(each.tokens) for each in scheduled]
        batch = self._batch(scheduled, lengths)
        positions = [torch.arange(each.computed, each.context) for each in scheduled]
        tokens = torch.tensor([token for each in scheduled for token in each.tokens])
        keys, values = self.tokens.keys_and_values(tokens, torch.cat(positions))
        query = self.queries_of(keys)
        result, _ = self.layer.step(batch, self.cache, query, keys, values)
        parts = zip(scheduled, positions, query.split(lengths), keys.split(lengths), values.split(lengths), strict=True)
        for each, at, queries, of_keys, of_values in parts:
            row = each.row
            if row.kept is not None:
                self._evict(row, each.computed)
            self.truth.write(torch.full_like(at, row.place), at - row.dropped, of_keys, of_values)
            if row.kept is not None:
                row.kept.add(queries, of_keys)
                row.values = torch.cat([row.values, of_values])
            row.written = each.context
        if self.rng.random() < _JUDGED_STEPS:
            index = self.rng.randrange(len(scheduled))
            first = sum(lengths[:index])
            part = slice(first, first + lengths[index])
            self._check_output(scheduled[index], query[part], result[part])
        for each in scheduled:
            if each.row.kept is not None and each.row.kept.moves_at_once:
                self._evict(each.row, each.context)
        self._check_statistics(scheduled)

    def queries_of(self, keys: torch.Tensor) -> torch.Tensor:
        """Draws the queries of tokens with these keys."""
        return self.queries[torch.randint(len(self.queries), (len(keys),), generator=self.generator)]

    def _evict(self, row: Row, computed: int) -> None:
        """Follows what a request gives back when it has computed some tokens."""
        kept = row.kept
        assert kept is not None
        left = kept.due(computed)
        if left == kept.left:
            return
        self.counts["evictions"] += 1
        if kept.retention.slides:
            kept.slide(left)
        else:
            blocks = row.blocks[left : left + len(kept.targets(left)) // self.case.block_size]
            kept.evict(left, self._positions(row, torch.tensor(blocks)))
        heads = torch.arange(NUM_KV_HEADS)[:, None]
        keys, values = (of[kept.held, heads].transpose(0, 1) for of in (kept.keys.bfloat16(), row.values))
        places = torch.full((len(keys),), row.place)
        self.truth.write(places, torch.arange(len(keys)), keys, values)

    def _positions(self, row: Row, blocks: torch.Tensor) -> torch.Tensor:
        """The positions of the tokens in some blocks of a request, `[num_kv_heads, num_tokens]`."""
        assert row.kept is not None
        size, cache = self.case.block_size, self.layer.layer.impl.cache
        token = torch.arange(len(blocks) * size)
        place = blocks[token // size], torch.arange(NUM_KV_HEADS)[:, None], token % size
        written = torch.cat([paged.gather_tokens(*place) for paged in (cache.keys, cache.values)], dim=-1)
        known = torch.cat([row.kept.keys.bfloat16(), row.values], dim=-1).transpose(0, 1)
        found = torch.empty(written.shape[:2], dtype=torch.int64)
        for head in range(NUM_KV_HEADS):
            position = {_bytes(of_token): index for index, of_token in enumerate(known[head])}
            for index, of_token in enumerate(written[head]):
                if _bytes(of_token) not in position:
                    raise KeptError("a kept token is none of the text")
                found[head, index] = position[_bytes(of_token)]
        return found

    def _update(
        self, output: SchedulerOutput, requests: Mapping[str, Request], unknown: Mapping[str, Sequence[int]]
    ) -> list[Scheduled]:
        """Applies the scheduler's output, and returns the requests of the step in vLLM's order."""
        cached = output.scheduled_cached_reqs
        for name in self.rows.keys() - output.num_scheduled_tokens.keys():
            # Finished, aborted or preempted requests. A request that only waits for a step keeps its blocks.
            if name in output.finished_req_ids or name not in requests or not requests[name].num_computed_tokens:
                self._forget(name)
        for name in output.finished_req_ids:
            self.requests.pop(name, None)
            self._forget(name)
        parts = []
        for new in output.scheduled_new_reqs:
            parts.append((new.req_id, new.num_computed_tokens))
            self._begin(new.req_id, new.block_ids[0], new.num_computed_tokens, requests[new.req_id])
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            parts.append((name, computed))
            if name in cached.resumed_req_ids:
                self.counts["resumptions"] += 1
                self._begin(name, blocks[0] if blocks else [], computed, requests[name])
            elif blocks:
                self.rows[name].blocks += blocks[0]
                self.poison(blocks[0])
        scheduled = [self._part(requests[name], computed, output, unknown.get(name, ())) for name, computed in parts]
        return sorted(scheduled, key=self._region)

    def _begin(self, name: str, blocks: list[int], computed: int, request: Request) -> None:
        """Adds a request whose first `computed` tokens came from the prefix cache."""
        self._forget(name)
        row = self.rows[name] = Row(self.free_places.pop(), list(blocks))
        self.requests[name] = request
        hits = computed // self.case.block_size
        self.counts["hits"] += hits > 0
        self.counts["hit_blocks"] += hits
        self.poison(blocks[hits:])
        positions = torch.arange(computed)
        tokens = torch.tensor(request.all_token_ids[:computed], dtype=torch.int64)
        keys, row.values = self.tokens.keys_and_values(tokens, positions)
        self.truth.write(torch.full_like(positions, row.place), positions, keys, row.values)
        row.written = computed
        if self.compaction is not None:
            scale = self.layer.layer.impl.scale
            row.kept = Kept(self.compaction, self.case.block_size, scale, request.num_prompt_tokens, keys)

    def _forget(self, name: str) -> None:
        row = self.rows.pop(name, None)
        if row is not None:
            self.free_places.append(row.place)

    def _part(self, request: Request, computed: int, output: SchedulerOutput, unknown: Sequence[int]) -> Scheduled:
        count = output.num_scheduled_tokens[request.request_id]
        drafts = output.scheduled_spec_decode_tokens.get(request.request_id, [])
        tokens = [*request.all_token_ids[computed : computed + count], *unknown, *drafts][:count]
        row = self.rows[request.request_id]
        if len(tokens) != count or computed > row.written or len(row.blocks) * self.case.block_size < computed + count:
            raise FaultError("the schedule does not match the worker's state")
        self.counts["chunks"] += 0 < computed < request.num_prompt_tokens
        self.counts["decodes"] += computed >= request.num_prompt_tokens
        return Scheduled(request, row, computed, tokens)

    def _region(self, part: Scheduled) -> int:
        """The order of vLLM's `reorder_batch_to_split_decodes_and_prefills`."""
        if not part.computed:
            return 3
        return 2 if len(part.tokens) > self.longest_decode else int(part.is_prefilling)

    def _batch(self, scheduled: Sequence[Scheduled], lengths: Sequence[int]) -> LayerBatch:
        slots = []
        for index, part in enumerate(scheduled):
            # Columns beyond a request's blocks keep old contents, as in vLLM.
            self.table[index, : len(part.row.blocks)] = part.row.blocks
            position = np.arange(part.computed, part.context)
            block = self.table[index, position // self.case.block_size].astype(np.int64)
            slots.append(block * self.case.block_size + position % self.case.block_size)
        self.input_batch = SimpleNamespace(
            num_reqs=len(scheduled),
            req_ids=[part.request.request_id for part in scheduled],
            num_prompt_tokens=np.array([part.request.num_prompt_tokens for part in scheduled]),
        )
        return LayerBatch(
            torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
            torch.tensor([part.context for part in scheduled], dtype=torch.int32),
            torch.from_numpy(self.table[: len(scheduled)].copy()),
            torch.from_numpy(np.concatenate(slots)),
            torch.tensor([part.is_prefilling for part in scheduled]),
        )

    def _check_statistics(self, scheduled: Sequence[Scheduled]) -> None:
        """Compares the statistics of all complete pages of a step's requests, bit by bit."""
        kept = self.layer.layer.impl.statistics_cache
        if kept is None:
            return
        page_size = self.truth.page_size
        per_block = self.case.block_size // page_size
        stored: list[np.ndarray] = []
        wanted: list[np.ndarray] = []
        within: list[np.ndarray] = []
        for part in scheduled:
            page = np.arange(part.seen // page_size)
            stored.append(np.array(part.row.columns())[page // per_block])
            wanted.append(part.row.place * self.truth.blocks_each + page // per_block)
            within.append(page % per_block)
        blocks, places, pages = (torch.from_numpy(np.concatenate(part)) for part in (stored, wanted, within))
        self.counts["pages"] += len(pages)
        assert self.truth.statistics is not None
        for found, right in zip(kept.statistics.parts, self.truth.statistics.parts, strict=True):
            if not torch.equal(_bits(found)[blocks, :, pages], _bits(right)[places, :, pages]):
                raise FaultError("page statistics that are not those of the keys")

    def _check_output(self, part: Scheduled, query: torch.Tensor, result: torch.Tensor) -> None:
        """Compares a request's outputs: of all tokens if it decodes, of one token if it prefills."""
        context, impl = part.seen, self.layer.layer.impl
        decodes = len(query) <= self.longest_decode and not part.is_prefilling
        if not decodes:
            index = self.rng.randrange(len(query))
            context += index + 1 - len(query)
            query, result = query[index : index + 1], result[index : index + 1]
        table = self.truth.table[part.row.place : part.row.place + 1]
        lengths = torch.tensor([context], dtype=torch.int32)
        batch = DecodeBatch(query.contiguous(), table, lengths, dense_tokens=self.plan.dense_tokens)
        if decodes:
            expected = reference_output(self.plan, batch, self.truth.cache, impl.softmax)
            if self.plan.selector is not None:
                pages = context // self.plan.page_size
                self.counts["sparse_rows"] += len(query) * (pages > self.plan.selector.budget_pages)
        else:
            output = DecodeOutput(torch.empty(query.shape))
            split_attention(batch, self.truth.cache, impl.softmax, None, None, 0, output)
            expected = output.heads
        self.counts["judged_rows"] += len(query)
        error = (result.float() - expected).norm(dim=-1)
        if not bool((error <= OUTPUT_TOLERANCE * expected.norm(dim=-1)).all()):
            kind = "decodes" if decodes else "prefills"
            raise FaultError(f"an output of a request that {kind} differs from the reference")


def _bits(part: torch.Tensor) -> torch.Tensor:
    """The elements as bytes if torch cannot gather them."""
    return part.view(torch.uint8) if part.itemsize == 1 else part


def _bytes(elements: torch.Tensor) -> bytes:
    return elements.view(torch.uint8).numpy().tobytes()
