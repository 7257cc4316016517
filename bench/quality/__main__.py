"""`python -m bench.quality`."""

from __future__ import annotations

from bench.common.options import make_app
from bench.quality.accuracy import accuracy, accuracy_engines
from bench.quality.identical import identical, identical_engine
from bench.quality.lookup import lookup, lookup_engine
from bench.quality.lossless import lossless, lossless_engine
from bench.quality.ruler import ruler
from bench.quality.served import served
from bench.quality.turns import turns, turns_engine
from vllm_sparse_plugin.tools.arguments import run_app
from vllm_sparse_plugin.tools.server import unwind_on_termination

app = make_app("Quality of sparse compared with dense attention.")


@app.callback()
def _quality() -> None:
    """Ends child processes when this process is ended."""
    unwind_on_termination()


app.command()(accuracy)
app.command(hidden=True)(accuracy_engines)
app.command()(identical)
app.command(hidden=True)(identical_engine)
app.command()(lossless)
app.command(hidden=True)(lossless_engine)
app.command()(lookup)
app.command(hidden=True)(lookup_engine)
app.command()(ruler)
app.command()(served)
app.command()(turns)
app.command(hidden=True)(turns_engine)


def main() -> None:
    """Runs the command line. Bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
