"""Prefill and decoding of one request on a CPU, and how many cores the server keeps busy meanwhile.

    VLLM_CPU_OMP_THREADS_BIND=0-1 python -m bench.serving.prefill_cpu --backend dense --backend unique \\
        --output threads.jsonl

Each prompt is new to the server, so its first token is prefill. Decoding is the time of further tokens after that one.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from openai import OpenAI
from rich.console import Console

from vllm_sparse_plugin.cli.provenance import describe_run
from vllm_sparse_plugin.cli.server import ServerSettings, run_server, unwind_on_termination

MODEL = Path(__file__).parents[2] / "models" / "needle-8m"
_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_NEW_TOKENS = 64


def measure(client: OpenAI, prompt: list[int]) -> dict[str, float]:
    """Return seconds of prefill and of a decoded token, and the cores that were busy in either."""

    def generate(tokens: int) -> tuple[float, float]:
        cpu, begin = _cpu_seconds(), time.perf_counter()
        client.completions.create(
            model=MODEL.name, prompt=prompt, temperature=0, max_tokens=tokens, extra_body={"ignore_eos": True}
        )
        return time.perf_counter() - begin, _cpu_seconds() - cpu

    prefill, prefill_cpu = generate(1)
    # From here on the prompt comes from the prefix cache.
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


def main(
    output: Annotated[Path, typer.Option(help="JSON lines to write.")],
    backend: Annotated[list[str], typer.Option(help="Attention backend of ours, or dense; repeatable.")],
    context: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 4090,
    repeats: Annotated[int, typer.Option(help="Prompts of each server.")] = 3,
) -> None:
    """Measure, print a line for each server, and write one line for the run and one for each prompt."""
    lines: list[dict[str, Any]] = [describe_run(MODEL) | {_BIND: os.environ.get(_BIND, "auto")}]
    console = Console()
    unwind_on_termination()
    for name in backend:
        # The same length as in the needle test, which adds an answer.
        settings = ServerSettings(MODEL, 8192, None if name == "dense" else name)
        with run_server(name, settings, console) as client:
            rng = random.Random(0)
            rows = [measure(client, [0, *(rng.randrange(3, 4000) for _ in range(context - 1))]) for _ in range(repeats)]
        lines += [{"backend": name, "context_tokens": context, **row} for row in rows]
        medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        console.print(name, medians)
    output.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
