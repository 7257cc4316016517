"""Settings of rolling positions, and the difference of an engine from a plain computation."""

from pathlib import Path
from typing import Any

import torch
from support.engines import Sampled
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from vllm_sparse_plugin.tools.needles import library_text

SINKS, CACHE = 8, 104
ROLLING = {
    "method": "streaming_llm", "budget_tokens": CACHE, "sink_tokens": SINKS, "min_context_tokens": 0,
    "positions": "rolling",
}  # fmt: skip


def library_tokens(folder: Path, count: int) -> list[int]:
    """The first tokens of a section of Python's library source, with the tokenizer of a model."""
    return AutoTokenizer.from_pretrained(folder).encode(library_text(1_000_003, 8 * count))[:count]


class WindowedModel:
    """A model that reads a whole text at once. Each token reads the sinks and the newest tokens before it."""

    def __init__(self, folder: Path) -> None:
        AttentionInterface.register("windowed", self._attend)
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="windowed", dtype=torch.float32
        ).eval()
        self._rolls = False

    @torch.inference_mode()
    def losses(self, tokens: list[int], rolls: bool) -> torch.Tensor:
        """Negative log probabilities of the tokens after the first.

        Args:
            tokens: the text.
            rolls: whether positions are counted within the cache, not within the text.
        """
        self._rolls = rolls
        likely = self._model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0].log_softmax(dim=-1)
        return -likely.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]

    def _attend(self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        keys, values = (x[0].bfloat16().float()[:, None] for x in (key, value))
        query = query[0].unflatten(0, (len(keys), -1))
        position = torch.arange(query.shape[2])
        is_sink = position < SINKS
        visible = (position <= position[:, None]) & (is_sink | (position > position[:, None] - (CACHE - SINKS)))
        logits = query @ keys.transpose(-1, -2)
        if self._rolls:
            # In a full cache, the sinks are directly before the window.
            angle = -(position - (CACHE - 1)).clamp(min=0)[:, None] * self._model.model.rotary_emb.inv_freq
            first, second = query.chunk(2, dim=-1)
            cos, sin = angle.cos(), angle.sin()
            nearer = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
            logits = torch.where(is_sink, nearer @ keys.transpose(-1, -2), logits)
        weights = (logits * query.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf).softmax(dim=-1)
        return (weights @ values).flatten(0, 1).transpose(0, 1)[None], None


def distance(model: WindowedModel, prompt: list[int], drawn: Sampled, rolls: bool) -> float:
    """Mean difference between an engine's log probabilities of sampled tokens and those of the model."""
    expected = -model.losses(prompt + drawn.tokens, rolls)[len(prompt) - 1 :]
    likely = torch.tensor([place[token] for token, place in zip(drawn.tokens, drawn.likeliest, strict=True)])
    return (likely - expected).abs().mean().item()
