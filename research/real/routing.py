"""Skips KV groups in decode steps by several rules, with thresholds from held-out texts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812

from research.real.model import Cache, Llama, causal_weights, read
from research.real.texts import Prompt

SCORED = 128
"""Newest tokens of a text. They are decoded after the rest."""
DENSE_LAYERS = 2
"""Number of first layers, which are not routed."""
SINK_MASS = 0.5
"""A group is a sink group if its weight on token 0, mean over its heads, reaches this value."""

Score = Literal["cosine", "mass", "mass_min", "mass_before", "value", "energy", "energy_before", "fill_error", "static"]
"""Cosine of query and first key; weight of token 0, mean or minimum over heads; that weight by the logsumexp of the
previous step; cosine minus the norm of the first value over the mean norm; the group's addition to the residual stream,
in this or the previous step; its difference from the filled value; its mean over held-out texts."""


@dataclass(frozen=True)
class Routing:
    """Rule for the skipped groups and their output."""

    score: Score = "cosine"
    fill: Literal["zero", "sink", "mean"] = "zero"
    """Output of a skipped group: zero, the first value times its weight, or that plus the mean value times the rest."""
    half: bool = False
    """Whether the half of the layers with the least weight on token 0 is not routed."""


ROUTINGS: dict[str, Routing] = {
    "cosine": Routing(),
    "mass_before": Routing("mass_before"),
    "mass_before_sink": Routing("mass_before", "sink"),
    "mass": Routing("mass"),
    "mass_sink": Routing("mass", "sink"),
    "cosine_sink": Routing("cosine", "sink"),
    "cosine_half": Routing(half=True),
    "energy_before": Routing("energy_before"),
    "energy": Routing("energy"),
    "static": Routing("static"),
    "static_mean": Routing("static", "mean"),
    "energy_before_mean": Routing("energy_before", "mean"),
    "mass_before_mean": Routing("mass_before", "mean"),
    "mass_min": Routing("mass_min"),
    "mass_min_sink": Routing("mass_min", "sink"),
    "value": Routing("value"),
    "cosine_mean": Routing("cosine", "mean"),
    "fill_error": Routing("fill_error", "sink"),
    "fill_error_mean": Routing("fill_error", "mean"),
    "mass_half": Routing("mass", half=True),
}
"""By name of the arm, the most important first."""
DENSE, NOISE = "dense", "noise"


@dataclass
class Held:
    """Values of a rule from held-out texts."""

    threshold: float
    """Groups with this score or more are skipped."""
    routed: torch.Tensor
    """`[layers, num_kv_heads]` bool, groups that may be skipped."""
    energy: torch.Tensor
    """`[layers, num_kv_heads]`, mean addition of each group to the residual stream."""


class RoutedDecode:
    """Attention of consecutive tokens after a cache, each as in a separate decode step, with skipped groups."""

    def __init__(self, model: Llama, cache: Cache, rule: Routing, held: Held | None) -> None:
        """Take a rule and its held-out values. None skips nothing and only collects scores."""
        self.scores: list[torch.Tensor] = []
        """`[num_kv_heads, rows]` per layer."""
        self.mass: list[torch.Tensor] = []
        """Weight of token 0, mean over a group's heads, in the same shape."""
        self.energy: list[torch.Tensor] = []
        """Norm of a group's addition to the residual stream over the norm of the stream, in the same shape."""
        self.skipped: list[torch.Tensor] = []
        """Whether the group was skipped, in the same shape; bool."""
        self._model, self._cache, self._rule, self._held = model, cache, rule, held
        self._late: tuple[torch.Tensor, torch.Tensor] | None = None

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `model.Attend`. `project` decides what is skipped, because it knows the residual stream."""
        keys, values = self._cache.put(layer, key, value)
        rows = torch.arange(keys.shape[1] - query.shape[2], keys.shape[1], device=keys.device)
        weights = causal_weights(query[0], keys, self._model.scale, rows)
        output = weights.to(values.dtype) @ values[:, None]
        grouped = query[0].unflatten(0, (len(keys), -1)).float()
        first = keys[:, None, None, 0].float()
        logit = (grouped * first).sum(dim=-1) * self._model.scale
        mass = weights[..., 0]
        # log of the softmax's denominator for the previous token; the first token uses its own.
        denominator = logit - mass.clamp(min=1e-30).log()
        before = torch.cat([denominator[..., :1], denominator[..., :-1]], dim=-1)
        estimate = (logit - before).exp().clamp(max=1)
        cosine = F.cosine_similarity(grouped, first, dim=-1)
        norms = values.float().norm(dim=-1)
        self.mass.append(mass.mean(dim=1))
        scores = {
            "cosine": cosine.mean(dim=1), "mass": mass.mean(dim=1), "mass_min": mass.amin(dim=1),
            "mass_before": estimate.mean(dim=1),
            "value": cosine.mean(dim=1) - norms[:, :1] / norms.mean(dim=1)[:, None],
        }  # fmt: skip
        rule = self._rule
        known = {"mass": mass, "mass_min": mass, "fill_error": mass}.get(rule.score, estimate)[..., None]
        if rule.fill == "zero":
            fill = torch.zeros_like(output)
        else:
            fill = (known * values[:, None, None, 0].float()).to(output.dtype)
            if rule.fill == "mean":
                fill = fill + ((1 - known) * values.float().mean(dim=1)[:, None, None]).to(output.dtype)
        # All are [num_kv_heads, group_size, rows, head_size].
        self._late = output, fill
        if rule.score in scores:
            self.scores.append(scores[rule.score])
        return output.flatten(0, 1)[None]

    def project(self, layer: int, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Skip groups. Return the attention's addition to the residual stream."""
        assert self._late is not None
        attended, fill = self._late
        stream = x[0].float().norm(dim=-1)
        energy = self._added(layer, attended) / stream
        self.energy.append(energy)
        if self._rule.score == "energy":
            self.scores.append(-energy)
        elif self._rule.score == "energy_before":
            self.scores.append(-torch.cat([energy[:, :1], energy[:, :-1]], dim=1))
        elif self._rule.score == "fill_error":
            self.scores.append(-self._added(layer, attended - fill) / stream)
        elif self._rule.score == "static":
            known = energy.mean(dim=1) if self._held is None else self._held.energy[layer]
            self.scores.append(-known[:, None].expand_as(energy))
        if self._held is None:
            skipped = torch.zeros_like(energy, dtype=torch.bool)
        else:
            skipped = (self.scores[-1] >= self._held.threshold) & self._held.routed[layer][:, None]
        self.skipped.append(skipped)
        chosen = torch.where(skipped[:, None, :, None], fill, attended).flatten(0, 1)
        return F.linear(chosen.transpose(0, 1).flatten(1)[None], self._model.weight(layer, "self_attn.o_proj"))

    def _added(self, layer: int, output: torch.Tensor) -> torch.Tensor:
        """Return the norm of each group's addition to the residual stream: `[num_kv_heads, rows]`."""
        weight = self._model.weight(layer, "self_attn.o_proj").float().unflatten(1, (len(output), -1))
        rows = output.float().transpose(1, 2).flatten(2)
        added: torch.Tensor = torch.einsum("hrd,ohd->hro", rows, weight).norm(dim=-1)
        return added


