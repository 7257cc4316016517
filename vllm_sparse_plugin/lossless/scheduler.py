"""Decides on a GPU which requests draft in a step, and how many tokens. vLLM schedules drafts before they exist."""

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
"""Consecutive steps with one length. A step verifies the drafts of the step before, so only the second has both."""


class PacedScheduler(AsyncScheduler):  # type: ignore[misc]
    """vLLM's scheduler with placeholders of one length for the requests that draft, and none for other requests.

    A placeholder is a draft that the current step will make and the next step verifies.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        backend = compat.chosen_backend(self.vllm_config, BACKENDS)
        assert backend is not None
        rule = resolved(self.vllm_config, BACKENDS[backend]).draft_rule
        assert rule is not None
        self.rule: DraftRule = rule
        self.lengths = StepLengths(self, rule) if rule.is_adaptive else None
        # With this table vLLM adds no placeholders to new requests; its zeros add none to other requests.
        self.dynamic_sd_lookup = [0] * (self.scheduler_config.max_num_seqs + 1)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Also gives placeholders to the requests that draft after this step. The argument is vLLM's."""
        super()._update_after_schedule(scheduler_output)
        scheduled = [self.requests[name] for name in scheduler_output.num_scheduled_tokens]
        drafting = [request for request in scheduled if self._drafts(request)]
        length = self.rule.draft_tokens if drafting else 0
        if self.lengths is not None:
            length = self.lengths.choose(bool(drafting))
        scheduler_output.num_spec_tokens_to_schedule = length
        for request in drafting:
            request.spec_token_ids = [-1] * length

    def _drafts(self, request: Any) -> bool:
        """Returns whether a scheduled request drafts after this step."""
        if request.is_prefill_chunk or not self.rule.covers(request.num_tokens + 1):
            return False
        # At the longest context vLLM would cut drafts off, and the requests of the step would differ in width.
        return bool(request.num_computed_tokens + self.rule.draft_tokens + 2 <= self.max_model_len)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Also reports the finished step. The arguments are vLLM's."""
        if self.lengths is not None:
            self.lengths.observe(scheduler_output, model_runner_output, time.perf_counter())
        return super().update_from_output(scheduler_output, model_runner_output)


class StepLengths:
    """Chooses how many tokens each step drafts, for adaptive lengths."""

    def __init__(self, scheduler: AsyncScheduler, rule: DraftRule) -> None:
        """Takes the scheduler, and the rule for the requests that draft."""
        self.scheduler, self.rule = scheduler, rule
        self.pace = DraftPace(rule.step_lengths)
        self._chosen, self._held = 0, _HOLD
        self._requests: set[str] = set()
        self._began = 0.0

    def choose(self, drafts: bool) -> int:
        """Returns how many tokens the scheduled step drafts; 0 unless `drafts`."""
        if not drafts:
            # Times of contexts that are too short do not apply to others.
            self._held = _HOLD
            return 0
        if self._held == _HOLD:
            load = Load.of(request.num_tokens for request in self.scheduler.running)
            self._chosen, self._held = self.pace.choose(load), 0
        self._held += 1
        return self._chosen

    def observe(self, scheduled: SchedulerOutput, output: ModelRunnerOutput, now: float) -> None:
        """Records the result of a step and the time of its end, in seconds."""
        drafts, requests = scheduled.scheduled_spec_decode_tokens, self.scheduler.requests
        made = dict(zip(output.req_ids, map(len, output.sampled_token_ids or ()), strict=False))
        drafted_for = [name for name in made if name in requests and self.rule.covers(requests[name].num_tokens)]
        for name in drafted_for:
            if drafts.get(name) and made[name]:
                self.pace.observe_drafts(len(drafts[name]), made[name] - 1)
        verified = {len(drafts.get(name, ())) for name in drafted_for}
        same = verified == {scheduled.num_spec_tokens_to_schedule} and self._requests == made.keys()
        # If a request ended during the step, its context is unknown, and so is the load of the step.
        if same and made.keys() <= requests.keys() and all(made.values()):
            load = Load.of(requests[name].num_tokens for name in made)
            self.pace.observe_step(verified.pop(), now - self._began, load)
            live.record_gain(self.pace.gain(load))
        self._requests, self._began = set(made), now
