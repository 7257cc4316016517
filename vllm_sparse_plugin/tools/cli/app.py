"""The commands of `vllm-sparse`, each imported when it is run: help needs neither vLLM nor torch."""

from __future__ import annotations

import importlib
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from vllm_sparse_plugin import __version__
from vllm_sparse_plugin.tools.arguments import run_app
from vllm_sparse_plugin.tools.endings import explain_pipes, leave_signals


class Command(NamedTuple):
    """Where a command is, and what the list of commands says of it."""

    module: str
    """Of `vllm_sparse_plugin.tools.cli`."""
    name: str
    """Attribute of the module: a function, or a Typer app with commands of its own."""
    help: str
    """The first sentence of its docstring."""
    passes_on: bool = False
    """Whether it takes any arguments, `--help` too, to give them to another program, which handles signals."""


COMMANDS: dict[str, Command] = {
    "serve": Command(
        "vllm_commands", "serve", "Start vLLM's OpenAI-compatible server: the same arguments as `vllm serve`.", True
    ),
    "bench": Command("vllm_commands", "bench", "Run vLLM's benchmarks: the same arguments as `vllm bench`.", True),
    "show-config": Command(
        "show_config", "show_config", "Print the resolved configuration and where each value came from."
    ),
    "plan": Command(
        "plan", "plan", "Print how many requests fit a GPU's memory with every preset, without starting anything."
    ),
    "needles": Command(
        "needle_test",
        "needle_test",
        "Ask sparse servers and a dense one the same needle questions and compare their accuracy.",
    ),
    "fetch-model": Command(
        "fetch_model",
        "fetch_model",
        "Fetch the weights of a real model, convert them for vLLM, and print the folder and the licence.",
    ),
    "real": Command(
        "real",
        "real",
        "Fetch a real model, and compare sparse with dense attention on needles and on the next tokens of text.",
    ),
    "eval": Command("evaluate", "app", "Ask a model long-context tasks and score its answers."),
    "diagnose": Command(
        "diagnose",
        "diagnose",
        "Run a model once over each prompt and compare each policy's selections with dense attention.",
    ),
    "tune": Command(
        "tune",
        "tune",
        "Find the settings that read or keep least of the KV cache and answer like dense attention on your prompts.",
    ),
    "calibrate": Command(
        "calibrate",
        "calibrate",
        "Find the thresholds at which SinkRouter skips a share of a model's KV groups, and say whether to use them.",
    ),
    "train": Command("train", "train", "Fine-tune a model with the pages that it will be served with."),
}
"""By the name that a user types."""


class LazyGroup(TyperGroup):
    """Lists commands by what `COMMANDS` says of them, and imports the one that is run or completed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name, imported, and the arguments that are left."""
        if args and args[0] in COMMANDS:
            if COMMANDS[args[0]].passes_on:
                leave_signals()
            self.commands[args[0]] = load(args[0])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        with explain_pipes():
            return super().invoke(ctx)


def load(name: str) -> Any:
    """Import a command and make it one of click's.

    Args:
        name: one of `COMMANDS`.
    """
    command = COMMANDS[name]
    target = getattr(importlib.import_module(f"vllm_sparse_plugin.tools.cli.{command.module}"), command.name)
    if not isinstance(target, typer.Typer):
        # Markdown: lines of a docstring are joined and wrap at the width of the terminal.
        function, target = target, typer.Typer(add_completion=False, rich_markup_mode="markdown")
        target.command(name, **_settings(command))(function)
    loaded = typer.main.get_command(target)
    loaded.name = name
    return loaded


def _settings(command: Command) -> dict[str, Any]:
    if not command.passes_on:
        return {}
    return {
        "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
        "add_help_option": False,
    }


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False)
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
    """Runs the command line; it ends in one sentence and a documented exit code, see `endings`."""
    run_app(app)
