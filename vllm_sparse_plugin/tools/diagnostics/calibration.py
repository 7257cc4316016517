"""Fits SinkRouter's thresholds for one model: scores of its KV groups, a cubic through the thresholds, and the accuracy
in finding sink groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from sparse_kernels.group_routing import GroupScore, group_scores

from vllm_sparse_plugin.config.routing import Routing
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.diagnostics.forward import SINK_MASS, CapturingModel, Decoded, LayerInputs
from vllm_sparse_plugin.tools.diagnostics.texts import LENGTHS, SAMPLES, Text, are_few, count_continuations


@dataclass(frozen=True)
class Observed:
    """KV groups of decoding tokens: their scores and attention."""

    scores: torch.Tensor
    """`[layers, num_queries, num_kv_heads]` float32."""
    mass: torch.Tensor
    """Same shape: attention weight on token 0, mean over the group's heads."""

    @classmethod
    def of(cls, layers: Sequence[LayerInputs], score: GroupScore) -> Observed:
        """Observe one text in layers of full attention."""
        scores = [group_scores(layer.query.float(), layer.keys[:, 0].float(), score) for layer in layers]
        mass = [layer.weights()[..., 0].mean(dim=-1) for layer in layers]
        return cls(torch.stack(scores).cpu(), torch.stack(mass).cpu())

    @classmethod
    def join(cls, parts: Sequence[Observed]) -> Observed:
        """Join observations of several texts."""
        return cls(*(torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("scores", "mass")))


class Detection(NamedTuple):
    """Skipped groups compared with sink groups."""

    skipped: float
    """Share of skipped groups."""
    precision: float
    """Share of skipped groups that are sink groups; NaN if no group is skipped."""
    recall: float
    """Share of sink groups that are skipped; NaN without sink groups."""


def threshold_for(scores: torch.Tensor, skip_ratio: float) -> float:
    """Return the largest score at which at least `skip_ratio` of the groups are skipped."""
    ranked = scores.flatten().sort(descending=True).values
    return float(ranked[max(0, math.ceil(skip_ratio * len(ranked)) - 1)])


def fit(lengths: Sequence[int], thresholds: Sequence[float]) -> tuple[float, float, float, float]:
    """Fit a cubic to thresholds by length, by least squares. Fewer than four lengths get a lower degree.

    Args:
        lengths: contexts in tokens, ascending, two or more. The first and the last bound the fit.
        thresholds: one per length.

    Returns:
        c0 to c3, as in `GroupRouting`.
    """
    log = torch.tensor(lengths, dtype=torch.float64).log()
    x = (log - log[0]) / (log[-1] - log[0])
    powers = x[:, None] ** torch.arange(min(4, len(lengths)))
    solution = torch.linalg.lstsq(powers, torch.tensor(thresholds, dtype=torch.float64)[:, None]).solution
    c0, c1, c2, c3 = (round(c, 6) for c in [*solution[:, 0].tolist(), 0.0, 0.0][:4])
    return c0, c1, c2, c3


def detect(observed: Observed, skipped: torch.Tensor) -> Detection:
    """Compare skipped groups with sink groups.

    Args:
        observed: the groups.
        skipped: bool, in the shape of the scores.
    """
    sinks = observed.mass >= SINK_MASS
    both, all_skipped, all_sinks = (float(part.sum()) for part in (sinks & skipped, skipped, sinks))
    return Detection(
        all_skipped / skipped.numel(),
        both / all_skipped if all_skipped else math.nan,
        both / all_sinks if all_sinks else math.nan,
    )


def average_precision(observed: Observed) -> float:
    """Return the area under the precision-recall curve of the score as a sign of a sink group; NaN without sink groups.

    This is the step-wise form: the sum over distinct thresholds of precision times the increase in recall.
    """
    scores, order = observed.scores.flatten().sort(descending=True, stable=True)
    sinks = (observed.mass.flatten()[order] >= SINK_MASS).double()
    if not sinks.any():
        return math.nan
    # Groups with equal scores are found together.
    last = torch.cat([scores[1:] != scores[:-1], torch.ones(1, dtype=torch.bool)])
    sinks_found = sinks.cumsum(dim=0)[last]
    precision = sinks_found / (torch.arange(len(scores), dtype=torch.float64)[last] + 1)
    rise = torch.diff(sinks_found, prepend=torch.zeros(1, dtype=torch.float64)) / sinks.sum()
    return float((precision * rise).sum())


def skipped_by(routing: Routing, layer: int, inputs: LayerInputs) -> torch.Tensor:
    """Return the groups of a layer that a routing skips: `[num_queries, num_kv_heads]` bool."""
    heads = inputs.keys.shape[0]
    if layer < routing.dense_layers:
        return torch.zeros(len(inputs.query), heads, dtype=torch.bool, device=inputs.query.device)
    scores = group_scores(inputs.query.float(), inputs.keys[:, 0].float(), routing.score)
    layer_routing = routing.of_layer(layer, range(heads), inputs.query.device)
    return scores >= layer_routing.thresholds(inputs.context_lens)


