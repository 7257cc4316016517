"""Installs the project for a machine without a GPU into `.venv` beside this file and runs its commands there.

    python3 run.py needles [arguments]   accuracy of sparse attention beside dense attention, on a real server
                                         (a short test; all of it with --all)
    python3 run.py real [arguments]      the same for a real model, which is fetched first
    python3 run.py test [arguments]      the tests; arguments go to pytest
    python3 run.py exec COMMAND ...      any command of the environment, such as `exec vllm-sparse show-config`
    python3 run.py setup                 only install
    python3 run.py lock [arguments]      resolve requirements/{cpu,gpu}.lock anew; arguments go to `uv pip compile`

Needs Python 3.11 or 3.12 and nothing else. Installs the versions of requirements/cpu.lock, and again only when that
file or pyproject.toml changed. Exit code 1 if the installation fails, 2 for bad usage, 130 after Ctrl-C, 143 after
SIGTERM; the same command goes on with an installation that was stopped.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
STAMP = VENV / "installed"
REQUIREMENTS = ROOT / "requirements"
LOCK = REQUIREMENTS / "cpu.lock"
GPU_LOCK = REQUIREMENTS / "gpu.lock"
EXTRAS = ("cpu", "dev", "bench", "docs", "eval", "real", "train")
TORCH = "2.13.0"


def _step(what: str, *commands: list[str]) -> None:
    """Run the first of `commands` that works; if none does, show what they said and exit."""
    print(f"run.py: {what}", file=sys.stderr)
    outputs = []
    for command in commands:
        returned, output = _run(command)
        if returned == 0:
            return
        outputs.append(f"$ {' '.join(command)}\n{output}")
    print("\n".join(outputs), file=sys.stderr)
    sys.exit(f"run.py: {what}: failed, see above")


def _run(command: list[str]) -> tuple[int, str]:
    """Run a command; return its exit code and its output. It and what it started end with this process."""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, output


def _install() -> None:
    """Make the environment match pyproject.toml and the lock file."""
    inputs = [sys.version.encode(), (ROOT / "pyproject.toml").read_bytes(), LOCK.read_bytes()]
    wanted = hashlib.sha256(b"\0".join(inputs)).hexdigest()
    if STAMP.exists() and STAMP.read_text(encoding="utf-8") == wanted:
        return
    python, uv = str(BIN / "python"), str(BIN / "uv")
    into = ["--python", python]
    print(f"run.py: making {VENV}", file=sys.stderr)
    # Only an environment that this script finished is emptied, never somebody's own.
    try:
        venv.create(VENV, with_pip=True, clear=STAMP.exists())
    except subprocess.CalledProcessError:
        sys.exit("run.py: Python: got one without pip, allowed: one with ensurepip, in Debian the package python3-venv")
    _step("installing uv", [python, "-m", "pip", "install", "uv"])
    # The CPU build has the local version +cpu. pip finds it where it is configured to; uv knows where it is published.
    _step(
        f"installing the CPU build of torch {TORCH}",
        [python, "-m", "pip", "install", "--no-deps", f"torch=={TORCH}+cpu"],
        [uv, "pip", "install", *into, "--torch-backend", "cpu", f"torch=={TORCH}"],
    )
    # The lock is a whole resolution. Nothing is resolved again: packages also ask for what the overrides leave out.
    _step(
        "installing vLLM's CPU build and the tools of the tests",
        # Compiled now, on every core; otherwise the first server compiles what it imports, on one.
        [
            *(uv, "pip", "install", *into, "--compile-bytecode"),
            *("--no-deps", "--require-hashes", "-r", str(LOCK)),
        ],
    )
    _step("installing the project", [uv, "pip", "install", *into, "--no-deps", "-e", "."])
    STAMP.write_text(wanted, encoding="utf-8")


def _lock(arguments: list[str]) -> int:
    """Resolve both lock files anew and return the exit code: that of a CPU for every Python that the project supports,
    that of an NVIDIA GPU for Python 3.12 on Linux, x86-64."""
    read = "import importlib.metadata; print(*importlib.metadata.requires('torch'), sep='\\n')"
    torch = subprocess.run([str(BIN / "python"), "-c", read], stdout=subprocess.PIPE, text=True, check=True).stdout
    compile_ = [str(BIN / "uv"), "pip", "compile", "--generate-hashes", "--no-annotate", "--quiet", *arguments]
    compile_ += ["--custom-compile-command", "python3 run.py lock"]
    gpu = [*compile_, "--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_28", "-o", str(GPU_LOCK)]
    command = [*compile_, "--universal", "--python-version", "3.11", "-o", str(LOCK)]
    for extra in EXTRAS:
        command += ["--extra", extra]
        gpu += ["--extra", extra] if extra != "cpu" else []
    for overrides in ("cpu-overrides.txt", "lock-overrides.txt"):
        command += ["--override", str(REQUIREMENTS / overrides)]
    done = subprocess.run([*command, "pyproject.toml", "-"], cwd=ROOT, input=torch, text=True, check=False)
    return done.returncode or subprocess.run([*gpu, "pyproject.toml"], cwd=ROOT, check=False).returncode


def main(arguments: list[str]) -> int:
    """Become one command; return 2 for bad usage, and 0 if there was only something to install."""
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        print(f"run.py: Python: got {sys.version.split()[0]}, allowed: 3.11 or 3.12", file=sys.stderr)
        return 2
    commands = {
        "needles": [str(BIN / "vllm-sparse"), "needles"],
        "real": [str(BIN / "vllm-sparse"), "real"],
        "test": [str(BIN / "python"), "-m", "pytest"],
        "exec": [],
        "setup": [],
        "lock": [],
    }
    name, *rest = arguments or [""]
    if name not in commands:
        print(f"run.py: command: got {name!r}, allowed: {', '.join(commands)}", file=sys.stderr)
        return 2
    if name == "exec" and not rest:
        print("run.py: exec: got no command, allowed: a command of the environment and its arguments", file=sys.stderr)
        return 2
    try:
        _install()
    except OSError as error:
        print(
            f"run.py: {error.filename or VENV}: got {error.strerror!r}, allowed: a place to write to", file=sys.stderr
        )
        return 1
    if name == "lock":
        return _lock(rest)
    if name != "setup":
        _become([*commands[name], *rest])
    return 0


def _become(command: list[str]) -> NoReturn:
    """Let a command of the environment take this process over, so that Ctrl-C and signals reach it and nobody else."""
    program = shutil.which(command[0], path=f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    if program is None:
        print(f"run.py: exec: got {command[0]!r}, allowed: a command of the environment", file=sys.stderr)
        sys.exit(2)
    # Without Python's bytecode files, which containers often switch off, every import compiles all of vLLM again.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # By its whole path: Python finds the environment that it belongs to by the name that it was called by.
    os.execve(program, [program, *command[1:]], environment)


def _end(number: int, _frame: object) -> NoReturn:
    """Let SIGTERM end this process like an exception, so that no installer outlives it."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("run.py: stopped by Ctrl-C; the same command goes on", file=sys.stderr)
        sys.exit(130)
