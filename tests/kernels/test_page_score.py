import pytest
import torch
from sparse_kernels.page_score import reference, score_pages
from sparse_kernels.page_statistics import STATISTICS_FORMATS
from sparse_kernels.page_statistics.reference import quantise
from support.paged import VECTOR_KINDS, make_batch

CONTEXTS = [1000, 8, 7, 505, 64, 72, 999]
SHAPES = [(1, 1, 64), (2, 4, 64), (1, 16, 128), (2, 3, 96), (1, 8, 256), (4, 1, 128)]
# Compiled for each shape and kind: the default's kind in all shapes, the others in two.
CASES = [
    (kind, *shape) for kind in VECTOR_KINDS for shape in (SHAPES if kind == "mean_and_spread" else [(2, 4, 64), (2, 3, 96)])
]


def exact_scores(batch, query: torch.Tensor, request: int, std_weight: float, statistics: str) -> torch.Tensor:
    """`[num_kv_heads, num_pages]` float64, straight from the keys and the formula of each kind of statistics."""
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


@pytest.mark.parametrize(("kind", "num_kv_heads", "group_size", "head_size"), CASES)
def test_compiled_scores_are_the_reference_within_one_rounding(kind, num_kv_heads, group_size, head_size):
    batch = make_batch(CONTEXTS, num_kv_heads, head_size, kind=kind)
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
