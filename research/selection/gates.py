"""Learned page scores: gates in the form of SeerAttention-R, distilled from the attention weight of pages.

A gate projects the keys of a page, pooled, and the query heads of a group to a few dimensions. The product is the score
of the page. The projected keys are the record of the page; they are rounded as they would be stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from research.real.model import Llama
from research.selection.evaluate import RECENT_PAGES, SINK_PAGES
from research.selection.statistics import Pages, Scores, Statistics
from vllm_sparse_plugin.tools.diagnostics.forward import LayerInputs

Turn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes rows `[heads, tokens, size]` and positions `[tokens]`. Returns the rows rotated to the positions."""
_STEP_BYTES = 2
"""A record has one step size in bfloat16."""
_POOLED = 3
"""Mean, largest and smallest key of a page."""
_WARMUP = 20


@dataclass(frozen=True)
class Form:
    """What a gate stores, and what it sees."""

    bits: int
    """Of a dimension."""
    dimensions: int | None = None
    """None: as many as the record of quarters has room for."""
    is_turned: bool = True
    """Whether it sees queries and keys without positions, and turns the projections to the positions of the query and
    of the first token of the page. Otherwise it sees queries and keys as they are cached."""

    def size(self, head_size: int) -> int:
        """Return the dimensions, an even number."""
        # Quarters have the bytes of one vector in bfloat16.
        return self.dimensions or (2 * head_size - _STEP_BYTES) * 8 // self.bits // 2 * 2

    def record_bytes(self, head_size: int) -> int:
        """Return the bytes of a page and KV head."""
        return self.size(head_size) * self.bits // 8 + _STEP_BYTES


FORMS: dict[str, Form] = {
    "gate64": Form(8, 64), "gate-int8": Form(8), "gate-int4": Form(4), "gate-cached": Form(8, is_turned=False)
}  # fmt: skip
"""By name in result files. The first has half the bytes of quarters with heads of 64, the others have as many."""


def turn_of(model: Llama, layer: int) -> Turn:
    """Return the rotation of a layer's queries and keys."""
    return lambda rows, positions: model.rotate(rows[None], positions, layer)[0]


