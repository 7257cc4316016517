"""An engine of vLLM inside this process, for measurements and tests."""

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
    """Start an engine, shut it down whatever is raised, and free its memory.

    Args:
        **arguments: of `vllm.LLM`.
    """
    # A process of the engine would put its queues and its scheduler's turns between the clock and the model.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    llm: LLM | None = None
    try:
        llm = LLM(**arguments)
        yield llm
    finally:
        # Not when the last reference goes: the next engine may be starting then, and its process groups would end.
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        # A start that failed may have left less than there is to clean up.
        with suppress(Exception):
            free_engines()


def free_engines() -> None:
    """Free the memory of engines that are shut down and have no references left."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()
