import pytest
import torch
from sparse_kernels.page_statistics import (
    KINDS,
    STATISTICS_FORMATS,
    StatisticsLayout,
    update_page_statistics,
)
from sparse_kernels.paging import PagedTensor
from support.paged import VECTOR_KINDS, garbage, make_batch


def exact_record(kind: str, keys: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Vectors and spread of pages of keys `[pages, page_size, num_kv_heads, head_size]` float64, from the papers."""
    match kind:
        case "mean_and_spread":
            return [keys.mean(dim=1)], keys.std(dim=1, correction=0).norm(dim=-1)
        case "bounds":
            return [keys.max(dim=1).values, keys.min(dim=1).values], None
        case "representatives":
            merit = torch.einsum("pihd,pjhd->pih", keys, keys)
            count = keys.shape[1] // 4
            kept = merit >= merit.sort(dim=1, descending=True).values[:, count - 1 : count]
            return [(keys * kept[..., None]).sum(dim=1) / count], None
    raise AssertionError(kind)


def stored_vectors(batch, request: int) -> torch.Tensor:
    """`[num_pages, num_kv_heads, vectors, head_size]` float64, dequantised."""
    statistics = batch.statistics
    page = torch.arange(int(batch.num_pages[request]))
    per_block = statistics.pages_per_block
    where = batch.block_table[request, page // per_block], slice(None), page % per_block
    vectors = statistics.vectors.float()[where].double().unflatten(-1, (statistics.kind.vectors, -1))
    return vectors if statistics.scales is None else vectors * statistics.scales[where].double()[..., None]


@pytest.mark.parametrize("page_size", [8, 16, 32])
@pytest.mark.parametrize("statistics", STATISTICS_FORMATS)
@pytest.mark.parametrize(("head_size", "num_kv_heads"), [(64, 2), (96, 1), (128, 4), (256, 1)])
@pytest.mark.parametrize("kind", VECTOR_KINDS)
def test_statistics_of_full_pages(kind, statistics, page_size, head_size, num_kv_heads):
    batch = make_batch(
        [200, 64, 7, 63, 65], num_kv_heads, head_size, page_size=page_size, statistics=statistics, kind=kind
    )
    for request, key in enumerate(batch.keys):
        pages = int(batch.num_pages[request])
        if pages == 0:
            continue
        exact, spread = exact_record(kind, key[: pages * page_size].double().unflatten(0, (pages, page_size)))
        stored = stored_vectors(batch, request)
        assert stored.shape[2] == len(exact)
        for vector, wanted in enumerate(exact):
            largest = wanted.abs().amax(dim=-1, keepdim=True)
            # One step of int8, half a step of other formats.
            allowed = {
                "int8": largest / 125, "fp8": wanted.abs() / 16 + largest / 2**18, "bf16": wanted.abs() / 256
            }[statistics]  # fmt: skip
            assert ((stored[:, :, vector] - wanted).abs() <= allowed + 1e-5 * largest).all()
        if spread is None:
            assert batch.statistics.spread is None
            continue
        page = torch.arange(pages)
        per_block = batch.statistics.pages_per_block
        found = batch.statistics.spread[batch.block_table[request, page // per_block], :, page % per_block]
        torch.testing.assert_close(found.double(), spread, rtol=2**-8, atol=0)


@pytest.mark.parametrize("kind", VECTOR_KINDS)
@pytest.mark.parametrize("statistics", STATISTICS_FORMATS)
def test_rewriting_a_page_leaves_no_trace_of_the_old_one(kind, statistics):
    first = make_batch([128], 2, 64, statistics=statistics, kind=kind, seed=1)
    before = [part.clone() for part in first.statistics.parts]
    update_page_statistics(first.paged_keys, first.statistics, first.block_table[0, :1], torch.tensor([3]))
    after = first.statistics.parts
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, after, strict=True))


def test_constant_and_zero_keys():
    rows = torch.zeros(1, 1, 64, 128, dtype=torch.bfloat16)
    rows[:, :, 8:16] = 3.0
    layout = StatisticsLayout(8, 64, "int8")
    cache = garbage(1, 1, layout.rows(64), 128, generator=torch.Generator().manual_seed(0))
    views = layout.views(cache, 64)
    keys = PagedTensor.from_rows(rows[..., :64], 8)
    update_page_statistics(keys, views, torch.zeros(2, dtype=torch.int64), torch.arange(2))
    assert views.vectors[0, 0, 0].eq(0).all()
    assert views.scales[0, 0, 0] == 0
    torch.testing.assert_close(
        views.vectors[0, 0, 1] * views.scales[0, 0, 1].float(), torch.full((64,), 3.0), rtol=0.01, atol=0
    )
    assert views.spread[0, 0, :2].eq(0).all()


def test_no_pages_is_no_work():
    batch = make_batch([64], 1, 64)
    none = torch.empty(0, dtype=torch.int64)
    before = batch.statistics.spread.clone()
    update_page_statistics(batch.paged_keys, batch.statistics, none, none)
    torch.testing.assert_close(batch.statistics.spread, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("statistics", STATISTICS_FORMATS)
@pytest.mark.parametrize("kind", VECTOR_KINDS)
def test_every_word_is_a_finite_bfloat16(kind, statistics):
    """Another layer's kernel may multiply these words by zero."""
    layout = StatisticsLayout(8, 64, statistics, kind=KINDS[kind])
    rows = torch.randn(2000, 1, 64, 128).bfloat16()
    rows[::3] *= 1e4
    cache = torch.zeros(2000, 1, layout.rows(64), 128, dtype=torch.bfloat16)
    blocks, pages = torch.arange(2000).repeat_interleave(8), torch.arange(8).repeat(2000)
    update_page_statistics(PagedTensor.from_rows(rows[..., :64], 8), layout.views(cache, 64), blocks, pages)
    assert cache.isfinite().all()
    assert cache.count_nonzero() > cache.numel() // 2


@pytest.mark.parametrize("page_size", [8, 16, 32])
@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("statistics", STATISTICS_FORMATS)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8], ids=str)
@pytest.mark.parametrize("kind", VECTOR_KINDS)
def test_records_fit_their_rows_and_do_not_overlap(kind, cache_dtype, statistics, head_size, page_size):
    layout = StatisticsLayout(page_size, head_size, statistics, cache_dtype.itemsize, KINDS[kind])
    block_size = 2 * layout.unit_tokens
    rows = torch.zeros(2, 3, layout.rows(block_size), 2 * head_size, dtype=cache_dtype)
    for value, part in enumerate(layout.views(rows, block_size).parts, start=1):
        assert part.data_ptr() >= rows.data_ptr()
        raw = part.view(torch.uint8)
        assert raw.eq(0).all(), "two parts share bytes"
        raw.fill_(value)
    # Bytes of vectors over bytes of keys and values. Scalars and padding take one row per 64 tokens; small records
    # share one row per 16 tokens with them.
    record_bytes = {"int8": 1, "fp8": 1, "bf16": 2}[statistics] * KINDS[kind].vectors
    share = record_bytes / (2 * cache_dtype.itemsize * page_size)
    assert share <= layout.memory_overhead <= max(share + 1 / 64, 1 / 16)


