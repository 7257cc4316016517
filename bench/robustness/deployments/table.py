"""The deployments that are tried, each in a separate process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DENSE, PLAIN = "vLLM's own attention", "plain"
"""Dense answers, the reference for the plain deployment; and plain answers, the reference for all others."""
TENSOR_PARALLEL, PIPELINE_PARALLEL, DATA_PARALLEL = "tensor parallel 2", "pipeline parallel 2", "data parallel 2"
COMPILED, FULL_GRAPHS, PIECEWISE = "compiled", "full CUDA graphs", "piecewise CUDA graphs"
PREFIX_CACHING, SMALL_CHUNKS = "prefix caching", "prefill in chunks of 256"
TOGETHER, RAY = "requests at once", "Ray"
NGRAM, STRUCTURED = "n-gram speculation", "structured output"
LORA, PROMPT_LOGPROBS = "LoRA adapter", "prompt log probabilities"
RELOAD, SLEEP = "weight reload", "sleep and wake"
OFFLOAD_MEMORY, OFFLOAD_FILES = "offloading to memory", "offloading to files"
OFFLOAD_SIMPLE, NIXL = "SimpleCPUOffloadConnector", "NIXL prefill and decode"
EXAMPLE_CONNECTOR, BATCHES_IN_PARTS = "ExampleConnector", "dual-batch overlap"
CONTEXT_PARALLEL, FAST_PREFILL = "decode context parallel 2", "fast prefill of shared layers"


@dataclass(frozen=True)
class Deployment:
    """Arguments of an engine in addition to the plain deployment: eager, one process, no prefix cache."""

    about: str
    """The test and its required event, for the table."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `vllm.LLM`."""
    gpus: int = 1
    """Number of GPUs that it needs on a machine with GPUs."""
    needs_gpu: str = ""
    """Reason why a CPU cannot run it; empty if it can."""
    package: str = ""
    """Name of a module that it needs in addition."""


def _connector(name: str, **settings: Any) -> dict[str, Any]:
    transfer = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": settings}
    return {"kv_transfer_config": transfer, "enable_prefix_caching": True}


DEPLOYMENTS: Mapping[str, Deployment] = {
    DENSE: Deployment("the same questions without this plugin"),
    PLAIN: Deployment("the answers are those of dense attention"),
    TENSOR_PARALLEL: Deployment("two workers", {"tensor_parallel_size": 2}, gpus=2),
    # Without compilation, vLLM's CPU workers skip the run that creates the tensors between stages.
    PIPELINE_PARALLEL: Deployment("two stages, with torch.compile",
                                  {"pipeline_parallel_size": 2, "gpu_memory_utilization": 0.15, "enforce_eager": False,
                                   "compilation_config": {"cudagraph_mode": "NONE"}}, gpus=2),
    DATA_PARALLEL: Deployment("a server with two engines, each of which is asked", gpus=2),
    RAY: Deployment("Ray as the executor", {"distributed_executor_backend": "ray"}, package="ray"),
    COMPILED: Deployment("torch.compile without CUDA graphs",
                         {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "NONE"}}),
    FULL_GRAPHS: Deployment("graphs of whole decode batches",
                            {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
                            needs_gpu="CUDA graphs"),
    PIECEWISE: Deployment("graphs that leave attention out",
                          {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "PIECEWISE"}},
                          needs_gpu="CUDA graphs"),
    PREFIX_CACHING: Deployment("asked twice; the second time prompts are in the cache",
                               {"enable_prefix_caching": True}),
    SMALL_CHUNKS: Deployment("several steps a prompt", {"max_num_batched_tokens": 256}),
    TOGETHER: Deployment("all questions in one batch", {"max_num_seqs": 8}),
    NGRAM: Deployment("drafts of three tokens; some are proposed", {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
        "disable_log_stats": False,
    }),
    STRUCTURED: Deployment("a grammar that allows the plain answer"),
    LORA: Deployment("an adapter whose product is zero", {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}),
    PROMPT_LOGPROBS: Deployment("log probabilities of the prompt beside the answer"),
    RELOAD: Deployment("weights are replaced by drawn ones, and then loaded again"),
    SLEEP: Deployment("levels 1 and 2, weights loaded again after the second", {"enable_sleep_mode": True}),
    OFFLOAD_MEMORY: Deployment("asked again from blocks in the memory of the host",
                               _connector("OffloadingConnector", cpu_bytes_to_use=1 << 28)),
    OFFLOAD_FILES: Deployment("asked again by a second engine, from files that the first one wrote"),
    OFFLOAD_SIMPLE: Deployment("asked again from blocks in the memory of the host",
                               _connector("SimpleCPUOffloadConnector", cpu_bytes_to_use=1 << 28)),
    NIXL: Deployment("two servers: one prefills, and the other takes its blocks and decodes", package="nixl"),
    EXAMPLE_CONNECTOR: Deployment("a connector that moves slots, not blocks", _connector("ExampleConnector")),
    BATCHES_IN_PARTS: Deployment("two half batches at once", {"enable_dbo": True},
                                 needs_gpu="two streams, so vLLM turns it off"),
    CONTEXT_PARALLEL: Deployment("a context spread over workers",
                                 {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, gpus=2),
    FAST_PREFILL: Deployment("prompts skip layers that share a cache", {"kv_sharing_fast_prefill": True}),
}  # fmt: skip
"""By name."""
