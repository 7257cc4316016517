"""Engine variants to compare, and engines inside this process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.common.in_process import engine_in_process
from bench.common.models import Model
from bench.common.options import split_values
from bench.common.worker import EXTENSION
from vllm_sparse_plugin.config import KEY, preset_names, resolve
from vllm_sparse_plugin.config.routing import Routing
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.names import BACKENDS, backend_beside
from vllm_sparse_plugin.tools.arguments import parse_additional_config

if TYPE_CHECKING:
    from vllm import LLM

DENSE = "dense"
DENSE_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
KV_CACHE_DTYPES = ("auto", "fp8")


DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""Decode graphs without torch.compile, which takes time and does not change attention."""


class WrongBackendError(ConfigurationError):
    """vLLM runs another attention backend than the requested one."""


@dataclass(frozen=True)
class Variant:
    """An attention backend and a KV cache type."""

    backend: str | None
    """Name as vLLM registers it; None for the platform's own choice."""
    kv_cache_dtype: str = "auto"
    """`auto` is the model's type."""
    preset: str | None = None
    """A preset of the plugin that is no backend."""

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Parse `BACKEND` or `BACKEND:KV_CACHE_DTYPE`, such as `unique:fp8`.

        Raises:
            ConfigurationError: for anything else.
        """
        name, _, dtype = text.partition(":")
        # The plugin's backend named `dense` is not a variant: the comparison is with vLLM's own backend.
        backends = list(dict.fromkeys([DENSE, *(backend.lower() for backend in (*DENSE_BACKENDS, *BACKENDS))]))
        known = [*backends, *(preset for preset in preset_names() if preset not in backends)]
        dtype = dtype or "auto"
        if name.lower() not in known or dtype not in KV_CACHE_DTYPES:
            raise ConfigurationError(
                f"variant: got {text!r}, allowed: {', '.join(known)}, each alone or with "
                f"{' or '.join(':' + dtype for dtype in KV_CACHE_DTYPES)}"
            )
        if name.lower() not in backends:
            return cls(backend_beside(name.lower()).upper(), dtype, name.lower())
        return cls(None if name.lower() == DENSE else name.upper(), dtype)

    @property
    def name(self) -> str:
        """The text that `parse` reads."""
        dtype = "" if self.kv_cache_dtype == "auto" else f":{self.kv_cache_dtype}"
        return (self.preset or self.backend or DENSE).lower() + dtype

    @property
    def sparse(self) -> bool:
        """Whether the backend belongs to this plugin."""
        return self.backend in BACKENDS

    def additional_config(self, text: str | None) -> str | None:
        """The JSON for this variant: vLLM's own backends get none.

        Raises:
            ConfigurationError: if the settings are wrong for the backend.
        """
        if not self.sparse or (text is None and self.preset is None):
            return None
        assert self.backend is not None
        settings = parse_additional_config(text or "{}")
        if self.preset is not None:
            settings = settings | {KEY: {"preset": self.preset, **(settings.get(KEY) or {})}}
        resolve(settings.get(KEY), BACKENDS[self.backend])
        return text if self.preset is None else json.dumps(settings)

    def budget_tokens(self, text: str | None) -> int | None:
        """The tokens that a decode step reads with this JSON; None without a budget."""
        if not self.sparse:
            return None
        assert self.backend is not None
        settings = parse_additional_config(text).get(KEY) if text else None
        return getattr(resolve(settings, BACKENDS[self.backend]).selection, "budget_tokens", None)

    def check_backends(self, used: list[str]) -> str:
        """Return the backend of the layers.

        Raises:
            WrongBackendError: if it is not the requested one, or if there are several.
        """
        if len(used) != 1 or self.backend not in (None, used[0]):
            raise WrongBackendError(f"{self.name}: vLLM runs {' and '.join(used) or 'no attention backend'}")
        return used[0]


def parse_variants(values: Iterable[str]) -> list[Variant]:
    """Parse the variants of an option that may be repeated.

    Raises:
        ConfigurationError: a value is not a variant.
    """
    return [Variant.parse(text) for text in split_values(values)]


def force_routing(model: Model, additional_config: str | None, skip_ratio: float) -> str:
    """Settings that make this plugin's backends skip a fixed share of the KV groups. With random weights no threshold
    reaches a given share, and the measured time must not depend on the weights.

    Args:
        model: gives layers and KV heads.
        additional_config: JSON to add to.
        skip_ratio: share of the groups to skip, over all layers except the leading dense ones.

    Raises:
        ConfigurationError: for an invalid share, or JSON that is not an object.
    """
    if not 0 <= skip_ratio <= 1:
        raise ConfigurationError(f"skip_ratio: got {skip_ratio}, allowed: 0 to 1")
    heads, dense = int(model.config["num_key_value_heads"]), int(Routing.model_fields["dense_layers"].default)
    thresholds = []
    for layer in range(int(model.config["num_hidden_layers"])):
        before, after = (round(skip_ratio * heads * max(0, routed)) for routed in (layer - dense, layer - dense + 1))
        thresholds.append([-2] * (after - before) + [2] * (heads - after + before))
    settings = parse_additional_config(additional_config or "{}")
    ours = settings.get(KEY) or {}
    return json.dumps(settings | {KEY: {**ours, "routing": {"threshold": thresholds, "accept": "uncalibrated"}}})


def engine_options(model: Model, variant: Variant, additional_config: str | None, **options: Any) -> dict[str, Any]:
    """The arguments of `vllm.LLM`.

    Args:
        model: the model.
        variant: the backend and the type of the KV cache.
        additional_config: JSON for this plugin's backends.
        **options: further arguments; None omits one.
    """
    from vllm.platforms import current_platform

    if variant.backend is not None:
        options["attention_backend"] = variant.backend
    if settings := variant.additional_config(additional_config):
        options["additional_config"] = parse_additional_config(settings)
    if model.drawn_weights:
        options["load_format"] = "dummy"
    if current_platform.is_cpu():
        options |= {"enforce_eager": True, "compilation_config": {}}
        options.pop("gpu_memory_utilization", None)
    options |= {
        "model": str(model.folder), "kv_cache_dtype": variant.kv_cache_dtype, "worker_extension_cls": EXTENSION,
    }  # fmt: skip
    return {name: value for name, value in options.items() if value is not None}


@contextmanager
def engine(model: Model, variant: Variant, additional_config: str | None, **options: Any) -> Iterator[tuple[LLM, str]]:
    """Yield an engine inside this process and the name of its attention backend; it ends with the block.

    Arguments are those of `engine_options`.

    Raises:
        WrongBackendError: if vLLM chose another attention backend.
    """
    # By default vLLM's CPU build takes nearly all memory.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with engine_in_process(**engine_options(model, variant, additional_config, **options)) as llm:
        if model.drawn_weights:
            llm.collective_rpc("draw_weights")
        yield llm, variant.check_backends(llm.collective_rpc("attention_backends")[0])
