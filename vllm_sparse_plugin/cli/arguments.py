"""What the command lines have in common."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from vllm_sparse_plugin.errors import ConfigurationError


def parse_additional_config(text: str, field: str = "additional_config") -> dict[str, Any]:
    """The value of `--additional-config`, or of another option that takes a JSON object.

    Raises:
        ConfigurationError: names `field` if it is no such object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{field}: got text that is not JSON ({error}), allowed: JSON") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{field}: got {text!r}, allowed: a JSON object")
    return value


def run_app(app: typer.Typer) -> None:
    """Run a command line; bad input ends in one sentence and exit code 2."""
    try:
        app()
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
