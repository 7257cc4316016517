"""vLLM's scheduler with the plugin's draft lengths. A clock and a model replace a GPU."""

from types import SimpleNamespace

import pytest
from support.engines import MODEL
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import KVCacheConfig, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import vllm_sparse_plugin
from vllm_sparse_plugin.lossless.scheduler import PacedScheduler
from vllm_sparse_plugin.metrics import live

DRAFTS, SHORTEST, BLOCK = 8, 100, 16


def make_scheduler(length="adaptive", shortest=SHORTEST, longest=4096, **arguments):
    vllm_sparse_plugin.register()
    lossless = {"draft_tokens": DRAFTS, "min_context_tokens": shortest, "draft_length": length}
    settings = {"lossless": lossless, "min_context_tokens": 0, "selection": {"budget_tokens": 64}}
    config = EngineArgs(
        model=str(MODEL),
        attention_backend="unique",
        additional_config={"sparse_attention": settings},
        max_model_len=longest,
        max_num_seqs=4,
        enforce_eager=True,
        **{"enable_prefix_caching": False} | arguments,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = 600
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=config.model_config.dtype)
    cache = KVCacheConfig(600, [], [KVCacheGroupSpec(["layer"], spec)])
    return PacedScheduler(config, cache, StructuredOutputManager(config), block_size=BLOCK)


@pytest.fixture
def scheduler(monkeypatch):
    monkeypatch.setattr(live, "record_gain", lambda gain: None)
    return make_scheduler()


class Engine:
    """Steps that take one second plus `cost` per draft token, for a model that accepts all drafts or none."""

    def __init__(self, scheduler, cost, accepts, monkeypatch):
        self.scheduler, self.cost, self.accepts = scheduler, cost, accepts
        self.now, self.latest = 0.0, 0
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr("vllm_sparse_plugin.lossless.scheduler.time", clock)

    def ask(self, name, context):
        sampling = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
        self.scheduler.add_request(Request(name, list(range(context)), sampling, None))

    def run(self, steps, leaves=None):
        """Return the scheduled draft lengths, and tokens per second.

        `leaves` is a request that ends during the last step.
        """
        lengths, tokens, begin = [], 0, self.now
        for step in range(steps):
            output = self.scheduler.schedule()
            drafted = output.scheduled_spec_decode_tokens
            length = output.num_spec_tokens_to_schedule
            assert all(len(drafts) == self.latest for drafts in drafted.values())
            lengths.append(length)
            self.latest = length
            self.now += 1 + self.cost * length
            made = []
            for name in output.num_scheduled_tokens:
                request = self.scheduler.requests[name]
                count = 0 if request.is_prefill_chunk else 1 + self.accepts * len(drafted.get(name, ()))
                made.append([5] * count)
                tokens += count
            names = list(output.num_scheduled_tokens)
            places = {name: place for place, name in enumerate(names)}
            if step == steps - 1 and leaves is not None:
                self.scheduler.finish_requests(leaves, RequestStatus.FINISHED_ABORTED)
            self.scheduler.update_from_output(output, ModelRunnerOutput(names, places, made))
        return lengths, tokens / (self.now - begin)


@pytest.mark.parametrize(
    ("cost", "accepts", "best"),
    [(0.05, True, DRAFTS), (0.05, False, 0), (2.0, True, 0)],
    ids=["right", "wrong", "dear"],
)
def test_drafts_are_made_where_they_pay(scheduler, monkeypatch, cost, accepts, best):
    engine = Engine(scheduler, cost, accepts, monkeypatch)
    engine.ask("a", 500)
    engine.ask("b", 300)
    engine.run(60)
    lengths, rate = engine.run(60)
    assert lengths.count(best) > 50
    assert rate > 0.95 * 2 * (1 + accepts * best) / (1 + cost * best)


def test_nothing_is_drafted_while_all_contexts_are_short(scheduler, monkeypatch):
    engine = Engine(scheduler, 0.05, True, monkeypatch)
    engine.ask("short", SHORTEST - 20)
    lengths, _ = engine.run(15)
    assert set(lengths) == {0}
    engine.ask("long", 300)
    lengths, _ = engine.run(40)
    assert lengths.count(DRAFTS) > 30


@pytest.mark.parametrize("steps", range(20, 24))
def test_a_request_may_end_while_a_step_with_it_is_under_way(scheduler, monkeypatch, steps):
    engine = Engine(scheduler, 0.05, True, monkeypatch)
    engine.ask("a", 500)
    engine.ask("b", 300)
    engine.run(steps, leaves="a")
    assert list(scheduler.requests) == ["b"]
    lengths, _ = engine.run(40)
    assert lengths.count(DRAFTS) > 30


