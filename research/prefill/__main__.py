"""`python -m research.prefill`."""

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
from research.prefill.plan import DOCUMENTS, STAGES
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import run_app

PAGE = Path(__file__).parent / "README.md"

app = make_app("Rules of sparse prefill on needle-8m.")


_Stages = Annotated[list[str] | None, typer.Option("--stage", help=f"Repeatable; {', '.join(s.name for s in STAGES)}.")]


@app.command()
def documents(
    folder: Annotated[Path, typer.Option(help="Where to keep them, for `run --folder`.")],
    stages: _Stages = None,
    contexts: StageContexts = None,
    seed: Seed = 0,
) -> None:
    """Write the documents, so that another machine asks the same questions."""
    from research.prefill.run import chosen_stages
    from research.study.run import document_source

    source = document_source(seed, folder)
    for stage in chosen_stages(chosen_names(stages), chosen_contexts(contexts), None, None):
        for context in stage.contexts:
            for task in stage.tasks:
                source((task, context, DOCUMENTS))


@app.command()
def run(
    output: Output,
    stages: _Stages = None,
    settings: Annotated[
        list[str] | None, typer.Option("--setting", help="Name or pattern such as 'quarters*/d0.05*', repeatable.")
    ] = None,
    contexts: StageContexts = None,
    count: Annotated[
        int | None, typer.Option("--documents", min=1, max=DOCUMENTS, help="Per task and context; those of the stages.")
    ] = None,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    folder: Annotated[Path | None, typer.Option(help="Keeps documents.")] = None,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Measure what the output does not hold yet; exit code 3 if time runs out, after which the same command goes on."""
    from research.prefill.data import summary_table
    from research.prefill.run import Selection, chosen_stages, measure

    chosen = chosen_stages(chosen_names(stages), chosen_contexts(contexts), chosen_names(settings), count)
    usable_device(device)
    finished = measure(output, Selection(chosen, seed, time_limit), device, folder, commit)
    typer.echo(summary_table(output))
    if not finished:
        typer.echo("time is up: run the same command again to go on", err=True)
        raise typer.Exit(3)


@app.command()
def engine(
    output: Output,
    prefill: Annotated[str, typer.Option(help="What prompts attend to: dense, studied or shipped.")] = "shipped",
    decode: Annotated[str, typer.Option(help="What decode steps attend to: dense or sparse.")] = "dense",
    contexts: StageContexts = None,
    count: Annotated[
        int | None, typer.Option("--documents", min=1, max=DOCUMENTS, help="Per task and context; all by default.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Keeps documents.")] = None,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Ask the finalists' questions of a whole engine; exit code 3 if time runs out, after which it goes on."""
    from research.prefill.engines import DECODES, PREFILLS, EngineSetting, measure_engine
    from research.prefill.run import chosen_stages

    for option, value, known in (("prefill", prefill, PREFILLS), ("decode", decode, DECODES)):
        if value not in known:
            raise ConfigurationError(f"{option}: got {value!r}, allowed: {', '.join(known)}")
    (stage,) = chosen_stages(["finalists"], chosen_contexts(contexts), None, count)
    if not measure_engine(output, stage, EngineSetting(prefill, decode), folder, time_limit, commit):
        typer.echo("time is up: run the same command again to go on", err=True)
        raise typer.Exit(3)


@app.command()
def collect(
    raw: Annotated[list[Path], typer.Argument(help="Files that `run` wrote.")],
    output: Output,
) -> None:
    """Fold result files into one line for each setting and context."""
    from research.prefill.data import collect_runs

    collect_runs(raw, output)


@app.command()
def report(
    check: Annotated[bool, typer.Option("--check", help="Only say whether the page is up to date.")] = False,
) -> None:
    """Write the generated parts and the plots of the study's page."""
    from research.prefill.report import write_page

    write_page(PAGE, RESULTS, check)


def main() -> None:
    """Runs the command line; bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
