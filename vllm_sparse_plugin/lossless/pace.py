"""How long drafts should be: from what the latest ones were worth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

_DECAY = 0.97
"""What a request's drafts weigh after one more: about the last thirty count."""
_NEW = 0.3
"""Weight of a new time in a running mean of times."""
_OUTLIER = 3.0
"""A step that takes so many times what was expected was held up by something else, and counts as so many."""
_FIRST_LOOKS = 8
"""Steps at the start that go without drafts and with the longest by turns."""
_LOOK_SHARE = 0.01
"""Most of the time that may be lost by looking at other lengths."""
_LOOK_EVERY = 16
"""Steps between two looks at least."""
_TRUST = 0.9
"""Acceptance before anything is known, at the weight of one draft."""


class DraftPace:
    """Chooses the number k of drafts with which tokens come fastest.

    If a draft is accepted with probability a where those before it were, a step with k drafts makes
    E(k) = 1 + a + a^2 + ... + a^k tokens of a request. It takes t(k) seconds, which grow by as much for each draft and
    its verification. E(k) / t(k) is to be largest. The acceptance is a running mean, and so are t(0) and t(K) of the
    longest drafts, which a step now and then is spent on.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        """Takes the lengths to choose from, in order: from 0 to K, that of the longest drafts."""
        self.lengths = lengths
        self.most = lengths[-1]
        self._steps = 0
        self._next_look = _FIRST_LOOKS
        self._owed = 0.0
        self._looked_at = self.most
        self._tried, self._accepted = 1.0, _TRUST
        self._ends: dict[int, float] = {}

    def observe_step(self, drafts: int, seconds: float) -> None:
        """Takes how long a step took in which every request had so many drafts."""
        self._owed += _LOOK_SHARE * seconds
        if drafts in (0, self.most):
            before = self._ends.get(drafts, seconds)
            self._ends[drafts] = before + _NEW * (min(seconds, _OUTLIER * before) - before)

    def observe_drafts(self, drafts: int, accepted: int) -> None:
        """Takes how many of the drafts of a request were accepted."""
        # Behind the first that is wrong nothing was tried.
        self._tried = _DECAY * self._tried + min(drafts, accepted + 1)
        self._accepted = _DECAY * self._accepted + accepted

    def choose(self) -> int:
        """Returns how many tokens to draft in the next step."""
        self._steps += 1
        if self._steps <= _FIRST_LOOKS or len(self._ends) < 2:
            return self.most * (self._steps % 2)
        best = self.best()
        look = self.most - self._looked_at if best not in (0, self.most) else self.most - best
        tokens = self._tokens()
        lost = self._seconds(look) - self._seconds(best) * tokens[look] / tokens[best]
        if self._steps < self._next_look or self._owed < lost:
            return best
        self._owed, self._next_look, self._looked_at = 0.0, self._steps + _LOOK_EVERY, look
        return look

    def best(self) -> int:
        """Returns the length with which tokens come fastest; the longest as long as times are not known."""
        if len(self._ends) < 2:
            return self.most
        tokens = self._tokens()
        return max(self.lengths, key=lambda drafts: tokens[drafts] / self._seconds(drafts))

    def gain(self) -> float:
        """Returns how many times faster tokens come than without drafts, as far as is known; 1 if nothing is."""
        if len(self._ends) < 2:
            return 1.0
        best = self.best()
        return self._tokens()[best] * self._seconds(0) / self._seconds(best)

    def _tokens(self) -> list[float]:
        """Returns E(k) for each k."""
        acceptance = self._accepted / self._tried
        return list(accumulate(acceptance**drafts for drafts in range(self.most + 1)))

    def _seconds(self, drafts: int) -> float:
        """Returns t(k)."""
        shortest, longest = self._ends[0], max(self._ends[0], self._ends[self.most])
        return shortest + (longest - shortest) * drafts / self.most


def lengths_of(most: int, max_requests: int) -> list[int]:
    """Returns the lengths to choose from where each has CUDA graphs of its own: none, the longest, and powers of two.

    Args:
        most: the longest.
        max_requests: requests that run at once; vLLM takes no more lengths.
    """
    others = [2**power for power in range(most.bit_length() - 1, 0, -1) if 2**power < most]
    return sorted([most, 0, *others][:max_requests])
