import importlib
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from numba.core.caching import CacheImpl
from sparse_kernels import compiled, page_score, sparse_attention
from sparse_kernels.batch import QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.compiled import parallel_kernel
from sparse_kernels.page_statistics import KINDS
from support.logs import said
from support.paged import make_batch


def kernel_of(constant: int):
    @parallel_kernel()
    def fill(output):
        for i in numba.prange(output.size):
            output[i] = constant

    return fill


def filled(kernel) -> list[int]:
    output = np.zeros(3, np.int64)
    kernel(output)
    return output.tolist()


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    monkeypatch.setattr(compiled, "_said", [])
    return said(monkeypatch, "vllm.sparse_kernels.compiled", "warning")


def test_processes_that_compile_at_once_never_run_each_others_code(tmp_path, monkeypatch):
    """One process stores its code while the other compiles: both have read an empty index."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    one, other = kernel_of(1), kernel_of(2)
    files, save = one._cache._cache_file, one._cache._cache_file._save_data

    def meanwhile(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(other._cache._cache_file, "_load_index", dict)
            assert filled(other) == [2] * 3
        save(*arguments)

    monkeypatch.setattr(files, "_save_data", meanwhile)
    assert filled(one) == [1] * 3
    later = kernel_of(2)
    assert filled(later) == [2] * 3
    assert later.stats.cache_hits
    assert filled(kernel_of(1)) == [1] * 3


@pytest.mark.parametrize("files", [None, object()])
def test_code_is_not_kept_where_its_files_cannot_be_named_apart(files, monkeypatch, tmp_path):
    """For example with a Numba that stores code differently."""
    rename = compiled._name_files_apart
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "_name_files_apart", lambda _: rename(files))
    assert filled(kernel_of(3)) == [3] * 3
    assert not list(tmp_path.rglob("*.nb?"))


def test_kernels_run_where_no_folder_can_be_written(monkeypatch, warnings):
    """For example for a user without a home folder, on a read-only root."""
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    assert filled(kernel_of(4)) == [4] * 3
    assert filled(kernel_of(5)) == [5] * 3
    (line,) = warnings
    assert line.startswith("compiled CPU kernels are not kept on disk, so every start compiles them (RuntimeError: ")


def replace_by_a_file(folder: Path) -> None:
    """Nothing can be written or read below this path afterwards."""
    for file in sorted(folder.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    folder.rmdir()
    folder.write_text("")


def cut_every_file(folder: Path) -> None:
    for file in folder.rglob("*.nb?"):
        file.write_bytes(file.read_bytes()[:3])


@pytest.mark.parametrize("spoil", [replace_by_a_file, cut_every_file])
@pytest.mark.parametrize("when", ["before", "after"])
def test_kernels_run_where_the_folder_is_lost(spoil, when, monkeypatch, warnings, tmp_path):
    folder = tmp_path / "cache"
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    # Another process has stored its compiled code.
    assert filled(kernel_of(6)) == [6] * 3
    kernel = kernel_of(6)
    if when == "after":
        assert filled(kernel) == [6] * 3
        assert kernel.stats.cache_hits
    spoil(folder)
    assert filled(kernel) == [6] * 3
    assert len(warnings) == (when == "before")


def attend(tokens: QueryTokens, cache: KVCache, pages: torch.Tensor) -> None:
    sparse_attention.attend_pages(tokens, cache, pages, Softmax(0.1))


def score(tokens: QueryTokens, cache: KVCache, pages: torch.Tensor) -> None:
    page_score.score_pages(tokens.query, cache.statistics, tokens.block_table, tokens.context_lens // 8, 0.0)


@pytest.mark.parametrize(("package", "operate"), [("sparse_attention", attend), ("page_score", score)])
def test_rows_with_strides_compile_nothing_more(package, operate, monkeypatch):
    module = importlib.import_module(f"sparse_kernels.{package}.cpu")
    make, made = module._kernel, []
    monkeypatch.setattr(module, "_kernel", lambda *shape: made.append(make(*shape)) or made[-1])
    batch = make_batch([300, 200], 2, 64, statistics=KINDS["quarters"].formats[0], kind="quarters")
    query, pages, table = torch.randn(2, 2, 4, 64).bfloat16(), torch.arange(20), batch.block_table
    wide = torch.stack([table, table], dim=2)[..., 0]
    lengths = torch.stack([batch.context_lens, batch.context_lens], dim=1)[:, 0]
    operate(QueryTokens(query, table, batch.context_lens), batch.cache, pages.repeat(2, 2, 1))
    operate(QueryTokens(query, wide, lengths), batch.cache, pages.expand(2, 2, -1))
    assert len(made) == 2
    assert len(made[1].signatures) == 1
