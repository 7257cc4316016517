"""Every Triton kernel compiles on the oldest and newest architecture, on the newest for every shape, without a GPU."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
from sparse_kernels.page_statistics import KINDS
from support.fresh_python import start_forks

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

BLOCKS = [
    "summaries._summarise", "score._block_logits", "score._measure", "choose._choose", "rows._group_queries",
    "rows._ungroup_with_sinks",
]  # fmt: skip
"""Kernels of block-sparse prefill."""
PREFILL = ("sums._probe_sums", "sums._join_sums", "sums._column_sums", "listed._attend_listed")
OF_SCORES = ("scores._page_scores", "scores._row_products")
COMPACTION = ("_rank_tokens", "_list_tokens", "_copy_out", "_probe_sums", "_join_sums", "_column_sums")
EVICTION = ("_add_votes", "_move_in_place", "_write_queries")
MASKED = {
    "0.5": [
        *OF_SCORES,
        *("mask._soften", "forward._forward", "backward._query_gradient", "backward._key_gradient"),
        *("score_gradients._scored_queries", "score_gradients._scored_records"),
    ],
    "None": [
        *OF_SCORES,
        "lists._list_pages",
        *(f"listed.{x}" for x in ("_page_outputs", "_page_gradients", "_join_parts", "_join_pages")),
    ],
}
"""Kernels of attention under a page mask of a temperature."""
LEAST_SHARED_BYTES = 99 * 1024
"""Shared memory of a thread block on the smallest supported GPUs."""
CODE = """
import importlib
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


triton.runtime.driver.set_active(Driver())

from sparse_kernels.batch import Copies, DecodeBatch, PrefillBatch, Prompts, QueryTokens, Softmax
from sparse_kernels.block_prefill import BlockRule, plan_tiles, triton as blocks
from sparse_kernels.cache import KVCache
from sparse_kernels.compaction import CompactionRule, LayerCaches, held_triton as evictions, triton as compaction
from sparse_kernels.multi_token_decode import triton as several
from sparse_kernels.page_score import leveled_triton as leveled, triton as scores
from sparse_kernels.page_score.cuda import launch_scores
from sparse_kernels.page_statistics import KINDS, StatisticsLayout
from sparse_kernels.page_statistics import triton as write
from sparse_kernels.rolling_attention import RollingWindow, Rotation, triton as rolling
from sparse_kernels.token_prefill import TokenRule, triton as prefill


# Head sizes for the oldest architecture: the largest, and one that is padded.
OF_OLDEST = (96, 256)


def of_architecture(*shapes):
    # Shapes begin with the head size.
    return [shape for shape in shapes if sys.argv[1] != "80" or shape[0] in OF_OLDEST]


class Compile:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.compile(args, dict(kwargs, grid=grid))

    def compile(self, args, kwargs):
        compiled = self.kernel.warmup(*args, **kwargs)
        print(len(compiled.asm["cubin"]), compiled.metadata.shared)


write._write_cache, scores._page_score = Compile(write._write_cache), Compile(scores._page_score)
leveled._first_scores, leveled._refine = Compile(leveled._first_scores), Compile(leveled._refine)
for kind in KINDS.values():
    layout = StatisticsLayout(8, 128, kind.formats[0], kind=kind)
    cache = torch.zeros(4, 8, 64 + layout.rows(64), 256).bfloat16()
    views = layout.views(cache[:, :, 64:], 64)
    projected = torch.zeros(3, 48, 128).bfloat16()
    query, key, value = projected.split([32, 8, 8], dim=1)
    write.write_cache(key, value, cache[:, :, :64], views, torch.zeros(3).long(), 8, None, None)
    if kind.is_fused and not kind.is_leveled:
        continue
    table, lengths = torch.zeros(3, 400).int(), torch.zeros(3).int()
    batch = DecodeBatch(query, table, lengths)
    launch_scores(batch, views, 8, 1.0, torch.zeros(3, 8, 3200).bfloat16())

