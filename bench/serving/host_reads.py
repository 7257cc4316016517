"""Share of the pages that decode steps read from host memory, on texts, by budget and by copies on the GPU.

    python -m bench.serving host-reads --model MODEL --texts texts.jsonl --copies 2048,4096 --budget 512,1024 \
        --output host_reads.jsonl

A line of the texts has `prompt`, and an optional `kind`; each kind is a batch. For each number of copies one engine
with the backend `unique_offload` starts. Each batch is decoded greedily twice with each budget; the second time is
counted, when the prompts are in the prefix cache. It needs a GPU.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from bench.common.children import run_python
from bench.common.console import open_console
from bench.common.engine import DECODE_GRAPHS, Variant, engine
from bench.common.host_reads import host_reads, host_share
from bench.common.models import open_model
from bench.common.options import Commit, Output, TimeLimit, parse_sizes
from bench.common.results import ResultFile, Row, read_run
from bench.serving.variants import EngineSettings
from vllm_sparse_plugin.config import KEY
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.files import read_json_lines
from vllm_sparse_plugin.tools.provenance import describe_run

if TYPE_CHECKING:
    from vllm import LLM


class HostReadSettings(EngineSettings):
    """The input of the process of one engine."""

    texts: str
    """The file of the texts."""
    copies: int
    """Tokens of copies on the GPU, for each request, layer and KV head."""
    budgets: tuple[int, ...]
    new_tokens: int
    host_memory: str


def host_reads_variant(text: Annotated[str, typer.Argument(metavar="JSON")]) -> None:
    """Measure one engine in this process for `host-reads`, and append a row for each batch and budget."""
    settings = HostReadSettings.model_validate_json(text)
    with ResultFile(Path(settings.output)) as file, open_model(settings.model) as model:
        budget = settings.budgets[0]
        offload = {"host_memory": settings.host_memory, "hot_pages": settings.copies / budget}
        config = json.dumps({KEY: {"selection": {"policy": "unique", "budget_tokens": budget}, "offload": offload}})
        batches = read_batches(Path(settings.texts))
        with engine(
            model,
            Variant("UNIQUE_OFFLOAD"),
            config,
            max_num_seqs=max(len(prompts) for prompts in batches.values()),
            gpu_memory_utilization=settings.gpu_memory_utilization,
            compilation_config=DECODE_GRAPHS,
        ) as (llm, _):
            for kind, prompts in batches.items():
                for tokens in settings.budgets:
                    row = measure_batch(llm, prompts, tokens, settings)
                    file.write({"text": kind, "copies_tokens": settings.copies, "budget_tokens": tokens, **row})


def read_batches(texts: Path) -> dict[str, list[str]]:
    """Returns the prompts of a file by kind.

    Raises:
        ConfigurationError: a line is not such an object.
    """
    batches: dict[str, list[str]] = {}
    for number, line, entry in read_json_lines(texts, "texts"):
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise ConfigurationError(
                f"texts: got {line[:60]!r} in line {number}, allowed: a JSON object with the text `prompt`"
            )
        batches.setdefault(str(entry.get("kind", "text")), []).append(entry["prompt"])
    return batches


def measure_batch(llm: LLM, prompts: list[str], budget: int, settings: HostReadSettings) -> Row:
    """Decodes a batch twice with a budget; returns the columns of the second time."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=settings.new_tokens, ignore_eos=True, extra_args={"sparse_budget_tokens": budget}
    )
    llm.generate(prompts, sampling, use_tqdm=False)
    before = host_reads()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    lengths = [len(output.prompt_token_ids or ()) for output in outputs]
    return {
        "requests": len(prompts),
        "prompt_tokens": round(sum(lengths) / len(lengths)),
        "new_tokens": settings.new_tokens,
        **host_share(before, host_reads()),
    }


def host_reads_command(
    output: Output,
    model: Annotated[str, typer.Option(help="Folder of a model with a tokenizer.")],
    texts: Annotated[Path, typer.Option(help="JSON lines with `prompt`, and `kind` if there are several.")],
    copies: Annotated[list[str], typer.Option(help="Tokens of copies for each request, repeatable.")],
    budget: Annotated[list[str], typer.Option(help="Tokens that a step reads, repeatable.")],
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode.")] = 128,
    host_memory: Annotated[str, typer.Option(help="As in the settings of offloading.")] = "16GiB",
    gpu_memory_utilization: Annotated[float, typer.Option(min=0.05, max=1, help="As for vLLM.")] = 0.9,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Measure the share of pages from host memory on texts; exit code 3 if an engine fails."""
    end = time.monotonic() + time_limit
    read_batches(texts)
    budgets, sizes = parse_sizes("budget", budget), parse_sizes("copies", copies)
    failed: list[str] = []
    with open_model(model) as opened:
        with ResultFile(output, describe_run(opened.folder, commit)):
            pass
        for size in sizes:
            settings = HostReadSettings(
                model=str(opened.folder), repeats=1, gpu_memory_utilization=gpu_memory_utilization,
                output=str(output.absolute()), texts=str(texts.absolute()), copies=size, budgets=budgets,
                new_tokens=new_tokens, host_memory=host_memory,
            )  # fmt: skip
            left = end - time.monotonic()
            code = run_python("bench.serving", ["host-reads-variant", settings.model_dump_json()], left)
            if code:
                failed.append(f"the engine with copies of {size} tokens ended with exit code {code}")
            elif code is None:
                failed.append(f"the engine with copies of {size} tokens was not done by the deadline")
    console = open_console()
    console.print(table(read_run(output).rows))
    for sentence in failed:
        console.print(f"error: {sentence}")
    if failed:
        raise typer.Exit(3)


def table(rows: list[dict[str, Any]]) -> Table:
    """Returns a line for each text and budget, with a column for each number of copies."""
    sizes = sorted({row["copies_tokens"] for row in rows})
    lines = Table("text", "tokens", "budget", *(str(size) for size in sizes), title="Pages from host memory")
    shares = {(row["text"], row["budget_tokens"], row["copies_tokens"]): row.get("host_read_share") for row in rows}
    for text, tokens, budget in dict.fromkeys(
        (row["text"], row["prompt_tokens"], row["budget_tokens"]) for row in rows
    ):
        cells = [shares.get((text, budget, size)) for size in sizes]
        lines.add_row(text, str(tokens), str(budget), *("-" if cell is None else f"{cell:.1%}" for cell in cells))
    return lines
