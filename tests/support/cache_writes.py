"""Writes of keys, values and statistics into a cache, by the kernel and by the reference."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from sparse_kernels.page_statistics import KINDS, PageStatistics, StatisticsLayout, reference
from sparse_kernels.page_statistics.codes import Codes
from support.paged import garbage

FLOAT8 = torch.float8_e4m3fn
LARGEST_KEY = 1024.0
HAS_GPU = torch.cuda.is_available()
NO_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
ON_CPU = pytest.param(
    "cpu", marks=[NO_TRITON, pytest.mark.skipif(HAS_GPU, reason="beside a GPU Triton compiles its kernels")]
)
ON_GPU = pytest.param("cuda", marks=[NO_TRITON, pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")])
on_devices = pytest.mark.parametrize("device", [ON_CPU, ON_GPU])


@dataclass(frozen=True)
class Shape:
    page_size: int = 8
    block_size: int = 64
    head_size: int = 64
    num_kv_heads: int = 3
    statistics: str | None = "int8"
    cache_dtype: torch.dtype = torch.bfloat16
    dtype: torch.dtype = torch.bfloat16
    kind: str = "mean_and_spread"

    def __str__(self) -> str:
        cache, inputs = (str(dtype).removeprefix("torch.") for dtype in (self.cache_dtype, self.dtype))
        return (
            f"page{self.page_size}-block{self.block_size}-{self.num_kv_heads}x{self.head_size}-{self.statistics}-"
            f"{inputs}-in-{cache}-{self.kind}"
        )


Launches = Callable[[int, int], list[list[int]]]


def tokens(block_size: int, block: int, start: int, stop: int) -> list[int]:
    """Slots of tokens `start` to `stop` of a request that begins in `block` and continues in the next blocks."""
    return list(range(block * block_size + start, block * block_size + stop))


@dataclass
class Memory:
    """A cache with its statistics rows, full of NaN, infinities and huge values."""

    shape: Shape
    raw: torch.Tensor
    """`[num_blocks, num_kv_heads, rows, 2 * head_size]` in the cache's dtype."""

    @classmethod
    def dirty(cls, shape: Shape, num_blocks: int = 8) -> "Memory":
        layout = cls._layout(shape)
        rows = shape.block_size + (layout.rows(shape.block_size) if layout else 0)
        itemsize = shape.cache_dtype.itemsize
        words = garbage(
            num_blocks,
            shape.num_kv_heads,
            rows,
            shape.head_size * itemsize,
            generator=torch.Generator().manual_seed(5),
        )
        return cls(shape, words.view(shape.cache_dtype))

    @staticmethod
    def _layout(shape: Shape) -> StatisticsLayout | None:
        if shape.statistics is None:
            return None
        return StatisticsLayout(
            shape.page_size, shape.head_size, shape.statistics, shape.cache_dtype.itemsize, KINDS[shape.kind]
        )

    def to(self, device: str) -> "Memory":
        return Memory(self.shape, self.raw.to(device, copy=True))

    @property
    def cache(self) -> torch.Tensor:
        return self.raw[:, :, : self.shape.block_size]

    @property
    def views(self) -> PageStatistics | None:
        layout = self._layout(self.shape)
        return layout.views(self.raw[:, :, self.shape.block_size :], self.shape.block_size) if layout else None

    @property
    def bytes(self) -> torch.Tensor:
        return self.raw.view(torch.uint8)


@dataclass
class Launch:
    key: torch.Tensor
    value: torch.Tensor
    slot_mapping: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | tuple[None, None]

    def to(self, device: str) -> "Launch":
        scales = tuple(scale if scale is None else scale.to(device) for scale in self.scales)
        # Sliced after the transfer, because a copy would make them contiguous.
        qkv = self.key._base.to(device)
        key, value = (qkv.as_strided(x.shape, x.stride(), x.storage_offset()) for x in (self.key, self.value))
        return Launch(key, value, self.slot_mapping.to(device), scales)

    def run(self, implementation, memory: Memory) -> None:
        implementation(
            self.key,
            self.value,
            memory.cache,
            memory.views,
            self.slot_mapping,
            memory.shape.page_size,
            *self.scales,
        )


