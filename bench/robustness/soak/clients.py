"""Clients of a server. A third of the requests disconnect before the answer ends."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai import OpenAI

from bench.common.continuations import Continuation, gap_at_first_difference
from bench.common.metrics import metrics_text, read_metrics

HANGS_UP = 1 / 3
"""Share of requests that are aborted."""
_LIKELIEST = 5
_TOKENS_PER_PART = 8
"""Tokens of a part of a streamed answer. Many clients that read single tokens would slow down each other."""


@dataclass(frozen=True)
class Asker:
    """The connection to a server."""

    client: OpenAI
    model: str
    answer_tokens: int

    def ask(self, prompt: str | list[int], **more: Any) -> Continuation:
        """Returns the greedy continuation of a prompt (text or tokens); `more` are parameters of vLLM."""
        (found,) = self.ask_copies(prompt, 1, **more)
        return found

    def ask_copies(self, prompt: str | list[int], copies: int, **more: Any) -> list[Continuation]:
        """Returns several greedy continuations of a prompt, asked in one request."""
        reply: Any = self.client.completions.create(prompt=prompt, **self._arguments(copies, **more))
        return [_continuation([choice]) for choice in reply.choices]

    def ask_timed(self, prompt: str, **more: Any) -> tuple[Continuation, float]:
        """Returns the continuation that `ask` returns, streamed, and the milliseconds per token after the first part.

        A busy server can send an answer as one part. Then they count from the request.

        Raises:
            ConnectionError: the answer is not complete.
        """
        asked = time.monotonic()
        stream: Any = self.client.completions.create(
            prompt=prompt, stream=True, **self._arguments(stream_interval=_TOKENS_PER_PART, **more)
        )
        parts, times = [], []
        for part in stream:
            if part.choices and part.choices[0].logprobs is not None:
                parts.append(part)
                times.append(time.monotonic())
        found = _continuation([part.choices[0] for part in parts])
        if len(found.tokens) != self.answer_tokens:
            raise ConnectionError(f"an answer has {len(found.tokens)} of {self.answer_tokens} tokens")
        first = len(parts[0].choices[0].logprobs.tokens) if len(parts) > 1 else 0
        began = times[0] if first else asked
        return found, (times[-1] - began) / (len(found.tokens) - first) * 1000

    def hang_up(self, prompt: str | list[int], after: int, copies: int = 1, **more: Any) -> None:
        """Asks for several answers, and closes the connection after `after` parts of them."""
        stream: Any = self.client.completions.create(prompt=prompt, stream=True, **self._arguments(copies, **more))
        for _ in zip(range(after), stream, strict=False):
            pass
        stream.close()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the server by name, summed over labels."""
        return read_metrics(metrics_text(self.client))

    def _arguments(self, copies: int = 1, **more: Any) -> dict[str, Any]:
        # vLLM refuses several answers at temperature 0. The likeliest token is the only choice here too.
        greedy = {"temperature": 0} if copies == 1 else {"temperature": 1, "n": copies}
        more = more if copies == 1 else {"top_k": 1, **more}
        return {
            "model": self.model, "max_tokens": self.answer_tokens, "logprobs": _LIKELIEST, **greedy,
            "extra_body": {"ignore_eos": True, "return_tokens_as_token_ids": True, **more},
        }  # fmt: skip


def _continuation(parts: Sequence[Any]) -> Continuation:
    """Joins the parts of an answer."""
    told = [part.logprobs for part in parts]
    return Continuation(
        [_token(text) for part in told for text in part.tokens],
        [{_token(text): logprob for text, logprob in step.items()} for part in told for step in part.top_logprobs],
    )


def _token(text: str) -> int:
    return int(text.removeprefix("token_id:"))


@dataclass
class Tally:
    """The results of clients so far."""

    answers: int = 0
    hung_up: int = 0
    parted: int = 0
    """Answers that differ from those asked alone, at a tie or not."""
    largest_gap: float = 0.0
    """Largest difference of log probabilities at first differences."""
    faults: list[str] = field(default_factory=list)
    """The faults, one sentence each."""
    most: int | None = None
    """Number of requests after which clients stop; None for no limit except time."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, alone: Continuation, found: Continuation, allowed: float) -> None:
        """Counts an answer. It may differ from the answer asked alone only where two tokens are about equally
        likely."""
        gap = gap_at_first_difference(alone, found)
        with self.lock:
            self.answers += 1
            if gap is not None:
                self.parted += 1
                self.largest_gap = max(self.largest_gap, gap)
                if gap > allowed:
                    self.faults.append(f"an answer parts where the tokens' log probabilities differ by {gap:.3g}")

    @property
    def is_full(self) -> bool:
        """Whether enough requests were sent."""
        return self.most is not None and self.answers + self.hung_up >= self.most

    def as_row(self) -> dict[str, Any]:
        """Returns the columns of a row; without `largest_gap` if the server gave no log probabilities."""
        with self.lock:
            gap = round(self.largest_gap, 4) if math.isfinite(self.largest_gap) else None
            return {
                "answers": self.answers, "hung_up": self.hung_up, "parted": self.parted, "largest_gap": gap,
                "faults": list(self.faults),
            }  # fmt: skip


def run_client(
    asker: Asker,
    alone: Mapping[str, Continuation],
    allowed: float,
    end: float,
    seed: int,
    tally: Tally,
    most_copies: int = 1,
) -> None:
    """Asks one prompt after the other until `end` on `time.monotonic`, or until enough requests were sent. An exception
    counts as a fault. Each request asks for 1 to `most_copies` answers."""
    rng = random.Random(seed)
    prompts: Sequence[str] = list(alone)
    try:
        while time.monotonic() < end and not tally.is_full:
            prompt, copies = rng.choice(prompts), rng.randint(1, most_copies)
            if rng.random() < HANGS_UP:
                asker.hang_up(prompt, rng.randrange(asker.answer_tokens), copies)
                with tally.lock:
                    tally.hung_up += 1
            else:
                for found in asker.ask_copies(prompt, copies):
                    tally.add(alone[prompt], found, allowed)
    except Exception as error:  # a failing client must be reported
        with tally.lock:
            tally.faults.append(f"a request failed: {' '.join(str(error).split())}")
