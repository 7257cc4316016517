"""Prefill and decoding of one request on a CPU, and the number of cores that the server uses.

    VLLM_CPU_OMP_THREADS_BIND=0-1 python -m bench.serving prefill-cpu --backend dense,unique --output threads.jsonl

Each prompt is new to the server, so its first token measures prefill. The time of further tokens measures decoding.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from typing import Annotated

import typer
from openai import OpenAI

from bench.common.console import open_console
from bench.common.engine import DENSE
from bench.common.models import NEEDLE_8M
from bench.common.options import Commit, Output, parse_names, parse_sizes
from bench.common.results import ResultFile
from vllm_sparse_plugin.names import BACKENDS as OURS
from vllm_sparse_plugin.tools.provenance import describe_run
from vllm_sparse_plugin.tools.server import ServerSettings, run_server

BACKENDS = (DENSE, "unique")
_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_NEW_TOKENS = 64


def measure(client: OpenAI, prompt: list[int]) -> dict[str, float]:
    """Return seconds of prefill and of a decoded token, and the busy cores in each."""

    def generate(tokens: int) -> tuple[float, float]:
        cpu, begin = _cpu_seconds(), time.perf_counter()
        client.completions.create(
            model=NEEDLE_8M.name, prompt=prompt, temperature=0, max_tokens=tokens, extra_body={"ignore_eos": True}
        )
        return time.perf_counter() - begin, _cpu_seconds() - cpu

    prefill, prefill_cpu = generate(1)
    # From here on the prompt is in the prefix cache.
    first, first_cpu = generate(1)
    decode, decode_cpu = generate(1 + _NEW_TOKENS)
    return {
        "prefill_seconds": round(prefill, 3),
        "prefill_cores": round(prefill_cpu / prefill, 2),
        "decode_seconds_per_token": round((decode - first) / _NEW_TOKENS, 5),
        "decode_cores": round((decode_cpu - first_cpu) / (decode - first), 2),
    }


def _cpu_seconds() -> float:
    """CPU time that the children of this process have used so far."""
    # psutil comes with vLLM.
    import psutil  # type: ignore[import-untyped]

    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return float(sum(spent.user + spent.system for spent in times))


def prefill_cpu(
    output: Output,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Attention backend of the plugin, or dense; repeatable. Default: dense,unique."),
    ] = None,
    context: Annotated[list[str] | None, typer.Option(help="Tokens of a prompt, repeatable. Default: 4090.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each server and context.")] = 3,
    commit: Commit = None,
) -> None:
    """Measure prefill, decoding and busy cores; print a line for each server and write one for each prompt."""
    names = parse_names("backend", backend or BACKENDS, (DENSE, *(name.lower() for name in OURS)))
    contexts = parse_sizes("context", context or ["4090"])
    console = open_console()
    with ResultFile(output, describe_run(NEEDLE_8M, commit) | {_BIND: os.environ.get(_BIND, "auto")}) as file:
        for name in names:
            # Leaves room for an answer, as in the needle test.
            settings = ServerSettings(NEEDLE_8M, max(8192, max(contexts) + 128), None if name == DENSE else name)
            with run_server(name, settings, console) as client:
                for size in contexts:
                    # The prompts of another context must not begin with these.
                    rng = random.Random(size)
                    rows = []
                    for _ in range(repeats):
                        rows.append(measure(client, [0, *(rng.randrange(3, 4000) for _ in range(size - 1))]))
                        file.write({"backend": name, "context_tokens": size, **rows[-1]})
                    medians = (f"{key} {statistics.median(row[key] for row in rows):.5g}" for key in rows[0])
                    console.print(f"{name}, {size} tokens: {', '.join(medians)}", markup=False)
