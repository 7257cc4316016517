"""The names that users write; nothing else of the plugin is needed to know them."""

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
    "UNIQUE_PREFILL": "unique_prefill",
    "ZIPVL": "zipvl",
    "SNAPKV": "snapkv",
    "PYRAMIDKV": "pyramidkv",
    "H2O": "h2o",
    "LOSSLESS": "lossless",
}
"""Name of each attention backend, as in `--attention-backend`, and its preset in `configs/`."""
KEY = "sparse_attention"
"""Key of our settings in vLLM's `--additional-config`."""
DRAFTER = "vllm_sparse_plugin.lossless.drafter.SparseDrafter"
"""The class that drafts in lossless mode, as vLLM's speculative configuration names it."""
SCHEDULER = "vllm_sparse_plugin.lossless.scheduler.PacedScheduler"
"""The class that says for whom, and how much, steps draft on a GPU, as vLLM's scheduler configuration names it."""
