"""The configuration schema, and where its values come from.

Later sources win: the schema's defaults, the preset of the chosen backend, `preset`, the YAML file named by
`config`, and the keys given in `--additional-config '{"sparse_attention": {...}}'` themselves.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from importlib import resources
from operator import or_
from pathlib import Path
from typing import Annotated, Any, get_args

import yaml
from annotated_types import Ge, Le
from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from sparse_kernels.stopping import StopRule

from vllm_sparse_plugin.errors import ConfigurationError, choices
from vllm_sparse_plugin.policies import POLICIES, EveryPage, Policy, Selection, UniqueSelection
from vllm_sparse_plugin.policies.base import Section
from vllm_sparse_plugin.routing import Routing
from vllm_sparse_plugin.termination import Termination

KEY = "sparse_attention"
"""Key of our settings in vLLM's `--additional-config`."""
_SOURCES = ("preset", "config")

AnySelection = Annotated[reduce(or_, POLICIES), Field(discriminator="policy")]  # type: ignore[valid-type]


class Diagnostics(Section):
    """Measuring the selections of a running server."""

    sample_every: Annotated[int, Field(ge=0, le=1 << 30)] = 0
    """One in so many steps that decode sparsely has one of its tokens attend to everything as well; how the selection
    compares is added to the `vllm_sparse_` metrics at `/metrics`, by layer and KV head. 0 for none. On a GPU not with
    full CUDA graphs."""


class SparseAttentionConfig(Section):
    """Settings of the decode pipeline. Prefill is always dense."""

    selection: AnySelection = UniqueSelection()  # type: ignore[valid-type]
    """Which pages a decode step reads."""
    routing: Routing | None = None
    """Which KV groups a decode step skips; None for none."""
    termination: Termination | None = None
    """When a decode step stops reading; None for never."""
    first_dense_layers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Leading layers that stay dense."""
    min_context_tokens: Annotated[int, Field(ge=0, le=1 << 24)] = 1024
    """Shortest context that is made sparse; shorter ones are served dense."""
    diagnostics: Diagnostics = Diagnostics()
    """Measuring the selections of a running server."""


_SECTIONS: dict[str, dict[str, FieldInfo]] = {
    "selection": {field.alias or name: field for policy in POLICIES for name, field in policy.model_fields.items()},
    "routing": dict(Routing.model_fields),
    "termination": dict(Termination.model_fields),
    "diagnostics": dict(Diagnostics.model_fields),
}
"""Fields of the parts of the configuration that are mappings, by the keys a user writes."""


@dataclass(frozen=True)
class ResolvedConfig:
    """A valid configuration and the source of each of its values."""

    config: SparseAttentionConfig
    sources: dict[str, str]
    """Dotted field name to source, for the values that are not the schema's defaults."""

    @property
    def selection(self) -> Policy:
        """The selection part."""
        selection: Policy = self.config.selection
        return selection

    @property
    def routing(self) -> Routing | None:
        """The routing part, if there is one."""
        return self.config.routing

    @property
    def selector(self) -> Selection | None:
        """The policy that chooses pages, all of them where dense attention may stop; None if everything is read."""
        if isinstance(self.selection, Selection):
            return self.selection
        termination = self.config.termination
        return EveryPage(sink_pages=termination.dense_sink_pages) if termination else None

    @property
    def stop_rule(self) -> StopRule | None:
        """When attention to selected pages stops; None if it does not."""
        termination, selector = self.config.termination, self.selector
        return termination.rule(selector) if termination and selector else None

    @property
    def is_sparse(self) -> bool:
        """Whether decode steps of some layers run in our kernels."""
        return self.selector is not None or self.routing is not None


def preset_names() -> list[str]:
    """Names of the presets in `configs/`."""
    folder = resources.files("vllm_sparse_plugin.configs")
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def resolve(settings: Mapping[str, Any] | None, backend_preset: str) -> ResolvedConfig:
    """Merges all sources of the configuration and validates the result.

    Args:
        settings: the value of `sparse_attention` in `--additional-config`, if any.
        backend_preset: preset of the chosen attention backend.

    Raises:
        ConfigurationError: for an unknown key, a value out of range, or a preset or file that cannot be read.
    """
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigurationError(f"{KEY}: got {settings!r}, allowed: a JSON object")
    inline = dict(settings or {})
    layers = [(f"backend preset {backend_preset}", _read_preset("backend", backend_preset))]
    preset, file = (inline.pop(key, None) for key in _SOURCES)
    if preset is not None:
        layers.append((f"preset {preset}", _read_preset(f"{KEY}.preset", preset)))
    if file is not None:
        layers.append((f"file {file}", _read_file(file)))
    layers.append(("additional config", inline))

    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    try:
        for source, values in layers:
            _merge(merged, sources, values, source)
    except RecursionError:
        raise ConfigurationError(f"{KEY}: got settings that contain themselves, allowed: a finite mapping") from None
    try:
        return ResolvedConfig(SparseAttentionConfig.model_validate(merged), sources)
    except ValidationError as error:
        sentence = _sentence(error.errors()[0], sources)
        raise ConfigurationError(" ".join(sentence.splitlines())) from None


