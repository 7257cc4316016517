import pytest
import torch
from sparse_kernels.batch import DecodeBatch
from sparse_kernels.optional_triton import tl
from sparse_kernels.page_score import reference, score_pages
from sparse_kernels.page_statistics import STATISTICS_FORMATS, StatisticsLayout, update_page_statistics
from sparse_kernels.page_statistics.kinds import StatisticsKind
from sparse_kernels.page_statistics.reference import quantise
from sparse_kernels.paging import PagedTensor
from support.paged import VECTOR_KINDS, make_batch

CONTEXTS = [1000, 8, 7, 505, 64, 72, 999]
SHAPES = [(2, 4, 64), (2, 3, 96), (4, 1, 128), (1, 16, 256)]
# Compiled for each shape and kind: the default kind in all shapes, the others in one.
CASES = [(kind, *shape) for kind in VECTOR_KINDS for shape in (SHAPES if kind == "mean_and_spread" else [(2, 3, 96)])]


def assert_within_one_rounding(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Neighbouring bfloat16 numbers differ by one."""
    ordinals = [
        torch.where(bits < 0, bits ^ 0x7FFF, bits) for bits in (s.view(torch.int16).int() for s in (actual, expected))
    ]
    assert (ordinals[0] - ordinals[1]).abs().le(1).all()


def exact_scores(batch, query: torch.Tensor, request: int, std_weight: float, statistics: str) -> torch.Tensor:
    """`[num_kv_heads, num_pages]` float64, from the keys and the formula of each kind of statistics."""
    pages = int(batch.num_pages[request])
    key = batch.keys[request][: pages * batch.page_size].unflatten(0, (pages, batch.page_size)).transpose(1, 2).double()
    query = query[request].double()

    def stored(vector: torch.Tensor) -> torch.Tensor:
        if statistics == "bf16":
            return vector.bfloat16().double()
        dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[statistics]
        quantised, scale = quantise(vector.float(), dtype)
        return quantised.float().double() * scale.double()[..., None]

    match batch.statistics.kind.name:
        case "mean_and_spread":
            spread = key.std(dim=2, correction=0).norm(dim=-1).bfloat16().double()
            raw = torch.einsum("hgd,phd->hgp", query, stored(key.mean(dim=2)))
            raw += std_weight * query.norm(dim=-1)[..., None] * spread.T[:, None]
        case "bounds":
            least, most = stored(key.amin(dim=2)), stored(key.amax(dim=2))
            both = torch.stack([query[:, :, None] * x.transpose(0, 1)[:, None] for x in (least, most)])
            raw = both.amax(dim=0).sum(dim=-1)
        case "representatives":
            chosen = []
            for keys in key.flatten(0, 1):
                merit = [float(keys.mean(dim=0) @ one) for one in keys]
                best = sorted(range(len(keys)), key=merit.__getitem__)[-len(keys) // 4 :]
                chosen.append(sum(keys[i] for i in best) / len(best))
            means = torch.stack(chosen).unflatten(0, key.shape[:2])
            raw = torch.einsum("hgd,phd->hgp", query, stored(means))
    return raw.amax(dim=1)


@pytest.mark.parametrize("statistics", STATISTICS_FORMATS)
@pytest.mark.parametrize(("kind", "num_kv_heads", "group_size", "head_size"), CASES)
def test_scores(kind, statistics, num_kv_heads, group_size, head_size):
    batch = make_batch(CONTEXTS, num_kv_heads, head_size, statistics=statistics, kind=kind)
    query = torch.randn(len(CONTEXTS), num_kv_heads, group_size, head_size).bfloat16()
    scores = score_pages(query, batch.statistics, batch.block_table, batch.num_pages, 0.7)
    assert scores.dtype == torch.bfloat16
    assert scores.shape == (len(CONTEXTS), num_kv_heads, 125)
    for request, pages in enumerate(batch.num_pages.tolist()):
        assert scores[request, :, pages:].eq(-torch.inf).all()
        if pages == 0:
            continue
        exact = exact_scores(batch, query, request, 0.7, statistics)
        # One rounding to bfloat16, and float32 sums whose terms may cancel.
        tolerance = exact.abs() * 2**-8 + 1e-4
        assert ((scores[request, :, :pages].double() - exact).abs() <= tolerance).all()


@pytest.mark.parametrize("statistics", ["int8", "bf16"])
def test_a_row_does_not_depend_on_its_neighbours(statistics):
    batch = make_batch(CONTEXTS, 2, 64, statistics=statistics)
    query = torch.randn(len(CONTEXTS), 2, 4, 64).bfloat16()
    together = score_pages(query, batch.statistics, batch.block_table, batch.num_pages, 1.0)
    for request, pages in enumerate(batch.num_pages.tolist()):
        row = slice(request, request + 1)
        alone = score_pages(query[row], batch.statistics, batch.block_table[row], batch.num_pages[row], 1.0)
        assert torch.equal(alone[0], together[request, :, :pages])


def test_a_nan_query_scores_nan():
    batch = make_batch([64], 1, 64)
    query = torch.full((1, 1, 4, 64), torch.nan).bfloat16()
    assert score_pages(query, batch.statistics, batch.block_table, batch.num_pages, 1.0).isnan().all()


@pytest.mark.parametrize("head", range(4))
def test_a_nan_of_one_query_head_is_seen(head):
    batch = make_batch([130], 2, 64)
    query = torch.randn(1, 2, 4, 64).bfloat16()
    query[0, 1, head, 5] = torch.nan
    scores = score_pages(query, batch.statistics, batch.block_table, batch.num_pages, 1.0)
    assert scores[0, 1].isnan().all()
    assert scores[0, 0].isfinite().all()


def test_no_tokens():
    batch = make_batch([64], 1, 64)
    none = torch.empty(0, dtype=torch.int64)
    scores = score_pages(torch.empty(0, 1, 2, 64), batch.statistics, batch.block_table[:0], none, 1.0)
    assert scores.shape == (0, 1, 0)


def test_mismatched_shapes_are_refused():
    batch = make_batch([64], 2, 64)
    with pytest.raises(ValueError, match="query: got 1 KV heads of size 64"):
        score_pages(torch.zeros(1, 1, 2, 64), batch.statistics, batch.block_table, batch.num_pages, 1.0)
    with pytest.raises(ValueError, match="block_table and num_pages"):
        score_pages(torch.zeros(2, 2, 2, 64), batch.statistics, batch.block_table, batch.num_pages, 1.0)


UNWRITTEN = 7.0


def triton_scores(
    batch, query: torch.Tensor, std_weight: float, lengths: torch.Tensor, page_size: int = 0, skipped=None
):
    from sparse_kernels.page_score import triton

    width = batch.block_table.shape[1] * batch.statistics.pages_per_block
    scores = torch.full((len(query), query.shape[1], width), UNWRITTEN).bfloat16()
    # A slice of a wider tensor, as vLLM's query is.
    wide = torch.cat([query.flatten(1, 2), torch.full_like(query[:, 0], torch.nan)], dim=1)
    requests = DecodeBatch(wide[:, : query.shape[1] * query.shape[2]], batch.block_table.int(), lengths.int())
    triton.launch_scores(requests, batch.statistics, page_size, std_weight, scores, skipped)
    return scores


@pytest.mark.usefixtures("interpreted")
def test_few_triton_programs_score_many_pages(monkeypatch):
    from sparse_kernels.page_score import triton

    batch = make_batch([1000, 8, 7, 1029], 2, 64, kind="bounds")
    query = torch.randn(4, 2, 4, 64).bfloat16()
    expected = triton_scores(batch, query, 0.0, batch.num_pages)
    for programs in (1, 16):
        monkeypatch.setattr(triton, "_PROGRAMS", programs)
        assert torch.equal(triton_scores(batch, query, 0.0, batch.num_pages), expected)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("statistics", "num_kv_heads", "group_size", "head_size"),
    [("int8", 2, 4, 64), ("fp8", 1, 3, 96), ("bf16", 2, 1, 64)],
)
@pytest.mark.parametrize("kind", VECTOR_KINDS)
def test_triton_scores_are_the_reference_within_one_rounding(kind, statistics, num_kv_heads, group_size, head_size):
    batch = make_batch([1000, 8, 7, 505], num_kv_heads, head_size, statistics=statistics, kind=kind)
    query = torch.randn(4, num_kv_heads, group_size, head_size).bfloat16()
    expected = reference.score_pages(query, batch.statistics, batch.block_table, batch.num_pages, 0.7)
    actual = triton_scores(batch, query, 0.7, batch.num_pages)
    for request, pages in enumerate(batch.num_pages.tolist()):
        assert_within_one_rounding(actual[request, :, :pages], expected[request, :, :pages])
        assert actual[request, :, pages:].eq(UNWRITTEN).all(), "written beyond a row's pages"


@pytest.mark.usefixtures("interpreted")
def test_triton_scores_of_several_query_tokens_end_where_each_token_does():
    batch = make_batch([519, 130], 2, 64, kind="bounds")
    query = torch.randn(6, 2, 4, 64).bfloat16()
    lengths = torch.tensor([517, 518, 519, 128, 129, 130]) // 8
    table = batch.block_table.repeat_interleave(3, dim=0)
    expected = reference.score_pages(query, batch.statistics, table, lengths, 0.0)
    actual = triton_scores(batch, query, 0.0, batch.context_lens, page_size=8)
    for token, pages in enumerate(lengths.tolist()):
        assert_within_one_rounding(actual[token, :, :pages], expected[token, :, :pages])
        assert actual[token, :, pages:].eq(UNWRITTEN).all()


@pytest.mark.usefixtures("interpreted")
def test_triton_scores_no_group_that_is_skipped():
    batch = make_batch([300, 130], 2, 64, kind="bounds")
    query = torch.randn(2, 2, 4, 64).bfloat16()
    every = triton_scores(batch, query, 0.0, batch.num_pages)
    skipped = torch.tensor([[0, 1], [1, 0]], dtype=torch.uint8)
    some = triton_scores(batch, query, 0.0, batch.num_pages, skipped=skipped)
    assert torch.equal(some, torch.where(skipped.bool()[..., None], UNWRITTEN, every))


class Deviation(StatisticsKind):
    """A score unlike any kind: it is not linear in the record, and its weight is in the features."""

    name = "deviation"
    vectors = 2
    has_spread = True

    @staticmethod
    def summarise(keys):
        mean = keys.mean(dim=-2)
        return torch.stack([mean, (keys - mean.unsqueeze(-2)).square().mean(dim=-2)], dim=-2), keys.amax(dim=(-1, -2))

    @staticmethod
    def features(query, std_weight):
        return torch.stack([query, (std_weight * query).square()], dim=-2)

    @staticmethod
    def combine(products):
        return products[..., 0] + products[..., 1].clamp(min=0).sqrt()


def deviation_features(query, std_weight):
    return query, std_weight * query * std_weight * query


def deviation_combine(products):
    return products[0] + tl.sqrt_rn(tl.maximum(products[1], 0.0))


@pytest.mark.parametrize("implementation", ["api", "triton"])
def test_a_new_kind_needs_nothing_but_its_class(implementation, request):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(6, 2, 64, 128, generator=generator).bfloat16()
    layout = StatisticsLayout(8, 64, "bf16", kind=Deviation())
    views = layout.views(torch.zeros(6, 2, layout.rows(64), 128).bfloat16(), 64)
    pages = torch.arange(48)
    update_page_statistics(PagedTensor.from_rows(rows[..., :64], 8), views, pages // 8, pages % 8)
    query = torch.randn(1, 2, 4, 64, generator=generator).bfloat16()
    arguments = query, views, torch.arange(6)[None], torch.tensor([48]), 2.0
    keys = rows[..., :64].double().unflatten(2, (8, 8)).transpose(1, 2).flatten(0, 1)
    variance = keys.var(dim=2, correction=0).bfloat16().double()
    exact = torch.einsum("hgd,phd->hgp", query[0].double(), keys.mean(dim=2).bfloat16().double())
    exact += 2 * torch.einsum("hgd,phd->hgp", query[0].double().square(), variance).sqrt()
    exact += 2 * query[0].double().norm(dim=-1)[..., None] * keys.amax(dim=(2, 3)).T[:, None]
    if implementation == "api":
        scores = score_pages(*arguments)
    else:
        request.getfixturevalue("interpreted")
        from sparse_kernels.page_score import triton
        from triton import jit

        Deviation.triton_features, Deviation.triton_combine = jit(deviation_features), jit(deviation_combine)

        scores = torch.zeros(1, 2, 48).bfloat16()
        requests = DecodeBatch(query.flatten(1, 2), torch.arange(6).int()[None], torch.tensor([48]).int())
        triton.launch_scores(requests, views, 0, 2.0, scores)
    assert ((scores[0].double() - exact.amax(dim=1)).abs() <= exact.amax(dim=1).abs() * 2**-7).all()
