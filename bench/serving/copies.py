"""Prompts in the prefix cache of an engine, copied from one prompt that the engine has computed.

Keys, values and page statistics of a copy are those that the model wrote. Every copy has KV blocks of its own, under a
`cache_salt` of its own. So a batch of long prompts takes the time of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True)
class Prompt:
    """A prompt with KV blocks of its own."""

    tokens: list[int]
    salt: str
    """Prompts share blocks only under the same salt."""


def copy_prefixes(llm: LLM, source: Prompt, prompts: Sequence[Prompt], shared_tokens: Sequence[int]) -> int:
    """Write the first tokens of prompts into the prefix cache, as far as the cache has them of another prompt.

    Args:
        llm: an engine in this process.
        source: the prompt that was computed.
        prompts: prompts that begin like `source`.
        shared_tokens: how many tokens of each prompt are those of `source`.

    Returns:
        The copied blocks. 0 if the model has several kinds of caches, whose prompts the engine must compute.
    """
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    if len(scheduler.kv_cache_config.kv_cache_groups) != 1:
        return 0
    pool = scheduler.kv_cache_manager.block_pool
    block_size = llm.llm_engine.vllm_config.cache_config.block_size
    held: list[Any] = []
    copies: list[tuple[int, int]] = []

    def cached(request: Any) -> list[Any]:
        """The blocks of a request that are in the cache, from the first one on. They stay there until the end."""
        found: list[Any] = []
        for value in request.block_hashes:
            if not (blocks := pool.get_cached_block(value, [0])):
                break
            found += blocks
        pool.touch(found)
        held.extend(found)
        return found

    written = cached(_request(llm, source.tokens, source.salt))
    for prompt, tokens in zip(prompts, shared_tokens, strict=True):
        request = _request(llm, prompt.tokens[:tokens], prompt.salt)
        blocks = cached(request)
        begin, end = len(blocks), min(tokens // block_size, len(written))
        if begin >= end:
            continue
        new = pool.get_new_blocks(end - begin)
        copies += [(before.block_id, after.block_id) for before, after in zip(written[begin:end], new, strict=True)]
        pool.cache_full_blocks(request, blocks + new, begin, end, block_size, 0)
        held.extend(new)
    llm.collective_rpc("copy_blocks", args=(copies,))
    pool.free_blocks(reversed(held))
    return len(copies)


def _request(llm: LLM, tokens: list[int], salt: str) -> Any:
    """A request as vLLM's scheduler sees it, with the hashes of its blocks."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    core = llm.llm_engine.engine_core.engine_core
    return Request(
        request_id=f"copy-{salt}",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=core.request_block_hasher,
    )
