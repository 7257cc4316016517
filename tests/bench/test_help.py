"""The help of the commands of `bench`."""

import importlib

import pytest
from typer.core import TyperGroup, TyperOption
from typer.main import get_command

import bench


def repeatable_options(module):
    """The options of a module's commands that can be given several times and left out."""
    command = get_command(importlib.import_module(f"{bench.__name__}.{module}.__main__").app)
    commands = command.commands if isinstance(command, TyperGroup) else {module: command}
    return [
        (name, option)
        for name, inner in commands.items()
        if not inner.hidden
        for option in inner.params
        if isinstance(option, TyperOption) and option.multiple and not option.required
    ]


@pytest.mark.parametrize("module", ["kernels", "quality", "robustness", "serving", "training"])
def test_options_that_can_be_repeated_state_their_default(module):
    options = repeatable_options(module)
    assert options
    silent = [
        (name, option.opts)
        for name, option in options
        if "Default: " not in option.help and not option.help.startswith("Further argument")
    ]
    assert silent == []
