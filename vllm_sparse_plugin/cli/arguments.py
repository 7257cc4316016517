"""Arguments that several commands share."""

from __future__ import annotations

import json
from typing import Any

from vllm_sparse_plugin.errors import ConfigurationError


def parse_additional_config(text: str) -> dict[str, Any]:
    """The value of `--additional-config`.

    Raises:
        ConfigurationError: if it is not a JSON object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"additional_config: got text that is not JSON ({error}), allowed: JSON") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"additional_config: got {text!r}, allowed: a JSON object")
    return value
