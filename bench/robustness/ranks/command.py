"""Asks one engine of a data-parallel server while the other has no requests.

    python -m bench.robustness ranks --output ranks.jsonl

Engines of a mixture of experts compute every step together: one without requests computes a dummy step. Engine 0 is
asked first, then engine 1, then engine 0 again, whose prefix cache must have survived. Both engines must give the same
answers. They are also compared with those of a server with one engine, which is asked twice, too. Engines that share
experts add their parts in another order, and a prefix hit changes the shape of a step, so these answers may differ as
far as those of vLLM's own attention do, which is tried first.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from openai import OpenAI

from bench.common.console import end_with, open_console
from bench.common.continuations import Continuation
from bench.common.engine import DECODE_GRAPHS
from bench.common.metrics import metrics_text
from bench.common.options import Commit, Output, parse_names
from bench.common.results import ResultFile
from bench.robustness.deployments.cells import NOT_HERE, ONE_STEP, Cell, compare
from bench.robustness.families.cells import FAILED, REFUSED, refusal_of
from bench.robustness.families.engines import draw_weights, prompt
from bench.robustness.families.table import BUDGET, FAMILIES
from bench.robustness.soak.clients import Asker
from vllm_sparse_plugin.config import KEY
from vllm_sparse_plugin.tools.provenance import describe_gpu, describe_run
from vllm_sparse_plugin.tools.server import LaunchedServer, ServerError, ServerSettings, launch_server

ENGINES = 2
MODELS = {"dense": "llama", "experts": "qwen3_moe"}
"""Families of the models, by their kind."""
_SELECTION = {"selection": {"budget_tokens": BUDGET}, "min_context_tokens": 0}
_KEPT = {"compaction": {"budget_tokens": BUDGET, "min_context_tokens": 0}}
SETTINGS: dict[str, dict[str, Any]] = {
    "unique": _SELECTION,
    "art": {"min_context_tokens": 0},
    "unique_prefill": _SELECTION | {"prefill": {"min_context_tokens": 512, "min_blocks": 2}},
    "zipvl": {"prefill": {"min_context_tokens": 0}},
    "snapkv": _KEPT,
    "h2o": _KEPT,
    "lossless": {},
}
"""Settings by backend, with which the prompts attend sparsely."""
CONTROL = "vllm"
"""vLLM's own attention."""
_LENGTHS = (600, 1500, 3000)
_MAX_MODEL_LEN = 4096
_NEW_TOKENS = 32
_CACHE_BYTES = 1 << 28
_LIKELIEST = 20
"""Tokens of each step with a log probability: the most that vLLM allows by default."""


