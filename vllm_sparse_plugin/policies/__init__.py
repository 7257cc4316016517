"""Policies choose what a decode step reads. Each has one file, and one row here."""

from vllm_sparse_plugin.policies.base import Policy, Selection, reads_selection
from vllm_sparse_plugin.policies.dense import DensePolicy, EveryPage
from vllm_sparse_plugin.policies.infllm import InfLLMSelection
from vllm_sparse_plugin.policies.mean import MeanSelection
from vllm_sparse_plugin.policies.quest import QuestSelection
from vllm_sparse_plugin.policies.streaming_llm import StreamingLLMSelection
from vllm_sparse_plugin.policies.unique import UniqueSelection

POLICIES: tuple[type[Policy], ...] = (
    UniqueSelection,
    QuestSelection,
    InfLLMSelection,
    MeanSelection,
    StreamingLLMSelection,
    DensePolicy,
)
"""Every policy. The configuration schema, the documentation and the tests use this table."""

__all__ = [
    "POLICIES",
    "DensePolicy",
    "EveryPage",
    "InfLLMSelection",
    "MeanSelection",
    "Policy",
    "QuestSelection",
    "Selection",
    "StreamingLLMSelection",
    "UniqueSelection",
    "reads_selection",
]
