"""Measures a busy server for some time. Clients ask repeatedly, and disconnect at the end."""

from __future__ import annotations

import asyncio
import random
import re
import time
from typing import NamedTuple

from httpx import AsyncClient, Limits
from openai import OpenAI

from bench.common.metrics import metrics_text, read_metrics, wait_until_quiet
from bench.common.models import Model
from bench.common.results import Row
from bench.serving.serve import Load
from bench.serving.watch import Watched, watch

_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
_END_BYTES = 2048
"""Bytes that hold the last messages of a stream."""


class Window(NamedTuple):
    """When to measure a server whose clients all start at once."""

    lead_seconds: float
    """Seconds of load before the measurement."""
    seconds: float
    again: bool = False
    """Whether a client asks its first prompt again and again, as in a conversation with short turns."""


def measure_window(window: Window, load: Load, client: OpenAI, model: Model, end: float) -> Row:
    """Apply a load without end, and measure a window: tokens and requests by the server's counters.

    Args:
        window: the times of the measurement.
        load: prompts and answers, and the number of clients; `requests` is ignored.
        client: of the server.
        model: the served model.
        end: latest end of the window on `time.monotonic`.

    Raises:
        ChildProcessError: if a request fails or its answer is incomplete, if the server is busy with earlier requests,
            or if there is no time for the window.
    """

    def look() -> dict[str, float]:
        return read_metrics(metrics_text(client))

    if not wait_until_quiet(look):
        raise ChildProcessError("the server is still busy with the requests of the last load")
    if time.monotonic() + window.lead_seconds + window.seconds > end:
        raise ChildProcessError("the window cannot end before the deadline")
    try:
        watched = asyncio.run(_watch_clients(window, load, client, model))
    except ExceptionGroup as group:
        raise ChildProcessError(f"a client failed: {group.exceptions[0]!r}") from group
    wait_until_quiet(look)
    about = {"requests": None, "lead_seconds": window.lead_seconds, "prompts_again": window.again}
    return {**about, **watched.window_columns()}


async def _watch_clients(window: Window, load: Load, client: OpenAI, model: Model) -> Watched:
    # A proxy of the environment must not see local requests.
    http = AsyncClient(base_url=str(client.base_url), timeout=None, limits=Limits(), trust_env=False)
    async with http, asyncio.TaskGroup() as group:
        asking = [group.create_task(_ask(http, load, model, n, window.again)) for n in range(load.concurrency)]
        await asyncio.sleep(window.lead_seconds)
        with watch(lambda: metrics_text(client)) as watched:
            await asyncio.sleep(window.seconds)
        for task in asking:
            task.cancel()
    return watched


async def _ask(http: AsyncClient, load: Load, model: Model, client: int, again: bool) -> None:
    """Asks one distinct prompt after the other, or the first one `again`, and reads the streamed answers.

    Raises:
        RuntimeError: if an answer is incomplete. Its status is 200: vLLM reports a failed request in the stream.
    """
    rng = random.Random(f"{load.seed} {client}")
    tokens = range(3, model.vocabulary)
    prompt = rng.choices(tokens, k=load.input_tokens)
    while True:
        body = {
            "model": model.folder.name, "prompt": prompt, "stream": True,
            "max_tokens": load.output_tokens, "temperature": 0, "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        end = b""
        async with http.stream("POST", "completions", json=body) as reply:
            reply.raise_for_status()
            async for part in reply.aiter_raw():
                end = (end + part)[-_END_BYTES:]
        if list(map(int, _TOKENS.findall(end)[-1:])) != [load.output_tokens]:
            shown = " ".join(end.decode(errors="replace").split())[-200:]
            raise RuntimeError(f"an answer does not have {load.output_tokens} tokens; it ends in {shown!r}")
        if not again:
            prompt = rng.choices(tokens, k=load.input_tokens)
