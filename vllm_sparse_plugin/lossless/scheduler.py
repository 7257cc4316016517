"""Says how many tokens a step drafts on a GPU, where vLLM schedules drafts before they are made."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_sparse_plugin import compat
from vllm_sparse_plugin.config import DraftRule
from vllm_sparse_plugin.engine_settings import resolved
from vllm_sparse_plugin.lossless.pace import DraftPace, Load
from vllm_sparse_plugin.metrics import live
from vllm_sparse_plugin.names import BACKENDS

_HOLD = 2
"""Steps in a row with one length: a step verifies what the one before it has drafted, so the second has both."""


class PacedScheduler(AsyncScheduler):  # type: ignore[misc]
    """vLLM's scheduler, which looks up here how many tokens each step drafts: one number for all of its requests."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        backend = compat.chosen_backend(self.vllm_config, BACKENDS)
        assert backend is not None
        rule = resolved(self.vllm_config, BACKENDS[backend]).draft_rule
        assert rule is not None
        table: list[int] = self.dynamic_sd_lookup
        self.lengths = StepLengths(self, rule, sorted(set(table[1:])))
        self.dynamic_sd_lookup: Any = self.lengths

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Takes what a step has made; arguments are vLLM's."""
        self.lengths.observe(scheduler_output, model_runner_output, time.perf_counter())
        return super().update_from_output(scheduler_output, model_runner_output)


class StepLengths:
    """What a scheduler finds in place of its table of lengths by the number of requests."""

    def __init__(self, scheduler: AsyncScheduler, rule: DraftRule, lengths: list[int]) -> None:
        """Takes the scheduler, who is drafted for, and the lengths that have graphs."""
        self.scheduler, self.rule = scheduler, rule
        self.pace = DraftPace(lengths)
        self._chosen, self._held = 0, _HOLD
        self._requests: set[str] = set()
        self._began = 0.0

    def __getitem__(self, count: int) -> int:
        """Returns how many tokens to draft in the step that is being scheduled."""
        if not any(self._gains(request) for request in self.scheduler.running):
            # Contexts that are too short say nothing about others.
            self._held = _HOLD
            return 0
        if self._held == _HOLD:
            load = Load.of(request.num_tokens for request in self.scheduler.running)
            self._chosen, self._held = self.pace.choose(load), 0
        self._held += 1
        return self._chosen

    def _gains(self, request: Any) -> bool:
        """Returns whether a request is drafted for, as far as the scheduler knows its length."""
        return bool(request.num_tokens >= self.rule.min_context_tokens)

    def observe(self, scheduled: SchedulerOutput, output: ModelRunnerOutput, now: float) -> None:
        """Takes what a step has made, and when it was done."""
        drafts = scheduled.scheduled_spec_decode_tokens
        made = dict(zip(output.req_ids, map(len, output.sampled_token_ids or ()), strict=False))
        drafted_for = {
            name for name in made if name in self.scheduler.requests and self._gains(self.scheduler.requests[name])
        }
        for name in drafted_for & drafts.keys():
            if drafts[name] and made[name]:
                self.pace.observe_drafts(len(drafts[name]), made[name] - 1)
        verified = {len(drafts.get(name, ())) for name in made}
        same = verified == {scheduled.num_spec_tokens_to_schedule} and self._requests == made.keys()
        # A request that ended while the step was under way is unknown, and so is what the step had to do.
        same = same and made.keys() <= self.scheduler.requests.keys()
        if same and drafted_for and all(made.values()):
            load = Load.of(self.scheduler.requests[name].num_tokens for name in made)
            self.pace.observe_step(verified.pop(), now - self._began, load)
            live.record_gain(self.pace.gain(load))
        self._requests, self._began = set(made), now
