"""Gives blocks of running requests back to vLLM's pool, in the scheduler's process.

It defines the cache specification of a layer with compaction, and the manager that vLLM creates for it. Importing this
module registers both, so a process that unpickles a specification knows its manager.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec, replace_as
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from vllm_sparse_plugin.evictions import Retention, requests_at_once
from vllm_sparse_plugin.metrics.live import count_freed_blocks

logger = init_logger(f"vllm.{__name__}")
_LENGTHS = 2048, 8192, 32768
"""Prompt lengths, in tokens, for which the log at start says how many requests fit."""


@dataclass(frozen=True, kw_only=True)
class CompactSpec(FullAttentionSpec):  # type: ignore[misc]
    """The cache of a layer that keeps a part of each prompt."""

    retention: Retention
    """What the layer keeps."""
    classes: tuple[Retention, ...] = ()
    """What each class of layers keeps, largest first; empty before `spread`."""
    is_alone: bool = True
    """Whether all layers of the model keep a part. Others, such as those with a sliding window, have tables of their
    own."""

    @property
    def of_model(self) -> tuple[Retention, ...]:
        """What the layers with a `CompactSpec` keep, one entry per class of them."""
        return self.classes or (self.retention,)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Returns the specification of a group of layers.

        Raises:
            AssertionError: if the layers differ. vLLM then makes no group of them.
        """
        first = specs[0]
        assert all(spec == first for spec in specs), "All layers in the same KV cache group must keep the same."
        return replace(first)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Returns whether all layers free the same blocks and can share a table."""
        return all(
            isinstance(spec, CompactSpec) and spec.retention == self.retention for spec in kv_cache_specs.values()
        )


@dataclass(frozen=True, kw_only=True)
class BesideSpec(SlidingWindowSpec):  # type: ignore[misc]
    """The cache of a layer with a sliding window, beside layers with a `CompactSpec`."""


class _FirstGroup(NamedTuple):
    """The first group of layers with a `CompactSpec`."""

    number: int
    spec: CompactSpec


_first_groups: WeakKeyDictionary[BlockPool, _FirstGroup] = WeakKeyDictionary()
"""By pool."""


class _Running(NamedTuple):
    """The manager's record of a request that holds blocks."""

    prompt_tokens: int
    """P when the request got its first blocks."""
    processed: int = 0
    """Tokens computed by finished steps."""
    before: int = 0
    """Tokens computed before the latest of these steps."""
    freed_until: int = 0
    """End of the blocks that are freed."""


