"""The commands of `bench` parse, and their repeatable options state a default."""

import importlib

import pytest
from typer.core import TyperGroup, TyperOption
from typer.main import get_command
from typer.testing import CliRunner

NO_DEFAULT = [["--server-argument"], ["--only"], ["--grid"], ["--groups"], ["--formats"]]
"""Options without values, or whose help states what no value means."""


@pytest.mark.parametrize("module", ["kernels.__main__", "quality", "serving.__main__", "training", "pages.__main__"])
def test_help_of_every_command(module):
    app = importlib.import_module(f"bench.{module}").app
    command = get_command(app)
    commands = command.commands if isinstance(command, TyperGroup) else {"": command}
    for name, inner in commands.items():
        assert CliRunner().invoke(app, [*filter(None, [name]), "--help"]).exit_code == 0
        several = [option for option in inner.params if isinstance(option, TyperOption) and option.multiple]
        silent = [option.opts for option in several if not option.required and not option.default]
        assert [opts for opts in silent if opts not in NO_DEFAULT] == []
