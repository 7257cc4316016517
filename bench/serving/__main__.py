"""`python -m bench.serving`."""

from __future__ import annotations

import typer

from bench.serving.decode import decode, decode_variant
from bench.serving.plot import plot
from bench.serving.serve import serve
from vllm_sparse_plugin.cli.arguments import run_app
from vllm_sparse_plugin.cli.server import unwind_on_termination

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _serving() -> None:
    """Speed of sparse and dense attention in vLLM."""
    unwind_on_termination()


app.command()(decode)
app.command(hidden=True)(decode_variant)
app.command()(serve)
app.command()(plot)


def main() -> None:
    """Runs the command line; bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
