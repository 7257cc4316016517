"""vLLM's scheduler with the plugin's draft lengths. A clock and a model replace a GPU."""

from types import SimpleNamespace

import pytest
from support.engines import MODEL
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import KVCacheConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import vllm_sparse_plugin
from vllm_sparse_plugin.lossless.scheduler import PacedScheduler
from vllm_sparse_plugin.lossless.speculation import lengths_of
from vllm_sparse_plugin.metrics import live

DRAFTS, SHORTEST, BLOCK = 8, 100, 16


@pytest.fixture
def scheduler(monkeypatch):
    monkeypatch.setattr(live, "record_gain", lambda gain: None)
    vllm_sparse_plugin.register()
    lossless = {"draft_tokens": DRAFTS, "min_context_tokens": SHORTEST, "draft_length": "adaptive"}
    settings = {"lossless": lossless, "min_context_tokens": 0, "selection": {"budget_tokens": 64}}
    config = EngineArgs(
        model=str(MODEL),
        attention_backend="unique",
        additional_config={"sparse_attention": settings},
        max_model_len=4096,
        max_num_seqs=4,
        enable_prefix_caching=False,
        enforce_eager=True,
    ).create_engine_config()
    lengths = lengths_of(DRAFTS, 4)
    config.speculative_config.num_speculative_tokens_per_batch_size = [
        (requests, requests, length) for requests, length in enumerate(lengths, start=1)
    ]
    config.cache_config.num_gpu_blocks = 600
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=config.model_config.dtype)
    cache = KVCacheConfig(600, [], [KVCacheGroupSpec(["layer"], spec)])
    return PacedScheduler(config, cache, StructuredOutputManager(config), block_size=BLOCK)


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


def test_the_lengths_are_none_the_longest_and_powers_of_two_as_far_as_there_is_room():
    assert [lengths_of(8, requests) for requests in (1, 2, 3, 9)] == [[8], [0, 8], [0, 4, 8], [0, 2, 4, 6, 8]]
    assert lengths_of(5, 9) == [0, 1, 2, 3, 5]
    assert lengths_of(1, 9) == [0, 1]
