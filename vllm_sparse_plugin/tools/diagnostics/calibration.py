"""Finds thresholds of SinkRouter for one model: what its groups score, the cubic through the thresholds, and how well
that finds the groups that attend to the first token."""

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

SWEEP = (0.1, 0.2, 0.4, 0.6, 0.8)
"""Skip ratios at which precision, recall and answers are reported, besides the one that was asked for."""


class Text(NamedTuple):
    """A document, and what may follow it."""

    task: str
    length: int
    """Tokens of the context, as they were asked for."""
    document: list[int]
    """Ids of the beginning, which is prefilled densely."""
    rest: list[list[int]]
    """Ids of what may follow, each of which is decoded after the same beginning."""
    asked: list[int]
    """For each of these, how many of its newest tokens are to be predicted."""


@dataclass(frozen=True)
class Observed:
    """Groups of decoding tokens: how they score, and where their attention goes."""

    scores: torch.Tensor
    """`[layers, num_queries, num_kv_heads]` float32."""
    mass: torch.Tensor
    """The same shape: attention weight on token 0, the mean over the group's heads."""

    @classmethod
    def of(cls, layers: Sequence[LayerInputs], score: GroupScore) -> Observed:
        """Observes what the layers of full attention saw of one text."""
        scores = [group_scores(layer.query.float(), layer.keys[:, 0].float(), score) for layer in layers]
        mass = [layer.weights()[..., 0].mean(dim=-1) for layer in layers]
        return cls(torch.stack(scores).cpu(), torch.stack(mass).cpu())

    @classmethod
    def join(cls, parts: Sequence[Observed]) -> Observed:
        """Joins what was observed of several texts."""
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
    """Returns the largest score from which at least `skip_ratio` of the groups are skipped."""
    ranked = scores.flatten().sort(descending=True).values
    return float(ranked[max(0, math.ceil(skip_ratio * len(ranked)) - 1)])


def fit(lengths: Sequence[int], thresholds: Sequence[float]) -> tuple[float, float, float, float]:
    """Fits a cubic to thresholds by length: by least squares, and of a lower degree where there are fewer than four.

    Args:
        lengths: contexts in tokens, ascending, two or more; the first and the last are the range of the fit.
        thresholds: one for each.

    Returns:
        c0 to c3, as `GroupRouting` takes them.
    """
    log = torch.tensor(lengths, dtype=torch.float64).log()
    x = (log - log[0]) / (log[-1] - log[0])
    powers = x[:, None] ** torch.arange(min(4, len(lengths)))
    solution = torch.linalg.lstsq(powers, torch.tensor(thresholds, dtype=torch.float64)[:, None]).solution
    c0, c1, c2, c3 = (round(c, 6) for c in [*solution[:, 0].tolist(), 0.0, 0.0][:4])
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
    """Returns the area under precision over recall of the score as a sign of a sink group; NaN without sink groups.

    This is the step-wise form: the sum over the distinct thresholds of precision times what recall rises by.
    """
    scores, order = observed.scores.flatten().sort(descending=True, stable=True)
    sinks = (observed.mass.flatten()[order] >= SINK_MASS).double()
    if not sinks.any():
        return math.nan
    # Groups of one score are found together.
    last = torch.cat([scores[1:] != scores[:-1], torch.ones(1, dtype=torch.bool)])
    sinks_found = sinks.cumsum(dim=0)[last]
    precision = sinks_found / (torch.arange(len(scores), dtype=torch.float64)[last] + 1)
    rise = torch.diff(sinks_found, prepend=torch.zeros(1, dtype=torch.float64)) / sinks.sum()
    return float((precision * rise).sum())


def skipped_by(routing: Routing, layer: int, inputs: LayerInputs) -> torch.Tensor:
    """Decides which groups of a layer a routing skips: `[num_queries, num_kv_heads]` bool."""
    heads = inputs.keys.shape[0]
    if layer < routing.dense_layers:
        return torch.zeros(len(inputs.query), heads, dtype=torch.bool, device=inputs.query.device)
    scores = group_scores(inputs.query.float(), inputs.keys[:, 0].float(), routing.score)
    layer_routing = routing.of_layer(layer, range(heads), inputs.query.device)
    return scores >= layer_routing.thresholds(inputs.context_lens)


