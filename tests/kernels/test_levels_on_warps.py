"""The CUDA code of two levels (`levels.cuh`) on emulated warps: its bits are those of the rule, without a GPU."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from sparse_kernels.page_score.levels import FLAT_PAGES, in_units, refined_pages
from support.emulated import HEADERS, compile_program, needs_compiler
from support.levels import exact_scores
from support.paged import make_batch

CASES = {
    "two blocks of four warps": ((4, 128, 8, 2, 4), (2300, 500, 1), 0.25),
    "eight blocks, small KV blocks": ((3, 64, 2, 8, 2), (2600,), 0.3),
    "group of 16": ((16, 128, 8, 4, 2), (2600,), 0.25),
    "heads of 80": ((7, 80, 8, 1, 8), (FLAT_PAGES, FLAT_PAGES + 1), 0.25),
    "heads of 256, a page to a KV block": ((2, 256, 1, 2, 4), (2100,), 0.25),
    "stripes of more pages than lanes hold": ((1, 32, 32, 1, 4), (20001,), 0.1),
}
"""Group, head size, pages of a block, cluster and warps; pages; share."""

pytestmark = needs_compiler


@pytest.mark.parametrize(("shape", "lengths", "share"), CASES.values(), ids=CASES)
def test_the_keys_are_those_of_the_rule(
    tmp_path: Path, shape: tuple[int, ...], lengths: tuple[int, ...], share: float
) -> None:
    group, head_size, pages_per_block, _, _ = shape
    headers = tuple(HEADERS / name for name in ("levels.cuh", "params.cuh", "score.cuh", "select.cuh"))
    names = ("GROUP", "HEAD_SIZE", "PAGES_PER_BLOCK", "CLUSTER", "WARPS")
    macros = [f"-DSK_{name}={value}" for name, value in zip(names, shape, strict=True)]
    compile_program(tmp_path, "levels", headers, "-ffp-contract=off", *macros)
    for pages in lengths:
        # A block holds records in units of 16 tokens.
        page_size = 16 if pages_per_block == 1 else 8
        contexts, block_size = [page_size * pages + 3], page_size * pages_per_block
        batch = make_batch(contexts, 1, head_size, block_size, page_size, "int4", "leveled_quarters")
        query = torch.randn(1, group, head_size).bfloat16()
        vectors = batch.statistics.vectors
        memory = torch.empty(0, dtype=torch.uint8).set_(vectors.untyped_storage())
        files = {
            "memory": memory, "table": batch.block_table[0].int(), "query": query.view(torch.int16),
        }  # fmt: skip
        for name, part in files.items():
            part.numpy().tofile(tmp_path / name)
        arguments = (
            "memory", vectors.stride(0), vectors.storage_offset(), "table", pages, "query", in_units(share), "keys",
        )  # fmt: skip
        subprocess.run(["./levels", *map(str, arguments)], cwd=tmp_path, check=True, timeout=300)
        found = torch.from_numpy(np.fromfile(tmp_path / "keys", dtype=np.int16)).view(torch.bfloat16)
        first, whole = exact_scores(query, batch, 0)
        kept = refined_pages(first, pages_per_block, share)
        assert kept.all() == (pages <= FLAT_PAGES)
        assert torch.equal(found, whole.masked_fill(~kept, -torch.inf)[0])