class Verdict(NamedTuple):
    """Whether to route, and the reasons."""

    route: bool
    reason: str


class Accuracy(NamedTuple):
    """Shares of tokens that are predicted right."""

    dense: float
    routed: float

    @property
    def holds(self) -> bool:
        """Whether routing keeps enough of them. Where dense attention answers nothing, nothing is known of the loss."""
        return self.dense > 0 and self.routed >= 0.95 * self.dense

    def __str__(self) -> str:
        return f"{self.routed:.1%} of the tokens asked for are right, {self.dense:.1%} with dense attention"


def judge(
    prevalence: float,
    detection: Detection,
    target: float,
    accuracy: Accuracy,
    parts: Mapping[str, Accuracy],
    fitted: int,
    lengths: int,
) -> Verdict:
    """Judge by measurements whether routing is worth its loss.

    Args:
        prevalence: share of sink groups.
        detection: of the fitted thresholds.
        target: requested share of skipped groups.
        accuracy: of all texts.
        parts: of the texts of each length and of each task, by a name for the reason.
        fitted: number of continuations that the thresholds are fitted to.
        lengths: number of their lengths.
    """
    precision = "none" if math.isnan(detection.precision) else f"{detection.precision:.1%}"
    against = []
    if prevalence < target / 2:
        against.append(
            f"{prevalence:.1%} of the groups are sink groups (at least {SINK_MASS} of their attention on token 0), and "
            f"{target:.0%} were to be skipped"
        )
    if not detection.precision >= 0.5:
        against.append(f"{precision} of the skipped groups are sink groups")
    if not accuracy.holds:
        against.append(str(accuracy))
    elif lost := [f"{name} {part}" for name, part in parts.items() if not part.holds]:
        against += lost
    if are_few(fitted, lengths):
        against.append(
            f"the thresholds are fitted to {fitted} samples of {lengths} lengths, and need {SAMPLES} or more of "
            f"{LENGTHS} or more"
        )
    return Verdict(
        not against, "; ".join(against or [f"{precision} of the skipped groups are sink groups", str(accuracy)])
    )


def is_right(rest: list[int], asked: int, predictions: list[int]) -> list[bool]:
    """Return whether each of the newest `asked` decoded tokens was predicted."""
    return [a == b for a, b in zip(rest[-asked:], predictions[-asked - 1 : -1], strict=True)]


@dataclass
class _Judged:
    """Texts of one length and task: their groups and the accuracy of their answers."""

    length: int
    task: str
    layers: list[int] = field(default_factory=list)
    """Indices of layers that may be routed."""
    observed: list[Observed] = field(default_factory=list)
    first_values: list[torch.Tensor] = field(default_factory=list)
    """`[layers, num_kv_heads]` per continuation."""
    skipped: list[torch.Tensor] = field(default_factory=list)
    """Skipped groups: bool, in the shape of a continuation's scores."""
    right: dict[str, list[list[bool]]] = field(default_factory=lambda: {"dense": [], "routed": []})
    """For each answer, whether its tokens are right."""

    def row(self) -> dict[str, Any]:
        """Return the report row of these texts."""
        observed, skipped = Observed.join(self.observed), torch.cat(self.skipped, dim=1)
        return {
            "context_tokens": self.length,
            "task": self.task,
            "skipped": float(skipped.float().mean()),
            "sink_groups": float((observed.mass >= SINK_MASS).float().mean()),
            "tokens": sum(map(len, self.right["dense"])),
            "answers": len(self.right["dense"]),
            **{f"{name}_tokens_right": sum(map(sum, answers)) for name, answers in self.right.items()},
            **{f"{name}_answers_right": sum(map(all, answers)) for name, answers in self.right.items()},
        }


@dataclass(frozen=True)
class Outcome:
    """Result of a calibration."""

    routing: Routing
    thresholds: dict[int, float]
    """Thresholds for the requested skip ratio, by length."""
    rows: list[dict[str, Any]]
    """Measurements by length and task."""
    layers: list[dict[str, Any]]
    """Measurements by routed layer. `first_value` is the norm of token 0's value over the median norm of the others,
    mean over KV heads and texts. `first_value_largest` is the largest of them. A skipped group replaces this value by
    zero, so it should be far below 1."""
    detection: Detection
    """Accuracy of the fitted thresholds in finding sink groups."""
    auprc: float
    sink_groups: float
    """Share of groups that are sink groups."""
    verdict: Verdict


def routed_layers(decoded: Decoded, dense_layers: int) -> dict[int, LayerInputs]:
    """Return the layers that may be routed, by index.

    Raises:
        ConfigurationError: there is none.
    """
    routed = {i: layer for i, layer in enumerate(decoded.layers) if layer is not None and i >= dense_layers}
    if not routed:
        raise ConfigurationError("model: got no layer of full attention to route, allowed: models with one")
    return routed


