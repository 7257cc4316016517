"""Tokens decoded with log probabilities, and the first difference between two engines."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LOGPROB_TOLERANCE = 0.1
"""Largest change of a log probability by another order of summation. Outputs of attention are rounded to bfloat16 in
every layer, and later layers amplify the error."""


@dataclass(frozen=True)
class Continuation:
    """The tokens decoded after a prompt."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    """Log probabilities of each step's likeliest tokens."""

    def first_difference(self, other: Sequence[int]) -> tuple[int, float] | None:
        """Returns the first position where other tokens differ, and by how much this token is likelier there.

        The difference is infinite if the other tokens end earlier. None if both are equal.
        """
        for step, (mine, theirs) in enumerate(zip(self.tokens, other, strict=False)):
            if mine != theirs:
                return step, self.logprobs[step][mine] - self.logprobs[step].get(theirs, -math.inf)
        return None if len(other) == len(self.tokens) else (min(len(other), len(self.tokens)), math.inf)


def continuation(request: Any) -> Continuation:
    """Converts vLLM's output of a request with log probabilities."""
    completion = request.outputs[0]
    logprobs = [{token: entry.logprob for token, entry in step.items()} for step in completion.logprobs]
    return Continuation(list(completion.token_ids), logprobs)


def gap_at_first_difference(expected: Continuation, found: Continuation) -> float | None:
    """How much likelier the first engine finds its own token at the first difference; None without a difference."""
    parted = expected.first_difference(found.tokens)
    return None if parted is None else parted[1]


def logprob_error(dense: Continuation, other: Continuation) -> float:
    """The largest difference of a token's log probability up to the first different token.

    At this token, the difference is how much likelier dense attention finds its own token. It is small if two tokens
    were about equally likely.
    """
    parted = dense.first_difference(other.tokens)
    same = len(dense.tokens) if parted is None else parted[0]
    steps = zip(dense.tokens[:same], dense.logprobs, other.logprobs, strict=False)
    errors = [abs(before[token] - after[token]) for token, before, after in steps]
    return max([0.0, *errors, *([] if parted is None else [parted[1]])])
