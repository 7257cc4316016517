import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from support.fresh_python import start_forks

from run import EXTRAS

ROOT = Path(__file__).parents[2]


def locked(platform: str = "cpu") -> list[tuple[str, Version, Marker | None]]:
    """Name, version and condition of every package of a lock file; each must have its hashes."""
    found = []
    text = (ROOT / "requirements" / f"{platform}.lock").read_text()
    for entry in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]:
        name, version, marker = re.match(r"([\w.-]+)==(\S+)(?: ; (.+))? \\\n", entry).groups()
        assert "    --hash=sha256:" in entry, name
        found.append((name, Version(version), Marker(marker) if marker else None))
    return found


def requirements(path: str) -> list[Requirement]:
    """The requirements in a file, without options."""
    lines = (ROOT / "requirements" / path).read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_lock_has_what_the_project_asks_for(python):
    """After a change of the dependencies in pyproject.toml: `python3 run.py lock`."""
    environment = {"python_version": python, "python_full_version": f"{python}.6", "sys_platform": "linux"}
    versions = {name: version for name, version, marker in locked() if marker is None or marker.evaluate(environment)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    left_out = {each.name for path in ("cpu-overrides.txt", "lock-overrides.txt") for each in requirements(path)}
    assert left_out & versions.keys() == set()
    for requirement in map(Requirement, asked):
        if requirement.name not in left_out:
            assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement
    assert len(versions) > 150


def test_the_lock_of_a_gpu_has_what_the_project_asks_for():
    versions = {name: version for name, version, _ in locked("gpu")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in EXTRAS if extra != "cpu" for line in project["optional-dependencies"][extra]]
    for requirement in map(Requirement, [*project["dependencies"], *extras]):
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_lock_names_no_registry(platform):
    assert "://" not in (ROOT / "requirements" / f"{platform}.lock").read_text()


def test_every_extra_is_locked():
    assert sorted(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]) == sorted(
        EXTRAS
    )


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

        sys.path.insert(0, sys.argv[1])
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
    with start_forks(("torch",)) as forks:
        assert forks.run(textwrap.dedent(code), str(ROOT / "tests")) == ["ran"]


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
