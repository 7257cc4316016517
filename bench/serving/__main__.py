"""`python -m bench.serving`."""

from __future__ import annotations

from bench.common.children import unwind_on_termination
from bench.common.options import make_app
from bench.serving.decode import decode, decode_variant
from bench.serving.lossless import lossless, lossless_variant
from bench.serving.prefill import prefill, prefill_variant
from bench.serving.serve import serve
from vllm_sparse_plugin.tools.arguments import run_app

app = make_app("Speed of sparse and dense attention in vLLM.")


@app.callback()
def _serving() -> None:
    """Ends child processes when this process is ended."""
    unwind_on_termination()


app.command()(decode)
app.command(hidden=True)(decode_variant)
app.command()(lossless)
app.command(hidden=True)(lossless_variant)
app.command()(prefill)
app.command(hidden=True)(prefill_variant)
app.command()(serve)


def main() -> None:
    """Runs the command line. Bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
