import numba
import numpy as np
import pytest
from sparse_kernels import compiled
from sparse_kernels.compiled import parallel_kernel


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


def test_processes_that_compile_at_once_never_run_each_others_code(tmp_path, monkeypatch):
    """One keeps its code while the other is about to: both have read the index when it was empty."""
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
    """As with a Numba that keeps it otherwise."""
    rename = compiled._name_files_apart
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "_name_files_apart", lambda _: rename(files))
    assert filled(kernel_of(3)) == [3] * 3
    assert not list(tmp_path.rglob("*.nb?"))
