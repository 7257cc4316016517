"""The operations share these frozen arguments of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from sparse_kernels.paging import PagedTensor

QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
"""Dtypes of queries that the GPU kernels take."""
MOST_STRIPES = 64
"""Stripes, at most, of a long context that is attended whole: `MOST_STRIPES` in whole.cuh."""
WHOLE_COUNTERS = 2
"""Numbers in `arrived` before those of rows: `WHOLE_COUNTERS` in whole.cuh."""
WHOLE_TOKENS = 4096
"""Longer contexts are cut into stripes where they are attended whole: `WHOLE_TOKENS` in whole.cuh."""


class StripesRoom(NamedTuple):
    """Room for the stripes of listed requests."""

    values: torch.Tensor
    """`[requests * rows * MOST_STRIPES * group_size * head_size]` float32."""
    weights: torch.Tensor
    """At least `[requests * rows * MOST_STRIPES * group_size * 2]` float32."""
    requests: int
    """How many requests have room."""


@dataclass(frozen=True)
class LongDenseRequests:
    """Lists long requests that are attended whole. On a GPU all thread blocks of a decode step share their stripes; a
    request that is not listed is read by its own blocks, which takes longer and gives the same bits."""

    requests: torch.Tensor
    """`[1 + most]` int32: how many requests are listed, then which. CUDA graphs may read it."""
    scratch: torch.Tensor
    """`[n]` float32, see `scratch_numbers`. Calls which follow each other may share it."""
    arrived: torch.Tensor
    """`[n]` int32 zeros, see `arrived_numbers`; every call leaves zeros behind."""
    first_request: int = 0
    """Index of the batch's first request in the list's numbers."""

    @staticmethod
    def scratch_numbers(rows: int, group_size: int, head_size: int) -> int:
        """Returns the float32 numbers of scratch that a request takes.

        Args:
            rows: query tokens of a request times KV heads.
            group_size: query heads to a KV head.
            head_size: elements of a head.
        """
        return rows * MOST_STRIPES * group_size * (head_size + 2)

    @staticmethod
    def arrived_numbers(requests: int, rows: int) -> int:
        """Returns the numbers of `arrived` for some requests of `rows` query tokens times KV heads."""
        return WHOLE_COUNTERS + requests * rows

    def room(self, rows: int, group_size: int, head_size: int) -> StripesRoom:
        """Divides the scratch; arguments are those of `scratch_numbers`."""
        requests = len(self.scratch) // self.scratch_numbers(rows, group_size, head_size)
        requests = min(requests, (len(self.arrived) - WHOLE_COUNTERS) // rows)
        values = requests * rows * MOST_STRIPES * group_size * head_size
        return StripesRoom(self.scratch[:values], self.scratch[values:], requests)


@dataclass(frozen=True)
class DecodeBatch:
    """Requests that decode, each with the same number of query tokens, which are the last of its context.

    The query tokens of a request are consecutive. A query token without a context belongs to a request that pads the
    batch; its output is zero.
    """

    query: torch.Tensor
    """`[num_tokens, num_query_heads, head_size]`, any strides but a contiguous last dimension."""
    block_table: torch.Tensor
    """`[num_requests, max_blocks]` int32, physical block ids."""
    seq_lens: torch.Tensor
    """`[num_requests]` int32, tokens of each request's context, its query tokens included."""
    dense_requests: torch.Tensor | None = None
    """`[num_requests]` bool, requests that are attended whole whatever their length; None for none."""
    dense_tokens: int = 0
    """Contexts of up to this many tokens are attended whole."""
    query_scale: torch.Tensor | None = None
    """One float32: a float8 query times this is the query. Scoring pages and routing groups take the query as it is
    stored, since a positive factor changes neither order nor angle."""
    max_context: int | None = None
    """Tokens of the longest context that there may be; None for what the rows of the block table have room for. A CUDA
    graph may not be replayed with longer ones."""
    budgets: torch.Tensor | None = None
    """`[num_requests]` int32, complete pages that a selection reads of each request: at least those that are always
    read, at most the selection's `k`; None for `k` of all. Within a step in pieces on CUDA, `[num_tokens,
    num_kv_heads]`, of each row."""
    pages: torch.Tensor | None = None
    """`[num_tokens, num_kv_heads, selection.k]` int32, contiguous: the complete pages that each row attends, in this
    order, besides the incomplete page. Nothing is scored or selected then. -1 stands for no page, and so does every
    number that is not a complete page of the context. A row with a budget takes its pages from the first `budget`
    places. Rows that are attended whole ignore their list. None where a selection chooses the pages."""
    whole: LongDenseRequests | None = None
    """The long dense requests known to the host; None for none. No output depends on it."""

    @property
    def num_tokens(self) -> int:
        """Query tokens of the batch."""
        return self.query.shape[0]

    @property
    def num_requests(self) -> int:
        """Requests of the batch."""
        return len(self.seq_lens)

    @property
    def tokens_per_request(self) -> int:
        """Query tokens of each request."""
        return self.num_tokens // self.num_requests

    @property
    def head_size(self) -> int:
        """Elements of a query head."""
        return self.query.shape[2]

    def group_size(self, num_kv_heads: int) -> int:
        """Returns how many query heads share a KV head."""
        return self.query.shape[1] // num_kv_heads

    def context_lens(self) -> torch.Tensor:
        """Returns the tokens of each query token's context, itself included: `[num_tokens]` int32, at most 0 for
        padding."""
        contexts = self.seq_lens
        if self.tokens_per_request > 1:
            from_end = torch.arange(self.tokens_per_request - 1, -1, -1, dtype=torch.int32, device=contexts.device)
            contexts = (contexts[:, None] - from_end).flatten()
        return contexts

    def is_dense(self) -> torch.Tensor:
        """Returns which query tokens are attended whole whatever a selection says: `[num_tokens]` bool."""
        dense = self.context_lens() <= self.dense_tokens
        if self.dense_requests is not None:
            dense = dense | self.dense_requests.repeat_interleave(self.tokens_per_request)
        return dense

    def num_pages(self, page_size: int) -> torch.Tensor:
        """Returns the complete pages of each query token's context: `[num_tokens]` int32."""
        return (self.context_lens() // page_size).clamp(min=0)

    def query_tokens(self, num_kv_heads: int) -> QueryTokens:
        """Returns the query tokens, padding included, each with the block table of its request, in int64."""
        table = self.block_table.long()
        if self.tokens_per_request > 1:
            table = table.repeat_interleave(self.tokens_per_request, dim=0)
        return QueryTokens(self.query.unflatten(1, (num_kv_heads, -1)), table, self.context_lens().long())

    def requests(self, first: int, last: int) -> DecodeBatch:
        """Returns the batch of the requests from `first` to before `last`."""
        tokens = slice(first * self.tokens_per_request, last * self.tokens_per_request)
        dense = None if self.dense_requests is None else self.dense_requests[first:last]
        budgets = None if self.budgets is None else self.budgets[first:last]
        pages = None if self.pages is None else self.pages[tokens]
        whole = self.whole and replace(self.whole, first_request=self.whole.first_request + first)
        return DecodeBatch(
            query=self.query[tokens],
            block_table=self.block_table[first:last],
            seq_lens=self.seq_lens[first:last],
            dense_requests=dense,
            dense_tokens=self.dense_tokens,
            query_scale=self.query_scale,
            max_context=self.max_context,
            budgets=budgets,
            pages=pages,
            whole=whole,
        )

    def token_budgets(self) -> torch.Tensor | None:
        """Returns the budget of each query token, `[num_tokens]` int32; None where there are none."""
        if self.budgets is None or self.tokens_per_request == 1:
            return self.budgets
        return self.budgets.repeat_interleave(self.tokens_per_request)

    def check(self, num_kv_heads: int, head_size: int) -> None:
        """Raises ValueError unless the tensors are those of one batch for a cache of these heads."""
        _check_tensor("query", self.query, QUERY_DTYPES if self.query.is_cuda else (*QUERY_DTYPES, torch.float32), 3)
        _check_tensor("block_table", self.block_table, (torch.int32,), 2)
        _check_tensor("seq_lens", self.seq_lens, (torch.int32,), 1)
        if self.num_requests == 0 or self.num_tokens % self.num_requests:
            raise ValueError(
                f"query: got {self.num_tokens} tokens, allowed: a multiple of the {self.num_requests} requests"
            )
        _check_heads(self.query, num_kv_heads, head_size)
        if len(self.block_table) != self.num_requests:
            raise ValueError(
                f"block_table: got {len(self.block_table)} rows, allowed: one for each of {self.num_requests} requests"
            )
        if self.dense_requests is not None:
            _check_tensor("dense_requests", self.dense_requests, (torch.bool,), 1)
            if len(self.dense_requests) != self.num_requests:
                raise ValueError(
                    f"dense_requests: got {len(self.dense_requests)} requests, allowed: {self.num_requests}"
                )
        if self.budgets is not None:
            _check_tensor("budgets", self.budgets, (torch.int32,), 1)
            if len(self.budgets) != self.num_requests or not self.budgets.is_contiguous():
                raise ValueError(f"budgets: got {len(self.budgets)}, allowed: {self.num_requests}, contiguous")


class Copies(NamedTuple):
    """Copies of the blocks of a batch, which are attended to instead of the blocks of its cache."""

    keys: PagedTensor
    values: PagedTensor
    """The values, with pages of the same size."""
    block_table: torch.Tensor
    """`[num_requests, max_blocks]` int32, the blocks of each request among the copies."""


@dataclass(frozen=True)
class PrefillBatch:
    """Requests that prefill: the query tokens of each, its chunk, are consecutive and the last of its context.

    A request without query tokens, or without a context, pads the batch, and so do tokens after those of the last
    request; their outputs are zero.
    """

    query: torch.Tensor
    """`[num_tokens, num_query_heads, head_size]`, any strides but a contiguous last dimension."""
    query_start: torch.Tensor
    """`[num_requests + 1]` int32, where the tokens of each request begin in the batch; then where the last end."""
    block_table: torch.Tensor
    """`[num_requests, max_blocks]` int32, physical block ids."""
    seq_lens: torch.Tensor
    """`[num_requests]` int32, tokens of each request's context, its query tokens included."""
    max_query_tokens: int
    """Query tokens of a request, at most; a bound that the host knows, since it does not read the lengths."""
    max_seq_tokens: int
    """Tokens of a context, at most; a bound that the host knows."""
    query_scale: torch.Tensor | None = None
    """One float32: a float8 query times this is the query."""
    copies: Copies | None = None
    """Of the blocks, for `prefill_blocks` only; None: attend to the blocks of the cache."""

    @property
    def num_tokens(self) -> int:
        """Query tokens of the batch, padding included."""
        return self.query.shape[0]

    @property
    def num_requests(self) -> int:
        """Requests of the batch."""
        return len(self.seq_lens)

    @property
    def query_lens(self) -> torch.Tensor:
        """Query tokens of each request: `[num_requests]` int32."""
        return self.query_start[1:] - self.query_start[:-1]

    def group_size(self, num_kv_heads: int) -> int:
        """Returns how many query heads share a KV head."""
        return self.query.shape[1] // num_kv_heads

    def grouped(self, num_kv_heads: int) -> torch.Tensor:
        """Returns the queries `[num_tokens, num_kv_heads, group_size, head_size]`."""
        grouped: torch.Tensor = self.query.unflatten(1, (num_kv_heads, -1))
        return grouped

    def requests(self, first: int, last: int) -> PrefillBatch:
        """Returns the requests from `first` to before `last`, with the query of the whole batch."""
        copies = self.copies
        return replace(
            self,
            query_start=self.query_start[first : last + 1],
            block_table=self.block_table[first:last],
            seq_lens=self.seq_lens[first:last],
            copies=copies and copies._replace(block_table=copies.block_table[first:last]),
        )

    def check(self, num_kv_heads: int, head_size: int) -> None:
        """Raises ValueError unless the tensors are those of one batch for a cache of these heads."""
        _check_tensor("query", self.query, QUERY_DTYPES if self.query.is_cuda else (*QUERY_DTYPES, torch.float32), 3)
        _check_tensor("query_start", self.query_start, (torch.int32,), 1)
        _check_tensor("block_table", self.block_table, (torch.int32,), 2)
        _check_tensor("seq_lens", self.seq_lens, (torch.int32,), 1)
        _check_heads(self.query, num_kv_heads, head_size)
        copied = self.num_requests if self.copies is None else len(self.copies.block_table)
        for name, got, allowed in (
            ("query_start", len(self.query_start), self.num_requests + 1),
            ("block_table", len(self.block_table), self.num_requests),
            ("copies.block_table", copied, self.num_requests),
        ):
            if got != allowed or self.num_requests == 0:
                raise ValueError(f"{name}: got {got} rows, allowed: {allowed} for {self.num_requests} requests, not 0")
        for name, bound in (("max_query_tokens", self.max_query_tokens), ("max_seq_tokens", self.max_seq_tokens)):
            if bound < 1:
                raise ValueError(f"{name}: got {bound}, allowed: at least 1")


@dataclass(frozen=True)
class Prompts:
    """Where the chunks of prompts of a step lie, as host and device know it; plans made of it serve all layers."""

    query_start: torch.Tensor
    """`[num_requests + 1]` int32, where the tokens of each request begin in the batch."""
    block_table: torch.Tensor
    """`[num_requests, max_blocks]` int32, physical block ids."""
    seq_lens: torch.Tensor
    """`[num_requests]` int32, tokens of each request's context, its query tokens included."""
    query_lens: tuple[int, ...]
    """Query tokens of each request, as the host knows them."""
    longest: tuple[int, ...]
    """An upper bound of each request's context, as the host knows it."""

    def __len__(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """Query tokens of all requests."""
        return sum(self.query_lens)

    def part(self, first: int, last: int) -> Prompts:
        """Returns the prompts from `first` to before `last`; their tokens begin at 0."""
        before = sum(self.query_lens[:first])
        return Prompts(
            self.query_start[first : last + 1] - before, self.block_table[first:last], self.seq_lens[first:last],
            self.query_lens[first:last], self.longest[first:last],
        )  # fmt: skip

    def batch(self, query: torch.Tensor, query_scale: torch.Tensor | None = None) -> PrefillBatch:
        """Returns the batch of these prompts with a layer's queries; see `PrefillBatch`."""
        return PrefillBatch(
            query=query,
            query_start=self.query_start,
            block_table=self.block_table,
            seq_lens=self.seq_lens,
            max_query_tokens=max(self.query_lens),
            max_seq_tokens=max(self.longest),
            query_scale=query_scale,
        )


@dataclass(frozen=True)
class QueryTokens:
    """Query tokens that each have a context and a row of the block table of their own."""

    query: torch.Tensor
    """`[num_tokens, num_kv_heads, group_size, head_size]`, float16, bfloat16 or float32."""
    block_table: torch.Tensor
    """`[num_tokens, max_blocks]` integer, physical block ids of each token's request."""
    context_lens: torch.Tensor
    """`[num_tokens]` integer, tokens that each query token may attend, itself included; at least 1."""

    def __len__(self) -> int:
        return self.query.shape[0]

    def __getitem__(self, tokens: slice | torch.Tensor) -> QueryTokens:
        return QueryTokens(self.query[tokens], self.block_table[tokens], self.context_lens[tokens])

    def num_pages(self, page_size: int) -> torch.Tensor:
        """Returns the complete pages of each context: `[num_tokens]` integer."""
        return self.context_lens // page_size

    def check(self, num_kv_heads: int, head_size: int) -> None:
        """Raises ValueError unless the query has these KV heads."""
        shape = self.query.shape[1], self.query.shape[3]
        if shape != (num_kv_heads, head_size):
            raise ValueError(
                f"query: got {shape[0]} KV heads of size {shape[1]}, allowed: the keys' {num_kv_heads} of size "
                f"{head_size}"
            )


@dataclass(frozen=True)
class Softmax:
    """How logits become weights."""

    scale: float
    """Factor of the logits, usually `head_size ** -0.5`."""
    softcap: float = 0.0
    """Logits become `softcap * tanh(logits / softcap)`; 0 for none."""
    sink_logits: torch.Tensor | None = None
    """Learned sink logits `[num_query_heads]`, bfloat16, float16 or float32: they join the softmax's denominator and
    nothing else."""

    def check(self, num_query_heads: int) -> None:
        """Raises ValueError unless there is a sink logit for every query head, or none at all."""
        if self.sink_logits is not None and self.sink_logits.numel() != num_query_heads:
            raise ValueError(f"sink_logits: got {self.sink_logits.numel()} logits, allowed: {num_query_heads}")


@dataclass(frozen=True)
class PageSelection:
    """Which complete pages of a context a decode step reads, per KV head."""

    k: int
    """Complete pages that are read, besides the incomplete last one. Contexts of at most as many are read whole. Where
    requests have budgets of their own, what the largest may be."""
    sink_pages: int = 0
    """Leading pages among them, whatever the query."""
    recent_pages: int = 0
    """Newest complete pages among them, whatever the query."""
    std_weight: float = 0.0
    """lambda, the weight of the spread in a page's score (UNIQUE, Eq. 3)."""
    refined: float = 1.0
    """Share of a long row's pages that leveled statistics score whole, see `page_score.score_pages`."""

    @property
    def least(self) -> int:
        """The smallest `k`: the pages that are always read, or one."""
        return max(self.sink_pages + self.recent_pages, 1)

    def check(self) -> None:
        """Raises ValueError unless the pages that are always read fit, and the share is one."""
        if not 0 < self.refined <= 1:
            raise ValueError(f"refined: got {self.refined}, allowed: above 0, at most 1")
        for name in ("sink_pages", "recent_pages"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed: at least 0")
        if self.k < self.least:
            raise ValueError(f"k: got {self.k}, allowed: at least {self.least}")


@dataclass(frozen=True)
class DecodeOutput:
    """Where a decode step writes."""

    heads: torch.Tensor
    """`[num_tokens, num_query_heads, head_size]` float16 or bfloat16, rows of heads contiguous."""
    pages_read: torch.Tensor | None = None
    """`[num_tokens, num_kv_heads]` int32, under a stop rule: pages read before the stop, 0 for skipped groups."""
    counters: torch.Tensor | None = None
    """`[num_kv_heads, 4]` int64 that rows which may stop and are not skipped add to: see `stopping.count_reads`."""
    pages: torch.Tensor | None = None
    """`[num_tokens, num_kv_heads, selection.k]` int32, contiguous: where `sparse_decode` writes the pages that it
    chose, -1 behind the last. Rows that are attended whole, skipped groups and padding get -1. As `DecodeBatch.pages`
    of a step with the same arguments, they give the same output. The order is the one in which pages are attended; it
    differs between platforms. Not together with `DecodeBatch.pages`."""

    @classmethod
    def like(cls, query: torch.Tensor) -> DecodeOutput:
        """Makes room for the attention of a query, in its dtype; in bfloat16 for a float8 query."""
        dtype = torch.bfloat16 if query.dtype.itemsize == 1 else query.dtype
        return cls(torch.empty(query.shape, dtype=dtype, device=query.device))

    def tokens(self, first: int, last: int) -> DecodeOutput:
        """Returns the output of the query tokens from `first` to before `last`."""
        pages_read = None if self.pages_read is None else self.pages_read[first:last]
        pages = None if self.pages is None else self.pages[first:last]
        return DecodeOutput(self.heads[first:last], pages_read, self.counters, pages)

    def check(self, batch: DecodeBatch, num_kv_heads: int) -> None:
        """Raises ValueError unless there is room for a batch's output, and for what is counted of it."""
        _check_tensor("output", self.heads, (torch.bfloat16, torch.float16), 3)
        rooms = [("output", self.heads, tuple(batch.query.shape))]
        if self.pages_read is not None:
            rooms.append(("pages_read", self.pages_read, (batch.num_tokens, num_kv_heads)))
        if self.counters is not None:
            rooms.append(("counters", self.counters, (num_kv_heads, 4)))
        for name, tensor, shape in rooms:
            if tuple(tensor.shape) != shape or tensor.device != batch.query.device:
                allowed = f"{list(shape)} on {batch.query.device}"
                raise ValueError(f"{name}: got {list(tensor.shape)} on {tensor.device}, allowed: {allowed}")
        _, num_heads, head_size = self.heads.shape
        if num_heads > 1 and self.heads.stride(1) != head_size:
            got = f"{self.heads.stride(1)} elements from a head to the next"
            raise ValueError(f"output: got {got}, allowed: {head_size}")


def check_pages(name: str, pages: torch.Tensor, shape: tuple[int, int, int], device: torch.device) -> None:
    """Raises ValueError unless lists of pages are contiguous int32 of a shape and on a device."""
    if pages.dtype != torch.int32 or tuple(pages.shape) != shape or pages.device != device or not pages.is_contiguous():
        got = f"{str(pages.dtype).removeprefix('torch.')} {list(pages.shape)} on {pages.device}"
        got += "" if pages.is_contiguous() else ", not contiguous"
        raise ValueError(f"{name}: got {got}, allowed: int32 {list(shape)} on {device}, contiguous")


def _check_heads(query: torch.Tensor, num_kv_heads: int, head_size: int) -> None:
    """Raises ValueError unless the query heads are those of a cache of these heads."""
    _, num_query_heads, query_size = query.shape
    if num_query_heads % num_kv_heads or query_size != head_size:
        raise ValueError(
            f"query: got {num_query_heads} heads of size {query_size}, allowed: a multiple of {num_kv_heads} "
            f"heads of size {head_size}"
        )


def _check_tensor(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], dimensions: int) -> None:
    """Raises ValueError unless a tensor is of one of the dtypes and its last dimension is contiguous."""
    if tensor.dtype not in dtypes or tensor.dim() != dimensions or (tensor.numel() and tensor.stride(-1) != 1):
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = f"{str(tensor.dtype).removeprefix('torch.')} of {tensor.dim()} dimensions, strides {tensor.stride()}"
        raise ValueError(f"{name}: got {got}, allowed: {allowed} of {dimensions}, the last one contiguous")