def ranks(
    output: Output,
    model: Annotated[list[str] | None, typer.Option(help=f"Repeatable. Default: {', '.join(MODELS)}.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help=f"Repeatable. Default: {', '.join(SETTINGS)}.")] = None,
    start_seconds: Annotated[float, typer.Option(min=1, help="Time limit of a server's start.")] = 600,
    commit: Commit = None,
) -> None:
    """Ask one of two data-parallel engines while the other is idle; exit code 3 if an answer differs or is missing."""
    kinds = parse_names("model", model or MODELS, list(MODELS))
    backends = parse_names("backend", backend or SETTINGS, list(SETTINGS))
    console, cells = open_console(), []
    with ResultFile(output, describe_run(commit=commit)) as file, tempfile.TemporaryDirectory() as parent:
        for kind in kinds:
            folder = Path(parent) / FAMILIES[MODELS[kind]].key
            write_model(kind, folder)
            tie = ONE_STEP
            for name in (CONTROL, *backends):
                start = time.monotonic()
                cell = try_ranks(f"{kind}, {name}", kind, folder, name, start_seconds, tie)
                if name == CONTROL and cell.outcome != FAILED:
                    tie = max(tie, cell.gap or 0.0)
                cells.append(replace(cell, seconds=round(time.monotonic() - start, 1)))
                file.write(cells[-1].as_row())
                console.print(f"{cell.deployment}: {cell.outcome}: {cell.reason}", markup=False)
    end_with([f"{cell.deployment}: {cell.reason}" for cell in cells if cell.outcome == FAILED])


def write_model(kind: str, folder: Path) -> None:
    """Writes a tiny model with drawn weights. Engines that hold different experts must load the same ones."""
    import transformers

    FAMILIES[MODELS[kind]].write(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    made = transformers.AutoModelForCausalLM.from_config(config)
    draw_weights(made)
    made.to(config.dtype).save_pretrained(folder)


def try_ranks(name: str, kind: str, folder: Path, backend: str, start_seconds: float, tie: float = ONE_STEP) -> Cell:
    """Compares the answers of data-parallel engines with those of one engine, and with each other.

    Args:
        name: of the cell.
        kind: of the model, a key of `MODELS`.
        folder: of the model.
        backend: a key of `SETTINGS`, or `CONTROL`.
        start_seconds: time limit of a server's start.
        tie: as for `compare`. The answers of `CONTROL` may part at any likely token.
    """
    if kind == "experts" and not describe_gpu():
        return Cell(name, NOT_HERE, "vLLM's CPU build has no communication between the experts of several engines")
    try:
        if backend != CONTROL:
            expect_admitted(folder, backend)
    except Exception as error:  # vLLM wraps it
        if refusal := refusal_of(error):
            return Cell(name, REFUSED, refusal)
        raise
    try:
        with ready(folder, backend, 1, start_seconds) as server, server.explain_failures():
            expected, expected_again = (ask(server.client, folder.name) for _ in range(2))
        with ready(folder, backend, ENGINES, start_seconds) as server, server.explain_failures():
            first, second, again = (ask(server.client, folder.name, engine) for engine in (0, 1, 0))
            answered = answers_by_engine(metrics_text(server.client))
    except ServerError as error:
        open_console().print(str(error), markup=False)
        return Cell(name, FAILED, str(error).splitlines()[0])
    # A gap is infinite if the other token is none of the likeliest. No rival may part so far.
    allowed = math.nextafter(math.inf, 0) if backend == CONTROL else tie
    cell = compare(name, [*expected, *expected, *expected_again], [*first, *second, *again], allowed)
    between = compare(name, first, second)
    if answered != [2 * len(_LENGTHS), len(_LENGTHS)]:
        return replace(cell, outcome=FAILED, reason=f"the engines answered {answered} questions")
    if between.outcome == FAILED:
        return replace(cell, outcome=FAILED, reason=f"engines differ: {between.reason}")
    return cell


def expect_admitted(folder: Path, backend: str) -> None:
    """Raises the plugin's refusal of several engines, if it refuses them."""
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs(
        model=str(folder), attention_backend=backend, additional_config={KEY: SETTINGS[backend]},
        data_parallel_size=ENGINES, enforce_eager=True, skip_tokenizer_init=True, max_model_len=_MAX_MODEL_LEN,
    ).create_engine_config()  # fmt: skip


@contextmanager
def ready(folder: Path, backend: str, engines: int, start_seconds: float) -> Iterator[LaunchedServer]:
    """A server that answers, with some data-parallel engines."""
    gpu = bool(describe_gpu())
    arguments = [
        "--skip-tokenizer-init", "--max-num-seqs", "4", "--max-num-batched-tokens", "1024",
        "--kv-cache-memory-bytes", str(_CACHE_BYTES), "--data-parallel-size", str(engines), "--api-server-count", "1",
    ]  # fmt: skip
    if gpu:
        arguments += ["--compilation-config", json.dumps(DECODE_GRAPHS), "--gpu-memory-utilization", "0.2"]
    name, config = (None, None) if backend == CONTROL else (backend, json.dumps({KEY: SETTINGS[backend]}))
    settings = ServerSettings(
        folder, _MAX_MODEL_LEN, name, config, tuple(arguments), eager=not gpu,
        # By default vLLM gives each CPU worker a separate NUMA node.
        environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, start_seconds=start_seconds,
    )  # fmt: skip
    with launch_server(f"{backend}-{engines}", settings) as server:
        server.wait_until_ready()
        yield server


def ask(client: OpenAI, model: str, engine: int | None = None) -> list[Continuation]:
    """Returns the answers to all prompts, one after the other, of one engine."""
    headers = {} if engine is None else {"X-data-parallel-rank": str(engine)}
    asker = Asker(client.with_options(default_headers=headers), model, _NEW_TOKENS)
    return [asker.ask(prompt(length)["prompt_token_ids"], detokenize=False, logprobs=_LIKELIEST) for length in _LENGTHS]


def answers_by_engine(text: str) -> list[int]:
    """The answers that each engine has finished, by a `/metrics` text."""
    found = re.findall(r'vllm:request_success_total\{engine="(\d+)"[^}]*"length"[^}]*\} (.*)', text)
    return [round(float(count)) for _, count in sorted(found, key=lambda each: int(each[0]))]
