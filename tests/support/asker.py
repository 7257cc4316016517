"""A client of a server: greedy answers with log probabilities, hang-ups, and the state of the idle server."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from openai import OpenAI
from support.continuations import Continuation

from bench.common.metrics import cache_blocks, metrics_text, read_metrics, wait_until_quiet

_LIKELIEST = 5


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
        assert wait_until_quiet(self.metrics), "requests are left"
        return round(self.metrics()["vllm:kv_cache_usage_perc"] * cache_blocks(metrics_text(self.client)))

    def _arguments(self, more: dict[str, Any]) -> dict[str, Any]:
        extra = {"ignore_eos": True, "return_tokens_as_token_ids": True, **more}
        return {
            "model": self.model, "max_tokens": self.answer_tokens, "temperature": 0, "logprobs": _LIKELIEST,
            "extra_body": extra,
        }  # fmt: skip


def _token(text: str) -> int:
    return int(text.removeprefix("token_id:"))
