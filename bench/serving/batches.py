"""Batches of requests that decode at the same time, such as `24x32K` or `16x32K+1x128K:dense`.

Prompts are text. The engine computes the longest; the others get copies of its KV blocks and end differently. Keys,
values and page statistics are those that the model wrote, and a batch of long prompts takes the time of one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict

from bench.common.models import Model, library_tokens, load_tokenizer
from bench.common.options import parse_size, split_values
from bench.common.results import Row
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.requests.arguments import BUDGET, DENSE

if TYPE_CHECKING:
    from vllm import LLM

_ALLOWED = "COUNTxCONTEXT, with :dense or :budget=TOKENS, joined by +"
Loads = Annotated[list[str], typer.Option("--load", help=f"{_ALLOWED}, repeatable.")]
TAIL = 64
"""Last tokens of a prompt, which no other request has."""


class Batch(BaseModel):
    """Requests that decode at the same time."""

    model_config = ConfigDict(frozen=True)

    name: str
    contexts: tuple[int, ...]
    """Tokens of each request, the longest first."""
    arguments: tuple[dict[str, Any], ...]
    """Arguments of each request for a sparse backend."""

    @property
    def count(self) -> int:
        """Requests of the batch."""
        return len(self.contexts)

    @property
    def longest(self) -> int:
        """Tokens of its longest context."""
        return self.contexts[0]

    @property
    def tokens(self) -> int:
        """Tokens of all contexts."""
        return sum(self.contexts)


def parse_batches(texts: Iterable[str]) -> tuple[Batch, ...]:
    """Parse batches, without duplicates.

    Raises:
        ConfigurationError: for anything else.
    """
    return tuple(_parse(text) for text in dict.fromkeys(split_values(texts)))


def _parse(text: str) -> Batch:
    requests: list[tuple[int, dict[str, Any]]] = []
    for part in text.split("+"):
        shape, _, argument = part.partition(":")
        count, _, context = shape.partition("x")
        name, _, value = argument.partition("=")
        try:
            arguments: dict[str, Any] = {}
            if argument == "dense":
                arguments = {DENSE: "dense"}
            elif name == "budget":
                arguments = {BUDGET: parse_size(value)}
            elif argument:
                raise ValueError(f"{argument!r} is not an argument")
            requests += [(parse_size(context), arguments)] * parse_size(count)
        except ValueError:
            raise ConfigurationError(f"load: got {text!r}, allowed: {_ALLOWED}") from None
    requests.sort(key=lambda request: -request[0])
    contexts, of_requests = zip(*requests, strict=True)
    return Batch(name=text, contexts=contexts, arguments=of_requests)


def check_batches(batches: Iterable[Batch], new_tokens: int, limit: int) -> None:
    """Raise ConfigurationError for contexts beyond `limit`, or too short for a prompt and `new_tokens`."""
    least = new_tokens + 2 * TAIL
    for context in (context for batch in batches for context in batch.contexts):
        if not least <= context <= limit:
            raise ConfigurationError(
                f"load: got a context of {context} tokens, allowed: from {least}, which leaves room for the new "
                f"tokens, to {limit}"
            )


@dataclass(frozen=True)
class Prompt:
    """A prompt with KV blocks of its own."""

    tokens: list[int]
    salt: str
    """Prompts share blocks only under the same salt."""

    def for_vllm(self) -> Any:
        """The prompt as vLLM takes it."""
        from vllm import TokensPrompt

        return TokensPrompt(prompt_token_ids=self.tokens, cache_salt=self.salt)


def draw_text(model: Model, batches: Sequence[Batch]) -> tuple[list[int], list[list[int]]]:
    """Return the tokens of a text, as long as the longest context, and the last tokens of each request."""
    tokens, requests = max(each.longest for each in batches), max(each.count for each in batches)
    text = library_tokens(load_tokenizer(model.folder), 0, tokens + TAIL * requests)
    return text[:tokens], [text[tokens + TAIL * i : tokens + TAIL * (i + 1)] for i in range(requests)]


def make_prompts(batch: Batch, text: list[int], tails: Sequence[list[int]], new_tokens: int) -> list[Prompt]:
    """Return the prompts of a batch. Each leaves room in its context for the generated tokens."""
    shared = [context - new_tokens - 1 - TAIL for context in batch.contexts]
    return [Prompt(text[:length] + tails[i], str(i)) for i, length in enumerate(shared)]


class Runner:
    """Fills the prefix cache of an engine in this process with batches, and generates tokens for them."""

    def __init__(self, llm: LLM, sparse: bool) -> None:
        """Takes the engine, and whether requests have arguments for a sparse backend."""
        self._llm, self._sparse = llm, sparse
        cache = llm.llm_engine.vllm_config.cache_config
        self.block_size: int = cache.block_size
        self._blocks: int = (cache.num_gpu_blocks or 1) - 1  # vLLM reserves one

    @property
    def room(self) -> int:
        """The tokens that the KV cache holds."""
        return self._blocks * self.block_size

    def fits(self, batch: Batch) -> bool:
        """Whether the KV cache holds a batch."""
        return sum(-(-context // self.block_size) for context in batch.contexts) <= self._blocks

    def generate(self, batch: Batch, prompts: Sequence[Prompt], tokens: int) -> list[Any]:
        """Generate that many tokens for each prompt; return vLLM's outputs."""
        from vllm import SamplingParams

        sampling = [
            SamplingParams(
                temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False,
                extra_args=dict(each) if self._sparse and each else None,
            )
            for each in batch.arguments[: len(prompts)]
        ]  # fmt: skip
        outputs: list[Any] = self._llm.generate([each.for_vllm() for each in prompts], sampling, use_tqdm=False)
        return outputs

    def fill(self, batch: Batch, prompts: Sequence[Prompt]) -> Row:
        """Bring the prompts of a batch into the prefix cache; return columns that say how."""
        begin = time.perf_counter()
        self.generate(batch, prompts[:1], 1)
        copied = self.copy_prefixes(prompts) and len(prompts) > 1
        self.generate(batch, prompts, 1)
        contents = "text, one prompt copied" if copied else "text"
        return {"cache": contents, "fill_seconds": round(time.perf_counter() - begin, 3)}

    def copy_prefixes(self, prompts: Sequence[Prompt]) -> bool:
        """Copy into the prefix cache what prompts share with the first one, as far as the cache has it of that.

        Returns:
            Whether it could. If a model has several kinds of caches, the engine must compute all prompts.
        """
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        if len(scheduler.kv_cache_config.kv_cache_groups) != 1:
            return False
        pool = scheduler.kv_cache_manager.block_pool
        copies: list[tuple[int, int]] = []
        written = self._cached_blocks(self._request(prompts[0]))
        pool.touch(written)  # held until the end, like all others
        held = list(written)
        for prompt in prompts[1:]:
            request = self._request(Prompt(prompt.tokens[:-TAIL], prompt.salt))
            blocks = self._cached_blocks(request)
            pool.touch(blocks)
            held += blocks
            begin, end = len(blocks), min(len(request.block_hashes), len(written))
            if begin >= end:
                continue
            new = pool.get_new_blocks(end - begin)
            copies += [(before.block_id, after.block_id) for before, after in zip(written[begin:end], new, strict=True)]
            pool.cache_full_blocks(request, blocks + new, begin, end, self.block_size, 0)
            held += new
        if copies:
            self._llm.collective_rpc("copy_blocks", args=(copies,))
        pool.free_blocks(reversed(held))
        return True

    def blocks_of(self, prompt: Prompt) -> list[int]:
        """The numbers of the blocks that the prefix cache has of a prompt, from the first one on."""
        return [block.block_id for block in self._cached_blocks(self._request(prompt))]

    def _cached_blocks(self, request: Any) -> list[Any]:
        pool = self._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        found: list[Any] = []
        for value in request.block_hashes:
            if not (blocks := pool.get_cached_block(value, [0])):
                break
            found += blocks
        return found

    def _request(self, prompt: Prompt) -> Any:
        """A request as vLLM's scheduler sees it, with the hashes of its blocks."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        return Request(
            request_id=f"copy-{prompt.salt}",
            prompt_token_ids=prompt.tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=prompt.salt,
            block_hasher=self._llm.llm_engine.engine_core.engine_core.request_block_hasher,
        )
