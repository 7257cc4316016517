"""`python -m bench.robustness`."""

from __future__ import annotations

from bench.common.options import make_app
from bench.robustness.deployments.command import deployments
from bench.robustness.families.command import families, family_cells
from bench.robustness.fuzz.command import fuzz
from bench.robustness.memory.command import memory, memory_cell
from bench.robustness.ranks.command import ranks
from bench.robustness.soak.command import soak
from bench.robustness.storm.command import storm
from bench.robustness.transfers.command import transfers
from vllm_sparse_plugin.tools.arguments import run_app
from vllm_sparse_plugin.tools.server import unwind_on_termination

app = make_app("Answers of sparse attention across models, deployments, schedules and time.")


@app.callback()
def _robustness() -> None:
    """Ends child processes when this process is ended."""
    unwind_on_termination()


app.command()(families)
app.command(hidden=True)(family_cells)
app.command()(deployments)
app.command()(fuzz)
app.command()(memory)
app.command(hidden=True)(memory_cell)
app.command()(ranks)
app.command()(soak)
app.command()(storm)
app.command()(transfers)


def main() -> None:
    """Runs the command line. Bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
