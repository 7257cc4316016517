import math
from dataclasses import replace

import pytest

from vllm_sparse_plugin.tools.eval.items import Item
from vllm_sparse_plugin.tools.eval.metrics import METRICS, score, word_error_rate

LABELS = ("city", "large city", "country")
CASES = [
    # RULER: substrings, whatever the case; all of them or any.
    ("string_match_all", "They are ALPHA and beta.", ["alpha", "Beta", "gamma", "delta"], 0.5),
    ("string_match_all", " 1234567, 7654321", ["7654321", "1234567"], 1),
    ("string_match_all", "", ["alpha"], 0),
    ("string_match_part", "It was Paris", ["London", "paris"], 1),
    ("string_match_part", "It was Rome", ["London", "paris"], 0),
    # The needles' own: the first line and nothing else.
    ("exact_first_line", " 1234567\n7", ["1234567"], 1),
    ("exact_first_line", "1234567.", ["1234567"], 0),
    # SQuAD's F1: 2 of 3 words found, 2 of 2 right: 2 * (2/3) * 1 / (5/3).
    ("qa_f1", "The red, big house!", ["red house"], 0.8),
    ("qa_f1", "blue", ["red house", "a blue"], 1),
    ("qa_f1", "green", ["red house"], 0),
    ("qa_f1_first_line", "\nred house\nmore words here", ["red house"], 1),
    # 我 来到 北京 清华大学 against 我 在 北京: 2 * 2 / (4 + 3); punctuation does not count.
    ("qa_f1_zh", "我来到北京清华大学。", ["我在北京。"], 4 / 7),
    ("qa_f1_zh", "", ["北京"], 0),
    # LCS of 3 words, of 4 given and 3 right: P = 3/4, R = 1.
    ("rouge_l", "the old cat sat", ["the cat sat"], 6 / 7),
    ("rouge_l", "the cat sat", ["a dog", "the cat sat"], 1),
    ("rouge_l", "", ["the cat sat"], 0),
    ("rouge_l", "...", ["the cat sat"], 0),
    ("rouge_l_first_line", "the cat sat\n\nDialogue: the next one", ["the cat sat"], 1),
    # 我 来到 北京 清华大学 against 我 在 北京: LCS 2, P = 2/4, R = 2/3.
    ("rouge_l_zh", "我来到北京清华大学", ["我在北京"], 4 / 7),
    # Of the numbers 3, 12 and 3 one is right.
    ("number_share", "Paragraph 3, or 12? 3", ["Paragraph 12"], 1 / 3),
    ("number_share", "段落12", ["段落12"], 1),
    ("number_share", "none", ["12"], 0),
    ("number_share", "123", ["12"], 0),
    # Indel distance of abcd and abed: 2 of 8 characters.
    ("code_similarity", "\n# a comment\nabcd\nmore", ["abed"], 0.75),
    ("code_similarity", "```\n// x", ["abed"], 0),
    # One word replaced and one inserted, of four; case and punctuation do not count.
    ("word_accuracy", "the CAT, sat up now", ["the cat sat down"], 0.5),
    ("word_accuracy", "Don't stop.", ["a b c", "dont stop"], 1),
    # Three words instead of one are three mistakes, and no negative score.
    ("word_accuracy", "one two three", ["four"], 0),
    # Two of three: Ann must be named twice, `New York` is two words in a row, and `Rob` is no `Robert`.
    ("entity_accuracy", "ann met Robert in New York.", ["Ann", "New York", "Rob"], 2 / 3),
    ("entity_accuracy", "Ann, ann", ["Ann", "Ann"], 1),
    ("entity_accuracy", "Ann", ["Ann", "Ann"], 0.5),
    ("entity_accuracy", "New Jersey York", ["New York"], 0),
    # LongBench-Pro: lines, without case and extra spaces, after the last mark.
    ("line_accuracy", "So:\n[Answer]\n  Four   Cats\nmore", ["four cats"], 1),
    ("line_accuracy", "[答案] 四", ["四"], 1),
    ("line_accuracy", "three\nfour cats", ["four cats"], 0),
    ("line_f1", "[Answer]\na\nb\nc", ["A", "b"], 0.8),
    ("line_f1", "", ["a"], 0),
    ("line_recall", "[Answer]\na\nb\nc", ["A", "x"], 0.5),
    # Pairs of answers in order: b<c, a<c but not a<b; of three lines given there are three pairs.
    ("pairwise_accuracy", "b\na\nc", ["a", "b", "c"], 2 / 3),
    # A line too many makes six pairs.
    ("pairwise_accuracy", "a\nb\nc\nx", ["a", "b", "c"], 0.5),
    ("pairwise_accuracy", "a", ["a", "b"], 0),
    ("pairwise_accuracy", "a\nb", ["a"], 0),
    ("ndcg", "a\nb\nc", ["a", "b", "c"], 1),
    # Gains 2, 3 and 1 at ranks 1 to 3, against 3, 2 and 1.
    (
        "ndcg",
        "b\na\nc",
        ["a", "b", "c"],
        (2 + 3 / math.log2(3) + 1 / 2) / (3 + 2 / math.log2(3) + 1 / 2),
    ),
    ("ndcg", "x\ny", ["a", "b"], 0),
    ("summary_rouge_l", "The OLD cat sat", ["the cat  sat"], 6 / 7),
    ("summary_rouge_l_zh", "我来到北京清华大学", ["我在北京"], 4 / 7),
]
CLASSIFICATIONS = [
    ("city", "city", 1),
    ("city or country", "city", 0.5),
    ("nothing", "city", 0),
    ("country", "city", 0),
    # `city` is part of the right label, so it is not named by itself.
    ("a large city", "large city", 1),
    ("a large city", "city", 0.5),
    ("city\ncountry", "city", 1),
]
CHOICES = [
    ("B", "B", 1),
    (" The answer is B. Not A.", "B", 1),
    ("Because of A, B", "B", 0),
    ("Both", "B", 0),
    ("E", "B", 0),
]
ITEM = Item("id", "task", 10, [0], [1], ("answer",), 4, "qa_f1")


