"""A server under load: `vllm serve` with each variant, driven by `vllm bench serve`.

    python -m bench.serving serve --variant flash_attn,unique --output serve.jsonl
    python -m bench.serving serve --variant dense,snapkv,h2o --workload random --load 16K=32,16K=256 \
        --output-tokens 2048 --cache-tokens 134000 --output capacity.jsonl

Servers have vLLM's defaults; `--no-compile` saves the minute of torch.compile. With `--cache-tokens` all variants get a
KV cache of equal memory, which shows how many requests fit.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from httpx import HTTPError
from openai import OpenAI
from rich.console import Console
from rich.table import Table

from bench.common.children import run_python
from bench.common.console import open_console
from bench.common.engine import Variant, WrongBackendError, force_routing, parse_variants
from bench.common.metrics import metrics_text, read_metrics
from bench.common.models import Model, open_model
from bench.common.options import ClientRow, Commit, Output, TimeLimit, parse_loads, parse_names
from bench.common.repeated import repeated
from bench.common.results import ResultFile, Row, read_run
from bench.common.servers import (
    LOG_LINES,
    AdditionalConfig,
    ServedModel,
    ServerArgument,
    StartSeconds,
    prepare_server,
    server_settings,
)
from bench.serving.variants import variant_columns
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.provenance import describe_run
from vllm_sparse_plugin.tools.server import ServerError, ServerSettings, run_server

RANDOM = "random"
SHARED_PREFIX = "shared_prefix"
WORKLOADS = (RANDOM, SHARED_PREFIX)
VARIANTS = ("flash_attn", "unique", "unique_prefill", "snapkv", "sinkrouter", "art", "zipvl_paper")
LOADS = ("32K=1", "32K=8")
_METRICS = ("ttft", "tpot", "itl")
_PERCENTILES = (90, 99)
_SUFFIX_SHARE = 32
"""The unshared part of a `shared_prefix` request is 1 / this of its input."""
_SHORTEST = 64
"""Tokens of the shortest prompt."""
_ADDED_TOKENS = 16
"""Tokens that a tokenizer may add to a prompt of `vllm bench serve`. vLLM counts them."""
_SAMPLE_SECONDS = 0.5
"""Interval between samples of a server's metrics."""


@dataclass(frozen=True)
class Load:
    """The requests of one run of `vllm bench serve`."""

    workload: str
    """One of `WORKLOADS`."""
    input_tokens: int
    output_tokens: int
    concurrency: int
    requests: int
    seed: int
    """Differs between the loads of a server, so that no prompt is in the prefix cache."""

    @property
    def prefix_tokens(self) -> int:
        """Leading tokens that all requests share."""
        return self.input_tokens - self.input_tokens // _SUFFIX_SHARE if self.workload == SHARED_PREFIX else 0

    def arguments(self) -> list[str]:
        """The arguments of `vllm bench serve` that describe the load."""
        arguments = ["--num-prompts", str(self.requests), "--max-concurrency", str(self.concurrency)]
        arguments += ["--seed", str(self.seed), "--temperature", "0", "--ignore-eos"]
        if self.workload == RANDOM:
            lengths = ["--random-input-len", str(self.input_tokens), "--random-output-len", str(self.output_tokens)]
            return [*arguments, "--dataset-name", "random", *lengths]
        lengths = ["--prefix-repetition-prefix-len", str(self.prefix_tokens)]
        lengths += ["--prefix-repetition-suffix-len", str(self.input_tokens - self.prefix_tokens)]
        lengths += ["--prefix-repetition-output-len", str(self.output_tokens), "--prefix-repetition-num-prefixes", "1"]
        # The warm-up sends the first request, which fills the prefix cache.
        return [*arguments, "--dataset-name", "prefix_repetition", *lengths, "--num-warmups", "1"]


def make_loads(
    workloads: Sequence[str], clients: Sequence[ClientRow], output_tokens: int, waves: int, model: Model
) -> list[Load]:
    """Every workload with every number of clients, `waves` requests per client. Prompts leave room for an answer.

    Raises:
        ConfigurationError: if the model does not support a context.
    """
    limit = int(model.config["max_position_embeddings"])
    for each in clients:
        if not _SHORTEST <= each.context <= limit:
            raise ConfigurationError(
                f"load: got a context of {each.context} tokens, allowed: from {_SHORTEST} to the model's {limit}"
            )
    longest = limit - output_tokens - _ADDED_TOKENS
    pairs = [(name, each) for name in workloads for each in clients]
    return [
        Load(name, min(each.context, longest), output_tokens, each.requests, max(4, waves * each.requests), seed)
        for seed, (name, each) in enumerate(pairs, start=1)
    ]


