"""`run.py`, the installation script, when it is interrupted or cannot write."""

import importlib.util
import os
import runpy
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(tmp_path) -> Path:
    """A copy, whose environment is a folder of the test."""
    shutil.copy(ROOT / "run.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "cpu.lock").touch()
    return tmp_path / "run.py"


def load(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_script", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "run.py: stopped by Ctrl-C; the same command continues"),
        (
            OSError(28, "No space left on device", "/x"),
            1,
            "run.py: /x: got 'No space left on device', allowed: a writable place",
        ),
        (
            subprocess.CalledProcessError(1, "ensurepip"),
            1,
            "run.py: Python: got one without pip, allowed: one with ensu",
        ),
    ],
)
def test_a_setup_that_is_stopped_ends_in_one_sentence(script, monkeypatch, capsys, error, code, said):
    def create(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(venv, "create", create)
    monkeypatch.setattr(sys, "argv", [str(script), "setup"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        signal.signal(signal.SIGTERM, before)
    lines = capsys.readouterr().err.splitlines()
    if isinstance(ended.value.code, str):  # the interpreter prints it, and ends with 1
        lines.append(ended.value.code)
        ended.value.code = 1
    assert ended.value.code == code
    assert lines[0].startswith("run.py: making ")
    assert lines[1].startswith(said)
    assert len(lines) == 2


def test_a_setup_compiles_what_servers_import_at_last(script, tmp_path, monkeypatch):
    packages = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages"
    for name in ("torch", "vllm", "mkdocs"):
        (packages / name / "tests").mkdir(parents=True)
        for module in (packages / name / "all.py", packages / name / "tests" / "some.py"):
            module.touch()
    (packages / "torch" / "other.py").write_text("print 'of another Python'")
    monkeypatch.setattr(venv, "create", lambda *_, **__: None)
    module, run, installs = load(script), subprocess.run, []

    def run_here(command: list[str]) -> tuple[int, str]:
        if "compileall" not in command:
            installs.append(command)
            return 0, ""
        return run([sys.executable, *command[1:]], capture_output=True, timeout=60).returncode, ""

    monkeypatch.setattr(module, "_run", run_here)
    module._install()
    assert len(installs) == 4
    assert sorted(file.name.partition(".")[0] for file in packages.rglob("*.pyc")) == ["all", "all"]
    assert {file.parents[1].name for file in packages.rglob("*.pyc")} == {"torch", "vllm"}
    assert (tmp_path / ".venv" / "installed").exists()


def test_a_linked_environment_is_not_cleared(script, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "installed").write_text("of another checkout")
    (tmp_path / ".venv").symlink_to(tmp_path / "other")
    ended = subprocess.run([sys.executable, script, "setup"], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"run.py: .venv: got a link to {tmp_path / 'other'}, allowed: a folder, or nothing\n"
    assert (tmp_path / "other" / "installed").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_installer_ends_with_the_script(script, tmp_path, number):
    child = tmp_path / "installer.py"
    child.write_text(
        "import os, pathlib, signal, subprocess, sys\n"
        "build = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "pathlib.Path(sys.argv[1]).write_text(f'{os.getpid()} {build.pid}')\n"
        "os.kill(os.getppid(), int(sys.argv[2]))\n"
        "signal.pause()\n"
    )
    module = load(script)
    before = [signal.signal(signal.SIGTERM, module._end), signal.signal(signal.SIGINT, signal.default_int_handler)]
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            module._run([sys.executable, str(child), str(tmp_path / "pids"), str(int(number))])
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    for pid in (tmp_path / "pids").read_text().split():
        while is_running(pid):
            os.sched_yield()


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("option", ["--help", "-h", "help"])
def test_help_is_printed_and_installs_nothing(script, capsys, option):
    assert load(script).main([option]) == 0
    assert "python3 run.py needles" in capsys.readouterr().out
    assert not (script.parent / ".venv").exists()