class Verdict(NamedTuple):
    """Whether to route, and why."""

    route: bool
    reason: str


def judge(prevalence: float, detection: Detection, target: float, dense: float, routed: float) -> Verdict:
    """Judges whether routing is worth its price, by what was measured.

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
        """Compares predictions with the newest `asked` tokens of what was decoded."""
        right = [a == b for a, b in zip(rest[-asked:], predictions[-asked - 1 : -1], strict=True)]
        self.tokens += right
        self.answers.append(all(right))


@dataclass
class _Judged:
    """Texts of one length and task: what their groups do, and what is right of their answers."""

    length: int
    task: str
    layers: list[int] = field(default_factory=list)
    """Indices of the layers that may be routed."""
    observed: list[Observed] = field(default_factory=list)
    first_values: list[torch.Tensor] = field(default_factory=list)
    """`[layers, num_kv_heads]` of each text."""
    dense: _Right = field(default_factory=_Right)
    routed: dict[float, _Right] = field(default_factory=dict)
    """Answers when routed, by skip ratio."""
    skipped: dict[float, list[torch.Tensor]] = field(default_factory=dict)
    """Skipped groups by skip ratio: bool, of the shape of a text's scores."""

    def row(self, skip_ratio: float) -> dict[str, Any]:
        """Returns what the report says of these texts at one skip ratio."""
        observed, skipped = Observed.join(self.observed), torch.cat(self.skipped[skip_ratio], dim=1)
        return {
            "context_tokens": self.length,
            "task": self.task,
            "skipped": float(skipped.float().mean()),
            "sink_groups": float((observed.mass >= SINK_MASS).float().mean()),
            "tokens": len(self.dense.tokens),
            "dense_tokens_right": sum(self.dense.tokens),
            "routed_tokens_right": sum(self.routed[skip_ratio].tokens),
            "answers": len(self.dense.answers),
            "dense_answers_right": sum(self.dense.answers),
            "routed_answers_right": sum(self.routed[skip_ratio].answers),
        }


@dataclass(frozen=True)
class Outcome:
    """What calibration found."""

    routing: Routing
    thresholds: dict[int, float]
    """Thresholds that skip the share that was asked for, by length."""
    rows: list[dict[str, Any]]
    """What was measured, by length and task."""
    layers: list[dict[str, Any]]
    """What was measured, by routed layer. `first_value` is the norm of token 0's value over the median norm of the
    others, the mean over KV heads and texts, and `first_value_largest` the largest of them: a skipped group's zero
    stands for that value, so it should be far below 1."""
    detection: Detection
    """How the fitted thresholds find sink groups."""
    sweep: list[dict[str, Any]]
    """What thresholds fitted to a skip ratio skip, and what is right of the answers, by skip ratio."""
    auprc: float
    sink_groups: float
    """Share of the groups that are sink groups."""
    verdict: Verdict


class _Calibration:
    """A model whose groups are observed, and the layers and the score by which they are routed."""

    def __init__(self, model: CapturingModel, score: GroupScore, dense_layers: int) -> None:
        self.model, self.score, self.dense_layers = model, score, dense_layers

    def routed_layers(self, decoded: Decoded) -> dict[int, LayerInputs]:
        """Returns the layers that may be routed, by their index.

        Raises:
            ConfigurationError: if there is none.
        """
        routed = {i: layer for i, layer in enumerate(decoded.layers) if layer is not None and i >= self.dense_layers}
        if not routed:
            raise ConfigurationError("model: got no layer of full attention to route, allowed: models with one")
        return routed

    def scores(self, texts: Sequence[Text], progress: Callable[[int], None]) -> dict[int, torch.Tensor]:
        """Returns the scores of all groups of some texts, by length."""
        scores: dict[int, list[torch.Tensor]] = {}
        for text in texts:
            cache = self.model.prefill(text.document)
            for continuation in text.rest:
                layers = self.routed_layers(self.model.decode(cache, continuation))
                scores.setdefault(text.length, []).append(Observed.of(list(layers.values()), self.score).scores)
            progress(text.length)
        return {length: torch.cat(scores[length], dim=1) for length in sorted(scores)}

    def judge(self, judged: _Judged, text: Text, routings: Mapping[float, Routing]) -> None:
        """Adds what one text shows: decoded densely, and routed at each skip ratio."""
        cache = self.model.prefill(text.document)
        for continuation, asked in zip(text.rest, text.asked, strict=True):
            decoded = self.model.decode(cache, continuation)
            layers = self.routed_layers(decoded)
            judged.layers = list(layers)
            judged.observed.append(Observed.of(list(layers.values()), self.score))
            judged.first_values.append(torch.stack([first_value(inputs) for inputs in layers.values()]).cpu())
            judged.dense.add(continuation, asked, decoded.predictions)
            for ratio, routing in routings.items():
                skipped = torch.stack([skipped_by(routing, *layer).cpu() for layer in layers.items()])
                judged.skipped.setdefault(ratio, []).append(skipped)
                routed = self.model.decode(cache, continuation, partial(skipped_by, routing))
                judged.routed.setdefault(ratio, _Right()).add(continuation, asked, routed.predictions)


