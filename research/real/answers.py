"""Answers many questions at once from the tokens that a rule keeps of their prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from research.real.model import Llama
from research.real.rules import RULES, Rule, Source, budget_of, choose, combine, survival
from research.real.texts import Prompt
from research.real.votes import Read, read_again, read_prompt, watch_answer
from vllm_sparse_plugin.tools.eval.metrics import string_match_all

DENSE = "dense"
"""The arm that keeps everything."""


def measure_answers(
    model: Llama,
    prompts: Sequence[Prompt],
    arms: Sequence[str],
    ratios: Sequence[float],
    decode: Callable[[list[int]], str],
    end_tokens: Collection[int],
    instruction: Sequence[int],
    longest: int,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each arm, ratio and question.

    Args:
        model: the model.
        prompts: questions of RULER.
        arms: names in `RULES`; dense always runs first.
        ratios: shares of a prompt that are kept.
        decode: returns the text of ids.
        end_tokens: ids that end an answer.
        instruction: ids that ask for a repetition of the prompt.
        longest: maximum tokens of an answer.
    """
    sources: set[Source] = {RULES[arm].source for arm in arms}
    begin = time.monotonic()
    reads = []
    for prompt in prompts:
        reads.append(read_prompt(model, prompt, sources))
        if "repeat" in sources:
            read_again(model, reads[-1], instruction)
    seconds = time.monotonic() - begin
    yield {"study": "answers", "arm": "prefill", "prompts": len(prompts), "seconds": round(seconds, 2)}
    rooms = [min(read.prompt.answer_tokens, longest) for read in reads]
    texts = answer(model, reads, [None] * len(reads), rooms, end_tokens)
    yield from _rows(DENSE, 1.0, reads, texts, decode, [{"kept": 1.0}] * len(reads), begin + seconds)
    if "answer" in sources:
        for read, text in zip(reads, texts, strict=True):
            watch_answer(model, read, text)
    for arm in arms:
        for ratio in ratios:
            begin = time.monotonic()
            kept = [keep(read, RULES[arm], ratio, model.scale) for read in reads]
            texts = answer(model, reads, kept, rooms, end_tokens)
            about = [_kept(read, mask) for read, mask in zip(reads, kept, strict=True)]
            yield from _rows(arm, ratio, reads, texts, decode, about, begin)


def keep(read: Read, rule: Rule, ratio: float, scale: float) -> torch.Tensor:
    """Return the tokens of a prompt that a rule keeps: `[layers, num_kv_heads, num_tokens]` bool."""
    tail = read.prompt.tail_tokens
    scores = combine(read.votes_for(rule, scale), read.values, rule, tail)
    return choose(scores, rule, budget_of(read.num_tokens, ratio), tail)


def answer(
    model: Llama,
    reads: Sequence[Read],
    kept: Sequence[torch.Tensor | None],
    rooms: Sequence[int],
    end_tokens: Collection[int],
) -> list[list[int]]:
    """Answer greedily. The first token is that of the dense prefill.

    Args:
        model: the model.
        reads: prompts after the prefill.
        kept: tokens of each prompt, as `keep` returns them; None for all.
        rooms: maximum tokens of each answer.
        end_tokens: ids that end an answer. Answers do not contain them.
    """
    room, device = max(rooms), model.device
    packed = PackedCache(model, reads, kept, room)
    position = torch.tensor([read.num_tokens for read in reads], device=device)
    token = torch.tensor([read.first for read in reads], device=device)
    ends, limit = torch.tensor(sorted(end_tokens), device=device), torch.tensor(rooms, device=device)
    done = torch.isin(token, ends)
    said = [token]
    for step in range(room - 1):

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: int = step
        ) -> torch.Tensor:
            return packed.attend(layer, step, query, key, value, model.scale)

        hidden = model.hidden(token[:, None], position[:, None], attend)
        token = model.logits(hidden[:, 0]).argmax(dim=-1)
        said.append(token)
        position = position + 1
        done = done | torch.isin(token, ends) | (limit <= step + 2)
        # Reading the device at each step would make the host wait.
        if step % 8 == 7 and bool(done.all()):
            break
    return [_cut(ids, room, end_tokens) for ids, room in zip(torch.stack(said, dim=1).tolist(), rooms, strict=True)]


