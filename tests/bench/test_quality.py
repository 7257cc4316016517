"""Prompts of `python -m bench.quality lossless` and `turns`, and the comparison of answers."""

import math
from pathlib import Path

import pytest

from bench.common.continuations import Continuation
from bench.common.models import load_tokenizer, manual_tokens
from bench.quality.__main__ import app
from bench.quality.identical import compare
from bench.quality.lossless import PIECES, TIE, _prompts, table
from bench.quality.turns import FIRST, PROTECTED, build_conversation
from bench.quality.turns import table as turns_table
from vllm_sparse_plugin.errors import ConfigurationError

MODEL = Path(__file__).parents[2] / "models" / "needle-8m"
NEW_TOKENS = 96


@pytest.fixture(scope="module")
def prompts():
    return list(_prompts(MODEL, ["kv"], [4096], 3, NEW_TOKENS, seed=1))


def test_needles_code_and_prose_are_asked_for_and_no_prompt_twice(prompts):
    assert [prompt.kind for prompt in prompts] == [kind for kind in ("kv", *PIECES) for _ in range(3)]
    assert all(len(prompt.tokens) == 4096 - NEW_TOKENS for prompt in prompts if prompt.kind in PIECES)
    assert len({tuple(prompt.tokens) for prompt in prompts}) == len(prompts)
    # Questions share a document. Pieces have different beginnings.
    assert len({tuple(prompt.tokens[:64]) for prompt in prompts if prompt.kind in PIECES}) == 6


def test_prose_goes_round_where_the_manual_ends():
    tokenizer = load_tokenizer(MODEL)
    # Longer than the manual, so its beginning occurs twice.
    far = manual_tokens(tokenizer, 0, 150_000)
    assert len(far) == 150_000
    text = tokenizer.decode(manual_tokens(tokenizer, 3, 64)[1:])
    assert text in tokenizer.decode(far[-20_000:])


def test_answers_part_where_tokens_do_and_by_what_the_first_one_leads():
    answer = Continuation([5, 6], [{5: -0.1, 7: -2.0}, {6: -0.5, 8: -0.5 - TIE / 2}])
    assert answer.first_difference([5, 6]) is None
    assert answer.first_difference([5, 8]) == (1, pytest.approx(TIE / 2))
    assert answer.first_difference([9, 6]) == (0, math.inf)
    assert answer.first_difference([5]) == (1, math.inf)


def test_answers_that_part_are_ties_or_not():
    dense = [Continuation([5, 6], [{5: -0.1}, {6: -0.7, 8: -0.72}])] * 3
    found = [Continuation(list(pair), [{}, {}]) for pair in ((5, 6), (5, 8), (5, 9))]
    row = compare("snapkv", dense, found)
    assert (row["prompts"], row["identical"], row["parted_at_ties"]) == (3, 1, 1)
    assert row["parted"] == [{"prompt": 1, "gap": 0.02}, {"prompt": 2, "gap": math.inf}]


def test_the_table_says_how_many_answers_are_the_same():
    row = {
        "setting": "512 x 4", "kind": "code", "context_tokens": 4096, "draft_tokens": 4, "prompts": 3, "seconds": 1.0,
        "parted": [[1, 7, 0.0625]], "drafts": 10, "drafted": 40, "accepted": 30,
    }  # fmt: skip
    cells = [list(column.cells) for column in table([row]).columns]
    assert [column[0] for column in cells] == ["512 x 4", "code", "4096", "2/3", "0.062", "0.750", "4.00", "1.0"]


def test_two_questions_ask_for_facts_in_and_behind_the_system_prompt():
    tokenizer = load_tokenizer(MODEL)
    asked = [build_conversation(tokenizer, 1024, 128, index, seed=1) for index in range(4)]
    assert len({each.answers for each in asked}) == 4
    for each in asked:
        assert 1004 <= len(each.prompt) <= 1024
        assert 100 <= each.system_tokens <= 128
        system, rest = (tokenizer.decode(part) for part in (
            each.prompt[: each.system_tokens], each.prompt[each.system_tokens :]))  # fmt: skip
        first, second = each.answers
        assert second in system
        assert second not in rest
        assert first in rest
        assert first not in system
        turn = tokenizer.decode(each.follow_up)
        value, question = turn.split("\n")
        assert value == f" {first}."
        assert question.startswith("The access code of ")
        assert question.endswith(" is:")
        assert f"\n{question} {second}.\n" in system
        asks = rest.rpartition("\n")[2]
        assert asks.startswith("The special magic number for ")
        assert f"{asks} {first}." in rest


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--variant", "dense"], "variant: got dense, allowed: a backend with a compaction"),
        (["--variant", "unique"], "sparse_attention.compaction.method: got None, allowed: h2o,"),
        (
            ["--budget", "512", "--system", "481"],
            "system: got 481 tokens with snapkv (sparse_protect: got 477 tokens, allowed: at most 476",
        ),
        (
            ["--variant", "streaming_llm"],
            "sparse_attention.compaction.budget_tokens: got 1024 with policy",
        ),
    ],
)
def test_variants_that_cannot_protect_a_system_prompt_are_refused(tmp_path, options, sentence):
    with pytest.raises(ConfigurationError) as refusal:
        app(["turns", "--output", str(tmp_path / "turns.jsonl"), *options], standalone_mode=False)
    assert sentence in str(refusal.value)


def test_right_answers_of_two_turns_are_shown_by_variant():
    rows = [{"variant": "dense", "turn": FIRST, "right": 3, "questions": 4},
            {"variant": "snapkv", "turn": PROTECTED, "right": 2, "questions": 4}]  # fmt: skip
    cells = [list(column.cells) for column in turns_table(rows).columns]
    assert cells == [["dense", "snapkv"], ["3/4", ""], ["", ""], ["", "2/4"], ["", ""]]
