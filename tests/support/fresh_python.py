"""Python programs, each in a fork of a process that has imported the packages which they need.

vLLM spends nearly all of its import in torch, transformers and other packages. The forks need not import them again.
The forked process has imported neither vLLM nor the plugin.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_NEEDED_BY_VLLM = ("openai", "scipy.stats", "torch._inductor", "transformers")


class Forks:
    """A process that runs programs in forks of itself."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, code: str, *arguments: str, **environment: str) -> list[str]:
        """Run a program with arguments and environment variables; returns the lines that it prints.

        Raises:
            AssertionError: if the program fails; the message has its output.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([code, arguments, environment]) + "\n")
        self._process.stdin.flush()
        status, output, errors = json.loads(self._process.stdout.readline())
        assert status == 0, output + errors
        return output.splitlines()


@contextmanager
def start_forks(imported: Sequence[str] = _NEEDED_BY_VLLM) -> Iterator[Forks]:
    """Start the process that is forked, which imports these modules; it ends with the context."""
    command = [sys.executable, "-P", __file__, *imported]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd="/"
    ) as process:
        yield Forks(process)
        process.stdin.close()


# The following code runs in the process that is forked.


def _run_in_fork(code: str, arguments: list[str], environment: dict[str, str]) -> list[int | str]:
    """Run a program in a fork; returns its exit code and what it wrote to stdout and stderr."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        child = os.fork()
        if child == 0:
            for number, file in enumerate(files, start=1):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
            os.environ.update(environment)
            sys.argv = ["-c", *arguments]
            status = 0
            try:
                exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        return [status, *(file.read_text(encoding="utf-8") for file in files)]


if __name__ == "__main__":
    for module in sys.argv[1:]:
        importlib.import_module(module)
    ours = [name for name in sys.modules if name.partition(".")[0] in ("vllm", "vllm_sparse_plugin", "numba")]
    assert ours == [], f"already imported: {ours}"
    for line in sys.stdin:
        print(json.dumps(_run_in_fork(*json.loads(line))), flush=True)
