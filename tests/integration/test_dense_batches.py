"""The batches of vLLM's own test suite of dense attention, with this plugin's backends when they read everything.

As in vLLM's suite, requests have a context in a shuffled cache before the step. torch's attention over their keys and
values is the reference.
"""

from collections.abc import Sequence

import pytest
import torch
from support.layer import LayerHarness, Request
from torch.nn.functional import scaled_dot_product_attention

BATCHES = {
    "decode, one": ([1024], [1]),
    "decode, small": ([32, 40], [1, 1]),
    "decode, medium": ([128, 256, 512, 1024] * 2, [1] * 8),
    "decode, large": ([2048] * 6, [1] * 6),
    "prefill, one": ([1024], [64]),
    "prefill, small": ([32, 40], [8, 8]),
    "prefill, medium": ([256, 512, 1024, 2048], [16] * 4),
    "mixed, small": ([32, 40, 48, 56], [1, 1, 5, 5]),
    "mixed, medium": ([512, 1024, 2048] * 2, [1, 1, 1, 7, 7, 7]),
    "mixed, large": ([1024, 2048, 2200] * 2, [1, 1, 1, 32, 32, 32]),
}
"""Tokens of each request's context and query tokens among them, by name."""
EVERY_PAGE = {
    "unique": {"selection": {"budget_tokens": 8192}, "min_context_tokens": 0},
    "quest": {"selection": {"budget_tokens": 8192}, "min_context_tokens": 0},
    # Nothing is skipped, but decoding tokens are attended to by our kernels.
    "sinkrouter": {"routing": {"threshold": 2.0, "dense_layers": 0, "accept": "uncalibrated"}, "min_context_tokens": 0},
    "art": {"stopping": {"patience": 0}, "min_context_tokens": 0},
}
TOLERANCE, TOLERANCE_8_BITS = 2**-6, 2**-3
"""Largest error of a head's output, relative to its norm: weights are rounded to bfloat16, 2^-9, or to 8 bits, 2^-4."""
HEADS, KV_HEADS, SIZE = 8, 2, 64
SINKS = torch.linspace(-1, 3, HEADS).bfloat16()
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def attention(harness: LayerHarness, request: Request, sinks: torch.Tensor | None) -> torch.Tensor:
    """torch's attention for a request's newest tokens, `[new, num_heads, head_size]`."""
    new, context = len(request.fresh), len(request.keys)
    query, keys, values = (part.float().transpose(0, 1) for part in (request.fresh, request.keys, request.values))
    mask = torch.full((HEADS, new, context), -torch.inf).triu(context - new + 1)
    if sinks is not None:
        # A sink is a key and a value of zeros with a separate logit.
        keys, values = (torch.nn.functional.pad(part, (0, 0, 0, 1)) for part in (keys, values))
        mask = torch.cat([mask, sinks.float().cpu()[:, None, None].expand(-1, new, 1)], dim=-1)
    scale = harness.layer.impl.scale
    output = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    return output.transpose(0, 1)


def check(harness: LayerHarness, context_lens: Sequence[int], query_lens: Sequence[int], tolerance: float) -> None:
    """Computes the last tokens of some contexts in one step."""
    requests = []
    for context, new in zip(context_lens, query_lens, strict=True):
        # A single newest token is a decode, several are a chunk of the prompt.
        request = harness.request(context if new > 1 else context - 1)
        harness.fill(request, context - new)
        requests.append(request)
    outputs = harness.step(list(zip(requests, query_lens, strict=True)))
    for request, output in zip(requests, outputs, strict=True):
        expected = attention(harness, request, harness.layer.impl.sinks)
        error = (output.float() - expected).norm(dim=-1)
        assert bool((error <= tolerance * expected.norm(dim=-1)).all()), f"{error.max():.3g} of {expected.norm():.3g}"
        harness.release(request)


def run_all(harness: LayerHarness, batches: Sequence[str], tolerance: float = TOLERANCE) -> None:
    for name in batches:
        check(harness, *BATCHES[name], tolerance)


@pytest.mark.parametrize(
    ("backend", "block_size"), [("unique", 64), ("unique", 128), ("quest", 64), ("sinkrouter", 64), ("art", 128)]
)
def test_every_batch_is_attended_as_by_torch(model, backend, block_size):
    harness = LayerHarness(
        model, HEADS, KV_HEADS, SIZE, block_size, num_blocks=20_000 // block_size, backend=backend,
        settings=EVERY_PAGE[backend],
    )  # fmt: skip
    run_all(harness, BATCHES)
    assert (harness.metadata.decode is not None) == (backend in ("sinkrouter", "art"))


@pytest.mark.parametrize("backend", ["unique", "art"])
def test_learned_sinks_take_their_share(model, backend):
    harness = LayerHarness(
        model, HEADS, KV_HEADS, SIZE, 64, num_blocks=300, backend=backend, settings=EVERY_PAGE[backend], sinks=SINKS
    )
    run_all(harness, ["decode, medium", "prefill, one", "mixed, medium"])


def gpu_harness(model: str, backend: str, kv_cache_dtype: str, layers_in_block: int, sinks: bool) -> LayerHarness:
    extras = {"sinks": SINKS.cuda()} if sinks else {}
    return LayerHarness(
        model, HEADS, KV_HEADS, SIZE, 256, num_blocks=300, backend=backend, settings=EVERY_PAGE[backend],
        device="cuda", kv_cache_dtype=kv_cache_dtype, layers_in_block=layers_in_block, **extras,
    )  # fmt: skip


@pytest.mark.parametrize("backend", EVERY_PAGE)
@pytest.mark.parametrize("layers_in_block", [1, 2], ids=["LBHNC", "BLHNC"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("replays", [pytest.param(kind, marks=GPU) for kind in (False, True)], ids=["eager", "graph"])
def test_every_batch_is_attended_as_by_torch_on_a_gpu(model, backend, layers_in_block, kv_cache_dtype, sinks, replays):
    if sinks and backend == "sinkrouter":
        pytest.skip("routing is refused beside learned sinks")
    harness = gpu_harness(model, backend, kv_cache_dtype, layers_in_block, sinks)
    harness.bare.replays = replays
    # Engines capture only batches of decoding requests.
    batches = [name for name in BATCHES if not replays or name.startswith("decode")]
    run_all(harness, batches, TOLERANCE if kv_cache_dtype == "auto" else TOLERANCE_8_BITS)


def test_poisoned_memory_lies_where_it_is_asked_for():
    with torch.device("meta"):
        assert torch.empty(1).is_meta
        assert torch.empty_like(torch.ones(1)).is_meta
    assert torch.empty(1).is_cpu
