"""The layout of a decode step on a GPU, tested without a GPU."""

from dataclasses import replace
from itertools import product

import pytest
from sparse_kernels.limits import MAX_K, DecodeShape, shared_bytes_of
from sparse_kernels.sparse_decode.launches import (
    MOST_PAGES_AT_ONCE,
    NO_CANDIDATES,
    Launch,
    in_pieces,
    launch_of,
    most_shared_bytes,
    shared_bytes,
)

HOPPER = (9, 0)
NARROW = DecodeShape(group_size=4, head_size=128, max_pages=4096, k=64)
WIDE = DecodeShape(group_size=16, head_size=256, max_pages=4096, k=64)
STOPPING = DecodeShape(group_size=4, head_size=128, max_pages=4096, k=64, stopping=True)
INT8, QUARTERS = 128, 256
"""Bytes of a record's vectors at head size 128."""


@pytest.mark.parametrize(
    ("rows", "shape", "record_bytes", "expected"),
    [
        (2, NARROW, INT8, Launch(True, 8, 16, 1, most_fused=1 << 12)),
        (3, NARROW, INT8, Launch(True, 8, 16, 1)),
        (8, NARROW, INT8, Launch(True, 8, 16, 1)),
        (2, NARROW, QUARTERS, Launch(True, 8, 16, 1, most_fused=1 << 12)),
        (8, NARROW, QUARTERS, Launch(True, 8, 16, 1, most_fused=1 << 13)),
        (9, NARROW, QUARTERS, Launch(True, 4, 16, 1)),
        (9, NARROW, INT8, Launch(True, 4, 16, 1)),
        (24, NARROW, INT8, Launch(True, 4, 16, 1)),
        (25, NARROW, INT8, Launch(True, 2, 16, 1)),
        (66, NARROW, INT8, Launch(True, 2, 16, 1)),
        (67, NARROW, INT8, Launch(True, 1, 16, 1, most_fused=1 << 13)),
        (132, NARROW, INT8, Launch(True, 1, 16, 1, most_fused=1 << 13)),
        (133, NARROW, INT8, Launch(True, 1, 8, 2, most_fused=1 << 13)),
        (32, NARROW, QUARTERS, Launch(True, 2, 16, 1)),
        (33, NARROW, QUARTERS, Launch(True, 2, 8, 1)),
        (56, NARROW, QUARTERS, Launch(True, 2, 8, 1)),
        (57, NARROW, QUARTERS, Launch(True, 2, 8, 2)),
        (67, NARROW, QUARTERS, Launch(True, 1, 8, 2, most_fused=1 << 13)),
        (67, WIDE, QUARTERS, Launch(True, 4, 8, 1)),
        (8, WIDE, INT8, Launch(True, 8, 8, 1)),
        (1000, WIDE, INT8, Launch(True, 4, 8, 1)),
        (1000, STOPPING, INT8, Launch(True, 4, 8, 2)),
        (1000, DecodeShape(16, 256, 4096, 64, stopping=True), INT8, Launch(True, 8, 8, 1)),
        (8, DecodeShape(4, 128, 1 << 19, 64), INT8, Launch(True, 8, 16, 1)),
        (8, NARROW, 0, Launch(False, 8, 16, 1, listed=True)),
    ],
)
def test_the_launch_follows_from_rows_and_shape(
    rows: int, shape: DecodeShape, record_bytes: int, expected: Launch
) -> None:
    assert launch_of(rows, shape, record_bytes, HOPPER) == expected


@pytest.mark.parametrize(
    ("rows", "shape", "expected"),
    [
        (8, NARROW, Launch(True, 8, 16, 1, most_fused=NO_CANDIDATES)),
        (48, NARROW, Launch(True, 2, 16, 1, most_fused=NO_CANDIDATES)),
        (67, DecodeShape(4, 128, 1 << 16, 64), Launch(True, 1, 16, 1, most_fused=NO_CANDIDATES)),
        (48, DecodeShape(4, 128, (1 << 16) + 8, 64), Launch(False, 2, 16, 1, listed=True, most_fused=NO_CANDIDATES)),
    ],
)
def test_two_levels_have_no_candidates(rows: int, shape: DecodeShape, expected: Launch) -> None:
    launch = launch_of(rows, shape, QUARTERS, HOPPER, leveled=True)
    assert launch == expected
    assert launch.candidates(shape) == 0
    assert shared_bytes(launch, shape) <= shared_bytes_of(HOPPER)


def test_without_clusters_a_row_has_one_block_that_does_not_score() -> None:
    assert launch_of(8, NARROW, INT8, (8, 0)) == Launch(False, 1, 8, 2)
    assert launch_of(8, DecodeShape(1, 256, 4096, 64), INT8, (8, 9)) == Launch(False, 1, 8, 1)
    with pytest.raises(ValueError, match=r"rule: got one on compute capability 8\.x, allowed: 9\.0 or later"):
        launch_of(8, STOPPING, INT8, (8, 9))


@pytest.mark.parametrize("stopping", [False, True])
@pytest.mark.parametrize("rows", [8, 1000])
def test_a_launch_does_not_follow_from_the_longest_context(rows: int, stopping: bool) -> None:
    """A server that serves a million tokens has the launch of one that serves 32K, and one launch before it."""
    for record_bytes in (INT8, QUARTERS):
        short, long = (
            launch_of(rows, DecodeShape(4, 128, pages, 1024, stopping), record_bytes, HOPPER)
            for pages in (4096, 1 << 17)
        )
        assert short == long
        assert short.candidates(DecodeShape(4, 128, 4096, 1024, stopping)) == 0
        assert long.candidates(DecodeShape(4, 128, 1 << 17, 1024, stopping)) == 16 * 1024


