"""The command `vllm-sparse tune`: the settings that read or keep least and answer like dense attention on prompts."""

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
_DENSE, _AGAIN = "dense", "dense-again"
_SELECTING, _EVICTING = ("unique",), ("streaming_llm", "snapkv", "pyramidkv", "h2o")
"""Backends that are tried unless others are named: those that read least, and those that save memory."""
_STOP_SECONDS = 10
_LOST = {"agreement": "tokens", "overlap": "the overlap", "likelihood": "the likelihood per token"}
"""Words for what is lost, by measure."""

Model = Annotated[str, typer.Option(help="Folder or name of the model.")]
Prompts = Annotated[
    Path,
    typer.Option(
        help="JSON lines with `prompt` and perhaps `completion`, whose tokens are decoded; the prompt's own newest "
        "where there is none."
    ),
]
MostExcess = Annotated[
    float,
    typer.Option(
        help="Largest excess: the share of tokens that may change beyond those that dense attention changes itself in "
        "other batches; with other measures, of what they measure. 0.01 is 1 % of tokens."
    ),
]
Measure = Annotated[
    Literal["agreement", "overlap", "likelihood"],
    typer.Option(
        help="`agreement`: share of tokens whose most likely successor is dense attention's; `overlap`: of the "
        "distributions of the next token; `likelihood`: of the text, per token."
    ),
]
Minimise = Annotated[
    Literal["bytes", "memory"],
    typer.Option(
        help="`bytes`: keys, values and page statistics that a decode step reads; `memory`: what the KV cache keeps."
    ),
]
Backends = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Attention backend to try, repeatable; {_SELECTING[0]}, and with --minimise memory "
        f"{', '.join(_EVICTING)}.",
        autocompletion=complete_backend,
    ),
]
Budgets = Annotated[
    list[int] | None,
    typer.Option(
        help="Keys to read or, where the cache gives some back, to keep, with backends that have such a budget, "
        f"repeatable; {', '.join(map(str, BUDGETS))}."
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


def _as_row(kept: Estimate | None) -> dict[str, float | None]:
    """Returns an estimate for a line of JSON, which has no infinite numbers: the interval of one prompt is unknown."""
    numbers = {} if kept is None else asdict(kept)
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}


def tune(
    model: Model,
    prompts: Prompts,
    most_excess: MostExcess = 0.01,
    measure: Measure = "agreement",
    minimise: Minimise = "bytes",
    attention_backend: Backends = None,
    budget: Budgets = None,
    scored_tokens: ScoredTokens = 128,
    engine_args: EngineArguments = "{}",
    output: Output = None,
) -> None:
    """Find the settings that read or keep least of the KV cache and answer like dense attention on your prompts.

    Each setting decodes the same tokens as dense attention, in an engine of its own, and is compared with it at every
    token. Dense attention runs twice, the second time in other batches: what changes then is noise, and the excess of a
    setting is what it changes beyond that. Prints all settings, draws them, writes them by every measure
    (`frontier.jsonl`), and writes a preset with those that were chosen, to be given as
    `--additional-config '{"sparse_attention": {"config": "PATH"}}'`. Exit code 1 if all exceed --most-excess, 2 for bad
    input, 3 if an engine fails.
    """
    require_packages("tune", TABLES)
    if not 0 <= most_excess < 1:
        raise ConfigurationError(f"most_excess: got {most_excess}, allowed: 0 or more, below 1")
    backends = attention_backend or (_SELECTING if minimise == "bytes" else _EVICTING)
    settings = list(_settings(backends, budget))
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
    from vllm_sparse_plugin.tools.eval.tuning import OBJECTIVES, choose, frontier_table, judge, plot_frontier

    console = open_console()
    shared = ["--in-process", "--model", model, "--completions", str(prompts), "--scored-tokens", str(scored_tokens)]
    results = {}
    for setting in (Setting(_DENSE, None, {}), Setting(_AGAIN, None, {}), *settings):
        path = folder / f"{setting.name}.jsonl"
        options = [*shared, "--engine-args", engine_args, *setting.options()]
        with show_progress(console, f"{setting.name}: decoding the prompts in an engine of its own"):
            _evaluate([*options, "--other-batches"] if setting.name == _AGAIN else options, setting.name, path)
        results[setting.name] = read_results(path)
    dense = results[_DENSE], results[_AGAIN]
    candidates = [judge(each.name, measure, *dense, results[each.name]) for each in settings]
    chosen = choose(candidates, most_excess, minimise)
    console.print(frontier_table(candidates, chosen, minimise))
    lines: list[dict[str, Any]] = [describe_run(Path(model)) | {"scored_tokens": scored_tokens}]
    for setting, candidate in zip(settings, candidates, strict=True):
        shares = ("key_read_share", "key_kept_share", "kv_read_share", "memory_share")
        lines.append({"setting": setting.name, "section": setting.section})
        lines[-1] |= {share: getattr(candidate, share) for share in shares}
        lines[-1] |= {measured: _as_row(kept.found) for measured, kept in candidate.kept.items()}
        lines[-1]["dense_again"] = {measured: _as_row(kept.own) for measured, kept in candidate.kept.items()}
        lines[-1]["excess"] = {measured: _as_row(kept.excess) for measured, kept in candidate.kept.items()}
    write_output(frontier, "".join(json.dumps(line) + "\n" for line in lines), "output")
    plot_frontier(candidates, most_excess, minimise, picture)
    if chosen is None:
        console.print(
            f"Each setting that leaves anything out loses more than {most_excess:.1%} of {_LOST[measure]} beyond dense "
            "attention's own noise: serve dense, or raise --most-excess."
        )
        raise typer.Exit(1)
    setting = next(each for each in settings if each.name == chosen.name)
    about = (
        f"{chosen.excess.value:+.1%} of {_LOST[measure]} lost beyond dense attention's own noise, "
        f"{OBJECTIVES[minimise].share(chosen):.1%} of its {OBJECTIVES[minimise].heading}, "
        f"on {chosen.excess.count} prompts of {prompts.name}"
    )
    write_output(preset, setting.preset(name, about), "output")
    if chosen.excess.high > most_excess:
        console.print(f"The interval of {chosen.name} reaches above {most_excess:.1%}; more prompts would say more.")
    print(f"Wrote {preset}. To serve with it:")
    additional = json.dumps({KEY: {"config": str(preset)}})
    options = ["--attention-backend", str(setting.backend), "--additional-config", additional]
    print(f"{serve_command()} {shlex.join([model, *options])}")


def _settings(backends: Sequence[str], given: Sequence[int] | None) -> Iterator[Setting]:
    """Every backend with every budget, and once if it has none.

    Raises:
        ConfigurationError: for an unknown backend, a budget that it does not take, and budgets that move nothing.
    """
    names = list(dict.fromkeys(map(str.lower, backends)))
    sections = {name: _budget_section(find_preset(name)) for name in names}
    if given and not any(sections.values()):
        raise ConfigurationError(
            f"budget: got {given[0]} with {', '.join(names)}, where it would move nothing, allowed: none, or with a "
            "backend that has a budget"
        )
    for name, of_budget in sections.items():
        if of_budget is None:
            # Results of dense attention of vLLM's own have that name.
            yield Setting("backend-dense" if name == _DENSE else name, name, {})
            continue
        key, values = of_budget
        for tokens in dict.fromkeys(given or BUDGETS):
            section = {key: {**values, "budget_tokens": tokens}}
            resolve(section, find_preset(name))
            yield Setting(f"{name}-{tokens}", name, section)


def _budget_section(preset: str) -> tuple[str, dict[str, Any]] | None:
    """The section of a preset whose budget says what is read or, without one, what is kept, and what it must name; None
    where there is none."""
    resolved = resolve(None, preset)
    if resolved.lossless is not None:
        # Its budget moves drafts alone.
        return None
    if "budget_tokens" in type(resolved.selection).model_fields:
        return "selection", {"policy": resolved.selection.name()}
    if resolved.compaction is not None:
        return "compaction", {"method": resolved.compaction.name()}
    return None


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
