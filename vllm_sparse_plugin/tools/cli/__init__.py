"""The `vllm-sparse` command."""


def main() -> None:
    """Run the command line. Bad input ends in one sentence and exit code 2."""
    # Imported here: benchmarks use other parts of this package and do not need the commands' dependencies.
    from vllm_sparse_plugin.tools.cli.app import main as run

    run()
