"""A vLLM server as a child process, for commands and tests."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import DefaultHttpxClient, OpenAI, OpenAIError
from rich.console import Console

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.cores import bind_to_every_core
from vllm_sparse_plugin.tools.endings import FailureError
from vllm_sparse_plugin.tools.eval.endpoints import EndpointError
from vllm_sparse_plugin.tools.eval.progress import show_progress

_ANSWER_SECONDS = 600
_STOP_SECONDS = 10
_CAUSE = re.compile(r"(?<![\w.])((?:[\w.]*(?:Error|Exception)|error): \S.*)")
"""The part of a log line that names an error, without vLLM's prefix."""
_MINOR = re.compile(r"\b(?:DEBUG|INFO|WARNING)\b")
"""Marks a log line that cannot explain why a server ended."""
_AFTERMATH = re.compile(
    r"Engine core initialization failed|[Rr]oot cause|WorkerProc initialization failed|EngineDeadError"
)
"""Marks an error caused by an earlier one."""


class ServerError(FailureError):
    """The server did not start or stopped answering; the message has the end of its log."""


@dataclass(frozen=True)
class ServerSettings:
    """How to start a server."""

    model: Path
    """Folder of the model. Its last part is the served name."""
    max_model_len: int
    """Longest context in tokens."""
    backend: str | None
    """Attention backend; None for vLLM's own dense attention."""
    additional_config: str | None = None
    """JSON for `--additional-config`."""
    arguments: tuple[str, ...] = ("--max-num-batched-tokens", "4096")
    """Further arguments of `vllm serve`."""
    eager: bool = True
    """Start without CUDA graphs and compilation: the start is faster, serving is slower."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables for the server, added to those of this process; None removes one."""
    start_seconds: float = 600
    """Time limit for the start."""
    program: tuple[str, ...] = (sys.executable, "-m", "vllm_sparse_plugin")
    """Command line of `vllm-sparse`, possibly of another installation."""
    log_lines: int = 20
    """Log lines that a failure shows; 0 for one sentence with the last error of the log."""
    every_core: bool = False
    """Whether a CPU build of vLLM gets every core, unless the user has chosen cores."""


class LaunchedServer:
    """A server that `launch_server` has started, ready or not."""

    def __init__(self, name: str, settings: ServerSettings) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.name, self.settings = name, settings
        self._is_stopped = False
        self.log = _make_log(name)
        self.client = OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key=os.environ.get("VLLM_API_KEY") or "none",  # the server of this environment asks for it
            max_retries=0,
            timeout=_ANSWER_SECONDS,
            http_client=DefaultHttpxClient(trust_env=False),  # the environment's proxy must not see local requests
        )
        self._health = f"http://127.0.0.1:{port}/health"
        cores = bind_to_every_core() if settings.every_core else {}
        variables = {"VLLM_CPU_KVCACHE_SPACE": "2", **cores, **os.environ, **settings.environment}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                _command(settings, port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in variables.items() if value is not None},
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Return when the server answers.

        Raises:
            ServerError: the server ends or exceeds the time limit.
        """
        end = time.monotonic() + self.settings.start_seconds
        with self.explain_failures():
            while time.monotonic() < end and self.process.poll() is None:
                with suppress(OpenAIError):
                    self.client.get(self._health, cast_to=object, options={"timeout": 5})
                    return
                time.sleep(0.5)
            raise EndpointError(f"was not ready after {self.settings.start_seconds:g} seconds")

    @contextmanager
    def explain_failures(self) -> Iterator[None]:
        """Turn errors while the server is asked into a ServerError with the end or the cause of its log."""
        try:
            yield
        except (OpenAIError, EndpointError) as error:
            reason = f"did not answer a question ({' '.join(str(error).split())})"
            if isinstance(error, EndpointError):
                reason = str(error)
            if self.process.poll() is not None:
                reason = f"ended with exit code {self.process.returncode}"
            text = self.log.read_text(encoding="utf-8", errors="replace")
            if self.settings.log_lines:
                tail = "\n".join(text.splitlines()[-self.settings.log_lines :])
                ending = f"; the end of its log {self.log}:\n{tail}"
            else:
                cause = last_error(text)
                ending = f"{f' ({cause})' if cause else ''}; its log is {self.log}"
            raise ServerError(f"the {self.name} server {reason}{ending}") from error

    def stop(self) -> None:
        """End the server and its child processes. Repeated calls have no effect."""
        if not self._is_stopped:
            self.client.close()
            stop_group(self.process)
        self._is_stopped = True


@contextmanager
def launch_server(name: str, settings: ServerSettings) -> Iterator[LaunchedServer]:
    """Start `vllm-sparse serve` without waiting for it. Stop it at the end. Keep its log after a failure."""
    server = LaunchedServer(name, settings)
    try:
        yield server
    finally:
        server.stop()
    server.log.unlink(missing_ok=True)


@contextmanager
def run_server(name: str, settings: ServerSettings, console: Console) -> Iterator[OpenAI]:
    """Run `vllm-sparse serve` and yield a client for it; stop it at the end.

    Raises:
        ServerError: the server does not start or stops answering.
    """
    with launch_server(name, settings) as server:
        with show_progress(console, f"Starting the {name} server, 1 to 4 min, log in {server.log}"):
            server.wait_until_ready()
        with server.explain_failures():
            yield server.client


def last_error(log: str) -> str | None:
    """Return the last error in a log; None without one.

    An error caused by another one, such as that of a process that waited for the failed one, counts only if the log has
    no other.
    """
    lines = [line for line in log.splitlines() if not _MINOR.search(line)]
    errors = [found[1].strip() for line in lines if (found := _CAUSE.search(line))]
    causes = [error for error in errors if not _AFTERMATH.search(error)]
    return (causes or errors or [None])[-1]


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """End a process group: its leader and all its child processes.

    Args:
        process: leader of the group. It has some seconds for a normal end.
    """
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def group_of(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command as the leader of a process group, which ends with the block. Options are those of `Popen`."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)
    try:
        yield process
    finally:
        stop_group(process)


def _make_log(name: str) -> Path:
    try:
        descriptor, path = tempfile.mkstemp(prefix=f"vllm-sparse-{name}-", suffix=".log")
    except OSError as error:
        raise ConfigurationError(
            f"TMPDIR: got no folder for a server's log ({error.strerror}), allowed: one that can be written"
        ) from None
    os.close(descriptor)
    return Path(path)


def _command(settings: ServerSettings, port: int) -> list[str]:
    command = [*settings.program, "serve", str(settings.model), "--served-model-name", settings.model.name]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    command += ["--max-model-len", str(settings.max_model_len), *settings.arguments]
    for option, value in (
        ("--attention-backend", settings.backend), ("--additional-config", settings.additional_config)
    ):  # fmt: skip
        command += [] if value is None else [option, value]
    return [*command, "--enforce-eager"] if settings.eager else command