def test_overhead_of_the_default_format_is_one_row_in_sixteen():
    assert StatisticsLayout(8, 128, "int8").memory_overhead == 1 / 16


@pytest.mark.parametrize("statistics", ["int8", "fp8"])
def test_eight_bit_records_in_a_one_byte_cache_share_rows_over_256_tokens(statistics):
    layout = StatisticsLayout(8, 128, statistics, cache_itemsize=1)
    assert (layout.unit_tokens, layout.unit_rows) == (256, 17)
    assert layout.memory_overhead < 0.07


@pytest.mark.parametrize(
    ("statistics", "cache_itemsize", "block_size", "unit"),
    [("int8", 2, 24, 16), ("bf16", 2, 32, 64), ("int8", 1, 64, 256), ("bf16", 1, 384, 256)],
)
def test_blocks_that_hold_no_whole_unit_are_refused(statistics, cache_itemsize, block_size, unit):
    with pytest.raises(ValueError, match=rf"block_size: got {block_size}, allowed: a multiple of {unit} "):
        StatisticsLayout(8, 128, statistics, cache_itemsize).rows(block_size)


def test_mismatched_arguments_are_refused():
    batch = make_batch([64], 1, 64)
    with pytest.raises(ValueError, match="blocks and pages"):
        update_page_statistics(batch.paged_keys, batch.statistics, torch.zeros(2, dtype=torch.int64), torch.zeros(1))
    other = make_batch([64], 1, 64, page_size=16)
    with pytest.raises(ValueError, match="pages per block"):
        update_page_statistics(other.paged_keys, batch.statistics, torch.zeros(1).long(), torch.zeros(1).long())


def test_pages_that_do_not_divide_a_block_are_refused():
    with pytest.raises(ValueError, match="page_size: got 12, allowed: a divisor of the block size 64"):
        PagedTensor.from_rows(torch.zeros(1, 1, 64, 64), 12)
