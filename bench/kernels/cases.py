"""The measured cases: the model's shape, the cases of each kind of operation, and their grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from sparse_kernels.batch import PageSelection
from sparse_kernels.block_prefill import BlockRule
from sparse_kernels.page_statistics import KINDS, RecordFormat, StatisticsLayout

from bench.common.options import GridRow, parse_grid, size_text

Statistics = RecordFormat | Literal["leveled"]
"""Statistics of a case: a format says which kind; `leveled` is quarters in two levels."""
DEFAULT_FORMAT: Statistics = "int4"
FORMATS: tuple[Statistics, ...] = ("int4", "leveled", "int8", "int2", "fp8", "bf16")
_LEVELED = "leveled_quarters"


@dataclass(frozen=True)
class Geometry:
    """Shape of the attention layer and the settings of the selection, the same in every case."""

    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 64
    page_size: int = 8
    k: int = 64
    sink_pages: int = 1
    recent_pages: int = 1
    std_weight: float = 0.75
    refined: float = 0.25
    """Share of a long row's pages that leveled statistics score whole."""
    dense_tokens: int = BlockRule.dense_tokens
    """Tokens of a prompt before this position are dense."""

    @property
    def pages_per_block(self) -> int:
        """Pages in a block of the cache."""
        return self.block_size // self.page_size

    @property
    def selection(self) -> PageSelection:
        """The pages that a decode step reads."""
        return PageSelection(self.k, self.sink_pages, self.recent_pages, self.std_weight, self.refined)

    @property
    def scale(self) -> float:
        """Factor of the logits."""
        return float(self.head_size**-0.5)

    def layout(self, statistics: Statistics) -> StatisticsLayout:
        """The layout of the statistics of a block; the cache is bfloat16."""
        if statistics == "leveled":
            kind = KINDS[_LEVELED]
            return StatisticsLayout(self.page_size, self.head_size, kind.formats[0], kind=kind)
        kind = next(kind for kind in KINDS.values() if statistics in kind.formats)
        return StatisticsLayout(self.page_size, self.head_size, statistics, kind=kind)

    def block_elements(self, statistics: Statistics) -> int:
        """Elements of a block, statistics included."""
        rows = self.block_size + self.layout(statistics).rows(self.block_size)
        return self.num_kv_heads * rows * 2 * self.head_size


@dataclass(frozen=True)
class DecodeCase:
    """A decode step: a new token for each of `batch` requests."""

    batch: int
    context: int
    group: int
    """Query heads per KV head."""
    format: Statistics = DEFAULT_FORMAT
    """The page statistics: `int4` is quarters, `leveled` quarters in two levels, `int2` sketches, others means."""

    @property
    def name(self) -> str:
        """In the grammar of vLLM's attention benchmarks: requests, query tokens, context."""
        text = f"{self.batch}q1s{size_text(self.context)} g{self.group}"
        return text if self.format == DEFAULT_FORMAT else f"{text} {self.format}"

    def lengths(self, geometry: Geometry) -> list[int]:
        """Tokens of each request, the new one included.

        Lengths differ in their position within a page: one of eight requests completes a page, as on average. The first
        request does, so a batch of one always includes this cost.
        """
        return [self.context - request % geometry.page_size for request in range(self.batch)]

    def blocks(self, geometry: Geometry) -> int:
        """Blocks of the cache that the requests take."""
        return self.batch * -(-self.context // geometry.block_size)


@dataclass(frozen=True)
class PrefillCase:
    """A step of one prompt: its newest tokens attend to the prompt so far."""

    context: int
    """Tokens of the prompt so far, the chunk included; a multiple of the block size."""
    chunk: int
    """Query tokens; a multiple of the block size."""
    group: int
    format: Statistics = DEFAULT_FORMAT

    @property
    def name(self) -> str:
        """See `DecodeCase.name`."""
        return f"1q{size_text(self.chunk)}s{size_text(self.context)} g{self.group}"

    def blocks(self, geometry: Geometry) -> int:
        """Blocks of the cache that the prompt takes."""
        return -(-self.context // geometry.block_size)


@dataclass(frozen=True)
class TopKCase:
    """Selection alone: `rows` (token, KV head) pairs with `pages` scores each."""

    rows: int
    pages: int

    @property
    def name(self) -> str:
        """Rows x pages."""
        return f"{self.rows} x {size_text(self.pages)}"


CacheCase = DecodeCase | PrefillCase
"""A case with a cache."""
Case = CacheCase | TopKCase

OPS = ("decode", "topk", "score", "stop", "budgets", "whole", "prefill", "tokens")
"""Most important first, so that an interrupted run has these."""
_OF_EACH_GROUP = ("decode", "score", "stop")
"""Operations that are measured with every group size, others with the first."""


@dataclass(frozen=True)
class Grid:
    """Cases to measure: values for each dimension."""

    ops: Sequence[str] = OPS
    steps: Sequence[GridRow] = parse_grid(["2K,8K,32K,128K,512K=1,4,8,32"])
    """Contexts and batches of decode steps."""
    groups: Sequence[int] = (4, 8, 1)
    formats: Sequence[Statistics] = (DEFAULT_FORMAT, "int8", "int2", "fp8", "bf16")
    rows: Sequence[int] = (8, 64, 256)
    pages: Sequence[int] = (1024, 4096, 16384, 65536, 131072)
    prompts: Sequence[int] = (131072, 32768)
    chunks: Sequence[int] = (8192, 2048)
    whole_prompts: Sequence[int] = (16384, 32768)
    """Prompts in one chunk, as ZipVL takes them."""

    def plan(self) -> list[tuple[str, Case]]:
        """Operations and cases in the order of measurement.

        The first group size comes first, with everything that does not depend on it. Formats other than the first come
        last, because each needs a new cache. For the second format, the whole decode step of the first group is
        measured too. For other formats only scoring is measured, because nothing else reads the statistics. Scoring in
        two levels is part of the decode step.
        """
        plan = [
            (op, case)
            for place, group in enumerate(self.groups)
            for op in OPS
            if op in self.ops and (place == 0 or op in _OF_EACH_GROUP)
            for case in self._cases(op, group)
        ]
        for place, other in enumerate(self.formats[1:]):
            if "decode" in self.ops and place == 0:
                plan += [("decode", case) for case in self._decode_cases(self.groups[0], other)]
            if "score" in self.ops and other != "leveled":
                plan += [("score", case) for group in self.groups for case in self._decode_cases(group, other)]
        return plan

    def _cases(self, op: str, group: int) -> Sequence[Case]:
        if op == "topk":
            return [TopKCase(rows, pages) for rows in self.rows for pages in self.pages]
        if op == "prefill":
            return [PrefillCase(*each, group) for each in product(self.prompts, self.chunks)]
        if op == "tokens":
            return [PrefillCase(tokens, tokens, group) for tokens in self.whole_prompts]
        return self._decode_cases(group, self.formats[0])

    def _decode_cases(self, group: int, statistics: Statistics) -> list[DecodeCase]:
        steps = sorted((batch, row.context) for row in self.steps for batch in row.batches)
        return [DecodeCase(batch, context, group, statistics) for batch, context in steps]


QUICK = Grid(
    steps=parse_grid(["8K,128K=1,32"]),
    groups=(4,),
    formats=(DEFAULT_FORMAT, "int8"),
    rows=(8, 256),
    pages=(4096, 16384),
    prompts=(131072,),
)
"""A small grid that takes two minutes."""
