"""What a trained witness can do, and where its heads look."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from research.witness.data import ANSWER, ASKED_TASKS, BOS, build_document, cut, encode
from vllm_sparse_plugin.tools.diagnostics.forward import SINK_MASS, CapturingModel, LayerInputs

CONTEXTS = (1024, 2048, 4096, 8192)
TEXT_TOKENS = 4096
"""Of a stretch of text, whose perplexity and attention are measured."""
NEWEST = 512
"""Tokens that a head that looks back a little way attends to."""
QUERIES = 64
"""Newest tokens of a stretch whose attention is measured."""
_STRETCHES = 16
_ROUND = 8
_TRIES = 100


def measure(folder: Path, held_out: str, device: str, questions: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Perplexity, attention and answers of a model, a row each; the few that say most come first.

    Args:
        folder: of the model.
        held_out: text that it has not been trained on.
        device: torch's name.
        questions: of each task and context.
        seconds: after which nothing is begun.
    """
    deadline = time.monotonic() + seconds
    ids = encode(held_out)
    room = TEXT_TOKENS - 1
    texts = [[BOS, *ids[i : i + room]] for i in range(0, max(1, len(ids) - room + 1), room)][:_STRETCHES]
    model = CapturingModel(folder, device)
    yield from _attention(model, texts, deadline)
    yield _perplexity(folder, texts, device, deadline)
    for first in range(0, questions, _ROUND):
        for context, task in itertools.product(CONTEXTS, ASKED_TASKS):
            if time.monotonic() >= deadline:
                return
            numbers = range(first, min(first + _ROUND, questions))
            right = [_answers(model, held_out, task, context, number) for number in numbers]
            yield {
                "measure": "answers", "task": task, "context_tokens": context, "questions": len(right),
                "right": sum(right),
            }  # fmt: skip


def _perplexity(folder: Path, texts: Sequence[list[int]], device: str, deadline: float) -> dict[str, Any]:
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.to(device).eval()
    total, count = 0.0, 0
    for text in texts:
        tokens = torch.tensor([text], device=device)
        with torch.inference_mode():
            logits = model(tokens).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()
        count += len(text) - 1
        if time.monotonic() >= deadline:
            break
    return {
        "measure": "perplexity", "context_tokens": len(texts[0]), "tokens": count,
        "perplexity": round(math.exp(total / count), 4),
    }  # fmt: skip


def newest_mass(layer: LayerInputs, newest: int) -> torch.Tensor:
    """Attention weight on the newest tokens, the query's own included: `[num_queries, num_kv_heads, group_size]`."""
    token = torch.arange(layer.keys.shape[1], device=layer.keys.device)
    near = token >= (layer.context_lens - newest)[:, None]
    return (layer.weights() * near[:, None, None]).sum(dim=-1)


def _attention(model: CapturingModel, texts: Sequence[list[int]], deadline: float) -> Iterator[dict[str, Any]]:
    """Of each layer, the means over queries: `first` and `newest` by KV head, `sink_groups` over both."""
    first: dict[int, list[torch.Tensor]] = {}
    newest: dict[int, list[torch.Tensor]] = {}
    for text in texts:
        for index, layer in enumerate(model.run(text, min(QUERIES, len(text)))):
            if layer is None:
                continue
            first.setdefault(index, []).append(layer.weights()[..., 0].mean(dim=-1).cpu())
            newest.setdefault(index, []).append(newest_mass(layer, NEWEST).mean(dim=-1).cpu())
        if time.monotonic() >= deadline:
            break
    for index in first:
        mass, near = torch.cat(first[index]), torch.cat(newest[index])
        yield {
            "measure": "attention", "layer": index, "context_tokens": len(texts[0]), "queries": len(mass),
            "first": [round(value, 4) for value in mass.mean(dim=0).tolist()],
            "newest": [round(value, 4) for value in near.mean(dim=0).tolist()],
            "sink_groups": round((mass >= SINK_MASS).float().mean().item(), 4),
            "newest_groups": round((near >= 0.5).float().mean().item(), 4),
        }  # fmt: skip


def _answers(model: CapturingModel, text: str, task: str, context: int, number: int) -> bool:
    """Whether every token of the answer to one question is the likeliest after those before it."""
    rng = random.Random(f"{task} {context} {number}")
    for _ in range(_TRIES):
        document = build_document(rng, cut(text, rng.randrange(len(text)), context), context, task, 1)
        if document is not None:
            break
    else:
        raise RuntimeError(f"no document of {context} tokens could be written")
    asked = document.kinds.index(ANSWER)
    cache = model.prefill(document.tokens[: asked - 1])
    predictions = model.decode(cache, document.tokens[asked - 1 : -1]).predictions
    return predictions == document.tokens[asked:]
