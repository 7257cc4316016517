"""A vLLM server as a child process, for commands and tests that ask it something."""

from __future__ import annotations

import os
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

from openai import DefaultHttpxClient, OpenAI, OpenAIError
from rich.console import Console

from vllm_sparse_plugin.eval.endpoints import EndpointError

_ANSWER_SECONDS = 600


class ServerError(RuntimeError):
    """The server did not start or stopped answering; the message has the end of its log."""


@dataclass(frozen=True)
class ServerSettings:
    """How to start one server."""

    model: Path
    """Folder of the model; its last part is the served name."""
    max_model_len: int
    """Longest context in tokens."""
    backend: str | None
    """Attention backend; None for vLLM's own dense attention."""
    additional_config: str | None = None
    """JSON for `--additional-config`."""
    arguments: tuple[str, ...] = ("--max-num-batched-tokens", "4096")
    """Further arguments of `vllm serve`."""
    eager: bool = True
    """Start without CUDA graphs and compilation: sooner, and slower."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the server, beside those of this process."""
    start_seconds: float = 600
    """How long the server may take to become ready."""
    program: tuple[str, ...] = (sys.executable, "-m", "vllm_sparse_plugin")
    """Command line of `vllm-sparse`, of another installation perhaps."""
    folder: Path | None = None
    """Folder that the server runs in; None for that of this process."""
    log_lines: int = 20
    """How much of the log's end a failure shows."""


@contextmanager
def run_server(name: str, settings: ServerSettings, console: Console) -> Iterator[OpenAI]:
    """Run `vllm-sparse serve` and yield a client for it; stop it at the end.

    Raises:
        ServerError: if the server does not start or stops answering.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*settings.program, "serve", str(settings.model), "--served-model-name", settings.model.name]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    if settings.eager:
        command.append("--enforce-eager")
    command += ["--max-model-len", str(settings.max_model_len), *settings.arguments]
    if settings.backend is not None:
        command += ["--attention-backend", settings.backend]
    if settings.additional_config is not None:
        command += ["--additional-config", settings.additional_config]
    log = Path(tempfile.mkstemp(prefix=f"vllm-sparse-{name}-", suffix=".log")[1])
    client = OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1",
        api_key="none",
        max_retries=0,
        timeout=_ANSWER_SECONDS,
        http_client=DefaultHttpxClient(trust_env=False),  # a proxy of the environment must not see local requests
    )
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=settings.folder,
            env={"VLLM_CPU_KVCACHE_SPACE": "2", **os.environ, **settings.environment},
            start_new_session=True,
        )
    try:
        with console.status(f"Starting the {name} server, log in {log}"):
            _wait_until_healthy(client, process, f"http://127.0.0.1:{port}/health", settings.start_seconds)
        yield client
    except (OpenAIError, EndpointError, TimeoutError, ChildProcessError) as error:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-settings.log_lines :])
        message = f"the {name} server {_reason(error, process, settings)}; the end of its log {log}:\n{tail}"
        raise ServerError(message) from error
    finally:
        client.close()
        stop_group(process)
    log.unlink(missing_ok=True)


def _wait_until_healthy(client: OpenAI, process: subprocess.Popen[bytes], url: str, seconds: float) -> None:
    """Return when the server answers; raise ChildProcessError if it ends first, TimeoutError if it takes too long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ChildProcessError
        with suppress(OpenAIError):
            client.get(url, cast_to=object, options={"timeout": 5})
            return
        time.sleep(0.5)
    raise TimeoutError


def _reason(error: Exception, process: subprocess.Popen[bytes], settings: ServerSettings) -> str:
    if process.poll() is not None:
        return f"ended with exit code {process.returncode}"
    if isinstance(error, TimeoutError):
        return f"was not ready after {settings.start_seconds:g} seconds"
    if isinstance(error, ChildProcessError):
        return f"was asked by a command that failed ({error})"
    if isinstance(error, EndpointError):
        return str(error)
    return f"did not answer a question ({' '.join(str(error).split())})"


def unwind_on_termination() -> None:
    """Let a termination signal end this process like any exit, so that no server outlives the command."""

    def unwind(*_: object) -> None:
        # A second signal must not cut the clean-up short.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, unwind)


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a group of its own, and whatever it started."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
