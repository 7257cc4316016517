"""A server with OpenAI's completions API that needs no model."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class StubServer:
    """The answers of a stub and the requests that it got. Tests may change it at any time."""

    answer: Callable[[list[int]], list[int]]
    """Token ids after those of a prompt and its forced tokens."""
    decode: Callable[[list[int]], str]
    models: tuple[str, ...] = ("stub",)
    max_model_len: int | None = 8192
    forces: bool = True
    ends: frozenset[int] = frozenset()
    """Ids that end a request, forced or not, as in vLLM, unless the request ignores them."""
    logprob: float = -0.5
    """Log probability of every token."""
    predictions: list[dict[int, float]] | None = None
    """Log probabilities of the likeliest tokens by id, at each token of an answer; None for none."""
    body: str | None = None
    """Replaces the answer to a request for the models."""
    answer_body: str | None = None
    """Replaces the answers to all other requests."""
    answers_left: int | None = None
    """Number of requests that are answered before all others get an error; None for all."""
    metrics: str = ""
    """The text of `/metrics`."""
    finish_reason: str = "stop"
    """Why every answer ended."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""


@contextmanager
def serve(stub: StubServer) -> Iterator[StubServer]:
    """Serve a stub on a local port, within the context."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def reply(self, body: dict[str, Any] | str, status: int = 200) -> None:
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/version":
                self.reply({"version": "0.32.0"})
                return
            if self.path == "/metrics":
                self.reply(stub.metrics)
                return
            more = {"max_model_len": stub.max_model_len} if stub.max_model_len else {}
            models = [{"id": name, "object": "model", "created": 0, "owned_by": "me", **more} for name in stub.models]
            self.reply(stub.body or {"object": "list", "data": models})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stub.requests.append(request)
            if stub.answer_body is not None:
                self.reply(stub.answer_body)
                return
            if stub.answers_left is not None:
                stub.answers_left -= 1
                if stub.answers_left < 0:
                    self.reply({"message": "the engine\nis dead", "type": "BadRequestError"}, 400)
                    return
            forced = (request.get("vllm_xargs") or {}).get("forced_token_ids", []) if stub.forces else []
            room = request["max_tokens"] - len(forced)
            tokens = forced + (stub.answer([*request["prompt"], *forced])[:room] if room else [])
            if not request.get("ignore_eos"):
                end = next((place for place, token in enumerate(tokens) if token in stub.ends), len(tokens))
                tokens = tokens[: end + 1]
            choice: dict[str, Any] = {"index": 0, "text": stub.decode(tokens), "finish_reason": stub.finish_reason}
            if request.get("return_token_ids"):
                choice["token_ids"] = tokens
            if request.get("logprobs") is not None:
                choice["logprobs"] = {"token_logprobs": [stub.logprob] * len(tokens)}
                if stub.predictions is not None and request.get("return_tokens_as_token_ids"):
                    choice["logprobs"]["top_logprobs"] = [
                        {f"token_id:{token}": value for token, value in at.items()} for at in stub.predictions
                    ]
            self.reply({"id": "1", "object": "text_completion", "created": 0, "model": "stub", "choices": [choice]})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
