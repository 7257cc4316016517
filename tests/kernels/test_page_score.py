import pytest
import torch
from sparse_kernels.page_score import reference, score_pages
from sparse_kernels.page_statistics import STATISTICS_FORMATS
from sparse_kernels.page_statistics.reference import page_mean_and_std, quantise_mean
from support.paged import make_batch

CONTEXTS = [1000, 8, 7, 505, 64, 72, 999]
SHAPES = [(1, 1, 64), (2, 4, 64), (1, 16, 128), (2, 3, 96), (1, 8, 256), (4, 1, 128)]


def exact_scores(batch, query: torch.Tensor, request: int, std_weight: float, statistics: str) -> torch.Tensor:
    """`[num_kv_heads, num_pages]` float64, straight from the keys."""
    pages = int(batch.num_pages[request])
    key = batch.keys[request][: pages * batch.page_size].unflatten(0, (pages, batch.page_size)).transpose(1, 2)
    mean, std = page_mean_and_std(key)
    if statistics == "bf16":
        mean = mean.bfloat16().double()
    else:
        stored, scale = quantise_mean(mean, {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[statistics])
        mean = stored.float().double() * scale.double()[..., None]
    std = std.bfloat16()
    query = query[request].double()
    raw = (
        torch.einsum("hgd,phd->hgp", query, mean) + std_weight * query.norm(dim=-1)[..., None] * std.double().T[:, None]
    )
    return raw.amax(dim=1)


@pytest.mark.parametrize("statistics", STATISTICS_FORMATS)
@pytest.mark.parametrize(("num_kv_heads", "group_size", "head_size"), SHAPES)
def test_scores(statistics, num_kv_heads, group_size, head_size):
    batch = make_batch(CONTEXTS, num_kv_heads, head_size, statistics=statistics)
    query = torch.randn(len(CONTEXTS), num_kv_heads, group_size, head_size).bfloat16()
    scores = score_pages(query, batch.statistics, batch.block_table, batch.num_pages, 0.7)
    assert scores.dtype == torch.bfloat16
    assert scores.shape == (len(CONTEXTS), num_kv_heads, 125)
    for request, pages in enumerate(batch.num_pages.tolist()):
        exact = exact_scores(batch, query, request, 0.7, statistics)
        # One rounding to bfloat16, and float32 sums whose terms may cancel.
        tolerance = exact.abs() * 2**-8 + 1e-4
        assert ((scores[request, :, :pages].double() - exact).abs() <= tolerance).all()
        assert scores[request, :, pages:].eq(-torch.inf).all()


@pytest.mark.parametrize(("num_kv_heads", "group_size", "head_size"), SHAPES)
def test_compiled_scores_are_the_reference_within_one_rounding(num_kv_heads, group_size, head_size):
    batch = make_batch(CONTEXTS, num_kv_heads, head_size)
    query = torch.randn(len(CONTEXTS), num_kv_heads, group_size, head_size).bfloat16()
    arguments = query, batch.statistics, batch.block_table, batch.num_pages, 1.0
    compiled, expected = score_pages(*arguments), reference.score_pages(*arguments)
    ordinal = [
        torch.where(bits < 0, bits ^ 0x7FFF, bits) for bits in (s.view(torch.int16).int() for s in (compiled, expected))
    ]
    assert (ordinal[0] - ordinal[1]).abs().max() <= 1


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
    query = torch.full((1, 1, 2, 64), torch.nan).bfloat16()
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
