"""Describes allowed values: in the sentence for a bad value, and in the documentation of each field."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import NoneType
from typing import Any, get_args

from annotated_types import Ge, Le
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from vllm_sparse_plugin.config.schema import KEY, SECTIONS, SOURCES, VARIANTS, SparseAttentionConfig, fields_by_key
from vllm_sparse_plugin.errors import choices
from vllm_sparse_plugin.policies import POLICIES

_MOST_SHOWN = 200
"""Most characters of a value in a sentence."""


def describe_fields() -> list[tuple[str, str, Any, str]]:
    """Returns every field of the schema, for documentation: (dotted name, allowed values, default, description)."""
    top = {name: field for name, field in SparseAttentionConfig.model_fields.items() if name not in SECTIONS}
    first, *others = SECTIONS
    rows = [*_rows(first), *(_row(name, field, "") for name, field in top.items())]
    return rows + [row for section in others for row in _rows(section)]


def _rows(section: str) -> list[tuple[str, str, Any, str]]:
    """Returns the fields of a section. Fields of several models have the names of their models."""
    if section not in VARIANTS:
        return [_row(f"{section}.{key}", field, "") for key, field in SECTIONS[section].items()]
    tag, common, default = VARIANTS[section].tag, VARIANTS[section].common, VARIANTS[section].default
    models = VARIANTS[section].by_name
    text = _text(SparseAttentionConfig.model_fields[section])
    rows: list[tuple[str, str, Any, str]] = [(f"{section}.{tag}", choices(models), default, text)]
    for key in SECTIONS[section]:
        if key == tag:
            continue
        # Models may allow different values for a setting of the same name.
        owners: dict[tuple[str, Any, str | None], list[str]] = {}
        for name, model in models.items():
            if field := fields_by_key(model).get(key):
                owners.setdefault((allowed_by(field), field.default, field.description), []).append(name)
        shared = key in fields_by_key(common) and len(owners) == 1
        for names in owners.values():
            prefix = "" if shared else f"{', '.join(names)}: "
            rows.append(_row(f"{section}.{key}", fields_by_key(models[names[0]])[key], prefix))
    return rows


def describe_policies() -> list[tuple[str, str, str]]:
    """Returns every policy, for documentation: (name, summary, difference from the paper or empty)."""
    return [(policy.name(), (policy.__doc__ or "").split("\n")[0], policy.departure) for policy in POLICIES]


def _row(name: str, field: FieldInfo, prefix: str) -> tuple[str, str, Any, str]:
    return name, allowed_by(field), field.default, prefix + _text(field)


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def sentence_of(error: ErrorDetails, sources: Mapping[str, str], values: Mapping[str, Any]) -> str:
    """Returns a sentence with the field, the value and the allowed values.

    Args:
        error: of pydantic's validation of `SparseAttentionConfig`.
        sources: sources of values by dotted field name. The sentence names a source other than the settings
            themselves.
        values: the values that were validated.
    """
    path = [str(part)[:_MOST_SHOWN] for part in error["loc"]]
    variants = VARIANTS.get(path[0]) if path else None
    name = ".".join([KEY, *path])
    origin = sources.get(".".join(path))
    where = f" (from {origin})" if origin and origin != "additional config" else ""
    got = error["input"]
    match error["type"]:
        case "sentence":
            return f"{name}.{error['msg']}"
        case "extra_forbidden":
            known = _known_keys(path[:-1], values)
            close = difflib.get_close_matches(path[-1], known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            return f"{name}{where}: unknown key{hint}, allowed: {choices(known)}"
        case "union_tag_invalid" | "union_tag_not_found" if variants:
            got = got.get(variants.tag) if isinstance(got, dict) else got
            return f"{name}.{variants.tag}{where}: got {_shown(got)}, allowed: {choices(variants.names())}"
    field = _field(path, values)
    return f"{name}{where}: got {_shown(got)}, allowed: {allowed_by(field) if field else 'a mapping of settings'}"


def _shown(got: Any) -> str:
    """Returns a value as text, shortened if it is long."""
    try:
        text = repr(got)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits.
        return "a number of very many digits"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _known_keys(section: list[str], values: Mapping[str, Any]) -> list[str]:
    if not section:
        return [*SparseAttentionConfig.model_fields, *SOURCES]
    return list(_fields_of(section[0], values))


def _field(path: list[str], values: Mapping[str, Any]) -> FieldInfo | None:
    if path[:1] and path[0] in SECTIONS:
        return _fields_of(path[0], values).get(path[1]) if len(path) > 1 else None
    return SparseAttentionConfig.model_fields.get(path[0]) if path else None


def _fields_of(section: str, values: Mapping[str, Any]) -> dict[str, FieldInfo]:
    """Returns the fields of a section, of the model that the values name."""
    variants = VARIANTS.get(section)
    model = variants.find(values[section][variants.tag]) if variants else None
    return fields_by_key(model) if model else SECTIONS[section]


def allowed_by(field: FieldInfo) -> str:
    """Returns the allowed values of a field in words."""
    if sentence := next((text for text in field.metadata if isinstance(text, str)), None):
        return sentence
    if field.annotation is bool:
        return "true or false"
    kinds = get_args(field.annotation)
    if kinds and NoneType not in kinds:
        return choices([str(literal) for literal in kinds])
    kind = "an integer" if int in (field.annotation, *kinds) else "a number"
    least = next((bound.ge for bound in field.metadata if isinstance(bound, Ge)), None)
    most = next((bound.le for bound in field.metadata if isinstance(bound, Le)), None)
    if least is None or most is None:
        # A field of another package.
        return "text" if field.annotation is str else kind
    return f"{kind} from {least:g} to {most:.10g}"
