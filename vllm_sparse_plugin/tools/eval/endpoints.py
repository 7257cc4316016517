"""Endpoints that complete prompts, and a server with OpenAI's completions API."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from openai import APIConnectionError, APIStatusError, DefaultHttpxClient, OpenAI, OpenAIError
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from vllm_sparse_plugin.config.account import Shares
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.eval import FORCED_TOKENS_ARGUMENT, FORCED_TOKENS_PROCESSOR
from vllm_sparse_plugin.tools.eval.fidelity import ALTERNATIVES, Prediction, keep_likely

_ANSWER_SECONDS = 3600
_ADDRESS = "the address of an OpenAI-compatible server"
_FAILURES = (OpenAIError, ValueError, TypeError, AttributeError, LookupError)
"""Errors of the client: its own, and those that an answer in another shape causes."""
_UNFINISHED = ("abort", "error")
"""Values of `finish_reason` of partial answers. A server that stops sends them with status 200."""
_TOKEN_ID = "token_id:"
_MOST_LOGPROB = 1e-3
"""Rounding may lift a log probability above 0."""
_STATED = ("vllm:cache_config_info", "vllm_sparse_settings_info")
"""Metrics whose labels are settings of a server."""
_CACHE_SETTINGS = ("block_size", "cache_dtype", "enable_prefix_caching")
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


class EndpointError(RuntimeError):
    """A server or engine failed. The message continues "the model", for example `did not answer`."""


@dataclass(frozen=True)
class Request:
    """One greedy completion."""

    prompt: list[int]
    """Token ids that are prefilled."""
    forced: list[int]
    """Token ids that are decoded first, in place of the model's choice."""
    answer_tokens: int
    """Maximum tokens to decode freely after the forced ones."""
    ignores_end: bool = False
    """Whether end tokens do not end the request. Needed if forced tokens contain end tokens. The answer may then
    continue after an end token."""


@dataclass(frozen=True)
class Reply:
    """The answer to a request."""

    answer: str | list[int]
    """The text after the forced tokens. Token ids if a text would begin with the forced tokens."""
    logprobs: list[float]
    """Log probabilities of the forced tokens, if only forced tokens were asked for."""
    seconds: float
    predictions: tuple[Prediction, ...] = ()
    """The model's likeliest tokens at each forced token, if only forced tokens were asked for."""
    shares: Shares | None = None
    """Shares that the decode steps read and the cache keeps, if the endpoint can measure them."""


