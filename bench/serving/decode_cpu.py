"""Decode time per token of dense and sparse attention in vLLM on a CPU, and the time of each operation of a layer.

    python -m bench.serving decode-cpu --output decode.jsonl

A prompt is computed once. Then 1 token and 1 + n tokens are generated from the prefix cache, and the difference is
divided by n. Medians over repeats; one server after the other in one run.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from openai import OpenAI
from rich.table import Table
from sparse_kernels.batch import QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.page_score import score_pages
from sparse_kernels.page_statistics import StatisticsLayout, update_page_statistics
from sparse_kernels.page_topk import select_pages
from sparse_kernels.sparse_attention import attend_pages

from bench.common.console import open_console
from bench.common.models import NEEDLE_8M
from bench.common.options import Commit, Output, parse_sizes
from bench.common.results import ResultFile
from vllm_sparse_plugin.tools.provenance import describe_run
from vllm_sparse_plugin.tools.server import ServerSettings, run_server

BACKENDS: dict[str, str | None] = {"dense": None, "unique": "unique"}
NEW_TOKENS = 64


def decode_seconds(client: OpenAI, prompt: list[int], repeats: int) -> list[float]:
    """Seconds per token of decoding without prefill, one value per repeat."""

    def generate(tokens: int) -> float:
        begin = time.perf_counter()
        client.completions.create(
            model=NEEDLE_8M.name, prompt=prompt, temperature=0, max_tokens=tokens, extra_body={"ignore_eos": True}
        )
        return time.perf_counter() - begin

    generate(1 + NEW_TOKENS)
    return [(generate(1 + NEW_TOKENS) - generate(1)) / NEW_TOKENS for _ in range(repeats)]


def operation_seconds(context: int, repeats: int = 200) -> dict[str, float]:
    """Median seconds of each operation of one sparse layer of needle-8m: 8 query heads, 2 KV heads of size 64."""
    block_size, page_size, heads, group, head_size = 128, 8, 2, 4, 64
    blocks = -(-context // block_size) + 1
    layout = StatisticsLayout(page_size, head_size, "int8")
    rows = torch.randn(blocks, heads, block_size, 2 * head_size).bfloat16()
    cache = torch.zeros(blocks, heads, layout.rows(block_size), 2 * head_size, dtype=torch.bfloat16)
    views = layout.views(cache, block_size)
    kv = KVCache.from_rows(rows, page_size, views)
    keys = kv.keys
    pages = torch.arange(blocks * block_size // page_size)
    update_page_statistics(keys, views, pages // keys.pages_per_block, pages % keys.pages_per_block)
    query = torch.randn(1, heads, group, head_size).bfloat16()
    table, lens = torch.randperm(blocks)[None], torch.tensor([context])
    count = lens // page_size
    scores = score_pages(query, views, table, count, 1.0)
    chosen = select_pages(scores, count, 64, 1, 1)
    operations: dict[str, Callable[[], Any]] = {
        "score": lambda: score_pages(query, views, table, count, 1.0),
        "top-k": lambda: select_pages(scores, count, 64, 1, 1),
        "attend": lambda: attend_pages(QueryTokens(query, table, lens), kv, chosen, Softmax(head_size**-0.5)),
        "update statistics of a page": lambda: update_page_statistics(keys, views, pages[:1], pages[:1]),
    }
    medians = {}
    for name, operation in operations.items():
        operation()
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            operation()
            times.append(time.perf_counter() - begin)
        medians[name] = statistics.median(times)
    return medians


def decode_cpu(
    output: Output,
    context: Annotated[
        list[str] | None, typer.Option(help="Contexts in tokens, repeatable. Default: 2048,4096,8192,16384,30000.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each measurement.")] = 5,
    commit: Commit = None,
) -> None:
    """Measure and print the table; write one line for the run and one for each measurement."""
    contexts = parse_sizes("context", context or ["2048,4096,8192,16384,30000"])
    console = open_console()
    medians: dict[tuple[str, int], float] = {}
    with ResultFile(output, describe_run(NEEDLE_8M, commit)) as file:
        for name, backend in BACKENDS.items():
            settings = ServerSettings(NEEDLE_8M, 32_000, backend)
            with run_server(name, settings, console) as client:
                for size in contexts:
                    rng = random.Random(size)
                    prompt = [0, *(rng.randrange(3, 4000) for _ in range(size - NEW_TOKENS - 2))]
                    seconds = decode_seconds(client, prompt, repeats)
                    medians[name, size] = statistics.median(seconds)
                    file.write({"backend": name, "context_tokens": size, "seconds_per_token": seconds})
        operations = {size: operation_seconds(size) for size in contexts}
        for size, by_operation in operations.items():
            file.write({"context_tokens": size, "operation_seconds": by_operation})
    table = Table("context", *(f"{name}, ms per token" for name in BACKENDS), "dense / unique")
    for size in contexts:
        dense, sparse = medians["dense", size], medians["unique", size]
        table.add_row(str(size), f"{dense * 1e3:.2f}", f"{sparse * 1e3:.2f}", f"{dense / sparse:.2f}")
    console.print(table)
    table = Table("operation of one layer", *(f"{size} tokens, us" for size in contexts))
    for name in operations[contexts[0]]:
        table.add_row(name, *(f"{operations[size][name] * 1e6:.0f}" for size in contexts))
    console.print(table)
