import json
import re
from pathlib import Path

import pytest
from support.eval_files import CONTEXT, build, prompter, text

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools import needles
from vllm_sparse_plugin.tools.eval.longbench import plan_file, read_prompts
from vllm_sparse_plugin.tools.eval.metrics import METRICS, score

# The data sets of LongBench with the metric and the room for answers of its own code.
LONGBENCH = {
    "narrativeqa": ("qa_f1", 128), "qasper": ("qa_f1", 128), "multifieldqa_en": ("qa_f1", 64),
    "multifieldqa_zh": ("qa_f1_zh", 64), "hotpotqa": ("qa_f1", 32), "2wikimqa": ("qa_f1", 32),
    "musique": ("qa_f1", 32), "dureader": ("rouge_l_zh", 128), "gov_report": ("rouge_l", 512),
    "qmsum": ("rouge_l", 512), "multi_news": ("rouge_l", 512), "vcsum": ("rouge_l_zh", 512),
    "trec": ("classification_first_line", 64), "triviaqa": ("qa_f1_first_line", 32),
    "samsum": ("rouge_l_first_line", 128), "lsht": ("classification_first_line", 64),
    "passage_count": ("number_share", 32), "passage_retrieval_en": ("number_share", 32),
    "passage_retrieval_zh": ("number_share", 32), "lcc": ("code_similarity", 64),
    "repobench-p": ("code_similarity", 64),
}  # fmt: skip
ASK_NOTHING = ("gov_report", "multi_news", "vcsum", "passage_count")
PRO = {
    "T1.1 Global Cohesive Retrieval": "ndcg", "T2.2 Local Causal Chain Sorting": "pairwise_accuracy",
    "T3.2 Single-Hop Fact QA": "line_accuracy", "T4.1 Global-Coverage Constrained Summary": "summary_rouge_l",
    "T5.1 Full-Sentence Citation Alignment": "line_f1", "T6.1 Large-Scale Document Clustering": "line_recall",
    "T6.3 Global Frequency Analysis": "pairwise_accuracy", "T10.1 Large-Scale In-Context Rule Induction": "line_recall",
    "T11.2 Short-Range Reference Resolution & State Query": "line_accuracy",
}  # fmt: skip


def record(dataset: str = "hotpotqa", **changes: object) -> dict:
    return {
        "input": "Who is it?", "context": "A text about Ann. {braces} stay.", "answers": ["Ann"], "length": 7,
        "dataset": dataset, "language": "en", "all_classes": None, "_id": "abc",
    } | changes  # fmt: skip


def pro_record(task: str = "T3.2 Single-Hop Fact QA", **changes: object) -> dict:
    return {
        "id": "x", "context": "A text about Ann.", "language": "English", "token_length": "8k", "primary_task": "T3",
        "secondary_task": task, "contextual_requirement": "Full", "question_nonthinking": "Who?\n[Answer]",
        "question_thinking": "Think. Who?", "answer": ["Ann", "Bob"], "difficulty": "Easy",
    } | changes  # fmt: skip


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "file.jsonl"


@pytest.mark.parametrize("suffix", ["", "_e"])
@pytest.mark.parametrize("dataset", LONGBENCH)
def test_records_of_longbench(path, dataset, suffix):
    (item,) = build(path, [record(dataset + suffix, all_classes=["Ann", "Bob"])])
    assert item.id == f"{dataset}/{CONTEXT}/file.jsonl/1"
    assert (item.task, item.metric, item.answer_tokens) == (dataset, *LONGBENCH[dataset])
    assert item.metric in METRICS
    assert (item.answers, item.classes) == (("Ann",), ("Ann", "Bob"))
    context, question = text(item)
    # What follows the context is the question.
    assert "A text about Ann. {braces} stay" in context
    assert "A text about Ann" not in question
    assert question.strip()
    assert "{context}" not in context + question
    assert "{input}" not in context + question
    assert ("Who is it?" in question) == (dataset not in ASK_NOTHING)


@pytest.mark.parametrize("task", PRO)
def test_records_of_longbench_pro(path, task):
    (item,) = build(path, [pro_record(task)], context=2048)
    assert (item.task, item.metric, item.answer_tokens) == (task.partition(" ")[0], PRO[task], 1024)
    assert text(item) == ("A text about Ann.", "\n\n\n\nWho?\n[Answer]")
    assert item.answers == ("Ann", "Bob")
    assert score(item, "[Answer]\nAnn\nBob") == pytest.approx(0.5 if "T4" in task else 1, abs=1e-6)


