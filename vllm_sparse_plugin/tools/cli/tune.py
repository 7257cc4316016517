"""The command `vllm-sparse tune`: finds the cheapest settings that answer like dense attention."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import yaml

from vllm_sparse_plugin.config import KEY, resolve
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.names import BACKENDS
from vllm_sparse_plugin.tools.arguments import (
    budget_section,
    complete_backend,
    find_model,
    find_preset,
    parse_additional_config,
    read_prompts,
)
from vllm_sparse_plugin.tools.cores import serve_command
from vllm_sparse_plugin.tools.endings import BAD_INPUT, FAILED, open_console, undisturbed
from vllm_sparse_plugin.tools.extras import TABLES, require_packages
from vllm_sparse_plugin.tools.models import name_of
from vllm_sparse_plugin.tools.provenance import check_output, describe_run, write_output, writing_in
from vllm_sparse_plugin.tools.server import last_error, stop_group

if TYPE_CHECKING:
    from vllm_sparse_plugin.tools.eval.statistics import Estimate

BUDGETS = (256, 512, 1024, 2048, 4096)
_DENSE, _AGAIN = "dense", "dense-again"
_SELECTING, _EVICTING = ("unique",), ("streaming_llm", "snapkv", "pyramidkv", "h2o")
"""Default backends: for fewer bytes read, and for less memory."""
_STOP_SECONDS = 10
_LOST = {"agreement": "tokens", "overlap": "the overlap", "likelihood": "the likelihood per token"}
"""Words for the loss, by measure."""

Model = Annotated[str, typer.Option(help="Folder, or a name that is downloaded.")]
Prompts = Annotated[
    Path,
    typer.Option(
        help="JSON lines with `prompt` and an optional `completion`, whose tokens are decoded. Without a completion: "
        "the newest prompt tokens."
    ),
]
MostExcess = Annotated[
    float,
    typer.Option(
        help="Largest excess loss. With `agreement`: the share of tokens that may change beyond the noise of dense "
        "attention; 0.01 is 1 % of tokens."
    ),
]
Measure = Annotated[
    Literal["agreement", "overlap", "likelihood"],
    typer.Option(
        help="`agreement`: share of tokens with dense attention's most likely next token. `overlap`: overlap of the "
        "next-token distributions. `likelihood`: likelihood of the text per token."
    ),
]
Minimise = Annotated[
    Literal["bytes", "memory"],
    typer.Option(help="`bytes`: keys, values and page statistics read per decode step. `memory`: KV cache kept."),
]
Backends = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Attention backend to try, repeatable. Default: {_SELECTING[0]}; with --minimise memory: "
        f"{', '.join(_EVICTING)}.",
        autocompletion=complete_backend,
    ),
]
Budgets = Annotated[
    list[int] | None,
    typer.Option(
        help="Budget to try, repeatable: tokens to read per KV head, or to keep if the backend evicts. Default: "
        f"{', '.join(map(str, BUDGETS))}."
    ),
]
ScoredTokens = Annotated[int, typer.Option(min=1, help="Tokens to decode and compare per prompt.")]
EngineArguments = Annotated[str, typer.Option(help="Arguments of vllm.LLM.", metavar="JSON")]
Output = Annotated[
    Path | None,
    typer.Option(help="Folder of results, plot and preset. Default: tune-MODEL. The same command continues a run."),
]


@dataclass(frozen=True)
class Setting:
    """A backend with a budget to try."""

    name: str
    backend: str | None
    """None for vLLM's own attention."""
    section: dict[str, Any]
    """Settings of `sparse_attention` besides the backend's preset."""

    def options(self, shared: Mapping[str, Any]) -> list[str]:
        """Return the options of `vllm-sparse eval` for this setting. `shared`: further keys of `additional_config`."""
        if self.backend is None:
            return []
        additional = {**shared, KEY: self.section}
        return ["--attention-backend", self.backend, "--additional-config", json.dumps(additional)]

    def preset(self, model: str, about: str) -> str:
        """Return these settings as a file for the key `config` of `sparse_attention`."""
        model = " ".join(model.split())
        return f"# For {model}, written by vllm-sparse tune: {about}.\n{yaml.safe_dump(self.section, sort_keys=False)}"