def parse_result(result: dict[str, Any], load: Load) -> Row:
    """Columns of a row from the result file of `vllm bench serve` for a load; latencies in milliseconds.

    Raises:
        ValueError: if the result lacks a column, or an answer is missing or incomplete.
    """
    columns: Row = {}
    try:
        for metric in _METRICS:
            for kind in ("mean", "median", *(f"p{percentile}" for percentile in _PERCENTILES)):
                columns[f"{metric}_ms_{kind}"] = round(float(result[f"{kind}_{metric}_ms"]), 3)
        columns |= {
            "completed": int(result["completed"]),
            "seconds": round(float(result["duration"]), 3),
            "output_tokens_total": int(result["total_output_tokens"]),
            "output_tokens_per_second": round(float(result["output_throughput"]), 2),
            "total_tokens_per_second": round(float(result["total_token_throughput"]), 2),
        }
    except KeyError as error:
        raise ValueError(f"the result lacks {error}") from None
    # A stream that ends with an error counts as completed there.
    if columns["completed"] != load.requests:
        raise ValueError(f"{columns['completed']} of {load.requests} requests completed")
    if columns["output_tokens_total"] != load.requests * load.output_tokens:
        raise ValueError(
            f"the answers have {columns['output_tokens_total']} tokens, not {load.requests * load.output_tokens}"
        )
    return columns


@contextmanager
def watch(client: OpenAI) -> Iterator[list[dict[str, float]]]:
    """Yield a list that gets samples of a server's metrics: at first, at last, and repeatedly in between."""
    looks: list[dict[str, float]] = []

    def look() -> bool:
        try:
            looks.append(read_metrics(metrics_text(client)))
        except HTTPError:
            return False  # the load reports the failure
        return True

    look()
    with repeated(look, _SAMPLE_SECONDS):
        yield looks
    look()


def watched_columns(looks: Sequence[dict[str, float]]) -> Row:
    """The columns of samples of a server's metrics."""

    def seen(name: str) -> list[float]:
        return [metrics.get(f"vllm:{name}", 0.0) for metrics in looks]

    preempted = seen("num_preemptions_total")
    return {
        "running_most": int(max(seen("num_requests_running"), default=0)),
        "kv_cache_usage_most": round(max(seen("kv_cache_usage_perc"), default=0), 4),
        "preemptions": int(preempted[-1] - preempted[0]) if preempted else 0,
    }


