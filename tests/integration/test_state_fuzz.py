"""Random schedules of vLLM's scheduler on one layer. A nightly test runs many more."""

from collections import Counter
from dataclasses import replace

import pytest
from sparse_kernels.compaction import QueryRing, keep_tokens
from support.state_fuzz.cases import MAX_MODEL_LEN, Case
from support.state_fuzz.schedule import EVENTS, Fuzz
from support.state_fuzz.worker import FaultError

from vllm_sparse_plugin.attention.cpu import SparseCPUMetadataBuilder
from vllm_sparse_plugin.compaction import evictions
from vllm_sparse_plugin.evictions import Retention

CROWDED = Case(
    policy="unique",
    block_size=32,
    num_blocks=1 + MAX_MODEL_LEN // 32 + 10,
    max_requests=6,
    chunk_tokens=96,
    drafts=3,
    prefix_cache=True,
)
SMALL = replace(CROWDED, num_blocks=1 + MAX_MODEL_LEN // 32, drafts=0, is_async=True)
"""Requests with compaction need fewer blocks."""
CASES = (
    CROWDED,
    replace(CROWDED, policy="quest", block_size=64, num_blocks=14, drafts=2, chunk_tokens=48),
    replace(SMALL, policy="snapkv", is_async=False),
    replace(SMALL, policy="evicting h2o and unique"),
)
STEPS = 110


@pytest.fixture(scope="module")
def counts() -> Counter[str]:
    """The counts of events in a run of each case."""
    total: Counter[str] = Counter()
    for seed, case in enumerate(CASES, start=4):
        total += Fuzz(seed, case).run(STEPS)
    return total


def test_statistics_and_outputs_are_right_after_every_step(counts):
    assert counts["pages"] > 20 * STEPS
    assert counts["sparse_rows"] > STEPS // 4


@pytest.mark.parametrize("event", EVENTS)
def test_everything_happens(counts, event):
    assert counts[event] > 0


def test_a_request_that_ends_in_a_step_without_tokens_is_forgotten(monkeypatch):
    fuzz = Fuzz(0, replace(SMALL, policy="evicting h2o and unique", is_async=False))
    fuzz._ask()
    monkeypatch.setattr(fuzz, "_clients", lambda: None)
    while fuzz.scheduler.has_requests():
        fuzz.step()
    assert fuzz.worker.counts["finished"] > 0
    assert not fuzz.worker.requests
    assert not fuzz.worker.rows


def leave_out_a_page(metadata) -> None:
    if metadata.filled:
        blocks, pages = metadata.filled
        metadata.filled = blocks[1:], pages[1:]


def cut_contexts(metadata) -> None:
    if metadata.decode:
        metadata.decode.context_lens -= 1


def share_what_will_be_written(monkeypatch) -> None:
    monkeypatch.setattr(Retention, "longest_hit", lambda self, prompt_tokens, block_size: prompt_tokens)
    monkeypatch.setattr(Retention, "shared_tokens", lambda self, prompt_tokens, block_size: prompt_tokens)


def keep_the_worst(monkeypatch) -> None:
    monkeypatch.setattr(evictions, "keep_tokens", lambda scores, *rest: keep_tokens(-scores, *rest))


def vote_with_old_queries(monkeypatch) -> None:
    newest = QueryRing.newest
    monkeypatch.setattr(QueryRing, "newest", lambda self, slot, end, count: newest(self, slot, end - 1, count))


@pytest.mark.parametrize(
    ("damage", "policy", "fault"),
    [
        (share_what_will_be_written, "evicting h2o", "kept tokens are not held tokens"),
        (keep_the_worst, "evicting h2o", "an eviction keeps another token"),
        (vote_with_old_queries, "evicting snapkv", "an eviction keeps another token"),
    ],
)
def test_compaction_that_errs_is_found(monkeypatch, damage, policy, fault):
    damage(monkeypatch)
    with pytest.raises(FaultError, match=fault):
        Fuzz(0, replace(SMALL, policy=policy)).run(4 * STEPS)


@pytest.mark.parametrize(
    ("damage", "fault"), [(leave_out_a_page, "page statistics that are not"), (cut_contexts, "an output of a request")]
)
def test_a_builder_that_errs_is_found(monkeypatch, damage, fault):
    build = SparseCPUMetadataBuilder.build

    def broken(*arguments):
        metadata = build(*arguments)
        damage(metadata)
        return metadata

    monkeypatch.setattr(SparseCPUMetadataBuilder, "build", broken)
    with pytest.raises(FaultError, match=fault):
        Fuzz(0, CROWDED).run(STEPS)
