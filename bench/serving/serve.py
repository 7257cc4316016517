"""A server under load: `vllm serve` with each variant, driven by `vllm bench serve`.

    python -m bench.serving serve --variant flash_attn --variant unique --output serve.jsonl

    python -m bench.serving serve --variant flash_attn,unique_prefill --workload random --load 32K=32,128K=4 \
        --output serve.jsonl

Prefill is dense in `flash_attn` and `unique`. Differences are the time per output token, and the time to first token if
other requests decode in the same step.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from openai import OpenAI
from rich.console import Console
from rich.table import Table

from bench.common.children import run_python
from bench.common.console import open_console
from bench.common.engine import Variant, WrongBackendError, parse_variants
from bench.common.metrics import metrics_text
from bench.common.models import Model, open_model
from bench.common.options import ClientRow, Commit, Output, TimeLimit, parse_loads, parse_names
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
from bench.serving.watch import watch
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.provenance import describe_run
from vllm_sparse_plugin.tools.server import ServerError, ServerSettings, run_server

RANDOM = "random"
SHARED_PREFIX = "shared_prefix"
WORKLOADS = (RANDOM, SHARED_PREFIX)
_METRICS = ("ttft", "tpot", "itl")
_PERCENTILES = (90, 99)
_SUFFIX_SHARE = 32
"""The unshared part of a `shared_prefix` request is 1 / this of its input."""
LOADS = ("32K=1", "32K=8", "32K=32")
_SHORTEST = 64
"""Tokens of the shortest prompt."""
_ADDED_TOKENS = 16
"""Tokens that a tokenizer may add to a prompt of `vllm bench serve`. vLLM counts them."""


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


Apply = Callable[[Load, OpenAI, Model, float], Row]
"""Applies a load to a client's server until a time of `time.monotonic`, and returns the measured columns. Raises
ChildProcessError on failure."""


def parse_result(result: dict[str, Any], load: Load) -> dict[str, Any]:
    """Columns of a row from the result file of `vllm bench serve` for a load; latencies in milliseconds.

    Raises:
        ValueError: if the result lacks a column, or an answer is missing or incomplete.
    """
    columns: dict[str, Any] = {}
    try:
        for metric in _METRICS:
            for kind in ("mean", "median", *(f"p{percentile}" for percentile in _PERCENTILES)):
                columns[f"{metric}_ms_{kind}"] = round(float(result[f"{kind}_{metric}_ms"]), 3)
        columns |= {
            "completed": int(result["completed"]),
            "failed": int(result["failed"]),
            "seconds": round(float(result["duration"]), 3),
            "input_tokens_total": int(result["total_input_tokens"]),
            "output_tokens_total": int(result["total_output_tokens"]),
            "requests_per_second": round(float(result["request_throughput"]), 4),
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


def serve(
    output: Output,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="BACKEND or BACKEND:KV_CACHE_DTYPE, repeatable. Default: flash_attn and unique."),
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
    waves: Annotated[int, typer.Option(min=1, help="Requests per unit of concurrency, at least 4 in all.")] = 1,
    additional_config: AdditionalConfig = None,
    server_argument: ServerArgument = None,
    start_seconds: StartSeconds = 300,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Measure latency and throughput of a server for each variant; exit code 3 if a server fails."""
    end = time.monotonic() + time_limit
    variants = parse_variants(variant or ("flash_attn", "unique"))
    workloads = parse_names("workload", workload or WORKLOADS, WORKLOADS)
    clients = parse_loads(load or LOADS)
    console = open_console()
    failed = []
    with open_model(model) as opened:
        fitting = [
            ClientRow(context=fit(each.context, opened, output_tokens), requests=each.requests) for each in clients
        ]
        loads = make_loads(workloads, fitting, output_tokens, waves)
        max_model_len = check_length(opened, max(each.input_tokens for each in loads), output_tokens)
        settings = [
            server_settings(opened, each, max_model_len, additional_config, server_argument, start_seconds)
            for each in variants
        ]
        with ResultFile(output, describe_run(opened.folder, commit)) as file:
            for each, server in zip(variants, settings, strict=True):
                if not measure_loads(each, server, opened, loads, end, console, file.write):
                    failed.append(each.name)
    console.print(table(read_run(output).rows))
    if failed:
        raise typer.Exit(3)


