"""Extension of vLLM's workers for the measurements, for `worker_extension_cls`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

EXTENSION = "bench.common.worker.BenchWorker"
_COPIED = 1024
"""Blocks that are copied at a time."""


class BenchWorker:
    """Methods that vLLM adds to its worker, for `collective_rpc`."""

    def attention_backends(self) -> list[str]:
        """Names of the attention backends of the model's layers."""
        worker: Any = self
        layers = worker.vllm_config.compilation_config.static_forward_context.values()
        return sorted({layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")})

    def accept_drafts(self, probability: float | None) -> None:
        """Make vLLM's second model runner accept each draft with this probability; None for the real acceptance."""
        worker: Any = self
        runner, tokens = worker.model_runner, worker.vllm_config.num_speculative_tokens
        rates = None if probability is None else torch.full((tokens,), probability, device=runner.device)
        runner.rejection_sampler.synthetic_conditional_rates = rates

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole KV blocks, with the page statistics in them or beside them.

        Args:
            copies: numbers of the block to read and of the block to write.

        Raises:
            RuntimeError: if the bytes of a block are not next to each other.
        """
        for rows in self.block_rows():
            for first in range(0, len(copies), _COPIED):
                read, write = torch.tensor(copies[first : first + _COPIED], device=rows.device).unbind(1)
                rows[write] = rows[read]

    def block_rows(self) -> Iterator[torch.Tensor]:
        """Yields the KV caches of the layers, and page statistics that have memory of their own: `[blocks, bytes]`.

        Raises:
            RuntimeError: if the bytes of a block are not next to each other.
        """
        worker: Any = self
        blocks = worker.model_runner.kv_cache_config.num_blocks
        caches = dict[int, torch.Tensor]()
        for layer in worker.vllm_config.compilation_config.static_forward_context.values():
            beside = getattr(getattr(layer, "impl", None), "statistics_beside", None)
            # Two layers that share a cache have the same address.
            for cache in (getattr(layer, "kv_cache", None), beside):
                if isinstance(cache, torch.Tensor):
                    caches[cache.data_ptr()] = cache
        end = dict[int, int]()
        for _, cache in sorted(caches.items()):
            storage, size = cache.untyped_storage(), cache.element_size()
            begin, length = int(cache.storage_offset()) * size, cache.stride(0) * len(cache) * size
            if begin < end.get(storage.data_ptr(), 0) or begin + length > storage.nbytes():
                raise RuntimeError(
                    f"the blocks of a KV cache of shape {tuple(cache.shape)} are not one after the other"
                )
            end[storage.data_ptr()] = begin + length
            every = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)
            yield every[begin : begin + length].view(blocks, -1)

    def draw_weights(self) -> None:
        """Replace dummy weights by random ones that keep activations near unit size.

        vLLM's dummy weights, including the norms, are so small that fp8 keys underflow to zero and all pages have equal
        scores. Time and power that depend on the data would then be wrong.
        """
        worker: Any = self
        with torch.no_grad():
            for parameter in worker.get_model().parameters():
                if parameter.dim() < 2:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
