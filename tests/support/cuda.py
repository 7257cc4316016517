"""Cases and inputs of the tests that run CUDA kernels on a GPU."""

from copy import copy
from dataclasses import dataclass

import pytest
import torch
from sparse_kernels.batch import DecodeBatch, DecodeOutput, PageSelection, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.group_routing import GROUP_SCORES, GroupRouting
from sparse_kernels.group_routing.reference import score_groups
from sparse_kernels.hot_pages import HotPages
from sparse_kernels.page_statistics import KINDS, PageStatistics, StatisticsLayout, update_page_statistics
from sparse_kernels.paging import PagedTensor
from sparse_kernels.split_attention import Stopping
from sparse_kernels.stopping import StopRule
from support.families.referee import checked_scores as checked_scores
from support.families.referee import scores_are_close
from support.paged import make_batch

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
"""Marks of these tests."""
SCALE = 0.09
STD_WEIGHT = 0.75


@dataclass(frozen=True)
class Case:
    contexts: tuple[int, ...]
    num_kv_heads: int = 2
    group: int = 4
    head_size: int = 128
    block_size: int = 64
    page_size: int = 8
    format: str = "int8"
    kind: str = "mean_and_spread"
    queries: int = 1
    refined: float = 1.0
    k: int | None = 64
    """None for every page, which needs attention that may stop."""
    dense_tokens: int = 0
    sinks: torch.dtype | None = None
    softcap: float = 0.0
    statistics: bool = True
    eight_bit_cache: bool = False
    skipped: float | None = None
    score: str = "mean"
    seed: int = 0


