"""`python -m bench.kernels`."""

from bench.kernels.cli import app
from vllm_sparse_plugin.tools.arguments import run_app


def main() -> None:
    """Runs the command line. Bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