def _judge_text(judged: _Judged, model: CapturingModel, text: Text, routing: Routing) -> None:
    """Add the results of one text: decoded densely, and routed."""
    cache = model.prefill(text.document)
    for continuation, asked in zip(text.rest, text.asked, strict=True):
        dense = model.decode(cache, continuation)
        routed = model.decode(cache, continuation, partial(skipped_by, routing))
        layers = routed_layers(dense, routing.dense_layers)
        judged.layers = list(layers)
        judged.observed.append(Observed.of(list(layers.values()), routing.score))
        judged.first_values.append(torch.stack([first_value(inputs) for inputs in layers.values()]).cpu())
        judged.skipped.append(torch.stack([skipped_by(routing, *layer).cpu() for layer in layers.items()]))
        for name, decoded in (("dense", dense), ("routed", routed)):
            judged.right[name].append(is_right(continuation, asked, decoded.predictions))


def first_value(inputs: LayerInputs) -> torch.Tensor:
    """Return the norm of token 0's value over the median norm of the other values: `[num_kv_heads]` float32."""
    norms: torch.Tensor = inputs.values.float().norm(dim=-1)
    median = norms[:, 1:].median(dim=-1).values
    return norms[:, 0] / median


def calibrate(
    model: CapturingModel,
    fitting: Sequence[Text],
    judging: Sequence[Text],
    skip_ratio: float,
    progress: Callable[[float], None],
    score: GroupScore,
    dense_layers: int,
    about: Mapping[str, Any],
) -> Outcome:
    """Fit thresholds to some texts and judge them on others.

    Args:
        model: runs the texts.
        fitting: texts to fit to, of two or more lengths.
        judging: other texts, grouped by length and task.
        skip_ratio: share of the groups of routed layers to skip.
        progress: called with the tokens of each finished text.
        score: combines the cosines of a group's heads.
        dense_layers: number of first layers that are never routed.
        about: fields of `Routing` with the origin of the thresholds.

    Raises:
        ConfigurationError: no layer is left to route.
    """
    found: dict[int, list[torch.Tensor]] = {}
    for text in fitting:
        cache = model.prefill(text.document)
        for continuation in text.rest:
            layers = routed_layers(model.decode(cache, continuation), dense_layers)
            found.setdefault(text.length, []).append(Observed.of(list(layers.values()), score).scores)
        progress(text.length)
    lengths = sorted(found)
    thresholds = {length: threshold_for(torch.cat(found[length], dim=1), skip_ratio) for length in lengths}
    routing = Routing(
        score=score, cubic=fit(lengths, list(thresholds.values())), shortest=lengths[0], longest=lengths[-1],
        dense_layers=dense_layers, **about,
    )  # fmt: skip
    judged = []
    for (length, task), texts in groupby(judging, lambda text: (text.length, text.task)):
        judged.append(_Judged(length, task))
        for text in texts:
            _judge_text(judged[-1], model, text, routing)
            progress(length)
    return _outcome(judged, routing, skip_ratio, thresholds, count_continuations(fitting))


def _accuracy(rows: Sequence[Mapping[str, Any]]) -> Accuracy:
    """Return the shares of tokens that are right over all texts of some rows."""
    keys = "dense_tokens_right", "routed_tokens_right"
    return Accuracy(*(sum(row[key] for row in rows) / sum(row["tokens"] for row in rows) for key in keys))


def _outcome(
    judged: Sequence[_Judged], routing: Routing, skip_ratio: float, thresholds: dict[int, float], fitted: int
) -> Outcome:
    """Summarise the judged texts.

    Args:
        judged: the texts by length and task.
        routing: that was judged.
        skip_ratio: share of skipped groups that was asked for.
        thresholds: that were found, by length.
        fitted: number of continuations that they are fitted to.
    """
    rows = [part.row() for part in judged]
    observed = Observed.join([each for part in judged for each in part.observed])
    skipped = torch.cat([each for part in judged for each in part.skipped], dim=1)
    first_values = torch.stack([norms for part in judged for norms in part.first_values])
    sinks = (observed.mass >= SINK_MASS).float()
    layers = [
        {
            "layer": layer,
            "skipped": float(skipped[row].float().mean()),
            "mass": float(observed.mass[row].mean()),
            "sink_groups": float(sinks[row].mean()),
            "first_value": float(first_values[:, row].mean()),
            "first_value_largest": float(first_values[:, row].max()),
        }
        for row, layer in enumerate(judged[0].layers)
    ]
    detection = detect(observed, skipped)
    kinds = {"context_tokens": "in contexts of {} tokens", "task": "for {}"}
    parts = {
        words.format(value): _accuracy([row for row in rows if row[key] == value])
        for key, words in kinds.items() for value in dict.fromkeys(row[key] for row in rows)
    }  # fmt: skip
    prevalence = float(sinks.mean())
    verdict = judge(prevalence, detection, skip_ratio, _accuracy(rows), parts, fitted, len(thresholds))
    return Outcome(
        routing=routing.model_copy(update={"recommended": verdict.route}),
        thresholds=thresholds,
        rows=rows,
        layers=layers,
        detection=detection,
        auprc=average_precision(observed),
        sink_groups=prevalence,
        verdict=verdict,
    )
