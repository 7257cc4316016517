"""Optional packages of commands, and how to install them."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires

from vllm_sparse_plugin.errors import ConfigurationError

TABLES = {"matplotlib": "matplotlib", "scipy": "scipy"}
"""Modules that `eval` and `tune` need for comparisons and plots, with their packages."""
TRAINING = {"accelerate": "accelerate", "matplotlib": "matplotlib", "peft": "peft"}
"""For `train`."""
CONVERSION = {"accelerate": "accelerate", "gguf": "gguf"}
"""For `fetch-model`, and for `real` together with `STATISTICS`."""
STATISTICS = {"scipy": "scipy"}
"""For intervals."""
_ALL = TABLES | TRAINING | CONVERSION


def require_packages(command: str, packages: Mapping[str, str]) -> None:
    """Refuse to run a command without its packages.

    Args:
        command: the command's name.
        packages: packages by module.

    Raises:
        ConfigurationError: names the missing packages and the command that installs them.
    """
    missing = [package for module, package in packages.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigurationError(
            f"vllm-sparse {command}: got no {', '.join(missing)}, allowed: with the packages of its extra, "
            f"{install_line(missing)}"
        )


def missing_package(module: str) -> str | None:
    """Return the sentence for a module that cannot be imported; None if no extra contains it."""
    package = _ALL.get(module.partition(".")[0])
    return package and f"{package}: got no such package, allowed: {install_line([package])}"


def install_line(packages: Iterable[str]) -> str:
    """Return the command that installs packages of extras.

    The command names the packages. `pip install vllm-sparse-plugin[EXTRA]` would also install vLLM's CUDA build, which
    breaks an environment with the CPU build.
    """
    try:
        declared = requires("vllm-sparse-plugin") or []
    except PackageNotFoundError:
        declared = []
    versions = {re.split(r"[^\w.-]", entry, maxsplit=1)[0]: entry.partition(";")[0].strip() for entry in declared}
    return shlex.join(["pip", "install", *(versions.get(package, package) for package in packages)])
