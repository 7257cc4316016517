"""The compared passes: one layer's attention of one sequence, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from sparse_kernels.masked_attention import Packing, PageMask, masked_attention, page_records
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.common.results import Row, spread
from vllm_sparse_plugin.policies import UniqueSelection

MASKS: dict[str, float | None] = {"soft": 1.0, "hard": None}
"""Passes under a mask, with T of the mask."""
DENSE: dict[str, SDPBackend | None] = {
    "math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "flash3": None
}  # fmt: skip
"""Dense passes, and torch's backend for each; None for the package flash-attn-3."""
PASSES = (*MASKS, *DENSE)
_FLASH3 = "flash_attn_interface"


@dataclass(frozen=True)
class Shape:
    """The shape of attention."""

    query_heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype = torch.bfloat16

    def draw(self, tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries, keys and values with gradients: `[tokens, heads, head_size]`."""
        generator = torch.Generator(device).manual_seed(0)
        query, key, value = (
            torch.randn(tokens, heads, self.head_size, generator=generator, device=device, dtype=self.dtype)
            for heads in (self.query_heads, self.kv_heads, self.kv_heads)
        )
        return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def is_available(name: str, device: str) -> bool:
    """Returns whether a pass runs on this machine."""
    on_gpu = device.startswith("cuda")
    if name == "flash3":
        return on_gpu and find_spec(_FLASH3) is not None
    return on_gpu or name in (*MASKS, "math")


def forward_of(
    name: str, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], selection: UniqueSelection
) -> Callable[[], torch.Tensor]:
    """Returns the forward pass of a name in `PASSES`, page statistics included."""
    query, key, value = inputs
    tokens, _, head_size = query.shape
    scale = head_size**-0.5
    if name in MASKS:
        layout = selection.statistics_layout(head_size, 2)
        mask = PageMask(selection.page_selection(), selection.page_size, MASKS[name])
        packing = Packing((tokens,))

        def masked() -> torch.Tensor:
            records = page_records(key, packing, mask.page_size, layout.kind, layout.format)
            return masked_attention(query, key, value, records, packing, mask, scale)

        return masked
    backend = DENSE[name]
    if backend is None:
        import flash_attn_interface

        def flash3() -> torch.Tensor:
            found = flash_attn_interface.flash_attn_func(query[None], key[None], value[None], causal=True)
            output: torch.Tensor = found[0] if isinstance(found, tuple) else found
            return output[0]

        return flash3

    def dense() -> torch.Tensor:
        parts = [x.transpose(0, 1)[None] for x in (query, key, value)]
        with sdpa_kernel(backend):
            output = scaled_dot_product_attention(
                parts[0], parts[1], parts[2], is_causal=True, scale=scale, enable_gqa=True
            )
        return output[0].transpose(0, 1)

    return dense


def run_both(forward: Callable[[], torch.Tensor]) -> None:
    """Run a pass forward and backward."""
    output = forward()
    output.backward(torch.ones_like(output))


def measure(forward: Callable[[], torch.Tensor], device: str, repeats: int) -> Row:
    """Time a pass forward and backward, after a warm-up. Return milliseconds and additional memory."""
    on_gpu = device.startswith("cuda")
    before = torch.cuda.memory_allocated() if on_gpu else 0
    times: dict[str, list[float]] = {"forward": [], "backward": [], "both": []}
    for repeat in range(repeats + 1):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begin = _now(on_gpu)
        output = forward()
        middle = _now(on_gpu)
        output.backward(torch.ones_like(output))
        end = _now(on_gpu)
        if repeat:
            times["forward"].append(middle - begin)
            times["backward"].append(end - middle)
            times["both"].append(end - begin)
        del output
    row: Row = {}
    for part, found in times.items():
        median, low, high = (round(value * 1e3, 4) for value in spread(found))
        row[part] = {"median_ms": median, "p20_ms": low, "p80_ms": high, "repeats": repeats}
    if on_gpu:
        row["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
    return row


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()
