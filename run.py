"""Installs the project for a machine without a GPU into `.venv` beside this file, and runs its commands there.

    python3 run.py needles [arguments]   compares sparse with dense attention on a real server
                                         (a short test; --all runs every task)
    python3 run.py real [arguments]      the same on a real model, which is downloaded first
    python3 run.py test [arguments]      runs the quick tests, with --all all tests; arguments go to pytest
    python3 run.py exec COMMAND ...      runs a command of the environment, such as `exec vllm-sparse show-config`
    python3 run.py setup                 only installs
    python3 run.py lock [arguments]      resolves requirements/{cpu,gpu}.lock again; arguments go to `uv pip compile`

Needs only Python 3.11 or 3.12. The first command installs the versions in requirements/cpu.lock: 2 to 10 minutes, 4 GB.
Installs again when that file or pyproject.toml changes. Exit codes: 1 if the installation fails, 2 for bad usage, 130
after Ctrl-C, 143 after SIGTERM. The same command continues an interrupted installation.
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
IMPORTED = ("numba", "numpy", "openai", "scipy", "sympy", "torch", "transformers", "vllm")
"""Large packages of which servers import much, but neither tests nor most models. All packages together have three
times as much to compile."""


def _step(what: str, *commands: list[str]) -> None:
    """Run the first of `commands` that works. If all fail, print their output and exit."""
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
    """Run a command. Return its exit code and output. Its processes end with this process."""
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
    if VENV.is_symlink():
        # Clearing it would clear the environment of another checkout.
        sys.exit(f"run.py: .venv: got a link to {VENV.resolve()}, allowed: a folder, or nothing")
    python, uv = str(BIN / "python"), str(BIN / "uv")
    into = ["--python", python]
    print(f"run.py: making {VENV}: 2 to 10 minutes, 4 GB", file=sys.stderr)
    # Only an environment that this script completed is cleared, never an environment of the user.
    try:
        venv.create(VENV, with_pip=True, clear=STAMP.exists())
    except subprocess.CalledProcessError:
        sys.exit("run.py: Python: got one without pip, allowed: one with ensurepip, in Debian the package python3-venv")
    _step("installing uv", [python, "-m", "pip", "install", "uv"])
    # The CPU build has the local version +cpu. pip finds it in the configured index; uv knows where it is published.
    _step(
        f"installing the CPU build of torch {TORCH}",
        [python, "-m", "pip", "install", "--no-compile", "--no-deps", f"torch=={TORCH}+cpu"],
        [uv, "pip", "install", *into, "--torch-backend", "cpu", f"torch=={TORCH}"],
    )
    # The lock is a complete resolution. Resolving again would add packages that the overrides leave out.
    _step(
        "installing vLLM's CPU build and the tools of the tests",
        [uv, "pip", "install", *into, "--no-deps", "--require-hashes", "-r", str(LOCK)],
    )
    _step("installing the project", [uv, "pip", "install", *into, "--no-deps", "-e", "."])
    print("run.py: compiling what servers import", file=sys.stderr)
    # Compile now, on every core. Otherwise the first server compiles its imports on one core. The exit code says
    # nothing: some packages have files that no Python compiles.
    folders = [str(folder) for name in IMPORTED for folder in VENV.glob(f"lib/python3*/site-packages/{name}")]
    _run([python, "-m", "compileall", "-q", "-j", "0", "-x", "/(models|tests)/", *folders])
    STAMP.write_text(wanted, encoding="utf-8")


def _lock(arguments: list[str]) -> int:
    """Resolve both lock files again and return the exit code. The CPU lock covers every Python that the project
    supports. The GPU lock covers Python 3.12 on Linux, x86-64, with an NVIDIA GPU."""
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
    """Replace this process by a command. Return 2 for bad usage, and 0 after help or an installation."""
    if arguments[:1] in (["--help"], ["-h"], ["help"]):
        print(__doc__)
        return 0
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
        print(f"run.py: {error.filename or VENV}: got {error.strerror!r}, allowed: a writable place", file=sys.stderr)
        return 1
    if name == "lock":
        return _lock(rest)
    if name != "setup":
        _become([*commands[name], *rest])
    return 0


def _become(command: list[str]) -> NoReturn:
    """Replace this process by a command of the environment, so that Ctrl-C and signals reach only that command."""
    program = shutil.which(command[0], path=f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    if program is None:
        print(f"run.py: exec: got {command[0]!r}, allowed: a command of the environment", file=sys.stderr)
        sys.exit(2)
    # Containers often disable Python's bytecode files. Every import would then compile all of vLLM again.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # Use the whole path: Python finds its environment by the path it is called with.
    os.execve(program, [program, *command[1:]], environment)


def _end(number: int, _frame: object) -> NoReturn:
    """Let SIGTERM end this process like an exception, which also ends the installer."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("run.py: stopped by Ctrl-C; the same command continues", file=sys.stderr)
        sys.exit(130)
