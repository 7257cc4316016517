"""The chunks of a context whose best pages are candidates (`Chunks` in params.cuh), without a GPU."""

import subprocess
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from sparse_kernels.cuda.shared_memory import round_up
from sparse_kernels.limits import MAX_K, DecodeShape
from sparse_kernels.sparse_decode.launches import MOST_CHUNK, Launch
from support.emulated import HEADERS, compile_program, needs_compiler

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled program."""
    return compile_program(tmp_path_factory.mktemp("chunks"), "chunks", (HEADERS / "params.cuh",))


def chunks_of(program: Path, cases: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Size, pages kept, number of chunks and of candidates for pages, k, parts, least size and room."""
    text = "\n".join(" ".join(map(str, case)) for case in cases)
    done = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
    return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]


def test_candidates_of_every_context_find_room(program: Path) -> None:
    cases, longest = [], (4097, 16384, 16385, 131072, 1 << 19)
    for most_pages, most_k, parts, least in product(longest, (1, 64, 100, MAX_K), (1, 3, 33, 264), (64, 128, 4096)):
        shape = DecodeShape(4, 128, most_pages, most_k)
        room = round_up(Launch(True, 8, 16, 1, most_fused=0).candidates(shape), 8)
        pages = {1, 37, 4096, 5000, 16384, 16385, 20000, 131072, 500000, most_pages}
        for num_pages, k in product((n for n in pages if n <= most_pages), {1, 17, 64, most_k}):
            if k <= most_k:
                cases.append((num_pages, k, parts, least, room))
    found = chunks_of(program, cases)
    assert len(found) == len(cases)
    for (num_pages, k, parts, least, room), (size, kept, count, candidates) in zip(cases, found, strict=True):
        assert size % 32 == 0
        assert least <= size <= MOST_CHUNK
        assert (count - 1) * size < num_pages <= count * size
        assert kept == (size if num_pages <= room and size <= 4 * k else min(k, size))
        assert candidates == (count - 1) * kept + min(kept, num_pages - (count - 1) * size)
        assert candidates <= room
        if size < MOST_CHUNK:
            assert count <= parts or num_pages > room


@pytest.mark.parametrize(
    ("case", "size", "candidates"),
    [
        ((16384, 64, 264, 128, 16384), 128, 16384),
        ((16384, 64, 65, 128, 16384), 256, 16384),
        ((16384, 63, 65, 128, 16384), 256, 64 * 63),
        ((16384, 64, 33, 128, 16384), 512, 32 * 64),
        ((16384, 1024, 33, 128, 16384), 512, 16384),
        ((131072, 64, 33, 128, 16384), 4000, 33 * 64),
        ((131072, 1024, 33, 128, 16384), 8192, 16384),
        ((131072, 64, 264, 128, 16384), 512, 16384),
        ((20000, 64, 264, 128, 1 << 14), 128, 157 * 64 - 96 + 64),
    ],
)
def test_thread_blocks_have_equal_chunks(program: Path, case: tuple[int, ...], size: int, candidates: int) -> None:
    ((found, *_, number),) = chunks_of(program, [case])
    assert (found, number) == (size, candidates)
