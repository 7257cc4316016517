"""A vLLM engine in this process, for measurements and tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM


@contextmanager
def engine_in_process(**arguments: Any) -> Iterator[LLM]:
    """Start an engine. Shut it down and free its memory at the end, also after an error.

    Args:
        **arguments: of `vllm.LLM`.
    """
    # A separate engine process would add its queues and scheduling to the measured times.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    llm: LLM | None = None
    try:
        llm = LLM(**arguments)
        yield llm
    finally:
        # Shut down now: garbage collection could end the process groups of the next engine.
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        # A failed start may leave less to clean up.
        with suppress(Exception):
            free_engines()


def free_engines() -> None:
    """Free the memory of engines that are shut down and unreferenced."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()
