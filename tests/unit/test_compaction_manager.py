"""Blocks are freed, and blocks that are written again belong to one request only: vLLM's own cache manager, without a
model."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from vllm_sparse_plugin.compaction.manager import CompactSpec, capacity, compacted, spread
from vllm_sparse_plugin.evictions import Pyramid, Retention, requests_at_once
from vllm_sparse_plugin.metrics import live

BLOCK = 16
MOVING = Retention(False, 40, None, 4, 0)
SLIDING = Retention(True, 40, None, 4, 0)
FALLING = Retention(False, None, 0.2, 4, 100, pyramid=Pyramid(20.0, 2))
"""Layers share a fifth of each prompt unequally: two groups of two layers."""
REPEATING = replace(MOVING, every=24)
"""48 tokens in whole blocks, again after each 24 tokens."""
FALLING_AND_REPEATING = Retention(False, 60, None, 4, 0, pyramid=Pyramid(20.0, 2), every=40)
SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)
WINDOWS = (SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.bfloat16, sliding_window=64),)
WORDS = [(number * 7919) % 5000 for number in range(4000)]


@pytest.fixture(autouse=True)
def freed(monkeypatch):
    """The calls of the metrics."""
    told = Counter()

    def count(freed: int, is_first: bool) -> None:
        told.update(freed=freed, requests=is_first)

    monkeypatch.setattr("vllm_sparse_plugin.compaction.manager.count_freed_blocks", count)
    return told


class Pool:
    """vLLM's manager of a cache, and requests of a scheduler."""

    def __init__(
        self,
        retention: Retention,
        num_blocks: int = 400,
        caching: bool = True,
        beside: tuple[KVCacheSpec, ...] = (),
        interval: int | None = None,
    ) -> None:
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        others = {f"other {index}": spec for index, spec in enumerate(beside)}
        specs = spread({**others, **{f"layer {index}": compacted(SPEC, retention) for index in range(4)}})
        # Layers of other kinds may come first.
        tables = [KVCacheGroupSpec([name], specs.pop(name)) for name in others]
        # Layers with equal retention form a group, as in vLLM.
        groups = {spec: [name for name, other in specs.items() if other == spec] for spec in specs.values()}
        assert all(isinstance(spec, CompactSpec) for spec in groups)
        self.retention = retention
        tables += [KVCacheGroupSpec(of, spec) for spec, of in groups.items()]
        self.beside = len(beside)
        config = KVCacheConfig(
            num_blocks, kv_cache_tensors=[], kv_cache_groups=tables, prefix_cache_retention_interval=interval
        )
        self.retentions = [spec.retention for spec in groups]
        self.manager = KVCacheManager(
            config, max_model_len=4096, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=caching
        )
        self.all = self.free

    @property
    def free(self) -> int:
        return self.manager.block_pool.get_num_free_blocks()

    def request(self, name: str, tokens: list[int]) -> Request:
        sampling = SamplingParams(max_tokens=2000)
        return Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self.hasher,
        )

    def table(self, request: Request, group: int = 0) -> list[int]:
        return self.manager.get_block_ids(request.request_id)[self.beside + group]

    def tables(self, request: Request) -> set[int]:
        return set().union(*self.manager.get_block_ids(request.request_id))

    def admit(self, request: Request) -> int | None:
        """Finds a hit, and returns its tokens; None without room for the rest."""
        blocks, hit, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        if self.manager.allocate_slots(request, min(32, request.num_tokens - hit), hit, blocks) is None:
            return None
        request.num_computed_tokens = min(hit + 32, request.num_tokens)
        return hit

    def step(self, request: Request, chunk: int = 32) -> bool:
        """Computes tokens of a request like a step, and appends an output at the end."""
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(11)
        new = min(chunk, request.num_tokens - request.num_computed_tokens)
        if self.manager.allocate_slots(request, new) is None:
            return False
        request.num_computed_tokens += new
        return True

    def run(self, request: Request, outputs: int) -> int:
        hit = self.admit(request)
        assert hit is not None
        while request.num_output_tokens < outputs or request.num_computed_tokens < request.num_tokens:
            assert self.step(request)
        return hit

    def preempt(self, request: Request) -> None:
        self.manager.free(request)
        request.num_computed_tokens = 0

    def hashed(self, blocks: set[int]) -> set[int]:
        """The given blocks that the prefix cache may give to other requests."""
        return {block for block in blocks if self.manager.block_pool.blocks[block].block_hash is not None}

    def own(self, request: Request) -> set[int]:
        """Blocks of a request that kept tokens are written to."""
        prompt, own = request.num_prompt_tokens, set()
        for group, retention in enumerate(self.retentions):
            if retention.moves(prompt, BLOCK):
                first = len(retention.first_left_out(prompt, BLOCK))
                end = prompt // BLOCK if retention.every is None else None
                own |= set(self.table(request, group)[first:end])
        return own - {0}


