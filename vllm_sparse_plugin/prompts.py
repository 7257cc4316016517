"""vLLM's schedulers with prompts that are cut at fixed positions, for sparse prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_sparse_plugin import compat
from vllm_sparse_plugin.config.cuts import PromptCuts
from vllm_sparse_plugin.engine_settings import resolved
from vllm_sparse_plugin.engine_traits import room_for_prompts
from vllm_sparse_plugin.names import BACKENDS

if TYPE_CHECKING:
    from vllm.v1.request import Request


class _Cutting:
    """Cuts prompts as `PromptCuts` says. Where all tokens of a chunk choose together, requests share whole chunks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scheduler: Any = self
        config = scheduler.vllm_config
        prefill = resolved(config, BACKENDS[compat.chosen_backend(config, BACKENDS) or ""]).prefill
        assert prefill is not None
        room = room_for_prompts(config)
        self.cuts = PromptCuts.of(prefill, room, scheduler.block_size, 1 + scheduler.num_spec_tokens)
        if self.cuts.together:
            self._share_whole_chunks(scheduler.kv_cache_manager.coordinator)

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """vLLM calls it last when it decides how many tokens of a request a step computes."""
        new: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)  # type: ignore[misc]
        end, prompt = num_computed_tokens + new, request.num_prompt_tokens
        # Beyond its known tokens a request has places for drafts.
        if num_computed_tokens >= prompt or end > request.num_tokens:
            return new
        return self.cuts.end(num_computed_tokens, end, prompt) - num_computed_tokens

    def _share_whole_chunks(self, coordinator: Any) -> None:
        find, cache, cuts = coordinator.find_longest_cache_hit, coordinator.cache_blocks, self.cuts

        def find_longest_cache_hit(block_hashes: Any, max_cache_hit_length: int) -> Any:
            most = cuts.shared(max_cache_hit_length)
            # Layers of other kinds have their own hits, so a shorter hit is looked up again.
            while (found := find(block_hashes, most))[1] % cuts.every:
                most = cuts.shared(found[1])
            return found

        def cache_blocks(request: Request, num_computed_tokens: int) -> None:
            cache(request, min(num_computed_tokens, cuts.shared(request.num_prompt_tokens)))

        coordinator.find_longest_cache_hit, coordinator.cache_blocks = find_longest_cache_hit, cache_blocks


class CuttingScheduler(_Cutting, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler."""


class CuttingAsyncScheduler(_Cutting, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler."""
