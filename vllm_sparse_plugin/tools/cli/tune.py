"""The command `vllm-sparse tune`: the settings that read least and keep a chosen quality on the user's prompts."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import yaml

from vllm_sparse_plugin.config import KEY, resolve
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import complete_backend, find_preset, parse_additional_config, read_prompts
from vllm_sparse_plugin.tools.cores import serve_command
from vllm_sparse_plugin.tools.endings import BAD_INPUT, FAILED, open_console, undisturbed
from vllm_sparse_plugin.tools.extras import TABLES, require_packages
from vllm_sparse_plugin.tools.provenance import check_output, describe_run, write_output
from vllm_sparse_plugin.tools.server import last_error, stop_group

if TYPE_CHECKING:
    from vllm_sparse_plugin.tools.eval.statistics import Estimate

BUDGETS = (256, 512, 1024, 2048, 4096)
_DENSE = "dense"
_STOP_SECONDS = 10

Model = Annotated[str, typer.Option(help="Folder or name of the model.")]
Prompts = Annotated[
    Path,
    typer.Option(
        help="JSON lines with `prompt` and perhaps `completion`, whose tokens are decoded; the prompt's own newest "
        "where there is none."
    ),
]
Target = Annotated[float, typer.Option(help="What is to be kept of dense attention; 1 is everything.")]
Measure = Annotated[
    Literal["agreement", "overlap", "likelihood"],
    typer.Option(
        help="`agreement`: share of tokens whose most likely successor is dense attention's; `overlap`: of the "
        "distributions of the next token; `likelihood`: of the text, per token."
    ),
]
Backends = Annotated[
    list[str] | None,
    typer.Option(help="Attention backend to try, repeatable; unique if left out.", autocompletion=complete_backend),
]
Budgets = Annotated[
    list[int] | None,
    typer.Option(
        help=f"`budget_tokens` to try with backends that have it, repeatable; {', '.join(map(str, BUDGETS))}."
    ),
]
ScoredTokens = Annotated[int, typer.Option(min=1, help="Tokens of each prompt to decode and compare.")]
EngineArguments = Annotated[str, typer.Option(help="Arguments of vllm.LLM.", metavar="JSON")]
Output = Annotated[
    Path | None,
    typer.Option(help="Folder for results, picture and preset; tune-MODEL if left out. A run goes on where it was."),
]


@dataclass(frozen=True)
class Setting:
    """A backend with a budget, to be tried."""

    name: str
    backend: str | None
    """None for vLLM's own attention."""
    section: dict[str, Any]
    """Settings of `sparse_attention` beside the backend's preset."""

    def options(self) -> list[str]:
        """Options of `vllm-sparse eval` that choose it."""
        if self.backend is None:
            return []
        return ["--attention-backend", self.backend, "--additional-config", json.dumps({KEY: self.section})]

    def preset(self, model: str, about: str) -> str:
        """A file for the key `config` of `sparse_attention` that has the settings."""
        model = " ".join(model.split())
        return f"# For {model}, written by vllm-sparse tune: {about}.\n{yaml.safe_dump(self.section, sort_keys=False)}"


def _as_row(kept: Estimate) -> dict[str, float | None]:
    """Returns an estimate for a line of JSON, which has no infinite numbers: the interval of one prompt is unknown."""
    return {name: number if math.isfinite(number) else None for name, number in asdict(kept).items()}


