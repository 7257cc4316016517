"""The CUDA code of attention over lists (`attend.cu`) on emulated warps, without a GPU."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from sparse_kernels.batch import QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.sparse_attention.cuda import shared_bytes
from sparse_kernels.sparse_attention.reference import attend_pages
from support.cuda import assert_close
from support.emulated import HEADERS, ROOT, compile_program, needs_compiler

PAGE_SIZE, PAGES_PER_BLOCK, BLOCKS, K = 8, 2, 8, 3

pytestmark = needs_compiler


@pytest.mark.parametrize("tail", [0, 3])
def test_a_row_that_reads_nothing_has_a_zero_output(tmp_path: Path, tail: int) -> None:
    group, head_size = 3, 80
    macros = {
        "QUERY": 0, "KV": 0, "OUTPUT": 0, "GROUP": group, "HEAD_SIZE": head_size, "PAGE_SIZE": PAGE_SIZE,
        "PAGES_PER_BLOCK": PAGES_PER_BLOCK, "CLUSTER": 1, "WARPS": 2, "BLOCKS_PER_SM": 1, "K": K,
        "SHARED_BYTES": shared_bytes(1, group, head_size),
    }  # fmt: skip
    sources = (
        *(HEADERS / name for name in ("params.cuh", "attend.cuh", "merge.cuh")),
        ROOT / "sparse_attention/attend.cu",
    )
    options = [f"-DSK_{name}={value}" for name, value in macros.items()]
    compile_program(tmp_path, "attend", sources, *options)
    rows = torch.randn(BLOCKS, 1, PAGES_PER_BLOCK * PAGE_SIZE, 2 * head_size).bfloat16()
    query = torch.randn(2, 1, group, head_size).bfloat16()
    pages = torch.tensor([[[-1, -1, -1]], [[9, -1, 4]]])
    context = 10 * PAGE_SIZE + tail
    parts = {"rows": rows.view(torch.int16), "query": query.view(torch.int16), "pages": pages.int()}
    for name, part in parts.items():
        part.contiguous().numpy().tofile(tmp_path / name)
    arguments = ("rows", context, "query", "pages", "heads")
    subprocess.run(["./attend", *map(str, arguments)], cwd=tmp_path, check=True, timeout=300)
    found = torch.from_numpy(np.fromfile(tmp_path / "heads", dtype=np.int16)).view(torch.bfloat16)
    found = found.view(2, group, head_size)
    table = torch.arange(BLOCKS).expand(2, -1)
    tokens = QueryTokens(query, table, torch.tensor([context, context]))
    expected = attend_pages(tokens, KVCache.from_rows(rows, PAGE_SIZE), pages, Softmax(0.125))
    assert (found[0] == 0).all() == (tail == 0)
    assert found.isfinite().all()
    assert_close(found, expected.view_as(found))