def _as_row(kept: Estimate | None) -> dict[str, float | None]:
    """Return an estimate for a JSON line. JSON has no infinity: the unknown interval of one prompt becomes null."""
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
    """Find the cheapest settings that still answer like dense attention on your prompts.

    Each setting runs in a separate engine, decodes the same tokens as dense attention, and is compared at every token.
    Dense attention runs twice, the second time in other batches: the difference is noise. The excess of a setting is
    its loss beyond that noise.

    Every other prompt chooses the settings, the rest judge them: the whole 95 % interval of their excess must lie below
    --most-excess in both halves.

    Prints and draws all settings, writes all measures to `frontier.jsonl`, and writes the chosen settings as a preset.
    Use the preset with `--additional-config '{"sparse_attention": {"config": "PATH"}}'`.

    Exit codes:

    - 1: no setting is shown to lose at most --most-excess
    - 2: bad input
    - 3: an engine failed
    """
    require_packages("tune", TABLES)
    if not 0 <= most_excess < 1:
        raise ConfigurationError(f"most_excess: got {most_excess}, allowed: 0 or more, below 1")
    backends = attention_backend or (_SELECTING if minimise == "bytes" else _EVICTING)
    settings = list(_settings(backends, budget))
    additional = _shared_config(parse_additional_config(engine_args, "engine_args"))
    count = len(read_prompts(prompts))
    model = str(find_model(model))
    name = name_of(Path(model))
    folder = output or Path(f"tune-{name}")
    frontier, picture, preset = (folder / name for name in ("frontier.jsonl", "frontier.png", "sparse.yaml"))
    from vllm_sparse_plugin.tools.eval.progress import show_progress
    from vllm_sparse_plugin.tools.eval.results import read_results
    from vllm_sparse_plugin.tools.eval.tuning import (
        OBJECTIVES,
        choose,
        frontier_table,
        judge,
        needed_prompts,
        plot_frontier,
    )

    console = open_console()
    shared = ["--in-process", "--model", model, "--completions", str(prompts), "--scored-tokens", str(scored_tokens)]
    results = {}
    with writing_in(folder, "output"):
        for path in (frontier, picture, preset):
            check_output(path, "output")
        if count < (needed := needed_prompts(most_excess, scored_tokens)):
            console.print(
                f"{count} prompts are few: {count // 2} judge, and cannot show a loss of at most {most_excess:.1%} for "
                f"settings that change nothing. Give {needed} or more, more --scored-tokens or a larger "
                "--most-excess.",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
        for setting in (Setting(_DENSE, None, {}), Setting(_AGAIN, None, {}), *settings):
            path = folder / f"{setting.name}.jsonl"
            options = [*shared, "--engine-args", engine_args, *setting.options(additional)]
            with show_progress(console, f"{setting.name}: decoding the prompts in a separate engine"):
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
        lines[-1] |= {"choosing": _as_row(candidate.choosing), "judging": _as_row(candidate.judging)}
    write_output(frontier, "".join(json.dumps(line) + "\n" for line in lines), "output")
    plot_frontier(candidates, most_excess, minimise, picture)
    most = f"{100 * most_excess:g}%"
    if chosen is None or chosen.judging.high > most_excess:
        if chosen is None:
            reason = "No setting that reads or keeps less is shown to lose"
        else:
            reason = f"{chosen.name} was chosen on half of the prompts, but the other half does not show that it loses"
        console.print(
            f"{reason} at most {most} of {_LOST[measure]} beyond the noise of dense attention. Give more prompts, "
            "raise --most-excess, or serve dense attention.",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        if preset.exists():
            # It is of another bound or other settings, but a server would read it as the result of this run.
            preset.unlink()
            console.print(f"Removed {preset} of an earlier run.", soft_wrap=True)
        raise typer.Exit(1)
    setting = next(each for each in settings if each.name == chosen.name)
    about = (
        f"{chosen.judging.value:+.1%} of {_LOST[measure]} lost beyond the noise of dense attention "
        f"(at most {chosen.judging.high:.1%}), {OBJECTIVES[minimise].share(chosen):.1%} of its "
        f"{OBJECTIVES[minimise].heading}, on {chosen.judging.count} prompts of {prompts.name} that did not choose it"
    )
    write_output(preset, setting.preset(name, about), "output")
    print(f"Wrote {preset}. To serve with it:")
    served = json.dumps({**additional, KEY: {"config": str(preset)}})
    options = ["--attention-backend", str(setting.backend), "--additional-config", served]
    print(f"{serve_command()} {shlex.join([model, *options])}")


def _settings(backends: Sequence[str], given: Sequence[int] | None) -> Iterator[Setting]:
    """Yield every backend with every budget. A backend without a budget comes once.

    Raises:
        ConfigurationError: a backend is unknown, or a budget is not allowed for it or has no effect.
    """
    names = list(dict.fromkeys(map(str.lower, backends)))
    sections = {name: budget_section(find_preset(name)) for name in names}
    if given and not any(sections.values()):
        raise ConfigurationError(
            f"budget: got {given[0]} with {', '.join(names)}, where it has no effect, allowed: none, or with a "
            "backend that has a budget"
        )
    for name, of_budget in sections.items():
        if of_budget is None:
            # The results of vLLM's own dense attention already have the name `dense`.
            yield Setting("backend-dense" if name == _DENSE else name, name, {})
            continue
        key, values = of_budget
        for tokens in dict.fromkeys(given or BUDGETS):
            section = {key: {**values, "budget_tokens": tokens}}
            resolve(section, find_preset(name))
            yield Setting(f"{name}-{tokens}", name, section)


def _shared_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `additional_config` in arguments of the engine. The option of a setting would replace it.

    Raises:
        ConfigurationError: the arguments choose sparse attention, which the reference would get, or alone would get.
    """
    backend, additional = arguments.get("attention_backend"), arguments.get("additional_config") or {}
    if str(backend).upper() in BACKENDS:
        raise ConfigurationError(
            f"engine_args: got attention_backend {backend!r}, allowed: --attention-backend for settings to try, as "
            "these arguments also hold for dense attention"
        )
    if not isinstance(additional, dict):
        raise ConfigurationError(f"engine_args: got additional_config {additional!r}, allowed: a JSON object")
    if KEY in additional:
        raise ConfigurationError(
            f"engine_args: got additional_config.{KEY}, allowed: other keys, as each setting to try has its own"
        )
    return additional


def _evaluate(options: list[str], label: str, path: Path) -> None:
    """Run `vllm-sparse eval`, which continues an existing result file.

    Raises:
        typer.Exit: after one sentence; code 2 if the options are refused, code 3 if the engine fails.
    """
    command = [sys.executable, "-m", "vllm_sparse_plugin", "eval", *options, "--label", label, "--output", str(path)]
    code, log = _run(command)
    if not code:
        return
    refusals = [line.removeprefix("error: ") for line in log.splitlines() if line.startswith("error: ")]
    reason = refusals[-1] if refusals else last_error(log) or "no reason given"
    is_refused = code == BAD_INPUT
    about = "" if is_refused else f"the engine of {label} ended with exit code {code}: "
    print(f"error: {about}{reason}", file=sys.stderr)
    raise typer.Exit(BAD_INPUT if is_refused else FAILED)


def _run(command: list[str]) -> tuple[int, str]:
    """Run a command. Return its exit code and stderr. The command and its engine end with this process."""
    with tempfile.TemporaryFile() as log:
        process = None
        try:
            # A signal must not arrive between the start of the process and the block that ends it.
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
