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
    find_model,
    find_preset,
    parse_additional_config,
    read_prompts,
)
from vllm_sparse_plugin.tools.cores import serve_command
from vllm_sparse_plugin.tools.endings import BAD_INPUT, FailureError, open_console, say
from vllm_sparse_plugin.tools.eval.progress import show_progress
from vllm_sparse_plugin.tools.extras import TABLES, require_packages
from vllm_sparse_plugin.tools.models import name_of
from vllm_sparse_plugin.tools.provenance import check_output, describe_run, explain_writing, write_output
from vllm_sparse_plugin.tools.server import group_of, last_error

if TYPE_CHECKING:
    from vllm_sparse_plugin.tools.eval.statistics import Estimate

BUDGETS = (256, 512, 1024, 2048, 4096)
_DENSE, _AGAIN = "dense", "dense-again"
_SELECTING, _EVICTING = ("unique",), ("streaming_llm", "snapkv", "pyramidkv", "h2o")
"""Default backends: for fewer bytes read, and for less memory."""
_LOST = {"agreement": "tokens", "overlap": "the overlap", "likelihood": "the likelihood per token"}
"""Words for the loss, by measure."""


@dataclass(frozen=True)
class Setting:
    """A backend with a budget to try."""

    name: str
    backend: str | None
    """None for vLLM's own attention."""
    section: dict[str, Any]
    """Settings of `sparse_attention` besides the backend's preset."""


