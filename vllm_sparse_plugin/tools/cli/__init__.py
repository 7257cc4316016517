"""The `vllm-sparse` command."""


def main() -> None:
    """Runs the command line; bad input ends in one sentence and exit code 2."""
    # Imported late: the benchmarks that use this package's parts do without the commands' needs.
    from vllm_sparse_plugin.tools.cli.app import main as run

    run()
