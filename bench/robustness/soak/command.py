"""Asks a server for a long time, and compares every answer with the answer to the same request alone.

python -m bench.robustness soak --clients 4 --minutes 60 --context 4K --output soak.jsonl

With compaction, use `--may-part`: a preempted request attends to its own output densely when it resumes, so its answer
may change. Only blocks and failures are then checked.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console

from bench.common.console import open_console
from bench.common.continuations import LOGPROB_TOLERANCE, Continuation, gap_at_first_difference, logprob_error
from bench.common.engine import DENSE, Variant
from bench.common.metrics import wait_until_quiet
from bench.common.models import NEEDLE_8M, load_tokenizer
from bench.common.options import Commit, Output, parse_sizes
from bench.common.results import ResultFile, Row
from bench.robustness.soak.clients import Asker, Tally, run_client
from vllm_sparse_plugin.tools.provenance import describe_gpu, describe_run
from vllm_sparse_plugin.tools.server import ServerError, ServerSettings, run_server

_ROW_SECONDS = 60.0


def soak(
    output: Output,
    clients: Annotated[int, typer.Option(min=1, help="Concurrent clients.")] = 4,
    minutes: Annotated[float, typer.Option(min=0.1, help="Duration of the load.")] = 60,
    requests: Annotated[int | None, typer.Option(min=1, help="Stop earlier, after this number of requests.")] = None,
    may_part: Annotated[bool, typer.Option("--may-part", help="Answers may differ from those asked alone.")] = False,
    copies: Annotated[int, typer.Option(min=1, max=16, help="Most answers to a request (`n`).")] = 1,
    context: Annotated[str, typer.Option(help="Tokens of a prompt, such as 4K.")] = "4K",
    prompts: Annotated[int, typer.Option(min=2, help="Different prompts; several share a document.")] = 8,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 64,
    variant: Annotated[str, typer.Option(help="BACKEND or BACKEND:KV_CACHE_DTYPE.")] = "unique",
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = NEEDLE_8M,
    additional_config: Annotated[str | None, typer.Option(help="Passed to the server.", metavar="JSON")] = None,
    server_argument: Annotated[
        list[str] | None, typer.Option(help="Further argument of `vllm serve`, repeatable.")
    ] = None,
    start_seconds: Annotated[float, typer.Option(min=1, help="Time limit of the server's start.")] = 600,
    commit: Commit = None,
) -> None:
    """Send requests alone, then together; exit code 3 for a changed answer, a lost block or a request that failed."""
    from vllm_sparse_plugin.tools.needles import build_questions

    (tokens,) = parse_sizes("context", [context])
    chosen, dense = Variant.parse(variant), Variant.parse(DENSE)
    tokenizer = load_tokenizer(model)
    texts = [question.prompt for question in build_questions(tokenizer, "kv", tokens, prompts, seed=1)]
    console = open_console()

    def settings(of: Variant) -> ServerSettings:
        arguments = ("--kv-cache-dtype", of.kv_cache_dtype, *(server_argument or ()))
        return ServerSettings(
            model, tokens + answer_tokens, of.backend, of.additional_config(additional_config), arguments,
            eager=not describe_gpu(), start_seconds=start_seconds,
        )  # fmt: skip

    try:
        with ResultFile(output, describe_run(model, commit)) as file:
            with run_server(DENSE, settings(dense), console) as client:
                drift = measure_drift(Asker(client, model.name, answer_tokens), texts, clients)
            allowed = math.inf if may_part else max(drift, LOGPROB_TOLERANCE)
            with run_server(chosen.name.replace(":", "-"), settings(chosen), console) as client:
                asker = Asker(client, model.name, answer_tokens)
                alone = {text: asker.ask(text) for text in texts}
                gap = None if may_part else allowed
                file.write({"state": "alone", "prompts": len(alone), "dense_drift": drift, "allowed_gap": gap})
                faults = ask_for_long(
                    asker, alone, Limits(allowed, clients, minutes * 60, requests, copies), console, file.write
                )
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(3) from None
    for fault in faults:
        console.print(fault, markup=False)
    if faults:
        raise typer.Exit(3)


def measure_drift(asker: Asker, texts: Sequence[str], clients: int) -> float:
    """Returns the effect of rounding on a server: the largest change of a log probability between a cold and a warm
    prefix cache, or by how much likelier a token was than its replacement with `clients` requests at once."""
    cold = [asker.ask(text) for text in texts]
    warm = [asker.ask(text) for text in texts]
    drifts = [logprob_error(first, second) for first, second in zip(cold, warm, strict=True)]
    with ThreadPoolExecutor(clients) as pool:
        numbers = [client % len(texts) for client in range(clients)]
        together = pool.map(lambda number: asker.ask(texts[number]), numbers)
        gaps = [gap_at_first_difference(warm[number], found) for number, found in zip(numbers, together, strict=True)]
    return max(drifts + [gap for gap in gaps if gap is not None and math.isfinite(gap)])


class Limits(NamedTuple):
    """Limits of a run."""

    allowed: float
    """Largest allowed difference in nats between the two tokens at a first difference."""
    clients: int
    seconds: float
    requests: int | None
    """Number of requests; None for no limit except time."""
    copies: int = 1
    """The most answers to a request."""


def ask_for_long(
    asker: Asker,
    alone: Mapping[str, Continuation],
    limits: Limits,
    console: Console,
    write: Callable[[Row], None],
) -> list[str]:
    """Runs the clients, writes a row per minute, and returns the faults."""
    start, tally = time.monotonic(), Tally(most=limits.requests)
    end = start + limits.seconds
    threads = [
        threading.Thread(
            target=run_client, args=(asker, alone, limits.allowed, end, seed, tally, limits.copies), daemon=True
        )
        for seed in range(limits.clients)
    ]

    def report(state: str) -> Row:
        metrics = asker.metrics()
        row = {
            "state": state,
            "seconds": round(time.monotonic() - start, 1),
            "clients": limits.clients,
            "copies": limits.copies,
            **tally.as_row(),
            "preemptions": metrics["vllm:num_preemptions_total"],
            "prefix_hits": metrics["vllm:prefix_cache_hits_total"],
            "requests_running": metrics["vllm:num_requests_running"],
            "kv_cache_usage": metrics["vllm:kv_cache_usage_perc"],
        }
        write(row)
        console.print({name: value for name, value in row.items() if name != "faults"})
        return row

    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(_ROW_SECONDS)
            if thread.is_alive():
                report("asking")
    wait_until_quiet(asker.metrics)
    last = report("end")
    faults = list(last["faults"])
    if last["requests_running"] or last["kv_cache_usage"]:
        faults.append(f"blocks are in use without requests: {last['kv_cache_usage']:.2%} of them")
    if not last["answers"] or not last["hung_up"]:
        faults.append("too little was asked to say anything")
    return faults
