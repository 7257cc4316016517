"""Makes the attention backends known to vLLM, in every process and however often it asks."""

from __future__ import annotations

from vllm_sparse_plugin import compat

BACKENDS: dict[str, str] = {
    "UNIQUE": "unique",
    "UNIQUE_PAPER": "unique_paper",
    "QUEST": "quest",
    "INFLLM": "infllm",
    "MEAN": "mean",
    "STREAMING_LLM": "streaming_llm",
    "DENSE": "dense",
    "SINKROUTER": "sinkrouter",
    "ART": "art",
}
"""Name of each attention backend, as in `--attention-backend`, and its preset in `configs/`."""


def register() -> None:
    """Registers the backends and the checks that run once one of them is chosen. Idempotent."""
    compat.register_backend_names(BACKENDS)
    compat.hook_platform(BACKENDS)
