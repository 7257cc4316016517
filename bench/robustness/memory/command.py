"""Asks an engine that may use nearly all GPU memory several prompts of the longest context.

    python -m bench.robustness memory --variant h2o --variant art --variant unique_prefill --output memory.jsonl

vLLM gives the memory that its profile of a step leaves to the KV cache. Scratch that the profile does not know takes
memory beyond `--utilization`, and ends the engine where there is none. Each variant has its own process.
"""

from __future__ import annotations

import math
import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.common.children import run_python
from bench.common.console import end_with, open_console
from bench.common.engine import DECODE_GRAPHS, Variant, engine, parse_variants
from bench.common.models import SHAPES, Model, open_model
from bench.common.options import Commit, Output, parse_size
from bench.common.repeated import repeated
from bench.common.results import ResultFile, Row, read_run
from bench.robustness.families.cells import sentence
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.provenance import describe_gpu, describe_run

if TYPE_CHECKING:
    from vllm import RequestOutput

_VARIANTS = ("dense", "h2o", "art", "unique_prefill", "unique", "zipvl")
_ANSWER_TOKENS = 32
_LOOK_SECONDS = 0.002
_LONGEST_LOG = 3000
_GIB = 2**30

Shape = Annotated[str, typer.Option("--model", help=f"{', '.join(SHAPES)}: random weights.")]
Context = Annotated[str, typer.Option(help="Tokens of a request, its answer included.")]
Requests = Annotated[int, typer.Option(min=1, help="Requests at once.")]
Utilization = Annotated[float, typer.Option(min=0.01, max=1, help="`--gpu-memory-utilization` of the engine.")]


def memory(
    output: Output,
    variant: Annotated[
        list[str] | None, typer.Option(help=f"BACKEND, repeatable. Default: {', '.join(_VARIANTS)}.")
    ] = None,
    model: Shape = "llama-3.1-8b",
    context: Context = "128K",
    requests: Requests = 6,
    utilization: Utilization = 0.97,
    seconds: Annotated[float, typer.Option(min=1, help="Time limit of a variant.")] = 600,
    commit: Commit = None,
) -> None:
    """Ask long prompts with little memory left; exit code 3 if an answer is missing."""
    variants = parse_variants(variant or _VARIANTS)
    parse_size(context)
    if not describe_gpu():
        raise ConfigurationError("device: got no NVIDIA GPU, allowed: a machine with one")
    console = open_console()
    with ResultFile(output, describe_run(commit=commit)):
        pass
    for each in variants:
        count = len(read_run(output).rows)
        arguments = ["memory-cell", "--output", str(output.resolve()), "--variant", each.name, "--model", model]
        arguments += ["--context", context, "--requests", str(requests), "--utilization", str(utilization)]
        with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:
            log = Path(folder) / "log"
            code = run_python("bench.robustness", arguments, seconds, log)
            if len(read_run(output).rows) == count:
                reason = "it took too long" if code is None else f"its process ended with {code}"
                with ResultFile(output) as file:
                    file.write({"variant": each.name, "faults": [reason]})
            row = read_run(output).rows[-1]
            if row["faults"]:
                console.print(log.read_text(encoding="utf-8", errors="replace")[-_LONGEST_LOG:], markup=False)
        console.print(row)
    end_with([f"{row['variant']}: {fault}" for row in read_run(output).rows for fault in row["faults"]])


def memory_cell(
    output: Output,
    variant: Annotated[str, typer.Option()],
    model: Shape,
    context: Context,
    requests: Requests,
    utilization: Utilization,
) -> None:
    """Ask the prompts of one variant, in this process."""
    with open_model(model) as opened, ResultFile(output) as file:
        about = {
            "variant": variant, "context_tokens": parse_size(context), "requests": requests, "utilization": utilization
        }  # fmt: skip
        file.write(about | ask(opened, Variant.parse(variant), parse_size(context), requests, utilization))


def ask(model: Model, variant: Variant, context: int, requests: int, utilization: float) -> Row:
    """Starts an engine and asks it; returns the columns of memory in GiB and of the answers."""
    import torch
    from vllm import SamplingParams

    rng, row = random.Random(0), Row()
    prompts: list[Any] = [
        {"prompt_token_ids": rng.choices(range(3, model.vocabulary), k=context - _ANSWER_TOKENS)}
        for _ in range(requests)
    ]
    sampling = SamplingParams(
        temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True, logprobs=1, detokenize=False
    )  # fmt: skip
    options = {
        "max_model_len": context, "gpu_memory_utilization": utilization, "compilation_config": DECODE_GRAPHS,
        "skip_tokenizer_init": True, "enable_prefix_caching": False, "disable_log_stats": False,
    }  # fmt: skip
    total = torch.cuda.mem_get_info()[1]
    try:
        with watched(lambda: torch.cuda.mem_get_info()[0]) as free, engine(model, variant, None, **options) as (
            llm, row["backend"]
        ):  # fmt: skip
            row["started"] = free_columns(free.restart(), total, utilization)
            torch.cuda.reset_peak_memory_stats()
            done = llm.generate(prompts, sampling, use_tqdm=False)
            row["asked"] = free_columns(free.restart(), total, utilization) | {
                "most_allocated_gib": round(torch.cuda.max_memory_allocated() / _GIB, 3),
                "most_reserved_gib": round(torch.cuda.max_memory_reserved() / _GIB, 3),
                # torch frees its cache and tries again before an allocation fails.
                "allocation_retries": torch.cuda.memory_stats()["num_alloc_retries"],
            }
            counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
            row["preemptions"] = counts.get("vllm:num_preemptions")
            row["kv_cache_tokens"] = tokens_of_cache(llm)
            row["faults"] = faults_of(done, requests)
    except Exception as error:  # of any kind, out of memory above all
        row["faults"] = [sentence(error)]
    return row


def tokens_of_cache(llm: Any) -> int:
    """Returns the tokens that the KV cache of an engine has room for."""
    cache = llm.llm_engine.vllm_config.cache_config
    return int(cache.num_gpu_blocks * cache.block_size)


class Watch:
    """The lowest number that a function has returned."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read, self._lock = read, threading.Lock()
        self._lowest = read()

    def look(self) -> bool:
        """Calls the function; returns that it may be called again."""
        number = self._read()
        with self._lock:
            self._lowest = min(self._lowest, number)
        return True

    def restart(self) -> int:
        """Returns the lowest number since the last call, and forgets it."""
        number = self._read()
        with self._lock:
            lowest, self._lowest = min(self._lowest, number), number
        return lowest


@contextmanager
def watched(read: Callable[[], int]) -> Iterator[Watch]:
    """Yields a watch that a thread calls often."""
    watch = Watch(read)
    with repeated(watch.look, _LOOK_SECONDS):
        yield watch


def free_columns(lowest: int, total: int, utilization: float) -> Row:
    """Returns the lowest free memory, and what was used beyond the share that the engine may use."""
    beyond = total - lowest - int(total * utilization)
    return {"lowest_free_gib": round(lowest / _GIB, 3), "beyond_share_gib": round(max(0, beyond) / _GIB, 3)}


def faults_of(done: Sequence[RequestOutput], requests: int) -> list[str]:
    """The faults of the answers, one sentence each."""
    whole = sum(len(each.outputs[0].token_ids) == _ANSWER_TOKENS for each in done)
    faults = [] if whole == requests else [f"{whole} of {requests} answers are complete"]
    logprobs = [entry.logprob for each in done for step in each.outputs[0].logprobs or () for entry in step.values()]
    if not all(map(math.isfinite, logprobs)):
        faults.append("log probabilities are not finite")
    return faults
