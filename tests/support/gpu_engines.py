"""Engines on a GPU, in the process of the test."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from support.engines import MODEL as MODEL

from bench.common.in_process import engine_in_process

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def engine(model: Path = MODEL, **arguments: Any) -> AbstractContextManager[Any]:
    """An `LLM` in this process, freed afterwards."""
    defaults = {
        "attention_backend": "unique", "max_model_len": 16_384, "max_num_seqs": 16, "gpu_memory_utilization": 0.2,
        # Set explicitly, so that other processes on the GPU do not affect vLLM's measurement of free memory.
        "kv_cache_memory_bytes": 2 << 30,
        "compilation_config": GRAPHS, "seed": 0, "disable_log_stats": False,
    }  # fmt: skip
    return engine_in_process(model=str(model), **(defaults | arguments))
