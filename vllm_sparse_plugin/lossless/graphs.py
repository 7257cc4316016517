"""Plans the CUDA graphs of decode steps for vLLM's second model runner: separate graphs for each draft length."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from vllm.config.compilation import CUDAGraphMode

from vllm_sparse_plugin import compat
from vllm_sparse_plugin.engine_settings import resolved
from vllm_sparse_plugin.names import BACKENDS


def plan_decode_graphs(manager: Any, plan: Callable[[Any], None]) -> None:
    """Plans the graphs of a manager separately for each width. The width is the number of tokens per request.

    vLLM assigns each number of tokens to the next larger graph. If that graph has another width, the step runs outside
    of full graphs. With separate plans, each width has its own next larger graph. Each width also gets a graph for
    `max_num_seqs` requests, or for as many as `max_cudagraph_capture_size` holds.

    Args:
        manager: vLLM's `CudaGraphManager`, of the model or of drafting steps.
        plan: vLLM's own plan, which fills in `_candidates` and `_capture_descs` for the width of the manager.
    """
    plan(manager)
    compilation, widest = manager.compilation_config, manager.decode_query_len
    mode, sizes = manager.cudagraph_mode, compilation.cudagraph_capture_sizes
    if not sizes or not mode.separate_routine() or mode.decode_mode() != CUDAGraphMode.FULL:
        return
    others = dict(manager._candidates), dict(manager._capture_descs)
    candidates: dict[Any, list[Any]] = {}
    captured: dict[Any, None] = {}
    for width in _widths(manager):
        most = min(manager.max_num_reqs, compilation.max_cudagraph_capture_size // width)
        manager.compilation_config = copy.copy(compilation)
        manager.compilation_config.cudagraph_capture_sizes = [*sizes, *([most * width] if most else [])]
        manager.decode_query_len = width
        manager._candidates, manager._capture_descs = {}, {}
        plan(manager)
        captured |= dict.fromkeys(manager._capture_descs.get(CUDAGraphMode.FULL, ()))
        for key, found in manager._candidates.items():
            candidates.setdefault(key, []).extend(_of_mode(found, full=True))
    manager.compilation_config, manager.decode_query_len = compilation, widest
    manager._candidates, manager._capture_descs = others
    for key in candidates.keys() | manager._candidates.keys():
        rest = _of_mode(manager._candidates.get(key, ()), full=False)
        manager._candidates[key] = [*candidates.get(key, ()), *rest]
    if captured:
        manager._capture_descs[CUDAGraphMode.FULL] = sorted(captured, key=lambda each: -each.num_tokens)


def _widths(manager: Any) -> list[int]:
    """Returns the widths that a manager captures: every verifying width for the model, one for drafting."""
    if manager.decode_query_len == 1:
        return [1]
    backend = compat.chosen_backend(manager.vllm_config, BACKENDS)
    assert backend is not None
    rule = resolved(manager.vllm_config, BACKENDS[backend]).draft_rule
    assert rule is not None
    return [1 + length for length in rule.step_lengths]


def _of_mode(graphs: Iterable[Any], full: bool) -> list[Any]:
    return [graph for graph in graphs if (graph.cg_mode == CUDAGraphMode.FULL) == full]
