"""The fused cache write: compiled on a GPU, in Triton's interpreter elsewhere (see `support.interpreter`)."""

from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from sparse_kernels.page_statistics import KINDS, reference, write_cache
from support.cache_writes import (
    FLOAT8,
    HAS_GPU,
    ON_CPU,
    ON_GPU,
    Launch,
    Launches,
    Memory,
    Shape,
    assert_same_memory,
    check,
    kernel,
    on_devices,
    random_launches,
    tokens,
)
from support.paged import VECTOR_KINDS, garbage


@pytest.fixture(autouse=True)
def _interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, runs the interpreter with the programs of a launch in reverse order.

    In natural order every program would find the results of earlier programs in the cache, unlike on a GPU.
    """
    if HAS_GPU or find_spec("triton") is None:
        return
    # Modules that Triton imports at the first launch must be interpreted too.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from triton.runtime.interpreter import interpreter_builder as builder

    in_order = builder.set_grid_idx

    def reversed_order(*index: int) -> None:
        in_order(*(size - 1 - i for size, i in zip(builder.grid_dim, index, strict=True)))

    monkeypatch.setattr(builder, "set_grid_idx", reversed_order)


@dataclass(frozen=True)
class Case:
    """Consecutive launches, each a function from page size and block size to a slot mapping."""

    name: str
    launches: Launches

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("one page", lambda page, size: [tokens(size, 1, 0, page)]),
    Case(
        "several prefills, around page boundaries",
        lambda page, size: [
            tokens(size, 0, 0, page - 1)
            + tokens(size, 5, 0, page)
            + tokens(size, 2, 0, page + 1)
            + tokens(size, 6, 0, 2 * page + 1)
        ],
    ),
    Case(
        "chunked prefill, across pages and blocks",
        lambda page, size: [tokens(size, 1, size - page, size - 3), tokens(size, 1, size - 3, size + page + 1)],
    ),
    Case(
        "decodes, two of which finish a page",
        lambda page, size: [
            tokens(size, 0, 0, page - 1) + tokens(size, 3, 0, page - 2) + tokens(size, 6, page, 2 * page - 1),
            [page - 1, 3 * size + page - 2, 6 * size + 2 * page - 1],
        ],
    ),
    Case(
        "drafts rewritten by what was accepted",
        lambda page, size: [
            tokens(size, 2, 0, page + 2),
            tokens(size, 2, page - 2, page + 2),
            tokens(size, 2, page - 1, page + 3),
        ],
    ),
    Case(
        "a page is written again from the block's start",
        lambda page, size: [tokens(size, 4, 0, page), tokens(size, 4, 0, 3), tokens(size, 4, 3, page)],
    ),
    Case(
        "padding before, between and after",
        lambda page, size: [[-1, *tokens(size, 0, 0, page), -1, -1, *tokens(size, 3, 0, page), -1, -7]],
    ),
    Case(
        "the row before the last token is padding",
        lambda page, size: [tokens(size, 0, 0, page - 1), [*tokens(size, 5, 0, 2), -1, page - 1]],
    ),
    Case("nothing but padding", lambda page, size: [[-1] * 5]),
    Case(
        "enough tokens for the launch of a prefill",
        lambda page, size: [tokens(size, 1, 0, 3), [-1] * 500 + tokens(size, 1, 3, 2 * page) + [-1]],
    ),
]
SHAPES = [
    Shape(page_size=16, block_size=16, head_size=128),
    Shape(page_size=32, head_size=256, num_kv_heads=1),
    Shape(block_size=16, head_size=96, num_kv_heads=5),
    Shape(block_size=256, head_size=128, num_kv_heads=8),
    Shape(page_size=16, head_size=128, num_kv_heads=2, statistics="fp8"),
    Shape(head_size=256, num_kv_heads=2, statistics="bf16"),
    Shape(page_size=32, statistics="bf16", dtype=torch.float32),
    Shape(cache_dtype=torch.float16, dtype=torch.float16),
    Shape(cache_dtype=torch.float16, dtype=torch.float32, statistics="fp8"),
    Shape(dtype=torch.float16),
    Shape(dtype=torch.float32, head_size=96),
    Shape(statistics=None),
    Shape(cache_dtype=FLOAT8, block_size=256),
    Shape(cache_dtype=FLOAT8, block_size=256, page_size=16, head_size=128, statistics="fp8"),
    Shape(cache_dtype=FLOAT8, block_size=512, page_size=32, head_size=96, statistics="bf16", dtype=torch.float16),
    Shape(cache_dtype=FLOAT8, block_size=16, statistics=None),
    *(
        Shape(kind=kind, **shape)
        for kind in VECTOR_KINDS
        if kind != "mean_and_spread"
        for shape in (
            {},
            {"page_size": 16, "block_size": 256, "head_size": 128, "statistics": "fp8", "cache_dtype": FLOAT8},
            {"page_size": 32, "head_size": 96, "statistics": "bf16", "num_kv_heads": 5},
        )
    ),
    *(
        Shape(kind=kind, statistics=statistics, **shape)
        for kind, statistics in (("quarters", "int4"), ("sketch", "int2"), ("leveled_quarters", "int4"))
        for shape in (
            {},
            {"page_size": 16, "block_size": 256, "head_size": 128, "cache_dtype": FLOAT8},
            {"page_size": 32, "head_size": 256, "num_kv_heads": 1, "dtype": torch.float32},
            {"block_size": 16, "num_kv_heads": 8},
        )
    ),
    *(
        Shape(kind=kind, statistics="int4", head_size=size, num_kv_heads=3)
        for kind in ("quarters", "leveled_quarters")
        for size in (80, 96, 112, 192)
    ),
    *(Shape(kind="sketch", statistics="int2", head_size=size, num_kv_heads=3) for size in (80, 192)),
]


@on_devices
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_agrees_with_the_reference(case, device):
    check(Shape(), case.launches(8, 64), device)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's NumPy
@pytest.mark.parametrize("device", ["reference", ON_CPU, ON_GPU])
@pytest.mark.parametrize("dtype", [FLOAT8, torch.bfloat16, torch.float16])
def test_what_has_the_dtype_of_the_cache_keeps_its_bits(dtype, device):
    shape = Shape(cache_dtype=dtype, dtype=dtype, block_size=256, statistics="bf16")
    stored = garbage(8, 2 * shape.num_kv_heads, shape.head_size, generator=torch.Generator().manual_seed(2))
    stored = stored.view(dtype)[..., : shape.head_size]
    key, value = stored.tensor_split(2, dim=1)
    slots = torch.arange(256, 264)
    if device == "reference":
        memory = Memory.dirty(shape)
        write_cache(key, value, memory.cache, memory.views, slots, shape.page_size)
    else:
        memory = Memory.dirty(shape).to(device)
        kernel(
            key.to(device), value.to(device), memory.cache, memory.views, slots.to(device), shape.page_size, None, None
        )
    found = memory.to("cpu").cache[1, :, :8].transpose(0, 1).contiguous()
    assert torch.equal(found.view(torch.uint8), torch.cat([key, value], dim=-1).view(torch.uint8))


@on_devices
def test_of_equal_representatives_the_oldest_are_kept(device):
    # One-hot keys agree equally with their mean in any arithmetic: only the order says which two of eight are kept.
    shape = Shape(statistics="bf16", kind="representatives")
    keys = torch.eye(shape.page_size, shape.head_size, dtype=shape.dtype)[:, None].repeat(1, shape.num_kv_heads, 1)
    slots = torch.arange(shape.page_size)
    oldest = keys[:2].float().mean(dim=0)
    for implementation, place in ((reference.write_cache, "cpu"), (kernel, device)):
        memory, stored = Memory.dirty(shape).to(place), keys.to(place)
        implementation(stored, stored, memory.cache, memory.views, slots.to(place), shape.page_size, None, None)
        assert torch.equal(memory.views.vectors[0, :, 0].float().cpu(), oldest)


@on_devices
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_agrees_with_the_reference_in_other_shapes(shape, device):
    page, size = shape.page_size, shape.block_size
    # One page is partly in the cache, one is new, one stays incomplete.
    slots = [tokens(size, 2, 0, 3), [*tokens(size, 2, 3, page), -1, *tokens(size, 5, 0, page), *tokens(size, 0, 0, 2)]]
    check(shape, slots, device)


@pytest.mark.parametrize(
    "shape", [Shape(), Shape(page_size=16, statistics="bf16"), Shape(cache_dtype=FLOAT8, block_size=256)], ids=str
)
@pytest.mark.parametrize(
    "implementation",
    [reference.write_cache, pytest.param(kernel, marks=ON_CPU.marks)],
    ids=["reference", "kernel"],
)
def test_rows_and_statistics_are_those_of_the_stored_keys(shape, implementation):
    """Compared with a loop over tokens in float64, not with the other implementation."""
    memory = Memory.dirty(shape)
    page, size, dims = shape.page_size, shape.block_size, shape.head_size
    before = memory.raw.clone()
    (launch,) = random_launches(shape, [[*tokens(size, 6, 0, page), -1, *tokens(size, 1, 0, page - 1)]])
    launch.run(implementation, memory)
    written = set()
    for row, slot in enumerate(launch.slot_mapping.tolist()):
        if slot < 0:
            continue
        written.add((slot // size, slot % size))
        for part, scale, start in zip((launch.key, launch.value), launch.scales, (0, dims), strict=True):
            scaled = part[row] if scale is None else (part[row].float() / scale).clamp(-448, 448)
            stored = memory.cache[slot // size, :, slot % size, start : start + dims]
            assert torch.equal(stored.float(), scaled.to(shape.cache_dtype).float())
    for block in range(memory.raw.shape[0]):
        for offset in range(size):
            if (block, offset) not in written:
                now, then = (x[block, :, offset].view(torch.uint8) for x in (memory.raw, before))
                assert torch.equal(now, then)
    keys = memory.cache[6, :, :page, :dims].double()
    views = memory.views
    mean, spread = views.vectors[6, :, 0].double(), views.spread[6, :, 0].double()
    scale = None if views.scales is None else views.scales[6, :, 0, 0].double()
    exact = keys.mean(dim=1)
    largest = exact.abs().amax(dim=-1, keepdim=True)
    allowed = exact.abs() / 256 if scale is None else largest / 125
    assert ((mean * (1 if scale is None else scale[:, None]) - exact).abs() <= allowed + 1e-5 * largest).all()
    if scale is not None:
        assert (scale * 126 >= largest.squeeze(1)).all(), "the largest element does not fit"
    torch.testing.assert_close(spread, keys.std(dim=1, correction=0).norm(dim=-1), rtol=2**-8, atol=0)


@on_devices
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's NumPy
@pytest.mark.parametrize(
    ("kind", "statistics"), [(kind.name, statistics) for kind in KINDS.values() for statistics in kind.formats]
)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 3e38], ids=str)
def test_keys_that_are_not_finite_leave_finite_statistics(kind, statistics, poison, device):
    shape = Shape(statistics=statistics, kind=kind)
    memory = Memory(shape, torch.zeros_like(Memory.dirty(shape).raw)).to(device)
    (launch,) = random_launches(shape, [[*tokens(64, 1, 0, 8), *tokens(64, 3, 0, 8)]])
    launch.key[3, 1, 7] = poison
    launch.key[4, 1, 7] = -poison
    launch.to(device).run(kernel, memory)
    words = memory.to("cpu").raw[:, :, 64:].view(torch.bfloat16)
    assert words.isfinite().all()
    assert words[3].count_nonzero() > 0
    # A selection by spreads or bounds must find the page.
    views, largest = memory.to("cpu").views, torch.finfo(torch.bfloat16).max
    if kind == "mean_and_spread":
        assert views.spread[1, 1, 0] == largest
    elif kind == "bounds":
        stored = views.vectors[1, 1, 0].double().view(2, -1)[:, 7]
        stored *= 1 if views.scales is None else views.scales[1, 1, 0].double()
        torch.testing.assert_close(stored / largest, torch.tensor([1.0, -1.0]).double(), rtol=0.2, atol=0)
    elif kind in ("quarters", "sketch"):
        assert views.scales[1, 1, 0].eq(largest).all()
        query = torch.randn(8, 64)
        found = (query @ views.kind.codes.unpack(views.vectors[1, 1, 0]).T).amax(dim=-1)
        assert (found > 0).all()
    elif kind == "leveled_quarters":
        assert views.scales[1, 1, 0].tolist() == [largest, 0, 0, 0]
        query = torch.randn(8, 64)
        first = views.kind.codes.unpack(views.vectors[1, 1, 0].flatten())[0]
        assert (views.kind.first_score(query @ first * largest) > 2.0**100).all()


@on_devices
def test_constant_and_zero_keys(device):
    shape = Shape()
    memory = Memory.dirty(shape).to(device)
    (launch,) = random_launches(shape, [tokens(64, 0, 0, 16)])
    launch.key[:8] = 0
    launch.key[8:] = 3
    launch.to(device).run(kernel, memory)
    views = memory.to("cpu").views
    assert views.vectors[0, :, 0].eq(0).all()
    assert views.scales[0, :, 0].eq(0).all()
    assert views.spread[0, :, :2].eq(0).all()
    torch.testing.assert_close(
        views.vectors[0, :, 1] * views.scales[0, :, 1].float(), torch.full((3, 64), 3.0), rtol=0.01, atol=0
    )


@on_devices
def test_blocks_and_heads_beyond_two_to_the_31_elements(device):
    """The memory is reserved but, on a CPU, hardly used."""
    shape = Shape(cache_dtype=FLOAT8, block_size=256)
    small = Memory.dirty(shape, num_blocks=4)
    heads, rows, width = small.raw.shape[1:]
    # Both strides fit 32 bits; some of their multiples do not.
    strides = 2**30 + 48, 2**30 + 20 * 2**12, width, 1
    size = 3 * strides[0] + 2 * strides[1] + rows * width
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 2 * size:
        pytest.skip("needs 11 GB of GPU memory")
    huge = torch.empty(size, dtype=torch.uint8, device=device).view(FLOAT8).as_strided((4, heads, rows, width), strides)
    huge.view(torch.uint8).copy_(small.bytes)
    actual = Memory(shape, huge)
    slots = [[*tokens(256, 3, 0, 8), *tokens(256, 2, 7, 9)]]
    (launch,) = random_launches(shape, slots)
    launch.run(reference.write_cache, small)
    launch.to(device).run(kernel, actual)
    near = torch.empty_like(small.bytes).copy_(actual.bytes).view(FLOAT8)
    # The second block's page is completed too. Its keys are garbage except for the last one.
    assert_same_memory(Memory(shape, near[3:]), Memory(shape, small.raw[3:]), [tokens(256, 0, 0, 8)])
    assert torch.equal(near[2, :, :256].view(torch.uint8), small.bytes[2, :, :256])
    assert torch.equal(near[:2].view(torch.uint8), small.bytes[:2])


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_a_cuda_graph_follows_the_slots_it_is_replayed_with():
    shape = Shape()
    expected = Memory.dirty(shape)
    actual = expected.to("cuda")
    slots = [tokens(64, 2, 0, 8), tokens(64, 2, 5, 13), [*tokens(64, 2, 13, 16), -1, *tokens(64, 4, 6, 10)]]
    launches = list(random_launches(shape, slots))
    held = launches[0].to("cuda")
    held.slot_mapping.fill_(-1)
    held.run(write_cache, actual)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held.run(write_cache, actual)
    for launch in launches:
        held.key.copy_(launch.key)
        held.value.copy_(launch.value)
        held.slot_mapping.copy_(launch.slot_mapping)
        graph.replay()
        launch.run(reference.write_cache, expected)
    # The last launch completes a page of garbage. Its statistics are not compared.
    assert_same_memory(Memory(shape, actual.to("cpu").raw[:4]), Memory(shape, expected.raw[:4]), [tokens(64, 2, 0, 16)])


def test_on_a_cpu_the_reference_serves():
    shape = Shape()
    expected = Memory.dirty(shape)
    actual = expected.to("cpu")
    (launch,) = random_launches(shape, [[*tokens(64, 1, 0, 9), -1]])
    launch.run(reference.write_cache, expected)
    # Only float8 caches use scales, but vLLM always passes them.
    launch.scales = torch.tensor(0.5), torch.tensor(0.5)
    launch.run(write_cache, actual)
    assert torch.equal(actual.bytes, expected.bytes)


def test_no_slots_is_no_work():
    shape = Shape()
    memory = Memory.dirty(shape)
    before = memory.bytes.clone()
    launch = Launch(torch.zeros(2, 3, 64), torch.zeros(2, 3, 64), torch.zeros(0, dtype=torch.int64), (None, None))
    launch.run(write_cache, memory)
    assert torch.equal(memory.bytes, before)


GOOD = {
    "key": torch.zeros(4, 3, 64),
    "value": torch.zeros(4, 3, 64),
    "cache": Memory.dirty(Shape()).cache,
    "statistics": Memory.dirty(Shape()).views,
    "slot_mapping": torch.tensor([-1, -1, -1]),
    "page_size": 8,
}
BAD = [
    ({"key": torch.zeros(4, 3, 64, dtype=torch.float64)}, "key, value and cache: got torch.float64"),
    ({"key": torch.zeros(2, 3, 64)}, r"key: got \(2, 3, 64\), allowed: at least 3 rows of the cache's 3 heads"),
    ({"value": torch.zeros(4, 3, 32)}, r"value: got \(4, 3, 32\)"),
    ({"value": torch.zeros(4, 64, 3).mT}, "allowed: a contiguous last dimension"),
    (
        {"cache": Memory.dirty(Shape()).cache.view(torch.int16)},
        "cache: got torch.float32, torch.float32 and torch.int16",
    ),
    ({"slot_mapping": torch.tensor([0], dtype=torch.int32)}, "slot_mapping: got torch.int32"),
    ({"page_size": 12}, "page_size: got 12, allowed: a power of two that divides the block size 64"),
    ({"page_size": 128}, "page_size: got 128"),
    ({"page_size": 16}, "statistics: got 3 heads, 8 pages per block, head size 64, allowed: 3 heads, 4 pages"),
    ({"cache": Memory.dirty(Shape(cache_dtype=FLOAT8, statistics=None)).cache}, "key_scale and value_scale"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message.partition(":")[0] for _, message in BAD])
def test_arguments_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        write_cache(**GOOD | changes)
