"""The metrics of a vLLM server."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping

import httpx
from openai import OpenAI

_SECONDS = 60.0
_BLOCKS = re.compile(r'^vllm:cache_config_info\{.*\bnum_gpu_blocks="(\d+)"', re.MULTILINE)
_QUIET_SECONDS = 60.0
"""Time that a server may need to notice that clients have disconnected."""


def metrics_text(client: OpenAI) -> str:
    """The text of a server's `/metrics`; raises httpx's HTTPError."""
    url = str(client.base_url).removesuffix("v1/") + "metrics"
    # Clients of openai bring one of two versions of httpx; a proxy of the environment must not see local requests.
    return httpx.get(url, timeout=_SECONDS, trust_env=False).text


def read_metrics(text: str) -> dict[str, float]:
    """The samples of a `/metrics` text by name, summed over labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name = line.partition("{")[0].split()[0]
            found[name] = found.get(name, 0.0) + float(line.split()[-1])
    return found


def cache_blocks(text: str) -> int:
    """The blocks of the KV cache by a `/metrics` text, without vLLM's null block."""
    return int(_BLOCKS.findall(text)[0]) - 1


def is_busy(metrics: Mapping[str, float]) -> bool:
    """Whether a server computes requests or keeps blocks for them."""
    names = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
    return any(metrics[name] for name in names)


def wait_until_quiet(read: Callable[[], Mapping[str, float]]) -> bool:
    """Waits until a server has no requests left, at most a minute.

    Args:
        read: returns the server's metrics.

    Returns:
        Whether it has none left.
    """
    end = time.monotonic() + _QUIET_SECONDS
    while busy := is_busy(read()):
        if time.monotonic() >= end:
            break
        time.sleep(1)
    return not busy