def rounded(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Round rows `[..., size]` to integers of `bits` times a step of each row. Gradients pass unchanged."""
    most = (1 << (bits - 1)) - 1
    step = (rows.detach().abs().amax(dim=-1, keepdim=True) / most).bfloat16().float().clamp(min=1e-8)
    stored = (rows.detach() / step).round().clamp(-most, most) * step
    return rows + (stored - rows).detach()


class Gate(nn.Module):
    """The gate of one layer. It begins as the product of the mean query of a group and the mean key of a page."""

    def __init__(self, form: Form, num_kv_heads: int, group: int, head_size: int, turn: Turn, device: str) -> None:
        """Take a form and the shape of the layer.

        Args:
            form: what it stores and sees.
            num_kv_heads: of the layer.
            group: query heads of a KV head.
            head_size: of the layer.
            turn: of the layer's queries and keys.
            device: of the layer.
        """
        super().__init__()
        self.form, self._turn = form, turn
        size = form.size(head_size)
        half, pair = head_size // 2, torch.arange(min(head_size, size) // 2)
        same = torch.zeros(head_size, size)
        same[pair, pair] = same[half + pair, size // 2 + pair] = 1
        others = torch.randn(group * head_size, size) * (same.sum(dim=0) == 0) * (group * head_size) ** -0.5
        keys = torch.cat([same, torch.zeros((_POOLED - 1) * head_size, size)])
        self.queries, self.keys = (
            nn.Parameter(each.to(device).repeat(num_kv_heads, 1, 1))
            for each in (same.repeat(group, 1) / group + others, keys)
        )
        # A unit vector that is turned to position 1 shows its frequency.
        units = torch.eye(head_size, device=device)[None, :half]
        turned = turn(units, torch.ones(half, dtype=torch.long, device=device))[0]
        frequencies = torch.atan2(turned[:, half:].diagonal(), turned[:, :half].diagonal())
        self._frequencies = frequencies[torch.arange(size // 2, device=device) % half]

    def forward(self, pages: Pages) -> torch.Tensor:
        """Return scores of the complete pages: `[num_queries, num_kv_heads, num_pages]` float32."""
        layer, form = pages.layer, self.form
        query, keys = layer.query.float(), layer.keys.float()
        place = torch.arange(keys.shape[1], device=keys.device)
        newest = place[len(place) - len(query) :]
        grouped = query.flatten(1, 2).transpose(0, 1)
        if form.is_turned:
            grouped, keys = self._turn(grouped, -newest), self._turn(keys, -place)
        whole = keys[:, : pages.count * pages.size].unflatten(1, (-1, pages.size))
        pooled = torch.cat([whole.mean(dim=2), whole.amax(dim=2), whole.amin(dim=2)], dim=-1)
        asked = grouped.unflatten(0, (len(keys), -1)).transpose(1, 2).flatten(2) @ self.queries
        records = pooled @ self.keys
        if form.is_turned:
            asked = self._turned(asked, newest)
            records = self._turned(records, place[: pages.count * pages.size : pages.size])
        scores: torch.Tensor = asked @ rounded(records, form.bits).transpose(1, 2)
        return scores.transpose(0, 1) * layer.scale

    def _turned(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None] * self._frequencies
        first, second = rows.chunk(2, dim=-1)
        cosine, sine = angles.cos(), angles.sin()
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def divergence(scores: torch.Tensor, pages: Pages) -> torch.Tensor:
    """Return the divergence of scores from the attention weight of pages, mean over queries and KV heads, in nats.

    As in training with the mask, it counts the pages that scores decide about, by their weight.
    """
    shares = (pages.log_weights - pages.log_weights.logsumexp(dim=-1, keepdim=True)).exp().mean(dim=2)
    page = torch.arange(pages.count, device=scores.device)
    decided = (page >= SINK_PAGES) & (page < pages.complete[:, None, None] - RECENT_PAGES)
    wanted = shares[..., : pages.count] * decided
    logs = scores.masked_fill(~decided, -torch.inf).log_softmax(dim=-1).masked_fill(~decided, 0)
    relative = wanted / wanted.sum(dim=-1, keepdim=True).clamp(min=1e-30)
    return (torch.xlogy(wanted, relative) - wanted * logs).sum(dim=-1).mean()


@dataclass(frozen=True)
class Gated(Statistics):
    """Page scores of a trained gate."""

    gate: Gate

    @torch.no_grad()
    def score(self, pages: Pages) -> Scores:
        """Score all complete pages."""
        return Scores(self.gate(pages).bfloat16(), self.gate.form.record_bytes(pages.layer.keys.shape[-1]))


@torch.no_grad()
def capture(model: Llama, tokens: Sequence[int], queries: int) -> dict[int, LayerInputs]:
    """Read a text densely. Return the inputs of each layer without a window, with the newest queries.

    Args:
        model: the model.
        tokens: of the text.
        queries: number of newest tokens whose queries are kept.
    """
    found: dict[int, LayerInputs] = {}

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if model.windows[layer] is None:
            newest = query[0, :, -queries:].unflatten(0, (key.shape[1], -1)).permute(2, 0, 1, 3)
            found[layer] = LayerInputs(newest.contiguous(), key[0], value[0], model.scale)
        return model.attend(layer, query, key, value)

    ids = torch.tensor(tokens, device=model.device)
    model.hidden(ids[None], torch.arange(len(ids), device=model.device), attend)
    return found


@dataclass
class Distillation:
    """Gates of all layers in training."""

    model: Llama
    page_size: int
    steps: int
    """Texts to read. The rate falls to zero along a cosine."""
    rate: float
    forms: Mapping[str, Form]
    gates: dict[int, dict[str, Gate]] = field(default_factory=dict)
    """By layer and form."""

    def __post_init__(self) -> None:
        model, group = self.model, self.model.num_heads // self.model.num_kv_heads
        torch.manual_seed(0)
        for layer, window in enumerate(model.windows):
            if window is None:
                shape = model.num_kv_heads, group, model.head_size, turn_of(model, layer), str(model.device)
                self.gates[layer] = {name: Gate(form, *shape) for name, form in self.forms.items()}
        weights = [weight for gates in self.gates.values() for gate in gates.values() for weight in gate.parameters()]
        self._optimizer = torch.optim.AdamW(weights, lr=self.rate, weight_decay=0.0)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, self._rate)

    def _rate(self, step: int) -> float:
        warm = min(1.0, (step + 1) / _WARMUP)
        return warm * float(torch.cos(torch.tensor(torch.pi / 2 * step / self.steps)) ** 2)

    def train(self, texts: Iterator[Sequence[int]], queries: int) -> Iterator[dict[str, float]]:
        """Read a text in each step. Yield the mean divergence over layers by form.

        Args:
            texts: at least `steps`.
            queries: number of newest tokens of a text to learn from.
        """
        for _, tokens in zip(range(self.steps), texts, strict=False):
            sums = dict.fromkeys(self.forms, torch.zeros((), device=self.model.device))
            for layer, inputs in capture(self.model, tokens, queries).items():
                pages = Pages.of(inputs, self.page_size)
                for name, gate in self.gates[layer].items():
                    loss = divergence(gate(pages), pages)
                    loss.backward()
                    sums[name] = sums[name] + loss.detach()
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
            yield {name: float(total) / len(self.gates) for name, total in sums.items()}

    def statistics(self, layer: int) -> dict[str, Statistics]:
        """Return the gates of a layer as statistics, by form."""
        return {name: Gated(gate) for name, gate in self.gates[layer].items()}
