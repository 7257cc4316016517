"""What the command lines have in common."""

from __future__ import annotations

import json
import sys
from pathlib import Path
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


def model_limits(model: Path) -> tuple[int, int]:
    """The longest context and the number of layers of a model folder.

    Raises:
        ConfigurationError: if its config.json does not say.
    """
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return int(config["max_position_embeddings"]), int(config["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigurationError(
            f"model: got {str(model)!r}, allowed: a folder with a config.json that has max_position_embeddings and "
            "num_hidden_layers"
        ) from None


def read_prompts(path: Path) -> list[dict[str, str]]:
    """The lines of a file of prompts, as `name`, `prompt` and `completion`, which may be empty.

    Raises:
        ConfigurationError: names the line that is no such JSON object, or says why the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no file of UTF-8 text"
        raise ConfigurationError(f"prompts: got {str(path)!r} ({reason}), allowed: a readable file") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        texts = [entry.get("prompt"), entry.get("completion", "")] if isinstance(entry, dict) else [None]
        if not all(isinstance(text, str) for text in texts) or not texts[0]:
            raise ConfigurationError(
                f"prompts: got {line[:60]!r} in line {number}, allowed: a JSON object with the text `prompt` and "
                "perhaps `completion`"
            )
        found.append({"name": f"line {number}", "prompt": texts[0], "completion": texts[1]})
    if not found:
        raise ConfigurationError(f"prompts: got {str(path)!r} without a line, allowed: one or more")
    return found


def run_app(app: typer.Typer) -> None:
    """Run a command line; bad input ends in one sentence and exit code 2."""
    try:
        app()
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
