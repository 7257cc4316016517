"""Scores of a completion between 0 and 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vllm_sparse_plugin.tools import needles
from vllm_sparse_plugin.tools.eval.items import Item


def string_match_all(completion: str, answers: Sequence[str]) -> float:
    """RULER: share of the answers that occur in the completion, ignoring case."""
    return sum(answer.lower() in completion.lower() for answer in answers) / len(answers)


def exact_first_line(completion: str, answers: Sequence[str]) -> float:
    """Whether the first line equals the answer, as in `vllm-sparse needles`."""
    return float(needles.first_line(completion) in answers)


METRICS: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "string_match_all": string_match_all,
    "exact_first_line": exact_first_line,
}
"""By the names in items and result files."""


def score(item: Item, completion: str) -> float:
    """Return the score of an item's completion by the item's own metric."""
    return METRICS[item.metric](completion, item.answers)
