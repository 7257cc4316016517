"""The metrics of a vLLM server."""

from __future__ import annotations

import httpx
from openai import OpenAI

_SECONDS = 60.0


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
