"""The packages that commands need beyond those of the plugin, and how to install the missing ones."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires

from vllm_sparse_plugin.errors import ConfigurationError

TABLES = {"matplotlib": "matplotlib", "scipy": "scipy"}
"""Modules with which `eval` and `tune` compare and draw, and the packages that bring them."""
METRICS = {"jieba": "jieba", "pytrec_eval": "pytrec-eval-terrier", "rapidfuzz": "rapidfuzz", "rouge": "rouge"}
"""Those of the metrics of `eval --file`."""
TRAINING = {"accelerate": "accelerate", "matplotlib": "matplotlib", "peft": "peft"}
"""Those of `train`."""
CONVERSION = {"accelerate": "accelerate", "gguf": "gguf"}
"""Those of `fetch-model`, and of `real` besides `STATISTICS`."""
STATISTICS = {"scipy": "scipy"}
"""Those of intervals."""
_ALL = TABLES | METRICS | TRAINING | CONVERSION


def require_packages(command: str, packages: Mapping[str, str]) -> None:
    """Refuse to run a command without its packages.

    Args:
        command: as a user types it.
        packages: the distributions by their modules.

    Raises:
        ConfigurationError: names those that are missing and how to install them.
    """
    missing = [package for module, package in packages.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigurationError(
            f"vllm-sparse {command}: got no {', '.join(missing)}, allowed: with the packages of its extra, "
            f"{install_line(missing)}"
        )


def missing_package(module: str) -> str | None:
    """Return what to say where a module cannot be imported; None if no extra has it."""
    package = _ALL.get(module.partition(".")[0])
    return package and f"{package}: got no such package, allowed: {install_line([package])}"


def install_line(packages: Iterable[str]) -> str:
    """Return the command that installs packages of extras.

    It names the packages. With `vllm-sparse-plugin[EXTRA]` pip would also ask for vLLM's CUDA build, which breaks an
    environment with the CPU build.
    """
    try:
        declared = requires("vllm-sparse-plugin") or []
    except PackageNotFoundError:
        declared = []
    versions = {re.split(r"[^\w.-]", entry, maxsplit=1)[0]: entry.partition(";")[0].strip() for entry in declared}
    return shlex.join(["pip", "install", *(versions.get(package, package) for package in packages)])