def _cut(ids: list[int], room: int, end_tokens: Collection[int]) -> list[int]:
    end = next((i for i, token in enumerate(ids) if token in end_tokens), len(ids))
    return ids[: min(end, room)]


class PackedCache:
    """Kept tokens of several prompts, concatenated in each layer, with room for answers."""

    def __init__(self, model: Llama, reads: Sequence[Read], kept: Sequence[torch.Tensor | None], room: int) -> None:
        whole = torch.tensor([read.num_tokens for read in reads], device=model.device)
        counts = whole[:, None, None].repeat(1, model.num_layers, model.num_kv_heads)
        for row, mask in enumerate(kept):
            if mask is not None:
                counts[row] = mask.sum(dim=-1)
        self.widths: list[int] = counts.amax(dim=(0, 2)).tolist()
        """Slots of each layer for prompt tokens."""
        self.keys, self.values, self.hidden = [], [], []
        for layer, width in enumerate(self.widths):
            shape = len(reads), model.num_kv_heads, width + room, model.head_size
            self.keys.append(torch.zeros(shape, dtype=model.dtype, device=model.device))
            self.values.append(torch.zeros_like(self.keys[-1]))
            slot = torch.arange(width, device=model.device)
            self.hidden.append((slot >= counts[:, layer, :, None])[:, :, None])
        for row, (read, mask) in enumerate(zip(reads, kept, strict=True)):
            # Kept tokens come first, in text order.
            order = None if mask is None else (~mask).to(torch.uint8).argsort(dim=-1, stable=True)
            for layer, width in enumerate(self.widths):
                for packed, stored in ((self.keys, read.keys), (self.values, read.values)):
                    tokens = stored[layer]
                    if order is not None:
                        tokens = tokens.gather(1, order[layer, :, :width, None].expand(-1, -1, model.head_size))
                    packed[layer][row, :, : tokens.shape[1]] = tokens

    def attend(self, layer: int, step: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               scale: float) -> torch.Tensor:  # fmt: skip
        """Write one token of each answer. Attend to the kept tokens and to the answer."""
        keys, values, width = self.keys[layer], self.values[layer], self.widths[layer]
        end = width + step + 1
        keys[:, :, end - 1], values[:, :, end - 1] = key[:, :, 0], value[:, :, 0]
        grouped = query[:, :, 0].unflatten(1, (keys.shape[1], -1))
        logits = (grouped @ keys[:, :, :end].transpose(-1, -2)).float() * scale
        logits[..., :width].masked_fill_(self.hidden[layer], -torch.inf)
        output: torch.Tensor = logits.softmax(dim=-1).to(values.dtype) @ values[:, :, :end]
        return output.flatten(1, 2)[:, :, None]


def _kept(read: Read, mask: torch.Tensor) -> dict[str, float]:
    columns = {"kept": round(mask.float().mean().item(), 4)}
    if read.prompt.spans:
        columns["survive"] = round(survival(mask, read.prompt.spans), 4)
    return columns


def _rows(
    arm: str,
    ratio: float,
    reads: Sequence[Read],
    texts: Sequence[list[int]],
    decode: Callable[[list[int]], str],
    about: Sequence[dict[str, float]],
    begin: float,
) -> Iterator[dict[str, Any]]:
    for read, text, columns in zip(reads, texts, about, strict=True):
        said = decode(text)
        yield {
            "study": "answers", "arm": arm, "ratio": ratio, "task": read.prompt.task, "name": read.prompt.name,
            "score": round(string_match_all(said, read.prompt.answers), 4), "said": said[:80], **columns,
        }  # fmt: skip
    yield {"study": "answers", "arm": arm, "ratio": ratio, "seconds": round(time.monotonic() - begin, 2)}
