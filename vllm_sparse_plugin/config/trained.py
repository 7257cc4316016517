"""The settings that come with a model: in its config.json, and in YAML files of its folder.

The section in config.json has the settings that the model was trained with. It is a source of its own: it overrides the
preset of the backend; settings of the user override it. The model has learned its page statistics, so a user must not
change them. `"trained": false` ignores the section.

Such files are downloaded, so they have no operator's rights: they may set the keys that this plugin's commands write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_sparse_plugin.config.routing import FITTED, ORIGIN, VERDICT
from vllm_sparse_plugin.config.schema import KEY, ResolvedConfig
from vllm_sparse_plugin.errors import ConfigurationError, choices
from vllm_sparse_plugin.policies import DensePolicy, UniqueSelection
from vllm_sparse_plugin.policies.base import Policy

TRAINED = "the model's config.json"
"""Source of values that a model provides."""
SWITCH = "trained"
"""Key in addition to the schema: false ignores the model's section."""
LEARNED = ("page_size", "statistics")
"""Settings of `selection` that a trained model requires. Other settings only change how much is read."""
TRAINED_KEYS = (
    *(f"selection.{name}" for name in ("policy", *LEARNED, "lambda", "budget_tokens", "sink_pages", "recent_pages")),
    "first_dense_layers", "min_context_tokens",
)  # fmt: skip
"""The settings that a model's config.json may have: those that `train` writes."""
FOUND_KEYS = (
    *TRAINED_KEYS,
    *(f"selection.{name}" for name in ("anchor_layers", "anchor_heads", "fingerprint")),
    *(f"routing.{name}" for name in (*FITTED, *VERDICT, *ORIGIN)),
)
"""The settings that a file beside a model may have: also those that `anchors` and `calibrate` write."""
_OF_A_MODEL = (("config.json", b'"model_type"'), ("adapter_config.json", b"{"))
"""Files that tell the folder of a model or of an adapter from others, and what they have."""
_MOST_BYTES = 1 << 24


def trained_section(hf_config: Any) -> dict[str, Any] | None:
    """Returns the section of a model's configuration; None if it has none.

    Args:
        hf_config: transformers' configuration of the model, or None.
    """
    return _section(getattr(hf_config, KEY, None))


def read_trained_section(folder: Path) -> dict[str, Any] | None:
    """Returns the section in the config.json of a model's folder; None if it has none.

    Raises:
        ConfigurationError: if the file is missing or is not JSON.
    """
    try:
        return _section(json.loads((folder / "config.json").read_text(encoding="utf-8")).get(KEY))
    except (OSError, ValueError, AttributeError):
        raise ConfigurationError(f"model: got {str(folder)!r}, allowed: a folder with a config.json") from None


def _section(found: Any) -> dict[str, Any] | None:
    # Another project may use the same name.
    if not isinstance(found, Mapping) or not isinstance(found.get("selection"), Mapping):
        return None
    return dict(found)


def section_of(config: ResolvedConfig) -> dict[str, Any]:
    """Returns the section for the config.json of a model that was trained with these settings."""
    values = config.config.model_dump(by_alias=True)
    section: dict[str, Any] = {"selection": {}}
    for key in TRAINED_KEYS:
        name, _, setting = key.partition(".")
        if not setting:
            section[name] = values[name]
        elif setting in values[name]:
            section[name][setting] = values[name][setting]
    return section


def is_beside_a_model(path: str) -> bool:
    """Returns whether a file is in the folder of a model or of an adapter, or in a folder below, so that it may have
    been downloaded with the model."""
    folders = {*Path(path).absolute().parents, *Path(path).resolve().parents}
    return any(_has(folder / name, text) for folder in folders for name, text in _OF_A_MODEL)


def _has(path: Path, text: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return text in file.read(_MOST_BYTES)
    except OSError:
        return False


def expect_keys(values: Mapping[str, Any], allowed: Sequence[str], source: str, otherwise: str) -> None:
    """Checks the keys of settings that may have been downloaded.

    Args:
        values: the settings.
        allowed: dotted names of the settings that they may have.
        source: where the settings are, for the message.
        otherwise: what a user can do who trusts them, for the message.

    Raises:
        ConfigurationError: names the first other key.
    """
    for name, value in values.items():
        sections = {key.partition(".")[0] for key in allowed if "." in key}
        settings = [f"{name}.{key}" for key in value] if name in sections and isinstance(value, Mapping) else [name]
        for key in settings:
            if key not in allowed:
                raise ConfigurationError(
                    f"{KEY}: got {key!s:.200} in {source}, allowed there: {choices(allowed)}; {otherwise}"
                )


def applies(section: Mapping[str, Any], policy: str) -> bool:
    """Returns whether the section is a source of values for a policy. It must be the section's policy. Dense attention
    reads everything, so it may serve any model.

    Args:
        section: of the model.
        policy: the policy from all other sources.

    Raises:
        ConfigurationError: if the policy is another one that selects pages, or the section has other settings than
            `train` writes.
    """
    trained = section["selection"].get("policy", UniqueSelection.name())
    if policy == DensePolicy.name():
        return False
    if policy != trained:
        _refuse("policy", policy, trained)
    expect_keys(section, TRAINED_KEYS, TRAINED, f'or "{SWITCH}": false')
    return True


def check_trained(section: Mapping[str, Any], selection: Policy) -> None:
    """Compares a valid selection with the section.

    Raises:
        ConfigurationError: if a setting contradicts the training.
    """
    for name in LEARNED:
        trained = section["selection"].get(name)
        if trained is not None and (got := getattr(selection, name)) != trained:
            _refuse(name, got, trained)


def _refuse(name: str, got: Any, trained: Any) -> None:
    raise ConfigurationError(
        f"{KEY}.selection.{name}: got {got!r}, allowed: {trained!r}, with which the model was trained, or "
        f'"{SWITCH}": false'
    )