def describe_fields() -> list[tuple[str, str, Any, str]]:
    """Every field of the schema, for documentation: (dotted name, allowed values, default, description)."""
    names = [policy.name() for policy in POLICIES]
    rows = [("selection.policy", choices(names), names[0], "Which pages a decode step reads.")]
    for key in _SECTIONS["selection"]:
        if key == "policy":
            continue
        # Policies may allow different values for a setting of one name.
        owners: dict[tuple[str, Any, str | None], list[str]] = {}
        for policy in POLICIES:
            if field := _fields(policy).get(key):
                owners.setdefault((_allowed(field), field.default, field.description), []).append(policy.name())
        for names in owners.values():
            field = next(_fields(policy)[key] for policy in POLICIES if policy.name() == names[0])
            rows.append(_row(f"selection.{key}", field, "" if key in _keys(Selection) else f"{', '.join(names)}: "))
    top = {name: field for name, field in SparseAttentionConfig.model_fields.items() if name not in _SECTIONS}
    rows += [_row(name, field, "") for name, field in top.items()]
    for section, fields in _SECTIONS.items():
        rows += [_row(f"{section}.{name}", field, "") for name, field in fields.items() if section != "selection"]
    return rows


def _row(name: str, field: FieldInfo, prefix: str) -> tuple[str, str, Any, str]:
    return name, _allowed(field), field.default, prefix + " ".join((field.description or "").split())


def _read_preset(field: str, name: Any) -> dict[str, Any]:
    if name not in preset_names():
        raise ConfigurationError(f"{field}: got {name!r}, allowed: {choices(preset_names())}")
    text = resources.files("vllm_sparse_plugin.configs").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return _parse(f"preset {name}", text)


def _read_file(path: Any) -> dict[str, Any]:
    if not isinstance(path, str):
        raise ConfigurationError(f"{KEY}.config: got {path!r}, allowed: the path of a YAML file")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no file of UTF-8 text"
        raise ConfigurationError(f"{KEY}.config: got {path!r} ({reason}), allowed: a readable YAML file") from None
    return _parse(f"{KEY}.config {path!r}", text)


def _parse(origin: str, text: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, LookupError, ValueError) as error:  # PyYAML leaks those of impossible dates and numbers
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise ConfigurationError(f"{origin}: got text that is not YAML{where}, allowed: a YAML mapping") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigurationError(f"{origin}: got a {type(values).__name__}, allowed: a YAML mapping")
    return values


def _merge(
    into: dict[str, Any], sources: dict[str, str], values: Mapping[str, Any], source: str, prefix: str = ""
) -> None:
    if "policy" in values and "policy" in into and values["policy"] != into["policy"]:
        # Settings of another policy mean nothing to the new one.
        into.clear()
        for name in [name for name in sources if name.startswith(prefix)]:
            del sources[name]
    if prefix == "routing.":
        # One form of the threshold replaces the other.
        for form, other in (("threshold", "cubic"), ("cubic", "threshold")):
            if form in values and other not in values:
                into.pop(other, None)
                sources.pop(prefix + other, None)
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(into.setdefault(key, {}), dict):
            _merge(into[key], sources, value, source, f"{prefix}{key}.")
        else:
            into[key] = value
            sources[f"{prefix}{key}"] = source


def _sentence(error: ErrorDetails, sources: Mapping[str, str]) -> str:
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
        return [*SparseAttentionConfig.model_fields, *_SOURCES]
    if section[0] != "selection":
        return list(_SECTIONS[str(section[0])])
    return _keys(next(policy for policy in POLICIES if policy.name() == section[-1]))


def _keys(policy: type[Policy]) -> list[str]:
    return list(_fields(policy))


def _fields(policy: type[Policy]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in policy.model_fields.items()}


def _field(path: list[str], location: tuple[int | str, ...]) -> FieldInfo | None:
    if path[:1] and path[0] in _SECTIONS:
        policy = next((policy for policy in POLICIES if path[0] == "selection" and policy.name() in location), None)
        fields = _fields(policy) if policy else _SECTIONS[path[0]]
        return fields.get(path[1]) if len(path) > 1 else None
    return SparseAttentionConfig.model_fields.get(path[0]) if path else None


def _allowed(field: FieldInfo) -> str:
    if said := next((text for text in field.metadata if isinstance(text, str)), None):
        return said
    if literals := get_args(field.annotation):
        return choices([str(literal) for literal in literals])
    kind = "an integer" if field.annotation is int else "a number"
    least = next(bound.ge for bound in field.metadata if isinstance(bound, Ge))
    most = next(bound.le for bound in field.metadata if isinstance(bound, Le))
    return f"{kind} from {least:g} to {most:.10g}"
