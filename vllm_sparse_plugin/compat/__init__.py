"""Changes vLLM's behaviour. Each change states its reason, the versions, and the condition for its removal.

`tests/unit/vllm_touches.yaml` lists every use of vLLM by the plugin.
"""

from vllm_sparse_plugin.compat.caches import hook_cache_allocation
from vllm_sparse_plugin.compat.engine import (
    DRAFTING_METHOD,
    GPU_DRAFTING_METHOD,
    TESTED_VLLM,
    backend_member,
    chosen_backend,
    drafts_for_itself,
    hook_lookahead,
    hook_platform,
    hook_requests,
    register_backend_names,
    run_vllm_cli,
    untested_vllm,
)
from vllm_sparse_plugin.compat.runners import (
    batch_of_step,
    hook_decode_graphs,
    hook_model_runners,
    hook_speculators,
    hook_weight_updates,
    is_dummy_run,
    mend_kernel_overrides,
    mend_rejection_sampling,
)

__all__ = [
    "DRAFTING_METHOD",
    "GPU_DRAFTING_METHOD",
    "TESTED_VLLM",
    "backend_member",
    "batch_of_step",
    "chosen_backend",
    "drafts_for_itself",
    "hook_cache_allocation",
    "hook_decode_graphs",
    "hook_lookahead",
    "hook_model_runners",
    "hook_platform",
    "hook_requests",
    "hook_speculators",
    "hook_weight_updates",
    "is_dummy_run",
    "mend_kernel_overrides",
    "mend_rejection_sampling",
    "register_backend_names",
    "run_vllm_cli",
    "untested_vllm",
]
