"""The configuration: its schema, the sources of its values, and messages about it.

This package needs neither vLLM nor torch.
"""

from vllm_sparse_plugin.config.lossless import DraftRule, Lossless
from vllm_sparse_plugin.config.messages import describe_fields, describe_policies
from vllm_sparse_plugin.config.offload import Offload
from vllm_sparse_plugin.config.prefill import BlockPrefill, ZipVLPrefill
from vllm_sparse_plugin.config.routing import Routing
from vllm_sparse_plugin.config.schema import KEY, Diagnostics, ResolvedConfig, SparseAttentionConfig
from vllm_sparse_plugin.config.sources import check_additional_config, preset_names, resolve
from vllm_sparse_plugin.config.speculation import Speculation
from vllm_sparse_plugin.config.stopping import Stopping
from vllm_sparse_plugin.config.trained import read_trained_section, section_of, trained_section

__all__ = [
    "KEY",
    "BlockPrefill",
    "Diagnostics",
    "DraftRule",
    "Lossless",
    "Offload",
    "ResolvedConfig",
    "Routing",
    "SparseAttentionConfig",
    "Speculation",
    "Stopping",
    "ZipVLPrefill",
    "check_additional_config",
    "describe_fields",
    "describe_policies",
    "preset_names",
    "read_trained_section",
    "resolve",
    "section_of",
    "trained_section",
]
