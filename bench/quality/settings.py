"""Runs `vllm-sparse eval` with several settings, each in a process with its own engine."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common.children import run_python
from vllm_sparse_plugin.config import KEY, resolve
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import budget_section, find_preset
from vllm_sparse_plugin.tools.eval.results import Result, read_results

DENSE = "dense"
"""The name of the run with vLLM's own attention."""
SHARES = ("kv_read_share", "key_read_share", "key_kept_share")
"""What a setting read and kept: fields of a result."""
_BETWEEN_STARTS = 8.0
"""Seconds. Engines that start at the same time disturb each other's memory profiling."""


@dataclass(frozen=True)
class Setting:
    """A run of `vllm-sparse eval`."""

    name: str
    options: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Parse `BACKEND` or `BACKEND:BUDGET`, the tokens that the backend reads or keeps, and settings.

        Each `+FIELD=VALUE` is a setting of the backend, such as `snapkv:2048+stopping.block_tokens=64`.

        Raises:
            ConfigurationError: for anything else.
        """
        first, *fields = text.split("+")
        backend, _, budget = first.partition(":")
        preset = find_preset(backend)
        given: dict[str, Any] = {}
        if budget:
            of_budget = budget_section(preset)
            if of_budget is None or not budget.isdecimal():
                raise ConfigurationError(
                    f"setting: got {text!r}, allowed: a backend, or one that has a budget with :TOKENS"
                )
            key, values = of_budget
            given[key] = {**values, "budget_tokens": int(budget)}
        for field in fields:
            name, equals, value = field.partition("=")
            section, _, key = name.rpartition(".")
            place = given.setdefault(section, {}) if section else given
            if not equals or not isinstance(place, dict) or key in place:
                raise ConfigurationError(f"setting: got {text!r}, allowed after each +: FIELD=VALUE, each field once")
            place[key] = _value(value)
        resolve(given, preset)
        options = ("--additional-config", json.dumps({KEY: given})) if given else ()
        return cls(text.replace(":", "-", 1), ("--attention-backend", backend, *options))


def _value(text: str) -> Any:
    """A value in JSON, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def evaluate(
    settings: Sequence[Setting], shared: Sequence[str], at_once: int, end: float
) -> tuple[dict[str, dict[str, Result]], list[str]]:
    """Returns the results by setting and by item, and the reasons of failures.

    Args:
        settings: the runs.
        shared: options of `vllm-sparse eval` for all of them.
        at_once: engines that run at the same time.
        end: latest end on `time.monotonic`.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:

        def run(number: int) -> str | None:
            """Runs a setting. Returns the reason of a failure."""
            if number < at_once:
                time.sleep(_BETWEEN_STARTS * number)
            chosen = settings[number]
            # By number: a name may hold the path of a file.
            path, log = (Path(folder) / f"{number}.{ending}" for ending in ("jsonl", "log"))
            arguments = ["eval", "--in-process", *shared, *chosen.options, "--output", str(path)]
            code = run_python("vllm_sparse_plugin", arguments, end - time.monotonic(), log)
            if code == 0:
                return None
            if code is None:
                return f"{chosen.name} was not done by the deadline"
            last = [*log.read_text(errors="replace").splitlines(), ""][-2:]
            return f"{chosen.name} ended with exit code {code}: {last[0]:.300}"

        with ThreadPoolExecutor(at_once) as pool:
            failed = [sentence for sentence in pool.map(run, range(len(settings))) if sentence]
        found = {
            each.name: read_results(path).results
            for number, each in enumerate(settings)
            if (path := Path(folder) / f"{number}.jsonl").exists()
        }
    return found, failed
