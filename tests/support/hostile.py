"""Requests that a server should refuse, and requests that cost it much."""

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_COPIES = (16, 64, 16_385, 10**9, 1 << 63)
"""Values of `n`. vLLM accepts up to 16,384."""
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"sparse": "none"}, {"sparse": 1}, {"sparse": ["dense"]}, {"sparse": ""}, {"sparse": "dense" * 10_000},
    {"sparse_budget_tokens": "many"}, {"sparse_budget_tokens": -8}, {"sparse_budget_tokens": 0},
    {"sparse_budget_tokens": 7}, {"sparse_budget_tokens": 512.5}, {"sparse_budget_tokens": True},
    {"sparse_budget_tokens": 1 << 40}, {"sparse_budget_tokens": 10**30}, {"sparse_budget_tokens": [512]},
    {"sparse_budget_tokens": {"tokens": 512}}, {"sparse_coverage": 0.9},
    {"sparse": "dense", "sparse_budget_tokens": 512}, {"sparse_budget": 512}, {"sparse_": 1}, {"sparse\ud800": 1},
    {"sparse": None, "other": None}, {"other": 10**30}, {"other": {"nested": [[[[1]]]]}},
    {"sparse_protect": "0:5"}, {"sparse_protect": "9:5,"}, {"sparse_protect": ["0:5"]}, {"sparse_protect": "," * 9999},
)  # fmt: skip
"""Values of `vllm_xargs`."""
FIELDS: tuple[dict[str, Any], ...] = (
    {"temperature": -1}, {"temperature": "hot"}, {"temperature": 1e308}, {"top_p": 0}, {"top_p": 2}, {"top_k": -7},
    {"top_k": 1 << 62}, {"min_p": 3}, {"max_tokens": -5}, {"max_tokens": 0}, {"max_tokens": 1 << 40},
    {"max_tokens": "all"}, {"min_tokens": 100, "max_tokens": 10}, {"min_tokens": -1}, {"n": -1}, {"n": "two"},
    {"seed": 1 << 70}, {"seed": "x"}, {"logprobs": 1 << 40}, {"logprobs": -7}, {"prompt_logprobs": -5},
    {"prompt_logprobs": 1 << 40}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"x": "y"}},
    {"logit_bias": {str(1 << 40): 100}}, {"presence_penalty": 9}, {"repetition_penalty": 0},
    {"repetition_penalty": -1}, {"stop": [""]}, {"stop": 5}, {"stop_token_ids": [-1]},
    {"stop_token_ids": [1 << 40]}, {"allowed_token_ids": []}, {"allowed_token_ids": [-1]},
    {"allowed_token_ids": [1 << 40]}, {"bad_words": [""]}, {"bad_words": ["x"] * 1000}, {"prompt": ""},
    {"prompt": []}, {"prompt": [-1]}, {"prompt": [1 << 40]}, {"prompt": [1 << 31]}, {"prompt": [[]]},
    {"prompt": {"text": 1}}, {"prompt": None}, {"prompt": ["x"] * 64}, {"prompt": "a \ud800 b"},
    {"prompt_embeds": "x"}, {"truncate_prompt_tokens": 1 << 40}, {"truncate_prompt_tokens": -9}, {"model": "none"},
    {"model": 3}, {"priority": 5}, {"cache_salt": ""}, {"cache_salt": 5}, {"stream_options": {"include_usage": True}},
    {"use_beam_search": True, "n": 2}, {"echo": "yes"}, {"suffix": "x"}, {"kv_transfer_params": {"x": 1}},
    {"vllm_xargs": 5}, {"vllm_xargs": [1]}, {"request_id": ""}, {"unknown": {"a": 1}},
)  # fmt: skip
"""Fields of a completion. Some are valid, and rare."""
BODIES: tuple[bytes, ...] = (
    b"", b"{", b"[]", b"null", b"5", b'"text"', b"\xff\xfe", b'{"prompt": "a \\ud800 b"}', b'{"prompt": NaN}',
    b'{"model": 1e999, "prompt": "x"}', b"[" * 50_000, b'{"a":' * 50_000, b"x" * 1_000_000,
)  # fmt: skip
"""Bodies that are no request."""
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "("}, {"regex": "[a-z]{3,20}"}, {"regex": "(a|b)*" * 30}, {"choice": []}, {"choice": ["yes", "no"]},
    {"grammar": "root ::= "}, {"grammar": 'root ::= "x" root | "y"'}, {"json": "{"}, {"json": {"type": "nothing"}},
    {"json": {"$ref": "#"}}, {"json": {"type": "string", "pattern": "("}}, {"regex": "a", "choice": ["b"]}, {},
)  # fmt: skip
"""Values of `structured_outputs`."""


