"""`python -m bench.study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.study.plan import STAGES
from vllm_sparse_plugin.cli.arguments import run_app
from vllm_sparse_plugin.errors import ConfigurationError

PAGE = Path(__file__).parent / "README.md"
RESULTS = Path(__file__).parents[1] / "results"

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _study() -> None:
    """Page scores on needle-8m, decoded from the question."""


@app.command()
def run(
    output: Annotated[Path, typer.Option(help="JSON lines to write; what they hold already is not measured again.")],
    stage: Annotated[list[str] | None, typer.Option(help=f"Repeatable; {', '.join(s.name for s in STAGES)}.")] = None,
    setting: Annotated[list[str] | None, typer.Option(help="Names or patterns such as 'unique-*/p8/b64'.")] = None,
    context: Annotated[
        list[int] | None, typer.Option(help="Context in tokens, repeatable; those of the stages.")
    ] = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents per task and context, 8 questions each.")] = 7,
    seed: Annotated[int, typer.Option(help="Seed of documents and needles.")] = 0,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    cache: Annotated[Path | None, typer.Option(help="Folder to keep prefilled documents in.")] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds after which nothing is begun.")] = 3600,
    commit: Annotated[str | None, typer.Option(help="Commit to record, where the checkout has no .git.")] = None,
) -> None:
    """Measure; exit code 3 if time runs out, after which the same command goes on."""
    from bench.study.run import chosen_stages, measure

    stages = chosen_stages(stage, context, setting)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise ConfigurationError(f"device: got {device!r}, allowed: a device that torch can use here") from None
    if not measure(output, stages, documents, seed, device, cache, time_limit, commit):
        typer.echo("time is up: run the same command again to go on", err=True)
        raise typer.Exit(3)


@app.command()
def collect(
    raw: Annotated[list[Path], typer.Argument(help="Files that `run` wrote.")],
    output: Annotated[Path, typer.Option(help="JSON lines to write: one for each setting and context.")],
) -> None:
    """Fold result files into one line for each setting and context."""
    from bench.study.data import collect_runs

    collect_runs(raw, output)


@app.command()
def report(
    check: Annotated[bool, typer.Option("--check", help="Only say whether the page is up to date.")] = False,
) -> None:
    """Write the generated parts and the plots of the study's page."""
    from bench.study.report import write_page

    write_page(PAGE, RESULTS, check)


def main() -> None:
    """Runs the command line; bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
