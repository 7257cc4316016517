"""Merges the values of a configuration from their sources.

Later sources win: the schema's defaults, the preset of the chosen backend, the settings of the model's training,
`preset`, the YAML file named by `config`, and the keys in `--additional-config '{"sparse_attention": {...}}'`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from pydantic import ValidationError

from vllm_sparse_plugin.config import files
from vllm_sparse_plugin.config.effects import check_effects, with_one_window
from vllm_sparse_plugin.config.messages import sentence_of
from vllm_sparse_plugin.config.schema import (
    KEY,
    MEASURED,
    REPLACED,
    SECTIONS,
    VARIANTS,
    ResolvedConfig,
    SparseAttentionConfig,
)
from vllm_sparse_plugin.config.trained import (
    FOUND_KEYS,
    SWITCH,
    TRAINED,
    applies,
    check_trained,
    expect_keys,
    is_beside_a_model,
)
from vllm_sparse_plugin.errors import ConfigurationError, expect_known

ADDITIONAL_CONFIG = "additional config"
"""Source of values given directly in `--additional-config`."""
FILE = "file "
"""Prefix of source names that are files of the user."""


def preset_names() -> list[str]:
    """Returns the names of the presets in `configs/`."""
    folder = resources.files("vllm_sparse_plugin.configs")
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def check_additional_config(keys: Iterable[Any]) -> None:
    """Checks the keys next to `sparse_attention`, which may belong to other plugins.

    Args:
        keys: the keys of `--additional-config`.

    Raises:
        ConfigurationError: for a section or a setting that belongs inside `sparse_attention`, and for a misspelled
            `sparse_attention`.
    """
    for key in keys:
        if not isinstance(key, str) or key == KEY:
            continue
        if key in SparseAttentionConfig.model_fields:
            raise ConfigurationError(
                f"additional_config: got the key {key!r} outside of {KEY}, allowed: "
                f'{{"{KEY}": {{"{key}": ...}}}}'
            )  # fmt: skip
        if difflib.get_close_matches(key.lower(), [KEY], cutoff=0.8):
            raise ConfigurationError(
                f"additional_config: got the key {key!r:.80} (did you mean {KEY!r}?), allowed: {KEY}, and names of "
                "other plugins that are less like it"
            )


def resolve(
    settings: Mapping[str, Any] | None, backend_preset: str, trained: Mapping[str, Any] | None = None
) -> ResolvedConfig:
    """Merges all sources of the configuration and validates the result.

    Args:
        settings: the value of `sparse_attention` in `--additional-config`, or None.
        backend_preset: preset of the chosen attention backend.
        trained: the section in the model's config.json, or None.

    Raises:
        ConfigurationError: for an unknown key, a value out of range, a preset or file that cannot be read, or settings
            that contradict the model's training, and for settings that files beside a model may not have.
    """
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigurationError(f"{KEY}: got {settings!r}, allowed: a JSON object")
    inline = dict(settings or {})
    layers = [(f"backend preset {backend_preset}", _read_preset("backend", backend_preset))]
    preset, file = inline.pop("preset", None), inline.pop("config", None)
    follows = inline.pop(SWITCH, True)
    if not isinstance(follows, bool):
        raise ConfigurationError(f"{KEY}.{SWITCH}: got {follows!r}, allowed: true or false")
    if preset is not None:
        layers.append((f"preset {preset}", _read_preset(f"{KEY}.preset", preset)))
    if file is not None:
        field = f"{KEY}.config"
        values = files.parse(f"{field} {file!r}", files.read_text(field, file))
        if is_beside_a_model(file):
            expect_keys(values, FOUND_KEYS, f"{file!r}, a file beside a model", "or the file in another folder")
        layers.append((f"{FILE}{file}", values))
    layers.append((ADDITIONAL_CONFIG, inline))
    resolved = _merged(layers)
    if trained is not None and follows and applies(trained, resolved.selection.name()):
        resolved = _merged([layers[0], (TRAINED, trained), *layers[1:]])
        check_trained(trained, resolved.selection)
    check_effects(resolved)
    return resolved


def _merged(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> ResolvedConfig:
    """Returns the valid configuration from all sources. Later sources win."""
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    try:
        for source, values in layers:
            _merge(merged, sources, values, source)
    except RecursionError:
        raise ConfigurationError(f"{KEY}: got settings that contain themselves, allowed: a finite mapping") from None
    try:
        return with_one_window(SparseAttentionConfig.model_validate(merged).without_auto(), sources)
    except ValidationError as error:
        sentence = sentence_of(error.errors()[0], sources, merged)
        raise ConfigurationError(" ".join(sentence.splitlines())) from None


def _read_preset(field: str, name: Any) -> dict[str, Any]:
    expect_known(field, [name], preset_names())
    text = resources.files("vllm_sparse_plugin.configs").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return files.parse(f"preset {name}", text)


def _merge(
    into: dict[str, Any], sources: dict[str, str], values: Mapping[str, Any], source: str, prefix: str = ""
) -> None:
    section = prefix.removesuffix(".")
    tag = VARIANTS[section].tag if section in VARIANTS else None
    if tag in values and tag in into and values[tag] != into[tag]:
        # Settings of another policy or method have no meaning for the new one.
        into.clear()
        for name in [name for name in sources if name.startswith(prefix)]:
            del sources[name]
    for replaced in _replaced(section, into, values):
        into.pop(replaced, None)
        sources.pop(prefix + replaced, None)
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(into.setdefault(key, {}), dict):
            _merge(into[key], sources, value, source, f"{prefix}{key}.")
        else:
            into[key] = value
            sources[f"{prefix}{key}"] = source


def _replaced(section: str, before: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Returns the keys of a section that lose their earlier values because of the values of a later source."""
    # `null` replaces no alternative.
    names = [
        replaced
        for form, replaced in REPLACED.get(section, ())
        if values.get(form) is not None and values.get(replaced) is None
    ]
    measured, verdict = MEASURED.get(section, ((), ()))
    given = {name: values[name] for name in measured if values.get(name) is not None}
    if any(value != before.get(name, SECTIONS[section][name].default) for name, value in given.items()):
        names += [name for name in verdict if name not in values]
    return names
