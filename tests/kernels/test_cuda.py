"""The CUDA kernels against the torch references, on a GPU."""

import math
from copy import copy
from dataclasses import dataclass, replace

import pytest
import torch
from sparse_kernels.batch import DecodeBatch, DecodeOutput, PageSelection, QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.group_routing import GROUP_SCORES, GroupRouting
from sparse_kernels.group_routing.reference import score_groups
from sparse_kernels.page_score.reference import score_pages as reference_scores
from sparse_kernels.page_statistics import KINDS, PageStatistics, StatisticsLayout, update_page_statistics
from sparse_kernels.page_topk.reference import select_pages as reference_selection
from sparse_kernels.paging import PagedTensor
from sparse_kernels.sparse_attention.reference import attend_pages as reference_attention
from sparse_kernels.sparse_decode.launches import MOST_PAGES_AT_ONCE
from sparse_kernels.sparse_decode.reference import sparse_decode as reference_decode
from sparse_kernels.split_attention import Stopping, stop_scratch
from sparse_kernels.split_attention.reference import split_attention as reference_split
from sparse_kernels.stopping import StopRule, count_reads
from support.paged import make_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

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
    k: int | None = 64
    """None for every page, where only attention that may stop has a case."""
    dense_tokens: int = 0
    sinks: torch.dtype | None = None
    softcap: float = 0.0
    statistics: bool = True
    eight_bit_cache: bool = False
    skipped: float | None = None
    score: str = "mean"
    seed: int = 0


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
    "131,072 pages, bounds": Case((1048579, 900), num_kv_heads=1, head_size=32, kind="bounds"),
    "131,072 pages, routed": Case((1048579, 900), num_kv_heads=2, head_size=32, skipped=0.5),
    "131,072 pages, two query tokens": Case((1048577, 900), num_kv_heads=1, head_size=32, queries=2),
    "131,072 pages, newest": Case((1048579, 900), num_kv_heads=1, head_size=32, statistics=False),
    "200,000 pages": Case((1600001, 1600000, 900), num_kv_heads=1, head_size=32, k=300),
}
"""Cases of contexts with more pages than one launch numbers."""


class Inputs:
    """A case on the GPU: garbage everywhere but in the contexts."""

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
            # Statistics are those of the keys as they are stored.
            layout = StatisticsLayout(case.page_size, case.head_size, case.format, 1, KINDS[case.kind])
            eight = cache.nan_to_num(0, 0, 0).clamp(-400, 400).to(torch.float8_e4m3fn)
            more = layout.rows(case.block_size)
            tokens = eight[:, :, : case.block_size]
            cache = torch.cat([tokens.view(torch.uint8), torch.zeros_like(tokens[:, :, :more]).view(torch.uint8)], 2)
            cache = cache.view(torch.float8_e4m3fn)
            self.query_scale, self.key_scale, self.value_scale = (torch.tensor([x]).cuda() for x in (0.5, 1.5, 0.7))
        self.cache = cache.cuda()
        tokens = self.cache[:, :, : case.block_size]
        self.keys = PagedTensor.from_rows(tokens[..., : case.head_size], case.page_size)
        self.values = PagedTensor.from_rows(tokens[..., case.head_size :], case.page_size)
        self.statistics = layout.views(self.cache[:, :, case.block_size :], case.block_size)
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

    def context_lens(self, case: Case) -> torch.Tensor:
        from_end = torch.arange(case.queries - 1, -1, -1, device="cuda")
        return (self.seq_lens[:, None] - from_end).flatten()

    def group_scores(self, case: Case) -> torch.Tensor:
        """Of every query token: `[num_tokens, num_kv_heads]`."""
        grouped = self.query.float().unflatten(1, (case.num_kv_heads, case.group))
        blocks = self.block_table[:, 0].repeat_interleave(case.queries)
        return score_groups(grouped, self.keys, blocks, GROUP_SCORES.index(case.score))

    def forced(self, case: Case, share: float) -> GroupRouting:
        """Routing that skips a share of the groups, by a threshold in the middle between two scores."""
        scores = self.group_scores(case).flatten().sort(descending=True).values
        count = round(share * len(scores))
        around = torch.cat([scores[:1] + 1, scores, scores[-1:] - 1])[count : count + 2]
        coefficients = torch.zeros(case.num_kv_heads, 4, device="cuda")
        coefficients[:, 0] = around.mean()
        counts = torch.zeros(case.num_kv_heads, 2, dtype=torch.int64, device="cuda")
        return GroupRouting(coefficients, case.score, counts=counts)  # type: ignore[arg-type]

    def batch(self, case: Case) -> DecodeBatch:
        return DecodeBatch(
            self.query, self.block_table, self.seq_lens, self.dense_requests, case.dense_tokens, self.query_scale,
            budgets=self.budgets,
        )  # fmt: skip

    def kv(self, case: Case) -> KVCache:
        statistics: PageStatistics | None = self.statistics if case.statistics else None
        return KVCache(self.keys, self.values, statistics, self.key_scale, self.value_scale)

    def softmax(self, case: Case) -> Softmax:
        return Softmax(SCALE, case.softcap, self.sinks)

    def decode_arguments(self, case: Case, rule: StopRule | None = None) -> tuple[object, ...]:
        assert case.k is not None
        selection = PageSelection(case.k, 1, 1 if case.statistics else 0, STD_WEIGHT)
        return self.batch(case), self.kv(case), self.softmax(case), selection, self.routing, rule

    def split_arguments(self, case: Case, stopping: Stopping | None = None, splits: int = 64) -> tuple[object, ...]:
        return self.batch(case), self.kv(case), self.softmax(case), self.routing, stopping, splits

    def row(self, row: int) -> "Inputs":
        """The request of a row alone, without a budget of its own."""
        alone, tokens = copy(self), len(self.query) // len(self.seq_lens)
        alone.query, alone.block_table = self.query[row * tokens : (row + 1) * tokens], self.block_table[row : row + 1]
        alone.seq_lens, alone.budgets = self.seq_lens[row : row + 1], None
        if self.dense_requests is not None:
            alone.dense_requests = self.dense_requests[row : row + 1]
        return alone

    def asking(self, budgets: tuple[int, ...], dense: int | None = None) -> "Inputs":
        """The same requests with budgets, one for each; one of them perhaps attended whole."""
        self.budgets = torch.tensor(budgets, dtype=torch.int32, device=self.query.device)
        if dense is not None:
            self.dense_requests = torch.arange(len(budgets), device=self.query.device) == dense
        return self

    def empty_output(self) -> DecodeOutput:
        return DecodeOutput(torch.full(self.query.shape, torch.nan, dtype=torch.bfloat16, device="cuda"))


def launches(group: int, head_size: int) -> list[object]:
    from sparse_kernels.cuda.shared_memory import least_cluster
    from sparse_kernels.sparse_decode.launches import Launch

    if torch.cuda.get_device_capability() < (9, 0):
        return [Launch(False, 1, 8, 1), Launch(False, 1, 8, 1, listed=True)]
    # What has wide groups of wide heads needs a cluster to hold its sums.
    least = least_cluster(group, head_size)
    scored = [Launch(False, 2 * least, 8, 1), Launch(False, least, 8, 1, listed=True)]
    return [Launch(True, least, 8, 1), Launch(True, 8, 16, 1), *scored]