def test_a_gpu_with_more_multiprocessors_has_more_blocks_for_as_many_rows() -> None:
    for rows in (8, 9, 24, 25, 66, 67, 132, 133):
        twice = launch_of(2 * rows, NARROW, INT8, (10, 0), multiprocessors=264)
        assert twice == launch_of(rows, NARROW, INT8, HOPPER)
    assert launch_of(20, NARROW, INT8, HOPPER, multiprocessors=16) == launch_of(133, NARROW, INT8, HOPPER)
    assert launch_of(1, NARROW, INT8, HOPPER, multiprocessors=16).cluster == 4


@pytest.mark.parametrize("rows", [8, 1000])
def test_pages_come_from_memory_where_a_block_cannot_number_what_it_selects_from(rows: int) -> None:
    shape = DecodeShape(4, 128, 1 << 24, 1024)
    listed = launch_of(rows, shape, INT8, HOPPER)
    assert listed.listed
    assert not listed.fused
    assert listed.keys(shape) == listed.candidates(shape) == 0


def test_a_block_has_room_for_what_it_selects_from() -> None:
    launch = Launch(True, 1, 8, 2, most_fused=8192)
    for pages, k, keys in ((8192, 64, 8192), (8193, 64, 8193), (1 << 17, 64, 1 << 14), (1 << 19, 1024, 1 << 16)):
        assert launch.keys(DecodeShape(4, 128, pages, k)) == keys
    assert launch._replace(fused=False).keys(DecodeShape(4, 128, 1 << 16, 64)) == 1 << 16


def test_pages_come_from_memory_sooner_where_shared_memory_is_short() -> None:
    assert not launch_of(8, DecodeShape(4, 128, 1 << 15, 64), INT8, (8, 0)).listed
    assert launch_of(8, DecodeShape(4, 128, (1 << 15) + 1, 64), INT8, (8, 0)).listed


@pytest.mark.parametrize(
    ("rows", "shape", "leveled", "expected"),
    [
        # The sums of a row's chains find no room in one thread block, or the keys beside them.
        (133, DecodeShape(8, 128, 1 << 13, 64), False, Launch(True, 2, 8, 2, most_fused=1 << 13)),
        (133, DecodeShape(8, 128, 1 << 17, MAX_K), False, Launch(True, 4, 8, 2, most_fused=1 << 13)),
        (133, DecodeShape(8, 128, 1 << 16, 64), True, Launch(False, 2, 8, 2, listed=True, most_fused=NO_CANDIDATES)),
        (1, DecodeShape(16, 256, 1 << 14, 64), False, Launch(False, 8, 8, 1, listed=True, most_fused=1 << 12)),
    ],
)
def test_a_gpu_with_little_shared_memory_has_more_blocks_to_a_row(
    rows: int, shape: DecodeShape, leveled: bool, expected: Launch
) -> None:
    assert launch_of(rows, shape, INT8, (12, 0), leveled) == expected


@pytest.mark.parametrize(
    ("shape", "capability", "expected"),
    [
        (NARROW, HOPPER, False),
        (DecodeShape(4, 128, 1 << 24, 64), HOPPER, False),
        (DecodeShape(4, 128, 4096, MOST_PAGES_AT_ONCE), HOPPER, False),
        (DecodeShape(4, 128, 4096, MOST_PAGES_AT_ONCE + 1), HOPPER, True),
        (WIDE, HOPPER, False),
        (DecodeShape(17, 32, 4096, 64), HOPPER, True),
        (DecodeShape(17, 32, 4096, 64, stopping=True), HOPPER, False),
        (DecodeShape(4, 128, 1 << 24, 64), (8, 0), False),
        (DecodeShape(5, 128, 4096, 64), (8, 0), True),
        (WIDE, (12, 0), False),
    ],
)
def test_selections_are_cut_into_pieces_by_their_shape(
    shape: DecodeShape, capability: tuple[int, int], expected: bool
) -> None:
    assert in_pieces(shape, capability) is expected


SHAPES = [
    DecodeShape(group, head_size, pages, k, stopping)
    for group, head_size, pages, k, stopping in product(
        (1, 4, 8, 16), (64, 128, 256), (64, 1 << 14, 1 << 16), (16, 1024), (False, True)
    )
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_batch_takes_more_shared_memory_than_admission_counts(shape: DecodeShape) -> None:
    found = max(
        shared_bytes(launch_of(rows, shape, record_bytes, HOPPER, multiprocessors=multiprocessors), shape)
        for multiprocessors, most_rows in ((16, 40), (132, 300))
        for rows in range(1, most_rows)
        for record_bytes in (0, 64, 128, 256, 512)
    )
    assert most_shared_bytes(shape, HOPPER) == found


@pytest.mark.parametrize("stopping", [False, True])
@pytest.mark.parametrize("k", [64, MAX_K])
def test_long_contexts_fit_a_gpu_with_less_shared_memory(stopping: bool, k: int) -> None:
    for pages in (1 << 14, 1 << 16, 1 << 17, 1 << 24):
        assert most_shared_bytes(DecodeShape(4, 128, pages, k, stopping), HOPPER) < shared_bytes_of((12, 0))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), HOPPER, (12, 0)])
def test_room_for_the_largest_budget_of_one_launch_cuts_no_selection_into_pieces(capability: tuple[int, int]) -> None:
    """A server with room for budgets by request has the launches, and the bits, of one without."""
    for group, head_size, pages in product((1, 2, 4, 5, 7, 8, 16), (32, 64, 80, 128, 192, 256), (64, 1 << 14, 1 << 18)):
        shape = DecodeShape(group, head_size, pages, 64)
        assert in_pieces(shape, capability) == in_pieces(replace(shape, k=MAX_K), capability)
