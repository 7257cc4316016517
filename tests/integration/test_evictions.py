"""Evictions while requests decode: in one attention layer on a CPU, against loops over tokens, and in engines."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from sparse_kernels.batch import Softmax
from sparse_kernels.page_statistics import update_page_statistics
from support.bare_layer import LayerBatch
from support.engines import run_engine, save_shallow
from support.layer import LayerHarness, Request
from support.paged import dense_attention
from support.snapkv import votes_of
from vllm.config import set_current_vllm_config
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_sparse_plugin.evictions import COMPACTIONS, Compaction
from vllm_sparse_plugin.requests.rows import building, preempt

DENSE_TOLERANCE = 2e-2
"""vLLM's CPU kernel rounds probabilities to bfloat16; outputs here are averages of unit normals."""
BLOCK, HEADS = 32, 2
SHARED = {"budget_tokens": 96, "min_context_tokens": 0, "every": 40}
METHODS = {
    "snapkv": {"method": "snapkv", "window_tokens": 8, "pool_tokens": 5},
    "h2o": {"method": "h2o"},
}


def settings_of(method: str, **settings: object) -> dict:
    return METHODS[method] | SHARED | settings


def harness_of(
    model: str, compaction: dict | None, backend: str = "dense", sinks: torch.Tensor | None = None, **settings: object
) -> LayerHarness:
    always = {} if backend == "dense" else {"min_context_tokens": 0}
    settings = {"compaction": compaction} | always | settings
    learned = {} if sinks is None else {"sinks": sinks}
    return LayerHarness(model, settings=settings, backend=backend, block_size=BLOCK, num_blocks=120, **learned)


def compaction_of(settings: dict) -> Compaction:
    return COMPACTIONS.find(settings["method"])(**settings)


@dataclass
class Model:
    """What a request keeps, as lists of tokens, and what its newest tokens attend to."""

    settings: dict
    request: Request
    sinks: torch.Tensor | None = None
    """Learned sink logits of the query heads."""
    protected: frozenset[int] = frozenset()
    """Tokens that the request protects."""
    left: int = 0
    held: list[list[int]] = field(default_factory=lambda: [[] for _ in range(HEADS)])
    sums: list[dict[int, float]] = field(default_factory=lambda: [{} for _ in range(HEADS)])
    """Attention on each held token, of all queries so far."""
    queries: list[torch.Tensor] = field(default_factory=list)

    def before(self, new: int) -> None:
        """Evicts before a step of some tokens."""
        self.compaction = compaction_of(self.settings)
        retention, prompt, computed = self.compaction.retention(), self.request.prompt_tokens, len(self.request.keys)
        if computed < prompt:
            return
        left = retention.left_out(prompt, computed + 1, BLOCK).stop
        if left == self.left:
            return
        first, end = left - self.left, left - self.left + retention.kept_blocks(prompt, BLOCK)
        for head in range(HEADS):
            self.held[head] = self._kept(head, first * BLOCK, end * BLOCK)
        self.left = left

    def _kept(self, head: int, dropped: int, end: int) -> list[int]:
        held, rule = self.held[head], self.compaction.rule()
        scores = self._scores(head, held)
        newest = len(held) - max(rule.window_tokens, int(rule.recent_share * (end - dropped)))
        if rule.pool_tokens > 1:
            reach = rule.pool_tokens // 2
            scores = [max(scores[max(0, at - reach) : min(newest, at + reach + 1)]) for at in range(newest)]
            scores += [0.0] * (len(held) - newest)
        always = {*range(rule.sink_tokens), *range(newest, end)}
        always |= {at for at in range(end) if held[at] in self.protected}
        others = sorted(set(range(end)) - always, key=lambda at: (-scores[at], at))
        kept = sorted(always | set(others[: end - dropped - len(always)]))
        return [held[at] for at in kept] + held[end:]

    def _scores(self, head: int, held: list[int]) -> list[float]:
        rule = self.compaction.rule()
        if rule.every_query:
            return [self.sums[head][token] for token in held]
        query = torch.stack(self.queries[-rule.window_tokens :]).unflatten(1, (HEADS, -1))[:, head]
        softmax = Softmax(0.125, 0.0, self.sinks)
        return votes_of(query, self.request.keys[held, head], len(held) - 1, softmax, head * query.shape[1])

    def attend(self) -> torch.Tensor:
        """Attention of the newest tokens, `[new, num_heads, head_size]`; they vote and are held from now on."""
        request, outputs = self.request, []
        begin = len(request.keys) - len(request.fresh)
        for index, query in enumerate(request.fresh):
            visible = torch.zeros(HEADS, begin + index + 1, dtype=torch.bool)
            for head in range(HEADS):
                self.held[head].append(begin + index)
                visible[head, self.held[head]] = True
                of_head, held = query.unflatten(0, (HEADS, -1))[head], self.held[head]
                logits = of_head.double() @ request.keys[held, head].double().T * 0.125
                if self.sinks is not None:
                    logits = torch.cat([logits, self.sinks.double().view(HEADS, -1, 1)[head]], dim=1)
                weights = logits.softmax(dim=1)[:, : len(held)].sum(dim=0).tolist()
                for token, weight in zip(held, weights, strict=True):
                    self.sums[head][token] = self.sums[head].get(token, 0.0) + weight
            keys, values = request.keys[: begin + index + 1], request.values[: begin + index + 1]
            queries = query.unflatten(0, (HEADS, -1))
            outputs.append(dense_attention(queries, keys, values, 0.125, visible, self.sinks))
        self.queries += list(request.fresh)
        return torch.stack(outputs)