def first_value(inputs: LayerInputs) -> torch.Tensor:
    """Returns the norm of token 0's value over the median norm of the other values: `[num_kv_heads]` float32."""
    norms: torch.Tensor = inputs.values.float().norm(dim=-1)
    median = norms[:, 1:].median(dim=-1).values
    return norms[:, 0] / median


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
    calibration = _Calibration(model, score, dense_layers)
    scores = calibration.scores(fitting, progress)
    routings, thresholds = {}, {}
    for ratio in sorted({*SWEEP, skip_ratio}):
        thresholds[ratio] = {length: threshold_for(of_length, ratio) for length, of_length in scores.items()}
        lengths = list(scores)
        routings[ratio] = Routing(
            score=score, cubic=fit(lengths, list(thresholds[ratio].values())), shortest=lengths[0],
            longest=lengths[-1], dense_layers=dense_layers, **about,
        )  # fmt: skip
    judged = []
    for (length, task), texts in groupby(judging, lambda text: (text.length, text.task)):
        judged.append(_Judged(length, task))
        for text in texts:
            calibration.judge(judged[-1], text, routings)
            progress(length)
    return _outcome(judged, routings, skip_ratio, thresholds[skip_ratio])


def _outcome(
    judged: Sequence[_Judged], routings: Mapping[float, Routing], skip_ratio: float, thresholds: dict[int, float]
) -> Outcome:
    """Sums up the judged texts.

    Args:
        judged: the texts by length and task.
        routings: by skip ratio.
        skip_ratio: the one that was asked for.
        thresholds: found for it, by length.
    """
    rows = [part.row(skip_ratio) for part in judged]
    observed = Observed.join([text for part in judged for text in part.observed])
    skipped = {ratio: torch.cat([text for part in judged for text in part.skipped[ratio]], dim=1) for ratio in routings}
    first_values = torch.stack([norms for part in judged for norms in part.first_values])
    sinks = (observed.mass >= SINK_MASS).float()
    layers = [
        {
            "layer": layer,
            "skipped": float(skipped[skip_ratio][row].float().mean()),
            "mass": float(observed.mass[row].mean()),
            "sink_groups": float(sinks[row].mean()),
            "first_value": float(first_values[:, row].mean()),
            "first_value_largest": float(first_values[:, row].max()),
        }
        for row, layer in enumerate(judged[0].layers)
    ]
    detections = {ratio: detect(observed, skipped[ratio]) for ratio in routings}
    tokens = sum(row["tokens"] for row in rows)
    sweep = [
        {
            "skip_ratio": ratio,
            **detections[ratio]._asdict(),
            "tokens": tokens,
            "tokens_right": sum(sum(part.routed[ratio].tokens) for part in judged),
            "answers": sum(row["answers"] for row in rows),
            "answers_right": sum(sum(part.routed[ratio].answers) for part in judged),
        }
        for ratio in routings
    ]
    dense, routed = (sum(row[key] for row in rows) / tokens for key in ("dense_tokens_right", "routed_tokens_right"))
    prevalence = float(sinks.mean())
    verdict = judge(prevalence, detections[skip_ratio], skip_ratio, dense, routed)
    return Outcome(
        routings[skip_ratio].model_copy(update={"recommended": verdict.route}),
        thresholds,
        rows,
        layers,
        detections[skip_ratio],
        sweep,
        average_precision(observed),
        prevalence,
        verdict,
    )
