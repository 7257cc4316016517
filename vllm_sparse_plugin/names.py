"""The names that users write."""

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
    "ZIPVL_PAPER": "zipvl_paper",
    "SNAPKV": "snapkv",
    "SNAPKV_PAPER": "snapkv_paper",
    "PYRAMIDKV": "pyramidkv",
    "PYRAMIDKV_PAPER": "pyramidkv_paper",
    "H2O": "h2o",
    "LOSSLESS": "lossless",
    "UNIQUE_OFFLOAD": "unique_offload",
}
"""Name of each attention backend, as in `--attention-backend`, and its preset in `configs/`."""
KEY = "sparse_attention"
"""Key of the plugin's settings in vLLM's `--additional-config`."""
DRAFTER = "vllm_sparse_plugin.lossless.drafter.SparseDrafter"
"""The drafter class of lossless mode, for vLLM's speculative configuration."""
SCHEDULER = "vllm_sparse_plugin.lossless.scheduler.PacedScheduler"
"""The scheduler class of lossless mode on a GPU, for vLLM's scheduler configuration."""
