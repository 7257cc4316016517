"""The command `vllm-sparse show-config`: prints the resolved configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from vllm_sparse_plugin import __version__
from vllm_sparse_plugin.config import KEY, SparseAttentionConfig, check_additional_config, read_trained_section, resolve
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.notices import notices_of
from vllm_sparse_plugin.tools.arguments import (
    AdditionalConfig,
    AttentionBackend,
    expect_cache_dtype,
    find_model,
    find_preset,
    parse_additional_config,
)
from vllm_sparse_plugin.tools.endings import open_console, say
from vllm_sparse_plugin.tools.models import read_config


def show_config(
    attention_backend: AttentionBackend = "unique",
    additional_config: AdditionalConfig = "{}",
    model: Annotated[
        Path | None,
        typer.Option(help="Model folder. Its config.json may hold settings from training.", metavar="PATH"),
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="As for vLLM.")] = "auto",
) -> None:
    """Print the resolved configuration and where each value came from.

    The notices that a server logs at start follow.
    """
    preset = find_preset(attention_backend)
    expect_cache_dtype(kv_cache_dtype)
    additional = parse_additional_config(additional_config)
    check_additional_config(additional)
    trained = None if model is None else _trained_section(find_model(model))
    resolved = resolve(additional.get(KEY), preset, trained)
    notices = notices_of(resolved, kv_cache_dtype)
    title = f"vllm_sparse_plugin {__version__}, attention backend {attention_backend}"
    table = Table("field", "value", "from", title=title)
    for name, value in _flatten(resolved.config):
        table.add_row(
            name, value if isinstance(value, str) else json.dumps(value), resolved.sources.get(name, "default")
        )
    console = open_console()
    console.print(table)
    for notice in notices:
        say(console, notice)


def _trained_section(folder: Path) -> dict[str, Any] | None:
    try:
        read_config(folder)
    except (OSError, ValueError):
        raise ConfigurationError(f"model: got {str(folder)!r}, allowed: a folder with a config.json") from None
    return read_trained_section(folder)


def _flatten(config: SparseAttentionConfig) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in config.model_dump(by_alias=True).items():
        if isinstance(value, dict):
            rows += [(f"{name}.{key}", inner) for key, inner in value.items()]
        else:
            rows.append((name, value))
    return rows
