"""Quality of sparse compared with dense attention, by `vllm-sparse eval` with several settings, and by a lookup model.

    python -m bench.quality ruler --model MODEL --setting unique,quest --output ruler.jsonl
    python -m bench.quality served --model MODEL --texts texts.jsonl --setting unique:512,art --output served.jsonl
    python -m bench.quality lookup --context 1024K --requests 2 --variant unique_offload --output lookup.jsonl

`ruler` scores answers. `served` decodes texts with dense attention, again in other batches, and with each setting, and
compares the next tokens. A line of its texts has `prompt`, whose newest tokens are decoded, and an optional `kind`,
which rows repeat. `lookup` asks for needles of the whole length of contexts; the model has constructed weights
(`bench.common.lookup`), whose right answers are known at any length.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bench.common import options
from bench.common.children import run_python, unwind_on_termination
from bench.common.console import end_with, print_rows
from bench.common.engine import DECODE_GRAPHS, Variant, engine
from bench.common.host_reads import host_reads, host_share
from bench.common.lookup import Document, Shape, draw_document, save_lookup
from bench.common.results import ResultFile, Row
from vllm_sparse_plugin.config import KEY, resolve
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import (
    budget_section,
    find_preset,
    parse_additional_config,
    read_prompts,
    run_app,
)
from vllm_sparse_plugin.tools.eval.noise import MEASURES
from vllm_sparse_plugin.tools.eval.results import Result, read_results
from vllm_sparse_plugin.tools.eval.statistics import estimate_excess, estimate_mean
from vllm_sparse_plugin.tools.files import read_json_lines
from vllm_sparse_plugin.tools.models import folder_of
from vllm_sparse_plugin.tools.provenance import describe_run

app = options.make_app("Quality of sparse compared with dense attention.")
DENSE, AGAIN = "dense", "dense-again"
"""Names of the runs with vLLM's own attention, the second in other batches."""
SHARES = ("kv_read_share", "key_read_share", "key_kept_share")
"""What a setting read and kept: fields of a result."""
CONTEXTS, TASKS = ["4K"], ["ruler"]
Results = Mapping[str, Mapping[str, Result]]
"""Results by setting and by item."""
_BETWEEN_STARTS = 8.0
"""Seconds. Engines that start at the same time disturb each other's memory profiling."""

Model = Annotated[str, typer.Option("--model", help="Folder or name.")]
Settings = Annotated[list[str], typer.Option("--setting", help="BACKEND[:BUDGET][+FIELD=VALUE], repeatable.")]
DenseBackend = Annotated[str, typer.Option("--dense-backend", help="vLLM's attention backend to compare with.")]
AtOnce = Annotated[int, typer.Option("--at-once", min=1, help="Engines that run at the same time.")]


@app.callback()
def _quality() -> None:
    """Ends child processes when this process is ended."""
    unwind_on_termination()


