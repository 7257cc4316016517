"""The number of draft tokens of each request, from settings and lengths."""

import pytest
from support.settings import refusal

from vllm_sparse_plugin.config import DraftRule, resolve

SHORTEST = {
    "its own setting": ({}, 8192),
    "what the pipeline makes sparse": ({"min_context_tokens": 9000}, 9000),
    "the first context that a budget of 1,250 pages does not hold": ({"selection": {"budget_tokens": 10000}}, 10008),
    "the setting where groups are skipped at any length": (
        {"selection": {"budget_tokens": 10000}, "routing": {"threshold": 0.5}},
        8192,
    ),
}


@pytest.mark.parametrize("case", SHORTEST)
def test_contexts_that_gain_nothing_are_not_drafted_for(case):
    settings, shortest = SHORTEST[case]
    rule = resolve({"lossless": {"draft_tokens": 4}, **settings}, "unique").draft_rule
    assert rule == DraftRule(4, shortest, is_adaptive=True)
    assert [rule.drafts(length, 1 << 20, 1 << 20) for length in (1, shortest - 1, shortest)] == [0, 0, 4]


def test_the_length_of_drafts_adapts_unless_it_is_fixed():
    assert resolve({"lossless": {}}, "unique").draft_rule.is_adaptive
    assert resolve(None, "lossless").draft_rule == DraftRule(8, 8192, is_adaptive=True)
    assert resolve({"preset": "lossless"}, "unique").config == resolve(None, "lossless").config
    assert not resolve({"lossless": {"draft_length": "fixed"}}, "lossless").draft_rule.is_adaptive


def test_sparse_steps_answer_unless_asked_to_draft():
    assert resolve(None, "unique").draft_rule is None


@pytest.mark.parametrize(
    ("reserved", "longest", "drafts"),
    [
        (103, 1000, 4),  # drafting writes keys at positions 99 to 102
        (102, 1000, 3),
        (100, 1000, 1),
        (99, 1000, 0),
        (1000, 105, 4),
        (1000, 104, 3),
        (1000, 101, 0),  # the next token is the last one
        (1000, 100, 0),
    ],
)
def test_drafts_stay_within_reserved_blocks_and_the_longest_context(reserved, longest, drafts):
    assert DraftRule(draft_tokens=4, min_context_tokens=100).drafts(100, reserved, longest) == drafts


@pytest.mark.parametrize(
    ("score_every", "draft_tokens", "choosing", "next_pages"),
    [
        (1, 8, [0, 1, 2, 3, 4, 5, 6, 7], 0),
        (2, 8, [0, 2, 4, 6], 1),
        (3, 8, [0, 3, 6], 1),
        (9, 9, [0], 1),  # eight tokens complete one page of 8 at most
        (10, 10, [0], 2),
        (64, 4, [0], 1),
    ],
)
def test_every_nth_step_of_a_draft_chooses_pages(score_every, draft_tokens, choosing, next_pages):
    rule = DraftRule(draft_tokens, 100, score_every=score_every)
    assert [index for index in range(draft_tokens) if rule.chooses_pages(index)] == choosing
    assert (rule.keeps_pages, rule.next_pages(8)) == (score_every > 1, next_pages)
    for length in range(64, 73):
        completed = max((length + index) // 8 - length // 8 for index in range(min(score_every, draft_tokens)))
        assert completed <= rule.next_pages(8)
    assert not DraftRule(1, 100, score_every=8).keeps_pages


def test_pages_are_kept_where_every_step_would_choose_some():
    asked = {"lossless": {"score_every": 4}}
    assert resolve(asked, "quest").draft_rule.score_every == 4
    for other, preset, got in (
        ({"routing": {"threshold": 0.5}}, "unique", "a value with routing"),
        ({"stopping": {}}, "unique", "a value with stopping"),
        ({}, "streaming_llm", "a value with policy streaming_llm, which scores no pages"),
    ):
        assert refusal(asked | other, preset) == f"sparse_attention.lossless.score_every: got {got}, allowed: none"
        assert resolve({"lossless": {}} | other, preset).draft_rule.score_every == 1
    one = {"lossless": {"score_every": 4, "draft_tokens": 1}}
    sentence = "sparse_attention.lossless.score_every: got a value with draft_tokens 1, allowed: none"
    assert refusal(one, "unique") == sentence


@pytest.mark.parametrize(
    ("settings", "pages"),
    [
        ({"lossless": {"score_every": 4}}, 64 + 1),
        ({"lossless": {"score_every": 16, "draft_tokens": 16}}, 64 + 2),
        ({"lossless": {"score_every": 1}}, 0),
        ({"lossless": {"draft_tokens": 1}}, 0),
        ({}, 0),
    ],
)
def test_the_memory_of_kept_pages(settings, pages):
    selection = {"selection": {"budget_tokens": 512}} | settings
    assert resolve(selection, "unique").kept_page_bytes(heads=256, requests=24) == 4 * pages * 256 * 24