class CompactManager(FullAttentionManager):  # type: ignore[misc]
    """Frees the blocks that `Retention` leaves out, one step after the last step that reads them.

    Kept tokens move into blocks of their request only. These blocks are never hashed, and no prompt hits blocks of
    other requests in this range. Freed blocks with a hash stay in the prefix cache until the pool needs them.
    """

    kv_cache_spec: CompactSpec

    def __init__(self, kv_cache_spec: CompactSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self._running: dict[str, _Running] = {}
        self._requests: dict[str, Request] = {}
        first = _first_groups.setdefault(self.block_pool, _FirstGroup(self.kv_cache_group_id, kv_cache_spec))
        if self.kv_cache_group_id == first.number and kv_cache_spec.is_alone:
            logger.info("compaction: %s", capacity(kv_cache_spec, self.block_pool.num_gpu_blocks))

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, *args: Any, **kwargs: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Finds the longest hit before the blocks that kept tokens will move into; see vLLM for the arguments."""
        spec: CompactSpec = kwargs["kv_cache_spec"]
        if _first_groups[kwargs["block_pool"]].number in kwargs["kv_cache_group_ids"]:
            # vLLM asks for all tokens except the last, or for fewer in whole blocks, and for none for a request with
            # output (`pop_blocks_for_free`). Layers that attend to the whole context come first, and all of them keep a
            # part. It asks later groups for at most the hit of earlier ones.
            size = kwargs["block_pool"].hash_block_size
            hashed = len(block_hashes) * size
            is_whole = max_length >= hashed and max_length % size
            prompts = [max_length + 1] if is_whole else range(hashed, hashed + size)
            # The hit is clipped for all classes: a class that keeps a whole prompt could hit blocks that others write.
            longest = (each.longest_hit(tokens, spec.block_size) for each in spec.of_model for tokens in prompts)
            max_length = min(max_length, *longest)
        found: tuple[tuple[list[KVCacheBlock], ...], int] = super().find_longest_cache_hit(
            block_hashes, max_length, *args, **kwargs
        )
        return found

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Hashes the blocks whose contents do not change and depend only on the tokens."""
        self._requests[request.request_id] = request
        prompt_tokens = self._running_of(request.request_id, request.num_prompt_tokens).prompt_tokens
        shared = self.kv_cache_spec.retention.shared_tokens(prompt_tokens, self.block_size)
        super().cache_blocks(request, min(num_tokens, shared), *args, **kwargs)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Frees the blocks that no later step reads.

        Args:
            request_id: the request.
            processed_computed_tokens: tokens computed by finished steps.
            num_prompt_tokens: P.
        """
        if num_prompt_tokens is None or request_id not in self.req_to_blocks:
            return
        running, processed = self._running_of(request_id, num_prompt_tokens), processed_computed_tokens
        if processed > running.processed:
            running = running._replace(before=running.processed, processed=processed)
            self._running[request_id] = running
        retention = self.kv_cache_spec.retention
        # A step may still read the tokens that it moves when it begins, and no step after it reads them. The latest
        # finished step began at `before`.
        context = processed if retention.slides else running.before + 1
        if context < running.prompt_tokens + (not retention.slides):
            return
        left_out = retention.left_out(running.prompt_tokens, context, self.block_size)
        first = max(left_out.start, running.freed_until)
        if left_out.stop <= first:
            return
        self._remove_blocks_in_range(request_id, first, left_out.stop)
        count_freed_blocks(left_out.stop - first, is_first=not running.freed_until)
        self._running[request_id] = running._replace(freed_until=left_out.stop)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Removes a request that ends or is preempted, and returns its blocks."""
        running, request = self._running.pop(request_id, None), self._requests.pop(request_id, None)
        if running is not None and request is not None:
            # The first output may still be in flight.
            is_behind = request.num_output_tokens > 0 or request.num_computed_tokens >= running.prompt_tokens
            if is_behind and self.kv_cache_spec.retention.moves(running.prompt_tokens, self.block_size):
                # After a preemption, vLLM looks for a hit of prompt and output together. This hit may reach blocks
                # hashed by a longer prompt, where the kept tokens of this request will move.
                request.skip_reading_prefix_cache = True
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks

    def _running_of(self, request_id: str, prompt_tokens: int) -> _Running:
        """Returns the record of a request. P of a running request does not grow."""
        return self._running.setdefault(request_id, _Running(prompt_tokens))


class BesideManager(SlidingWindowManager):  # type: ignore[misc]
    """Shares the blocks of prompts, and keeps those that a clipped hit needs.

    Decoded tokens attend to what other layers keep, so their keys differ from those of a prompt with the same tokens.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompt_tokens: dict[str, int] = {}

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Hashes blocks of the prompt; of these vLLM leaves out blocks that no hit needs."""
        # P of a running request does not grow.
        prompt_tokens = self._prompt_tokens.setdefault(request.request_id, request.num_prompt_tokens)
        spec = _first_groups[self.block_pool].spec
        shared = min(retention.shared_tokens(prompt_tokens, spec.block_size) for retention in spec.of_model)
        if shared < prompt_tokens:
            # vLLM expects the next hit to end where the prompt does.
            kwargs["replay_boundaries"] = (shared,)
        super().cache_blocks(request, min(num_tokens, prompt_tokens), *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Removes a request that ends or is preempted, and returns its blocks."""
        self._prompt_tokens.pop(request_id, None)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks


def compacted(spec: AttentionSpec, retention: Retention) -> AttentionSpec:
    """Returns a specification that keeps a part of each prompt.

    Args:
        spec: of a layer. Returned unchanged if it already keeps a part, or if the layer attends only to a window.
        retention: what the layer keeps.
    """
    if type(spec) is not FullAttentionSpec:
        return spec
    made: CompactSpec = replace_as(spec, CompactSpec, retention=retention)
    return made


def capacity(spec: CompactSpec, num_blocks: int) -> str:
    """Returns a sentence on how many requests of some prompt lengths fit the cache at once.

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
    """Returns the specifications of a model's layers, each with its budget if layers share one, and those of layers
    beside them.

    Args:
        specs: by layer name, in the order of the model.
    """
    compact = {name: spec for name, spec in specs.items() if isinstance(spec, CompactSpec)}
    if not compact:
        return specs
    retentions = next(iter(compact.values())).retention.of_layers(len(compact))
    classes = tuple(dict.fromkeys(retentions))
    is_alone = len(compact) == len(specs)
    spreading = {
        name: replace_as(spec, BesideSpec) for name, spec in specs.items() if type(spec) is SlidingWindowSpec
    } | {
        name: replace(spec, retention=retention, classes=classes, is_alone=is_alone)
        for (name, spec), retention in zip(compact.items(), retentions, strict=True)
    }
    return {name: spreading.get(name, spec) for name, spec in specs.items()}


def _register() -> None:
    # vLLM must register its own specifications before the first foreign one. Otherwise a worker never has them.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(CompactSpec, CompactManager, uniform_type_base_spec=CompactSpec)
    KVCacheSpecRegistry.register(BesideSpec, BesideManager, uniform_type_base_spec=SlidingWindowSpec)


_register()
