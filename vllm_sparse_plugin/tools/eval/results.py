"""Asks items and writes their results as JSON lines, which a later run can continue."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.eval.endpoints import Endpoint, Request
from vllm_sparse_plugin.tools.eval.items import NLL, Item, PlannedItem, Prompter
from vllm_sparse_plugin.tools.eval.progress import show_progress
from vllm_sparse_plugin.tools.files import read_text
from vllm_sparse_plugin.tools.provenance import check_output

_ALLOWED = "a file of `vllm-sparse eval`"
SHARES = {
    "kv_read_share": "bytes_read", "key_read_share": "read", "key_kept_share": "kept", "memory_share": "bytes_kept"
}  # fmt: skip
"""Fields of `Shares` by those of a result."""


class Result(BaseModel):
    """One answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    task: str
    context_tokens: int
    prompt_tokens: int
    """Tokens of context and question."""
    forced_tokens: int
    """Number of these tokens that were decoded one by one."""
    digest: str
    """Digest of the prompt and the right answers."""
    document: str = ""
    """Digest of the text before the question. Items with the same text are not independent."""
    answers: tuple[str, ...]
    completion: str
    metric: str
    score: float
    """From 0 to 1; for the metric `nll` the mean negative log likelihood of the forced tokens in nats."""
    seconds: float
    predictions: tuple[dict[int, float], ...] = ()
    """For the metric `nll`: log probabilities of the likeliest tokens at each forced token, by token id."""
    kv_read_share: float | None = None
    """Bytes that the decode steps read, over those of dense attention to the whole context: keys, values and page
    statistics of all layers and KV heads. This share and those below are present if the endpoint can measure them."""
    key_read_share: float | None = None
    """Keys that the decode steps read, over those of the whole context; see `config.account`."""
    key_kept_share: float | None = None
    """Keys that the cache keeps during decoding, over those of the whole context."""
    memory_share: float | None = None
    """Bytes that the cache keeps during decoding, page statistics included, over those of dense attention."""

    @property
    def sample(self) -> str:
        """What is independent of other samples: the document, or the item in files of earlier versions."""
        return self.document or self.id


@dataclass(frozen=True)
class ResultFile:
    """Contents of a result file."""

    path: Path
    settings: dict[str, Any]
    results: dict[str, Result] = field(default_factory=dict)
    """By item, in order."""

    @property
    def label(self) -> str:
        """Name of the run."""
        return str(self.settings["label"])


def ask(
    endpoint: Endpoint,
    planned: Sequence[PlannedItem],
    decode_from: str,
    prompter: Prompter,
    score: Callable[[Item, str], float],
    console: Console,
    title: str,
) -> Iterator[Result]:
    """Ask items in order, show progress, and yield their results.

    Text for perplexity is always decoded, because prefill is dense with most backends.

    Raises:
        EndpointError: the endpoint fails.
        ConfigurationError: an item cannot be built.
    """
    asked: deque[tuple[Item, Request]] = deque()

    def requests() -> Iterator[Request]:
        for each in planned:
            item = each.build()
            forced = item.question if decode_from == "question" or item.metric == NLL else []
            prompt = item.context if forced else item.context + item.question
            # vLLM also ends a request at a forced end token. If nothing follows the forced tokens, all are forced.
            ignores_end = bool(forced) and (item.answer_tokens == 0 or not prompter.end_tokens.isdisjoint(forced))
            asked.append((item, Request(prompt, forced, item.answer_tokens, ignores_end)))
            yield asked[-1][1]

    with show_progress(console, f"{title}: {len(planned)} questions", len(planned)) as advance:
        scores: list[float] = []
        for reply in endpoint.complete(requests()):
            item, request = asked.popleft()
            completion = reply.answer
            if not isinstance(completion, str):
                completion = prompter.decode(
                    list(takewhile(lambda token: token not in prompter.end_tokens, completion))
                )
            if item.metric == NLL:
                value = -sum(reply.logprobs) / len(reply.logprobs)
            else:
                value = score(item, completion)
                scores.append(value)
            yield Result(
                id=item.id,
                task=item.task,
                context_tokens=item.context_tokens,
                prompt_tokens=len(item.context) + len(item.question),
                forced_tokens=len(request.forced),
                digest=item.digest,
                document=item.document,
                answers=item.answers,
                completion=completion,
                metric=item.metric,
                score=round(value, 6),
                seconds=round(reply.seconds, 4),
                predictions=tuple(map(dict, reply.predictions)),
                **{
                    field: round(getattr(reply.shares, of_shares), 6)
                    for field, of_shares in SHARES.items()
                    if reply.shares is not None
                },
            )
            text = f"{title}: {item.task} {item.context_tokens}"
            text += f", accuracy so far {sum(scores) / len(scores):.2f}" if scores else ""
            advance(text)


def check_results(path: Path, settings: dict[str, Any]) -> ResultFile:
    """Return the results in a file, empty without a file. An incomplete last line is dropped.

    Args:
        path: of the file.
        settings: everything that determines the results.

    Raises:
        ConfigurationError: the file has other settings or another format, or cannot be written.
    """
    settings = json.loads(json.dumps(settings))
    check_output(path, "output")
    content = path.read_bytes() if path.exists() else b""
    if not content:
        return ResultFile(path, settings)
    end = content.rfind(b"\n") + 1
    held = _parse(path, content[:end] or content)
    for name in dict.fromkeys((*settings, *held.settings)):
        before, now = held.settings.get(name), settings.get(name)
        if before != now:
            raise ConfigurationError(
                f"output: got {str(path)!r} made with {name} {before!r}, allowed: one made with {now!r}, or a new file"
            )
    os.truncate(path, end)
    return held


def read_results(path: Path) -> ResultFile:
    """Read a result file of one run, or of several runs that continued it.

    Raises:
        ConfigurationError: the file is not a result file.
    """
    return _parse(path, read_text(path, "results", _ALLOWED).encode())


def _parse(path: Path, content: bytes) -> ResultFile:
    number = 0
    try:
        settings: dict[str, Any] | None = None
        results: dict[str, Result] = {}
        for number, line in enumerate(content.decode().removesuffix("\n").split("\n"), 1):  # noqa: B007 - used below
            record = json.loads(line)
            if "settings" in record:
                settings = record["settings"]
            else:
                result = Result.model_validate(record)
                results[result.id] = result
        if settings is None or not isinstance(settings.get("label"), str):
            raise ValueError("without settings")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = "an unknown record" if isinstance(error, ValidationError) else str(error)
        raise ConfigurationError(
            f"results: got {str(path)!r} (line {number}: {reason:.80}), allowed: {_ALLOWED}"
        ) from None
    return ResultFile(path, settings, results)
