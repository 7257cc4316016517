"""The names that users write."""

BACKENDS: dict[str, str] = {
    "UNIQUE": "unique",
    "QUEST": "quest",
    "STREAMING_LLM": "streaming_llm",
    "DENSE": "dense",
    "SINKROUTER": "sinkrouter",
    "ART": "art",
    "UNIQUE_PREFILL": "unique_prefill",
    "ZIPVL": "zipvl",
    "SNAPKV": "snapkv",
    "PYRAMIDKV": "pyramidkv",
    "H2O": "h2o",
    "LOSSLESS": "lossless",
}
"""Name of each attention backend, as in `--attention-backend`, and its preset in `configs/`."""
KEY = "sparse_attention"
"""Key of the plugin's settings in vLLM's `--additional-config`."""


def backend_beside(preset: str) -> str:
    """Returns the backend to name beside a preset that is no backend: the one that its name begins with, or unique."""
    return next((name for name in BACKENDS.values() if preset.startswith(f"{name}_")), "unique")


DRAFTER = "vllm_sparse_plugin.lossless.drafter.SparseDrafter"
"""The drafter class of lossless mode, for vLLM's speculative configuration."""
CUTTING_SCHEDULERS = ("vllm_sparse_plugin.prompts.CuttingScheduler", "vllm_sparse_plugin.prompts.CuttingAsyncScheduler")
"""The scheduler classes of sparse prefill, without and with asynchronous scheduling."""
SCHEDULER = "vllm_sparse_plugin.lossless.scheduler.PacedScheduler"
"""The scheduler class of lossless mode on a GPU, for vLLM's scheduler configuration."""
