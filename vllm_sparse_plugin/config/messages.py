"""Says in words what is allowed: in a sentence for a bad value, and in a row of documentation for each field."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, get_args

from annotated_types import Ge, Le
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from vllm_sparse_plugin.config.schema import KEY, SECTIONS, SOURCES, SparseAttentionConfig, fields_by_key
from vllm_sparse_plugin.errors import choices
from vllm_sparse_plugin.policies import POLICIES, Selection


def describe_fields() -> list[tuple[str, str, Any, str]]:
    """Returns every field of the schema, for documentation: (dotted name, allowed values, default, description)."""
    names = [policy.name() for policy in POLICIES]
    rows = [("selection.policy", choices(names), names[0], "Which pages a decode step reads.")]
    for key in SECTIONS["selection"]:
        if key == "policy":
            continue
        # Policies may allow different values for a setting of one name.
        owners: dict[tuple[str, Any, str | None], list[str]] = {}
        for policy in POLICIES:
            if field := fields_by_key(policy).get(key):
                owners.setdefault((_allowed(field), field.default, field.description), []).append(policy.name())
        for names in owners.values():
            field = next(fields_by_key(policy)[key] for policy in POLICIES if policy.name() == names[0])
            rows.append(
                _row(f"selection.{key}", field, "" if key in fields_by_key(Selection) else f"{', '.join(names)}: ")
            )
    top = {name: field for name, field in SparseAttentionConfig.model_fields.items() if name not in SECTIONS}
    rows += [_row(name, field, "") for name, field in top.items()]
    for section, fields in SECTIONS.items():
        rows += [_row(f"{section}.{name}", field, "") for name, field in fields.items() if section != "selection"]
    return rows


def describe_policies() -> list[tuple[str, str, str]]:
    """Returns every policy, for documentation: (name, what it does, where it leaves its paper or nothing)."""
    return [(policy.name(), (policy.__doc__ or "").split("\n")[0], policy.departure) for policy in POLICIES]


def _row(name: str, field: FieldInfo, prefix: str) -> tuple[str, str, Any, str]:
    return name, _allowed(field), field.default, prefix + " ".join((field.description or "").split())


def sentence_of(error: ErrorDetails, sources: Mapping[str, str]) -> str:
    """Returns a sentence of the field, what it got and what it allows.

    Args:
        error: of pydantic's validation of `SparseAttentionConfig`.
        sources: of the values by dotted field name; the sentence names one that is not the
            settings themselves.
    """
    tags = {policy.name() for policy in POLICIES}
    path = [str(part) for depth, part in enumerate(error["loc"]) if depth != 1 or part not in tags]
    name = ".".join([KEY, *path])
    origin = sources.get(".".join(path))
    where = f" (from {origin})" if origin and origin != "additional config" else ""
    got = error["input"]
    match error["type"]:
        case "sentence":
            return f"{name}.{error['msg']}"
        case "extra_forbidden":
            known = _known_keys(error["loc"][:-1])
            close = difflib.get_close_matches(path[-1], known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            return f"{name}{where}: unknown key{hint}, allowed: {choices(known)}"
        case "union_tag_invalid" | "union_tag_not_found":
            got = got.get("policy") if isinstance(got, dict) else got
            return f"{name}.policy{where}: got {got!r}, allowed: {choices(sorted(tags))}"
    field = _field(path, error["loc"])
    return f"{name}{where}: got {got!r}, allowed: {_allowed(field) if field else 'a mapping of settings'}"


def _known_keys(section: tuple[int | str, ...]) -> list[str]:
    if not section:
        return [*SparseAttentionConfig.model_fields, *SOURCES]
    if section[0] != "selection":
        return list(SECTIONS[str(section[0])])
    return list(fields_by_key(next(policy for policy in POLICIES if policy.name() == section[-1])))


def _field(path: list[str], location: tuple[int | str, ...]) -> FieldInfo | None:
    if path[:1] and path[0] in SECTIONS:
        policy = next((policy for policy in POLICIES if path[0] == "selection" and policy.name() in location), None)
        fields = fields_by_key(policy) if policy else SECTIONS[path[0]]
        return fields.get(path[1]) if len(path) > 1 else None
    return SparseAttentionConfig.model_fields.get(path[0]) if path else None


def _allowed(field: FieldInfo) -> str:
    if sentence := next((text for text in field.metadata if isinstance(text, str)), None):
        return sentence
    if literals := get_args(field.annotation):
        return choices([str(literal) for literal in literals])
    kind = "an integer" if field.annotation is int else "a number"
    least = next(bound.ge for bound in field.metadata if isinstance(bound, Ge))
    most = next(bound.le for bound in field.metadata if isinstance(bound, Le))
    return f"{kind} from {least:g} to {most:.10g}"