class Endpoint(Protocol):
    """A model that completes prompts."""

    def complete(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Answer requests in order.

        Raises:
            EndpointError: the endpoint cannot answer.
        """
        ...


class Server:
    """A server with OpenAI's completions API."""

    def __init__(self, client: OpenAI, model: str | None, concurrency: int) -> None:
        """Find the model: the named one, or the server's only one.

        Raises:
            ConfigurationError: the server does not answer or lacks the model.
        """
        self._client, self._concurrency = client, concurrency
        url = str(client.base_url)
        self._url = url.rstrip("/").removesuffix("/v1")
        try:
            served = {str(each.id): each for each in client.models.list() if each.id}
        except _FAILURES as error:
            raise ConfigurationError(f"base_url: got {url!r} ({_reason(error)}), allowed: {_ADDRESS}") from None
        if model is None and len(served) == 1:
            (model,) = served
        if model not in served:
            raise ConfigurationError(f"model: got {model!r}, allowed at {url}: {', '.join(served) or 'nothing'}")
        self.model: str = model
        """Its name at the server."""
        more = served[model].model_extra or {}
        self.max_model_len: int | None = more.get("max_model_len")
        """Maximum tokens of prompt and answer together, if the server states it."""
        self.root: str | None = more.get("root")
        """Folder or name that the server has loaded, if it states it."""

    def settings(self) -> dict[str, Any]:
        """Return what the server states about itself, None for what it does not state.

        Its vLLM version, its model and longest context, some settings of its KV cache, and those of sparse attention.
        """
        version, about = None, {}
        with suppress(*_FAILURES):
            version = str(self._client.get(f"{self._url}/version", cast_to=dict[str, str])["version"])
        with suppress(*_FAILURES):
            text = self._client.get(f"{self._url}/metrics", cast_to=str)
            for family in text_string_to_metric_families(text):
                for sample in family.samples if family.name in _STATED else ():
                    about[family.name] = sample.labels
        cache, sparse = (about.get(name, {}) for name in _STATED)
        return {
            "vllm": version,
            "root": Path(self.root).name if self.root else None,
            "max_model_len": self.max_model_len,
            "cache": {name: cache[name] for name in _CACHE_SETTINGS if name in cache},
            "sparse_attention": sparse or None,
        }

    def complete(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Answer requests with `concurrency` in flight. Further requests are prepared meanwhile."""
        waiting: deque[Any] = deque()
        remaining = iter(requests)
        # Its threads are daemons: an interrupted command does not wait for answers.
        pool = ThreadPool(self._concurrency)
        try:
            while True:
                for request in islice(remaining, 2 * self._concurrency - len(waiting)):
                    waiting.append(pool.apply_async(self._complete, (request,)))
                if not waiting:
                    return
                yield waiting.popleft().get()
        finally:
            pool.terminate()

    def _complete(self, request: Request) -> Reply:
        scored = request.answer_tokens == 0
        extra: dict[str, Any] = {"logprobs": ALTERNATIVES, "return_tokens_as_token_ids": True} if scored else {}
        if request.forced:
            # `min_tokens` does not help: vLLM looks for end tokens first.
            arguments = {FORCED_TOKENS_ARGUMENT: request.forced}
            extra |= {"vllm_xargs": arguments, "ignore_eos": request.ignores_end, "return_token_ids": True}
        begin = time.perf_counter()
        try:
            completion = self._client.completions.create(
                model=self.model,
                prompt=request.prompt,
                temperature=0,
                max_tokens=len(request.forced) + request.answer_tokens,
                extra_body=extra,
            )
            choice = completion.choices[0]
            if not isinstance(choice.text, str):
                raise TypeError("an answer without a text")
            token_ids = list((choice.model_extra or {}).get("token_ids") or [])
            told = choice.logprobs if scored else None
            logprobs = list(told.token_logprobs or []) if told else []
            predictions = tuple(keep_likely(_by_id(each)) for each in (told.top_logprobs or [] if told else []))
            if predictions and len(predictions) != len(logprobs):
                raise ValueError("likeliest tokens of other positions")
        except _FAILURES as error:
            raise EndpointError(f"did not answer a question ({_reason(error)})") from None
        seconds = time.perf_counter() - begin
        if choice.finish_reason in _UNFINISHED:
            raise EndpointError(
                f"ended a request before its answer was complete (finish_reason {str(choice.finish_reason)!r})"
            )
        if not request.forced:
            return Reply(choice.text, [], seconds)
        answer = after_forced(request, token_ids)
        return Reply(answer, check_logprobs(request, logprobs), seconds, predictions)


def connect(base_url: str, api_key: str) -> OpenAI:
    """Return a client with a long timeout.

    Raises:
        ConfigurationError: the address is invalid.
    """
    try:
        # The environment's proxy must not see local requests.
        local = urlsplit(base_url).hostname in _LOCAL_HOSTS
    except ValueError as error:
        raise ConfigurationError(f"base_url: got {base_url!r} ({error}), allowed: {_ADDRESS}") from None
    return OpenAI(
        base_url=base_url,
        api_key=api_key,
        timeout=_ANSWER_SECONDS,
        http_client=DefaultHttpxClient(trust_env=not local),
    )


def after_forced(request: Request, token_ids: list[int]) -> list[int]:
    """Return the tokens after the forced ones.

    Raises:
        EndpointError: the tokens were not forced.
    """
    count = len(request.forced)
    if token_ids and token_ids == request.forced[: len(token_ids)] and len(token_ids) < count:
        raise EndpointError(
            f"ended a request at the forced token {token_ids[-1]}; --tokenizer must be a folder whose "
            "generation_config.json has it as `eos_token_id`"
        )
    if token_ids[:count] != request.forced:
        raise EndpointError(f"does not force tokens; start it with --logits-processors {FORCED_TOKENS_PROCESSOR}")
    return token_ids[count:]


def check_logprobs(request: Request, logprobs: list[float]) -> list[float]:
    """Return the log probabilities of the forced tokens.

    Raises:
        EndpointError: they are missing, they are logits, or their distribution contains only the forced token.
    """
    if request.answer_tokens == 0 and (
        len(logprobs) != len(request.forced) or not any(logprobs) or max(logprobs) > _MOST_LOGPROB
    ):
        raise EndpointError("does not return the model's log probabilities; start it with --logprobs-mode raw_logprobs")
    return logprobs


def _by_id(alternatives: Mapping[str, float]) -> dict[int, float]:
    """Return log probabilities by token id, from a server that writes tokens as `token_id:7`."""
    return {int(token.removeprefix(_TOKEN_ID)): value for token, value in alternatives.items()}


def _reason(error: Exception) -> str:
    if not isinstance(error, OpenAIError):
        return "not in the format of OpenAI's API"
    if isinstance(error, APIConnectionError):
        return first_line(error.__cause__ or error)
    if isinstance(error, APIStatusError):
        body = error.body if isinstance(error.body, dict) else {}
        return f"HTTP {error.status_code}: {' '.join(str(body.get('message') or error.message).split())}"
    return first_line(error)


def first_line(error: BaseException) -> str:
    """Return the reason of an error, on one line."""
    text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
