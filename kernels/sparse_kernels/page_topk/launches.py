"""Lays the selection of a row's pages out over a GPU, and counts the shared memory that it takes. This needs no GPU."""

from __future__ import annotations

from typing import NamedTuple

from sparse_kernels.cuda.shared_memory import round_up, select_bytes
from sparse_kernels.limits import MAX_PAGES, shared_bytes_of


class Launch(NamedTuple):
    """How the keys of a row lie in the threads of a block."""

    pages: int
    """Largest number of pages this row of the table is for."""
    warps: int
    per_thread: int


class Pass(NamedTuple):
    """A launch that selects from every row, or from every segment of every row."""

    launch: Launch
    segments: int
    """Thread blocks to each row."""
    size: int
    """Pages that a thread block selects from, at most."""

    @property
    def dynamic_bytes(self) -> int:
        """Shared memory that the launch asks for: two bytes for each page."""
        return 2 * round_up(self.size, 8)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a thread block, with what the kernel has of itself: `Shared` in topk.cu."""
        return _fixed_bytes(self.launch.warps) + self.dynamic_bytes


# These are measured on an H200. Few threads hold many keys each, since every warp brings instructions of its own; where
# several blocks share a multiprocessor still fewer threads are best.
_LAUNCHES = (
    Launch(1024, 8, 4),
    Launch(2048, 8, 8),
    Launch(4096, 8, 16),
    Launch(8192, 16, 16),
    Launch(16384, 16, 32),
    Launch(32768, 16, 64),
    Launch(MAX_PAGES, 16, 128),
)
_CROWDED = (*_LAUNCHES[:3], Launch(8192, 8, 32), Launch(16384, 8, 64), *_LAUNCHES[5:])


def passes_of(
    width: int, k: int, crowded: bool, capability: tuple[int, int], segment: int | None = None
) -> tuple[Pass, ...]:
    """Returns the launches that select pages: one, or one for segments of rows and one for the pages chosen there.

    Args:
        width: pages of a row.
        k: pages to select, at most 1,024.
        crowded: whether there are more rows than multiprocessors.
        capability: compute capability of the GPU.
        segment: pages of a segment; by default as many as the shared memory of a thread block holds. No selection
            depends on it.

    Raises:
        ValueError: if a row is too long for two launches.
    """
    most = _most_pages(capability)
    segment = segment or most
    segments = -(-width // segment)
    if segments <= 1:
        return (_pass_of(max(width, 8), 1, crowded),)
    if segments * k > most:
        raise ValueError(f"pages: got {width} to select {k} from, allowed on this GPU: up to {most // k * segment}")
    return _pass_of(segment, segments, crowded), _pass_of(segments * k, 1, crowded)


def _pass_of(size: int, segments: int, crowded: bool) -> Pass:
    launch = next(launch for launch in (_CROWDED if crowded else _LAUNCHES) if size <= launch.pages)
    return Pass(launch, segments, size)


def _most_pages(capability: tuple[int, int]) -> int:
    """Returns the pages, at most, that a thread block selects from: a multiple of eight."""
    fixed = max(_fixed_bytes(launch.warps) for launch in _LAUNCHES)
    return min(MAX_PAGES, (shared_bytes_of(capability) - fixed) // 16 * 8)


def _fixed_bytes(warps: int) -> int:
    return round_up(select_bytes(warps), 16)
