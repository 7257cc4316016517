"""Policies choose what a decode step reads. Each has one file."""

from vllm_sparse_plugin.policies.base import POLICIES, Policy, Selection, reads_selection
from vllm_sparse_plugin.policies.by_mean import MeanSelection
from vllm_sparse_plugin.policies.dense import DensePolicy, EveryPage
from vllm_sparse_plugin.policies.quest import QuestSelection
from vllm_sparse_plugin.policies.streaming_llm import StreamingLLMSelection
from vllm_sparse_plugin.policies.unique import UniqueSelection

# Files that no other module needs by name add their policies too.
POLICIES.import_folder(__name__, __path__)

__all__ = [
    "POLICIES",
    "DensePolicy",
    "EveryPage",
    "MeanSelection",
    "Policy",
    "QuestSelection",
    "Selection",
    "StreamingLLMSelection",
    "UniqueSelection",
    "reads_selection",
]
