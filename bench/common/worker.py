"""Extension of vLLM's workers for the measurements, for `worker_extension_cls`."""

from __future__ import annotations

from typing import Any

import torch

EXTENSION = "bench.common.worker.BenchWorker"


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
