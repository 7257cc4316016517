"""The settings that a model was trained with. They are in its config.json and form a separate source.

The section there has the keys of the schema. It overrides the preset of the backend; settings of the user override it.
The model has learned its page statistics, so a user must not change them. `"trained": false` ignores the section.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_sparse_plugin.config.schema import KEY, ResolvedConfig
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.policies import POLICIES, DensePolicy
from vllm_sparse_plugin.policies.base import Policy

TRAINED = "the model's config.json"
"""Source of values that a model provides."""
SWITCH = "trained"
"""Key in addition to the schema: false ignores the model's section."""
LEARNED = ("page_size", "statistics")
"""Settings of `selection` that a trained model requires. Other settings only change how much is read."""


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
    selection = config.selection.model_dump(by_alias=True)
    return {
        "selection": selection,
        "first_dense_layers": config.config.first_dense_layers,
        "min_context_tokens": config.config.min_context_tokens,
    }


def applies(section: Mapping[str, Any], policy: str) -> bool:
    """Returns whether the section is a source of values for a policy. It must be the section's policy. Dense attention
    reads everything, so it may serve any model.

    Args:
        section: of the model.
        policy: the policy from all other sources.

    Raises:
        ConfigurationError: if the policy is another one that selects pages.
    """
    trained = section["selection"].get("policy", POLICIES[0].name())
    if policy == DensePolicy.name():
        return False
    if policy != trained:
        _refuse("policy", policy, trained)
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
