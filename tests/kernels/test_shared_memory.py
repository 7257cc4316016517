"""No launch of a selection asks for more shared memory than a GPU has, whatever the shape; without a GPU."""

from itertools import product

import pytest
from sparse_kernels.cuda.shared_memory import round_up
from sparse_kernels.limits import MAX_K, MAX_PAGES, shared_bytes_of
from sparse_kernels.page_coverage.launches import best_bytes, counts_best, fixed_bytes, kept_bytes, kept_pages_of
from sparse_kernels.page_topk.launches import passes_of

CAPABILITIES = [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (13, 0)]
SHORT = [(8, 6), (8, 9), (12, 0)]
"""Compute capabilities with 99 KiB of shared memory for a thread block."""
LENGTHS = [8, 1 << 10, 1 << 14, 47344, 47352, 47360, 1 << 16, (1 << 16) + 8, 1 << 17, 1 << 18, 1 << 20, 1 << 21]
"""Pages of the longest context: with 8 tokens to a page up to 16M tokens."""


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_no_selection_takes_more_than_the_gpu_has(capability: tuple[int, int]) -> None:
    for width, k, crowded in product(LENGTHS, (1, 64, MAX_K), (False, True)):
        passes = passes_of(width, k, crowded, capability)
        first, last = passes[0], passes[-1]
        assert all(one.shared_bytes <= shared_bytes_of(capability) for one in passes)
        assert all(one.size <= one.launch.pages <= MAX_PAGES for one in passes)
        assert first.segments * first.size >= width
        assert (len(passes), last.segments) == (1 + (first.segments > 1), 1)
        assert first.size % 8 == 0
        if first.segments > 1:
            assert (last.size, first.size) == (first.segments * k, max(first.size, k))


@pytest.mark.parametrize("capability", SHORT)
def test_a_gpu_with_little_shared_memory_has_shorter_segments(capability: tuple[int, int]) -> None:
    assert [one.segments for one in passes_of(47352, MAX_K, False, capability)] == [1]
    assert [(one.segments, one.size) for one in passes_of(1 << 16, MAX_K, False, capability)] == [(2, 47352), (1, 2048)]
    assert [one.segments for one in passes_of(1 << 16, MAX_K, False, (9, 0))] == [1]
    with pytest.raises(ValueError, match=r"pages: got 2200000 to select 1024 from, allowed on this GPU: up to 2178192"):
        passes_of(2_200_000, MAX_K, False, capability)
    passes_of(2_178_192, MAX_K, False, capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_no_count_of_a_coverage_keeps_more_than_the_gpu_has(capability: tuple[int, int]) -> None:
    groups = (1, 4, 7, 8, 16, 32, 71, 128)
    for width, cluster, group in product((*LENGTHS, *(8192 * pages for pages in range(1, 20))), (1, 2, 4, 8), groups):
        kept = kept_pages_of(width, cluster, group, capability)
        assert round_up(fixed_bytes(cluster, group), 16) + kept_bytes(kept) <= shared_bytes_of(capability)
        assert kept == 0 or (kept % 8 == 0 and kept * cluster >= width)


def test_a_row_is_counted_from_its_best_pages_where_its_keys_fit() -> None:
    for capability, most in (((9, 0), 1 << 16), ((8, 0), 1 << 16), ((8, 6), 43912), ((12, 0), 43912)):
        assert counts_best(most, MAX_K, 4, 128, capability)
        assert not counts_best(most + 8, MAX_K, 4, 128, capability)
        assert best_bytes(most, 4, 128) <= shared_bytes_of(capability)
    assert counts_best(8, 1, 16, 256, (8, 6))
    for k, group in ((MAX_K + 1, 4), (MAX_K, 17)):
        assert not counts_best(8, k, group, 128, (9, 0))


def test_a_block_keeps_its_pages_where_they_fit() -> None:
    half_a_million, a_million = 1 << 16, 1 << 17
    for width, cluster, group in ((half_a_million, 4, 8), (a_million, 8, 4)):
        assert kept_pages_of(width, cluster, group, (9, 0)) == width // cluster
        assert kept_pages_of(width, cluster, group, (12, 0)) == 0
        assert kept_pages_of(width // 2, cluster, group, (12, 0)) == width // 2 // cluster
        assert kept_pages_of(width // 2, cluster, group, (8, 9)) == 0
    assert kept_pages_of(2 * a_million, 8, 4, (9, 0)) == 0
