"""The CUDA code that counts a coverage from the best pages (`best.cu`) on emulated warps, without a GPU."""

import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from sparse_kernels.batch import PageSelection, QueryTokens, Softmax
from sparse_kernels.page_coverage import Limits, page_logits
from sparse_kernels.page_coverage.reference import count_pages
from sparse_kernels.page_score import score_pages
from support.emulated import HEADERS, ROOT, compile_program, needs_compiler
from support.paged import make_batch

SOURCES = (
    *(HEADERS / name for name in ("params.cuh", "score.cuh", "select.cuh", "weights.cuh")),
    *(ROOT / "page_coverage" / name for name in ("best.cu", "rows.cuh")),
)
SELECTION = PageSelection(1024, 1, 1)
CASES = {
    "quarters": ("quarters", 4, 128, 8, 8, 10003, 0.0),
    "sketches, group of 9, heads of 80, blocks of a page, softcap": ("sketch", 9, 80, 16, 1, 6000, 20.0),
}
"""Kind, group, head size, page size, pages of a block, context, softcap."""

pytestmark = needs_compiler


class Row:
    """One request, whose program counts with one thread block for each KV head."""

    def __init__(
        self, folder: Path, kind: str, group: int, head_size: int, page_size: int, per_block: int, context: int,
        softcap: float,
    ) -> None:  # fmt: skip
        self.folder, self.group, self.context = folder, group, context
        macros = {
            "QUERY": 0, "KV": 0, "GROUP": group, "HEAD_SIZE": head_size, "WARPS": 2, "PAGE_SIZE": page_size,
            "RECORD": {"sketch": 4, "quarters": 5}[kind], "PAGES_PER_BLOCK": per_block,
            "SHARED_BYTES": "sizeof(Shared)",
        }  # fmt: skip
        options = [f"-DSK_{name}={value}" for name, value in macros.items()]
        compile_program(folder, "best", SOURCES, "-ffp-contract=off", *options)
        statistics = {"quarters": "int4", "sketch": "int2"}[kind]
        self.batch = make_batch([context], 1, head_size, page_size * per_block, page_size, statistics, kind)
        self.query = torch.randn(1, 1, group, head_size, generator=torch.Generator().manual_seed(3)).bfloat16()
        self.softmax = Softmax(0.5 * head_size**-0.5, softcap)

    @property
    def tokens(self) -> QueryTokens:
        return QueryTokens(self.query, self.batch.block_table, self.batch.context_lens)

    def scores(self) -> torch.Tensor:
        batch = self.batch
        return score_pages(self.query, batch.statistics, batch.block_table, batch.num_pages, 0.0)

    def expected(self, share: float, least: int, most: int) -> torch.Tensor:
        limits = Limits(torch.tensor([share]), torch.tensor([least]), torch.tensor([most]))
        return count_pages(self.tokens, self.batch.cache, self.scores(), SELECTION, self.softmax, limits)[0]

    def counted(self, share: float, least: int, most: int) -> torch.Tensor:
        batch, softmax = self.batch, self.softmax
        pages, size = self.context // batch.page_size, batch.page_size
        cache, statistics = batch.cache, batch.statistics
        keys = cache.keys.view
        memory = torch.empty(0, dtype=torch.uint8).set_(keys.untyped_storage())
        vectors, scales = statistics.vectors, statistics.scales
        stride = keys.element_size()
        blocks = batch.block_table[0, : -(-pages // statistics.pages_per_block)]
        logits = page_logits(self.query[0], statistics.summaries(blocks)[0][:, :pages], size, softmax)
        logits = (logits - math.log(size)) / math.log(2)
        ranked = logits[:, :, 1:-1]
        largest = ranked.amax(dim=-1)
        sums = torch.stack([largest, torch.exp2(ranked - largest[..., None]).sum(dim=-1)], dim=-1)
        scores = torch.full((1, -(-pages // 8) * 8), 1e30).bfloat16()
        scores[:, :pages] = self.scores()[0, :, :pages]
        files = {
            "memory": memory, "table": batch.block_table[0].int(), "query": self.query.view(torch.int16),
            "scores": scores.view(torch.int16), "sums": sums,
        }  # fmt: skip
        for name, part in files.items():
            part.contiguous().numpy().tofile(self.folder / name)
        scale = softmax.scale * (1 if softmax.softcap else math.log2(math.e))
        arguments = (
            "memory", keys.stride(0) * stride, keys.stride(1) * stride, keys.stride(-2) * stride,
            keys.storage_offset() * stride, vectors.storage_offset() * vectors.element_size(),
            scales.storage_offset() * scales.element_size(), "table", self.context, 1, statistics.pages_per_block,
            "query", "scores", "sums", scale, softmax.softcap, share, least, most, "counts",
        )  # fmt: skip
        subprocess.run(["./best", *map(str, arguments)], cwd=self.folder, check=True, timeout=300)
        return torch.from_numpy(np.fromfile(self.folder / "counts", dtype=np.int32)).long()


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def row(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Row:
    return Row(tmp_path_factory.mktemp("best"), *request.param)


# Sums of the reference and of the kernel differ by rounding: the share is reached one page sooner or later.
CLOSE = 3e-6


def test_counts_are_those_of_the_reference(row: Row) -> None:
    found = []
    for share, least, most in ((0.1, 4, 1024), (0.7, 4, 1024), (0.999, 4, 300)):
        counts = row.counted(share, least, most)
        assert (counts >= row.expected(share - CLOSE, least, most)).all()
        assert (counts <= row.expected(share + CLOSE, least, most)).all()
        found += counts.tolist()
    few, more, all_read = found
    # The pages that are listed first suffice; they do not; no page does that the row may read.
    assert 4 < few < 200
    assert 256 < more < 1000
    assert all_read == 300
