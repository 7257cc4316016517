"""Thresholds of SinkRouter for one model: what its groups score, the cubic through the thresholds, and how well it
finds the groups that attend to the first token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
from sparse_kernels.group_routing import GroupScore, group_scores

from vllm_sparse_plugin.config.routing import Routing
from vllm_sparse_plugin.diagnostics.forward import SINK_MASS, CapturingModel, Decoded, LayerInputs
from vllm_sparse_plugin.errors import ConfigurationError

SWEEP = (0.1, 0.2, 0.4, 0.6, 0.8)
"""Skip ratios at which precision and recall are reported."""


class Text(NamedTuple):
    """A document, and what may follow it."""

    task: str
    length: int
    """Of the context in tokens, as it was asked for."""
    document: list[int]
    """Ids of the beginning, which is prefilled densely."""
    rest: list[list[int]]
    """Ids of what may follow, each of which is decoded after the same beginning."""
    asked: list[int]
    """Newest tokens of each that are to be predicted."""


@dataclass(frozen=True)
class Observed:
    """Groups of decoding tokens: how they score, and where their attention goes."""

    scores: torch.Tensor
    """`[layers, num_queries, num_kv_heads]` float32."""
    mass: torch.Tensor
    """The same shape: attention weight on token 0, the mean over the group's heads."""

    @classmethod
    def of(cls, layers: Sequence[LayerInputs], score: GroupScore) -> Observed:
        """What full attention's layers saw of one text."""
        scores = [group_scores(layer.query.float(), layer.keys[:, 0].float(), score) for layer in layers]
        mass = [layer.weights()[..., 0].mean(dim=-1) for layer in layers]
        return cls(torch.stack(scores).cpu(), torch.stack(mass).cpu())

    @classmethod
    def join(cls, parts: Sequence[Observed]) -> Observed:
        """Several texts' as one."""
        return cls(*(torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("scores", "mass")))


class Detection(NamedTuple):
    """How the groups that are skipped compare with the sink groups."""

    skipped: float
    """Share of the groups that is skipped."""
    precision: float
    """Share of the skipped groups that are sink groups; NaN if none is skipped."""
    recall: float
    """Share of the sink groups that is skipped; NaN if there are none."""


def threshold_for(scores: torch.Tensor, skip_ratio: float) -> float:
    """The largest score from which at least `skip_ratio` of the groups are skipped."""
    ranked = scores.flatten().sort(descending=True).values
    return float(ranked[max(0, math.ceil(skip_ratio * len(ranked)) - 1)])


def fit(lengths: Sequence[int], thresholds: Sequence[float]) -> tuple[float, float, float, float]:
    """The cubic through thresholds by length: least squares, of a lower degree where there are fewer than four.

    Args:
        lengths: contexts in tokens, ascending, two or more; the first and the last are the range of the fit.
        thresholds: one for each.

    Returns:
        c0 to c3, as `GroupRouting` takes them.
    """
    log = torch.tensor(lengths, dtype=torch.float64).log()
    x = (log - log[0]) / (log[-1] - log[0])
    powers = x[:, None] ** torch.arange(min(4, len(lengths)))
    found = torch.linalg.lstsq(powers, torch.tensor(thresholds, dtype=torch.float64)[:, None]).solution[:, 0].tolist()
    c0, c1, c2, c3 = (round(c, 6) for c in [*found, 0.0, 0.0][:4])
    return c0, c1, c2, c3


def detect(observed: Observed, skipped: torch.Tensor) -> Detection:
    """Compares skipped groups with sink groups.

    Args:
        observed: the groups.
        skipped: bool, of the shape of its scores.
    """
    sinks = observed.mass >= SINK_MASS
    both, all_skipped, all_sinks = (float(part.sum()) for part in (sinks & skipped, skipped, sinks))
    return Detection(
        all_skipped / skipped.numel(),
        both / all_skipped if all_skipped else math.nan,
        both / all_sinks if all_sinks else math.nan,
    )