def tune(
    model: Annotated[str, typer.Option(help="Folder, or a name that is downloaded.")],
    prompts: Annotated[
        Path,
        typer.Option(
            help="JSON lines with `prompt` and an optional `completion`, whose tokens are decoded. Without a "
            "completion: the newest prompt tokens."
        ),
    ],
    most_excess: Annotated[
        float,
        typer.Option(
            help="Largest excess loss. With `agreement`: the share of tokens that may change beyond the noise of dense "
            "attention; 0.01 is 1 % of tokens."
        ),
    ] = 0.01,
    measure: Annotated[
        Literal["agreement", "overlap", "likelihood"],
        typer.Option(
            help="`agreement`: share of tokens with dense attention's most likely next token. `overlap`: overlap of "
            "the next-token distributions. `likelihood`: likelihood of the text per token."
        ),
    ] = "agreement",
    minimise: Annotated[
        Literal["bytes", "memory"],
        typer.Option(help="`bytes`: keys, values and page statistics read per decode step. `memory`: KV cache kept."),
    ] = "bytes",
    attention_backend: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Attention backend to try, repeatable. Default: {_SELECTING[0]}; with --minimise memory: "
            f"{', '.join(_EVICTING)}.",
        ),
    ] = None,
    budget: Annotated[
        list[int] | None,
        typer.Option(
            help="Budget to try, repeatable: tokens to read per KV head, or to keep if the backend evicts. Default: "
            f"{', '.join(map(str, BUDGETS))}."
        ),
    ] = None,
    scored_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode and compare per prompt.")] = 128,
    engine_args: Annotated[str, typer.Option(help="Arguments of vllm.LLM.", metavar="JSON")] = "{}",
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of results and preset. Default: tune-MODEL. The same command continues a run."),
    ] = None,
) -> None:
    """Find the cheapest settings that still answer like dense attention on your prompts.

    Each setting runs in a separate engine, decodes the same tokens as dense attention, and is compared at every token.
    Dense attention runs twice, the second time in other batches: the difference is noise. The excess of a setting is
    its loss beyond that noise.

    Every other prompt chooses the settings, the rest judge them: the whole 95 % interval of their excess must lie below
    --most-excess in both halves.

    Prints all settings, writes all measures to `frontier.jsonl`, and writes the chosen settings as a preset.
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
    frontier, preset = folder / "frontier.jsonl", folder / "sparse.yaml"
    from vllm_sparse_plugin.tools.eval.results import read_results
    from vllm_sparse_plugin.tools.eval.tuning import OBJECTIVES, choose, frontier_table, judge, needed_prompts

    console = open_console()
    shared = ["--in-process", "--model", model, "--completions", str(prompts), "--scored-tokens", str(scored_tokens)]
    shared += ["--engine-args", engine_args]
    results = {}
    with explain_writing(folder, "output", "folder"):
        folder.mkdir(parents=True, exist_ok=True)
    for path in (frontier, preset):
        check_output(path, "output")
    if count < (needed := needed_prompts(most_excess, scored_tokens)):
        say(
            console,
            f"{count} prompts are few: {count // 2} judge, and cannot show a loss of at most {most_excess:.1%} for "
            f"settings that change nothing. Give {needed} or more, more --scored-tokens or a larger "
            "--most-excess.",
        )
    for setting in (Setting(_DENSE, None, {}), Setting(_AGAIN, None, {}), *settings):
        path = folder / f"{setting.name}.jsonl"
        options = [*shared, "--label", setting.name, "--output", str(path)]
        if setting.backend is not None:
            configuration = json.dumps({**additional, KEY: setting.section})
            options += ["--attention-backend", setting.backend, "--additional-config", configuration]
        elif setting.name == _AGAIN:
            options.append("--other-batches")
        with show_progress(console, f"{setting.name}: decoding the prompts in a separate engine"):
            _evaluate(options, setting.name)
        results[setting.name] = read_results(path)
    dense = results[_DENSE], results[_AGAIN]
    candidates = [judge(each.name, measure, *dense, results[each.name]) for each in settings]
    chosen = choose(candidates, most_excess, minimise)
    console.print(frontier_table(candidates, chosen, minimise))
    lines: list[dict[str, Any]] = [describe_run(Path(model)) | {"scored_tokens": scored_tokens}]
    for setting, candidate in zip(settings, candidates, strict=True):
        kept = candidate.kept.items()
        lines.append(
            {
                "setting": setting.name,
                "section": setting.section,
                **candidate.shares,
                **{measured: _as_row(found.found) for measured, found in kept},
                "dense_again": {measured: _as_row(found.own) for measured, found in kept},
                "excess": {measured: _as_row(found.excess) for measured, found in kept},
                "choosing": _as_row(candidate.choosing),
                "judging": _as_row(candidate.judging),
            }
        )
    write_output(frontier, "".join(json.dumps(line) + "\n" for line in lines), "output")
    most = f"{100 * most_excess:g}%"
    if chosen is None or chosen.judging.high > most_excess:
        if chosen is None:
            reason = "No setting that reads or keeps less is shown to lose"
        else:
            reason = f"{chosen.name} was chosen on half of the prompts, but the other half does not show that it loses"
        say(
            console,
            f"{reason} at most {most} of {_LOST[measure]} beyond the noise of dense attention. Give more prompts, "
            "raise --most-excess, or serve dense attention.",
        )
        if preset.exists():
            # It is of another bound or other settings, but a server would read it as the result of this run.
            preset.unlink()
            say(console, f"Removed {preset} of an earlier run.")
        raise typer.Exit(1)
    setting = next(each for each in settings if each.name == chosen.name)
    heading, share, _ = OBJECTIVES[minimise]
    about = (
        f"# For {' '.join(name.split())}, written by vllm-sparse tune: {chosen.judging.value:+.1%} of "
        f"{_LOST[measure]} lost beyond the noise of dense attention (at most {chosen.judging.high:.1%}), "
        f"{chosen.shares[share]:.1%} of its {heading}, on {chosen.judging.count} prompts of {prompts.name} that did "
        "not choose it.\n"
    )
    write_output(preset, about + yaml.safe_dump(setting.section, sort_keys=False), "output")
    print(f"Wrote {preset}. To serve with it:")
    served = json.dumps({**additional, KEY: {"config": str(preset)}})
    options = ["--attention-backend", str(setting.backend), "--additional-config", served]
    print(f"{serve_command()} {shlex.join([model, *options])}")


def _as_row(kept: Estimate | None) -> dict[str, float | None]:
    """Return an estimate for a JSON line. JSON has no infinity: the unknown interval of one prompt becomes null."""
    assert kept is not None
    return {name: number if math.isfinite(number) else None for name, number in asdict(kept).items()}


def _settings(backends: Sequence[str], given: Sequence[int] | None) -> Iterator[Setting]:
    """Yield every backend with every budget. A backend without a budget comes once."""
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
    """Return the `additional_config` in arguments of the engine. The option of a setting would replace it."""
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


def _evaluate(options: list[str], label: str) -> None:
    """Run `vllm-sparse eval`, which continues an existing result file. Pass on what it refuses."""
    code, log = _run([sys.executable, "-m", "vllm_sparse_plugin", "eval", *options])
    refusals = [line.removeprefix("error: ") for line in log.splitlines() if line.startswith("error: ")]
    reason = refusals[-1] if refusals else last_error(log) or "no reason given"
    if code == BAD_INPUT:
        raise ConfigurationError(reason)
    if code:
        raise FailureError(f"the engine of {label} ended with exit code {code}: {reason}")


def _run(command: list[str]) -> tuple[int, str]:
    """Run a command. Return its exit code and stderr. The command and its engine end with this process."""
    with tempfile.TemporaryFile() as log, group_of(command, stdout=subprocess.DEVNULL, stderr=log) as process:
        code = process.wait()
        log.seek(0)
        return code, log.read().decode(errors="replace")