@pytest.mark.parametrize(("metric", "completion", "answers", "expected"), CASES)
def test_scores_by_hand(metric, completion, answers, expected):
    assert METRICS[metric](completion, answers, ()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("completion", "answer", "expected"), CLASSIFICATIONS)
def test_classification_by_hand(completion, answer, expected):
    assert METRICS["classification_first_line"](completion, [answer], LABELS) == expected


@pytest.mark.parametrize(("completion", "answer", "expected"), CHOICES)
def test_choices_by_hand(completion, answer, expected):
    assert METRICS["choice_letter"](completion, [answer], tuple("ABCD")) == expected


def test_more_mistakes_than_words_are_a_rate_above_one():
    assert word_error_rate("one two three", "four") == 3


def test_every_metric_has_a_case():
    assert {case[0] for case in CASES} | {"classification_first_line", "choice_letter"} == set(METRICS)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("completion", ["", " ", "\n", "。"], ids=repr)
def test_an_empty_answer_scores_nothing(metric, completion):
    assert METRICS[metric](completion, ["right"], LABELS) == 0


def test_rouge_of_a_sentence_longer_than_pythons_stack():
    words = [f"w{i}" for i in range(1100)]
    assert METRICS["rouge_l"](" ".join(words), [" ".join(words)], ()) == pytest.approx(1, abs=1e-6)


def test_an_item_is_scored_by_its_own_metric_and_labels():
    assert score(ITEM, "the answer") == 1
    assert score(replace(ITEM, metric="string_match_all", answers=("a", "z")), "a") == 0.5
    labels = replace(ITEM, metric="classification_first_line", answers=("city",), classes=LABELS)
    assert score(labels, "city or country") == 0.5
