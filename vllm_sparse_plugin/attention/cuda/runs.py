"""Groups the decoding requests of a step by their numbers of query tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple


class DecodeRun(NamedTuple):
    """Consecutive decoding requests with the same number of query tokens."""

    first_request: int
    num_requests: int
    first_token: int
    num_tokens: int

    def parts(self, most_tokens: int) -> Iterator[DecodeRun]:
        """Yields the run in parts of whole requests that have at most so many tokens."""
        if self.num_tokens <= most_tokens:
            yield self
            return
        per_request = self.num_tokens // self.num_requests
        at_once = max(1, most_tokens // per_request)
        for first in range(0, self.num_requests, at_once):
            count = min(at_once, self.num_requests - first)
            yield DecodeRun(
                self.first_request + first, count, self.first_token + first * per_request, count * per_request
            )


def decode_runs(query_lens: Sequence[int], longest: int) -> list[DecodeRun]:
    """Returns the leading requests with at most `longest` query tokens each, grouped by equal numbers."""
    runs: list[DecodeRun] = []
    request = token = 0
    for length, group in groupby(query_lens):
        if not 0 < length <= longest:
            break
        count = len(list(group))
        runs.append(DecodeRun(request, count, token, count * length))
        request, token = request + count, token + count * length
    return runs
