"""Settings of rolling positions, and how far an engine is from a plain computation of them."""

import torch
from support.engines import Sampled

from research.compaction.stream import StreamingModel, Window

SINKS, CACHE = 8, 104
ROLLING = {
    "method": "streaming_llm", "budget_tokens": CACHE, "sink_tokens": SINKS, "min_context_tokens": 0,
    "positions": "rolling",
}  # fmt: skip


def distance(model: StreamingModel, prompt: list[int], drawn: Sampled, rolls: bool) -> float:
    """Mean difference of an engine's log probabilities of what it has drawn from those of the study of such windows,
    which attends by masks and turns queries by the model's own frequencies."""
    window = Window("", SINKS, CACHE, rolls)
    expected = -torch.cat(list(model.losses(prompt + drawn.tokens, window)))[len(prompt) - 1 :]
    likely = torch.tensor([place[token] for token, place in zip(drawn.tokens, drawn.likeliest, strict=True)])
    return (likely - expected).abs().mean().item()