several._attend_piece, several._add_pieces = Compile(several._attend_piece), Compile(several._add_pieces)
shapes = (64, 4, torch.bfloat16, 48), (128, 8, torch.float16, 64), (256, 8, torch.bfloat16, 64)
for head_size, group, dtype, block in of_architecture(*shapes):
    cache = KVCache.from_rows(torch.zeros(4, 2, block, 2 * head_size).to(dtype), 8)
    query, table = torch.zeros(27, 2 * group, head_size).to(dtype), torch.zeros(3, 300).int()
    several.multi_token_decode(
        DecodeBatch(query, table, torch.zeros(3).int()), cache,
        Softmax(0.1, 20.0 * (head_size > 64), torch.zeros(2 * group)), torch.zeros_like(query),
    )

for place in sys.argv[2].split():
    module, name = place.split(".")
    module = importlib.import_module(f"{blocks.__name__}.{module}")
    setattr(module, name, Compile(getattr(module, name)))
prompts = Prompts(torch.tensor([0, 64]).int(), torch.zeros(1, 4).int(), torch.tensor([256]).int(), (64,), (256,))
masses = BlockRule(dense_tokens=64, least_blocks=2)
shapes = [(128, kind, masses) for kind in KINDS.values()]
shapes += [(64, KINDS["quarters"], masses), (256, KINDS["mean_and_spread"], masses)]
shapes += [(256, KINDS["quarters"], BlockRule(coverage=0.9, dense_tokens=64))]
for head_size, kind, rule in of_architecture(*shapes):
    layout = StatisticsLayout(8, head_size, kind.formats[0], kind=kind)
    cache = torch.zeros(4, 8, 64 + layout.rows(64), 2 * head_size).bfloat16()
    cache = KVCache.from_rows(cache[:, :, :64], 8, layout.views(cache[:, :, 64:], 64))
    query = torch.zeros(64, 32, head_size).bfloat16()
    blocks.prefill_blocks(
        prompts.batch(query), cache, Softmax(0.1, sink_logits=torch.zeros(32)), rule, plan_tiles(prompts, rule, 4),
        lambda *given: torch.zeros(4, 512), torch.zeros_like(query), torch.zeros(8, 2).long(),
        Copies(cache.keys, cache.values, prompts.block_table),
    )

for place in sys.argv[4:]:
    module, name = place.split(".")
    module = importlib.import_module(f"{prefill.__name__}.{module}")
    setattr(module, name, Compile(getattr(module, name)))
for (head_size,) in of_architecture((64,), (128,), (256,)):
    cache = KVCache.from_rows(torch.zeros(4, 8, 64, 2 * head_size).bfloat16(), 8)
    starts, lengths = torch.zeros(3).int(), torch.zeros(2).int()
    batch = PrefillBatch(
        torch.zeros(20, 32, head_size).bfloat16(), starts, torch.zeros(2, 4).int(), lengths, 20, 256
    )
    softmax = Softmax(0.1, 20.0, torch.zeros(32))
    for rule in (TokenRule(), TokenRule(others="zero")):
        prefill.token_prefill(batch, cache, softmax, rule, torch.zeros_like(batch.query), None, None, None)

for name in ("_rank_tokens", "_list_tokens", "_copy_out"):
    setattr(compaction, name, Compile(getattr(compaction, name)))
compaction.write_cache = lambda *given: None
for dtype in (torch.bfloat16, torch.uint8):
    kept = compaction.choose_tokens(torch.zeros(8, 300), 128, 256, 280, CompactionRule(32, 25, 4))
    cache = KVCache.from_rows(torch.zeros(4, 8, 64, 256).to(dtype), 8)
    compaction.move_tokens(kept, torch.zeros(5).int(), 2, cache)
    prefill.attention_sums(batch, cache, Softmax(0.1), torch.zeros(2, 32).int())
for name in sys.argv[3].split():
    setattr(evictions, name, Compile(getattr(evictions, name)))
# Triton has no float8 before compute capability 8.9.
shapes = [(64, torch.float8_e4m3fn), (96, torch.bfloat16), (128, torch.bfloat16), (256, torch.float16)]
for head_size, dtype in of_architecture(*shapes):
    cache = KVCache.from_rows(torch.zeros(4, 8, 64, 2 * head_size).to(dtype), 8, None, *[torch.ones(1)] * 2)
    caches, kept = LayerCaches((cache, cache)), torch.zeros(2, 8, 128).long()
    table, query = torch.zeros(5).int(), torch.zeros(2, 8, 32, head_size).to(dtype)
    softmax = [Softmax(0.1, 20.0, torch.zeros(32) if head_size > 96 else None)] * 2
    evictions.add_votes(torch.zeros(2, 8, 200), query, 192, table, caches, softmax, torch.ones(2))
    evictions.move_in_place(kept, table, 1, caches)
    evictions.write_queries(query[0], torch.zeros(8).int(), query[0].clone())
