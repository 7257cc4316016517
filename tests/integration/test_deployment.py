"""Installation and monitoring: the archives of a release, an engine from its wheel, and the dashboard's queries."""

import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.dashboard import queries, series_of, variable_series
from support.engines import run_engine

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "needle-8m"
EVERY_METRIC = {
    "selection": {"budget_tokens": 128},
    "routing": {"threshold": 0.5, "accept": "uncalibrated"},
    "stopping": {"scale_tolerance": 1e-3, "block_tokens": 64},
    "prefill": {"method": "blocks", "min_context_tokens": 128, "min_blocks": 2},
    "min_context_tokens": 0,
}
"""Settings of an engine with all metrics of the plugin, but `OF_ZIPVL` and `OF_OTHERS`."""
OF_ZIPVL = {"vllm_sparse_prefill_pairs_sum", "vllm_sparse_prefill_pairs_count"}
"""Series that only the prefill of ZipVL has, in place of the estimated mass of key blocks."""
OF_OTHERS = {"vllm_sparse_host_bytes_sum"} | {
    f"vllm_sparse_{name}_{part}"
    for name in ("host_reads", "kept_share", "blocks_freed", "lossless_gain")
    for part in ("sum", "count")
}
"""Series of engines that offload on a GPU, compact, or run in lossless mode."""
_ADDED_BY_PROMETHEUS = {"instance", "job"}


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> tuple[Path, Path]:
    """The source archive, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (source,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return source, wheel


@pytest.fixture(scope="module")
def program(archives, tmp_path_factory) -> Path:
    """`vllm-sparse` in an environment with the wheel and the packages of this one, without the checkout."""
    folder = tmp_path_factory.mktemp("installation")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", archives[1], cwd=folder)
    # Path files in a folder that is itself added by a path file are not read, so the checkout is excluded.
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    (Path(packages) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "vllm-sparse"


def test_the_wheel_has_every_module_kernel_and_preset_and_nothing_else(archives):
    wanted = {}
    for folder, package in (("vllm_sparse_plugin", "vllm_sparse_plugin"), ("kernels/sparse_kernels", "sparse_kernels")):
        wanted |= {f"{package}/{file.relative_to(ROOT / folder)}": file for file in (ROOT / folder).rglob("*.*")}
    wanted |= {f"vllm_sparse_plugin/configs/{file.name}": file for file in (ROOT / "configs").glob("*.*")}
    wanted = {name: file for name, file in wanted.items() if "__pycache__" not in name and file.is_file()}
    assert {Path(name).suffix for name in wanted} == {".py", ".cu", ".cuh", ".yaml", ".typed"}
    with zipfile.ZipFile(archives[1]) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert packed == {*wanted}
        assert all(wheel.read(name) == file.read_bytes() for name, file in wanted.items())


def test_the_source_archive_has_what_the_wheel_is_built_of_alone(archives):
    with tarfile.open(archives[0]) as source:
        tops = {name.split("/")[1] for name in source.getnames() if "/" in name}
    assert {"LICENSE", "README.md", "configs", "kernels", "pyproject.toml", "setup.py", "vllm_sparse_plugin"} <= tops
    assert not tops & {"bench", "docker", "models", "tests"}


def test_links_of_the_description_work_on_a_package_index(archives):
    with zipfile.ZipFile(archives[1]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = wheel.read(name).decode()
    assert "\nAuthor: the vllm-sparse-plugin authors\n" in metadata
    version = re.search(r"^Version: (.*)$", metadata, re.MULTILINE)[1]
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", metadata.partition("\n\n")[2])
    ours = [(mark, link) for mark, link in links if "vllm-sparse-plugin/" in link]
    assert len(ours) > 10
    assert [link for _, link in links if not link.startswith(("https://", "#"))] == []
    for mark, link in ours:
        form, tag, path = re.search(r"/(blob|raw)/(v[^/]*)/([^#]*)", link).groups()
        assert (form, tag) == ("raw" if mark else "blob", f"v{version}")
        assert (ROOT / path).exists(), link


ENGINE = """
import os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM, SamplingParams
from vllm.model_executor.models import registry

registry._run_in_subprocess = lambda inspect: inspect()
settings = {"selection": {"budget_tokens": 64}, "min_context_tokens": 0}
engine = LLM(
    sys.argv[1], attention_backend="streaming_llm", additional_config={"sparse_attention": settings},
    max_model_len=512, enforce_eager=True,
)
sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
(answer,) = engine.generate([{"prompt_token_ids": [7] * 300}], sampling, use_tqdm=False)
import vllm_sparse_plugin.configs, sparse_kernels.sparse_attention.cpu

print(len(answer.outputs[0].token_ids))
print(*[x.__file__ for name, x in sys.modules.items() if name.startswith(("vllm_sparse_plugin", "sparse_kernels"))])
"""


def test_an_installed_wheel_serves_with_what_it_contains(program):
    assert run(program, "--version", cwd=program.parent).startswith("vllm-sparse ")
    *_, tokens, files = run(program.with_name("python"), "-P", "-c", ENGINE, MODEL, cwd=program.parent).splitlines()
    assert tokens == "8"
    assert len(files.split()) > 50
    assert all(Path(file).is_relative_to(program.parents[1]) for file in files.split())


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Labels of every series of an engine at `/metrics`, by name, after some requests."""
    with run_engine("unique", EVERY_METRIC, max_model_len=2048) as engine:
        # Counters are written at intervals.
        engine.answer([[7] * 500, [8] * 400, [9] * 600], max_tokens=64, ignore_eos=True)
        text = engine.metrics()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    assert not OF_ZIPVL & found.keys()
    assert not OF_OTHERS & found.keys()
    found |= dict.fromkeys(OF_OTHERS, found["vllm_sparse_blocks_read_sum"])
    return found | {name: found[name.replace("pairs", "density")] for name in OF_ZIPVL}


@pytest.mark.parametrize("query", queries(), ids=lambda query: f"{query.panel}: {query.legend}")
def test_a_query_of_the_dashboard_reads_what_an_engine_has(query, labels):
    series = series_of(query.expression)
    assert series
    for one in series:
        assert one.name in labels
        assert one.labels <= labels[one.name] | _ADDED_BY_PROMETHEUS


def test_variables_of_the_dashboard_read_what_an_engine_has(labels):
    for one in variable_series():
        assert one.labels <= labels[one.name] | _ADDED_BY_PROMETHEUS


def test_every_metric_of_ours_is_on_the_dashboard(labels):
    shown = {one.name for query in queries() for one in series_of(query.expression)}
    # Settings are for clients that compare servers.
    assert {name for name in labels if name.startswith("vllm_sparse_") and not name.endswith("_info")} == {
        name for name in shown if name.startswith("vllm_sparse_")
    }
