"""Metrics reach every worker that can publish them, and never stop an engine."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.mmap_dict import MmapedDict
from support.logs import said
from vllm.ray.ray_env import get_env_vars_to_copy

from vllm_sparse_plugin.metrics import dropping, live


@pytest.fixture(autouse=True)
def warnings(monkeypatch) -> list[str]:
    """The log messages; no folder is set."""
    for name in (live._VLLM_FOLDER, live._OUR_FOLDER, live._COPIED_TO_RAY):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(dropping, "_reported", set())
    monkeypatch.setattr(live, "REGISTRY", CollectorRegistry())
    return said(monkeypatch, "vllm.vllm_sparse_plugin.metrics.dropping", "warning")


def count_for_a_while() -> None:
    counts = live.DeviceCounts([(0, range(2))], live.SKIPPED, 2, torch.device("cpu"))
    for _ in range(4 * live.COUNTED_STEPS):
        counts.of_layers[0].add_(torch.tensor([[1, 2], [1, 2]]))
        counts.step()


def test_pages_from_the_host_are_counted_in_bytes_too():
    counts = live.DeviceCounts([(0, range(2))], live.host_reads(4096), 2, torch.device("cpu"))
    counts.of_layers[0].add_(torch.tensor([[10, 3], [20, 0]]))
    assert counts.totals() == {"vllm_sparse_host_reads": (3, 30), "vllm_sparse_host_bytes": (3 * 4096, 30)}


def test_what_is_copied_from_a_device_lies_on_the_host():
    # While models are built, tensors without an explicit device use that of the context.
    with torch.device("meta"):
        counts = live.DeviceCounts([(0, range(2))], live.SKIPPED, 2, torch.device("cpu"))
        counts.of_layers[0].add_(1)
        for _ in range(2 * live.COUNTED_STEPS):
            counts.step()
    assert counts.of_layers[0].is_cpu
    assert counts._known.tolist() == [[1, 1]] * 2


def test_a_worker_without_a_folder_goes_on(warnings):
    count_for_a_while()
    (line,) = warnings
    assert line.endswith("they are not published (KeyError: 'SPARSE_PLUGIN_METRICS_DIR')")


def test_a_worker_whose_folder_is_gone_goes_on(warnings, monkeypatch, tmp_path):
    monkeypatch.setenv(live._OUR_FOLDER, str(tmp_path / "gone"))
    count_for_a_while()
    (line,) = warnings
    assert "they are not published (FileNotFoundError" in line


def test_an_engine_that_can_make_no_folder_starts_and_goes_on(warnings, monkeypatch):
    def full(**_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(live.tempfile, "mkdtemp", full)
    live.expose()
    count_for_a_while()
    assert [line.partition(": ")[2] for line in warnings] == [
        "there are none (OSError: [Errno 28] No space left on device)",
        "they are not published (KeyError: 'SPARSE_PLUGIN_METRICS_DIR')",
    ]


def test_an_empty_folder_of_vllm_is_none(warnings, monkeypatch):
    """Deployments pass variables on that are empty. Workers wrote nowhere."""
    monkeypatch.setenv(live._VLLM_FOLDER, "")
    live.expose()
    count_for_a_while()
    assert warnings == []
    assert published(Path(os.environ[live._OUR_FOLDER]))["vllm_sparse_group_skipped_sum"] > 0
    names = {metric.name for metric in live.REGISTRY.collect()}
    assert "vllm_sparse_group_skipped" in names


@pytest.mark.parametrize("others", [None, "", "MINE,", "MINE,YOURS"])
def test_the_folder_is_known_to_workers_of_ray(others, monkeypatch):
    if others is not None:
        monkeypatch.setenv(live._COPIED_TO_RAY, others)
    live.expose()
    copied = get_env_vars_to_copy()
    assert live._OUR_FOLDER in copied
    assert {name for name in (others or "").split(",") if name} <= copied
    names = os.environ[live._COPIED_TO_RAY]
    live.expose()
    assert os.environ[live._COPIED_TO_RAY] == names


def add_keys(folder: Path, keys: int) -> None:
    """Adds this many series of a hundred bytes each to a folder, like a worker."""
    os.environ[live._OUR_FOLDER] = str(folder)
    for key in range(keys):
        live._add(f"series_{key:0100}", "A text.", 1, 1)


ON_SMALL_DISKS = """
import logging, os, subprocess, sys
from pathlib import Path

logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
from test_metrics import add_keys, live

for size in sys.argv[2:]:
    if os.fork() == 0:
        folder = Path(sys.argv[1], size)
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=" + size, "none", folder], check=True)
        add_keys(folder, 2000)
        print("files:", [file.stat().st_size for file in folder.iterdir()])
        sys.exit()
    print("exit code:", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_a_full_disk_does_not_end_the_process(tmp_path):
    """A write to a mapped page without room on disk would raise SIGBUS."""
    isolated = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounts no file system of its own here")
    command = [*isolated, sys.executable, "-c", ON_SMALL_DISKS, str(tmp_path), "32k", "96k"]
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=os.environ | {"PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("files", "exit")) or "not published" in line]
    assert lines[1::3] == ["files: []", f"files: {[1 << 16]}"], done.stdout
    assert lines[2::3] == ["exit code: 0"] * 2
    assert [("they are" in line, "No space left on device" in line) for line in lines[::3]] == [(True, True)] * 2


@pytest.mark.parametrize("refused", [None, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_has_all_of_its_bytes_on_any_file_system(refused, monkeypatch, tmp_path):
    def refuse(*_: int) -> None:
        raise OSError(refused, os.strerror(refused))

    if refused is not None:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    file = live.ReservedFile(tmp_path / "summary_a.db")
    keys = [f"a{number}" * 20 for number in range(2000)]
    for number, key in enumerate(keys):
        file.write_value(key, number, 0)
        # No byte of the file is a hole.
        assert (tmp_path / "summary_a.db").stat().st_blocks * 512 >= file._capacity
    file.close()
    again = live.ReservedFile(tmp_path / "summary_a.db")
    assert [again.read_value(key)[0] for key in keys] == list(range(2000))
    assert len(list(MmapedDict.read_all_values_from_file(str(tmp_path / "summary_a.db")))) == 2000


def published(folder: Path) -> dict[str, float]:
    """Sums and counts in the files of a folder, by name."""
    found: dict[str, float] = {}
    for file in folder.glob("*.db"):
        for key, value, _, _ in MmapedDict.read_all_values_from_file(str(file)):
            name = json.loads(key)[1]
            found[name] = found.get(name, 0) + value
    return found


def test_a_forked_worker_writes_a_file_of_its_own(monkeypatch, tmp_path):
    """A program whose engine has published numbers may start another engine, whose workers are forked."""
    monkeypatch.setenv(live._OUR_FOLDER, str(tmp_path))
    live._add("first", "A text.", 1, 1)
    if (worker := os.fork()) == 0:
        for _ in range(3):
            live._add("of_worker", "A text.", 10, 1)
        os._exit(0)
    os.waitpid(worker, 0)
    live._add("second", "A text.", 100, 1)
    found = published(tmp_path)
    assert found == {
        "first_sum": 1, "first_count": 1, "of_worker_sum": 30, "of_worker_count": 3, "second_sum": 100,
        "second_count": 1,
    }  # fmt: skip


def test_no_sum_is_published_whose_count_has_no_room(warnings, monkeypatch, tmp_path):
    monkeypatch.setenv(live._OUR_FOLDER, str(tmp_path))
    live._add("series", "A text.", 1, 1)
    room = iter([True])

    def until_full(file: live.ReservedFile, key: str) -> None:
        if not next(room, False):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        MmapedDict._init_value(file, key)

    monkeypatch.setattr(live.ReservedFile, "_init_value", until_full)
    for _ in range(3):
        live._add("other", "A text.", 7, 2)
        live._add("series", "A text.", 1, 1)
    found = published(tmp_path)
    assert (found["series_sum"], found["series_count"]) == (4, 4)
    assert (found.get("other_sum", 0), found.get("other_count", 0)) == (0, 0)
    assert len(warnings) == 1
