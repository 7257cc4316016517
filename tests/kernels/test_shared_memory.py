"""No launch asks for more shared memory than a GPU has, whatever the shape; without a GPU.

Triton's launches are compiled, see test_triton_sources.py.
"""

from collections.abc import Iterator
from itertools import product

import pytest
from sparse_kernels.cuda.head_parts import parts_of
from sparse_kernels.cuda.shared_memory import piece_bytes, round_up, score_bytes, select_bytes
from sparse_kernels.limits import CLUSTER_CAPABILITY, MAX_K, MAX_PAGES, DecodeShape, shared_bytes_of
from sparse_kernels.page_topk.launches import passes_of
from sparse_kernels.sparse_decode.launches import MOST_CHUNK, Launch, fitting, in_pieces, launch_of, shared_bytes
from sparse_kernels.sparse_decode.refusals import decode_refusals
from sparse_kernels.split_attention.cuda import blocks_of

CAPABILITIES = [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (13, 0)]
UNLIKE = [(8, 0), (8, 6), (9, 0), (12, 0)]
"""Compute capabilities that differ in shared memory or clusters; each other one is like one of them."""
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


GROUPS, HEAD_SIZES_TRIED = (1, 5, 8, 12, 16), (32, 80, 128, 256)
STATIC_BYTES = 48 * 1024
"""The most shared memory of a kernel that does not ask for it at its launch."""


def decode_launches(capability: tuple[int, int], shape: DecodeShape) -> Iterator[Launch]:
    """The launches of all batches, each in every form that `sparse_decode` makes of it."""
    for rows, record_bytes, leveled in product((1, 9, 25, 33, 57, 67, 133, 1000), (0, 128, 256), (False, True)):
        launch = launch_of(rows, shape, record_bytes, capability, leveled)
        yield launch
        # Scores from memory, and a given list.
        yield fitting(launch._replace(fused=False), shape, capability)
        yield launch._replace(fused=False, listed=True)


def test_a_gpu_is_like_one_of_those_that_are_tried() -> None:
    def kind(capability: tuple[int, int]) -> tuple[int, bool]:
        return shared_bytes_of(capability), capability >= CLUSTER_CAPABILITY

    assert {kind(capability) for capability in CAPABILITIES} == {kind(capability) for capability in UNLIKE}


@pytest.mark.parametrize("capability", UNLIKE)
def test_no_decode_step_takes_more_than_the_gpu_has(capability: tuple[int, int]) -> None:
    shapes = product(GROUPS, HEAD_SIZES_TRIED, (64, 1 << 14, 1 << 18), (64, MAX_K), (False, True))
    refused = 0
    for group, head_size, pages, k, stopping in shapes:
        shape = DecodeShape(group, head_size, pages, k, stopping)
        if any(decode_refusals(shape, capability)) or in_pieces(shape, capability):
            refused += 1
            continue
        for launch in decode_launches(capability, shape):
            assert shared_bytes(launch, shape) <= shared_bytes_of(capability), (shape, launch)
            assert launch.keys(shape) <= MAX_PAGES
            assert launch.cluster in ((1, 2, 4, 8) if capability >= CLUSTER_CAPABILITY else (1,))
    # Only stop rules are refused where there are clusters, and only for wide groups of wide heads.
    assert refused < (50 if capability >= CLUSTER_CAPABILITY else 200)


@pytest.mark.parametrize("capability", UNLIKE)
def test_no_attention_takes_more_than_the_gpu_has(capability: tuple[int, int]) -> None:
    available = shared_bytes_of(capability)
    for group, head_size in product((*GROUPS, 17, 71), HEAD_SIZES_TRIED):
        for heads, stopping in product({part.stop - part.start for part in parts_of(group)}, (False, True)):
            blocks, split_bytes = blocks_of(stopping, heads, head_size, capability)
            assert split_bytes == piece_bytes(blocks.warps, heads, head_size, stopping) <= available
            assert blocks.warps >= 1


def test_kernels_that_ask_for_no_shared_memory_need_little() -> None:
    for group, head_size in product(GROUPS, HEAD_SIZES_TRIED):
        query = score_bytes(group, head_size)
        # `page_score` with the sums of each head, and `find_candidates` with the keys of a chunk.
        assert query + 8 * 8 * round_up(group, 8) <= STATIC_BYTES
        assert round_up(query, 16) + round_up(select_bytes(8), 16) + 2 * MOST_CHUNK <= STATIC_BYTES