class Request(NamedTuple):
    """A request of a hostile client."""

    kind: str
    path: str
    body: bytes
    lines: int | None = None
    """The client disconnects after this number of lines of the answer; None to read the answer."""

    @property
    def is_ours(self) -> bool:
        """Whether the plugin refuses it, not vLLM: then a server's error is a fault."""
        return self.kind in ("arguments", "dense")


def hostile_requests(model: str, prompt: list[int], longest: list[int], max_model_len: int) -> list[Request]:
    """All kinds of hostile requests in a random order.

    Args:
        model: the name of the served model.
        prompt: one of the well-behaved clients, in tokens.
        longest: one of the longest context, in tokens.
        max_model_len: the longest context in tokens.
    """
    rng = random.Random(0)

    def completion(kind: str, lines: int | None = None, **fields: Any) -> Request:
        usual = {"model": model, "prompt": "x = 1\n", "max_tokens": 32, "temperature": 0}
        return Request(kind, COMPLETIONS, json.dumps(usual | fields).encode(), lines)

    def drawn() -> Iterator[Request]:
        for arguments in ARGUMENTS:
            yield completion("arguments", vllm_xargs=arguments, stream=rng.random() < 0.5)
        for fields in FIELDS:
            yield completion("fields", **fields)
        for body in BODIES:
            yield Request("bodies", rng.choice((COMPLETIONS, CHAT)), body)
        for grammar in GRAMMARS:
            yield completion("schemas", structured_outputs=grammar)
        for _ in range(8):
            schema = {"name": "drawn", "schema": draw_schema(rng, 4)}
            yield completion("schemas", response_format={"type": "json_schema", "json_schema": schema})
        for copies in _COPIES:
            yield completion("copies", prompt=prompt, n=copies, temperature=1)
        for lines in range(24):
            yield completion("hang-ups", lines % 6, prompt=prompt, stream=True, ignore_eos=True)
        for _ in range(4):
            yield completion("hang-ups", 2, prompt=longest, stream=True, ignore_eos=True)
            yield completion("dense", prompt=longest, vllm_xargs={"sparse": "dense"}, ignore_eos=True)
        for tokens in (max_model_len + 1, 2 * max_model_len):
            yield completion("too long", prompt=(longest * 3)[:tokens])
            yield completion("too long", prompt="x = 1\n" * tokens)

    found = list(drawn())
    rng.shuffle(found)
    return found


def draw_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """Returns a random JSON schema, nested at most `depth` times."""
    kind = rng.choice(("object", "array", "string", "integer") if depth else ("string", "integer"))
    if kind == "object":
        names = [f"field_{rng.randrange(1000)}" for _ in range(rng.randrange(1, 5))]
        properties = {name: draw_schema(rng, depth - 1) for name in names}
        return {"type": kind, "properties": properties, "required": names[:1], "additionalProperties": False}
    if kind == "array":
        return {"type": kind, "items": draw_schema(rng, depth - 1), "minItems": 1, "maxItems": rng.randrange(1, 9)}
    return {"type": kind}