rolling._attend = Compile(rolling._attend)
for head_size, queries, softcap in of_architecture((64, 500, 20.0), (96, 1, 0.0), (128, 1, 0.0), (256, 500, 20.0)):
    cache = KVCache.from_rows(torch.zeros(4, 8, 64, 2 * head_size).bfloat16(), 16)
    query = torch.zeros(20, 48, head_size).bfloat16()[:, :32]
    starts, lengths = torch.zeros(3).int(), torch.zeros(2).int()
    rolling.attend_rolling(
        PrefillBatch(query, starts, torch.zeros(2, 4).int(), lengths, queries, 256), cache, Softmax(0.1, softcap),
        RollingWindow(4, 48, 48), Rotation(torch.zeros(256, 64).bfloat16(), interleaved=queries > 1),
        torch.zeros_like(query),
    )
"""


@pytest.fixture(scope="module")
def compiled() -> Iterator[Callable[..., int]]:
    """Runs code that compiles kernels; returns their number. Each must fit the smallest GPUs."""
    with start_forks(("torch", "triton.backends.compiler")) as forks:

        def run(code: str, *arguments: str) -> int:
            sizes, shared = zip(*(map(int, line.split()) for line in forks.run(code, *arguments)), strict=True)
            assert min(sizes) > 0
            assert max(shared) <= LEAST_SHARED_BYTES
            return len(sizes)

        yield run


@pytest.mark.parametrize("architecture", ["80", "90"])
def test_compiles(compiled: Callable[..., int], architecture: str) -> None:
    of_decode = len(KINDS) + sum(2 * kind.is_leveled + (not kind.is_fused) for kind in KINDS.values())
    # Kernels by head sizes, and kinds of statistics; each form of sparse prefill, for each head size.
    if architecture == "80":
        of_several, of_prefill, of_blocks, others = 2, 2, 2, 2
    else:
        of_several, of_prefill, of_blocks, others = 6, 6, len(KINDS) + 3, 4
    expected = of_decode + of_several + of_prefill * len(PREFILL) + of_blocks * len(BLOCKS)
    # Compaction has two data types. Kernels of rolling positions and of evictions have as many head sizes.
    expected += 2 * len(COMPACTION) + others * (1 + len(EVICTION))
    assert compiled(CODE, architecture, " ".join(BLOCKS), " ".join(EVICTION), *PREFILL) == expected


OF_TRAINING = (
    CODE.partition("write._write_cache, scores")[0]
    + """
from sparse_kernels.batch import PageSelection
from sparse_kernels.masked_attention import PageMask, Packing, page_records, triton as masked

for module, name in (place.split(".") for place in sys.argv[4:]):
    module = importlib.import_module(f"{masked.__name__}.{module}")
    setattr(module, name, Compile(getattr(module, name)))
kind, packing = KINDS[sys.argv[2]], Packing((40, 30))
query = torch.zeros(70, 8, 64).bfloat16().requires_grad_()
key, value = (torch.zeros(70, 2, 64).bfloat16().requires_grad_() for _ in range(2))
records = page_records(key, packing, 8, kind, kind.formats[0])
mask = PageMask(PageSelection(3, 1, 1, 1.0), 8, temperature=float(sys.argv[3]) if sys.argv[3] != "None" else None)
masked.masked_attention(query, key, value, records, packing, mask, 0.125).sum().backward()
"""
)


@pytest.mark.parametrize(("temperature", "twice"), [("0.5", 2), ("None", 1)])
def test_kernels_of_training_compile(compiled: Callable[..., int], temperature: str, twice: int) -> None:
    # Scores are computed and softened in both passes; pages' outputs and gradients are joined by one kernel.
    names = MASKED[temperature]
    assert compiled(OF_TRAINING, "90", "quarters", temperature, *names) == len(names) + twice
