"""Resolved and refused settings, for the tests of the configuration."""

from pathlib import Path

import pytest

from vllm_sparse_plugin.config import (
    ResolvedConfig,
    resolve,
)
from vllm_sparse_plugin.errors import ConfigurationError


def refusal(given_settings: object, preset: str = "unique") -> str:
    with pytest.raises(ConfigurationError) as caught:
        resolve(given_settings, preset)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert "allowed: " in message
    return message


def resolved_or_message(given_settings: object, preset: str) -> ResolvedConfig | str:
    try:
        return resolve(given_settings, preset)
    except ConfigurationError as error:
        return str(error)


def write(folder: Path, text: str) -> str:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)