def drafts_by_step(scheduler, contexts, steps, accepts=0, ahead=1, tokens=3000):
    """The drafts of each request in each step of vLLM's scheduler, which is `ahead` steps in front of the model.

    `accepts` is how many drafts the model accepts.
    """
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    for name, context in contexts.items():
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        scheduler.add_request(Request(name, list(range(context)), sampling, None, block_hasher=hasher))
    return run_ahead(scheduler, steps, accepts, ahead)


def run_ahead(scheduler, steps, accepts, ahead):
    """The same for the requests that the scheduler has."""
    found, under_way = [], []
    for _ in range(steps):
        output = scheduler.schedule()
        drafts = {name: len(output.scheduled_spec_decode_tokens.get(name, ())) for name in output.num_scheduled_tokens}
        found.append(drafts)
        if drafts:
            names = list(drafts)
            made = [[5] * (1 + min(accepts, drafts[name])) for name in names]
            places = {name: place for place, name in enumerate(names)}
            under_way.append((output, ModelRunnerOutput(names, places, made)))
        while len(under_way) > (ahead if drafts else 0):
            scheduler.update_from_output(*under_way.pop(0))
    return found


@pytest.mark.parametrize("ahead", [0, 1])
def test_with_a_fixed_length_only_requests_that_are_drafted_for_have_placeholders(ahead):
    scheduler = make_scheduler("fixed")
    steps = drafts_by_step(scheduler, {"short": 40, "long": 300}, 20, ahead=ahead)
    assert steps[0] == {"short": 0, "long": 0}
    assert steps[1:] == [{"short": 0, "long": DRAFTS}] * 19


@pytest.mark.parametrize("length", ["fixed", "adaptive"])
def test_where_no_request_is_drafted_for_no_step_drafts(monkeypatch, length):
    monkeypatch.setattr(live, "record_gain", lambda gain: None)
    scheduler = make_scheduler(length)
    scheduled = []
    schedule = scheduler.schedule
    monkeypatch.setattr(scheduler, "schedule", lambda: scheduled.append(schedule()) or scheduled[-1])
    assert drafts_by_step(scheduler, {"a": 40, "b": 20}, 10) == [{"a": 0, "b": 0}] * 10
    assert {output.num_spec_tokens_to_schedule for output in scheduled} == {0}


def test_a_context_that_grows_long_enough_is_drafted_for():
    steps = drafts_by_step(make_scheduler("fixed"), {"a": SHORTEST - 10}, 20, ahead=0)
    # The prompt's step makes the first token; the step that makes the tenth drafts.
    assert [step["a"] for step in steps] == [0] * 10 + [DRAFTS] * 10


def test_a_context_that_a_draft_reads_whole_is_not_drafted_for():
    steps = drafts_by_step(make_scheduler("fixed", shortest=0), {"whole": 40, "more": 72}, 10, ahead=0)
    assert steps[1:] == [{"whole": 0, "more": DRAFTS}] * 9


@pytest.mark.parametrize("accepts", [0, 3, DRAFTS])
@pytest.mark.parametrize("ahead", [0, 1])
def test_no_draft_is_cut_off_at_the_longest_context(ahead, accepts):
    scheduler = make_scheduler("fixed", longest=512)
    steps = drafts_by_step(scheduler, {"a": 480}, 60, accepts, ahead)
    drafted = [step["a"] for step in steps if step]
    assert set(drafted) == {0, DRAFTS}
    assert drafted[-1] == 0
    assert not scheduler.requests


def test_a_request_that_hits_the_prefix_cache_has_no_placeholders_in_its_first_step():
    scheduler = make_scheduler("fixed", enable_prefix_caching=True)
    drafts_by_step(scheduler, {"first": 33}, 5, tokens=1)
    assert not scheduler.requests
    (step,) = drafts_by_step(scheduler, {"again": 33}, 1)
    assert scheduler.requests["again"].num_computed_tokens == 33
    assert step == {"again": 0}


def test_steps_are_timed_where_some_requests_are_not_drafted_for(scheduler, monkeypatch):
    engine = Engine(scheduler, 0.05, False, monkeypatch)
    engine.ask("short", 20)
    engine.ask("long", 300)
    engine.run(40)
    lengths, _ = engine.run(40)
    assert lengths.count(0) > 30


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("tokens", [3, 10, 12])
def test_the_next_input_of_a_session_begins_where_its_answer_ends(tokens, ahead):
    """The answer ends within a draft, all of which the model accepts. vLLM drops the last token of an answer."""
    scheduler = make_scheduler(length="fixed")
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    scheduler.add_request(Request("a", list(range(200)), sampling, None, resumable=True))
    run_ahead(scheduler, 12, accepts=DRAFTS, ahead=ahead)
    request = scheduler.requests["a"]
    assert request.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    assert (request.num_tokens, request.num_computed_tokens) == (200 + tokens, 199 + tokens)