def test_chinese_summaries_are_cut_into_words(path):
    task = "T4.2 Query-Focused Summary"
    (item,) = build(path, [pro_record(task, language="Chinese", answer=["我在北京"])], context=2048)
    assert score(item, "我来到北京清华大学") == pytest.approx(4 / 7)


def test_what_is_too_long_is_cut_in_the_middle(path):
    long = "BEGIN " + needles.library_text(0, 20_000) + " END"
    records = [record(context=long), pro_record(context=long)]
    for item, room in zip(build(path, records, 2048), (32, 1024), strict=True):
        limit = 2048 - room
        assert limit - 3 <= len(item.context) + len(item.question) <= limit
        context, question = text(item)
        assert "BEGIN " in context
        assert context.endswith(" END")
        assert "Who" in question


def test_a_separator_of_lines_in_a_text_is_no_end_of_a_record(path):
    (item,) = build(path, [record(context="one\u2028two\x85three")])
    assert "one\u2028two\x85three" in text(item)[0]


def test_the_first_records_of_each_task(path):
    records = [record("trec"), record("qasper"), record("trec"), record("trec"), record("qasper")]
    ids = [item.id for item in build(path, records, most=2)]
    assert ids == [f"{task}/{CONTEXT}/file.jsonl/{i}" for task, i in
                   [("trec", 1), ("qasper", 2), ("trec", 3), ("qasper", 5)]]  # fmt: skip


def test_one_list_is_read_as_well(path):
    path.write_text(json.dumps([pro_record(), pro_record()], indent=1))
    assert len(plan_file(path, {}, prompter(), 2048, None)) == 2


def test_the_users_prompts_take_precedence(path, tmp_path):
    own = tmp_path / "dataset2prompt.json"
    own.write_text(json.dumps({"hotpotqa": "Passages:\n{context}\n\nQ: {input}\nA:", "lcc": "{context}Next:\n"}))
    items = build(path, [record(), record("lcc"), record("trec")], **read_prompts(own))
    assert text(items[0]) == ("Passages:\nA text about Ann. {braces} stay.", "\n\nQ: Who is it?\nA:")
    assert text(items[1]) == ("A text about Ann. {braces} stay.", "Next:\n")
    assert text(items[2])[1] == "\nWho is it?"


BAD = {
    "missing": (None, r"file: got '.*' \(No such file or directory\)"),
    "empty": ("\n", r"file: got '.*' without a record"),
    "no JSON": ('{"a": 1}\n{', r"file: got line 2 of '.*' \("),
    "a number": ("5", r"file: got record 1 of '.*' \("),
    "missing field": (json.dumps({"dataset": "trec"}), r"file: got record 1 of '.*' \(context: Field required\)"),
    "no answer": (json.dumps(record(answers=[])), r"file: got record 1 of '.*' \(answers: "),
    "unknown set": (json.dumps(record("foo")), r"file: got 'foo' in record 1 of '.*', allowed: narrativeqa, "),
    "unknown task": (json.dumps(pro_record("T12.1 New")), r"file: got 'T12.1' in record 1 of '.*', allowed: T1.1, "),
    "language": (json.dumps(pro_record(language="Dutch")), r"file: got record 1 of '.*' \(language: "),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_get_one_sentence(path, case):
    content, sentence = BAD[case]
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError) as caught:
        plan_file(path, {}, prompter(), CONTEXT, None)
    message = str(caught.value)
    assert re.match(sentence, message)
    assert "\n" not in message
    assert "allowed: " in message


def test_a_context_that_holds_no_text_is_refused(path):
    with pytest.raises(ConfigurationError, match="context: got 40 tokens, allowed: more for hotpotqa"):
        build(path, [record()], 40)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"a": 5}', '{"a": "no mark"}', '{"a": "{context} {other}"}'])
def test_a_bad_file_of_prompts_gets_one_sentence(tmp_path, content):
    own = tmp_path / "prompts.json"
    if content is not None:
        own.write_text(content)
    with pytest.raises(ConfigurationError, match=r"prompts: got '.*prompts.json' \(.+\), allowed: JSON of prompts"):
        read_prompts(own)
