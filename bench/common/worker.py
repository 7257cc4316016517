"""Extension of vLLM's workers for the measurements, for `worker_extension_cls`."""

from __future__ import annotations

from typing import Any

import torch

EXTENSION = "bench.common.worker.BenchWorker"
_LARGEST_BYTE = 0x78
"""No byte below it makes a floating-point number infinite, in any format."""


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

    def fill_page_records(self) -> None:
        """Fill page records that are not in the blocks with noise, as vLLM's connector for noise fills blocks."""
        worker: Any = self
        layers = worker.vllm_config.compilation_config.static_forward_context.values()
        records = (getattr(getattr(layer, "impl", None), "statistics_beside", None) for layer in layers)
        # They were made in vLLM's inference mode.
        with torch.inference_mode():
            for kept in records:
                if kept is not None:
                    kept.normal_() if kept.is_floating_point() else kept.random_(_LARGEST_BYTE)

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
