"""Number of requests that fit a cache at once, and the throughput: dense attention and backends with compaction.

    python -m bench.serving capacity --output capacity.jsonl
    python -m bench.serving capacity --output try.jsonl --model needle-8m --input-tokens 1500 --output-tokens 64 \
        --concurrency 8 --cache-tokens 4096 --lead 10 --window 20

A run of all requests takes long if few fit the cache. With `--window` the clients ask without end. The server is
measured from the end of the lead to the end of the window. The first answers begin together; the lead spreads them. A
window should be several answers long.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from bench.common.console import open_console
from bench.common.engine import parse_variants
from bench.common.models import open_model
from bench.common.options import LARGEST, ClientRow, Commit, Output, TimeLimit, parse_size, parse_sizes, split_values
from bench.common.results import ResultFile, Row, read_run
from bench.common.servers import AdditionalConfig, ServedModel, ServerArgument, StartSeconds, server_settings
from bench.serving.serve import RANDOM, check_length, make_loads, measure_loads, table
from bench.serving.window import Window, measure_window
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.provenance import describe_run

VARIANTS = ("dense", "snapkv", "pyramidkv", "h2o", "streaming_llm")
_CACHES = (str(134 * 1000), LARGEST)
"""R-KV's setting, and the largest cache of the GPU."""


def parse_cache(text: str) -> int | None:
    """The tokens of a cache; None for the largest cache.

    Raises:
        ConfigurationError: for anything else.
    """
    try:
        return None if text == LARGEST else parse_size(text)
    except ValueError:
        raise ConfigurationError(f"cache_tokens: got {text!r}, allowed: a positive integer or {LARGEST}") from None


def capacity(
    output: Output,
    variant: Annotated[
        list[str] | None,
        typer.Option(help=f"BACKEND or BACKEND:KV_CACHE_DTYPE, repeatable. Default: {', '.join(VARIANTS)}."),
    ] = None,
    model: ServedModel = "llama-3.1-8b",
    cache_tokens: Annotated[
        list[str] | None, typer.Option(help=f"Tokens of the KV cache, repeatable. Default: {' and '.join(_CACHES)}.")
    ] = None,
    concurrency: Annotated[list[str] | None, typer.Option(help="Clients, repeatable. Default: 32 and 256.")] = None,
    input_tokens: Annotated[int, typer.Option(min=64, help="Tokens of a prompt.")] = 16384,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 2048,
    waves: Annotated[int, typer.Option(min=1, help="Without a window: requests per client, at least 4 in all.")] = 1,
    window: Annotated[
        float | None, typer.Option(min=1, help="Measure this many seconds of a busy server instead of whole runs.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="With a window: each client asks its first prompt again and again.")
    ] = False,
    lead: Annotated[float, typer.Option(min=0, help="Seconds of load before the window.")] = 30,
    additional_config: AdditionalConfig = None,
    server_argument: ServerArgument = None,
    start_seconds: StartSeconds = 300,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Measure users and throughput of every variant with every cache; exit code 3 if a server fails."""
    end, console, failed = time.monotonic() + time_limit, open_console(), []
    if again and window is None:
        raise ConfigurationError("again: got true without a window, allowed: --window SECONDS")
    variants = parse_variants(variant or VARIANTS)
    caches = [parse_cache(text) for text in split_values(cache_tokens or _CACHES)]
    apply = None if window is None else partial(measure_window, Window(lead, window, again))
    clients = parse_sizes("concurrency", concurrency or ["32,256"])
    asked = [ClientRow(context=input_tokens, requests=each) for each in clients]
    loads = make_loads([RANDOM], asked, output_tokens, waves)
    with open_model(model) as opened:
        longest = check_length(opened, input_tokens, output_tokens)
        settings = [
            server_settings(opened, each, longest, additional_config, server_argument, start_seconds)
            for each in variants
        ]
        with ResultFile(output, describe_run(opened.folder, commit)) as file:
            for tokens in caches:
                for each, server in zip(variants, settings, strict=True):

                    def write(row: Row, tokens: int | None = tokens) -> None:
                        file.write(row | {"cache_tokens": tokens})

                    most_clients = ("--max-num-seqs", str(max(clients)))
                    arguments, environment = (*server.arguments, *most_clients), dict(server.environment)
                    if tokens is not None:
                        # All get equal memory, which includes statistics and tables.
                        memory = tokens * opened.kv_bytes_per_token(each.kv_cache_dtype)
                        arguments += ("--kv-cache-memory-bytes", str(memory))
                        # On a CPU this variable would have precedence.
                        environment["VLLM_CPU_KVCACHE_SPACE"] = None
                    limited = replace(server, arguments=arguments, environment=environment)
                    if not measure_loads(each, limited, opened, loads, end, console, write, apply):
                        failed.append(each.name)
    rows = read_run(output).rows
    for tokens in caches:
        size = "all the memory there is" if tokens is None else f"{tokens:,} tokens of cache"
        of_cache = table([row for row in rows if row["cache_tokens"] == tokens])
        of_cache.title = f"Milliseconds and tokens per second, {size}"
        console.print(of_cache)
    if failed:
        raise typer.Exit(3)
