"""Methods of eviction say which tokens the cache keeps after a prompt. Each has one file.

`vllm_sparse_plugin.compaction` moves the kept tokens and gives blocks back, for all methods.
"""

from vllm_sparse_plugin.evictions.base import COMPACTIONS, Compaction, RepeatedCompaction
from vllm_sparse_plugin.evictions.retention import Pyramid, Retention, requests_at_once

COMPACTIONS.import_folder(__name__, __path__)

__all__ = ["COMPACTIONS", "Compaction", "Pyramid", "RepeatedCompaction", "Retention", "requests_at_once"]
