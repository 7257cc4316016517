"""The number of draft tokens of each request, from settings and lengths."""

import pytest

from vllm_sparse_plugin.config import DraftRule, resolve

SHORTEST = {
    "its own setting": ({}, 8192),
    "what the pipeline makes sparse": ({"min_context_tokens": 9000}, 9000),
    "the first context that a budget of 1,250 pages does not hold": ({"selection": {"budget_tokens": 10000}}, 10008),
    "the setting where groups are skipped at any length": (
        {"selection": {"budget_tokens": 10000}, "routing": {"threshold": 0.5}},
        8192,
    ),
    "the first context that a coverage does not read whole": (
        {"selection": {"coverage": 0.9, "min_budget_tokens": 10000, "max_budget_tokens": 16384}},
        10008,
    ),
    "no budget beside a coverage": ({"preset": "unique_wide", "selection": {"coverage": 0.9}}, 8192),
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
