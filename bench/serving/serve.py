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
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from httpx import HTTPError
from openai import OpenAI
from rich.console import Console

from bench.common import options
from bench.common.children import python_path, run_python
from bench.common.console import end_with, open_console, print_rows
from bench.common.engine import DECODE_GRAPHS, Variant, WrongBackendError, force_routing, parse_variants
from bench.common.metrics import metrics_text, read_metrics
from bench.common.models import Model, open_model
from bench.common.results import ResultFile, Row, read_run
from bench.common.worker import EXTENSION
from bench.serving.variants import variant_columns
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.provenance import describe_gpu, describe_run
from vllm_sparse_plugin.tools.server import ServerError, ServerSettings, run_server

RANDOM = "random"
SHARED_PREFIX = "shared_prefix"
WORKLOADS = [RANDOM, SHARED_PREFIX]
VARIANTS = ["flash_attn", "unique", "unique_prefill", "snapkv", "sinkrouter", "art", "zipvl_paper"]
LOADS = ["32K=1", "32K=8"]
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
_SHOWN = (
    "workload", "concurrency", "variant", "ttft_ms_median", "ttft_ms_p99", "tpot_ms_median", "tpot_ms_p99",
    "output_tokens_per_second", "running_most",
)  # fmt: skip
"""Columns that are printed."""
_LOG_LINES = 80
"""Lines of a log that a failure shows."""


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
    workloads: Sequence[str], texts: Sequence[str], output_tokens: int, waves: int, longest: int
) -> list[Load]:
    """Every workload with every `CONTEXT=REQUESTS`, `waves` requests per client. Prompts leave room for an answer.

    Raises:
        ConfigurationError: if a text is something else, or `longest`, the model's longest context, is shorter.
    """
    clients = []
    for text in dict.fromkeys(options.split_values(texts)):
        context, _, requests = text.partition("=")
        try:
            clients.append((options.parse_size(context), options.parse_size(requests)))
        except ValueError:
            raise ConfigurationError(f"load: got {text!r}, allowed: CONTEXT=REQUESTS, such as 32K=32") from None
        if not _SHORTEST <= clients[-1][0] <= longest:
            raise ConfigurationError(
                f"load: got a context of {clients[-1][0]} tokens, allowed: from {_SHORTEST} to the model's {longest}"
            )
    most = longest - output_tokens - _ADDED_TOKENS
    pairs = [(name, *each) for name in workloads for each in clients]
    return [
        Load(name, min(context, most), output_tokens, requests, max(4, waves * requests), seed)
        for seed, (name, context, requests) in enumerate(pairs, start=1)
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
    """Yield a list that gets samples of a server's metrics: repeatedly, and at last."""
    looks: list[dict[str, float]] = []
    over = threading.Event()

    def look() -> None:
        with suppress(HTTPError):  # the load reports the failure
            looks.append(read_metrics(metrics_text(client)))

    def look_again() -> None:
        while not over.wait(_SAMPLE_SECONDS):
            look()

    thread = threading.Thread(target=look_again, daemon=True)
    thread.start()
    try:
        yield looks
    finally:
        over.set()
        thread.join()
        look()


def serve(
    output: options.Output,
    variant: options.Variants = VARIANTS,
    model: options.ModelName = "llama-3.1-8b",
    workload: Annotated[list[str], typer.Option(help=f"{' or '.join(WORKLOADS)}, repeatable.")] = WORKLOADS,
    load: Annotated[
        list[str], typer.Option(help="CONTEXT=CONCURRENCY: clients with prompts of a context, repeatable.")
    ] = LOADS,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 128,
    waves: Annotated[int, typer.Option(min=1, help="Requests per unit of concurrency, at least 4 in all.")] = 2,
    cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the KV cache without statistics. Default: all memory.")
    ] = None,
    skip_ratio: Annotated[
        float, typer.Option(help="Share of the KV groups that `sinkrouter` skips, for any data.")
    ] = 0.5,
    additional_config: options.AdditionalConfig = None,
    server_argument: Annotated[
        list[str] | None, typer.Option(help="Further argument of `vllm serve`, repeatable.")
    ] = None,
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="Start servers without torch.compile, with decode graphs only.")
    ] = False,
    start_seconds: Annotated[float, typer.Option(min=1, help="Time limit of a server's start.")] = 300,
    time_limit: options.TimeLimit = 3600,
    commit: options.Commit = None,
) -> None:
    """Measure latency and throughput of a server for each variant; exit code 3 if a server fails."""
    end, console, failed = time.monotonic() + time_limit, open_console(), []
    variants, workloads = parse_variants(variant), options.parse_names("workload", workload, WORKLOADS)
    with open_model(model) as opened:
        loads = make_loads(workloads, load, output_tokens, waves, opened.longest)
        gpu, settings = bool(describe_gpu()), []
        for each in variants:
            # Drawn weights have no thresholds that calibration could recommend.
            forced = force_routing(opened, additional_config, skip_ratio) if each.backend == "SINKROUTER" else None
            more = [*(server_argument or ()), "--kv-cache-dtype", each.kv_cache_dtype]
            if gpu and no_compile:
                more += ["--compilation-config", json.dumps(DECODE_GRAPHS)]
            # `collective_rpc` needs the development mode.
            environment: dict[str, str | None] = {"PYTHONPATH": python_path(), "VLLM_SERVER_DEV_MODE": "1"}
            if cache_tokens is not None:
                # All variants get equal memory, which includes statistics. On a CPU a variable would have precedence.
                memory = cache_tokens * opened.kv_bytes_per_token(each.kv_cache_dtype)
                more += ["--kv-cache-memory-bytes", str(memory)]
                environment["VLLM_CPU_KVCACHE_SPACE"] = None
            server = ServerSettings(
                opened.folder,
                max(each.input_tokens for each in loads) + output_tokens + _ADDED_TOKENS,
                each.backend,
                each.additional_config(forced or additional_config),
                (*more, "--worker-extension-cls", EXTENSION, *(["--load-format", "dummy"] * opened.drawn_weights)),
                eager=not gpu,
                environment=environment,
                start_seconds=start_seconds,
                log_lines=_LOG_LINES,
            )
            settings.append(server)
        with ResultFile(output, describe_run(opened.folder, commit)) as file:
            for each, server in zip(variants, settings, strict=True):
                try:
                    for row in measure_loads(each, server, opened, loads, end, console):
                        file.write({**row, "cache_tokens": cache_tokens, "compiled": not no_compile})
                except (ServerError, WrongBackendError, ChildProcessError) as error:
                    failed.append(str(error))
    print_rows(read_run(output).rows, _SHOWN)
    end_with(failed)


def prepare_server(client: OpenAI, variant: Variant, model: Model) -> str:
    """Draws the weights of a model without a checkpoint, and returns the attention backend of a server's layers.

    Raises:
        WrongBackendError: if vLLM chose another attention backend.
    """
    url = str(client.base_url).removesuffix("/v1/")

    def call_workers(method: str) -> Any:
        reply: Any = client.post(f"{url}/collective_rpc", cast_to=object, body={"method": method})
        return reply["results"][0]

    backend = variant.check_backends(call_workers("attention_backends"))
    if model.drawn_weights:
        call_workers("draw_weights")
    return backend


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
                columns["running_most"] = int(
                    max((each.get("vllm:num_requests_running", 0) for each in looks), default=0)
                )
            named = ("workload", "input_tokens", "prefix_tokens", "output_tokens", "concurrency", "requests")
            yield {**about, **{name: getattr(load, name) for name in named}, **columns}


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
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:])
            raise ChildProcessError(
                f"vllm bench serve, exit code {code}: {error}; the end of its log:\n{tail}"
            ) from None
