"""Commands of `vllm-sparse`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vllm_sparse_plugin import __version__
from vllm_sparse_plugin.cli import evaluate
from vllm_sparse_plugin.cli.arguments import parse_additional_config, run_app
from vllm_sparse_plugin.cli.calibrate import calibrate
from vllm_sparse_plugin.cli.diagnose import diagnose
from vllm_sparse_plugin.cli.needle_test import needle_test
from vllm_sparse_plugin.config import KEY, SparseAttentionConfig, resolve
from vllm_sparse_plugin.errors import ConfigurationError, choices
from vllm_sparse_plugin.registration import BACKENDS

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
_PASS_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.callback()
def _vllm_sparse() -> None:
    """Sparse decode attention for vLLM."""


@app.command(context_settings=_PASS_ON, add_help_option=False)
def serve(context: typer.Context) -> None:
    """Start vLLM's OpenAI-compatible server: the same arguments as `vllm serve`."""
    _vllm("serve", context)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Run vLLM's benchmarks: the same arguments as `vllm bench`."""
    _vllm("bench", context)


def _vllm(command: str, context: typer.Context) -> None:
    from vllm_sparse_plugin import compat

    compat.run_vllm_cli([command, *context.args])


@app.command()
def show_config(
    backend: Annotated[str, typer.Option(help="Attention backend whose preset applies.")] = "unique",
    additional_config: Annotated[
        str, typer.Option(help="JSON, as given to vLLM's --additional-config.", metavar="JSON")
    ] = "{}",
) -> None:
    """Print the resolved configuration and where each value came from."""
    preset = BACKENDS.get(backend.upper())
    if preset is None:
        allowed = choices(name.lower() for name in BACKENDS)
        raise ConfigurationError(f"backend: got {backend!r}, allowed: {allowed}")
    resolved = resolve(parse_additional_config(additional_config).get(KEY), preset)
    table = Table("field", "value", "from", title=f"vllm_sparse_plugin {__version__}, attention backend {backend}")
    for name, value in _flatten(resolved.config):
        table.add_row(name, str(value), resolved.sources.get(name, "default"))
    Console().print(table)


app.command("needles")(needle_test)
app.add_typer(evaluate.app, name="eval")
app.command()(diagnose)
app.command()(calibrate)


def _flatten(config: SparseAttentionConfig) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in config.model_dump(by_alias=True).items():
        if isinstance(value, dict):
            rows += [(f"{name}.{key}", inner) for key, inner in value.items()]
        else:
            rows.append((name, value))
    return rows


def main() -> None:
    """Runs the command line; bad input ends in one sentence and exit code 2."""
    run_app(app)
