"""Chooses the length of drafts from the acceptance and the times of recent steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

_DECAY = 0.97
"""Factor on the weight of earlier drafts at each new draft of a request: about the last 30 count."""
_NEW = 0.3
"""Weight of a new time in a running mean of times."""
_OUTLIER = 3.0
"""A step that takes more than this many times the expected time is an outlier, and counts as this many times."""
_FIRST_LOOKS = 6
"""Looks at the start of each load. A look is a timed step without drafts or with the longest drafts, in turns."""
_LOOK_SHARE = 0.01
"""The largest share of time that looks may cost."""
_LOOK_EVERY = 16
"""The fewest steps between two looks."""
_TRUST = 0.9
"""The initial acceptance, with the weight of one draft."""


class Load(NamedTuple):
    """The work of a step in powers of two. Steps of one load take about the same time."""

    requests: int
    """Bits of the number of requests."""
    tokens: int
    """Bits of the number of tokens in all contexts."""

    @classmethod
    def of(cls, contexts: Iterable[int]) -> Load:
        """Returns the load of requests with these context lengths."""
        lengths = list(contexts)
        return cls(len(lengths).bit_length(), sum(lengths).bit_length())

    def is_near(self, other: Load) -> bool:
        """Returns whether each number differs by at most one bit."""
        return abs(self.requests - other.requests) <= 1 and abs(self.tokens - other.tokens) <= 1


@dataclass
class _Times:
    """The times of the steps of one load."""

    looked_at: int
    """The draft length of the last look: 0 or the longest."""
    choices: int = 0
    looks: int = 0
    """Timed steps without drafts or with the longest drafts."""
    next_look: int = _FIRST_LOOKS
    ends: dict[int, float] = field(default_factory=dict)
    """Seconds of a step without drafts, and of a step with the longest drafts, by draft length."""
    is_guess: bool = False
    """Whether `ends` is copied from another load."""

    def observe(self, drafts: int, seconds: float, most: int) -> None:
        if self.is_guess and len(self.ends) == 2:
            # The first step of this load scales the copied times of both ends, because the next look may be far away.
            # Times of near loads differ by less than an outlier, so the ratio has that limit.
            ratio = min(max(seconds / self.seconds(drafts, most), 1 / _OUTLIER), _OUTLIER)
            self.ends = {length: ratio * before for length, before in self.ends.items()}
        self.is_guess = False
        if drafts not in (0, most):
            return
        self.looks += 1
        before = self.ends.get(drafts, seconds)
        if self.looks <= _FIRST_LOOKS:
            # The usual time is not known yet. Most outliers are slow, so the minimum counts.
            self.ends[drafts] = min(before, seconds)
        else:
            self.ends[drafts] = before + _NEW * (min(seconds, _OUTLIER * before) - before)

    def seconds(self, drafts: int, most: int) -> float:
        """Returns t(k)."""
        shortest, longest = self.ends[0], max(self.ends[0], self.ends[most])
        return shortest + (longest - shortest) * drafts / most


class DraftPace:
    """Chooses the number k of drafts with the most tokens per second.

    Let a be the probability that a draft is accepted if all drafts before it are. A step with k drafts then makes E(k)
    = 1 + a + a^2 + ... + a^k tokens of a request. It takes t(k) seconds, and t is linear in k. The chosen k maximises
    E(k) / t(k).

    a, t(0) and t(K) of the longest drafts are running means. Now and then a step measures t(0) or t(K). Times are
    stored per load, because a step's time depends on the number of requests and on their contexts.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        """Takes the allowed lengths in ascending order, from 0 to K."""
        self.lengths = lengths
        self.most = lengths[-1]
        self._owed = 0.0
        self._tried, self._accepted = 1.0, _TRUST
        self._times: dict[Load, _Times] = {}

    def observe_step(self, drafts: int, seconds: float, load: Load) -> None:
        """Records the seconds of a step in which every request had `drafts` drafts."""
        self._owed += _LOOK_SHARE * seconds
        self._at(load).observe(drafts, seconds, self.most)

    def observe_drafts(self, drafts: int, accepted: int) -> None:
        """Records how many of a request's drafts were accepted."""
        # Drafts after the first rejected draft were not tried.
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
        """Returns the length with the most tokens per second; the longest length while times are not known."""
        times, tokens = self._at(load), self._tokens()
        if len(times.ends) < 2:
            return self.most
        return max(self.lengths, key=lambda drafts: tokens[drafts] / times.seconds(drafts, self.most))

    def gain(self, load: Load) -> float:
        """Returns the speed-up in tokens per second over a step without drafts; 1 while times are not known."""
        times = self._at(load)
        if len(times.ends) < 2:
            return 1.0
        best = self.best(load)
        return self._tokens()[best] * times.seconds(0, self.most) / times.seconds(best, self.most)

    def _at(self, load: Load) -> _Times:
        """Returns the times of a load. A load without times gets a copy from a near load."""
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
