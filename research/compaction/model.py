"""A small model in torch that reads prompts densely and decodes from what a method keeps of them.

A greedy decode is right if and only if the model's first choice is the right one at every token of the answer, so the
right answer passes through the model once, each of its tokens as a decode step.

Weights and activations are float32, keys and values are rounded to bfloat16 as a cache holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from research.compaction.prompt import Layer, Prompt, column_sums
from research.compaction.settings import Reading
from research.prefill.pipeline import Prefiller, attend_causal, attend_visible, policy_reads


class Says(NamedTuple):
    """What the model says after each of some tokens."""

    best: list[int]
    """The most probable next token."""
    likely: torch.Tensor
    """`[num_tokens, vocabulary]` float32 on the host: log probabilities."""


class CompactingModel(Prefiller):
    """A model whose prompts are read densely."""

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], after: Prompt | None = None) -> Prompt:
        """Read a prompt, or go on with one."""
        begin = after.num_tokens if after else 0
        layers: list[Layer] = []

        def attend(layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            queries = query[0]
            sums = keys.new_zeros(keys.shape[1], 0)
            if after is None:
                output = attend_causal(query, keys, values)
            else:
                before = after.layers[layer]
                keys, values = (
                    torch.cat([kept[None], new], 2) for kept, new in ((before.keys, keys), (before.values, values))
                )
                position = torch.arange(keys.shape[2], device=self.device)
                visible = position <= position[begin:, None]
                output = attend_visible(query, keys, values, visible)
                queries, sums = torch.cat([before.queries, queries], 2), before.sums
            sums = torch.nn.functional.pad(sums, (0, keys.shape[2] - sums.shape[1]))
            sums = sums + column_sums(query[0], keys[0], torch.arange(begin, keys.shape[2], device=self.device))
            layers.append(Layer(keys[0], values[0], queries, sums))
            return output

        hidden = self._hidden(self._ids(tokens), begin, attend)
        return Prompt(layers, self._logits(hidden[0, -1]).log_softmax(dim=-1).cpu())

    @torch.inference_mode()
    def decode_kept(self, prompt: Prompt, tokens: Sequence[int], reading: Reading) -> Says:
        """Decode given tokens after a prompt, reading of it what a method keeps."""
        begin, kept = prompt.num_tokens, reading.kept(prompt)
        position = begin + torch.arange(len(tokens), device=self.device)

        def attend(layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            before, places = prompt.layers[layer], kept[layer]
            if places is None:
                past = before.keys, before.values
                where = torch.arange(begin, device=self.device).expand(keys.shape[1], -1)
            else:
                index = places.unsqueeze(-1).expand(-1, -1, keys.shape[-1])
                past = before.keys.gather(1, index), before.values.gather(1, index)
                where = places
            keys, values = (torch.cat([old[None], new], 2) for old, new in zip(past, (keys, values), strict=True))
            where = torch.cat([where, position.expand(len(where), -1)], 1)[:, None]
            visible = (where <= position[:, None]) & ~reading.left_out(where, position, begin)
            if reading.policy is not None:
                visible = visible & policy_reads(query, keys, position[None], reading.policy)[0]
            return attend_visible(query, keys, values, visible[None])

        likely = self._logits(self._hidden(self._ids(tokens), begin, attend))[0].log_softmax(dim=-1).cpu()
        return Says(likely.argmax(dim=-1).tolist(), likely)

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(tokens)], device=self.device)
