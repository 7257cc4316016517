import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh process, away from the checkout."""
    command = [sys.executable, "-P", "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=300)


def test_packages_are_the_folders_with_python_files():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {"vllm_sparse_plugin.configs"}
    for base, top in ((ROOT, "vllm_sparse_plugin"), (ROOT / "kernels", "sparse_kernels")):
        for file in (base / top).rglob("*.py"):
            found.add(".".join(file.parent.relative_to(base).parts))
            assert (file.parent / "__init__.py").exists()
    assert (ROOT / "configs" / "__init__.py").exists()
    assert sorted(tool["packages"]) == sorted(found)


def test_package_folders_exist():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for folder in tool["package-dir"].values():
        assert (ROOT / folder / "__init__.py").exists()


def test_data_patterns_match_files():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package, patterns in tool["package-data"].items():
        for pattern in patterns:
            assert list((ROOT / tool["package-dir"][package]).glob(pattern)), (package, pattern)


def test_every_cuda_source_is_packaged():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    base = ROOT / "kernels" / "sparse_kernels"
    packaged = {file for pattern in tool["package-data"]["sparse_kernels"] for file in base.glob(pattern)}
    assert packaged >= {*base.rglob("*.cu"), *base.rglob("*.cuh")}


def test_the_folder_of_kernels_is_no_package():
    # `import kernels` is another distribution's name.
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_kernels_run_where_vllm_cannot_be_imported():
    code = """
        import sys

        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("vllm", "vllm_sparse_plugin"):
                    raise ImportError(f"blocked: {name}")

        sys.meta_path.insert(0, Blocked())
        try:
            import vllm
        except ImportError:
            pass
        else:
            raise SystemExit("vllm was not blocked")

        import torch
        from support.paged import make_batch
        from sparse_kernels.batch import Softmax
        from sparse_kernels.page_score import score_pages
        from sparse_kernels.page_topk import select_pages
        from sparse_kernels.sparse_attention import attend_pages

        batch = make_batch([100, 20], num_kv_heads=2, head_size=64)
        query = torch.randn(2, 2, 4, 64).bfloat16()
        scores = score_pages(query, batch.statistics, batch.block_table, batch.num_pages, 0.75)
        pages = select_pages(scores, batch.num_pages, 4, 1, 1)
        output = attend_pages(batch.tokens(query), batch.cache, pages, Softmax(0.125))
        assert pages.shape == (2, 2, 4) and output.shape == (2, 8, 64) and output.isfinite().all()
        assert not [name for name in sys.modules if name.partition(".")[0] in ("vllm", "vllm_sparse_plugin")]
        print("ran")
    """
    done = run_python(f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n" + textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ran\n"


def test_import_contracts_hold():
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout
