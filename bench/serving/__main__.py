"""`python -m bench.serving`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from bench.common.children import unwind_on_termination
from bench.common.options import make_app
from bench.serving.decode import decode
from bench.serving.lossless import lossless
from bench.serving.prefill import prefill
from bench.serving.serve import serve
from bench.serving.variants import COMMAND, VariantSettings, measure_here
from vllm_sparse_plugin.tools.arguments import run_app

app = make_app("Speed of sparse and dense attention in vLLM.")


@app.callback()
def _serving() -> None:
    """Ends child processes when this process is ended."""
    unwind_on_termination()


@app.command(COMMAND, hidden=True)
def measure(kind: str, settings: str, output: Path) -> None:
    """Measure one variant in this process for another command."""
    module, _, name = kind.partition(":")
    found: type[VariantSettings] = getattr(import_module(module), name)
    measure_here(found.model_validate_json(settings), output)


for command in (decode, lossless, prefill, serve):
    app.command()(command)


def main() -> None:
    """Runs the command line. Bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