def test_blocks_come_back_at_the_second_decode_step_and_positions_stay(freed):
    pool = Pool(MOVING)
    request = pool.request("a", WORDS[:500])
    pool.run(request, 0)
    table = pool.table(request)
    assert pool.free == pool.all - 32
    pool.step(request)
    assert pool.table(request) == table  # the step that moves tokens still reads the other blocks
    pool.step(request)
    # 40 tokens are 3 blocks, before the block that holds the prompt's last 4 tokens.
    assert pool.table(request) == [0] * 28 + table[28:]
    assert pool.free == pool.all - 4
    assert freed == {"freed": 28, "requests": 1}
    pool.manager.free(request)
    assert pool.free == pool.all


@pytest.mark.parametrize("retention", [replace(each, min_context_tokens=200) for each in (MOVING, FALLING)])
def test_a_hit_that_vllm_limits_ends_before_the_blocks_that_are_written_again(retention):
    """vLLM 0.33 asks for fewer tokens than a prompt has if it returns the experts of tokens that it computes."""
    pool = Pool(retention)
    # A short prompt keeps every token, so the cache has all of its blocks.
    pool.run(pool.request("short", WORDS[:190]), 1)
    for length in (191, 205, 209):
        request = pool.request("long", WORDS[:length])
        most = min(190, *(each.longest_hit(length, BLOCK) for each in pool.retentions)) // BLOCK * BLOCK

        def hit(limit: int, hashes: list = request.block_hashes) -> int:
            return pool.manager.coordinator.find_longest_cache_hit(hashes, limit)[1]

        assert hit(length - 1) == most
        hits = [hit(blocks * BLOCK) for blocks in range(length // BLOCK)]
        assert all(found <= min(most, limit) for found, limit in zip(hits, range(0, length, BLOCK), strict=False))
        assert hits[:5] == [*range(0, 5 * BLOCK, BLOCK)]


def test_a_window_moves_on(freed):
    pool = Pool(SLIDING)
    request = pool.request("a", WORDS[:500])
    pool.run(request, 0)
    for _ in range(300):
        pool.step(request)
        kept = [index for index, block in enumerate(pool.table(request)) if block]
        assert len(kept) <= 1 + -(-36 // BLOCK) + 2
        assert kept[0] == 0
        assert kept[1:] == list(range(kept[1], len(pool.table(request))))
        # Every block that this step reads still exists.
        unread = pool.retention.left_out(500, request.num_computed_tokens, BLOCK)
        assert set(kept) >= set(range(len(pool.table(request)))) - set(unread)
    pool.manager.free(request)
    assert pool.free == pool.all
    assert freed["requests"] == 1


@pytest.mark.parametrize("prompt", [20, 500])
@pytest.mark.parametrize("chunk", [1, 50])
def test_an_eviction_finds_what_the_step_before_it_read(prompt, chunk, freed):
    """A step moves tokens when it begins, out of all blocks that the step before it left."""
    pool = Pool(REPEATING)
    request = pool.request("a", WORDS[:prompt])
    pool.run(request, 0)
    begun = request.num_computed_tokens
    if chunk > 1:
        # As after a preemption, outputs are computed again in chunks.
        request.append_output_token_ids([11] * 600)
    before = pool.retention.left_out(prompt, begun, BLOCK)
    held = []
    for _ in range(600 // chunk):
        pool.step(request, chunk)
        assert 0 not in pool.table(request)[before.stop :]
        before = pool.retention.left_out(prompt, begun + 1, BLOCK)
        begun = request.num_computed_tokens
        held.append(sum(block > 0 for block in pool.table(request)))
    # Three blocks, the tokens of a distance and of two steps, and incomplete blocks.
    assert max(held[len(held) // 2 :]) <= 3 + -(-(24 + 2 * chunk) // BLOCK) + 2
    assert freed["requests"] == 1
    pool.manager.free(request)
    assert pool.free == pool.all


def test_a_short_prompt_is_shared_up_to_the_first_eviction():
    pool = Pool(REPEATING)
    # The first eviction, at 48 + 24 tokens, keeps the three blocks from 16 on.
    first, again = (pool.request(name, WORDS[:40]) for name in "ab")
    assert pool.run(first, 100) == 0
    assert pool.run(again, 1) == 16
    assert not pool.own(again) & pool.tables(first)


def test_a_request_shares_and_frees_by_the_prompt_that_it_began_with():
    """vLLM lengthens the prompt of a session while it runs."""
    pool = Pool(MOVING)
    request = pool.request("a", WORDS[:500])
    pool.run(request, 3)
    written, freed = pool.own(request), pool.table(request).count(0)
    request.num_prompt_tokens = 900
    for _ in range(40):
        pool.step(request)
    assert not pool.hashed(written)
    assert pool.table(request).count(0) == freed


def test_steps_in_flight_keep_what_they_read():
    pool = Pool(MOVING)
    request = pool.request("a", WORDS[:500])
    pool.run(request, 0)
    table = pool.table(request)
    request.append_output_token_ids([11, 11, 11])
    held = []
    for _ in range(3):
        request.num_in_flight_tokens = 1
        pool.step(request, 1)
        held.append(sum(block > 0 for block in pool.table(request)))
    assert held == [len(table), len(table), 4]


def test_a_shared_prompt_is_computed_once_but_for_what_is_written_again():
    pool = Pool(MOVING)
    first = pool.request("a", WORDS[:500])
    assert pool.run(first, 3) == 0
    again, longer, shorter = (pool.request(str(length), WORDS[:length]) for length in (500, 800, 300))
    assert [pool.run(request, 3) for request in (again, longer, shorter)] == [448, 448, 240]
    requests = [first, again, longer, shorter]
    for one in requests:
        for other in requests:
            assert one is other or not pool.own(one) & pool.tables(other)
    for request in requests:
        pool.manager.free(request)
    assert pool.free == pool.all


def test_a_prompt_whose_queries_all_vote_is_computed_whole_and_its_prefix_shared_with_others():
    pool = Pool(replace(MOVING, counts_every_query=True))
    first, again = (pool.request(name, WORDS[:500]) for name in "ab")
    assert [pool.run(request, 3) for request in (first, again)] == [0, 0]
    # A request that keeps everything is not counted.
    short = pool.request("c", WORDS[:60])
    assert pool.run(short, 3) == 48
    for request in (first, again, short):
        pool.manager.free(request)
    assert pool.free == pool.all


def test_a_resumed_request_does_not_hit_what_a_longer_prompt_left_where_it_will_write():
    """The longer prompt's blocks from 448 on are hashed. 500 tokens with 200 outputs would hit 496 of them."""
    pool = Pool(MOVING)
    resumed = pool.request("a", WORDS[:500])
    pool.run(resumed, 200)
    longer = pool.request("b", WORDS[:900])
    pool.run(longer, 3)
    pool.preempt(resumed)
    assert pool.run(resumed, 201) == 0
    assert len(pool.own(resumed)) == 3
    assert not pool.hashed(pool.own(resumed))


def test_a_request_that_is_preempted_before_its_first_output_arrives_hits_nothing_when_it_resumes():
    """With the output it has another full block, so it looks like a prompt with later own blocks."""
    pool = Pool(MOVING)
    longer, resumed = pool.request("a", WORDS[:900]), pool.request("b", WORDS[:511])
    pool.run(longer, 3)
    pool.run(resumed, 0)
    pool.preempt(resumed)
    resumed.append_output_token_ids(WORDS[511])
    assert pool.run(resumed, 2) == 0
    assert not pool.hashed(pool.own(resumed))


def test_a_prefill_that_goes_on_into_the_output_frees_nothing_before_its_tokens_have_moved():
    pool = Pool(MOVING)
    request = pool.request("a", WORDS[:500])
    pool.run(request, 60)
    pool.preempt(request)
    pool.admit(request)
    while request.num_computed_tokens < 500:
        pool.step(request, 120)
    assert request.num_computed_tokens > 501
    table = pool.table(request)
    pool.step(request, 1)
    assert pool.table(request)[:32] == table[:32]
    pool.step(request, 1)
    assert pool.table(request)[:28] == [0] * 28


def test_classes_of_layers_free_what_each_leaves_out_and_hit_what_all_have():
    pool = Pool(FALLING)
    first, again = (pool.request(name, WORDS[:500]) for name in "ab")
    pool.run(first, 3)
    # 4 tokens, and 1.63 times and 0.37 times the other 96 of the budget of 100: 161 and 40 tokens.
    assert [retention.budget(500) for retention in pool.retentions] == [161, 40]
    assert [pool.table(first, group)[:31].count(0) for group in (0, 1)] == [31 - 11, 31 - 3]
    assert pool.run(again, 3) == (31 - 11) * BLOCK
    assert not pool.own(again) & pool.tables(first)
    for request in (first, again):
        pool.manager.free(request)
    assert pool.free == pool.all


def test_a_class_that_keeps_a_whole_prompt_does_not_let_others_hit_where_they_will_write():
    """Layers keep 651 and 150 tokens: both prompts keep everything in the first class, and move in the second."""
    pool = Pool(Retention(False, 400, None, 4, 100, pyramid=Pyramid(20.0, 2)))
    longer, shorter = (pool.request(str(length), WORDS[:length]) for length in (580, 500))
    assert [retention.moves(500, BLOCK) for retention in pool.retentions] == [False, True]
    pool.run(longer, 3)
    assert pool.run(shorter, 3) == (500 // BLOCK - 10) * BLOCK
    assert not pool.hashed(pool.own(shorter))


@pytest.mark.parametrize("retention", [MOVING, FALLING])
def test_layers_with_a_window_keep_their_own_blocks_and_hits_are_those_of_layers_without_one(retention):
    pool, alone = Pool(retention, beside=WINDOWS), Pool(retention)
    requests = [pool.request(str(length), WORDS[: abs(length)]) for length in (800, 500, -500)]
    hits = [alone.run(alone.request(each.request_id, list(each.prompt_token_ids)), 3) for each in requests]
    # The longer prompt's blocks are hashed where the others will write.
    assert [pool.run(request, 3) for request in requests] == hits
    assert min(hits[1:]) > 100
    window = pool.manager.get_block_ids(requests[1].request_id)[0]
    assert [bool(block) for block in window[:31]] == [index >= (502 - 64) // BLOCK for index in range(31)]
    for one in requests:
        assert not any(pool.own(one) & pool.tables(other) for other in requests if other is not one)
    for request in requests:
        pool.manager.free(request)
    assert pool.free == pool.all


def test_layers_with_a_window_share_no_tokens_that_are_computed_behind_a_compaction():
    """A later prompt may hold the answer. It computes it with the whole context."""
    for retention in (MOVING, SLIDING, REPEATING):
        pool = Pool(retention, beside=WINDOWS)
        request = pool.request("a", WORDS[:500])
        pool.run(request, 200)
        window = pool.manager.get_block_ids("a")[0]
        assert len([block for block in window[500 // BLOCK :] if block]) > 4
        assert not pool.hashed(set(window[500 // BLOCK :]))


@pytest.mark.parametrize("interval", [0, None])
@pytest.mark.parametrize(("retention", "hit"), [(MOVING, 448), (FALLING, 320), (SLIDING, 496)])
def test_layers_with_a_window_keep_what_the_next_hit_needs(retention, hit, interval):
    """By default vLLM keeps their blocks before the end of a prompt only."""
    pool = Pool(retention, beside=WINDOWS, interval=interval)
    requests = [pool.request(name, WORDS[:length]) for name, length in (("a", 500), ("b", 500), ("c", 800))]
    assert [pool.run(request, 3) for request in requests] == [0, hit, hit]


def test_a_prompt_that_keeps_everything_is_vllms_own():
    everything = Retention(False, None, 1.0, 4, 0)
    for retention in (everything, Retention(False, 40, None, 4, 4096)):
        pool = Pool(retention)
        first, again = (pool.request(name, WORDS[:500]) for name in "ab")
        assert pool.run(first, 40) == 0
        assert pool.run(again, 40) == 496
        assert 0 not in pool.table(first) + pool.table(again)


@pytest.mark.parametrize("retention", [MOVING, SLIDING, FALLING, REPEATING, FALLING_AND_REPEATING])
@pytest.mark.parametrize(("caching", "beside"), [(True, ()), (False, ()), (True, WINDOWS)])
def test_a_storm_of_requests_leaks_nothing_and_writes_into_nothing_shared(retention, caching, beside):
    """Requests come, share prefixes, are preempted and aborted; 500 of them in each storm."""
    pool, draw = Pool(retention, 120 + 60 * len(beside), caching, beside), random.Random(repr(retention))
    running: list[Request] = []
    arrivals, wrote = 0, False
    while arrivals < 500 or running:
        if arrivals < 500 and len(running) < 12:
            start = draw.choice((0, 0, 0, 500, 1000))
            request = pool.request(str(arrivals), WORDS[start : start + draw.randrange(1, 400)])
            arrivals += 1
            if pool.admit(request) is not None:
                running.append(request)
        for request in draw.sample(running, min(6, len(running))):
            fate = draw.random()
            if fate < 0.15 or request.num_output_tokens > 60:
                pool.manager.free(request)
                running.remove(request)
            elif fate < 0.2 or not pool.step(request, draw.choice((1, 16, 50))):
                pool.preempt(request)
                if pool.admit(request) is None:
                    running.remove(request)
            if request in running and request.num_computed_tokens > request.num_prompt_tokens:
                own = pool.own(request)
                wrote |= bool(own)
                assert not pool.hashed(own)
                if own:
                    assert all(own.isdisjoint(pool.tables(other)) for other in running if other is not request)
    assert pool.free == pool.all
    assert wrote == (not retention.slides)


def test_the_log_says_how_many_requests_fit():
    spec = spread({f"layer {index}": compacted(SPEC, FALLING) for index in range(4)})["layer 0"]
    sentence = capacity(spec, 600)
    # A prompt of 2,048 tokens is 129 blocks by each of two tables, and keeps a fifth of them: 82 on average.
    assert sentence.startswith(
        "requests that fit the KV cache at once, by their prompts: 2,048 tokens: 7 (dense 2), 8,192"
    )
    assert "2,048 tokens: 11 (dense 1), 8,192 tokens: 0 (dense 0)" in capacity(compacted(SPEC, MOVING), 130 + 4 * 10)


@pytest.mark.parametrize("retention", [MOVING, FALLING])
def test_as_many_requests_fit_as_the_log_says(retention):
    """vLLM keeps one block of a pool, to which tables point where they have none."""
    for blocks in range(60, 80):
        pool, running = Pool(retention, blocks, caching=False), 0
        while True:
            request = pool.request(str(running), WORDS[:500])
            if pool.admit(request) is None:
                break
            while request.num_output_tokens < 4 and pool.step(request):
                pass
            if request.num_output_tokens < 4:
                break
            running += 1
        assert requests_at_once(pool.retentions, blocks, 500, BLOCK) == running


def test_a_resumed_request_gives_back_the_blocks_of_a_new_table(freed):
    """So a mean over tables is what a request gives back, however often requests are preempted."""
    pool = Pool(MOVING)
    request = pool.request("a", WORDS[:500])
    pool.run(request, outputs=3)
    assert freed == {"freed": 28, "requests": 1}
    pool.preempt(request)
    pool.run(request, outputs=6)
    assert freed == {"freed": 56, "requests": 2}


def test_metrics_count_what_comes_back(monkeypatch):
    sums, counts = Counter(), Counter()

    def add(metric: str, text: str, amount: float, count: float) -> None:
        sums[metric] += amount
        counts[metric] += count

    monkeypatch.setattr(live, "_add", add)
    live.count_freed_blocks(28, is_first=True)
    live.count_freed_blocks(1, is_first=False)
    assert sums == {"vllm_sparse_blocks_freed": 29}
    assert counts == {"vllm_sparse_blocks_freed": 1}
