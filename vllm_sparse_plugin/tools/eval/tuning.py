"""Measurements of `vllm-sparse tune` on given prompts, and the choice of settings."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.table import Column, Table

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.eval.noise import MEASURES, Beside, beside
from vllm_sparse_plugin.tools.eval.results import SHARES, ResultFile
from vllm_sparse_plugin.tools.eval.statistics import Estimate, estimate_excess

_MOST_PROMPTS = 10_000


class Objective(NamedTuple):
    """A quantity to minimise."""

    heading: str
    share: str
    """The quantity as a share of dense attention's, one of `SHARES`."""
    keys: str
    """The share of keys. A candidate saves something only if it is below 1."""


OBJECTIVES: Mapping[str, Objective] = {
    "bytes": Objective("bytes read per token", "kv_read_share", "key_read_share"),
    "memory": Objective("memory of the KV cache", "memory_share", "key_kept_share"),
}
"""By name."""


@dataclass(frozen=True)
class Candidate:
    """Loss and cost of some settings."""

    name: str
    measure: str
    """Measure that chooses candidates, one of `noise.SHARES`."""
    kept: Mapping[str, Beside]
    """By each of `noise.MEASURES`, over all prompts."""
    choosing: Estimate
    """Loss beyond the noise of dense attention, by `measure`, over the prompts that choose."""
    judging: Estimate
    """The same over the other prompts."""
    shares: Mapping[str, float]
    """Means over prompts of each of `SHARES`, relative to dense attention."""


def judge(name: str, measure: str, dense: ResultFile, again: ResultFile, sparse: ResultFile) -> Candidate:
    """Compare settings with dense attention on the same prompts.

    Args:
        name: of the settings.
        measure: one of `noise.SHARES`.
        dense: results of dense attention.
        again: results of dense attention in other batches, of the same prompts.
        sparse: results of the settings, of the same prompts.

    Raises:
        ConfigurationError: the prompts, the model or the versions changed between two of the runs.
    """
    _expect_same(dense, again)
    _expect_same(dense, sparse)
    reference, results, repeated = ([file.results[item] for item in dense.results] for file in (dense, sparse, again))

    def half(first: int) -> Estimate:
        excess = beside(measure, reference[first::2], results[first::2], repeated[first::2]).excess
        assert excess is not None
        return excess

    shares = {}
    for field in SHARES:
        of_prompts = [getattr(result, field) for result in results]
        shares[field] = sum(1.0 if share is None else share for share in of_prompts) / len(of_prompts)
    return Candidate(
        name=name,
        measure=measure,
        kept={each: beside(each, reference, results, repeated) for each in MEASURES},
        choosing=half(0),
        judging=half(1) if len(reference) > 1 else Estimate(math.nan, -math.inf, math.inf, 0),
        shares=shares,
    )


def _expect_same(dense: ResultFile, other: ResultFile) -> None:
    def about(file: ResultFile) -> dict[str, Any]:
        return {
            "prompts": {item: result.digest for item, result in file.results.items()},
            "model": (file.settings.get("contents") or {}).get("model"),
            "versions": file.settings.get("versions"),
        }

    ours, theirs = about(dense), about(other)
    if changed := [name for name in ours if ours[name] != theirs[name]]:
        raise ConfigurationError(
            f"output: got {str(dense.path)!r} and {str(other.path)!r} of other {' and '.join(changed)}, allowed: a new "
            "folder, and inputs that do not change during a run"
        )


def choose(candidates: Sequence[Candidate], most_excess: float, objective: str) -> Candidate | None:
    """Return the candidate with the least `objective` among those whose prompts that choose show an excess of at most
    `most_excess`: the whole interval. The other prompts must confirm it.

    None if only candidates that leave nothing out remain.
    """
    _, share, keys = OBJECTIVES[objective]
    enough = [each for each in candidates if each.choosing.high <= most_excess and each.shares[keys] < 1]
    return min(enough, key=lambda each: (each.shares[share], each.choosing.value), default=None)


def needed_prompts(most_excess: float, scored_tokens: int) -> int:
    """Return the least number of prompts with which settings that change nothing are shown to lose at most
    `most_excess`; at most `_MOST_PROMPTS`."""

    def shows(count: int) -> bool:
        return estimate_excess([1.0] * (count // 2), [1.0] * (count // 2), scored_tokens).high <= most_excess

    return 4 + bisect_left(range(4, _MOST_PROMPTS), True, key=shows)


def frontier_table(candidates: Sequence[Candidate], chosen: Candidate | None, objective: str) -> Table:
    """Return a row per candidate, the least `objective` first."""
    (heading, minimised, _), measure = OBJECTIVES[objective], candidates[0].measure
    of_dense = {name: found.own for name, found in candidates[0].kept.items() if found.own is not None}
    table = Table(
        Column("settings", no_wrap=True),
        title=f"Least {heading} first. Excess: {measure} lost beyond the noise of dense attention.\n"
        f"Dense attention keeps {_interval(of_dense[measure])} of itself in other batches. 95 % intervals.",
    )  # fmt: skip
    amount = "bytes read" if objective == "bytes" else "memory"
    headings = measure, "excess", "half that chooses", "half that judges", "KL", "keys read", "keys kept", amount, ""
    for name in headings:
        table.add_column(name, justify="right")
    for candidate in sorted(candidates, key=lambda each: each.shares[minimised]):
        found = candidate.kept[measure]
        table.add_row(
            candidate.name, _interval(found.found), _percent(found.excess), _percent(candidate.choosing),
            _percent(candidate.judging), f"{candidate.kept['kl'].found.value:.4f}",
            *(f"{candidate.shares[share]:.1%}" for share in ("key_read_share", "key_kept_share", minimised)),
            "chosen" if candidate is chosen else "",
        )  # fmt: skip
    table.add_section()
    table.add_row(
        "dense, other batches", _interval(of_dense[measure]), "0", "0", "0", f"{of_dense['kl'].value:.4f}",
        *["100.0%"] * 3, "",
    )  # fmt: skip
    return table


def _interval(found: Estimate) -> str:
    return f"{found.value:.3f}" + (f" [{found.low:.3f}, {found.high:.3f}]" if found.count > 1 else "")


def _percent(found: Estimate | None) -> str:
    assert found is not None
    interval = f" [{100 * found.low:+.1f}, {100 * found.high:+.1f}]" if found.count > 1 else ""
    return f"{100 * found.value:+.1f}%{interval}"
