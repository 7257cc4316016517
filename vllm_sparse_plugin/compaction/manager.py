"""Gives blocks of running requests back to vLLM's pool, in the scheduler's process.

A specification of a layer's cache that carries what is kept, and the manager that vLLM makes for it. Importing this
module registers both, so that a process which unpickles a specification knows its manager.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec, replace_as
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from vllm_sparse_plugin.config import Retention, requests_at_once
from vllm_sparse_plugin.metrics.live import count_freed_blocks

logger = init_logger(f"vllm.{__name__}")
_LENGTHS = 2048, 8192, 32768
"""Prompts whose number is said at start, in tokens."""


@dataclass(frozen=True, kw_only=True)
class CompactSpec(FullAttentionSpec):  # type: ignore[misc]
    """The cache of a layer that keeps a part of each prompt."""

    retention: Retention
    """What is kept."""
    classes: tuple[Retention, ...] = ()
    """What all classes of layers keep, the most first; empty where all layers keep the same."""

    @property
    def of_model(self) -> tuple[Retention, ...]:
        """What the layers of the model keep, by block table of a request."""
        return self.classes or (self.retention,)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Returns the specification of a group of layers.

        Raises:
            AssertionError: if the layers differ, which is how vLLM learns that they form no group.
        """
        first = specs[0]
        assert all(spec == first for spec in specs), "All layers in the same KV cache group must keep the same."
        return replace(first)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Returns whether all layers free the same blocks, so that one table serves them."""
        return all(
            isinstance(spec, CompactSpec) and spec.retention == self.retention for spec in kv_cache_specs.values()
        )


class _Running(NamedTuple):
    """What the manager knows of a request while it holds blocks."""

    prompt_tokens: int
    """P, as it was when the request got its first blocks."""
    began_at: int | None
    """Tokens that were processed when a step began which reads the kept blocks alone; None before there is one."""
    freed_until: int
    """End of the blocks that have been given back."""


class CompactManager(FullAttentionManager):  # type: ignore[misc]
    """Frees what `Retention` leaves out, a step after no step reads it any more.

    Kept tokens move into blocks that belong to their request alone: those are never hashed, and a prompt hits no block
    of others that far. Freed blocks that are hashed stay in the prefix cache until the pool needs them.
    """

    kv_cache_spec: CompactSpec

    def __init__(self, kv_cache_spec: CompactSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self._running: dict[str, _Running] = {}
        self._requests: dict[str, Request] = {}
        if self.kv_cache_group_id == 0:
            logger.info("compaction: %s", capacity(kv_cache_spec, self.block_pool.num_gpu_blocks))

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, *args: Any, **kwargs: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Finds the longest hit before the blocks that kept tokens will move into; arguments are those of vLLM."""
        spec: CompactSpec = kwargs["kv_cache_spec"]
        if 0 in kwargs["kv_cache_group_ids"]:
            # vLLM asks for all tokens but the last, and a request with output asks for nothing
            # (`pop_blocks_for_free`). Further groups of layers are asked for no more than the first has found.
            # Classes are clipped together: one that keeps a whole prompt would let others hit where they will write.
            longest = (retention.longest_hit(max_length + 1, spec.block_size) for retention in spec.of_model)
            max_length = min(max_length, *longest)
        found: tuple[tuple[list[KVCacheBlock], ...], int] = super().find_longest_cache_hit(
            block_hashes, max_length, *args, **kwargs
        )
        return found

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Hashes the blocks whose contents stay what they are, and follow from the tokens alone."""
        self._requests[request.request_id] = request
        prompt_tokens = self._running_of(request.request_id, request.num_prompt_tokens).prompt_tokens
        shared = self.kv_cache_spec.retention.shared_tokens(prompt_tokens, self.block_size)
        super().cache_blocks(request, min(num_tokens, shared), *args, **kwargs)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Frees what no step reads any more.

        Args:
            request_id: the request.
            processed_computed_tokens: tokens that finished steps have computed.
            num_prompt_tokens: P.
        """
        if num_prompt_tokens is None or request_id not in self.req_to_blocks:
            return
        running, processed = self._running_of(request_id, num_prompt_tokens), processed_computed_tokens
        if processed < running.prompt_tokens:
            return
        retention = self.kv_cache_spec.retention
        if running.began_at is None:
            running = self._running[request_id] = running._replace(began_at=processed)
        assert running.began_at is not None
        # The first step that begins behind the prompt may still read what it moves. After a preemption the step that
        # ends the prompt may go on into the output, so its end is where that first step begins.
        if not retention.slides and processed <= running.began_at:
            return
        left_out = retention.left_out(running.prompt_tokens, processed, self.block_size)
        first = max(left_out.start, running.freed_until)
        if left_out.stop <= first:
            return
        self._remove_blocks_in_range(request_id, first, left_out.stop)
        count_freed_blocks(left_out.stop - first, is_first=not running.freed_until)
        self._running[request_id] = running._replace(freed_until=left_out.stop)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forgets a request that ends or is preempted, and returns its blocks."""
        running, request = self._running.pop(request_id, None), self._requests.pop(request_id, None)
        if running is not None and request is not None:
            # The first output may still be in flight.
            is_behind = request.num_output_tokens > 0 or request.num_computed_tokens >= running.prompt_tokens
            if is_behind and self.kv_cache_spec.retention.moves(running.prompt_tokens, self.block_size):
                # When it resumes, vLLM looks for a hit of prompt and output together, which may reach blocks that a
                # longer prompt has hashed and that lie where this one's kept tokens will move.
                request.skip_reading_prefix_cache = True
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks

    def _running_of(self, request_id: str, prompt_tokens: int) -> _Running:
        """Returns what is known of a request; the prompt of a running one does not grow."""
        return self._running.setdefault(request_id, _Running(prompt_tokens, None, 0))


def compacted(spec: AttentionSpec, retention: Retention) -> AttentionSpec:
    """Returns a specification that keeps a part of each prompt.

    Args:
        spec: of a layer; returned as it is if it already does, or attends to a window alone.
        retention: what is kept.
    """
    if type(spec) is not FullAttentionSpec:
        return spec
    made: CompactSpec = replace_as(spec, CompactSpec, retention=retention)
    return made


def capacity(spec: CompactSpec, num_blocks: int) -> str:
    """Says how many requests of some prompt lengths fit the cache at once.

    Args:
        spec: of the first group of layers.
        num_blocks: blocks of the pool.
    """

    def fits(tables: Sequence[Retention | None]) -> list[int]:
        return [requests_at_once(tables, num_blocks, length, spec.block_size) for length in _LENGTHS]

    compacted, dense = fits(spec.of_model), fits([None] * len(spec.of_model))
    lines = (
        f"{length:,} tokens: {now} (dense {before})"
        for length, now, before in zip(_LENGTHS, compacted, dense, strict=True)
    )
    return f"requests that fit the KV cache at once, by their prompts: {', '.join(lines)}"


def spread(specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Returns the specifications of a model's layers with the budget of each, where layers share one.

    Args:
        specs: by the names of the layers, in the order of the model.
    """
    compact = {name: spec for name, spec in specs.items() if isinstance(spec, CompactSpec)}
    if not any(spec.retention.pyramid for spec in compact.values()):
        return specs
    retentions = next(iter(compact.values())).retention.of_layers(len(compact))
    spreading = {
        name: replace(spec, retention=retention, classes=tuple(dict.fromkeys(retentions)))
        for (name, spec), retention in zip(compact.items(), retentions, strict=True)
    }
    return {name: spreading.get(name, spec) for name, spec in specs.items()}


def _register() -> None:
    # Before the first foreign specification vLLM has to know its own, or a worker never learns them.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(CompactSpec, CompactManager, uniform_type_base_spec=CompactSpec)


_register()
