"""KV connectors of vLLM with names that describe the blocks of this plugin's backends.

A block may leave its engine, to a file, another store or another engine. vLLM finds it by its tokens, the model's name
and its own layout numbers. These do not describe the page statistics in the block. They also do not describe what the
block's tokens attended to, which decides their keys and values: for prompts the settings of sparse prefill, for decoded
tokens those of sparse decode. The connectors here get a longer model name. Its suffix names the statistics and these
settings. Files of other settings then have other names, and the handshake of engines with different settings fails.

vLLM finds the classes here because admission sets `kv_connector_module_path` to this module.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from typing import TYPE_CHECKING, Any

from vllm_sparse_plugin.compat import chosen_backend
from vllm_sparse_plugin.config import ResolvedConfig
from vllm_sparse_plugin.engine_settings import resolved
from vllm_sparse_plugin.names import BACKENDS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector", "NixlConnector", "DecodeBenchConnector")
"""Supported KV connectors: they move whole blocks with statistics rows, or fill blocks with noise to measure time."""
STATISTICS_VERSION = 2
"""Version of the bytes of page statistics. Raise it when the bytes of a format change. See `test_connectors.py`."""
_OF_DECODE = {
    "selection", "routing", "stopping", "compaction", "speculation", "first_dense_layers", "min_context_tokens",
}  # fmt: skip
"""Settings that decide what a decoding token attends to."""
_ORIGIN = {"routing": {"accept", "recommended", "fingerprint", "model", "data", "date"}}
"""Settings that only record where other settings are from."""


def __getattr__(name: str) -> Any:
    if name not in CONNECTORS:
        raise AttributeError(name)
    return _connector(name)


@functools.cache
def _connector(name: str) -> type:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    base: Any = KVConnectorFactory.get_connector_class_by_name(name)

    class Connector(base):  # type: ignore[misc]
        def __init__(self, vllm_config: VllmConfig, role: Any, kv_cache_config: KVCacheConfig) -> None:
            super().__init__(with_block_contents(vllm_config, kv_cache_config), role, kv_cache_config)

    Connector.__name__ = Connector.__qualname__ = name
    return Connector


def with_block_contents(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> VllmConfig:
    """Returns the configuration with a model name whose suffix describes the contents of blocks."""
    name = chosen_backend(vllm_config, BACKENDS)
    if name is None:
        return vllm_config
    config = resolved(vllm_config, BACKENDS[name])
    contents = block_contents(config, kv_cache_config)
    if not contents:
        return vllm_config
    renamed = copy.copy(vllm_config)
    renamed.model_config = copy.copy(vllm_config.model_config)
    renamed.model_config.model = f"{vllm_config.model_config.model}+{contents}"
    return renamed


def block_contents(config: ResolvedConfig, kv_cache_config: KVCacheConfig) -> str:
    """Returns a name of everything except the model that decides the bytes of a block. It is valid in a file name.

    Args:
        config: the settings of the plugin.
        kv_cache_config: vLLM's layout of the blocks of all layers.

    Returns:
        The name; empty if blocks hold only keys and values of dense attention.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec

    shapes = set()
    for group in kv_cache_config.kv_cache_groups:
        # A group of layers with different shapes has several specs.
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values()
        shapes |= {
            (spec.block_size, spec.head_size, str(spec.dtype).removeprefix("torch."), spec.dtype.itemsize)
            for spec in specs
            if isinstance(spec, AttentionSpec) and spec.tokens_per_state != 1
        }
    prefill = config.config.prefill
    settings = [] if prefill is None else [f"prefill-{_digest(prefill.model_dump_json())}"]
    # In lossless mode all tokens have the keys and values of dense attention.
    if config.lossless is None and (config.is_sparse or config.compaction is not None):
        settings.append(f"decode-{_digest(config.config.model_dump_json(include=_OF_DECODE, exclude=_ORIGIN))}")
    parts = []
    for block_size, head_size, dtype, itemsize in sorted(shapes):
        if layout := config.statistics_layout(head_size, itemsize):
            parts.append(
                f"{layout.kind.name}-{layout.format}-page{layout.page_size}-block{block_size}-head{head_size}-{dtype}"
            )
    statistics = [f"statistics{STATISTICS_VERSION}", *parts] if parts else []
    return "+".join([*statistics, *settings])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
