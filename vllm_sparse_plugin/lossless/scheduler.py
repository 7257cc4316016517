"""Says for which requests a step drafts on a GPU, and how many tokens: vLLM schedules drafts before they are made."""

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
    """vLLM's scheduler, which verifies drafts of one length in the requests that are drafted for, and none in others.

    A placeholder is a draft that the next step verifies, and that the current step has yet to make.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        backend = compat.chosen_backend(self.vllm_config, BACKENDS)
        assert backend is not None
        rule = resolved(self.vllm_config, BACKENDS[backend]).draft_rule
        assert rule is not None
        self.rule: DraftRule = rule
        self.lengths = StepLengths(self, rule) if rule.is_adaptive else None
        # With a table vLLM adds no placeholders to new requests, and with zeros none to others.
        self.dynamic_sd_lookup = [0] * (self.scheduler_config.max_num_seqs + 1)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Also gives placeholders to the requests of a step that are drafted for at its end; the argument is vLLM's."""
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
        """Returns whether a request of the step that has been scheduled is drafted for at its end."""
        if request.is_prefill_chunk or not self.rule.covers(request.num_tokens + 1):
            return False
        # vLLM would cut drafts off at the longest context, and the step would have requests of unlike widths.
        return bool(request.num_computed_tokens + self.rule.draft_tokens + 2 <= self.max_model_len)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Takes what a step has made; arguments are vLLM's."""
        if self.lengths is not None:
            self.lengths.observe(scheduler_output, model_runner_output, time.perf_counter())
        return super().update_from_output(scheduler_output, model_runner_output)


class StepLengths:
    """Chooses how many tokens each step drafts for its requests, where the length adapts."""

    def __init__(self, scheduler: AsyncScheduler, rule: DraftRule) -> None:
        """Takes the scheduler, and who is drafted for."""
        self.scheduler, self.rule = scheduler, rule
        self.pace = DraftPace(rule.step_lengths)
        self._chosen, self._held = 0, _HOLD
        self._requests: set[str] = set()
        self._began = 0.0

    def choose(self, drafts: bool) -> int:
        """Returns how many tokens the step that has been scheduled drafts; `drafts` says whether it may draft any."""
        if not drafts:
            # Contexts that are too short say nothing about others.
            self._held = _HOLD
            return 0
        if self._held == _HOLD:
            load = Load.of(request.num_tokens for request in self.scheduler.running)
            self._chosen, self._held = self.pace.choose(load), 0
        self._held += 1
        return self._chosen

    def observe(self, scheduled: SchedulerOutput, output: ModelRunnerOutput, now: float) -> None:
        """Takes what a step has made, and when it was done."""
        drafts, requests = scheduled.scheduled_spec_decode_tokens, self.scheduler.requests
        made = dict(zip(output.req_ids, map(len, output.sampled_token_ids or ()), strict=False))
        drafted_for = [name for name in made if name in requests and self.rule.covers(requests[name].num_tokens)]
        for name in drafted_for:
            if drafts.get(name) and made[name]:
                self.pace.observe_drafts(len(drafts[name]), made[name] - 1)
        verified = {len(drafts.get(name, ())) for name in drafted_for}
        same = verified == {scheduled.num_spec_tokens_to_schedule} and self._requests == made.keys()
        # A request that ended while the step was under way is unknown, and so is what the step had to do.
        if same and made.keys() <= requests.keys() and all(made.values()):
            load = Load.of(requests[name].num_tokens for name in made)
            self.pace.observe_step(verified.pop(), now - self._began, load)
            live.record_gain(self.pace.gain(load))
        self._requests, self._began = set(made), now
