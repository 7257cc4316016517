"""Which pages a decode step reads: one file a policy, one row here."""

from vllm_sparse_plugin.policies.base import Selection
from vllm_sparse_plugin.policies.infllm import InfLLMSelection
from vllm_sparse_plugin.policies.quest import QuestSelection
from vllm_sparse_plugin.policies.streaming_llm import StreamingLLMSelection
from vllm_sparse_plugin.policies.unique import UniqueSelection

POLICIES: tuple[type[Selection], ...] = (UniqueSelection, QuestSelection, InfLLMSelection, StreamingLLMSelection)
"""Every selection policy; the configuration schema and the tests follow from this table."""

__all__ = [
    "POLICIES",
    "InfLLMSelection",
    "QuestSelection",
    "Selection",
    "StreamingLLMSelection",
    "UniqueSelection",
]