LEVELED = {
    f"leveled{name}": Case(**{"kind": "leveled_quarters", "format": "int4", "refined": 0.25, "k": 128} | shape)
    for name, shape in {
        "": {"contexts": (8 * 2047 + 3, 8 * 2048, 8 * 2049 + 7, 40001, 1, 0)},
        ", group of 16": {"contexts": (16392, 30003), "group": 16},
        ", one head of 64, small blocks": {
            "contexts": (16392, 30003), "num_kv_heads": 1, "group": 3, "head_size": 64, "block_size": 16, "refined": 0.1
        },
        ", heads of 80, blocks of 48": {"contexts": (20003,), "group": 1, "head_size": 80, "block_size": 48},
        ", heads of 96, pages of 32": {
            "contexts": (90003, 65600), "num_kv_heads": 1, "group": 7, "head_size": 96, "page_size": 32, "k": 32
        },
        ", heads of 256, one page to a block": {
            "contexts": (40003,), "head_size": 256, "group": 2, "page_size": 16, "block_size": 16, "k": 64
        },
        ", heads of 192, blocks of 768": {"contexts": (20003,), "head_size": 192, "group": 4, "block_size": 768},
        ", fp8 cache": {"contexts": (20003, 517), "block_size": 256, "eight_bit_cache": True},
        ", three query tokens": {"contexts": (8 * 2049 + 1, 30003), "queries": 3},
        ", routed": {"contexts": (20003, 517, 30003), "num_kv_heads": 4, "skipped": 0.5},
        ", 1,024 pages": {"contexts": (60003, 20003), "k": 1024},
        ", 65,520 pages": {"contexts": (524160, 70), "num_kv_heads": 1, "group": 2, "head_size": 64},
    }.items()
}  # fmt: skip
"""Cases of contexts that are scored in two levels, and of others."""
CASES = {
    "ragged": Case((3000, 517, 1, 4096, 700)),
    "page boundaries": Case((511, 512, 513, 519, 520, 521, 1024)),
    "multi-head, small blocks": Case((3000, 517, 8, 7, 4096), group=1, block_size=16),
    "group of 2": Case((1777,), group=2),
    "group of 3, pages of 32": Case((2000, 1501), group=3, page_size=32, k=16),
    "group of 8, heads of 64": Case((2000, 1501), group=8, head_size=64, block_size=16),
    "group of 16, pages of 16": Case((2000, 1501), num_kv_heads=1, group=16, page_size=16, k=32),
    "pages of 16 in blocks of 16": Case((2000, 1501), page_size=16, block_size=16, k=32),
    "heads of 256": Case((2000, 1501), head_size=256),
    "bf16 means": Case((3000, 517, 4096), format="bf16"),
    "bf16 means, group of 16": Case((3000, 517, 4096), group=16, head_size=64, format="bf16"),
    "fp8 means": Case((3000, 517, 4096), format="fp8"),
    **{
        f"{kind}{name}": Case(kind=kind, format=stored, **shape)
        for kind, stored in (("quarters", "int4"), ("sketch", "int2"))
        for name, shape in {
            "": {"contexts": (3000, 517, 1, 4096, 700)},
            ", group of 16, pages of 16": {"contexts": (3000, 1501), "group": 16, "page_size": 16, "k": 32},
            ", heads of 64, small blocks": {"contexts": (3000, 517), "group": 3, "head_size": 64, "block_size": 16},
            ", heads of 256, one head": {"contexts": (3000, 517), "group": 1, "head_size": 256},
            ", fp8 cache": {"contexts": (3000, 517, 4096), "block_size": 256, "eight_bit_cache": True},
        }.items()
    },
    "leveled, short": Case((3000, 517, 1, 4096, 700), kind="leveled_quarters", format="int4", refined=0.25),
    **{name: case for name, case in LEVELED.items() if max(case.contexts) < 100_000},
    "bounds": Case((3000, 517, 4096), kind="bounds"),
    "bounds, three query tokens": Case((3000, 517, 4096), kind="bounds", queries=3, head_size=64, format="bf16"),
    "bounds, group of 16": Case((3000, 517), kind="bounds", group=16, page_size=16, k=32, format="fp8"),
    "representatives": Case((3000, 517, 4096), kind="representatives"),
    "representatives in bf16": Case((3000, 517, 4096), kind="representatives", format="bf16"),
    "three query tokens": Case((3000, 517, 4096), queries=3),
    "padded requests": Case((3000, 0, 517, 0)),
    "learned sinks": Case((3000, 517, 4096), sinks=torch.float32),
    "learned sinks in bf16": Case((3000, 517, 4096), sinks=torch.bfloat16),
    "learned sinks in fp16": Case((3000, 517, 4096), sinks=torch.float16),
    "softcap": Case((3000, 517), softcap=20.0),
    "short contexts whole": Case((3000, 517, 4096), dense_tokens=3500),
    "few pages": Case((3000, 517, 4096), k=10),
    "many pages": Case((9000, 517), k=300),
    "fp8 cache": Case((3000, 517, 4096), block_size=256, eight_bit_cache=True),
    "fp8 cache and means, heads of 64": Case(
        (3000, 517), group=8, head_size=64, block_size=256, format="fp8", eight_bit_cache=True
    ),
    "fp8 cache, group of 16": Case((3000, 517), group=16, block_size=512, eight_bit_cache=True),
    "newest pages": Case((3000, 517, 4096), statistics=False),
    "routed": Case((3000, 517, 1, 4096, 700), num_kv_heads=4, skipped=0.6),
    "routed by the largest cosine": Case((511, 512, 513, 1024), num_kv_heads=4, skipped=0.5, score="max"),
    "routed by the least cosine, group of 3": Case((2000, 1501), group=3, skipped=0.5, score="min"),
    "routed multi-head, small blocks": Case((3000, 517, 8, 7, 4096), group=1, block_size=16, skipped=0.6),
    "routed group of 16": Case((3000, 517, 4096), group=16, head_size=64, skipped=0.5),
    "routed heads of 256": Case((2000, 1501), head_size=256, skipped=0.5),
    "routed three query tokens": Case((3000, 517, 4096), queries=3, skipped=0.6),
    "routed padded requests": Case((3000, 0, 517, 0), num_kv_heads=4, skipped=0.5),
    "routed but for short contexts": Case((3000, 517, 4096), dense_tokens=1000, skipped=0.5),
    "routed newest pages": Case((3000, 517, 4096), statistics=False, skipped=0.5),
    "routed bounds": Case((3000, 517, 4096), kind="bounds", skipped=0.5),
    "routed fp8 cache": Case((3000, 517, 4096), group=8, block_size=256, eight_bit_cache=True, skipped=0.5),
    "everything skipped": Case((3000, 517, 4096), skipped=1.0),
    "heads of 80": Case((3000, 517, 1, 4096), head_size=80),
    "heads of 80, fp8 cache": Case((3000, 517, 4096), head_size=80, block_size=256, eight_bit_cache=True),
    "heads of 80, softcap, three query tokens": Case((3000, 517), head_size=80, softcap=20.0, queries=3),
    "heads of 96, routed quarters": Case((3000, 517), head_size=96, kind="quarters", format="int4", skipped=0.5),
    "heads of 96, bounds": Case((3000, 517, 4096), head_size=96, kind="bounds"),
    "heads of 112, group of 16, bf16 means": Case((3000, 517), head_size=112, group=16, format="bf16"),
    "heads of 112, quarters, fp8 cache": Case(
        (3000, 517), head_size=112, kind="quarters", format="int4", block_size=256, eight_bit_cache=True
    ),
    "heads of 192, quarters, one head": Case((3000, 517), head_size=192, group=1, kind="quarters", format="int4"),
    "heads of 192, fp8 means, pages of 32": Case((3000, 4095), head_size=192, format="fp8", page_size=32, k=16),
    "heads of 80, sketch": Case((3000, 517), head_size=80, kind="sketch", format="int2"),
    "heads of 112, sketch": Case((3000, 517), head_size=112, kind="sketch", format="int2"),
    "heads of 160, sketch": Case((3000, 517), head_size=160, kind="sketch", format="int2"),
    "heads of 192, sketch, group of 3": Case((3000, 517), head_size=192, group=3, kind="sketch", format="int2"),
    "heads of 32, small blocks": Case((3000, 517), head_size=32, group=3, block_size=16),
    "heads of 240": Case((3000, 517), head_size=240, group=8),
    "heads of 80, newest pages": Case((3000, 517), head_size=80, statistics=False),
}
BEYOND = {
    "group of 17": Case((3000, 517, 1, 4096), group=17),
    "group of 32, quarters, heads of 64": Case((3000, 517), group=32, head_size=64, kind="quarters", format="int4"),
    "group of 64, fp8 cache": Case((3000, 517), num_kv_heads=1, group=64, block_size=256, eight_bit_cache=True),
    "group of 71, heads of 64": Case((3000, 517, 0), num_kv_heads=1, group=71, head_size=64),
    "group of 32, bounds": Case((3000, 517), group=32, kind="bounds"),
    "group of 32, learned sinks": Case((3000, 517), group=32, sinks=torch.float32),
    "group of 32, routed": Case((3000, 517, 1, 4096), num_kv_heads=4, group=32, head_size=64, skipped=0.5),
    "group of 32, newest pages": Case((3000, 517), group=32, statistics=False),
    "budget of 1,025 pages": Case((8199, 8200, 8207, 8208, 8209, 8216, 40001, 1), head_size=64, k=1025),
    "budget of 2,048 pages": Case((16384, 16391, 16392, 60003, 0), k=2048, kind="quarters", format="int4"),
    "budget of 2,048 pages, heads of 80": Case((16392, 60003), k=2048, head_size=80),
    "budget of 2,048 pages of 16": Case((32767, 32768, 32784, 100003), k=2048, page_size=16, head_size=64),
    "budget of 8,192 pages": Case((65543, 65544, 140005, 5), num_kv_heads=1, k=8192, head_size=64),
    "budget of 2,048 pages, routed": Case((16392, 60003, 700), num_kv_heads=4, k=2048, head_size=64, skipped=0.5),
    "budget of 2,048 pages, softcap and sinks": Case((30003,), k=2048, softcap=20.0, sinks=torch.bfloat16),
    "budget of 2,048 pages, three query tokens": Case((16386, 16393, 30003), k=2048, queries=3, head_size=64),
    "budget of 2,048 newest pages": Case((16391, 16392, 60003), k=2048, head_size=64, statistics=False),
    "budget of 2,048 pages, short contexts whole": Case((30003, 60003), k=2048, head_size=64, dense_tokens=40000),
}
"""Cases of selections that one launch does not serve."""
LONG = {
    "65,536 pages and one": Case((524288, 524295, 524296, 524299, 70), num_kv_heads=1, group=2, head_size=64),
    "131,072 pages and one": Case((1048576, 1048584), num_kv_heads=2, head_size=32, kind="quarters", format="int4"),
    "131,072 pages, leveled": Case(
        (1048579, 900), num_kv_heads=1, head_size=64, kind="leveled_quarters", format="int4", refined=0.25, k=128
    ),
    "131,072 pages, bounds": Case((1048579, 900), num_kv_heads=1, head_size=32, kind="bounds"),
    "131,072 pages, routed": Case((1048579, 900), num_kv_heads=2, head_size=32, skipped=0.5),
    "131,072 pages, two query tokens": Case((1048577, 900), num_kv_heads=1, head_size=32, queries=2),
    "131,072 pages, newest": Case((1048579, 900), num_kv_heads=1, head_size=32, statistics=False),
    "200,000 pages": Case((1600001, 1600000, 900), num_kv_heads=1, head_size=32, k=300),
}
"""Cases of contexts with more pages than one launch numbers."""


