"""The ranges of a prompt that a request protects: compaction keeps their tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from vllm_sparse_plugin.config import ResolvedConfig
from vllm_sparse_plugin.requests.arguments import PROTECT

_LONGEST = 1 << 16
"""Characters. Longer texts would hold up the API server."""
_FORM = re.compile(r"[0-9]{1,9}:[0-9]{1,9}(,[0-9]{1,9}:[0-9]{1,9})*")


def protected_ranges(arguments: Mapping[str, Any] | None, config: ResolvedConfig, num_layers: int) -> tuple[range, ...]:
    """Returns the positions that a request protects, ascending; a prompt may end before or within a range.

    Args:
        arguments: `extra_args` of the request; arguments of other plugins are ignored.
        config: the settings of the server.
        num_layers: layers of the model that compaction serves.

    Raises:
        ValueError: names the argument, the value and the allowed values.
    """
    got = arguments.get(PROTECT) if arguments else None
    if got is None:
        return ()
    compaction = config.compaction
    if compaction is None:
        raise ValueError(f"{PROTECT}: got {got!r:.80} without compaction, allowed: none")
    rule = compaction.rule()
    if rule is None:
        raise ValueError(f"{PROTECT}: got {got!r:.80} with a compaction that keeps a sliding window, allowed: none")
    if compaction.budget_tokens is None:
        # The length of the prompt is not known yet.
        raise ValueError(f"{PROTECT}: got {got!r:.80} with compaction.budget_ratio, allowed: none")
    ranges = _parse(got)
    least = min(of_layer.budget(0) for of_layer in compaction.retention().of_layers(num_layers))
    room = least - rule.sink_tokens - rule.newest_tokens(least)
    tokens = sum(len(range(max(each.start, rule.sink_tokens), each.stop)) for each in ranges)
    if tokens > room:
        raise ValueError(
            f"{PROTECT}: got {tokens} tokens, allowed: at most {room}, the budget without tokens that are kept anyway"
        )
    return ranges


def _parse(got: Any) -> tuple[range, ...]:
    if isinstance(got, str) and len(got) > _LONGEST:
        raise ValueError(f"{PROTECT}: got {len(got)} characters, allowed: at most {_LONGEST}")
    if isinstance(got, str) and _FORM.fullmatch(got):
        ranges = tuple(range(*map(int, each.split(":"))) for each in got.split(","))
        if all(ranges) and all(one.stop <= other.start for one, other in pairwise(ranges)):
            return ranges
    raise ValueError(f"{PROTECT}: got {got!r:.80}, allowed: ascending ranges of tokens such as '0:512,1800:2000'")


def ranges_of(arguments: Mapping[str, Any]) -> tuple[range, ...]:
    """Returns the ranges of `extra_args` in their normal form."""
    return tuple(range(first, end) for first, end in arguments.get(PROTECT, ()))
