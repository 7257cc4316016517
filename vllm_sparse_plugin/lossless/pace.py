"""How long drafts should be: from what the latest ones were worth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

_DECAY = 0.97
"""What a request's drafts weigh after one more: about the last thirty count."""
_NEW = 0.3
"""Weight of a new time in a running mean of times."""
_OUTLIER = 3.0
"""A step that takes so many times what was expected was held up by something else, and counts as so many."""
_FIRST_LOOKS = 6
"""Steps that are timed at the start of each load, without drafts and with the longest by turns."""
_LOOK_SHARE = 0.01
"""Most of the time that may be lost by looking at other lengths."""
_LOOK_EVERY = 16
"""Steps between two looks at least."""
_TRUST = 0.9
"""Acceptance before anything is known, at the weight of one draft."""


class Load(NamedTuple):
    """How much a step has to do, in powers of two: steps of one load take about as long."""

    requests: int
    """Bits of the number of requests."""
    tokens: int
    """Bits of the number of tokens in all of their contexts."""

    @classmethod
    def of(cls, contexts: Iterable[int]) -> Load:
        """Returns the load of requests with so many tokens each."""
        lengths = list(contexts)
        return cls(len(lengths).bit_length(), sum(lengths).bit_length())

    def is_near(self, other: Load) -> bool:
        """Returns whether neither number is more than twice or half the other's."""
        return abs(self.requests - other.requests) <= 1 and abs(self.tokens - other.tokens) <= 1


@dataclass
class _Times:
    """What is known of the steps of one load."""

    looked_at: int
    """The end that was looked at last."""
    choices: int = 0
    looks: int = 0
    """Steps without drafts or with the longest that were timed."""
    next_look: int = _FIRST_LOOKS
    ends: dict[int, float] = field(default_factory=dict)
    """Seconds of a step without drafts, and of one with the longest."""
    is_guess: bool = False
    """Whether they are those of another load."""

    def observe(self, drafts: int, seconds: float, most: int) -> None:
        if self.is_guess and len(self.ends) == 2:
            # All steps of this load are taken to be slower or faster by as much as its first one.
            # Loads that are near differ by no more than an outlier does, and the other end may not be seen for long.
            ratio = min(max(seconds / self.seconds(drafts, most), 1 / _OUTLIER), _OUTLIER)
            self.ends = {length: ratio * before for length, before in self.ends.items()}
        self.is_guess = False
        if drafts not in (0, most):
            return
        self.looks += 1
        before = self.ends.get(drafts, seconds)
        if self.looks <= _FIRST_LOOKS:
            # Nothing tells yet what is usual, and steps are held up more often than they hurry.
            self.ends[drafts] = min(before, seconds)
        else:
            self.ends[drafts] = before + _NEW * (min(seconds, _OUTLIER * before) - before)

    def seconds(self, drafts: int, most: int) -> float:
        """Returns t(k)."""
        shortest, longest = self.ends[0], max(self.ends[0], self.ends[most])
        return shortest + (longest - shortest) * drafts / most


class DraftPace:
    """Chooses the number k of drafts with which tokens come fastest.

    If a draft is accepted with probability a where those before it were, a step with k drafts makes
    E(k) = 1 + a + a^2 + ... + a^k tokens of a request. It takes t(k) seconds, which grow by as much for each draft and
    its verification. E(k) / t(k) is to be largest. The acceptance is a running mean, and so are t(0) and t(K) of the
    longest drafts, which a step now and then is spent on. A step's time depends on how many requests there are, and on
    their contexts, so times are kept apart by load.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        """Takes the lengths to choose from, in order: from 0 to K, that of the longest drafts."""
        self.lengths = lengths
        self.most = lengths[-1]
        self._owed = 0.0
        self._tried, self._accepted = 1.0, _TRUST
        self._times: dict[Load, _Times] = {}

    def observe_step(self, drafts: int, seconds: float, load: Load) -> None:
        """Takes how long a step took in which every request had so many drafts."""
        self._owed += _LOOK_SHARE * seconds
        self._at(load).observe(drafts, seconds, self.most)

    def observe_drafts(self, drafts: int, accepted: int) -> None:
        """Takes how many of the drafts of a request were accepted."""
        # Behind the first that is wrong nothing was tried.
        self._tried = _DECAY * self._tried + min(drafts, accepted + 1)
        self._accepted = _DECAY * self._accepted + accepted

    def choose(self, load: Load) -> int:
        """Returns how many tokens to draft in the next step."""
        times = self._at(load)
        times.choices += 1
        if times.looks < _FIRST_LOOKS or len(times.ends) < 2:
            return self.most * (times.choices % 2)
        best = self.best(load)
        look = self.most - times.looked_at if best not in (0, self.most) else self.most - best
        tokens = self._tokens()
        lost = times.seconds(look, self.most) - times.seconds(best, self.most) * tokens[look] / tokens[best]
        if times.choices < times.next_look or self._owed < lost:
            return best
        self._owed, times.next_look, times.looked_at = 0.0, times.choices + _LOOK_EVERY, look
        return look

    def best(self, load: Load) -> int:
        """Returns the length with which tokens come fastest; the longest as long as times are not known."""
        times, tokens = self._at(load), self._tokens()
        if len(times.ends) < 2:
            return self.most
        return max(self.lengths, key=lambda drafts: tokens[drafts] / times.seconds(drafts, self.most))

    def gain(self, load: Load) -> float:
        """Returns how many times faster tokens come than without drafts, as far as is known; 1 if nothing is."""
        times = self._at(load)
        if len(times.ends) < 2:
            return 1.0
        best = self.best(load)
        return self._tokens()[best] * times.seconds(0, self.most) / times.seconds(best, self.most)

    def _at(self, load: Load) -> _Times:
        """Returns the times of a load; one that has none of its own takes those of a load that is near."""
        times = self._times.get(load)
        if times is None or len(times.ends) < 2:
            near = (times for other, times in self._times.items() if other != load and load.is_near(other))
            known = max(near, key=lambda times: (len(times.ends), times.looks), default=_Times(self.most))
            if times is None or len(known.ends) == 2:
                times = self._times[load] = replace(known, ends=dict(known.ends), is_guess=True)
        return times

    def _tokens(self) -> list[float]:
        """Returns E(k) for each k."""
        acceptance = self._accepted / self._tried
        return list(accumulate(acceptance**drafts for drafts in range(self.most + 1)))
