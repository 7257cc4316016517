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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from bench.common.children import run_python, unwind_on_termination
from bench.common.console import end_with, open_console
from bench.common.engine import DECODE_GRAPHS, Variant, engine, exits_for_wrong_backend
from bench.common.host_reads import host_reads, host_share
from bench.common.lookup import Document, Shape, draw_document, save_lookup
from bench.common.options import Commit, Output, Seed, TimeLimit, make_app, parse_size, parse_sizes, split_values
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

app = make_app("Quality of sparse compared with dense attention.")
DENSE, AGAIN = "dense", "dense-again"
"""Names of the runs with vLLM's own attention, the second in other batches."""
SHARES = ("kv_read_share", "key_read_share", "key_kept_share")
"""What a setting read and kept: fields of a result."""
_BETWEEN_STARTS = 8.0
"""Seconds. Engines that start at the same time disturb each other's memory profiling."""

Model = Annotated[str, typer.Option("--model", help="Folder or name.")]
Settings = Annotated[list[str], typer.Option("--setting", help="BACKEND[:BUDGET][+FIELD=VALUE], repeatable.")]
DenseBackend = Annotated[str, typer.Option("--dense-backend", help="vLLM's attention backend to compare with.")]
EngineArgs = Annotated[str, typer.Option("--engine-args", metavar="JSON", help="Arguments of vllm.LLM.")]
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