def serve(
    output: Output,
    variant: Annotated[
        list[str] | None,
        typer.Option(help=f"BACKEND or BACKEND:KV_CACHE_DTYPE, repeatable. Default: {', '.join(VARIANTS)}."),
    ] = None,
    model: ServedModel = "llama-3.1-8b",
    workload: Annotated[
        list[str] | None, typer.Option(help=f"{' or '.join(WORKLOADS)}, repeatable. Default: both.")
    ] = None,
    load: Annotated[
        list[str] | None,
        typer.Option(
            help=f"CONTEXT=CONCURRENCY: clients with prompts of a context, repeatable. Default: {', '.join(LOADS)}."
        ),
    ] = None,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 128,
    waves: Annotated[int, typer.Option(min=1, help="Requests per unit of concurrency, at least 4 in all.")] = 2,
    cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the KV cache without statistics. Default: all memory.")
    ] = None,
    skip_ratio: Annotated[
        float, typer.Option(help="Share of the KV groups that `sinkrouter` skips, for any data.")
    ] = 0.5,
    additional_config: AdditionalConfig = None,
    server_argument: ServerArgument = None,
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="Start servers without torch.compile, with decode graphs only.")
    ] = False,
    start_seconds: StartSeconds = 300,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Measure latency and throughput of a server for each variant; exit code 3 if a server fails."""
    end, console, failed = time.monotonic() + time_limit, open_console(), []
    variants = parse_variants(variant or VARIANTS)
    workloads = parse_names("workload", workload or WORKLOADS, WORKLOADS)
    with open_model(model) as opened:
        loads = make_loads(workloads, parse_loads(load or LOADS), output_tokens, waves, opened)
        longest = max(each.input_tokens for each in loads) + output_tokens + _ADDED_TOKENS
        settings = []
        for each in variants:
            # Drawn weights have no thresholds that calibration could recommend.
            forced = force_routing(opened, additional_config, skip_ratio) if each.backend == "SINKROUTER" else None
            config = forced or additional_config
            server = server_settings(opened, each, longest, config, server_argument, start_seconds, not no_compile)
            settings.append(_limit_cache(server, cache_tokens, opened, each))
        with ResultFile(output, describe_run(opened.folder, commit)) as file:
            for each, server in zip(variants, settings, strict=True):
                try:
                    for row in measure_loads(each, server, opened, loads, end, console):
                        file.write({**row, "cache_tokens": cache_tokens, "compiled": not no_compile})
                except (ServerError, WrongBackendError, ChildProcessError) as error:
                    print(f"error: {error}", file=sys.stderr)
                    failed.append(each.name)
    console.print(table(read_run(output).rows))
    if failed:
        raise typer.Exit(3)


def _limit_cache(server: ServerSettings, tokens: int | None, model: Model, variant: Variant) -> ServerSettings:
    """Settings with a KV cache of this many tokens. All variants get equal memory, which includes statistics."""
    if tokens is None:
        return server
    memory = tokens * model.kv_bytes_per_token(variant.kv_cache_dtype)
    return replace(
        server,
        arguments=(*server.arguments, "--kv-cache-memory-bytes", str(memory)),
        # On a CPU this variable would have precedence.
        environment={**server.environment, "VLLM_CPU_KVCACHE_SPACE": None},
    )


def measure_loads(
    variant: Variant, settings: ServerSettings, model: Model, loads: list[Load], end: float, console: Console
) -> Iterator[Row]:
    """Start a server, apply every load, stop it; yield a row for each load.

    Raises:
        ServerError: if the server does not start.
        WrongBackendError: if vLLM chose another attention backend.
        ChildProcessError: if a load fails.
    """
    settings = replace(settings, start_seconds=max(min(settings.start_seconds, end - time.monotonic()), 1))
    with run_server(variant.name.replace(":", "-"), settings, console) as client:
        about = variant_columns(variant, prepare_server(client, variant, model), settings.additional_config, model)
        prompt = random.Random(0).choices(range(3, model.vocabulary), k=loads[0].input_tokens)
        client.completions.create(model=model.folder.name, prompt=prompt, max_tokens=8)
        for load in loads:
            with console.status(f"{variant.name}: {load.workload}, concurrency {load.concurrency}"):
                with watch(client) as looks:
                    columns = _run_bench(load, str(client.base_url).removesuffix("/v1/"), model, end)
                columns |= watched_columns(looks)
            yield {
                **about,
                "workload": load.workload,
                "input_tokens": load.input_tokens,
                "prefix_tokens": load.prefix_tokens,
                "output_tokens": load.output_tokens,
                "concurrency": load.concurrency,
                "requests": load.requests,
                **columns,
            }


def _run_bench(load: Load, url: str, model: Model, end: float) -> Row:
    """Run `vllm bench serve` and return its measurements; raise ChildProcessError if it fails."""
    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:
        log, result = Path(folder) / "log", Path(folder) / "result.json"
        arguments = ["bench", "serve", "--base-url", url, "--model", model.folder.name]
        arguments += ["--tokenizer", str(model.folder), *load.arguments(), "--disable-tqdm"]
        arguments += ["--percentile-metrics", ",".join(_METRICS)]
        arguments += ["--metric-percentiles", ",".join(str(percentile) for percentile in _PERCENTILES)]
        arguments += ["--save-result", "--result-dir", folder, "--result-filename", result.name]
        code = run_python("vllm_sparse_plugin", arguments, end - time.monotonic(), log)
        if code is None:
            raise ChildProcessError("vllm bench serve was not done by the deadline")
        try:
            return parse_result(json.loads(result.read_text(encoding="utf-8")), load)
        except (OSError, ValueError) as error:
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
            raise ChildProcessError(
                f"vllm bench serve, exit code {code}: {error}; the end of its log:\n{tail}"
            ) from None


def table(rows: list[Row]) -> Table:
    """Return one line for each load and variant."""
    lines = Table("workload", "concurrency", "variant", title="Serving: milliseconds and tokens per second")
    for heading in ("TTFT median", "TTFT p99", "TPOT median", "TPOT p99", "ITL p99", "output tokens/s", "at once"):
        lines.add_column(heading, justify="right")
    keys = ("ttft_ms_median", "ttft_ms_p99", "tpot_ms_median", "tpot_ms_p99", "itl_ms_p99", "output_tokens_per_second")
    for row in sorted(rows, key=lambda row: (row["workload"], row["concurrency"])):
        cells = (f"{row[key]:.2f}" for key in keys)
        lines.add_row(row["workload"], str(row["concurrency"]), row["variant"], *cells, str(row["running_most"]))
    return lines