@dataclass(frozen=True)
class Setting:
    """A run of `vllm-sparse eval`."""

    name: str
    options: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Parse `BACKEND` or `BACKEND:BUDGET`, the tokens that the backend reads or keeps, and settings.

        Each `+FIELD=VALUE` is a setting of the backend, such as `snapkv:2048+stopping.block_tokens=64`.

        Raises:
            ConfigurationError: for anything else.
        """
        first, *fields = text.split("+")
        backend, _, budget = first.partition(":")
        preset = find_preset(backend)
        given: dict[str, Any] = {}
        if budget:
            of_budget = budget_section(preset)
            if of_budget is None or not budget.isdecimal():
                raise ConfigurationError(
                    f"setting: got {text!r}, allowed: a backend, or one that has a budget with :TOKENS"
                )
            key, values = of_budget
            given[key] = {**values, "budget_tokens": int(budget)}
        for field in fields:
            name, equals, value = field.partition("=")
            section, _, key = name.rpartition(".")
            place = given.setdefault(section, {}) if section else given
            if not equals or not isinstance(place, dict) or key in place:
                raise ConfigurationError(f"setting: got {text!r}, allowed after each +: FIELD=VALUE, each field once")
            place[key] = _value(value)
        resolve(given, preset)
        options = ("--additional-config", json.dumps({KEY: given})) if given else ()
        return cls(text.replace(":", "-", 1), ("--attention-backend", backend, *options))


def _value(text: str) -> Any:
    """A value in JSON, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def evaluate(
    settings: Sequence[Setting], shared: Sequence[str], at_once: int, end: float
) -> tuple[dict[str, dict[str, Result]], list[str]]:
    """Returns the results by setting and by item, and the reasons of failures.

    Args:
        settings: the runs.
        shared: options of `vllm-sparse eval` for all of them.
        at_once: engines that run at the same time.
        end: latest end on `time.monotonic`.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:

        def run(number: int) -> str | None:
            """Runs a setting. Returns the reason of a failure."""
            if number < at_once:
                time.sleep(_BETWEEN_STARTS * number)
            chosen = settings[number]
            # By number: a name may hold the path of a file.
            path, log = (Path(folder) / f"{number}.{ending}" for ending in ("jsonl", "log"))
            arguments = ["eval", "--in-process", *shared, *chosen.options, "--output", str(path)]
            code = run_python("vllm_sparse_plugin", arguments, end - time.monotonic(), log)
            if code == 0:
                return None
            if code is None:
                return f"{chosen.name} was not done by the deadline"
            last = [*log.read_text(errors="replace").splitlines(), ""][-2:]
            return f"{chosen.name} ended with exit code {code}: {last[0]:.300}"

        with ThreadPoolExecutor(at_once) as pool:
            failed = [sentence for sentence in pool.map(run, range(len(settings))) if sentence]
        found = {
            each.name: read_results(path).results
            for number, each in enumerate(settings)
            if (path := Path(folder) / f"{number}.jsonl").exists()
        }
    return found, failed


def _finish(
    output: Path, about: Row, rows: Sequence[Row], column: str, text: Callable[[Sequence[Row]], str], failed: list[str]
) -> None:
    """Writes rows and shows a text of those of each setting and value of a column; exit code 3 after failures."""
    with ResultFile(output, about) as file:
        for row in rows:
            file.write(row)
    cells: dict[str, Row] = {}
    for setting, value in dict.fromkeys((row["setting"], row[column]) for row in rows):
        own = [row for row in rows if (row["setting"], row[column]) == (setting, value)]
        cells.setdefault(setting, {"setting": setting})[str(value)] = text(own)
    print_rows(list(cells.values()), ["setting", *dict.fromkeys(str(row[column]) for row in rows)])
    end_with(failed)


@app.command()
def ruler(
    output: options.Output,
    model: Model,
    setting: Settings,
    dense_backend: DenseBackend = "FLASH_ATTN",
    context: Annotated[list[str], typer.Option(help="Tokens of a document, repeatable.")] = CONTEXTS,
    task: Annotated[list[str], typer.Option(help="Of RULER, repeatable.")] = TASKS,
    questions: Annotated[int, typer.Option(min=1, help="Questions of each task and context.")] = 25,
    decode_from: Annotated[
        Literal["prompt", "question"], typer.Option(help="Decode the question token by token, or prefill it, too.")
    ] = "question",
    chat: Annotated[bool, typer.Option("--chat", help="Apply the tokenizer's chat template.")] = False,
    engine_args: options.EngineArgs = "{}",
    concurrency: Annotated[int, typer.Option(min=1, help="Questions in flight.")] = 16,
    at_once: AtOnce = 1,
    time_limit: options.TimeLimit = 3600,
    commit: options.Commit = None,
) -> None:
    """Answer RULER questions with dense attention and each setting; exit code 3 if an engine fails."""
    end = time.monotonic() + time_limit
    parse_additional_config(engine_args, "engine_args")
    settings = [Setting(DENSE, ("--attention-backend", dense_backend))]
    settings += [Setting.parse(text) for text in options.split_values(setting)]
    shared = ["--model", model, "--engine-args", engine_args, "--questions", str(questions)]
    shared += ["--concurrency", str(concurrency), "--decode-from", decode_from, *(["--chat"] if chat else [])]
    for name in options.split_values(task):
        shared += ["--task", name]
    for tokens in options.parse_sizes("context", context):
        shared += ["--context", str(tokens)]
    found, failed = evaluate(settings, shared, at_once, end)
    about = {"decode_from": decode_from, "chat": chat}
    rows = [
        {
            "setting": name, "id": result.id, "task": result.task, "context_tokens": result.context_tokens,
            **about, "score": result.score, **{key: getattr(result, key) for key in SHARES},
        }
        for name, results in found.items() for result in results.values()
    ]  # fmt: skip
    about |= describe_run(folder_of(Path(model)), commit)
    _finish(output, about, rows, "context_tokens", _score, failed)


def _score(rows: Sequence[Row]) -> str:
    """The mean score, with its interval."""
    mean = estimate_mean([row["score"] for row in rows])
    return f"{mean.value:.3f} ({mean.low:.3f} to {mean.high:.3f})"


@app.command()
def served(
    output: options.Output,
    model: Model,
    texts: Annotated[Path, typer.Option(help="JSON lines with `prompt`, and `kind` if there are several.")],
    setting: Settings,
    dense_backend: DenseBackend = "FLASH_ATTN",
    scored_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each text to decode.")] = 128,
    engine_args: options.EngineArgs = "{}",
    at_once: AtOnce = 1,
    time_limit: options.TimeLimit = 3600,
    commit: options.Commit = None,
) -> None:
    """Compare next tokens of served texts with those of dense attention; exit code 3 if an engine fails."""
    end, dense = time.monotonic() + time_limit, ("--attention-backend", dense_backend)
    parse_additional_config(engine_args, "engine_args")
    settings = [Setting(DENSE, dense), Setting(AGAIN, (*dense, "--other-batches"))]
    settings += [Setting.parse(text) for text in options.split_values(setting)]
    names = [prompt["name"] for prompt in read_prompts(texts, "texts")]
    entries = [entry for _, _, entry in read_json_lines(texts, "texts")]
    kinds = {name: str(entry.get("kind", "text")) for name, entry in zip(names, entries, strict=True)}
    shared = ["--model", model, "--engine-args", engine_args, "--completions", str(texts)]
    found, failed = evaluate(settings, [*shared, "--scored-tokens", str(scored_tokens)], at_once, end)
    rows = rows_of(found, kinds)
    about = describe_run(folder_of(Path(model)), commit) | {"scored_tokens": scored_tokens}
    again = {row["id"]: row["agreement"] for row in rows if row["setting"] == AGAIN}

    def change(rows: Sequence[Row]) -> str:
        """The share of next tokens that change beyond those of dense attention in other batches."""
        found = [row for row in rows if row["id"] in again]
        if not found:
            return "-"
        noise, kept = [again[row["id"]] for row in found], [row["agreement"] for row in found]
        more = estimate_excess(noise, kept, scored_tokens)
        return f"{more.value:.1%} ({more.low:.1%} to {more.high:.1%})"

    _finish(output, about, rows, "text", change, failed)


def rows_of(found: Results, kinds: Mapping[str, str]) -> list[Row]:
    """A row for each setting and text that dense attention decoded, too.

    Args:
        found: results by setting and by text.
        kinds: of the texts, by name.
    """
    dense, rows = found.get(DENSE, {}), []
    for setting, results in found.items():
        for name, result in results.items():
            if setting == DENSE or name not in dense:
                continue
            values = {key: round(measure.of(dense[name], result), 6) for key, measure in MEASURES.items()}
            shares: dict[str, Any] = {key: getattr(result, key) for key in SHARES}
            text = name.partition("/")[2]
            about = {"setting": setting, "id": name, "text": kinds[text], "context_tokens": result.prompt_tokens}
            rows.append({**about, "scored_tokens": result.forced_tokens, **values, **shares})
    return rows


@app.command()
def lookup(
    output: options.Output,
    variant: Annotated[str, typer.Option(help="BACKEND[:KV_CACHE_DTYPE].")] = "unique",
    context: Annotated[str, typer.Option(help="Tokens of each request, its answer included.")] = "32K",
    requests: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 2,
    needles: Annotated[int, typer.Option(min=2, help="Depths from the start to the end of a document.")] = 8,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 8,
    layers: Annotated[int, typer.Option(min=2, help="Layers of the model.")] = 4,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of each layer.")] = 8,
    group: Annotated[int, typer.Option(min=1, help="Query heads of each KV head.")] = 1,
    head_size: Annotated[int, typer.Option(help="64 or 128.")] = 128,
    additional_config: options.AdditionalConfig = None,
    engine_args: options.EngineArgs = "{}",
    seed: Annotated[int, typer.Option(help="Seed of documents and needles.")] = 0,
    commit: options.Commit = None,
) -> None:
    """Ask a lookup model for needles of whole contexts; exit code 3 if an answer is wrong.

    Each request has a document of its own. One question for each depth is asked about all documents at the same time;
    later questions find the documents in the prefix cache. The first token of an answer comes from the prompt, the
    others from decode steps.
    """
    arguments, shape = parse_additional_config(engine_args, "engine_args"), Shape(layers, kv_heads, group, head_size)
    (tokens,) = options.parse_sizes("context", [context])
    chosen = Variant.parse(variant)
    chosen.additional_config(additional_config)
    # With a question and its answer, a document fills the context.
    length = tokens - 1 - answer_tokens
    documents = [draw_document(length, needles, answer_tokens, seed * requests + each) for each in range(requests)]
    given = {
        "max_model_len": tokens, "max_num_seqs": requests, "skip_tokenizer_init": True, "enable_prefix_caching": True,
        "disable_log_stats": False, "compilation_config": DECODE_GRAPHS,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as parent:
        folder = Path(parent) / f"lookup-{layers}x{kv_heads}x{head_size}"
        folder.mkdir()
        model = save_lookup(folder, shape, tokens)
        with (
            ResultFile(output, describe_run(folder, commit)) as file,
            engine(model, chosen, additional_config, **(given | arguments)) as (llm, backend),
        ):
            cache = llm.llm_engine.vllm_config.cache_config
            room = cache.num_gpu_blocks - 1  # vLLM reserves one
            if room < requests * -(-tokens // cache.block_size):
                raise ConfigurationError(
                    f"requests: got {requests} of {tokens} tokens, allowed: as many as fit the KV cache of "
                    f"{room * cache.block_size} tokens"
                )
            about = {
                "variant": chosen.name, "attention_backend": backend, "kv_cache_dtype": chosen.kv_cache_dtype,
                "additional_config": json.loads(chosen.additional_config(additional_config) or "null"),
                "engine_args": arguments, "context_tokens": tokens, "requests": requests, "layers": layers,
                "kv_heads": kv_heads, "head_size": head_size, "kv_cache_tokens": room * cache.block_size,
                "kv_gib": round(requests * tokens * model.kv_bytes_per_token(chosen.kv_cache_dtype) / 2**30, 3),
            }  # fmt: skip
            rows = []
            for row in _look_up(llm, documents, answer_tokens):
                rows.append(row)
                file.write(about | row)
    right = sum(row["answer"] == row["right_answer"] for row in rows)
    milliseconds = statistics.median(row["ms_per_token"] for row in rows)
    print(f"{chosen.name}: {right} of {len(rows)} answers are right, {milliseconds:.2f} ms per token")
    end_with(
        [
            f"request {row['request']}, position {row['position']}: got {row['answer']}, right is {row['right_answer']}"
            for row in rows
            if row["answer"] != row["right_answer"]
        ]
    )


def _look_up(llm: Any, documents: Sequence[Document], answer_tokens: int) -> Iterator[Row]:
    """Asks for one needle of each document at a time; yields the columns of each answer."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False)
    for index, asked in enumerate(zip(*(document.needles for document in documents), strict=True)):
        prompts = [
            {"prompt_token_ids": [*document.tokens, needle.key]}
            for document, needle in zip(documents, asked, strict=True)
        ]
        before, begin = host_reads(), time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds, share = time.perf_counter() - begin, host_share(before, host_reads())
        print(f"depth {index + 1} of {len(documents[0].needles)}: {seconds:.1f} s", file=sys.stderr, flush=True)
        for request, (needle, output) in enumerate(zip(asked, outputs, strict=True)):
            decoding = output.metrics.last_token_ts - output.metrics.first_token_ts
            yield {
                "request": request, "needle": index, "position": needle.position, "right_answer": needle.answer,
                "answer": tuple(output.outputs[0].token_ids), "cached_tokens": output.num_cached_tokens,
                "ms_per_token": round(decoding / (answer_tokens - 1) * 1e3, 3), "seconds": round(seconds, 2), **share,
            }  # fmt: skip


def main() -> None:
    """Runs the command line. Bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
