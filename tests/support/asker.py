"""A client of a server: greedy answers with log probabilities, hang-ups, and the state of the idle server."""

import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from openai import OpenAI
from support.continuations import Continuation

from bench.common.metrics import metrics_text, read_metrics

_LIKELIEST = 5
_BLOCKS = re.compile(r'^vllm:cache_config_info\{.*\bnum_gpu_blocks="(\d+)"', re.MULTILINE)
_QUIET_SECONDS = 60.0
"""Time that a server may need to notice that clients have disconnected."""
_BUSY = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
"""Metrics of a server that computes requests or keeps blocks for them."""


class Asker(NamedTuple):
    """The connection to a server."""

    client: OpenAI
    model: str
    answer_tokens: int

    def ask(self, prompt: str | list[int], **more: Any) -> Continuation:
        """The greedy continuation of a prompt (text or tokens); `more` are parameters of vLLM."""
        reply: Any = self.client.completions.create(prompt=prompt, **self._arguments(more))
        told = reply.choices[0].logprobs
        if told is None:  # aborted before the first token
            return Continuation([], [])
        by_token = [{_token(text): logprob for text, logprob in step.items()} for step in told.top_logprobs]
        return Continuation([_token(text) for text in told.tokens], by_token)

    def hang_up(self, prompt: str | list[int], after: int, **more: Any) -> None:
        """Closes the connection after some parts of an answer."""
        stream: Any = self.client.completions.create(prompt=prompt, stream=True, **self._arguments(more))
        for _ in zip(range(after), stream, strict=False):
            pass
        stream.close()

    def metrics(self) -> Mapping[str, float]:
        """The metrics of the server by name, summed over labels."""
        return read_metrics(metrics_text(self.client))

    def used_blocks(self) -> int:
        """Blocks of the cache that requests hold, when none is left."""
        end = time.monotonic() + _QUIET_SECONDS
        while any(map(self.metrics().__getitem__, _BUSY)):
            assert time.monotonic() < end, "requests are left"
            time.sleep(1)
        # vLLM's null block is one of them.
        blocks = int(_BLOCKS.findall(metrics_text(self.client))[0]) - 1
        return round(self.metrics()["vllm:kv_cache_usage_perc"] * blocks)

    def _arguments(self, more: dict[str, Any]) -> dict[str, Any]:
        extra = {"ignore_eos": True, "return_tokens_as_token_ids": True, **more}
        return {
            "model": self.model, "max_tokens": self.answer_tokens, "temperature": 0, "logprobs": _LIKELIEST,
            "extra_body": extra,
        }  # fmt: skip


def _token(text: str) -> int:
    return int(text.removeprefix("token_id:"))
