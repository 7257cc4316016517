"""Draws the events of an engine, step by step, and runs vLLM's scheduler on them."""

import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from unittest import mock

from sparse_kernels.sparse_decode import reference as decode_reference
from support.families.referee import JudgementError, checked_scores
from support.state_fuzz.cases import MAX_MODEL_LEN, Case
from support.state_fuzz.kept import KeptError
from support.state_fuzz.truth import VOCABULARY
from support.state_fuzz.worker import FaultError, Worker
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

EVENTS = (
    "requests", "finished", "chunks", "decodes", "hits", "hit_blocks", "preemptions", "resumptions", "aborts",
    "aborts_in_flight", "drafted", "rejected", "sleeps", "pages", "judged_rows", "sparse_rows", "copies", "evictions",
)  # fmt: skip
"""Names of the counters."""
_ABORT, _ABORT_IN_FLIGHT, _SLEEP = 0.01, 0.01, 0.005
"""Probabilities of these events in a step."""


class Fuzz:
    """One seed: an engine without a model, with random clients."""

    def __init__(self, seed: int, case: Case | None = None) -> None:
        """Makes vLLM's scheduler and the layer under test; draws the settings unless they are given."""
        self.case = case or Case.draw(seed)
        self.rng = random.Random(f"schedule {seed}")
        self.steps = 0
        config = self.case.vllm_config()
        self.worker = Worker(self.case, config, seed)
        group = KVCacheGroupSpec([self.worker.layer.name], self.worker.layer.spec)
        self.scheduler = (AsyncScheduler if self.case.is_async else Scheduler)(
            config, KVCacheConfig(self.case.num_blocks, [], [group]), StructuredOutputManager(config),
            block_size=self.case.block_size,
        )  # fmt: skip
        self.hasher = None
        if self.case.prefix_cache:
            digest = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
            init_none_hash(digest)
            self.hasher = get_request_block_hasher(self.case.block_size, digest)
        self.prefixes = [self._tokens(MAX_MODEL_LEN // 2) for _ in range(3)]
        self.asked = 0
        self.in_flight: deque[tuple[SchedulerOutput, list[tuple[str, list[int]]]]] = deque()
        """Steps whose tokens the scheduler does not know yet, and those tokens by request."""

    def run(self, steps: int) -> Counter[str]:
        """Runs steps, then frees everything; returns how often each event happened.

        Raises:
            FaultError: names the first fault, and its step.
        """
        with mock.patch.object(decode_reference, "score_pages", checked_scores):
            try:
                while self.steps < steps:
                    self.step()
                self._finish()
            except (FaultError, JudgementError, KeptError) as error:
                raise FaultError(f"step {self.steps} of {self.case}: {error}") from error
        return self.worker.counts

    def step(self) -> None:
        """Draws events, and runs the step of the scheduler."""
        counts, scheduler = self.worker.counts, self.scheduler
        self._clients()
        output = scheduler.schedule()
        if output.kv_cache_block_copies or output.new_block_ids_to_zero:
            raise FaultError("vLLM copies or clears blocks, which this worker does not do")
        counts["preemptions"] += len(output.preempted_req_ids or ())
        unknown = {name: new for _, results in self.in_flight for name, new in results if new}
        self.steps += output.total_num_scheduled_tokens > 0
        self.worker.step(output, scheduler.requests, unknown)
        self.in_flight.append((output, list(self._sample(output, unknown))))
        if self.rng.random() < _ABORT_IN_FLIGHT:
            self._abort("aborts_in_flight")
        while len(self.in_flight) > (self.case.is_async and output.total_num_scheduled_tokens > 0):
            self._deliver()

    def _deliver(self) -> None:
        """Gives the scheduler the tokens of the oldest step in flight."""
        counts, scheduler = self.worker.counts, self.scheduler
        output, results = self.in_flight.popleft()
        names = [name for name, _ in results]
        before = len(scheduler.requests)
        scheduler.update_from_output(
            output, ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, [new for _, new in results])
        )
        counts["finished"] += before - len(scheduler.requests)
        if self.case.drafts:
            drafts = [self._tokens(self.rng.randint(0, self.case.drafts)) for _ in names]
            scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _clients(self) -> None:
        """Sends requests, disconnects, or lets the engine sleep."""
        rng, scheduler = self.rng, self.scheduler
        waiting = len(scheduler.requests) - len(scheduler.running)
        if not scheduler.requests or (waiting < 3 and rng.random() < 0.5):
            self._ask()
        if rng.random() < _ABORT:
            self._abort("aborts")
        if rng.random() < _SLEEP:
            # vLLM ends the steps in flight, preempts running requests, clears the prefix cache, and has other memory
            # contents after it wakes.
            while self.in_flight:
                self._deliver()
            self.worker.counts["sleeps"] += 1
            scheduler.reset_prefix_cache(reset_running_requests=True)
            self.worker.poison(range(self.case.num_blocks))

    def _ask(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.prefixes)[: rng.choice((0, 0, 40, 130, 200, 256))]
        prompt = prompt + self._tokens(rng.choice((1, 7, 8, 33, 100)))
        room = MAX_MODEL_LEN - len(prompt) - 1
        answer = min(room, rng.choice((1, 5, 30, 100, 250)))
        sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        # vLLM makes a request of each of the `n` answers to a prompt.
        copies = rng.choice((1, 1, 1, 3))
        self.worker.counts["copies"] += copies - 1
        for _ in range(copies):
            self.asked += 1
            self.scheduler.add_request(Request(f"r{self.asked}", prompt, sampling, None, block_hasher=self.hasher))
            self.worker.counts["requests"] += 1

    def _abort(self, kind: str) -> None:
        if self.scheduler.requests:
            name = self.rng.choice(list(self.scheduler.requests))
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.worker.counts[kind] += 1

    def _sample(self, output: SchedulerOutput, unknown: Mapping[str, list[int]]) -> Iterator[tuple[str, list[int]]]:
        """The new tokens of each request of a step: accepted drafts, and one more.

        Args:
            output: the step.
            unknown: tokens of earlier steps that the scheduler does not know yet, by request.
        """
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            drafts = output.scheduled_spec_decode_tokens.get(name, [])
            # The scheduler has already counted the step's tokens.
            if request.num_computed_tokens - len(drafts) < request.num_tokens + len(unknown.get(name, ())):
                yield name, []
                continue
            accepted = self.rng.randint(0, len(drafts))
            self.worker.counts["drafted"] += len(drafts)
            self.worker.counts["rejected"] += len(drafts) - accepted
            assert count > len(drafts)
            yield name, [*drafts[:accepted], *self._tokens(1)]

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def _finish(self) -> None:
        """Aborts the remaining requests. The pool must then be complete."""
        while self.in_flight:
            self._deliver()
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if free != self.case.num_blocks - 1:
            raise FaultError(f"{self.case.num_blocks - 1 - free} blocks are not free when nothing runs")
