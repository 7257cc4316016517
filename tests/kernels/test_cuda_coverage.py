"""Page coverage on CUDA, against the torch reference, on a GPU."""

import math
from dataclasses import replace

import pytest
import torch
from sparse_kernels.batch import DecodeBatch, QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.stopping import count_reads
from support.cuda import ON_GPU, Case, Inputs, decode

pytestmark = ON_GPU


@pytest.fixture(autouse=True)
def _rows_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has rows counted from their best pages wherever these suffice."""
    monkeypatch.setattr("sparse_kernels.page_coverage.cuda.FEW_ROWS", 0)


COVERED = {
    "quarters": Case((3000, 517, 1, 4096, 700), k=1024, kind="quarters", format="int4"),
    "sketch": Case((3000, 517, 4096), k=1024, kind="sketch", format="int2"),
    "softcap, heads of 96": Case((3000, 517, 1200), head_size=96, k=1024, kind="quarters", format="int4", softcap=20.0),
    "two query tokens": Case((3000, 517, 4096), queries=2, k=1024, kind="quarters", format="int4"),
    "group of 32, pages of 16": Case((3000, 900, 1500), group=32, page_size=16, k=512, kind="quarters", format="int4"),
    "group of 7, a long context": Case((70000, 517, 33003), group=7, k=1024, kind="quarters", format="int4", seed=1),
    "group of 1, heads of 256": Case((9000, 300, 20000), head_size=256, group=1, k=512, kind="quarters", format="int4"),
}


@pytest.mark.parametrize("case", COVERED.values(), ids=COVERED)
def test_a_coverage_is_counted_as_by_the_reference_and_read_as_a_budget_of_each_row(case: Case) -> None:
    from sparse_kernels.page_coverage import Limits, count_rows
    from sparse_kernels.page_coverage.reference import count_pages
    from sparse_kernels.page_score.cuda import score_pages
    from sparse_kernels.sparse_decode import cuda

    inputs, number = Inputs(case), len(case.contexts)
    share = torch.linspace(0.99, 0.5, number, device="cuda")
    least, most = torch.full((number,), 4, device="cuda"), torch.full((number,), case.k, device="cuda")
    least[-1] = most[-1] = 20
    limits = Limits(share, least, most)
    batch, cache, softmax, selection, _, _ = inputs.decode_arguments(case)
    assert isinstance(batch, DecodeBatch)
    counters = torch.zeros(case.num_kv_heads, 4, dtype=torch.int64, device="cuda")

    def counted(batch: DecodeBatch, limits: Limits, counters: torch.Tensor | None = None) -> torch.Tensor:
        return count_rows(batch, cache, selection, softmax, limits, counters).budgets

    counts = counted(batch, limits, counters)
    contexts, request = inputs.context_lens(case), torch.arange(number, device="cuda").repeat_interleave(case.queries)
    grouped = inputs.query.unflatten(1, (case.num_kv_heads, case.group))
    tokens = QueryTokens(grouped, inputs.block_table[request].long(), contexts.long())
    scores = score_pages(grouped, inputs.statistics, inputs.block_table[request], contexts // case.page_size, 0.0)
    expected = count_pages(tokens, cache, scores, selection, softmax, limits[request])
    # Of pages that reach the target within a float32 error, either may be the last.
    assert (counts - expected).abs().max() <= 2
    assert len(counts.unique()) > 3
    reads = count_reads(counts, contexts, case.page_size, case.page_size)
    assert torch.equal(counters, (reads * (contexts // case.page_size > least[request])[:, None, None]).sum(dim=0))
    for row in range(number):
        one = slice(row, row + 1)
        rows = slice(row * case.queries, (row + 1) * case.queries)
        assert torch.equal(counted(batch.requests(row, row + 1), limits[one]), counts[rows])
    output = inputs.empty_output()
    covered = count_rows(batch, cache, selection, softmax, limits)
    cuda.sparse_decode(covered, cache, softmax, selection, None, None, output)
    heads = output.heads.unflatten(1, (case.num_kv_heads, case.group))
    for token, head in torch.cartesian_prod(torch.arange(len(counts)), torch.arange(case.num_kv_heads)).tolist():
        alone = inputs.row(token // case.queries)
        fixed = decode(alone, replace(case, k=int(counts[token, head]))).unflatten(1, (case.num_kv_heads, case.group))
        assert torch.equal(heads[token, head], fixed[token % case.queries, head])
    graph, again = torch.cuda.CUDAGraph(), counts.clone()
    with torch.cuda.graph(graph):
        again.copy_(counted(batch, limits))
    for shares in (share.flip(0), share):
        limits.share.copy_(shares.clone())
        graph.replay()
        assert torch.equal(again, counted(batch, limits))


@pytest.mark.parametrize("case", COVERED.values(), ids=COVERED)
@pytest.mark.parametrize("share", [0.02, 0.2, 0.5, 0.9, 0.999])
def test_the_best_pages_of_a_row_give_the_count_of_all_pages(case: Case, share: float) -> None:
    from sparse_kernels.page_coverage import Limits, count_rows

    batch, cache, softmax, selection, _, _ = Inputs(case).decode_arguments(case)
    limits = Limits(*(torch.full((len(case.contexts),), x, device="cuda") for x in (share, 4, 1024)))
    best, by_all = (count_rows(batch, cache, replace(selection, k=k), softmax, limits).budgets for k in (1024, 1 << 20))
    assert torch.equal(best, by_all)


def test_a_batch_whose_coverage_needs_much_memory_is_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparse_kernels.page_coverage import Limits, count_rows

    case = COVERED["two query tokens"]
    batch, cache, softmax, selection, _, _ = Inputs(case).decode_arguments(case)
    number = len(case.contexts)
    limits = (torch.full((number,), x, device="cuda") for x in (0.9, 4, 1024))
    arguments = batch, cache, selection, softmax, Limits(*limits)
    whole = count_rows(*arguments)
    monkeypatch.setattr("sparse_kernels.page_coverage.launches.SCRATCH_BYTES", 1)
    parts = count_rows(batch, cache, replace(selection, k=1 << 20), *arguments[3:])
    assert torch.equal(whole.budgets, parts.budgets)
    pages = batch.num_pages(case.page_size)
    for token, count in enumerate(pages.tolist()):
        assert torch.equal(whole.scores[token, :, :count], parts.scores[token, :, :count])


@pytest.mark.parametrize("pages", [100, 2048, 2049, 5000])
def test_equal_scores_go_to_the_lowest_page_and_masses_decide_how_many(pages: int) -> None:
    """All keys are zero, so all pages weigh the same: a share is a number of pages."""
    from sparse_kernels.page_coverage import Limits, count_rows

    case = Case((8 * pages,), k=1024, kind="quarters", format="int4")
    inputs = Inputs(case)
    batch, cache, softmax, selection, _, _ = inputs.decode_arguments(case)
    assert isinstance(cache, KVCache)
    cache.keys.view.zero_()
    assert cache.statistics is not None
    cache.statistics.vectors.zero_()
    cache.statistics.scales.zero_()
    for share in (0.25, 0.5, 0.75):
        limits = Limits(*(torch.full((1,), x, device="cuda") for x in (share, 4, 1 << 40)))
        # Rows that may read more than 1,024 pages are counted from the masses of all pages.
        counts = count_rows(batch, cache, replace(selection, k=1 << 20), softmax, limits).budgets
        assert counts is not None
        assert (counts - math.ceil(pages * share)).abs().max() <= 1
        best = count_rows(batch, cache, selection, softmax, limits).budgets
        assert torch.equal(best.clamp(max=1024), counts.clamp(max=1024)) or pages * share > 1024


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
    # A query is rounded to 16 bits relative to its largest element, for sketches after a rotation.
    unit = float(query.float().norm(dim=-1).max()) / 32512
    allowed = softmax.scale * unit * float(records[:, :pages].abs().sum(dim=-1).max()) + 1e-5 * float(
        expected[..., :pages].abs().max()
    )
    assert (found - expected)[..., :pages].abs().max() <= allowed
