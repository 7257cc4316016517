"""The command `vllm-sparse eval`: quality of a server or of an engine in this process."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vllm_sparse_plugin.cli.arguments import parse_additional_config
from vllm_sparse_plugin.cli.provenance import describe_run
from vllm_sparse_plugin.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm_sparse_plugin.eval.items import Prompter

app = typer.Typer(no_args_is_help=True)
_EXTRA = {"matplotlib": "matplotlib", "scipy": "scipy"}
"""Modules of the extra `eval`, and the packages that bring them."""
_EXTRA_OF_FILES = {
    "jieba": "jieba",
    "pytrec_eval": "pytrec-eval-terrier",
    "rapidfuzz": "rapidfuzz",
    "rouge": "rouge",
}
"""Those that only the metrics of --file take."""
_CONTEXT = 4096
_QUESTIONS = 20
_WIDTH = 160
_Plot = Annotated[Path | None, typer.Option(help="Picture to write, .png or .svg.")]


@app.callback(invoke_without_command=True)
def evaluate(
    command: typer.Context,
    output: Annotated[
        Path | None, typer.Option(help="JSON lines to write; a run that was cut short goes on where it was.")
    ] = None,
    base_url: Annotated[str, typer.Option(help="Server with OpenAI's completions API.")] = "http://127.0.0.1:8000/v1",
    in_process: Annotated[bool, typer.Option("--in-process", help="Start vLLM in this process instead.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Name at the server, its only one if left out; in process a folder or name.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Its folder or name; that of the model if left out.")] = None,
    label: Annotated[str | None, typer.Option(help="What tables call this run; the model's name if left out.")] = None,
    attention_backend: Annotated[str | None, typer.Option(help="In process: passed to vLLM.")] = None,
    additional_config: Annotated[str, typer.Option(help="In process: passed to vLLM.", metavar="JSON")] = "{}",
    engine_args: Annotated[str, typer.Option(help="In process: arguments of vllm.LLM.", metavar="JSON")] = "{}",
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="Task or group, repeatable; groups: ruler, needles. `ruler`, unless --file or --text is given."
        ),
    ] = None,
    context: Annotated[list[int] | None, typer.Option(help=f"Context in tokens, repeatable; {_CONTEXT}.")] = None,
    questions: Annotated[
        int | None, typer.Option(min=1, help=f"Items for each task and context; {_QUESTIONS}, and all of a --file.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of generated tasks.")] = 0,
    decode_from: Annotated[
        str, typer.Option(help="`prompt`: prefill all of it. `question`: decode the question token by token.")
    ] = "prompt",
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts into the tokenizer's chat template.")] = False,
    squad: Annotated[Path | None, typer.Option(help="SQuAD's JSON, for the task qa_1.")] = None,
    hotpotqa: Annotated[Path | None, typer.Option(help="HotpotQA's JSON, for the task qa_2.")] = None,
    file: Annotated[
        list[Path] | None, typer.Option(help="JSON lines of LongBench or LongBench-Pro, repeatable.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="LongBench's own JSON of prompts, for --file.")] = None,
    text: Annotated[list[Path] | None, typer.Option(help="Text for perplexity, repeatable.")] = None,
    scored_tokens: Annotated[int, typer.Option(help="Newest tokens of a window of --text to decode and score.")] = 256,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at a time.")] = 1,
    plot: _Plot = None,
) -> None:
    """Ask a model long-context tasks and score its answers.

    Exit code 2 for bad input, 3 if the server fails.
    """
    if command.invoked_subcommand is not None:
        return
    _require_extra(_EXTRA | _EXTRA_OF_FILES if file else _EXTRA)
    from vllm_sparse_plugin.eval import longbench, metrics, report, results, tasks
    from vllm_sparse_plugin.eval.endpoints import Endpoint, EndpointError, Server, connect

    if output is None:
        raise ConfigurationError("output: got none, allowed: a file for the results")
    if decode_from not in results.DECODE_FROM:
        raise ConfigurationError(f"decode_from: got {decode_from!r}, allowed: {' or '.join(results.DECODE_FROM)}")
    engine = parse_additional_config(engine_args, "engine_args")
    if configuration := parse_additional_config(additional_config):
        engine["additional_config"] = configuration
    if attention_backend is not None:
        engine["attention_backend"] = attention_backend
    if engine and not in_process:
        raise ConfigurationError(f"{', '.join(engine)}: got a setting of the engine, allowed: with --in-process")
    report.check_plot(plot)
    console = _open_console()

    contexts, server = list(dict.fromkeys(context or [_CONTEXT])), None
    if not in_process:
        server = Server(connect(base_url, os.environ.get("OPENAI_API_KEY", "none")), model, concurrency)
        model = server.model
        if server.max_model_len is not None and max(contexts) > server.max_model_len:
            raise ConfigurationError(
                f"context: got {max(contexts)} tokens, allowed: at most the {server.max_model_len} of {model}"
            )
    if model is None:
        raise ConfigurationError("model: got none, allowed with --in-process: a folder or name")
    prompter = _open_prompter(tokenizer or model, chat)

    files = {option: path for option, path in (("squad", squad), ("hotpotqa", hotpotqa)) if path}
    names, left_out = tasks.choose_tasks(task or ([] if file or text else ["ruler"]), files)
    for name in left_out:
        console.print(f"{name} is left out: it needs a file, --{tasks.FILE_OPTIONS[name]}.")
    count = questions or _QUESTIONS
    planned = tasks.plan_tasks(names, files, prompter, contexts, count, seed)
    limit = None
    if text:
        planned += tasks.plan_perplexity(text, prompter, contexts, count, scored_tokens)
    if file:
        limit = max(context) if context else server and server.max_model_len
        if not limit:
            raise ConfigurationError("context: got none, allowed with --file here: the most tokens of a prompt")
        own = longbench.read_prompts(prompts) if prompts else {}
        for path in file:
            planned += longbench.plan_file(path, own, prompter, limit, questions)

    title = label or Path(model).name
    settings = {
        "label": title,
        "model": Path(model).name,
        "tokenizer": Path(tokenizer or model).name,
        "decode_from": decode_from,
        "chat": chat,
        "tasks": names,
        "contexts": context,
        "questions": questions,
        "seed": seed,
        "scored_tokens": scored_tokens,
        "file_tokens": limit,
        "files": _digests([*files.values(), *(file or []), *(text or []), *([prompts] if prompts else [])]),
        "engine": engine,
        "python": platform.python_version(),  # whose library is the haystack
    }
    held = results.check_results(output, settings)
    if missing := [each for each in planned if each.id not in held.results]:
        try:
            endpoint: Endpoint
            if server is None:
                from vllm_sparse_plugin.eval.engine import Engine

                forcing = decode_from == "question" or bool(text)
                endpoint = Engine(model, engine, max(contexts), forcing, concurrency)
            else:
                endpoint = server
            about = describe_run(Path(model), packages=[*_EXTRA.values(), *_EXTRA_OF_FILES.values()])
            if server is not None:
                about["server"] = {"vllm": server.version()}
            with output.open("a", encoding="utf-8") as lines:
                print(json.dumps({**about, "settings": settings}), file=lines, flush=True)
                for result in results.ask(endpoint, missing, decode_from, prompter, metrics.score, console, title):
                    print(result.model_dump_json(), file=lines, flush=True)
        except EndpointError as error:
            print(f"error: the model {model} {error}; the same command goes on from here", file=sys.stderr)
            raise typer.Exit(3) from None
    show([output], plot)


@app.command("show")
def show(
    results: Annotated[list[Path], typer.Argument(help="Files of `vllm-sparse eval`.")],
    plot: _Plot = None,
) -> None:
    """Print the scores of runs side by side, and draw them."""
    _require_extra(_EXTRA)
    from vllm_sparse_plugin.eval.report import check_plot, plot_scores, score_table
    from vllm_sparse_plugin.eval.results import read_results

    check_plot(plot)
    files = [read_results(path) for path in results]
    _open_console().print(score_table(files))
    if plot:
        plot_scores(files, plot)


@app.command("compare")
def compare(
    first: Annotated[Path, typer.Argument(help="File of `vllm-sparse eval`, such as of dense attention.")],
    second: Annotated[Path, typer.Argument(help="Another one, of the same tasks.")],
    plot: _Plot = None,
) -> None:
    """Print how much the second run's scores differ from the first's on the same items, and draw it."""
    _require_extra(_EXTRA)
    from vllm_sparse_plugin.eval.report import check_plot, difference_table, plot_differences
    from vllm_sparse_plugin.eval.results import read_results

    check_plot(plot)
    files = read_results(first), read_results(second)
    _open_console().print(difference_table(*files))
    if plot:
        plot_differences(*files, plot)


def _require_extra(packages: Mapping[str, str]) -> None:
    missing = [package for module, package in packages.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigurationError(
            f"vllm-sparse eval: got no {', '.join(missing)}, allowed: with the extra, "
            "pip install 'vllm-sparse-plugin[eval]'"
        )


def _open_console() -> Console:
    """A console whose tables are not squeezed where there is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def _open_prompter(name: str, chat: bool) -> Prompter:
    from transformers import AutoTokenizer

    from vllm_sparse_plugin.eval.items import Prompter

    try:
        return Prompter(AutoTokenizer.from_pretrained(name, local_files_only=True), chat)
    except (OSError, ValueError):
        raise ConfigurationError(
            f"tokenizer: got {name!r}, allowed: a folder with a tokenizer, or a name in Hugging Face's cache"
        ) from None


def _digests(paths: Sequence[Path]) -> dict[str, str]:
    """Return the beginning of each file's SHA-256, by its name.

    Raises:
        ConfigurationError: if two have the same name, by which items are known.
    """
    names = [path.name for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"file: got {name} twice, allowed: files of different names")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths}
