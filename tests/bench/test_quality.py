"""Prompts of `python -m bench.quality lossless`, and the comparison of answers."""

import math
from pathlib import Path

import pytest

from bench.common.continuations import Continuation
from bench.common.models import load_tokenizer, manual_tokens
from bench.quality.identical import compare
from bench.quality.lossless import PIECES, TIE, _prompts, table

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
