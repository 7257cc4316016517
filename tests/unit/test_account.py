"""One account of the keys that are read and kept, by the metrics and by the commands."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.config.account import Counted, ModelKeys, keys_of_layer
from vllm_sparse_plugin.metrics import live
from vllm_sparse_plugin.names import BACKENDS
from vllm_sparse_plugin.policies import POLICIES, Selection

SELECTIONS = [policy for policy in POLICIES if issubclass(policy, Selection)]
LAYERS, HEAD_SIZE, BLOCK = 8, 64, 64


def model(preset: str | None, settings: dict | None = None, block_size: int = BLOCK, itemsize: int = 2) -> ModelKeys:
    config = None if preset is None else resolve(settings, preset)
    return ModelKeys(config, LAYERS, HEAD_SIZE, block_size, itemsize)


def selecting(policy: type[Selection], budget: int | None = None, statistics: str | None = None) -> ModelKeys:
    section = {"policy": policy.name()}
    section |= {} if budget is None else {"budget_tokens": budget}
    section |= {} if statistics is None else {"statistics": statistics}
    return model("dense", {"selection": section, "min_context_tokens": 0})


@pytest.mark.parametrize("policy", SELECTIONS, ids=lambda policy: policy.name())
def test_a_context_within_the_budget_is_read_whole(policy):
    budget, page = policy().budget_tokens, policy().page_size
    for prompt in (8, budget - 1, budget + page - 2):
        shares = selecting(policy).shares(prompt)
        assert (shares.read, shares.kept, shares.bytes_read) == (1, 1, 1)


@pytest.mark.parametrize("policy", SELECTIONS, ids=lambda policy: policy.name())
def test_the_share_that_is_read_falls_with_the_context_and_grows_with_the_budget(policy):
    start, page = policy().budget_tokens, policy().page_size
    found = [selecting(policy).shares(n) for n in range(start + page, 1 << 15, 32 * page)]
    for share in ("read", "bytes_read"):
        shares = [getattr(each, share) for each in found]
        assert all(later < earlier for earlier, later in pairwise(shares))
        budgets = [getattr(selecting(policy, n).shares(1 << 14), share) for n in (256, 512, 4096, 1 << 14)]
        assert budgets == sorted(set(budgets))
        assert budgets[-1] == 1.0


def test_bytes_count_statistics_and_keys_the_incomplete_page():
    # Head size 64: 256 bytes of a token's key and value, 128 of a page's quarters, 68 of an 8-bit mean and spread.
    unique = next(policy for policy in SELECTIONS if policy.name() == "unique")
    assert selecting(unique).shares(4098)[:3] == (1027 / 4099, 1, (1027 * 256 + 512 * 128) / (4099 * 256))
    assert selecting(unique, statistics="int8").shares(4095).bytes_read == (1024 * 256 + 512 * 68) / (4096 * 256)
    eight_bit = replace(selecting(unique), itemsize=1)
    assert eight_bit.shares(4095).bytes_read == (1024 * 128 + 512 * 68) / (4096 * 128)
    assert selecting(unique).shares(4095).bytes_kept == 1 + 1 / 16


def test_short_contexts_are_read_whole_as_a_server_does():
    reading = model("unique", {"selection": {"budget_tokens": 512}})
    assert reading.shares(1022).read == 1
    assert reading.shares(1023).read == 512 / 1024


@pytest.mark.parametrize("preset", ["snapkv", "h2o"])
def test_what_eviction_keeps_is_what_steps_read(preset):
    """A prompt of 8,000 tokens: the 16 blocks of the budget and what lies behind the last full block."""
    shares = model(preset).shares(8000)
    assert shares.read == shares.kept == shares.bytes_read == shares.bytes_kept == (16 * 64 + 1) / 8001
    # What is decoded is kept.
    first, last = 8001, 8099
    assert model(preset).shares(8000, 100).kept == pytest.approx(
        sum(n - 109 * 64 for n in range(first, last + 1)) / sum(range(first, last + 1))
    )
    assert model(preset).shares(1000) == (1, 1, 1, 1)


def test_a_selection_over_what_eviction_keeps_counts_the_whole_context():
    """The finding that began this account: 515 keys of 7,000, not of the 1,100 that are kept."""
    shares = model("unique", {"selection": {"budget_tokens": 512}, "compaction": {"method": "snapkv"}}).shares(7050)
    assert shares.kept == pytest.approx((7051 - 94 * 64) / 7051)
    assert shares.read == (512 + 7051 % 8) / 7051
    assert shares.bytes_kept == pytest.approx(shares.kept * 17 / 16)


@pytest.mark.parametrize("budget", [256, 512, 1024, 2048])
def test_the_budget_of_streaming_llm_moves_what_is_read_and_kept(budget):
    shares = model("streaming_llm", {"selection": {"budget_tokens": budget}}).shares(16000)
    assert budget <= shares.read * 16001 <= shares.kept * 16001 < budget + 3 * BLOCK


def test_rolling_positions_read_the_window_and_keep_whole_blocks():
    compaction = {"method": "streaming_llm", "positions": "rolling", "budget_tokens": 512}
    shares = model("dense", {"compaction": compaction}).shares(8000)
    assert shares.read == 512 / 8001
    assert 512 < shares.kept * 8001 < 512 + 3 * BLOCK


def test_in_lossless_mode_what_answers_reads_everything():
    shares = model("unique", {"lossless": {}}).shares(8000)
    assert (shares.read, shares.kept, shares.bytes_read) == (1, 1, 1)


def test_leading_dense_layers_read_everything():
    shares, selected = model("unique", {"first_dense_layers": 2}).shares(8000), model("unique").shares(8000)
    for share in ("read", "bytes_read"):
        assert getattr(shares, share) == pytest.approx((2 + 6 * getattr(selected, share)) / 8)


def test_layers_behind_an_anchor_read_no_statistics():
    alone = model("unique").shares(8000)
    statistics = alone.bytes_read - alone.read
    # Eight layers.
    for anchors, choosing in ((2, 4), (3, 3), ([0, 5], 2), ([3], 2)):
        shares = model("unique", {"selection": {"anchor_layers": anchors}}).shares(8000)
        assert shares.read == alone.read
        assert shares.bytes_read == pytest.approx(alone.read + statistics * choosing / 8)


def test_what_kernels_count_is_a_share_of_what_is_kept():
    assert model("art").shares(8000, 1, Counted(0.5)).read == 0.5
    kept = model("snapkv").shares(8000).kept
    both = model("art", {"compaction": {"method": "snapkv"}}).shares(8000, 1, Counted(0.5))
    assert (both.read, both.kept) == (pytest.approx(0.5 * kept), kept)
    # Two layers are never routed.
    routed = model("dense", {"routing": {"threshold": 0.9, "dense_layers": 2}}).shares(8000, 1, Counted(skipped=0.75))
    assert routed.read == pytest.approx((2 + 6 * 0.25) / 8)


@pytest.mark.parametrize(
    ("preset", "settings", "counted"),
    [
        ("art", {"min_context_tokens": 2048}, Counted(0.25)),
        ("sinkrouter", {"min_context_tokens": 2048}, Counted(skipped=0.5)),
    ],
)
def test_a_count_is_not_of_tokens_that_read_everything(preset, settings, counted):
    """Requests of a batch share a count. A short one reads all, in the step that ends below the limit too."""
    keys = model(preset, settings)
    shortest = keys.config.config.min_context_tokens
    assert keys.shares(shortest - 2, 1, counted)[:3] == (1, 1, 1)
    whole, sparse = shortest - 1, shortest
    both, alone = keys.shares(whole - 1, 3, counted).read, keys.shares(sparse - 1, 1, counted).read
    assert both == pytest.approx((whole + alone * sparse) / (whole + sparse))
    assert alone < 1


def test_what_lengths_tell_of_each_backend():
    unknown = {name for name, preset in BACKENDS.items() if not model(preset).by_length}
    assert unknown == {"ART", "SINKROUTER"}
    assert not model("unique", {"stopping": {}}).by_length
    assert model(None).by_length


def step(seen: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        seq_lens_cpu_upper_bound=torch.tensor(seen),
        query_start_loc_cpu=torch.arange(len(seen) + 1),
        is_prefilling=torch.zeros(len(seen), dtype=torch.bool),
    )


@pytest.fixture
def published(monkeypatch) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}

    def add(metric: str, text: str, amount: float, count: float, *labels: object) -> None:
        before = found.get(metric, (0, 0))
        found[metric] = before[0] + amount, before[1] + count

    monkeypatch.setattr(live, "_add", add)
    return found


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        ("unique", {}), ("snapkv", {}), ("h2o", {}), ("streaming_llm", {}),
        ("unique", {"compaction": {"method": "snapkv"}}),
        ("dense", {"compaction": {"method": "streaming_llm", "positions": "rolling", "budget_tokens": 512}}),
    ],
)  # fmt: skip
def test_a_server_and_the_commands_say_the_same(published, preset, settings):
    """Three requests of unlike prompts decode one token each; attention sees what their blocks hold."""
    config = resolve(settings, preset)
    retention = None if config.compaction is None else config.compaction.retention()
    keys, prompts = keys_of_layer(config, retention, BLOCK), [3000, 8000, 8100]
    contexts = np.array(prompts) + 1
    kept = np.concatenate([keys.kept(n, np.array([n + 1])) for n in prompts])
    left_out = None if keys.rolls or retention is None else contexts - kept
    seen = contexts if left_out is None else kept
    reads = live.ContextReads(keys)
    for _ in range(live.COUNTED_STEPS):
        reads.step(step(seen.tolist()), 1, None, None, left_out)
    shares = [ModelKeys(config, LAYERS, HEAD_SIZE, BLOCK).shares(n) for n in prompts]
    read = sum(each.read * n for each, n in zip(shares, contexts, strict=True))
    assert published["vllm_sparse_kv_read_share"] == (pytest.approx(read), sum(contexts))
    held = sum(each.kept * n for each, n in zip(shares, contexts, strict=True))
    assert (retention is not None) == ("vllm_sparse_kept_share" in published)
    if retention is not None:
        assert published["vllm_sparse_kept_share"] == (pytest.approx(held), sum(contexts))


def test_layers_that_keep_all_of_a_request_count_where_others_do_not(published):
    """A class of PyramidKV's layers keeps the prompt whole, the other one a part of it."""
    config = resolve({"compaction": {"budget_tokens": 1024, "layer_classes": 2, "min_context_tokens": 0}}, "pyramidkv")
    prompt, retentions = 1500, config.compaction.retention().of_layers(2)
    for retention in retentions:
        keys, contexts = keys_of_layer(config, retention, BLOCK), np.array([prompt + 1])
        kept = keys.kept(prompt, contexts)
        reads = live.ContextReads(keys)
        for _ in range(live.COUNTED_STEPS):
            reads.step(step(kept.tolist()), 1, None, None, contexts - kept)
    shares = ModelKeys(config, 2, HEAD_SIZE, BLOCK).shares(prompt)
    kept, positions = published["vllm_sparse_kept_share"]
    assert {retention.moves(prompt, BLOCK) for retention in retentions} == {False, True}
    assert shares.kept == kept / positions < 1
    assert published["vllm_sparse_kv_read_share"] == (kept, positions)


def test_keys_of_kernels_count_the_positions_of_their_own_steps(published):
    """Steps that read half of what an eviction keeps come before steps of prompts, then of requests kept whole."""
    config = resolve({"compaction": {"method": "snapkv", "budget_tokens": 1024}}, "art")
    reads = live.ContextReads(keys_of_layer(config, config.compaction.retention(), BLOCK), by_length=False)
    counts = live.DeviceCounts([(0, range(1))], live.READS, 4, torch.device("cpu"))
    counts.positions_per_key = reads.positions_per_key
    for left_out in (3072, None, 0, None):
        # The counts of a step come after its lengths, and are seen by the next step.
        for _ in range(live.COUNTED_STEPS):
            if left_out is not None:
                reads.step(step([1024]), 1, None, None, np.array([left_out]))
                counts.of_layers[0][0] += torch.tensor([1, 2, 512, 1024])
            counts.step()
    steps = live.COUNTED_STEPS
    assert published["vllm_sparse_kv_read_share"] == (2 * steps * 512, steps * (4096 + 1024))
