"""`python -m research.study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.common.options import (
    Commit,
    Output,
    Seed,
    StageContexts,
    TimeLimit,
    chosen_contexts,
    chosen_names,
    make_app,
    usable_device,
)  # fmt: skip
from bench.common.results import RESULTS
from research.study.plan import STAGES
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import run_app

PAGE = Path(__file__).parent / "README.md"

app = make_app("Page scores on needle-8m, decoded from the question.")


_Stages = Annotated[list[str] | None, typer.Option("--stage", help=f"Repeatable; {', '.join(s.name for s in STAGES)}.")]
_Documents = Annotated[int, typer.Option("--documents", min=1, help="Per task and context, with 8 questions each.")]


@app.command()
def documents(
    folder: Annotated[Path, typer.Option(help="Where to keep them, for `run --folder`.")],
    stages: _Stages = None,
    contexts: StageContexts = None,
    count: _Documents = 7,
    seed: Seed = 0,
) -> None:
    """Write the documents, so that another machine asks the same questions."""
    from research.study.run import builds_of, chosen_stages, document_source

    source = document_source(seed, folder)
    for stage in chosen_stages(chosen_names(stages), chosen_contexts(contexts), None):
        for build in builds_of(stage, count):
            source(build)


@app.command()
def run(
    output: Output,
    stages: _Stages = None,
    settings: Annotated[
        list[str] | None, typer.Option("--setting", help="Name or pattern such as 'unique-*/p8/b64', repeatable.")
    ] = None,
    contexts: StageContexts = None,
    count: _Documents = 7,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    folder: Annotated[Path | None, typer.Option(help="Keeps documents and, on a CPU, their prefill.")] = None,
    shard: Annotated[str, typer.Option(help="I/N: every N-th document from the I-th on; several fit one GPU.")] = "0/1",
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Measure what the output does not hold yet; exit code 3 if time runs out, after which the same command goes on."""
    from research.study.run import chosen_stages, measure

    chosen = chosen_stages(chosen_names(stages), chosen_contexts(contexts), chosen_names(settings))
    usable_device(device)
    first, _, every = shard.partition("/")
    if not (first.isdecimal() and every.isdecimal() and int(first) < int(every)):
        raise ConfigurationError(f"shard: got {shard!r}, allowed: I/N with I below N, such as 0/4")
    if not measure(output, chosen, count, seed, device, folder, (int(first), int(every)), time_limit, commit):
        typer.echo("time is up: run the same command again to go on", err=True)
        raise typer.Exit(3)


@app.command()
def collect(
    raw: Annotated[list[Path], typer.Argument(help="Files that `run` wrote.")],
    output: Output,
) -> None:
    """Fold result files into one line for each setting and context."""
    from research.study.data import collect_runs

    collect_runs(raw, output)


@app.command()
def report(
    check: Annotated[bool, typer.Option("--check", help="Only say whether the page is up to date.")] = False,
) -> None:
    """Write the generated parts and the plots of the study's page."""
    from research.study.report import write_page

    write_page(PAGE, RESULTS, check)


def main() -> None:
    """Runs the command line; bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