@app.command()
def ruler(
    output: Output,
    model: Model,
    setting: Settings,
    dense_backend: DenseBackend = "FLASH_ATTN",
    context: Annotated[list[str] | None, typer.Option(help="Tokens of a document, repeatable. Default: 4K.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Of RULER, repeatable. Default: all.")] = None,
    questions: Annotated[int, typer.Option(min=1, help="Questions of each task and context.")] = 25,
    decode_from: Annotated[
        Literal["prompt", "question"], typer.Option(help="Decode the question token by token, or prefill it, too.")
    ] = "question",
    chat: Annotated[bool, typer.Option("--chat", help="Apply the tokenizer's chat template.")] = False,
    engine_args: EngineArgs = "{}",
    concurrency: Annotated[int, typer.Option(min=1, help="Questions in flight.")] = 16,
    at_once: AtOnce = 1,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Answer RULER questions with dense attention and each setting; exit code 3 if an engine fails."""
    end = time.monotonic() + time_limit
    parse_additional_config(engine_args, "engine_args")
    contexts = parse_sizes("context", split_values(context or ["4K"]))
    settings = [Setting(DENSE, ("--attention-backend", dense_backend)), *map(Setting.parse, split_values(setting))]
    shared = [
        "--model", model, "--questions", str(questions), "--concurrency", str(concurrency),
        "--decode-from", decode_from, "--engine-args", engine_args, *(["--chat"] if chat else []),
    ]  # fmt: skip
    for name in split_values(task or ["ruler"]):
        shared += ["--task", name]
    for tokens in contexts:
        shared += ["--context", str(tokens)]
    found, failed = evaluate(settings, shared, at_once, end)
    about = {**describe_run(folder_of(Path(model)), commit), "decode_from": decode_from, "chat": chat}
    rows = [
        {
            "setting": name, "id": result.id, "task": result.task, "context_tokens": result.context_tokens,
            "decode_from": decode_from, "chat": chat, "score": result.score,
            **{key: getattr(result, key) for key in SHARES},
        }
        for name, results in found.items() for result in results.values()
    ]  # fmt: skip
    _write(output, about, rows)
    open_console().print(_scores(rows))
    end_with(failed)


def _scores(rows: Sequence[Row]) -> Table:
    """The mean score of each setting and context, with its interval."""
    shown = Table(title="RULER scores")
    contexts = sorted({row["context_tokens"] for row in rows})
    for heading in ("setting", *(f"{tokens:,} tokens" for tokens in contexts)):
        shown.add_column(heading)
    for setting in dict.fromkeys(row["setting"] for row in rows):
        scores = [
            [row["score"] for row in rows if (row["setting"], row["context_tokens"]) == (setting, tokens)]
            for tokens in contexts
        ]
        means = [estimate_mean(each) if each else None for each in scores]
        shown.add_row(
            setting,
            *("" if mean is None else f"{mean.value:.3f} ({mean.low:.3f} to {mean.high:.3f})" for mean in means),
        )
    return shown


@app.command()
def served(
    output: Output,
    model: Model,
    texts: Annotated[Path, typer.Option(help="JSON lines with `prompt`, and `kind` if there are several.")],
    setting: Settings,
    dense_backend: DenseBackend = "FLASH_ATTN",
    scored_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each text to decode.")] = 128,
    engine_args: EngineArgs = "{}",
    at_once: AtOnce = 1,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Compare next tokens of served texts with those of dense attention; exit code 3 if an engine fails."""
    end = time.monotonic() + time_limit
    parse_additional_config(engine_args, "engine_args")
    dense = ("--attention-backend", dense_backend)
    settings = [Setting(DENSE, dense), Setting(AGAIN, (*dense, "--other-batches"))]
    settings += [Setting.parse(text) for text in split_values(setting)]
    kinds = _kinds(texts)
    shared = [
        "--model", model, "--completions", str(texts), "--scored-tokens", str(scored_tokens),
        "--engine-args", engine_args,
    ]  # fmt: skip
    found, failed = evaluate(settings, shared, at_once, end)
    about = {**describe_run(folder_of(Path(model)), commit), "scored_tokens": scored_tokens}
    rows = rows_of(found, kinds)
    _write(output, about, rows)
    open_console().print(_changes(rows))
    end_with(failed)


def _kinds(texts: Path) -> dict[str, str]:
    """The kind of each text, by its name in results.

    Raises:
        ConfigurationError: the texts cannot be read.
    """
    names = [prompt["name"] for prompt in read_prompts(texts, "texts")]
    entries = [entry for _, _, entry in read_json_lines(texts, "texts")]
    return {name: str(entry.get("kind", "text")) for name, entry in zip(names, entries, strict=True)}


def rows_of(found: Mapping[str, Mapping[str, Result]], kinds: Mapping[str, str]) -> list[Row]:
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


def _changes(rows: Sequence[Row]) -> Table:
    """The share of next tokens that each setting changes beyond dense attention in other batches."""
    shown = Table(title="Next tokens changed beyond those of dense attention in other batches, by kind of text")
    kinds = list(dict.fromkeys(row["text"] for row in rows))
    for heading in ("setting", *kinds):
        shown.add_column(heading)
    by_setting: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_setting.setdefault(row["setting"], {})[row["id"]] = row
    again = by_setting.get(AGAIN, {})
    for setting, texts in by_setting.items():
        cells = []
        for kind in kinds:
            pairs = [(again[name], row) for name, row in texts.items() if row["text"] == kind and name in again]
            if not pairs:
                cells.append("")
                continue
            noise, kept = ([row["agreement"] for row in each] for each in zip(*pairs, strict=True))
            more = estimate_excess(noise, kept, pairs[0][1]["scored_tokens"])
            cells.append(f"{more.value:.1%} ({more.low:.1%} to {more.high:.1%})")
        shown.add_row(setting, *cells)
    return shown


def _write(output: Path, about: Row, rows: Sequence[Row]) -> None:
    with ResultFile(output, about) as file:
        for row in rows:
            file.write(row)


@app.command()
def lookup(
    output: Output,
    variant: Annotated[str, typer.Option(help="BACKEND[:KV_CACHE_DTYPE].")] = "unique",
    context: Annotated[str, typer.Option(help="Tokens of each request, its answer included.")] = "32K",
    requests: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 2,
    needles: Annotated[int, typer.Option(min=2, help="Depths from the start to the end of a document.")] = 8,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 8,
    layers: Annotated[int, typer.Option(min=2, help="Layers of the model.")] = 4,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of each layer.")] = 8,
    group: Annotated[int, typer.Option(min=1, help="Query heads of each KV head.")] = 1,
    head_size: Annotated[int, typer.Option(help="64 or 128.")] = 128,
    additional_config: Annotated[str | None, typer.Option(help="For the plugin's backends.", metavar="JSON")] = None,
    engine_args: EngineArgs = "{}",
    seed: Seed = 0,
    commit: Commit = None,
) -> None:
    """Ask a lookup model for needles of whole contexts; exit code 3 if an answer is wrong.

    Each request has a document of its own. One question for each depth is asked about all documents at the same time;
    later questions find the documents in the prefix cache. The first token of an answer comes from the prompt, the
    others from decode steps.
    """
    arguments, shape = parse_additional_config(engine_args, "engine_args"), Shape(layers, kv_heads, group, head_size)
    try:
        tokens = parse_size(context)
    except ValueError:
        raise ConfigurationError(f"context: got {context!r}, allowed: a positive integer such as 32K") from None
    chosen = Variant.parse(variant)
    chosen.additional_config(additional_config)
    # With a question and its answer, a document fills the context.
    length = tokens - 1 - answer_tokens
    documents = [draw_document(length, needles, answer_tokens, seed * requests + each) for each in range(requests)]
    options = {
        "max_model_len": tokens, "max_num_seqs": requests, "skip_tokenizer_init": True, "enable_prefix_caching": True,
        "disable_log_stats": False, "compilation_config": DECODE_GRAPHS,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as parent, exits_for_wrong_backend():
        folder = Path(parent) / f"lookup-{layers}x{kv_heads}x{head_size}"
        folder.mkdir()
        model = save_lookup(folder, shape, tokens)
        with (
            ResultFile(output, describe_run(folder, commit)) as file,
            engine(model, chosen, additional_config, **(options | arguments)) as (llm, backend),
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
