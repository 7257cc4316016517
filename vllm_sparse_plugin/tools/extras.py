"""Optional packages of commands, and how to install them."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires

from vllm_sparse_plugin.errors import ConfigurationError

TABLES = ("matplotlib", "scipy")
"""Packages that `eval` and `tune` need for comparisons and plots. Modules have the same names."""
TRAINING = ("accelerate", "matplotlib", "peft")
"""For `train`."""
CONVERSION = ("accelerate", "gguf")
"""For `fetch-model`, and for `real` together with `STATISTICS`."""
STATISTICS = ("scipy",)
"""For intervals."""


def require_packages(command: str, packages: Iterable[str]) -> None:
    """Refuse to run a command without its packages.

    The sentence has a line that names the packages. `pip install vllm-sparse-plugin[EXTRA]` would also install vLLM's
    CUDA build, which breaks an environment with the CPU build.

    Raises:
        ConfigurationError: names the missing packages and the command that installs them.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if not missing:
        return
    try:
        declared = requires("vllm-sparse-plugin") or []
    except PackageNotFoundError:
        declared = []
    versions = {re.split(r"[^\w.-]", entry, maxsplit=1)[0]: entry.partition(";")[0].strip() for entry in declared}
    line = shlex.join(["pip", "install", *(versions.get(name, name) for name in missing)])
    raise ConfigurationError(
        f"vllm-sparse {command}: got no {', '.join(missing)}, allowed: with the packages of its extra, {line}"
    )
