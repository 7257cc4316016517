"""`python -m bench.quality`."""

from __future__ import annotations

import typer

from bench.quality.accuracy import accuracy, accuracy_engines
from vllm_sparse_plugin.cli.arguments import run_app
from vllm_sparse_plugin.cli.server import unwind_on_termination

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _quality() -> None:
    """Quality of sparse attention beside dense attention."""
    unwind_on_termination()


app.command()(accuracy)
app.command(hidden=True)(accuracy_engines)


def main() -> None:
    """Runs the command line; bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