def decode(inputs: Inputs, case: Case, launch: object = None) -> torch.Tensor:
    from sparse_kernels.sparse_decode import cuda

    output = inputs.empty_output()
    cuda.sparse_decode(*inputs.decode_arguments(case), output, launch)
    return output.heads


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Weights and outputs are rounded to bfloat16 (2^-9 each); where those of selected pages nearly cancel, relative
    to the whole output."""
    error = (actual.float() - expected.float()).norm(dim=-1)
    assert bool((error <= 2**-7 * expected.float().norm(dim=-1)).all()), error.max()


def checked_scores(
    query: torch.Tensor, statistics: PageStatistics, table: torch.Tensor, lengths: torch.Tensor, std_weight: float
) -> torch.Tensor:
    """The kernel's scores, near the reference's: of two pages that score about the same, either may be read."""
    from sparse_kernels.page_score.cuda import score_pages

    expected = reference_scores(query, statistics, table, lengths, std_weight)
    actual = score_pages(query.bfloat16(), statistics, table, lengths, std_weight)[..., : expected.shape[2]]
    assert_scores_close(actual, expected, lengths)
    return actual


def assert_scores_close(actual: torch.Tensor, expected: torch.Tensor, lengths: torch.Tensor) -> None:
    for row, count in enumerate(lengths.tolist()):
        if count == 0:
            continue
        wanted, found = expected[row, :, :count].float(), actual[row, :, :count].float()
        # One step of bfloat16, and what 16 bits of fixed point leave out of a query.
        allowed = 2**-7 * wanted.abs() + 2**-11 * wanted.abs().max()
        assert bool(((found - wanted).abs() <= allowed).all())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decode_equals_the_reference_whatever_the_launch(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(case)
    expected = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    outputs = [decode(inputs, case, launch) for launch in launches(case.group, case.head_size)]
    monkeypatch.setattr("sparse_kernels.sparse_decode.reference.score_pages", checked_scores)
    reference_decode(*inputs.decode_arguments(case), DecodeOutput(expected))
    assert_close(outputs[0], expected)
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])
    if inputs.routing is not None:
        assert torch.equal(outputs[0] == 0, expected == 0)


def in_pieces(inputs: Inputs, case: Case) -> torch.Tensor:
    from sparse_kernels.sparse_decode import cuda

    batch, cache, softmax, selection, routing, _ = inputs.decode_arguments(case)
    output = inputs.empty_output()
    cuda.decode_in_pieces(batch, cache, softmax, selection, routing, output)  # type: ignore[arg-type]
    return output.heads


PIECES = BEYOND | {
    name: CASES[name]
    for name in (
        "ragged", "page boundaries", "multi-head, small blocks", "group of 3, pages of 32", "heads of 256", "quarters",
        "fp8 cache", "padded requests", "three query tokens", "softcap", "short contexts whole", "newest pages",
        "routed", "everything skipped", "heads of 80, fp8 cache", "heads of 112, group of 16, bf16 means",
        "heads of 192, quarters, one head",
    )
}  # fmt: skip


@pytest.mark.parametrize("case", PIECES.values(), ids=PIECES)
def test_decode_in_pieces_equals_the_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(case)
    expected = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    output = in_pieces(inputs, case)
    counts = None if inputs.routing is None else inputs.routing.counts.clone()
    monkeypatch.setattr("sparse_kernels.sparse_decode.reference.score_pages", checked_scores)
    reference_decode(*inputs.decode_arguments(case), DecodeOutput(expected))
    assert_close(output, expected)
    if inputs.routing is not None:
        assert torch.equal(output == 0, expected == 0)
        # The reference has counted as many.
        assert torch.equal(inputs.routing.counts, 2 * counts)
    if case in BEYOND.values():
        assert torch.equal(decode(inputs, case), output), "one launch serves it"


@pytest.mark.parametrize("case", LONG.values(), ids=LONG)
def test_contexts_of_any_length_equal_the_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(case)
    expected = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    outputs = decode(inputs, case), in_pieces(inputs, case)
    monkeypatch.setattr("sparse_kernels.sparse_decode.reference.score_pages", checked_scores)
    reference_decode(*inputs.decode_arguments(case), DecodeOutput(expected))
    for output in outputs:
        assert_close(output, expected)


def test_a_context_that_stops_may_have_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparse_kernels.sparse_decode.reference.score_pages", checked_scores)
    case, rule = Case((1048576, 1048583, 900), num_kv_heads=1, head_size=32, k=300), RULE
    inputs = stopping_inputs(case)
    output, expected = stopped(inputs, case, rule), expected_reads(inputs, case, rule)
    sooner = expected_reads(inputs, case, looser(rule, 1.05)).pages_read
    later = expected_reads(inputs, case, looser(rule, 0.95)).pages_read
    assert bool(((output.pages_read >= sooner) & (output.pages_read <= later)).all())
    assert bool((expected.pages_read < case.k).any()), "nothing stops"


@pytest.mark.parametrize("name", ["budget of 2,048 pages", "group of 32, routed", "budget of 2,048 pages, routed"])
def test_pieces_of_a_request_do_not_depend_on_its_neighbours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = BEYOND[name]
    inputs = Inputs(case)
    together = in_pieces(inputs, case)
    for row in range(len(case.contexts)):
        assert torch.equal(in_pieces(inputs.row(row), case)[0], together[row])
    # One request at a time, and one block to all pieces of a row.
    monkeypatch.setattr("sparse_kernels.sparse_decode.cuda.PIECES_BYTES", 1)
    monkeypatch.setattr("sparse_kernels.split_attention.cuda._WAVES", 0)
    assert torch.equal(in_pieces(inputs, case), together)


@pytest.mark.parametrize("name", ["budget of 2,048 pages", "group of 32, routed", "131,072 pages and one"])
def test_a_graph_of_several_launches_serves_other_lengths(name: str) -> None:
    from sparse_kernels.sparse_decode import cuda

    case = (BEYOND | LONG)[name]
    inputs = Inputs(case)
    decode(inputs, case)
    out = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.sparse_decode(*inputs.decode_arguments(case), DecodeOutput(out))
    for less in (0, 1, 777):
        inputs.seq_lens.copy_((torch.tensor(case.contexts) - less).clamp(min=0))
        graph.replay()
        assert torch.equal(out, decode(inputs, case))


MIXED = {
    "ragged": (Case((3000, 517, 1, 4096, 700), k=1024), (64, 24, 8, 500, 88)),
    "page boundaries": (Case((511, 512, 513, 519, 520, 521, 1024), k=1024), (63, 64, 64, 64, 64, 64, 127)),
    "quarters": (Case((3000, 517, 4096, 4096), k=300, kind="quarters", format="int4"), (300, 3, 64, 200)),
    "sketch, heads of 64, small blocks": (
        Case((3000, 517, 4096), k=128, head_size=64, block_size=16, kind="sketch", format="int2"),
        (128, 16, 5),
    ),
    "quarters, fp8 cache": (
        Case((3000, 517, 4096), k=1024, kind="quarters", format="int4", block_size=256, eight_bit_cache=True),
        (64, 1024, 17),
    ),
    "group of 16, pages of 16": (Case((2000, 1501, 900), group=16, page_size=16, k=64), (64, 12, 3)),
    "heads of 256": (Case((2000, 1501, 3000), head_size=256, k=1024), (64, 100, 3)),
    "heads of 80": (Case((3000, 517, 4096), head_size=80, k=1024), (64, 5, 300)),
    "bounds": (Case((3000, 517, 4096), kind="bounds", k=200), (64, 5, 200)),
    "three query tokens": (Case((3000, 517, 4096, 1000), queries=3, k=1024), (64, 5, 300, 124)),
    "padded requests": (Case((3000, 0, 517, 0), k=1024), (200, 64, 5, 64)),
    "learned sinks": (Case((3000, 517, 4096), sinks=torch.float32, k=1024), (64, 5, 300)),
    "short contexts whole": (Case((3000, 517, 4096), dense_tokens=600, k=1024), (64, 5, 300)),
    "routed": (Case((3000, 517, 1, 4096, 700), num_kv_heads=4, skipped=0.6, k=1024), (64, 24, 8, 500, 88)),
    "newest pages": (Case((3000, 517, 4096), statistics=False, k=1024), (64, 5, 300)),
    "many requests": (Case((3000, 517, 1, 4096, 700) * 30, k=1024), (64, 24, 8, 500, 88) * 30),
}
"""Budgets of requests in one batch, where the largest that any may have is the case's."""


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("dense", [None, 1])
def test_requests_with_budgets_have_the_bits_they_have_alone(
    name: str, dense: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, budgets = MIXED[name]
    inputs = Inputs(case).asking(budgets, dense)
    outputs = [decode(inputs, case, launch) for launch in (None, *launches(case.group, case.head_size))]
    pieces = in_pieces(inputs, case)
    for row in range(len(budgets)) if len(budgets) < 10 else (0, 3, 77, 149):
        alone, own = inputs.row(row), replace(case, k=budgets[row])
        rows = slice(row * case.queries, (row + 1) * case.queries)
        expected = decode(alone, own)
        for output in outputs:
            assert torch.equal(output[rows], expected)
        assert torch.equal(pieces[rows], in_pieces(alone, own))
    monkeypatch.setattr("sparse_kernels.sparse_decode.reference.score_pages", checked_scores)
    expected = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    reference_decode(*inputs.decode_arguments(case), DecodeOutput(expected))
    assert_close(outputs[0], expected)
    assert_close(pieces, expected)


MIXED_PIECES = {
    "budget of 2,048 pages": (64, 2048, 1025, 300, 64),
    "budget of 2,048 pages, three query tokens": (2048, 64, 1500),
    "budget of 2,048 pages, routed": (2048, 64, 20),
    "budget of 2,048 newest pages": (2048, 64, 1500),
    "group of 32, routed": (64, 24, 8, 33),
    "group of 32, learned sinks": (64, 5),
}


@pytest.mark.parametrize("name", MIXED_PIECES)
@pytest.mark.parametrize("dense", [None, 1])
def test_pieces_of_requests_with_budgets_have_the_bits_they_have_alone(
    name: str, dense: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, budgets = BEYOND[name], MIXED_PIECES[name]
    inputs = Inputs(case).asking(budgets, dense)
    output = decode(inputs, case)
    for row, budget in enumerate(budgets):
        rows = slice(row * case.queries, (row + 1) * case.queries)
        assert torch.equal(output[rows], in_pieces(inputs.row(row), replace(case, k=budget)))
    monkeypatch.setattr("sparse_kernels.sparse_decode.reference.score_pages", checked_scores)
    expected = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    reference_decode(*inputs.decode_arguments(case), DecodeOutput(expected))
    assert_close(output, expected)
    # One request at a time.
    monkeypatch.setattr("sparse_kernels.sparse_decode.cuda.PIECES_BYTES", 1)
    assert torch.equal(decode(inputs, case), output)


@pytest.mark.parametrize("case", [LONG["65,536 pages and one"], LONG["131,072 pages, two query tokens"]])
def test_long_contexts_read_their_own_budgets(case: Case) -> None:
    most = replace(case, k=1024)
    budgets = (1024, 300, 64, 5, 64)[: len(case.contexts)]
    inputs = Inputs(most).asking(budgets)
    output = decode(inputs, most)
    for row, budget in enumerate(budgets):
        rows = slice(row * case.queries, (row + 1) * case.queries)
        assert torch.equal(output[rows], decode(inputs.row(row), replace(case, k=budget)))


@pytest.mark.parametrize("name", ["ragged", "quarters", "newest pages"])
@pytest.mark.parametrize("pieces", [False, True])
def test_a_graph_serves_other_budgets(name: str, pieces: bool) -> None:
    from sparse_kernels.sparse_decode import cuda

    case, budgets = MIXED[name]
    if pieces:
        case = replace(case, k=2048)
    inputs = Inputs(case).asking(budgets, dense=0)
    decode(inputs, case)
    out = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.sparse_decode(*inputs.decode_arguments(case), DecodeOutput(out))
    assert inputs.budgets is not None
    assert inputs.dense_requests is not None
    for turn in range(3):
        inputs.budgets.copy_(torch.tensor(budgets).roll(turn))
        inputs.dense_requests.copy_(torch.arange(len(budgets)) == turn)
        graph.replay()
        assert torch.equal(out, decode(inputs, case))


def test_a_budget_beyond_the_room_for_pages_reads_what_there_is_room_for() -> None:
    case = Case((3000, 517, 4096))
    inputs = Inputs(case)
    plain = decode(inputs, case)
    for launch in launches(case.group, case.head_size):
        assert torch.equal(decode(inputs.asking((1 << 30, 64, 4096)), case, launch), plain)


COVERED = {
    "quarters": Case((3000, 517, 1, 4096, 700), k=1024, kind="quarters", format="int4"),
    "sketch": Case((3000, 517, 4096), k=1024, kind="sketch", format="int2"),
    "softcap, heads of 96": Case((3000, 517, 1200), head_size=96, k=1024, kind="quarters", format="int4", softcap=20.0),
    "two query tokens": Case((3000, 517, 4096), queries=2, k=1024, kind="quarters", format="int4"),
    "group of 32, pages of 16": Case((3000, 900, 1500), group=32, page_size=16, k=512, kind="quarters", format="int4"),
    "group of 7, a long context": Case((70000, 517, 33003), group=7, k=1024, kind="quarters", format="int4"),
    "group of 1, heads of 256": Case((9000, 300, 20000), head_size=256, group=1, k=512, kind="quarters", format="int4"),
}


@pytest.mark.parametrize("case", COVERED.values(), ids=COVERED)
def test_a_coverage_is_counted_as_by_the_reference_and_read_as_a_budget_of_each_row(case: Case) -> None:
    from sparse_kernels.page_coverage import Coverage, count_rows
    from sparse_kernels.page_coverage.reference import count_pages
    from sparse_kernels.page_score.cuda import score_pages
    from sparse_kernels.sparse_decode import cuda

    inputs, number = Inputs(case), len(case.contexts)
    share = torch.linspace(0.99, 0.5, number, device="cuda")
    least, most = torch.full((number,), 4, device="cuda"), torch.full((number,), case.k, device="cuda")
    least[-1] = most[-1] = 20
    coverage = Coverage(share, least, most)
    batch, cache, softmax, selection, _, _ = inputs.decode_arguments(case)
    assert isinstance(batch, DecodeBatch)
    counters = torch.zeros(case.num_kv_heads, 4, dtype=torch.int64, device="cuda")

    def counted(batch: DecodeBatch, coverage: Coverage, counters: torch.Tensor | None = None) -> torch.Tensor:
        return count_rows(batch, cache, selection, softmax, coverage, counters).budgets  # type: ignore

    counts = counted(batch, coverage, counters)
    contexts, request = inputs.context_lens(case), torch.arange(number, device="cuda").repeat_interleave(case.queries)
    grouped = inputs.query.unflatten(1, (case.num_kv_heads, case.group))
    tokens = QueryTokens(grouped, inputs.block_table[request].long(), contexts.long())
    scores = score_pages(grouped, inputs.statistics, inputs.block_table[request], contexts // case.page_size, 0.0)
    expected = count_pages(tokens, cache, scores, selection, softmax, coverage[request])  # type: ignore[arg-type]
    # Of pages that reach the target by less than an error of float32, either may be the last.
    assert (counts - expected).abs().max() <= 2
    assert len(counts.unique()) > 3
    reads = count_reads(counts, contexts, case.page_size, case.page_size)
    assert torch.equal(counters, (reads * (contexts // case.page_size > least[request])[:, None, None]).sum(dim=0))
    for row in range(number):
        one = slice(row, row + 1)
        rows = slice(row * case.queries, (row + 1) * case.queries)
        assert torch.equal(counted(batch.requests(row, row + 1), coverage[one]), counts[rows])
    output = inputs.empty_output()
    covered = count_rows(batch, cache, selection, softmax, coverage)  # type: ignore[arg-type]
    cuda.sparse_decode(covered, cache, softmax, selection, None, None, output)  # type: ignore[arg-type]
    heads = output.heads.unflatten(1, (case.num_kv_heads, case.group))
    for token, head in torch.cartesian_prod(torch.arange(len(counts)), torch.arange(case.num_kv_heads)).tolist():
        alone = inputs.row(token // case.queries)
        fixed = decode(alone, replace(case, k=int(counts[token, head]))).unflatten(1, (case.num_kv_heads, case.group))
        assert torch.equal(heads[token, head], fixed[token % case.queries, head])
    graph, again = torch.cuda.CUDAGraph(), counts.clone()
    with torch.cuda.graph(graph):
        again.copy_(counted(batch, coverage))
    for shares in (share.flip(0), share):
        coverage.share.copy_(shares.clone())
        graph.replay()
        assert torch.equal(again, counted(batch, coverage))


def test_a_batch_whose_coverage_needs_much_memory_is_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparse_kernels.page_coverage import Coverage, count_rows, cuda

    case = COVERED["two query tokens"]
    batch, cache, softmax, selection, _, _ = Inputs(case).decode_arguments(case)
    number = len(case.contexts)
    limits = (torch.full((number,), x, device="cuda") for x in (0.9, 4, 1024))
    arguments = batch, cache, selection, softmax, Coverage(*limits)
    whole = count_rows(*arguments)  # type: ignore[arg-type]
    monkeypatch.setattr(cuda, "_SCRATCH_BYTES", 1)
    parts = count_rows(*arguments)  # type: ignore[arg-type]
    assert torch.equal(whole.budgets, parts.budgets)  # type: ignore[arg-type]
    pages = batch.num_pages(case.page_size)
    for token, count in enumerate(pages.tolist()):
        assert torch.equal(whole.scores[token, :, :count], parts.scores[token, :, :count])  # type: ignore[index]


@pytest.mark.parametrize("pages", [100, 2048, 2049, 5000])
def test_equal_scores_go_to_the_lowest_page_and_masses_decide_how_many(pages: int) -> None:
    """All keys are zero, so all pages weigh the same: a share is a number of pages."""
    from sparse_kernels.page_coverage import Coverage, count_rows

    case = Case((8 * pages,), k=1024, kind="quarters", format="int4")
    inputs = Inputs(case)
    batch, cache, softmax, selection, _, _ = inputs.decode_arguments(case)
    assert isinstance(cache, KVCache)
    cache.keys.view.zero_()
    assert cache.statistics is not None
    cache.statistics.vectors.zero_()
    cache.statistics.scales.zero_()  # type: ignore[union-attr]
    for share in (0.25, 0.5, 0.75):
        limits = Coverage(*(torch.full((1,), x, device="cuda") for x in (share, 4, 1 << 40)))
        counts = count_rows(batch, cache, selection, softmax, limits).budgets  # type: ignore[arg-type]
        assert counts is not None
        assert (counts - math.ceil(pages * share)).abs().max() <= 1


@pytest.mark.parametrize("case", COVERED.values(), ids=COVERED)
def test_estimates_of_a_row_are_those_of_its_records(case: Case) -> None:
    from sparse_kernels.page_coverage import page_logits, row_page_logits

    inputs = Inputs(case)
    _, cache, softmax, _, _, _ = inputs.decode_arguments(case)
    assert isinstance(cache, KVCache)
    assert isinstance(softmax, Softmax)
    assert cache.statistics is not None
    query = inputs.query[: case.queries].unflatten(1, (case.num_kv_heads, case.group))[-1:]
    token = QueryTokens(query, inputs.block_table[:1].long(), torch.tensor([case.contexts[0]], device="cuda"))
    pages, room = case.contexts[0] // case.page_size, inputs.block_table.shape[1] * case.block_size // case.page_size
    found = row_page_logits(token, cache, room, softmax)
    assert found is not None
    records = cache.statistics.summaries(inputs.block_table[0].long())[0]
    expected = page_logits(query[0], records, case.page_size, softmax)
    # A query is rounded to 16 bits of its largest number, after a rotation for sketches.
    unit = float(query.float().norm(dim=-1).max()) / 32512
    allowed = softmax.scale * unit * float(records[:, :pages].abs().sum(dim=-1).max()) + 1e-5 * float(
        expected[..., :pages].abs().max()
    )
    assert (found - expected)[..., :pages].abs().max() <= allowed


@pytest.mark.parametrize("segment", [None, 2048])
@pytest.mark.parametrize("pages", [5000, 70000])
@pytest.mark.parametrize("always", [(0, 0), (3, 2)])
def test_selection_by_budgets_is_exact(pages: int, always: tuple[int, int], segment: int | None) -> None:
    from sparse_kernels.page_topk.cuda import list_pages, select_pages

    torch.manual_seed(pages)
    budgets = torch.tensor([64, 1024, 5, 300, 7, 64], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([pages, pages - 3, pages, 299, 5, 64], device="cuda")
    scores = (torch.randn(6, 2, -(-pages // 8) * 8, device="cuda") * 4).round().bfloat16()
    expected = reference_selection(scores, lengths, 1024, *always, budgets.long()[:, None].expand(-1, 2))
    actual, counts = select_pages(scores, lengths, 1024, *always, segment=segment, budgets=budgets)
    assert torch.equal(actual.long().sort(dim=-1).values, expected.sort(dim=-1).values)
    assert torch.equal(counts, lengths.minimum(budgets).int()[:, None].expand(-1, 2))
    # They are best first, as those of the same number for all.
    alone, _ = select_pages(scores, lengths, 64, *always, segment=segment)
    assert torch.equal(alone[0], actual[0, :, :64])
    batch = DecodeBatch(
        scores[:, :, :8], torch.zeros(6, 1).int().cuda(), (lengths * 8 + 7).int(), budgets=budgets
    )  # fmt: skip
    listed = list_pages(scores, batch, 8, PageSelection(1024, *always))
    for row, budget in enumerate(budgets.tolist()):
        assert torch.equal(listed[row, :, :budget].long(), expected[row, :, :budget])


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    case = Case((3000, 517, 1, 4096, 700) * 13)
    inputs = Inputs(case)
    together = decode(inputs, case)
    for row in (0, 3, 42):
        assert torch.equal(decode(inputs.row(row), case)[0], together[row])


def test_a_graph_serves_other_lengths() -> None:
    case = Case((3000, 517, 4096))
    inputs = Inputs(case)
    decode(inputs, case)
    from sparse_kernels.sparse_decode import cuda

    out = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.sparse_decode(*inputs.decode_arguments(case), DecodeOutput(out))
    for lengths in ((3000, 517, 4096), (1, 0, 2777), (600, 511, 4000)):
        inputs.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, decode(inputs, case))


@pytest.mark.parametrize("case", (CASES | BEYOND).values(), ids=CASES | BEYOND)
def test_scores_and_attention_equal_the_references(case: Case) -> None:
    from sparse_kernels.page_score import score_pages
    from sparse_kernels.sparse_attention import attend_pages

    if case.queries > 1 or 0 in case.contexts or case.eight_bit_cache:
        pytest.skip("these operations take one query token of each request, no padding and no scales")
    inputs = Inputs(case)
    grouped = inputs.query.unflatten(1, (case.num_kv_heads, case.group))
    lengths = inputs.seq_lens // case.page_size
    table = inputs.block_table.long()
    expected = reference_scores(grouped, inputs.statistics, table, lengths, STD_WEIGHT)
    actual = score_pages(grouped, inputs.statistics, inputs.block_table, lengths, STD_WEIGHT)
    assert_scores_close(actual, expected, lengths)
    pages = reference_selection(expected, lengths, case.k, 1, 1)
    tokens, cache, softmax = QueryTokens(grouped, table, inputs.seq_lens.long()), inputs.kv(case), inputs.softmax(case)
    actual = attend_pages(tokens, cache, pages, softmax)
    assert_close(actual, reference_attention(tokens, cache, pages, softmax))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.skipped is not None])
def test_nothing_is_scored_for_a_skipped_group(name: str) -> None:
    from sparse_kernels.group_routing.cuda import skipped_groups
    from sparse_kernels.page_score.cuda import launch_scores

    case = CASES[name]
    inputs = Inputs(case)
    assert inputs.routing is not None
    skipped = skipped_groups(inputs.batch(case), inputs.kv(case), inputs.routing)
    lengths = inputs.context_lens(case)
    sinks = inputs.group_scores(case) >= inputs.routing.thresholds(lengths.clamp(min=1))
    wanted = sinks & (lengths > case.dense_tokens)[:, None]
    assert torch.equal(skipped.bool(), wanted)
    width = inputs.block_table.shape[1] * case.block_size // case.page_size
    all_scores, needed = (torch.full((*skipped.shape, width), 7.0, device="cuda").bfloat16() for _ in range(2))
    for scores, groups in ((all_scores, None), (needed, skipped)):
        launch_scores(inputs.batch(case), inputs.statistics, case.page_size, STD_WEIGHT, scores, groups)
    assert torch.equal(needed, torch.where(wanted[..., None], 7.0, all_scores))


@pytest.mark.parametrize("launch", range(4))
def test_routing_that_skips_nothing_changes_no_bit_and_counts(launch: int) -> None:
    case = Case((3000, 517, 1, 4096, 700), num_kv_heads=4)
    inputs = Inputs(case)
    how = launches(case.group, case.head_size)
    if launch >= len(how):
        pytest.skip("this GPU has one launch")
    plain = decode(inputs, case, how[launch])
    inputs.routing = inputs.forced(case, 0.0)
    assert torch.equal(decode(inputs, case, how[launch]), plain)
    assert inputs.routing.counts is not None
    assert inputs.routing.counts.tolist() == [[0, 5]] * 4
    inputs.routing = inputs.forced(case, 0.6)
    routed = decode(inputs, case, how[launch]).unflatten(1, (4, 4))
    skipped = inputs.group_scores(case) >= inputs.routing.coefficients[0, 0]
    assert int(skipped.sum()) == 12
    assert routed[skipped].eq(0).all()
    assert torch.equal(routed[~skipped], plain.unflatten(1, (4, 4))[~skipped])
    assert inputs.routing.counts[:, 0].tolist() == skipped.sum(dim=0).tolist()


def split(inputs: Inputs, case: Case, splits: int = 64, launch: object = None) -> torch.Tensor:
    from sparse_kernels.split_attention import cuda

    output = inputs.empty_output()
    cuda.split_attention(*inputs.split_arguments(case, splits=splits), output, launch)
    return output.heads


SPLIT = {
    "ragged": Case((3000, 517, 1, 20000, 700), num_kv_heads=4, skipped=0.6),
    "piece boundaries": Case((255, 256, 257, 511, 512, 513, 16384, 16385), skipped=0.5),
    "nothing routed": Case((3000, 517, 1, 20000, 700)),
    "multi-head, small blocks": Case((3000, 517, 8, 7, 4096), group=1, block_size=16, skipped=0.6),
    "group of 2": Case((1777, 90), group=2, skipped=0.5, score="max"),
    "group of 3": Case((2000, 1501), group=3, block_size=32, skipped=0.5, score="min"),
    "group of 8, heads of 64": Case((2000, 15010), group=8, head_size=64, block_size=16, skipped=0.5),
    "group of 16": Case((2000, 15010), group=16, skipped=0.5),
    "group of 16, heads of 256": Case((2000, 1501), group=16, head_size=256, skipped=0.5),
    "three query tokens": Case((3000, 517, 4096), queries=3, skipped=0.6),
    "padded requests": Case((3000, 0, 517, 0), skipped=0.5),
    "softcap": Case((3000, 517), softcap=20.0, skipped=0.5),
    "short contexts whole": Case((3000, 517, 4096), dense_tokens=1000, skipped=0.5),
    "fp8 cache": Case((3000, 517, 15000), block_size=256, eight_bit_cache=True, skipped=0.5),
    "fp8 cache, heads of 64": Case(
        (3000, 517), group=8, head_size=64, block_size=256, eight_bit_cache=True, skipped=0.5
    ),
    "fp8 cache, group of 16": Case((3000, 517), group=16, block_size=512, eight_bit_cache=True),
    "everything skipped": Case((3000, 517, 4096), skipped=1.0),
    "heads of 80": Case((3000, 517), head_size=80, skipped=0.5),
    "heads of 112, fp8 cache": Case((3000, 517), head_size=112, block_size=256, eight_bit_cache=True, skipped=0.5),
    "heads of 192, group of 16": Case((2000, 1501), head_size=192, group=16, skipped=0.5),
    "group of 17": Case((3000, 517), group=17, skipped=0.5),
    "group of 64, one KV head": Case(
        (3000, 20000, 9), num_kv_heads=1, group=64, head_size=64, skipped=0.5, score="max"
    ),
    "learned sinks": Case((3000, 517, 20000), sinks=torch.float32),
    "learned sinks, group of 32": Case((3000, 517), group=32, sinks=torch.bfloat16, skipped=0.5),
}


@pytest.mark.parametrize("splits", [1, 7, 64])
@pytest.mark.parametrize("case", SPLIT.values(), ids=SPLIT)
def test_split_attention_equals_the_reference_whatever_the_launch(case: Case, splits: int) -> None:
    from sparse_kernels.split_attention.cuda import Launch

    inputs = Inputs(case)
    expected = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    first, *others = [split(inputs, case, splits, Launch(blocks)) for blocks in (1 << 20, 1, 24)]
    reference_split(*inputs.split_arguments(case, splits=splits), DecodeOutput(expected))
    assert_close(first, expected)
    assert torch.equal(first == 0, expected == 0)
    for other in others:
        assert torch.equal(other, first)


def test_split_attention_that_skips_nothing_changes_no_bit_and_counts() -> None:
    case = Case((3000, 517, 1, 20000, 700), num_kv_heads=4)
    inputs = Inputs(case)
    plain = split(inputs, case)
    inputs.routing = inputs.forced(case, 0.0)
    assert torch.equal(split(inputs, case), plain)
    inputs.routing = inputs.forced(case, 0.6)
    output, counts = split(inputs, case).unflatten(1, (4, 4)), inputs.routing.counts
    skipped = inputs.group_scores(case) >= inputs.routing.coefficients[0, 0]
    assert output[skipped].eq(0).all()
    assert torch.equal(output[~skipped], plain.unflatten(1, (4, 4))[~skipped])
    assert counts is not None
    assert torch.equal(counts, torch.stack([skipped.sum(dim=0), torch.full((4,), 5, device="cuda")], dim=1))


@pytest.mark.parametrize("dense", [True, False], ids=["split attention", "decode"])
def test_thresholds_follow_the_cubic_of_each_head(dense: bool) -> None:
    case = Case((3000, 517, 20, 9000, 700, 130), num_kv_heads=4)
    inputs = Inputs(case)
    scores, lengths = inputs.group_scores(case), inputs.seq_lens
    spread = float(scores.std())
    generator = torch.Generator().manual_seed(5)
    for _ in range(8):
        coefficients = (torch.randn(4, 4, generator=generator) * spread).cuda()
        inputs.routing = GroupRouting(coefficients, shortest=256, longest=8192)
        thresholds = inputs.routing.thresholds(lengths)
        # Rounding decides nothing.
        assert (scores - thresholds).abs().min() > 1e-5 * spread
        output = split(inputs, case) if dense else decode(inputs, case)
        assert torch.equal(output.unflatten(1, (4, 4)).eq(0).all(dim=-1).all(dim=-1), scores >= thresholds)


def test_a_routed_request_does_not_depend_on_its_neighbours() -> None:
    case = Case((3000, 517, 1, 20000, 700) * 13, skipped=0.5)
    inputs = Inputs(case)
    together = split(inputs, case)
    for row in (0, 3, 42):
        assert torch.equal(split(inputs.row(row), case)[0], together[row])


def test_a_graph_of_split_attention_serves_other_lengths() -> None:
    case = Case((3000, 517, 20000), skipped=0.5)
    inputs = Inputs(case)
    split(inputs, case)
    from sparse_kernels.split_attention import cuda

    out = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.split_attention(*inputs.split_arguments(case), DecodeOutput(out))
    for lengths in ((3000, 517, 20000), (1, 0, 2777), (600, 511, 15000)):
        inputs.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, split(inputs, case))


SCORES = {
    "distinct": lambda scores: scores,
    "equal": lambda scores: torch.full_like(scores, 1.5),
    "coarse": lambda scores: (scores.float() * 2).round().bfloat16(),
    "rising": lambda scores: scores.sort(dim=-1).values,
    "NaN and -inf": lambda scores: torch.where(scores.abs() < 0.3, torch.nan, scores).masked_fill(
        scores > 1, -torch.inf
    ),
    "all -inf": lambda scores: torch.full_like(scores, -torch.inf),
}


@pytest.mark.parametrize("kind", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize(("rows", "pages"), [(8, 1024), (3, 5000), (2, 70000), (2, 131072), (5, 64), (5, 63), (2, 9)])
@pytest.mark.parametrize("always", [(0, 0), (1, 1), (3, 2)])
def test_selection_is_exact(kind: object, rows: int, pages: int, always: tuple[int, int]) -> None:
    from sparse_kernels.page_topk.cuda import select_pages

    torch.manual_seed(rows + pages)
    scores = kind(torch.randn(rows, 2, pages, device="cuda").bfloat16())  # type: ignore[operator]
    lengths = torch.randint(0, pages + 1, (rows,), device="cuda")
    lengths[0] = pages
    expected = reference_selection(scores, lengths, 64, *always)
    for segment in (None, 1024):
        actual, counts = select_pages(scores, lengths, 64, *always, segment=segment)
        assert torch.equal(actual.long().sort(dim=-1).values, expected.sort(dim=-1).values)
        assert torch.equal(counts, lengths.clamp(max=64).int()[:, None].expand(-1, 2))


@pytest.mark.parametrize("kind", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize(("k", "pages"), [(1025, 5000), (2048, 70000), (8192, 200000), (64, 66000), (5, 9)])
@pytest.mark.parametrize("always", [(0, 0), (3, 2)])
def test_lists_are_exact_whatever_the_launch(kind: object, k: int, pages: int, always: tuple[int, int]) -> None:
    from sparse_kernels.page_topk import select_pages
    from sparse_kernels.page_topk.cuda import list_pages

    torch.manual_seed(k + pages)
    scores = kind(torch.randn(5, 2, -(-pages // 8) * 8, device="cuda").bfloat16())  # type: ignore[operator]
    lengths = torch.tensor([pages, k + 1, k, k - 1, pages - 3], device="cuda")
    # What lies beyond a row is garbage.
    beyond = torch.arange(scores.shape[2], device="cuda") >= lengths[:, None, None]
    scores = scores.masked_fill(beyond, torch.inf)
    expected = reference_selection(scores, lengths, k, *always)
    batch = DecodeBatch(scores[:, :, :8], torch.zeros(5, 1).int().cuda(), (lengths * 8 + 7).int())
    selection = PageSelection(k, *always)
    clusters = [1] if torch.cuda.get_device_capability() < (9, 0) else [1, 2, 4, 8]
    for cluster in clusters:
        assert torch.equal(list_pages(scores, batch, 8, selection, cluster=cluster).long(), expected)
    if k > 1024:
        assert torch.equal(select_pages(scores, lengths, k, *always).long(), expected)


def test_selection_gives_pages_by_their_place_in_the_cache() -> None:
    from sparse_kernels.page_topk.cuda import select_pages

    scores = torch.randn(3, 2, 800, device="cuda").bfloat16()
    lengths = torch.tensor([800, 70, 9], device="cuda")
    table = torch.randperm(300, device="cuda").view(3, 100).int()
    logical, _ = select_pages(scores, lengths, 64, 1, 1)
    placed, _ = select_pages(scores, lengths, 64, 1, 1, block_table=table, pages_per_block=8)
    rows = torch.arange(3, device="cuda")[:, None, None]
    expected = torch.where(logical < 0, -1, table[rows, logical.clamp(min=0) // 8] * 8 + logical % 8)
    assert torch.equal(placed, expected.int())


RULE = StopRule(scale_tolerance=0.3, direction_tolerance=0.03, patience=2, block_tokens=64)
STOPPING = {
    "every page": (Case((3000, 517, 1, 4096, 700), k=None, page_size=16), RULE),
    "every page, blocks of 512": (
        Case((9000, 517, 5120, 8192), k=None, page_size=16),
        RULE._replace(block_tokens=512, patience=1),
    ),
    "every page, sinks first": (Case((3000, 517, 16, 4096), k=None, page_size=16), RULE._replace(least_pages=30)),
    "every page, many pieces": (
        Case((70000, 20000, 700), k=None, page_size=16),
        RULE._replace(scale_tolerance=1000.0, direction_tolerance=16.0, patience=150),
    ),
    "every page, patience for all pieces but two": (
        Case((3000, 2944, 517), k=None, page_size=16),
        RULE._replace(scale_tolerance=1000.0, direction_tolerance=16.0, patience=45),
    ),
    "every page, multi-head, small blocks": (
        Case((3000, 517, 8, 4096), k=None, group=1, block_size=16, page_size=16),
        RULE,
    ),
    "every page, group of 3, pages of 32": (Case((3000, 4095), k=None, group=3, page_size=32), RULE),
    "every page, group of 8, heads of 64": (Case((3000, 4095), k=None, group=8, head_size=64), RULE),
    "every page, group of 16": (Case((3000, 4095), k=None, group=16, page_size=16), RULE._replace(block_tokens=128)),
    "every page, group of 16, heads of 256": (
        Case((3000, 4095), k=None, num_kv_heads=1, group=16, head_size=256),
        RULE,
    ),
    "every page, learned sinks": (Case((3000, 517, 4096), k=None, sinks=torch.float32), RULE),
    "every page, softcap": (Case((3000, 517), k=None, softcap=60.0), RULE),
    "every page, three query tokens": (Case((3000, 517, 4096), k=None, queries=3), RULE),
    "every page, padded, short and dense": (Case((3000, 0, 517, 4096, 2000), k=None, dense_tokens=2500), RULE),
    "page boundaries": (Case((1023, 1024, 1025, 1031, 1032, 1033, 2048), k=100), RULE),
    "best first": (Case((9000, 517, 1, 4096, 7000), k=400), RULE),
    "best first, blocks of 256": (Case((9000, 517, 1, 4096, 7000), k=500), RULE._replace(block_tokens=256, patience=1)),
    "best first, bounds": (Case((3000, 517, 4096), k=200, kind="bounds"), RULE),
    "newest of a budget": (Case((3000, 517, 4096), k=200, statistics=False), RULE),
    "multi-head": (Case((3000, 517, 8, 4096), group=1, block_size=16, k=200), RULE),
    "group of 2": (Case((3000, 517, 8, 4096), group=2, k=200), RULE),
    "group of 3, pages of 32": (Case((3000, 4095), group=3, page_size=32, k=60), RULE),
    "group of 8, heads of 64": (Case((3000, 4095), group=8, head_size=64, k=200), RULE),
    "group of 16": (Case((3000, 4095), group=16, k=200), RULE._replace(block_tokens=128)),
    "group of 16, heads of 256": (Case((3000, 4095), num_kv_heads=1, group=16, head_size=256, k=200), RULE),
    **{
        f"{name}heads of {size}": (Case((3000, 517, 4095), head_size=size, k=k, page_size=page), RULE)
        for size in (80, 96, 112, 192)
        for name, k, page in (("", 200, 8), ("every page, ", None, 16))
    },
    "heads of 256": (Case((3000, 4095), head_size=256, k=200), RULE._replace(block_tokens=256)),
    "fp8 cache": (Case((3000, 517, 4096), block_size=256, eight_bit_cache=True, k=200), RULE),
    "every page, fp8 cache": (
        Case((3000, 4095), k=None, block_size=512, eight_bit_cache=True, page_size=16, head_size=64),
        RULE._replace(block_tokens=512, patience=1),
    ),
    "learned sinks": (Case((3000, 517, 4096), sinks=torch.float32, k=200), RULE),
    "softcap": (Case((3000, 517), softcap=60.0, k=200), RULE),
    "three query tokens": (Case((3000, 517, 4096), queries=3, k=200), RULE),
    "padded, short and dense": (Case((3000, 0, 517, 4096, 2000), dense_tokens=2500, k=200), RULE),
}
"""Cases and rules under which some rows stop and some do not."""
EVERY_PAGE = [name for name, (case, _) in STOPPING.items() if case.k is None]


def stopping_launches(case: Case) -> list[object]:
    """Several, which give the same."""
    if case.k is None:
        from sparse_kernels.split_attention import cuda

        return [cuda.Launch(4096), cuda.Launch(4096, 8), cuda.Launch(1, 2), cuda.Launch(7, 32)]
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs clusters of blocks")
    from sparse_kernels.cuda.shared_memory import least_cluster
    from sparse_kernels.sparse_decode.launches import Launch

    least = max(4, least_cluster(case.group, case.head_size))
    listed = Launch(False, 8, 16, 1, listed=True)
    return [Launch(True, 8, 8, 1), Launch(True, least, 8, 1), Launch(False, 8, 16, 1), listed]


def stopping_inputs(case: Case) -> Inputs:
    """Queries of which every second finds one of the newest keys."""
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


def counted_output(inputs: Inputs, case: Case) -> DecodeOutput:
    """Nothing that a kernel may leave as it is."""
    shape, device = (len(inputs.query), case.num_kv_heads), inputs.query.device
    pages_read = torch.full(shape, -1, dtype=torch.int32, device=device)
    counters = torch.zeros((case.num_kv_heads, 4), dtype=torch.int64, device=device)
    return replace(inputs.empty_output(), pages_read=pages_read, counters=counters)


def stopped(inputs: Inputs, case: Case, rule: StopRule, launch: object = None) -> DecodeOutput:
    from sparse_kernels.sparse_decode import cuda

    output = counted_output(inputs, case)
    if case.k is None:
        every_page(inputs, case, rule, output, launch=launch)
    else:
        cuda.sparse_decode(*inputs.decode_arguments(case, rule), output, launch)
    return output


def every_page(
    inputs: Inputs,
    case: Case,
    rule: StopRule,
    output: DecodeOutput,
    requests: int | None = None,
    launch: object = None,
) -> None:
    """The first page before the newest; with scratch for so many requests, which is left as it was."""
    from sparse_kernels.split_attention import cuda

    stopping = stopping_of(inputs, case, rule, requests)
    cuda.split_attention(*inputs.split_arguments(case, stopping), output, launch)
    assert stopping.scratch is not None
    assert not stopping.scratch.any()


def stopping_of(inputs: Inputs, case: Case, rule: StopRule, requests: int | None = None) -> Stopping:
    rows = inputs.batch(case).tokens_per_request * (requests or len(inputs.seq_lens)) * case.num_kv_heads
    context_tokens = inputs.block_table.shape[1] * case.block_size
    return Stopping(rule, 1, stop_scratch(rule, rows, context_tokens, inputs.query.device))


def expected_reads(inputs: Inputs, case: Case, rule: StopRule) -> DecodeOutput:
    output = counted_output(inputs, case)
    output.heads.zero_()
    if case.k is None:
        reference_split(*inputs.split_arguments(case, Stopping(rule, 1)), output)
    else:
        reference_decode(*inputs.decode_arguments(case, rule), output)
    return output


def equal(one: DecodeOutput, other: DecodeOutput) -> bool:
    assert one.pages_read is not None
    assert other.pages_read is not None
    assert one.counters is not None
    assert other.counters is not None
    return (
        torch.equal(one.heads, other.heads)
        and torch.equal(one.pages_read, other.pages_read)
        and torch.equal(one.counters, other.counters)
    )


def looser(rule: StopRule, factor: float) -> StopRule:
    return rule._replace(
        scale_tolerance=rule.scale_tolerance * factor, direction_tolerance=rule.direction_tolerance * factor
    )


@pytest.mark.parametrize("name", STOPPING)
def test_attention_stops_where_the_reference_does_whatever_the_launch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparse_kernels.sparse_decode.reference.score_pages", checked_scores)
    case, rule = STOPPING[name]
    inputs = stopping_inputs(case)
    output, *others = [stopped(inputs, case, rule, launch) for launch in stopping_launches(case)]
    for other in others:
        assert equal(output, other)
    expected = expected_reads(inputs, case, rule)
    # Weights are rounded to 16 bits: a change at the tolerance may fall on either side of it.
    sooner = expected_reads(inputs, case, looser(rule, 1.05)).pages_read
    later = expected_reads(inputs, case, looser(rule, 0.95)).pages_read
    wanted, pages_read = expected.pages_read, output.pages_read
    attends = wanted >= 0
    assert bool(((pages_read >= sooner) & (pages_read <= later))[attends].all())
    same = (pages_read == wanted) & attends
    assert same.float().mean() >= 0.5 * attends.float().mean()
    most = wanted.amax(dim=1, keepdim=True)
    assert bool((wanted < most.amax()).any()), "nothing stops"
    rows = same[:, :, None].expand(-1, -1, case.group).flatten(1)
    assert_close(output.heads[rows], expected.heads[rows])
    if bool(same[attends].all()):
        assert torch.equal(output.counters, expected.counters)


@pytest.mark.parametrize("name", STOPPING)
def test_without_patience_the_bits_are_those_of_attention_that_cannot_stop(name: str) -> None:
    case, _ = STOPPING[name]
    if not case.statistics or case.k is None:
        pytest.skip("without scores the newest page comes first, where attention that cannot stop has it last")
    inputs = stopping_inputs(case)
    never = RULE._replace(patience=0, block_tokens=512)
    for launch in stopping_launches(case):
        assert torch.equal(stopped(inputs, case, never, launch).heads, decode(inputs, case, launch))
    if case.k <= MOST_PAGES_AT_ONCE:
        assert torch.equal(stopped(inputs, case, never).heads, decode(inputs, case))


@pytest.mark.parametrize("name", EVERY_PAGE)
def test_stop_tests_change_no_bit(name: str) -> None:
    case, rule = STOPPING[name]
    inputs = stopping_inputs(case)
    plain = stopped(inputs, case, rule._replace(patience=0))
    for launch in stopping_launches(case):
        assert equal(plain, stopped(inputs, case, rule._replace(scale_tolerance=0.0), launch))
    pages = inputs.context_lens(case).clamp(min=0)[:, None] // case.page_size
    assert torch.equal(plain.pages_read, pages.expand_as(plain.pages_read))


def only(inputs: Inputs, case: Case, row: int, pages: int) -> Inputs:
    """The request of a row as if its context had so many pages, those read first, and the incomplete one."""
    found = Inputs(Case((1,)))
    context = int(inputs.seq_lens[row])
    complete = context // case.page_size
    order = torch.tensor([0, *range(complete - 1, 0, -1)][:pages], device="cuda").sort().values
    positions = torch.arange(context, device="cuda")
    positions = positions[torch.isin(positions // case.page_size, order) | (positions >= complete * case.page_size)]
    length, size = len(positions), case.block_size
    rows = inputs.cache[:, :, :size]
    blocks = inputs.block_table[row, positions // size].long()
    cache = torch.full((-(-length // size), *rows.shape[1:]), torch.nan, dtype=rows.dtype, device="cuda")
    place = torch.arange(length, device="cuda")
    cache[place // size, :, place % size] = rows[blocks, :, positions % size]
    found.query, found.sinks, found.routing = inputs.query[row : row + 1], inputs.sinks, None
    found.keys = PagedTensor.from_rows(cache[..., : case.head_size], case.page_size)
    found.values = PagedTensor.from_rows(cache[..., case.head_size :], case.page_size)
    found.block_table = torch.arange(len(cache), dtype=torch.int32, device="cuda")[None]
    found.seq_lens = torch.tensor([length], dtype=torch.int32, device="cuda")
    return found


@pytest.mark.parametrize("name", ["every page, blocks of 512", "every page, sinks first", "every page, many pieces"])
def test_attention_that_stopped_has_the_bits_of_attention_over_what_it_read(name: str) -> None:
    case, rule = STOPPING[name]
    inputs = stopping_inputs(case)
    output = stopped(inputs, case, rule)
    for row, head in torch.cartesian_prod(torch.arange(len(case.contexts)), torch.arange(case.num_kv_heads)).tolist():
        cut = only(inputs, case, row, int(output.pages_read[row, head]))
        alone = cut.empty_output()
        every_page(cut, case, rule._replace(patience=0), alone)
        heads = slice(head * case.group, (head + 1) * case.group)
        assert torch.equal(alone.heads[0, heads], output.heads[row, heads])


@pytest.mark.parametrize("name", [name for name in EVERY_PAGE if len(STOPPING[name][0].contexts) > 2])
def test_a_batch_is_attended_in_parts_where_scratch_is_short(name: str) -> None:
    case, rule = STOPPING[name]
    inputs = stopping_inputs(case)
    together = stopped(inputs, case, rule)
    for requests in (1, 2):
        in_parts = counted_output(inputs, case)
        every_page(inputs, case, rule, in_parts, requests)
        assert equal(in_parts, together)


@pytest.mark.parametrize("patience", [0, 1])
def test_a_stopped_output_has_the_bits_of_attention_over_the_pages_it_read(patience: int) -> None:
    from sparse_kernels.sparse_attention import attend_pages

    case, rule = STOPPING["newest of a budget"]
    stopping_launches(case)
    inputs = stopping_inputs(case)
    output = stopped(inputs, case, rule._replace(patience=patience, block_tokens=512))
    for row, context in enumerate(case.contexts):
        pages = context // case.page_size
        assert case.k is not None
        if pages <= case.k:
            continue
        slot = torch.arange(case.k, device="cuda")
        order = torch.where(slot < 1, slot, pages - slot)
        grouped = inputs.query.unflatten(1, (case.num_kv_heads, case.group))
        token = QueryTokens(grouped, inputs.block_table, inputs.seq_lens)[row : row + 1]
        for head in range(case.num_kv_heads):
            chosen = order[: int(output.pages_read[row, head])].expand(1, case.num_kv_heads, -1)
            alone = attend_pages(token, inputs.kv(case), chosen, inputs.softmax(case))
            heads = slice(head * case.group, (head + 1) * case.group)
            assert torch.equal(alone[0, heads], output.heads[row, heads])


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "name",
    [
        "every page", "every page, group of 16", "every page, fp8 cache", "every page, three query tokens",
        "best first", "best first, bounds", "group of 16", "fp8 cache", "three query tokens",
    ],
)  # fmt: skip
def test_skipped_groups_read_nothing_and_others_stop_as_without_routing(name: str, share: float) -> None:
    case, rule = STOPPING[name]
    inputs = stopping_inputs(case)
    routing = inputs.forced(case, share)
    skipped = inputs.group_scores(case) >= routing.coefficients[0, 0]
    assert int(skipped.sum()) == round(share * skipped.numel())
    may_stop = (inputs.context_lens(case) // case.page_size > (case.k or 0))[:, None] & ~skipped
    for launch in stopping_launches(case):
        inputs.routing = None
        plain = stopped(inputs, case, rule, launch)
        inputs.routing = routing
        routed = stopped(inputs, case, rule, launch)
        heads = routed.heads.unflatten(1, (*skipped.shape[1:], case.group))
        assert torch.equal(heads, plain.heads.view_as(heads).masked_fill(skipped[..., None, None], 0))
        assert torch.equal(routed.pages_read, plain.pages_read.masked_fill(skipped, 0))
        counted = count_reads(routed.pages_read, inputs.context_lens(case), case.page_size, rule.block_tokens)
        assert torch.equal(routed.counters, (counted * may_stop[..., None]).sum(dim=0))


@pytest.mark.parametrize("name", ["every page", "best first"])
def test_a_graph_stops_for_other_lengths_too(name: str) -> None:
    from sparse_kernels.sparse_decode import cuda as decode_cuda
    from sparse_kernels.split_attention import cuda as split_cuda

    case, rule = STOPPING[name]
    stopping_launches(case)
    inputs = stopping_inputs(case)
    stopped(inputs, case, rule)

    output = replace(counted_output(inputs, case), counters=None)
    assert output.pages_read is not None
    stopping = stopping_of(inputs, case, rule)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if case.k is None:
            split_cuda.split_attention(*inputs.split_arguments(case, stopping), output)
        else:
            decode_cuda.sparse_decode(*inputs.decode_arguments(case, rule), output)
    for lengths in ((3000, 517, 1, 4096, 700), (2999, 16, 0, 4001, 640), (64, 100, 1, 2000, 333)):
        inputs.seq_lens.copy_(torch.tensor(lengths))
        output.pages_read.fill_(-1)
        graph.replay()
        expected = stopped(inputs, case, rule)
        assert torch.equal(output.heads, expected.heads)
        assert torch.equal(output.pages_read, expected.pages_read)
        assert not stopping.scratch.any()


@pytest.mark.parametrize("name", ["every page", "best first"])
def test_a_stopping_request_does_not_depend_on_its_neighbours(name: str) -> None:
    case, rule = STOPPING[name]
    stopping_launches(case)
    inputs = stopping_inputs(case)
    together = stopped(inputs, case, rule)
    for row in (0, 3):
        alone = stopped(inputs.row(row), case, rule)
        assert torch.equal(alone.heads[0], together.heads[row])
        assert torch.equal(alone.pages_read[0], together.pages_read[row])


@pytest.mark.parametrize("name", ["best first", "newest of a budget", "group of 16", "three query tokens"])
def test_requests_that_stop_read_within_their_own_budgets(name: str) -> None:
    case, rule = STOPPING[name]
    case = replace(case, k=400)
    inputs = stopping_inputs(case)
    budgets = (400, 100, 64, 200, 30, 300, 17)[: len(case.contexts)]
    for launch in stopping_launches(case):
        together = stopped(inputs.asking(budgets), case, rule, launch)
        for row, budget in enumerate(budgets):
            alone = stopped(inputs.row(row), replace(case, k=budget), rule, launch)
            rows = slice(row * case.queries, (row + 1) * case.queries)
            assert torch.equal(alone.heads, together.heads[rows])
            assert torch.equal(alone.pages_read, together.pages_read[rows])