def average_precision(observed: Observed) -> float:
    """Area under the curve of precision over recall of the score as a sign of a sink group; NaN without sink groups.

    Its step-wise form: the sum over the distinct thresholds of precision times what recall rises by.
    """
    scores, order = observed.scores.flatten().sort(descending=True, stable=True)
    sinks = (observed.mass.flatten()[order] >= SINK_MASS).double()
    if not sinks.any():
        return math.nan
    # Groups of one score are found together.
    last = torch.cat([scores[1:] != scores[:-1], torch.ones(1, dtype=torch.bool)])
    found = sinks.cumsum(dim=0)[last]
    precision = found / (torch.arange(len(scores), dtype=torch.float64)[last] + 1)
    rise = torch.diff(found, prepend=torch.zeros(1, dtype=torch.float64)) / sinks.sum()
    return float((precision * rise).sum())


def skipped_by(routing: Routing, layer: int, inputs: LayerInputs) -> torch.Tensor:
    """Which groups of a layer a routing skips: `[num_queries, num_kv_heads]` bool."""
    heads = inputs.keys.shape[0]
    if layer < routing.dense_layers:
        return torch.zeros(len(inputs.query), heads, dtype=torch.bool, device=inputs.query.device)
    scores = group_scores(inputs.query.float(), inputs.keys[:, 0].float(), routing.score)
    own = routing.of_layer(layer, range(heads), inputs.query.device)
    return scores >= own.thresholds(inputs.context_lens)


class Verdict(NamedTuple):
    """Whether to route, and why."""

    route: bool
    reason: str


def judge(prevalence: float, detection: Detection, target: float, dense: float, routed: float) -> Verdict:
    """Whether routing is worth its price, by what was measured.

    Args:
        prevalence: share of sink groups.
        detection: of the fitted thresholds.
        target: share of groups that were to be skipped.
        dense: share of tokens that are predicted right with dense attention.
        routed: the same when routed.
    """
    precision = "none" if math.isnan(detection.precision) else f"{detection.precision:.1%}"
    quality = f"{routed:.1%} of the tokens asked for are right, {dense:.1%} with dense attention"
    against = []
    if prevalence < target / 2:
        against.append(
            f"{prevalence:.1%} of the groups are sink groups (at least {SINK_MASS} of their attention on token 0), and "
            f"{target:.0%} were to be skipped"
        )
    if not detection.precision >= 0.5:
        against.append(f"{precision} of the skipped groups are sink groups")
    if routed < 0.95 * dense:
        against.append(quality)
    return Verdict(not against, "; ".join(against or [f"{precision} of the skipped groups are sink groups", quality]))


@dataclass
class _Right:
    """Tokens that were predicted, and answers of which all were."""

    tokens: list[bool] = field(default_factory=list)
    answers: list[bool] = field(default_factory=list)

    def add(self, rest: list[int], asked: int, predictions: list[int]) -> None:
        right = [a == b for a, b in zip(rest[-asked:], predictions[-asked - 1 : -1], strict=True)]
        self.tokens += right
        self.answers.append(all(right))


@dataclass(frozen=True)
class Outcome:
    """What calibration found."""

    routing: Routing
    thresholds: dict[int, float]
    """By length, what skips the share that was asked for."""
    rows: list[dict[str, Any]]
    """By length and task."""
    layers: list[dict[str, Any]]
    """By routed layer."""
    detection: Detection
    """Of the fitted thresholds."""
    sweep: list[Detection]
    """Of thresholds that skip the shares of `SWEEP`."""
    auprc: float
    sink_groups: float
    """Share of the groups."""
    verdict: Verdict


