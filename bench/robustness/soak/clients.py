"""Clients of a server, a third of whom hang up before their answer ends."""

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
"""Share of the requests that are given up."""
_LIKELIEST = 5


@dataclass(frozen=True)
class Asker:
    """How a server is asked."""

    client: OpenAI
    model: str
    answer_tokens: int

    def ask(self, prompt: str | list[int], **more: Any) -> Continuation:
        """Returns what follows a prompt, a text or tokens, greedily; `more` are parameters of vLLM's own."""
        reply: Any = self.client.completions.create(prompt=prompt, **self._arguments(**more))
        told = reply.choices[0].logprobs
        return Continuation(
            [_token(text) for text in told.tokens],
            [{_token(text): logprob for text, logprob in step.items()} for step in told.top_logprobs],
        )

    def hang_up(self, prompt: str, after: int) -> None:
        """Asks, and closes the connection after so many parts of the answer."""
        stream: Any = self.client.completions.create(prompt=prompt, stream=True, **self._arguments())
        for _ in zip(range(after), stream, strict=False):
            pass
        stream.close()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the server by name, summed over labels."""
        return read_metrics(metrics_text(self.client))

    def _arguments(self, **more: Any) -> dict[str, Any]:
        return {
            "model": self.model, "max_tokens": self.answer_tokens, "temperature": 0, "logprobs": _LIKELIEST,
            "extra_body": {"ignore_eos": True, "return_tokens_as_token_ids": True, **more},
        }  # fmt: skip


def _token(text: str) -> int:
    return int(text.removeprefix("token_id:"))


@dataclass
class Tally:
    """What clients have seen until now."""

    answers: int = 0
    hung_up: int = 0
    parted: int = 0
    """Answers that part from those asked alone, by a tie or not."""
    largest_gap: float = 0.0
    """Of log probabilities, where they part."""
    faults: list[str] = field(default_factory=list)
    """What was wrong, a sentence each."""
    most: int | None = None
    """Requests after which nobody asks any more; None for as long as there is time."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, alone: Continuation, found: Continuation, allowed: float) -> None:
        """Counts an answer; one that parts from that asked alone must do so where two tokens are about as likely."""
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
        """Whether enough was asked."""
        return self.most is not None and self.answers + self.hung_up >= self.most

    def as_row(self) -> dict[str, Any]:
        """Returns the columns of a row; no largest gap where a server did not say how likely it found a token."""
        with self.lock:
            gap = round(self.largest_gap, 4) if math.isfinite(self.largest_gap) else None
            return {
                "answers": self.answers, "hung_up": self.hung_up, "parted": self.parted, "largest_gap": gap,
                "faults": list(self.faults),
            }  # fmt: skip


def run_client(
    asker: Asker, alone: Mapping[str, Continuation], allowed: float, end: float, seed: int, tally: Tally
) -> None:
    """Asks one prompt after the other until `time.monotonic` reaches `end`, or enough was asked; what it raises is a
    fault."""
    rng = random.Random(seed)
    prompts: Sequence[str] = list(alone)
    try:
        while time.monotonic() < end and not tally.is_full:
            prompt = rng.choice(prompts)
            if rng.random() < HANGS_UP:
                asker.hang_up(prompt, rng.randrange(asker.answer_tokens))
                with tally.lock:
                    tally.hung_up += 1
            else:
                tally.add(alone[prompt], asker.ask(prompt), allowed)
    except Exception as error:  # a client that ends must not go unseen
        with tally.lock:
            tally.faults.append(f"a request failed: {' '.join(str(error).split())}")