def tune(
    model: Model,
    prompts: Prompts,
    target: Target = 0.99,
    measure: Measure = "agreement",
    attention_backend: Backends = None,
    budget: Budgets = None,
    scored_tokens: ScoredTokens = 128,
    engine_args: EngineArguments = "{}",
    output: Output = None,
) -> None:
    """Find the settings that read least of the KV cache and keep a chosen quality on your prompts.

    Each setting decodes the same tokens as dense attention, in an engine of its own, and is compared with it at every
    token. Prints all of them by one measure, draws them, writes them by every measure (`frontier.jsonl`), and writes a
    preset with those that were chosen, to be given as
    `--additional-config '{"sparse_attention": {"config": "PATH"}}'`. Exit code 1 if none keeps the target, 2 for bad
    input, 3 if an engine fails.
    """
    require_packages("tune", TABLES)
    if not 0 < target <= 1:
        raise ConfigurationError(f"target: got {target}, allowed: more than 0, up to 1")
    settings = list(_settings(attention_backend or ["unique"], budget or BUDGETS))
    parse_additional_config(engine_args, "engine_args")
    read_prompts(prompts)
    name = Path(model).name
    folder = output or Path(f"tune-{name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"output: got {str(folder)!r} ({error.strerror}), allowed: a folder") from None
    frontier, picture, preset = (folder / name for name in ("frontier.jsonl", "frontier.png", "sparse.yaml"))
    for path in (frontier, picture, preset):
        check_output(path, "output")
    from vllm_sparse_plugin.tools.eval.progress import show_progress
    from vllm_sparse_plugin.tools.eval.results import read_results
    from vllm_sparse_plugin.tools.eval.tuning import choose, frontier_table, judge, plot_frontier

    console = open_console()
    shared = ["--in-process", "--model", model, "--completions", str(prompts), "--scored-tokens", str(scored_tokens)]
    results = {}
    for setting in (Setting(_DENSE, None, {}), *settings):
        path = folder / f"{setting.name}.jsonl"
        with show_progress(console, f"{setting.name}: decoding the prompts in an engine of its own"):
            _evaluate([*shared, "--engine-args", engine_args, *setting.options()], setting.name, path)
        results[setting.name] = read_results(path)
    candidates = [judge(each.name, measure, results[_DENSE], results[each.name]) for each in settings]
    chosen = choose(candidates, target)
    console.print(frontier_table(candidates, measure, chosen))
    lines: list[dict[str, Any]] = [describe_run(Path(model)) | {"scored_tokens": scored_tokens}]
    for setting, candidate in zip(settings, candidates, strict=True):
        found = {measured: _as_row(kept) for measured, kept in candidate.kept.items()}
        lines.append({"setting": setting.name, "section": setting.section, "kv_read_share": candidate.kv_read_share})
        lines[-1] |= found
    write_output(frontier, "".join(json.dumps(line) + "\n" for line in lines), "output")
    plot_frontier(candidates, measure, target, picture)
    if chosen is None:
        console.print(
            f"None that leaves anything out keeps {target:g} of dense attention's {measure}: serve dense, "
            "or ask for less."
        )
        raise typer.Exit(1)
    setting = next(each for each in settings if each.name == chosen.name)
    about = f"{measure} {chosen.quality.value:.3f} on {chosen.quality.count} prompts of {prompts.name}"
    write_output(preset, setting.preset(name, about), "output")
    if chosen.quality.low < target:
        console.print(f"The interval of {chosen.name} reaches below {target:g}; more prompts would say more.")
    print(f"Wrote {preset}. To serve with it:")
    additional = json.dumps({KEY: {"config": str(preset)}})
    options = ["--attention-backend", str(setting.backend), "--additional-config", additional]
    print(f"{serve_command()} {shlex.join([model, *options])}")


def _settings(backends: Sequence[str], budgets: Sequence[int]) -> Iterator[Setting]:
    """Every backend with every budget, and once if it has none.

    Raises:
        ConfigurationError: for an unknown backend or a budget that it does not take.
    """
    for backend in dict.fromkeys(map(str.lower, backends)):
        preset = find_preset(backend)
        selection = resolve(None, preset).selection
        if "budget_tokens" not in type(selection).model_fields:
            # Results of dense attention of vLLM's own have that name.
            yield Setting("backend-dense" if backend == _DENSE else backend, backend, {})
            continue
        for tokens in dict.fromkeys(budgets):
            section = {"selection": {"policy": selection.policy, "budget_tokens": tokens}}
            resolve(section, preset)
            yield Setting(f"{backend}-{tokens}", backend, section)


def _evaluate(options: list[str], label: str, path: Path) -> None:
    """Run `vllm-sparse eval`, which goes on with what the file holds already.

    Raises:
        typer.Exit: after a sentence, with code 2 if it refuses the options and with code 3 if its engine fails.
    """
    command = [sys.executable, "-m", "vllm_sparse_plugin", "eval", *options, "--label", label, "--output", str(path)]
    code, log = _run(command)
    if not code:
        return
    refusals = [line.removeprefix("error: ") for line in log.splitlines() if line.startswith("error: ")]
    said = refusals[-1] if refusals else last_error(log) or "it gave no reason"
    is_refused = code == BAD_INPUT
    about = "" if is_refused else f"the engine of {label} ended with exit code {code}: "
    print(f"error: {about}{said}", file=sys.stderr)
    raise typer.Exit(BAD_INPUT if is_refused else FAILED)


def _run(command: list[str]) -> tuple[int, str]:
    """Run a command and return its exit code and what it wrote to stderr; end it with this one, its engine too."""
    with tempfile.TemporaryFile() as log:
        process = None
        try:
            # A signal must not come between the start of the process and the block that ends it.
            with undisturbed():
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
                )
            code = process.wait()
        finally:
            if process is not None:
                stop_group(process, _STOP_SECONDS)
        log.seek(0)
        return code, log.read().decode(errors="replace")
