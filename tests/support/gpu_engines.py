"""Engines on a GPU, in the process of the test."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.engines import MODEL as MODEL

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


@contextmanager
def engine(model: Path = MODEL, **arguments: Any) -> Iterator[Any]:
    """An `LLM` in this process, freed afterwards."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    defaults = {
        "attention_backend": "unique", "max_model_len": 16_384, "max_num_seqs": 16, "gpu_memory_utilization": 0.2,
        # Given, so that other processes on the GPU do not count when vLLM measures what is left.
        "kv_cache_memory_bytes": 2 << 30,
        "compilation_config": GRAPHS, "seed": 0, "disable_log_stats": False,
    }  # fmt: skip
    llm = LLM(str(model), **(defaults | arguments))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
