"""Scores of a completion between 0 and 1, as RULER, LongBench and LongBench-Pro define them.

A metric takes the completion, the right answers and, for classification, all labels. Packages for few metrics are
imported in these metrics: needles and RULER do not need them.
"""

from __future__ import annotations

import logging
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations

from transformers.data.metrics.squad_metrics import compute_f1

from vllm_sparse_plugin.tools import needles
from vllm_sparse_plugin.tools.eval.items import Item

Metric = Callable[[str, Sequence[str], Sequence[str]], float]
_ROUGE_RECURSION = 100_000


def string_match_all(completion: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """RULER: share of the answers that occur in the completion, ignoring case."""
    return sum(answer.lower() in completion.lower() for answer in answers) / len(answers)


def string_match_part(completion: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """RULER: whether any answer occurs in the completion, ignoring case."""
    return float(any(answer.lower() in completion.lower() for answer in answers))


def exact_first_line(completion: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Whether the first line equals the answer, as in `vllm-sparse needles`."""
    return float(needles.first_line(completion) in answers)


def qa_f1(completion: str, answer: str) -> float:
    """LongBench: SQuAD's F1 of words, without case, punctuation and articles."""
    return float(compute_f1(answer, completion))


def qa_f1_zh(completion: str, answer: str) -> float:
    """LongBench: F1 of jieba's words, without punctuation and symbols."""
    found, right = _chinese_words(completion), _chinese_words(answer)
    common = (Counter(found) & Counter(right)).total()
    return 2 * common / (len(found) + len(right)) if common else 0.0


def rouge_l(completion: str, answer: str) -> float:
    """LongBench: F1 of ROUGE-L in the package `rouge`, 0 for an empty text."""
    from rouge import Rouge

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(_ROUGE_RECURSION)  # the package recurses along the subsequence of a sentence
    try:
        return float(Rouge(metrics=["rouge-l"]).get_scores(completion, answer)[0]["rouge-l"]["f"])
    except ValueError:
        return 0.0
    finally:
        sys.setrecursionlimit(limit)


def rouge_l_zh(completion: str, answer: str) -> float:
    """LongBench: ROUGE-L over jieba's words."""
    return rouge_l(" ".join(_cut(completion)), " ".join(_cut(answer)))


def number_share(completion: str, answer: str) -> float:
    """LongBench's retrieval and count: share of the completion's numbers that equal the answer."""
    right, found = re.findall(r"\d+", answer)[:1], re.findall(r"\d+", completion)
    return sum([number] == right for number in found) / len(found) if found else 0.0


def code_similarity(completion: str, answer: str) -> float:
    """LongBench: edit similarity, in whole percent, of the first line that is neither a comment nor markup."""
    from rapidfuzz import fuzz

    lines = completion.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(fuzz.ratio(code, answer)) / 100


def classification(completion: str, answers: Sequence[str], classes: Sequence[str]) -> float:
    """LongBench: 1 / number of labels named, if the right one is named. Parts of the right label do not count."""

    def score(answer: str) -> float:
        named = [label for label in classes if label in completion and (label == answer or label not in answer)]
        return 1 / len(named) if answer in named else 0.0

    return max(score(answer) for answer in answers)


def choice_letter(completion: str, answers: Sequence[str], classes: Sequence[str]) -> float:
    """Multiple choice: whether the first standalone letter of a choice is the right one."""
    found = re.search(rf"\b[{''.join(classes)}]\b", completion)
    return float(found is not None and found[0] in answers)


def word_error_rate(completion: str, answer: str) -> float:
    """WER of a transcript: words to insert, delete or replace, divided by the words of the reference.

    Words are compared without case and punctuation; the rate may exceed 1.
    """
    from rapidfuzz.distance import Levenshtein

    right = _spoken_words(answer)
    return Levenshtein.distance(_spoken_words(completion), right) / len(right)


def word_accuracy(completion: str, answer: str) -> float:
    """Speech: 1 - WER, at least 0."""
    return max(0.0, 1 - word_error_rate(completion, answer))


def entity_error_rate(completion: str, entities: Sequence[str]) -> float:
    """Share of the entities that a transcript lacks. An entity named twice must occur twice."""
    transcript = " ".join(["", *_spoken_words(completion), ""])
    wanted = Counter(" ".join(_spoken_words(entity)) for entity in entities)
    # Adjacent words share a space, so a match must not consume it.
    found = sum(
        min(count, len(re.findall(f"(?<= ){re.escape(each)}(?= )", transcript))) for each, count in wanted.items()
    )
    return 1 - found / wanted.total()


def entity_accuracy(completion: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Speech: 1 - the entity error rate."""
    return 1 - entity_error_rate(completion, answers)


def line_accuracy(completion: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """LongBench-Pro's Accuracy: whether the first line of the answer is right."""
    return float(_answer_lines(completion)[0] == _normal(answers[0]))


def line_f1(completion: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """LongBench-Pro's F1_Score of the sets of lines."""
    found, right = set(_answer_lines(completion)), {_normal(answer) for answer in answers}
    return 2 * len(found & right) / (len(found) + len(right))


def line_recall(completion: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """LongBench-Pro's SubEM: share of the right lines that the answer contains."""
    found = _answer_lines(completion)
    return sum(_normal(answer) in found for answer in answers) / len(answers)


def pairwise_accuracy(completion: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """LongBench-Pro: share of the pairs of given lines that are in the right order."""
    found = _answer_lines(completion)
    place = {line: i for i, line in enumerate(found)}
    ordered = sum(
        first in place and second in place and place[first] < place[second]
        for first, second in combinations([_normal(answer) for answer in answers], 2)
    )
    pairs = len(found) * (len(found) - 1) // 2
    return ordered / pairs if pairs else 0.0


def ndcg(completion: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """LongBench-Pro: NDCG of the ranked lines, cut at the number of answers."""
    import pytrec_eval

    depth = len(answers)
    relevant = {_normal(answer): depth - i for i, answer in enumerate(answers)}
    found = _answer_lines(completion)
    ranked = {line: float(len(found) - i) for i, line in enumerate(found)}
    evaluator = pytrec_eval.RelevanceEvaluator({"query": relevant}, {f"ndcg_cut.{depth}"})
    return float(evaluator.evaluate({"query": ranked})["query"][f"ndcg_cut_{depth}"])


def _best(score: Callable[[str, str], float]) -> Metric:
    """Return a metric that takes the best score over the answers."""
    return lambda completion, answers, classes: max(score(completion, answer) for answer in answers)


def _of_first_line(metric: Metric) -> Metric:
    """LongBench's few-shot tasks score only the first line: models continue with the next example."""
    return lambda completion, answers, classes: metric(completion.lstrip("\n").split("\n")[0], answers, classes)


def _normalised(score: Callable[[str, str], float]) -> Callable[[str, str], float]:
    """LongBench-Pro compares summaries in lower case with single spaces."""
    return lambda completion, answer: score(_normal(completion), _normal(answer))


def _chinese_words(text: str) -> list[str]:
    words = ("".join(ch for ch in word.lower() if _counts(ch)) for word in _cut(text))
    return [word for word in words if word]


def _spoken_words(text: str) -> list[str]:
    words = ("".join(ch for ch in word if _counts(ch)) for word in text.casefold().split())
    return [word for word in words if word]


def _cut(text: str) -> list[str]:
    # Imported here: it warns on Python 3.12, and few metrics need it.
    import jieba

    jieba.setLogLevel(logging.WARNING)
    return list(jieba.lcut(text))


def _counts(character: str) -> bool:
    return unicodedata.category(character)[0] not in "PSZC"


def _normal(text: str) -> str:
    return " ".join(text.lower().split())


def _answer_lines(completion: str) -> list[str]:
    """LongBench-Pro: the lines after the last mark of an answer, in lower case with single spaces."""
    mark = "[Answer]" if "[Answer]" in completion else "[答案]"
    return [_normal(line) for line in completion.rpartition(mark)[2].strip().split("\n")]


METRICS: dict[str, Metric] = {
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
    "exact_first_line": exact_first_line,
    "qa_f1": _best(qa_f1),
    "qa_f1_first_line": _of_first_line(_best(qa_f1)),
    "qa_f1_zh": _best(qa_f1_zh),
    "rouge_l": _best(rouge_l),
    "rouge_l_first_line": _of_first_line(_best(rouge_l)),
    "rouge_l_zh": _best(rouge_l_zh),
    "classification_first_line": _of_first_line(classification),
    "number_share": _best(number_share),
    "code_similarity": _best(code_similarity),
    "choice_letter": choice_letter,
    "word_accuracy": _best(word_accuracy),
    "entity_accuracy": entity_accuracy,
    "line_accuracy": line_accuracy,
    "line_f1": line_f1,
    "line_recall": line_recall,
    "pairwise_accuracy": pairwise_accuracy,
    "ndcg": ndcg,
    "summary_rouge_l": _best(_normalised(rouge_l)),
    "summary_rouge_l_zh": _best(_normalised(rouge_l_zh)),
}
"""By the names in items and result files."""


def score(item: Item, completion: str) -> float:
    """Return the score of an item's completion by the item's own metric."""
    return METRICS[item.metric](completion, item.answers, item.classes)
