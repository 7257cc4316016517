"""Asks for needles of the whole length of contexts, of a model whose right answers are known at any length.

    python -m bench.quality lookup --context 1024K --requests 2 --variant unique_offload --output lookup.jsonl

The model has constructed weights (`bench.common.lookup`). Each request has a document of its own. One question for
each depth is asked about all documents at the same time; later questions find the documents in the prefix cache. The
first token of an answer comes from the prompt, the others from decode steps. One engine for each variant.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict
from rich.table import Table

from bench.common.children import run_python
from bench.common.console import end_with, open_console
from bench.common.engine import DECODE_GRAPHS, Variant, engine, exits_for_wrong_backend, parse_variants
from bench.common.host_reads import host_reads, host_share
from bench.common.lookup import Document, Shape, draw_document, save_lookup
from bench.common.models import Model, open_model
from bench.common.options import Commit, Output, Seed, TimeLimit, parse_sizes
from bench.common.results import ResultFile, Row, read_run
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import parse_additional_config
from vllm_sparse_plugin.tools.provenance import describe_run

if TYPE_CHECKING:
    from vllm import LLM


class Job(BaseModel):
    """The input of a process with an engine."""

    model_config = ConfigDict(frozen=True)

    model: str
    """Folder of the model."""
    variant: str
    additional_config: str | None
    engine_args: dict[str, Any]
    context: int
    requests: int
    needles: int
    answer_tokens: int
    seed: int
    output: str
    """JSON lines file to append to."""

    def documents(self) -> list[Document]:
        """The documents of the requests. With a question and its answer they fill the context."""
        length = self.context - 1 - self.answer_tokens
        first = self.seed * self.requests
        return [
            draw_document(length, self.needles, self.answer_tokens, first + request) for request in range(self.requests)
        ]


def lookup(
    output: Output,
    variant: Annotated[list[str] | None, typer.Option(help="BACKEND, repeatable. Default: unique.")] = None,
    context: Annotated[str, typer.Option(help="Tokens of each request, its answer included.")] = "32K",
    requests: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 2,
    needles: Annotated[int, typer.Option(min=2, help="Depths from the start to the end of a document.")] = 8,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 8,
    layers: Annotated[int, typer.Option(min=2, help="Layers of the model.")] = 4,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of each layer.")] = 8,
    group: Annotated[int, typer.Option(min=1, help="Query heads of each KV head.")] = 1,
    head_size: Annotated[int, typer.Option(help="64 or 128.")] = 128,
    additional_config: Annotated[str | None, typer.Option(help="For the plugin's backends.", metavar="JSON")] = None,
    engine_args: Annotated[str, typer.Option(metavar="JSON", help="Arguments of vllm.LLM.")] = "{}",
    seed: Seed = 0,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Ask a lookup model for needles of whole contexts; exit code 3 if an answer is wrong or an engine fails."""
    end = time.monotonic() + time_limit
    arguments = parse_additional_config(engine_args, "engine_args")
    sizes = parse_sizes("context", [context])
    if len(sizes) != 1:
        raise ConfigurationError(f"context: got {context!r}, allowed: one size")
    shape = Shape(layers, kv_heads, group, head_size)
    variants = parse_variants(variant or ["unique"])
    for each in variants:
        each.additional_config(additional_config)
    failed = []
    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as parent:
        folder = Path(parent) / f"lookup-{layers}x{kv_heads}x{head_size}"
        folder.mkdir()
        jobs = [
            Job(
                model=str(folder), variant=each.name, additional_config=additional_config, engine_args=arguments,
                context=sizes[0], requests=requests, needles=needles, answer_tokens=answer_tokens, seed=seed,
                output=str(output.absolute()),
            )
            for each in variants
        ]  # fmt: skip
        jobs[0].documents()  # refuses needles that do not fit
        save_lookup(folder, shape, sizes[0])
        with ResultFile(output, describe_run(folder, commit)):
            pass
        for job in jobs:
            code = run_python("bench.quality", ["lookup-engine", job.model_dump_json()], end - time.monotonic())
            if code is None:
                failed.append(f"{job.variant}: not done by the deadline")
            elif code:
                failed.append(f"{job.variant}: ended with exit code {code}")
    rows = read_run(output).rows
    open_console().print(table(rows))
    failed += [
        f"{row['variant']}, request {row['request']}, position {row['position']}: got {row['answer']}, "
        f"right is {row['right_answer']}"
        for row in rows
        if row["answer"] != row["right_answer"]
    ]
    end_with(failed)


