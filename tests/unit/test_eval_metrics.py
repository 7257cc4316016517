import pytest

from vllm_sparse_plugin.tools.eval.items import Item, score

CASES = [
    # RULER: substrings, whatever the case.
    ("string_match_all", "They are ALPHA and beta.", ("alpha", "Beta", "gamma", "delta"), 0.5),
    ("string_match_all", " 1234567, 7654321", ("7654321", "1234567"), 1),
    ("string_match_all", "", ("alpha",), 0),
    # The needles' own: the first line and nothing else.
    ("exact_first_line", " 1234567\n7", ("1234567",), 1),
    ("exact_first_line", "1234567.", ("1234567",), 0),
]


@pytest.mark.parametrize(("metric", "completion", "answers", "expected"), CASES)
def test_scores(metric, completion, answers, expected):
    item = Item("x", "task", 4096, [], [], answers, answer_tokens=8, metric=metric)
    assert score(item, completion) == expected