def calibrate(
    model: CapturingModel,
    fitting: Sequence[Text],
    judging: Sequence[Text],
    skip_ratio: float,
    progress: Callable[[int], None],
    score: GroupScore,
    dense_layers: int,
    about: Mapping[str, Any],
) -> Outcome:
    """Fits thresholds to some texts and judges them by others.

    Args:
        model: what runs them.
        fitting: those to fit to, of two lengths or more.
        judging: the others, texts of one length and task one after the other.
        skip_ratio: share of the groups of routed layers to be skipped.
        progress: told the tokens of each text that has been run.
        score: of the cosines of a group's heads.
        dense_layers: leading layers that are not routed.
        about: fields of `Routing` that say where the thresholds come from.

    Raises:
        ConfigurationError: if no layer is left to be routed.
    """

    def routed_layers(decoded: Decoded) -> dict[int, LayerInputs]:
        routed = {i: layer for i, layer in enumerate(decoded.layers) if layer is not None and i >= dense_layers}
        if not routed:
            raise ConfigurationError("model: got no layer of full attention to route, allowed: models with one")
        return routed

    scores: dict[int, list[torch.Tensor]] = {}
    for text in fitting:
        cache = model.prefill(text.document)
        for rest in text.rest:
            observed = Observed.of(list(routed_layers(model.decode(cache, rest)).values()), score)
            scores.setdefault(text.length, []).append(observed.scores)
        progress(text.length)
    lengths = sorted(scores)
    thresholds = {length: threshold_for(torch.cat(scores[length], dim=1), skip_ratio) for length in lengths}
    routing = Routing(
        score=score, cubic=fit(lengths, list(thresholds.values())), shortest=lengths[0], longest=lengths[-1],
        dense_layers=dense_layers, **about,
    )  # fmt: skip

    rows, everything, all_skips = [], [], []
    for (length, task), texts in groupby(judging, lambda text: (text.length, text.task)):
        seen, skips, dense, routed = [], [], _Right(), _Right()
        for text in texts:
            cache = model.prefill(text.document)
            for rest, asked in zip(text.rest, text.asked, strict=True):
                decoded = model.decode(cache, rest)
                layers = routed_layers(decoded)
                seen.append(Observed.of(list(layers.values()), score))
                skips.append(torch.stack([skipped_by(routing, *layer).cpu() for layer in layers.items()]))
                dense.add(rest, asked, decoded.predictions)
                again = model.decode(cache, rest, lambda layer, inputs: skipped_by(routing, layer, inputs))
                routed.add(rest, asked, again.predictions)
            progress(text.length)
        together, skipped = Observed.join(seen), torch.cat(skips, dim=1)
        everything.append(together)
        all_skips.append(skipped)
        rows.append(
            {
                "context_tokens": length,
                "task": task,
                "skipped": float(skipped.float().mean()),
                "sink_groups": float((together.mass >= SINK_MASS).float().mean()),
                "tokens": len(dense.tokens),
                "dense_tokens_right": sum(dense.tokens),
                "routed_tokens_right": sum(routed.tokens),
                "answers": len(dense.answers),
                "dense_answers_right": sum(dense.answers),
                "routed_answers_right": sum(routed.answers),
            }
        )
    together, skipped = Observed.join(everything), torch.cat(all_skips, dim=1)
    detection = detect(together, skipped)
    sinks = (together.mass >= SINK_MASS).float()
    tokens, dense_right, routed_right = (
        sum(row[key] for row in rows) for key in ("tokens", "dense_tokens_right", "routed_tokens_right")
    )
    return Outcome(
        routing,
        thresholds,
        rows,
        [
            {
                "layer": layer,
                "skipped": float(skip.float().mean()),
                "mass": float(mass.mean()),
                "sink_groups": float(sink.mean()),
            }
            for layer, skip, mass, sink in zip(layers, skipped, together.mass, sinks, strict=True)
        ],
        detection,
        [detect(together, together.scores >= threshold_for(together.scores, share)) for share in SWEEP],
        average_precision(together),
        float(sinks.mean()),
        judge(float(sinks.mean()), detection, skip_ratio, dense_right / tokens, routed_right / tokens),
    )