def lookup_engine(text: Annotated[str, typer.Argument(metavar="JSON")]) -> None:
    """Ask one engine in this process for `lookup`, and append a row for each answer."""
    job = Job.model_validate_json(text)
    options = {
        "max_model_len": job.context,
        "max_num_seqs": job.requests,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "compilation_config": DECODE_GRAPHS,
    }
    variant = Variant.parse(job.variant)
    with (
        exits_for_wrong_backend(),
        open_model(job.model) as model,
        ResultFile(Path(job.output)) as file,
        engine(model, variant, job.additional_config, **(options | job.engine_args)) as (llm, backend),
    ):
        check_cache(llm, job)
        for row in _ask(llm, job):
            file.write(_columns(llm, job, model, variant, backend) | row)


def check_cache(llm: LLM, job: Job) -> None:
    """Raises ConfigurationError if the KV cache does not hold all requests at once."""
    cache = llm.llm_engine.vllm_config.cache_config
    blocks, needed = cache.num_gpu_blocks - 1, job.requests * -(-job.context // cache.block_size)  # vLLM reserves one
    if blocks < needed:
        raise ConfigurationError(
            f"requests: got {job.requests} of {job.context} tokens, allowed: as many as fit the KV cache of "
            f"{blocks * cache.block_size} tokens"
        )


def _columns(llm: LLM, job: Job, model: Model, variant: Variant, backend: str) -> Row:
    """The columns that all answers of an engine share."""
    cache = llm.llm_engine.vllm_config.cache_config
    kv_bytes = job.requests * job.context * model.kv_bytes_per_token(variant.kv_cache_dtype)
    return {
        "variant": variant.name,
        "attention_backend": backend,
        "kv_cache_dtype": variant.kv_cache_dtype,
        "additional_config": json.loads(variant.additional_config(job.additional_config) or "null"),
        "engine_args": job.engine_args,
        "context_tokens": job.context,
        "requests": job.requests,
        "layers": model.config["num_hidden_layers"],
        "kv_heads": model.config["num_key_value_heads"],
        "head_size": model.config["head_dim"],
        "kv_gib": round(kv_bytes / 2**30, 3),
        "kv_cache_tokens": (cache.num_gpu_blocks - 1) * cache.block_size,  # vLLM reserves one
    }


def _ask(llm: LLM, job: Job) -> Iterator[Row]:
    """Asks for one needle of each document at a time; yields the other columns of each answer."""
    from vllm import SamplingParams, TokensPrompt

    documents = job.documents()
    sampling = SamplingParams(temperature=0, max_tokens=job.answer_tokens, ignore_eos=True, detokenize=False)
    for index in range(job.needles):
        asked = [document.needles[index] for document in documents]
        prompts = [
            TokensPrompt(prompt_token_ids=[*document.tokens, needle.key])
            for document, needle in zip(documents, asked, strict=True)
        ]
        before, begin = host_reads(), time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds, share = time.perf_counter() - begin, host_share(before, host_reads())
        right = 0
        for request, (needle, output) in enumerate(zip(asked, outputs, strict=True)):
            answer = list(output.outputs[0].token_ids)
            right += answer == list(needle.answer)
            stats: Any = output.metrics
            decoding = stats.last_token_ts - stats.first_token_ts
            yield {
                "request": request,
                "needle": index,
                "position": needle.position,
                "right_answer": needle.answer,
                "answer": answer,
                "cached_tokens": output.num_cached_tokens,
                "ms_per_token": round(decoding / (job.answer_tokens - 1) * 1e3, 3),
                "seconds": round(seconds, 2),
                **share,
            }
        print(f"{job.variant}: depth {index + 1}/{job.needles}, {right} right, {seconds:.1f} s", flush=True)


def table(rows: Sequence[Row]) -> Table:
    """A line for each variant: the right answers by depth."""
    needles = sorted({row["needle"] for row in rows})
    lines = Table("variant", *(f"depth {index + 1}" for index in needles), "ms per token", title="Right answers")
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        cells = []
        for index in needles:
            answers = [row["answer"] == row["right_answer"] for row in own if row["needle"] == index]
            cells.append(f"{sum(answers)}/{len(answers)}")
        lines.add_row(variant, *cells, f"{statistics.median(row['ms_per_token'] for row in own):.2f}")
    return lines
