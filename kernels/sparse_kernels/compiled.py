"""Shared parts of the compiled CPU kernels. It imports Numba, so only these kernels import it."""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable, Set
from typing import Any

import numba
import numpy as np
import torch

from sparse_kernels.batch import Softmax
from sparse_kernels.threads import start_threads

FASTMATH = {"reassoc", "contract"}
"""Reassociation lets the compiler use vector registers; NaN and infinity keep their meaning."""
_logger = logging.getLogger(f"vllm.{__name__}")
_UNROLLED = 8
"""Products summed in registers before the sum is stored; divides every page and head size."""
CHUNK_TOKENS = 64
"""Tokens whose keys or values are unpacked at a time: rows are long, and still fit the CPU cache."""


def sink_array(softmax: Softmax) -> np.ndarray:
    """Returns sink logits for the compiled kernels: `[num_query_heads]` float32, empty without sink logits."""
    if softmax.sink_logits is None:
        return np.empty(0, np.float32)
    # A model's sink logits are a parameter. NumPy takes it only without its gradient.
    return softmax.sink_logits.detach().float().numpy()


def index_array(indices: torch.Tensor) -> np.ndarray:
    """Returns whole numbers for the compiled kernels: int64, contiguous. Each type and layout is compiled anew, in
    seconds, and a table has rows with strides or none from step to step."""
    return indices.long().contiguous().numpy()


def compiled_kernel(fastmath: bool | Set[str] = False, parallel: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Return the decorator of a compiled function. Compiled code is kept on disk if possible.

    Args:
        fastmath: the permitted floating-point transformations, as Numba's option of this name.
        parallel: whether `numba.prange` is a loop over threads.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        def compiled(cache: bool) -> Any:
            return numba.njit(fastmath=fastmath, nogil=True, parallel=parallel, cache=cache)(function)

        try:
            kept = compiled(cache=True)
        except RuntimeError as error:
            # No folder for this function's files can be written.
            _say_once(error)
            return compiled(cache=False)
        cache = getattr(kept, "_cache", None)
        # Another version of Numba may name files differently. Then every process compiles.
        if not _name_files_apart(getattr(cache, "_cache_file", None)):
            return compiled(cache=False)
        for step in ("load_overload", "save_overload"):
            setattr(cache, step, _optional(getattr(cache, step)))
        return kept

    return decorate


def parallel_kernel(fastmath: bool | Set[str] = False) -> Callable[[Callable[..., Any]], Any]:
    """Return the decorator of a compiled function whose `numba.prange` runs on torch's threads."""
    start_threads()
    return compiled_kernel(fastmath, parallel=True)


def _name_files_apart(files: Any) -> bool:
    """Give every process separate file names for compiled code; returns whether this succeeded.

    Numba numbers files by an index that it reads without a lock. If two processes compile for different shapes at the
    same time, one overwrites a file that the index assigns to the other. The next process would run the wrong code.
    """
    index = getattr(files, "_index_name", None)
    if index is None or not hasattr(files, "_data_name"):
        return False
    stem = index.removesuffix(".nbi")
    files._data_name = lambda _: f"{stem}.{uuid.uuid4().hex}.nbc"
    return True


def _optional(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step of Numba's cache that returns None on failure. The process then compiles."""

    @functools.wraps(step)
    def tried(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except Exception as error:  # a full disk, a deleted folder, a truncated file
            _say_once(error)
            return None

    return tried


_said: list[str] = []


def _say_once(error: Exception) -> None:
    if not _said:
        _said.append(str(error))
        reason = f"{type(error).__name__}: {error}"
        _logger.warning("compiled CPU kernels are not kept on disk, so every start compiles them (%s)", reason)


@numba.njit(nogil=True, forceinline=True)
def widen(bits):
    """Returns the float32 of bfloat16 bits."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@numba.njit(nogil=True, forceinline=True)
def narrow(value):
    """Returns the bfloat16 bits of a float32. Rounds to nearest even, as torch does; every NaN has one pattern."""
    bits = np.float32(value).view(np.uint32)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return np.uint16(0x7FC0) if value != value else np.uint16(rounded >> np.uint32(16))


@numba.njit(nogil=True, forceinline=True)
def unpack_page(location, length, step, block, head, within, unpacked, row, column, width):
    """Copies a page as float32 to the part of `unpacked` that begins at `row` and `column`.

    Args:
        location: `PageAddresses.location` of bfloat16 pages.
        length: `PageAddresses.length`, which divides `width`; vectorises if it and `step` are compile-time constants.
        step: `PageAddresses.step`.
        block: physical block.
        head: KV head.
        within: page within the block.
        unpacked: `[rows, columns]` float32.
        row: first row to write.
        column: first column to write.
        width: elements of a row of the page.
    """
    elements, offsets, pages_per_group, per_block, per_head, per_group, per_page = location
    start = block * per_block + head * per_head
    start += within // pages_per_group * per_group + within % pages_per_group * per_page
    runs_per_row = width // length
    for run in range(offsets.size):
        # Unsigned indices avoid a test for negative values.
        first = np.uint64(start + offsets[run])
        to_row, to = np.uint64(row + run // runs_per_row), np.uint64(column + run % runs_per_row * length)
        for i in range(length):
            unpacked[to_row, to + np.uint64(i)] = widen(elements[first + np.uint64(i * step)])


@numba.njit(nogil=True, forceinline=True)
def unpack_codes(records, start, codes, bits):
    """Copies a row of codes (see `page_statistics.codes.Codes`) as float32.

    Args:
        records: bytes of the cache's statistics.
        start: offset of the row in `records`, uint64.
        codes: `[8 / bits, head_size]` float32 to write to.
        bits: bits of a code; the loop vectorises if this is a compile-time constant.
    """
    for d in range(codes.shape[1]):
        byte = records[start + np.uint64(d)]
        for j in range(codes.shape[0]):
            codes[j, d] = np.float32(byte >> np.uint8(bits * j) & np.uint8((1 << bits) - 1))


@numba.njit(nogil=True, fastmath=FASTMATH, forceinline=True)
def add_products(weights, offset, rows, sums, column):
    """Adds to each row of `sums`, from `column` on, the sum of `rows` weighted by `weights[offset:]`."""
    for first in range(0, rows.shape[0], _UNROLLED):
        for g in range(sums.shape[0]):
            for i in range(rows.shape[1]):
                total = sums[g, np.uint64(column + i)]
                for j in range(_UNROLLED):
                    total += weights[g, np.uint64(offset + first + j)] * rows[np.uint64(first + j), np.uint64(i)]
                sums[g, np.uint64(column + i)] = total


@numba.njit(nogil=True, forceinline=True)
def exp(x):
    """Returns exp(x) for x <= 0 within 2 units in the last place; it vectorises, unlike a call of the C library."""
    # exp(x) = 2**n * exp(r) with |r| <= ln(2) / 2. ln(2) is in two parts, so that n times it is subtracted exactly.
    n = np.rint(x * np.float32(1.44269504))
    r = (x - n * np.float32(0.693359375)) + n * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(0.5)
    y = y * r * r + r + np.float32(1)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0) if x < np.float32(-87) else y * power