def hold(model: Llama, rule: Routing, runs: Sequence[RoutedDecode], share: float) -> Held:
    """Set the threshold of a rule so that it skips a share of all groups of held-out texts.

    Args:
        model: the model.
        rule: defines the scores.
        runs: dense runs that collected the scores of the rule.
        share: of the groups of all layers.
    """
    scores, mass, energy = (
        torch.stack([torch.stack(getattr(run, name)) for run in runs]) for name in ("scores", "mass", "energy")
    )
    routed = torch.ones(model.num_layers, model.num_kv_heads, dtype=torch.bool, device=scores.device)
    routed[:DENSE_LAYERS] = False
    if rule.half:
        of_layer = mass.mean(dim=(0, 2, 3))
        routed[of_layer < of_layer.median()] = False
    of_group = energy.mean(dim=(0, 3))
    if rule.score == "static":
        scores = -of_group[None, :, :, None].expand_as(energy)
    candidates = scores.transpose(0, 1).transpose(1, 2)[routed].flatten()
    count = min(max(int(share * scores.numel()), 1), len(candidates))
    return Held(candidates.sort(descending=True).values[count - 1].item(), routed, of_group)


def measure_routing(
    model: Llama, exact: Llama | None, held_out: Sequence[Prompt], texts: Sequence[Prompt], arms: Sequence[str],
    shares: Sequence[float],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield a row for each arm, share and text: the share of next tokens equal to those of dense attention.

    Args:
        model: the model.
        exact: the model in float32, for the noise of dense attention; None to omit the noise.
        held_out: texts that set the thresholds.
        texts: texts that are measured.
        arms: names in `ROUTINGS`.
        shares: of the groups of all layers to skip.
    """
    read_before = [_read(model, text) for text in (*held_out, *texts)]
    measured = list(zip(texts, read_before[len(held_out) :], strict=True))
    dense = [_decode(model, cache, text, Routing(), None)[1] for text, cache in measured]
    for (text, cache), expected in zip(measured, dense, strict=True):
        about = {"study": "routing", "text": text.name, "kind": text.kind, "context_tokens": text.context_tokens}
        again = _fused(model, cache, text)
        yield about | {"arm": DENSE, "agreement": _same(expected, again)}
        if exact is not None:
            other = _fused(exact, _read(exact, text), text)
            yield about | {"arm": NOISE, "agreement": _same(expected, other)}
    for arm in arms:
        rule = ROUTINGS[arm]
        runs = [
            _decode(model, cache, text, rule, None)[0]
            for text, cache in zip(held_out, read_before, strict=False)
        ]  # fmt: skip
        for share in shares:
            held = hold(model, rule, runs, share)
            for (text, cache), expected in zip(measured, dense, strict=True):
                begin = time.monotonic()
                run, found = _decode(model, cache, text, rule, held)
                skipped, mass = torch.stack(run.skipped), torch.stack(run.mass)
                energy = torch.stack(run.energy).square()
                sinks = mass >= SINK_MASS
                yield {
                    "study": "routing", "arm": arm, "share": share, "text": text.name, "kind": text.kind,
                    "context_tokens": text.context_tokens, "threshold": round(held.threshold, 5),
                    "agreement": _same(expected, found), "skipped": _share(skipped),
                    "sinks": _share(sinks), "precision": _share(sinks[skipped]), "recall": _share(skipped[sinks]),
                    "energy": round((energy[skipped].sum() / energy.sum()).item(), 4),
                    "seconds": round(time.monotonic() - begin, 3),
                }  # fmt: skip


def _read(model: Llama, text: Prompt) -> Cache:
    cache = Cache(model, len(text.tokens))
    read(model, torch.tensor(text.tokens[:-SCORED], device=model.device), cache)
    return cache


def _decode(
    model: Llama, cache: Cache, text: Prompt, rule: Routing, held: Held | None
) -> tuple[RoutedDecode, torch.Tensor]:
    """Decode the newest tokens of a text. The cache stays unchanged up to its end."""
    run = RoutedDecode(model, cache, rule, held)
    tokens = torch.tensor(text.tokens[-SCORED:], device=model.device)
    positions = torch.arange(cache.length, cache.length + len(tokens), device=model.device)
    hidden = model.hidden(tokens[None], positions, run.attend, run.project)
    return run, model.logits(hidden[0]).argmax(dim=-1)


def _fused(model: Llama, cache: Cache, text: Prompt) -> torch.Tensor:
    """Decode like `_decode` without routing, with the attention of the prefill."""
    tokens = torch.tensor(text.tokens[-SCORED:], device=model.device)
    found = model.logits(read(model, tokens, cache)).argmax(dim=-1)
    cache.length -= len(tokens)
    return found


def _same(expected: torch.Tensor, found: torch.Tensor) -> float:
    return _share(expected == found.to(expected.device))


def _share(mask: torch.Tensor) -> float:
    return round(mask.float().mean().item(), 4) if mask.numel() else 0.0