def random_launches(shape: Shape, slots: list[list[int]]) -> Iterator[Launch]:
    """New keys and values for every launch, as slices of the projection of queries, keys and values."""
    generator = torch.Generator().manual_seed(11)
    heads, size = shape.num_kv_heads, shape.head_size
    # A common direction and outlying dimensions, as real keys have.
    offset = torch.randn(3 * heads, size, generator=generator) * 2
    for mapping in slots:
        qkv = torch.randn(len(mapping) + 2, 3 * heads, size, generator=generator) + offset
        qkv[-2:] = torch.nan
        # Some saturate in a float8 cache.
        qkv[:, :, 5] *= 60
        assert qkv[:-2].abs().max() < LARGEST_KEY
        qkv = qkv.to(shape.dtype)
        scales = (None, None)
        if shape.cache_dtype == FLOAT8:
            scales = torch.tensor([0.37]), torch.tensor(0.11)
        yield Launch(qkv[:, heads : 2 * heads], qkv[:, 2 * heads :], torch.tensor(mapping), scales)


def kernel(*args) -> None:
    from sparse_kernels.page_statistics import triton

    triton.write_cache(*args)


def rank(x: torch.Tensor, codes: Codes | None) -> torch.Tensor:
    """Rank of each value among those that its format can store. Neighbours differ by 1."""
    if x.dtype == torch.uint8:
        return codes.unpack(x.flatten(2))
    if x.dtype == torch.int8:
        # -1 is not stored.
        return x.int() + (x < 0)
    bits = x.view({1: torch.int8, 2: torch.int16}[x.dtype.itemsize]).int()
    magnitude = bits & (0x7F if x.dtype.itemsize == 1 else 0x7FFF)
    return torch.where(bits < 0, -magnitude, magnitude)


def assert_same_memory(actual: Memory, expected: Memory, slots: list[list[int]]) -> None:
    """Every byte is equal, except for a rounding of the statistics of completed pages."""
    page_size = expected.shape.page_size
    last = torch.tensor(sorted({slot for mapping in slots for slot in mapping if slot % page_size == page_size - 1}))
    if expected.views is not None and last.numel():
        where = last // expected.shape.block_size, slice(None), last % expected.shape.block_size // page_size
        # Steps may lie within the vectors. They are compared before the vectors are made equal.
        for mine, wanted in reversed(list(zip(actual.views.parts, expected.views.parts, strict=True))):
            bits = {torch.uint8: torch.uint8, torch.bfloat16: torch.int16}.get(wanted.dtype, torch.int8)
            got = mine.view(bits)[where].view(wanted.dtype)
            want = wanted.view(bits)[where].view(wanted.dtype)
            # Sums have another order: a float32 rounding may change the rounding to the format. Keys and values are not
            # rounded: every other byte is compared exactly.
            codes = expected.views.kind.codes
            steps = (rank(got, codes) - rank(want, codes)).abs()
            if wanted is expected.views.vectors and wanted.dtype == torch.bfloat16:
                # If a page's keys cancel, this rounding is relative to the keys: half an ulp of the largest key for
                # each of the page's terms, in both sums.
                cancelled = (got.float() - want.float()).abs() <= page_size * LARGEST_KEY * 2**-23
                steps = steps.masked_fill(cancelled, 0)
            assert steps.max() <= 1, f"{int(steps.max())} steps off"
            mine.view(bits)[where] = wanted.view(bits)[where]
    differs = (actual.bytes != expected.bytes).nonzero()
    assert differs.numel() == 0, f"bytes differ at {differs[:4].tolist()} and {len(differs) - 4} more"


def check(shape: Shape, slots: list[list[int]], device: str) -> None:
    expected = Memory.dirty(shape)
    actual = expected.to(device)
    for launch in random_launches(shape, slots):
        launch.run(reference.write_cache, expected)
        launch.to(device).run(kernel, actual)
    assert_same_memory(actual.to("cpu"), expected, slots)