def check_length(model: Model, input_tokens: int, output_tokens: int) -> int:
    """The longest context that a server needs for these prompts and answers.

    Raises:
        ConfigurationError: if the model does not support it.
    """
    longest = longest_prompt(model, output_tokens)
    if input_tokens > longest:
        raise ConfigurationError(
            f"input_tokens: got {input_tokens}, allowed with {output_tokens} output tokens: at most {longest}"
        )
    return input_tokens + output_tokens + _ADDED_TOKENS


def longest_prompt(model: Model, output_tokens: int) -> int:
    """The tokens of the longest prompt that leaves room for an answer."""
    return int(model.config["max_position_embeddings"]) - output_tokens - _ADDED_TOKENS


def fit(context: int, model: Model, output_tokens: int) -> int:
    """The number of prompt tokens for a context. The prompt leaves room for its answer at the model's limit.

    Raises:
        ConfigurationError: if the model does not support the context.
    """
    limit = int(model.config["max_position_embeddings"])
    if not _SHORTEST <= context <= limit:
        raise ConfigurationError(
            f"load: got a context of {context} tokens, allowed: from {_SHORTEST} to the model's {limit}"
        )
    return min(context, longest_prompt(model, output_tokens))


def make_loads(workloads: Sequence[str], clients: Sequence[ClientRow], output_tokens: int, waves: int) -> list[Load]:
    """Every workload with every number of clients.

    Args:
        workloads: of `WORKLOADS`.
        clients: numbers of clients, and the tokens of their prompts.
        output_tokens: of an answer.
        waves: requests per client.
    """
    pairs = [(name, each) for name in workloads for each in clients]
    return [
        Load(name, each.context, output_tokens, each.requests, max(4, waves * each.requests), seed)
        for seed, (name, each) in enumerate(pairs, start=1)
    ]


def measure_loads(
    variant: Variant,
    settings: ServerSettings,
    model: Model,
    loads: list[Load],
    end: float,
    console: Console,
    write: Callable[[Row], None],
    apply: Apply | None = None,
) -> bool:
    """Start a server, apply every load, stop it. On failure, print the reason to standard error and return False.

    `apply` measures a load; None for `vllm bench serve`.
    """
    settings = replace(settings, start_seconds=max(min(settings.start_seconds, end - time.monotonic()), 1))
    try:
        with run_server(variant.name.replace(":", "-"), settings, console) as client:
            backend = prepare_server(client, variant, model)
            rng = random.Random(0)
            prompt = rng.choices(range(3, model.vocabulary), k=loads[0].input_tokens)
            client.completions.create(model=model.folder.name, prompt=prompt, max_tokens=8)
            for load in loads:
                with console.status(f"{variant.name}: {load.workload}, concurrency {load.concurrency}"):
                    columns = (apply or _apply)(load, client, model, end)
                write(
                    {
                        **variant_columns(variant, backend, settings.additional_config, model),
                        "workload": load.workload,
                        "input_tokens": load.input_tokens,
                        "prefix_tokens": load.prefix_tokens,
                        "output_tokens": load.output_tokens,
                        "concurrency": load.concurrency,
                        "requests": load.requests,
                        **columns,
                    }
                )
    except (ServerError, WrongBackendError) as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    return True


def _apply(load: Load, client: OpenAI, model: Model, end: float) -> Row:
    """Run `vllm bench serve` and return its measurements; raise ChildProcessError if it fails."""
    with watch(lambda: metrics_text(client)) as watched:
        columns = _run_bench(load, str(client.base_url).removesuffix("/v1/"), model, end)
    return columns | watched.columns()


def _run_bench(load: Load, url: str, model: Model, end: float) -> Row:
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


def table(rows: list[dict[str, Any]]) -> Table:
    """Return one line for each load and variant."""
    lines = Table("workload", "concurrency", "variant", title="Serving: milliseconds and tokens per second")
    for heading in ("TTFT median", "TTFT p99", "TPOT median", "TPOT p99", "ITL p99", "output tokens/s", "at once"):
        lines.add_column(heading, justify="right")
    keys = ("ttft_ms_median", "ttft_ms_p99", "tpot_ms_median", "tpot_ms_p99", "itl_ms_p99", "output_tokens_per_second")
    for row in sorted(rows, key=lambda row: (row["workload"], row["concurrency"])):
        cells = (f"{row[key]:.2f}" if key in row else "-" for key in keys)
        lines.add_row(row["workload"], str(row["concurrency"]), row["variant"], *cells, str(row["running_most"]))
    return lines
