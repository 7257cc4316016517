"""The command `vllm-sparse tune`: the settings that read least and keep a chosen quality on the user's prompts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import yaml
from rich.console import Console

from vllm_sparse_plugin.config import KEY, resolve
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import complete_backend, find_preset, parse_additional_config, read_prompts
from vllm_sparse_plugin.tools.provenance import describe_run, open_output

if TYPE_CHECKING:
    from vllm_sparse_plugin.tools.eval.statistics import Estimate

BUDGETS = (256, 512, 1024, 2048, 4096)
_DENSE = "dense"

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
    from vllm_sparse_plugin.tools.eval.results import read_results
    from vllm_sparse_plugin.tools.eval.tuning import choose, frontier_table, judge, plot_frontier

    console = Console()
    shared = ["--in-process", "--model", model, "--completions", str(prompts), "--scored-tokens", str(scored_tokens)]
    results = {}
    for setting in (Setting(_DENSE, None, {}), *settings):
        path = folder / f"{setting.name}.jsonl"
        with console.status(f"{setting.name}: decoding the prompts in an engine of its own"):
            _evaluate([*shared, "--engine-args", engine_args, *setting.options()], setting.name, path)
        results[setting.name] = read_results(path)
    candidates = [judge(each.name, measure, results[_DENSE], results[each.name]) for each in settings]
    with open_output(folder / "frontier.jsonl", "output") as file:
        file.write(json.dumps(describe_run(Path(model)) | {"scored_tokens": scored_tokens}) + "\n")
        for setting, candidate in zip(settings, candidates, strict=True):
            found = {measured: _as_row(kept) for measured, kept in candidate.kept.items()}
            row = {"setting": setting.name, "section": setting.section, "kv_read_share": candidate.kv_read_share}
            file.write(json.dumps(row | found) + "\n")
    chosen = choose(candidates, target)
    console.print(frontier_table(candidates, measure, chosen))
    plot_frontier(candidates, measure, target, folder / "frontier.png")
    if chosen is None:
        console.print(
            f"None that leaves anything out keeps {target:g} of dense attention's {measure}: serve dense, "
            "or ask for less."
        )
        raise typer.Exit(1)
    setting = next(each for each in settings if each.name == chosen.name)
    preset = folder / "sparse.yaml"
    about = f"{measure} {chosen.quality.value:.3f} on {chosen.quality.count} prompts of {prompts.name}"
    preset.write_text(setting.preset(name, about), encoding="utf-8")
    if chosen.quality.low < target:
        console.print(f"The interval of {chosen.name} reaches below {target:g}; more prompts would say more.")
    print(f"Wrote {preset}. To serve with it:")
    additional = json.dumps({KEY: {"config": str(preset)}})
    print(f"vllm serve {model} --attention-backend {setting.backend} --additional-config '{additional}'")


def _settings(backends: Sequence[str], budgets: Sequence[int]) -> Iterator[Setting]:
    """Every backend with every budget, and once if it has none.

    Raises:
        ConfigurationError: for an unknown backend or a budget that it does not take.
    """
    for backend in dict.fromkeys(backends):
        preset = find_preset(backend)
        selection = resolve(None, preset).selection
        if "budget_tokens" not in type(selection).model_fields:
            yield Setting(backend, backend, {})
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
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.returncode:
        return
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing was said"]
    said = next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), lines[-1])
    refused = done.returncode == 2
    about = "" if refused else f"the engine of {label} ended with exit code {done.returncode}: "
    print(f"error: {about}{said}", file=sys.stderr)
    raise typer.Exit(2 if refused else 3)