def poison(harness: LayerHarness, request: Request, left: int) -> None:
    """Fills the blocks that a request has given back with values that would spoil every output."""
    harness.cache[request.blocks[:left]] = torch.nan


def assert_follows(harness: LayerHarness, models: list[Model], steps: list[list[int]]) -> None:
    """Every token attends to what its request keeps, and to nothing that was given back."""
    given = [0] * len(models)
    for counts in steps:
        batch = [(model, new) for model, new in zip(models, counts, strict=True) if new]
        for model, new in batch:
            model.before(new)
        outputs = harness.step([(model.request, new) for model, new in batch])
        for (model, _), output in zip(batch, outputs, strict=True):
            assert (output.double() - model.attend()).abs().max() < DENSE_TOLERANCE
        for index, model in enumerate(models):
            poison(harness, model.request, model.left)
            given[index] = model.left
    assert max(given) > 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prompt", [150, 20])
def test_a_request_keeps_the_best_tokens_again_and_again(model, method, prompt):
    harness, settings = harness_of(model, settings_of(method)), settings_of(method)
    models = [Model(settings, harness.request(prompt)), Model(settings, harness.request(130))]
    assert_follows(harness, models, [[0, 60], [prompt, 70], *[[1, 1]] * 140])


class TwoLayers:
    """Takes the place of a harness's layer: beside it a second one, with the same builder and data of its own."""

    def __init__(self, harness: LayerHarness) -> None:
        self.bare, self.generator = harness.bare, harness.generator
        config, device = harness.builder.vllm_config, torch.device("cpu")
        names = [self.bare.name, "model.layers.1.self_attn.attn"]
        with set_default_torch_dtype(torch.bfloat16), set_current_vllm_config(config), building(harness):
            self.layer = Attention(
                harness.num_heads, harness.head_size, harness.layer.impl.scale, harness.num_kv_heads,
                cache_config=config.cache_config, prefix=names[1],
            )  # fmt: skip
            self.bare.builder = type(harness.builder)(self.bare.spec, names, config, device)
        harness.bare, harness.builder = self, self.bare.builder
        self.cache = harness.cache.clone()
        self.data: tuple[torch.Tensor, ...] = ()
        """Queries, keys and values of the latest step."""
        self.output = torch.empty(0)

    def step(self, batch: LayerBatch, cache: torch.Tensor, *data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        output, metadata = self.bare.step(batch, cache, *data)
        self.data = tuple(torch.randn(part.shape, generator=self.generator).bfloat16() for part in data)
        self.output = torch.empty_like(output)
        query, key, value = self.data
        self.layer.impl.do_kv_cache_update(self.layer, key, value, self.cache, batch.slots)
        self.layer.impl.forward(self.layer, query, key, value, self.cache, metadata, self.output)
        return output, metadata


@pytest.mark.parametrize("method", METHODS)
def test_each_layer_keeps_what_its_own_queries_and_keys_say(model, method):
    harness, settings = harness_of(model, settings_of(method)), settings_of(method)
    layers, request = TwoLayers(harness), harness.request(150)
    second = Request(request.blocks, request.prompt_tokens, request.keys, request.values)
    models = [Model(settings, request), Model(settings, second)]
    for new in (150, *[1] * 90):
        for each in models:
            each.before(new)
        (output,) = harness.step([(request, new)])
        second.fresh, keys, values = layers.data
        second.keys, second.values = torch.cat([second.keys, keys]), torch.cat([second.values, values])
        for each, got in zip(models, (output, layers.output), strict=True):
            assert (got.double() - each.attend()).abs().max() < DENSE_TOLERANCE
    assert models[0].held != models[1].held
    assert models[0].left > 2


@pytest.mark.parametrize("method", ["snapkv", "h2o"])
def test_learned_sinks_take_their_share_of_the_votes(model, method):
    """The query heads of a KV head have unlike sinks, so their votes have unlike weights."""
    sinks = torch.tensor([0.0, 12.0] * 4).bfloat16()
    settings = settings_of(method)
    harness = harness_of(model, settings, sinks=sinks)
    assert_follows(harness, [Model(settings, harness.request(150), sinks)], [[150], *[[1]] * 90])


@pytest.mark.parametrize("method", METHODS)
def test_protected_tokens_are_kept_by_every_eviction_and_after_a_resumption(model, method):
    harness, settings = harness_of(model, settings_of(method)), settings_of(method)
    request, beside = harness.request(150), harness.request(150)
    request.arguments = {"sparse_protect": "10:28,60:76,149:155"}
    protected = frozenset([*range(10, 28), *range(60, 76), 149])
    follower = Model(settings, request, protected=protected)
    assert_follows(harness, [follower, Model(settings, beside)], [[150, 150], *[[1, 1]] * 140])
    assert all(protected <= set(held) for held in follower.held)
    harness.release(request)
    harness.free = harness.free[::-1]
    assert_follows(harness, [Model(settings, request, protected=protected)], [[70], [90], [90], *[[1]] * 60])


def test_the_votes_of_a_running_request_take_no_more_room_than_what_it_holds(model):
    harness = harness_of(model, settings_of("h2o", every=96))
    request = harness.request(400)
    harness.step([(request, 400)])
    rooms = set()
    for _ in range(120):
        harness.step([(request, 1)])
        (state,) = harness.builder.compaction._held.values()
        rooms.add(state.sums.shape[2])
        assert state.sums.shape[2] <= state.until - state.left * BLOCK
    # After each eviction votes are added.
    assert len(rooms) > 2


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_request_evicts_on_the_way(model, method):
    """Its outputs are computed again in chunks. The chunk that crosses the prompt's end reads everything."""
    harness, settings = harness_of(model, settings_of(method)), settings_of(method)
    request = harness.request(100)
    first = Model(settings, request)
    assert_follows(harness, [first], [[100], *[[1]] * 200])
    harness.release(request)
    harness.free = harness.free[::-1]
    assert_follows(harness, [Model(settings, request)], [[70], [50], [3], [90], [1], [60], *[[1]] * 60])


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_behind_a_hit_leaves_shared_blocks_as_they_are(model, method):
    harness, settings = harness_of(model, settings_of(method)), settings_of(method)
    compaction = compaction_of(settings)
    if compaction.retention().counts_every_query:
        assert compaction.retention().longest_hit(170, BLOCK) == 0
        return
    first = harness.request(170)
    harness.step([(first, 170)])
    hit = compaction.retention().longest_hit(170, BLOCK) // BLOCK
    assert hit == 2
    shared = harness.cache[first.blocks[:hit]].clone()
    request = harness.request(170, first, hit)
    follower = Model(settings, request, held=[list(range(hit * BLOCK)) for _ in range(HEADS)])
    for counts in ([170 - hit * BLOCK], *[[1]] * 150):
        follower.before(*counts)
        (output,) = harness.step([(request, *counts)])
        assert (output.double() - follower.attend()).abs().max() < DENSE_TOLERANCE
    assert torch.equal(harness.cache[first.blocks[:hit]], shared)


def test_a_budget_that_covers_everything_changes_nothing(model):
    outputs = []
    for compaction in (None, settings_of("snapkv", budget_tokens=640), settings_of("h2o", min_context_tokens=640)):
        harness = harness_of(model, compaction, "unique", selection={"policy": "unique", "budget_tokens": 64})
        request = harness.request(300)
        outputs.append(torch.cat([harness.step([(request, new)])[0] for new in (200, 100, *[1] * 200)]))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("method", METHODS)
def test_pages_are_selected_among_what_is_kept_after_every_eviction(model, method):
    """A budget of all pages reads everything that is held; a page with wrong statistics would be ranked wrongly."""
    settings = settings_of(method)
    for budget, reads_all in ((512, True), (64, False)):
        harness = harness_of(model, settings, "unique", selection={"policy": "unique", "budget_tokens": budget})
        follower, exact = Model(settings, harness.request(150)), []
        for new in (150, *[1] * 100):
            follower.before(new)
            (output,) = harness.step([(follower.request, new)])
            exact.append(bool((output.double() - follower.attend()).abs().max() < DENSE_TOLERANCE))
        assert all(exact) if reads_all else not all(exact)
        cache = harness.layer.impl.statistics_cache
        blocks = torch.tensor(follower.request.blocks[follower.left : len(follower.request.keys) // BLOCK])
        written = [part[blocks].clone() for part in cache.statistics.parts]
        pages = torch.arange(cache.keys.pages_per_block)
        places = blocks.repeat_interleave(len(pages)), pages.repeat(len(blocks))
        update_page_statistics(cache.keys, cache.statistics, *places)
        assert all(torch.equal(part[blocks], was) for part, was in zip(cache.statistics.parts, written, strict=True))


@pytest.mark.parametrize("method", ["snapkv", "h2o"])
def test_a_request_that_waits_keeps_its_queries_and_a_preempted_one_gives_its_place_back(model, method):
    harness = harness_of(model, settings_of(method))
    harness.builder.compaction._ring.slots = 2
    models = [Model(settings_of(method), harness.request(prompt)) for prompt in (100, 90)]
    waiting, preempted = (each.request.name for each in models)
    assert_follows(harness, models, [[100, 90], *[[1, 1]] * 85])
    preempt(harness, [preempted], [])
    third = Model(settings_of(method), harness.request(50))
    assert_follows(harness, [third], [[50], *[[1]] * 130])
    assert set(harness.builder.compaction._held) == {waiting, third.request.name}
    assert_follows(harness, models[:1], [[1]] * 60)


def test_another_request_of_the_same_name_begins_anew(model):
    """A client may abort a request and send another one of its name, which begins at a prefix-cache hit."""
    harness, settings = harness_of(model, settings_of("snapkv")), settings_of("snapkv")
    request = harness.request(600)
    follower = Model(settings, request)
    harness.step([(request, 64)])
    follower.attend()
    request.prompt_tokens = 100
    assert_follows(harness, [follower], [[36], *[[1]] * 120])


def test_a_request_protects_what_it_names_itself_whatever_had_its_name(model):
    """The earlier request of its name ended where the prefix-cache hit does."""
    harness, settings = harness_of(model, settings_of("snapkv")), settings_of("snapkv")
    request = harness.request(150)
    request.arguments = {"sparse_protect": "100:110"}
    follower = Model(settings, request, protected=frozenset(range(10, 28)))
    harness.step([(request, 32)])
    follower.attend()
    request.arguments = {"sparse_protect": "10:28"}
    assert_follows(harness, [follower], [[118], *[[1]] * 90])
    assert all(set(range(10, 28)) <= set(held) for held in follower.held)


def test_evictions_follow_a_cache_to_other_memory(model):
    """The caches of some layers are known by their addresses."""
    harness = harness_of(model, settings_of("snapkv"))
    follower = Model(settings_of("snapkv"), harness.request(200))
    assert_follows(harness, [follower], [[200], *[[1]] * 20])
    left, harness.cache = harness.cache, harness.cache.clone()
    left.fill_(torch.nan)
    assert_follows(harness, [follower], [[1]] * 60)


def test_what_is_known_of_requests_that_are_gone_is_forgotten(model):
    harness = harness_of(model, settings_of("h2o"))
    other = harness.request(200)
    for _ in range(4):
        request = harness.request(200)
        harness.step([(request, 150), (other, 10)])
        harness.step([(other, 10)])  # steps may omit a request for a while
        assert set(harness.builder.compaction._held) == {other.name, request.name}
        harness.release(request)
    harness.step([(other, 10)])
    assert list(harness.builder.compaction._held) == [other.name]


@pytest.mark.parametrize("method", ["snapkv", "h2o"])  # votes of the last queries, and of all
def test_an_engine_that_evicts_while_it_decodes_gives_every_block_back(tmp_path, method):
    def prompts(count: int, length: int) -> list[list[int]]:
        return [[(number * 7919 + word) % 480 + 10 for number in range(length)] for word in range(count)]

    crowd = [*prompts(4, 300), *prompts(3, 90), *prompts(3, 33)]
    protected = [{"sparse_protect": "4:30,50:70"}, None] * 5
    settings = {"compaction": METHODS[method] | {"budget_tokens": 128, "min_context_tokens": 0, "every": 48}}
    with run_engine(
        "dense", settings, model=str(save_shallow(tmp_path, layers=4)), num_gpu_blocks_override=40, max_model_len=704,
        max_num_batched_tokens=256, block_size=32, max_num_seqs=10, enable_prefix_caching=False,
    ) as engine:  # fmt: skip
        answers = engine.answer(crowd, max_tokens=400, ignore_eos=True, arguments=protected)
        assert [len(tokens) for tokens in answers] == [400] * len(crowd)
        # A context of 700 tokens needs 22 blocks, of which a request gives back at least 14.
        assert engine.metric("vllm_sparse_blocks_freed_sum") > 10 * len(crowd)
        assert engine.metric("vllm:num_preemptions_total") > 0
        assert engine.metric("vllm:kv_cache_usage_perc") == 0
        # Reading a freed block would change answers.
        engine.spoil_freed_blocks()
        assert engine.answer(crowd, max_tokens=400, ignore_eos=True, arguments=protected) == answers
        with pytest.raises(VLLMValidationError, match="sparse_protect: got 125 tokens, allowed: at most"):
            engine.answer(crowd, arguments=[{"sparse_protect": "4:129"}] * 10)
