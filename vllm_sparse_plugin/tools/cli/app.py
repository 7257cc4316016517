"""The commands of `vllm-sparse`. A command is imported when it runs, so help needs neither vLLM nor torch."""

from __future__ import annotations

import importlib
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from vllm_sparse_plugin import __version__
from vllm_sparse_plugin.tools.endings import leave_signals, run


class Command(NamedTuple):
    """Where a command is defined, and its line in the list of commands."""

    module: str
    """Module in `vllm_sparse_plugin.tools.cli`."""
    name: str
    """Attribute of the module: a function, or a Typer app with subcommands."""
    help: str
    """First sentence of the docstring."""


COMMANDS: dict[str, Command] = {
    name: Command(*rest)
    for name, *rest in (
        ("serve", "vllm_commands", "serve",
         "Start vLLM's OpenAI-compatible server: the same arguments as `vllm serve`."),
        ("bench", "vllm_commands", "bench", "Run vLLM's benchmarks: the same arguments as `vllm bench`."),
        ("show-config", "show_config", "show_config",
         "Print the resolved configuration and where each value came from."),
        ("plan", "plan", "plan", "Print how many requests fit a GPU's memory with each preset. Starts no server."),
        ("needles", "needle_test", "needle_test",
         "Ask sparse servers and a dense server the same needle questions and compare their accuracy."),
        ("fetch-model", "fetch_model", "fetch_model",
         "Download a real model, convert it for vLLM, and print its folder and licence."),
        ("real", "real", "real",
         "Download a real model and compare sparse with dense attention on needles and on text."),
        ("eval", "evaluate", "app", "Ask a model long-context questions and score the answers."),
        ("diagnose", "diagnose", "diagnose",
         "Compare the pages that each policy selects with dense attention, in one forward pass per prompt."),
        ("tune", "tune", "tune", "Find the cheapest settings that still answer like dense attention on your prompts."),
        ("calibrate", "calibrate", "calibrate",
         "Fit SinkRouter's thresholds for one model, and report whether to use them."),
        ("anchors", "anchors", "anchors", "Find the layers of one model whose pages the layers behind them can read."),
        ("train", "train", "train", "Fine-tune a model on the pages that serving selects."),
    )
}  # fmt: skip
"""Commands by name."""
_PASSED_ON: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}, "add_help_option": False,
}  # fmt: skip
"""Settings of commands whose arguments, `--help` included, go to another program. That program handles signals."""


class LazyGroup(TyperGroup):
    """Lists commands from `COMMANDS`. Imports only the command that is run or completed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the imported command and the remaining arguments."""
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = load(args[0])
        return super().resolve_command(ctx, args)


def load(name: str) -> Any:
    """Import a command as a click command.

    Args:
        name: a key of `COMMANDS`.
    """
    command = COMMANDS[name]
    target = getattr(importlib.import_module(f"vllm_sparse_plugin.tools.cli.{command.module}"), command.name)
    passes_on = command.module == "vllm_commands"
    if passes_on:
        leave_signals()
    if not isinstance(target, typer.Typer):
        # Markdown joins the lines of a docstring and wraps them at the width of the terminal.
        function, target = target, typer.Typer(add_completion=False, rich_markup_mode="markdown")
        target.command(name, **(_PASSED_ON if passes_on else {}))(function)
    loaded = typer.main.get_command(target)
    loaded.name = name
    return loaded


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")
for _name, _command in COMMANDS.items():
    app.command(_name, help=_command.help)(lambda: None)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"vllm-sparse {__version__}")
        raise typer.Exit


@app.callback()
def _vllm_sparse(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Sparse decode attention for vLLM."""


def main() -> None:
    """Run the command line. It ends in one sentence and a documented exit code, see `endings`."""
    run(app)