class Inputs:
    """A case on the GPU, with garbage outside the contexts."""

    def __init__(self, case: Case) -> None:
        contexts = [max(1, context) for context in case.contexts]
        batch = make_batch(
            contexts, case.num_kv_heads, case.head_size, case.block_size, case.page_size, case.format, case.kind,
            case.seed,
        )  # fmt: skip
        layout = StatisticsLayout(case.page_size, case.head_size, case.format, kind=KINDS[case.kind])
        rows = case.block_size + layout.rows(case.block_size)
        memory = torch.empty(0, dtype=torch.bfloat16).set_(batch.paged_keys.view.untyped_storage())
        cache = memory.view(-1, case.num_kv_heads, rows, 2 * case.head_size)
        self.query_scale = self.key_scale = self.value_scale = None
        if case.eight_bit_cache:
            # Statistics are computed from the keys as stored.
            layout = StatisticsLayout(case.page_size, case.head_size, case.format, 1, KINDS[case.kind])
            eight = cache.nan_to_num(0, 0, 0).clamp(-400, 400).to(torch.float8_e4m3fn)
            more = layout.rows(case.block_size)
            tokens = eight[:, :, : case.block_size]
            cache = torch.cat([tokens.view(torch.uint8), torch.zeros_like(tokens[:, :, :more]).view(torch.uint8)], 2)
            cache = cache.view(torch.float8_e4m3fn)
            self.query_scale, self.key_scale, self.value_scale = (torch.tensor([x]).cuda() for x in (0.5, 1.5, 0.7))
        self.layout = layout
        self.bind(cache.cuda(), case)
        if case.eight_bit_cache:
            pages = torch.arange(len(self.cache) * self.keys.pages_per_block, device=self.cache.device)
            update_page_statistics(
                self.keys, self.statistics, pages // self.keys.pages_per_block, pages % self.keys.pages_per_block
            )
        self.block_table = batch.block_table.int().cuda()
        self.seq_lens = torch.tensor(case.contexts, dtype=torch.int32, device="cuda")
        generator = torch.Generator().manual_seed(case.seed + 1)
        heads, tokens_in_batch = case.num_kv_heads * case.group, len(contexts) * case.queries
        # A slice of a wider tensor, as vLLM's query is.
        wide = torch.randn(tokens_in_batch, heads + 4, case.head_size, generator=generator) * 2
        dtype = torch.float8_e4m3fn if case.eight_bit_cache else torch.bfloat16
        self.query = wide.to(dtype).cuda()[:, :heads]
        self.sinks = torch.randn(heads, generator=generator).to(case.sinks).cuda() if case.sinks else None
        self.routing = None if case.skipped is None else self.forced(case, case.skipped)
        self.budgets: torch.Tensor | None = None
        self.dense_requests: torch.Tensor | None = None
        self.hot: HotPages | None = None

    def bind(self, cache: torch.Tensor, case: Case) -> None:
        """Makes the views of a cache."""
        self.cache, tokens = cache, cache[:, :, : case.block_size]
        self.keys = PagedTensor.from_rows(tokens[..., : case.head_size], case.page_size)
        self.values = PagedTensor.from_rows(tokens[..., case.head_size :], case.page_size)
        self.statistics = self.layout.views(cache[:, :, case.block_size :], case.block_size)

    def in_last_blocks(self, case: Case, size: int) -> "Inputs":
        """The same requests in the last blocks of a cache of `size` bytes. No other byte of it is a number."""
        moved, block = copy(self), self.cache[0].nbytes
        cache = torch.full((size // block * block,), 0xFF, dtype=torch.uint8, device="cuda")
        cache = cache.view(self.cache.dtype).view(-1, *self.cache.shape[1:])
        cache[-len(self.cache) :] = self.cache
        moved.bind(cache, case)
        moved.block_table = self.block_table + (len(cache) - len(self.cache))
        return moved

    def context_lens(self, case: Case) -> torch.Tensor:
        from_end = torch.arange(case.queries - 1, -1, -1, device="cuda")
        return (self.seq_lens[:, None] - from_end).flatten()

    def group_scores(self, case: Case) -> torch.Tensor:
        """Scores of every query token: `[num_tokens, num_kv_heads]`."""
        grouped = self.query.float().unflatten(1, (case.num_kv_heads, case.group))
        blocks = self.block_table[:, 0].repeat_interleave(case.queries)
        return score_groups(grouped, self.keys, blocks, GROUP_SCORES.index(case.score))

    def forced(self, case: Case, share: float) -> GroupRouting:
        """Routing that skips a share of the groups, with a threshold midway between two scores."""
        scores = self.group_scores(case).flatten().sort(descending=True).values
        count = round(share * len(scores))
        around = torch.cat([scores[:1] + 1, scores, scores[-1:] - 1])[count : count + 2]
        coefficients = torch.zeros(case.num_kv_heads, 4, device="cuda")
        coefficients[:, 0] = around.mean()
        counts = torch.zeros(case.num_kv_heads, 2, dtype=torch.int64, device="cuda")
        return GroupRouting(coefficients, case.score, counts=counts)

    def batch(self, case: Case) -> DecodeBatch:
        return DecodeBatch(
            self.query, self.block_table, self.seq_lens, self.dense_requests, case.dense_tokens, self.query_scale,
            budgets=self.budgets,
        )  # fmt: skip

    def kv(self, case: Case) -> KVCache:
        statistics: PageStatistics | None = self.statistics if case.statistics else None
        return KVCache(self.keys, self.values, statistics, self.key_scale, self.value_scale, self.hot)

    def softmax(self, case: Case) -> Softmax:
        return Softmax(SCALE, case.softcap, self.sinks)

    def decode_arguments(self, case: Case, rule: StopRule | None = None) -> tuple[object, ...]:
        assert case.k is not None
        selection = PageSelection(case.k, 1, 1 if case.statistics else 0, STD_WEIGHT, case.refined)
        return self.batch(case), self.kv(case), self.softmax(case), selection, self.routing, rule

    def split_arguments(self, case: Case, stopping: Stopping | None = None, splits: int = 64) -> tuple[object, ...]:
        return self.batch(case), self.kv(case), self.softmax(case), self.routing, stopping, splits

    def row(self, row: int) -> "Inputs":
        """The request of a row alone, without a budget."""
        alone, tokens = copy(self), len(self.query) // len(self.seq_lens)
        alone.query, alone.block_table = self.query[row * tokens : (row + 1) * tokens], self.block_table[row : row + 1]
        alone.seq_lens, alone.budgets = self.seq_lens[row : row + 1], None
        if self.dense_requests is not None:
            alone.dense_requests = self.dense_requests[row : row + 1]
        return alone

    def asking(self, budgets: tuple[int, ...], dense: int | None = None) -> "Inputs":
        """The same requests with budgets; `dense` is an optional request that is attended whole."""
        self.budgets = torch.tensor(budgets, dtype=torch.int32, device=self.query.device)
        if dense is not None:
            self.dense_requests = torch.arange(len(budgets), device=self.query.device) == dense
        return self

    def empty_output(self) -> DecodeOutput:
        return DecodeOutput(torch.full(self.query.shape, torch.nan, dtype=torch.bfloat16, device="cuda"))


def stopping_inputs(case: Case) -> Inputs:
    """Queries; every second one matches one of the newest keys."""
    inputs = Inputs(case)
    shape = inputs.query.shape
    query = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 0.5
    for token in range(shape[0]):
        request = token // case.queries
        newest = max(int(inputs.seq_lens[request]) - 9, 0)
        block = int(inputs.block_table[request, newest // case.block_size])
        key = inputs.cache[block, :, newest % case.block_size, : case.head_size].float().cpu()
        strength = 1.5 if token % 2 == 0 else 0.2
        query[token] += (strength * (128 / case.head_size) * key).repeat_interleave(case.group, dim=0)
    inputs.query = query.to(inputs.query.dtype).to(inputs.query.device)
    return inputs


def launches(group: int, head_size: int) -> list[object]:
    from sparse_kernels.cuda.shared_memory import least_cluster
    from sparse_kernels.sparse_decode.launches import Launch

    if torch.cuda.get_device_capability() < (9, 0):
        return [Launch(False, 1, 8, 1), Launch(False, 1, 8, 1, listed=True)]
    # What has wide groups of wide heads needs a cluster to hold its sums.
    least = least_cluster(group, head_size)
    scored = [Launch(False, 2 * least, 8, 1), Launch(False, least, 8, 1, listed=True)]
    found = [Launch(True, least, 8, 1, most_fused=most, chunk=chunk) for most, chunk in ((100, 1024), (0, 4096))]
    return [Launch(True, least, 8, 1), Launch(True, 8, 16, 1), *found, *scored]


def decode(inputs: Inputs, case: Case, launch: object = None) -> torch.Tensor:
    from sparse_kernels.sparse_decode import cuda

    output = inputs.empty_output()
    cuda.sparse_decode(*inputs.decode_arguments(case), output, launch)
    return output.heads


def assert_a_graph_serves(case: Case, all_lengths: tuple[tuple[int, ...], ...]) -> None:
    """A captured decode step has the bits of a new one at other lengths."""
    from sparse_kernels.sparse_decode import cuda

    inputs = Inputs(case)
    decode(inputs, case)
    out = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.sparse_decode(*inputs.decode_arguments(case), DecodeOutput(out))
    for lengths in all_lengths:
        inputs.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, decode(inputs, case))


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Weights and outputs are rounded to bfloat16 (2^-9 each). If outputs over selected pages nearly cancel, the error
    is relative to the whole output."""
    error = (actual.float() - expected.float()).norm(dim=-1)
    assert bool((error <= 2**-7 * expected.float().norm(dim=-1)).all()), error.max()


def assert_scores_close(actual: torch.Tensor, expected: torch.Tensor, lengths: torch.Tensor) -> None:
    assert scores_are_close(actual, expected, lengths)


def in_pieces(inputs: Inputs, case: Case) -> torch.Tensor:
    from sparse_kernels.sparse_decode import cuda

    batch, cache, softmax, selection, routing, _ = inputs.decode_arguments(case)
    output = inputs.empty_output()
    cuda.decode_in_pieces(batch, cache, softmax, selection, routing, output)
    return output.heads


def split(inputs: Inputs, case: Case, splits: int = 64, launch: object = None) -> torch.Tensor:
    from sparse_kernels.split_attention import cuda

    output = inputs.empty_output()
    cuda.split_attention(*inputs.split_arguments(case, splits=splits), output, launch)
    return output.heads
