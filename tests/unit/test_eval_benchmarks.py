import json
import re
from pathlib import Path

import pytest
from support.eval_files import CONTEXT, build, prompter, text

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.eval.items import Item
from vllm_sparse_plugin.tools.eval.longbench import plan_file
from vllm_sparse_plugin.tools.eval.metrics import METRICS, score

INFINITE = {"id": 1, "context": "A text about Ann.", "input": "Who is it?", "answer": ["Ann"], "options": []}
CHOOSING = INFINITE | {"options": ["Bob", "Ann", "Eve", "Jim"]}
MILE = {
    "sample_id": 3, "task_instruction_id": 0, "task_instruction": "Read.",
    "task_instance": {"context": "A text about Ann.", "images_path": [], "choice_list": ["Bob", "Ann"]},
    "response": "Ann",
}  # fmt: skip
VIDEO = {
    "video_id": "001", "duration": "short", "domain": "Knowledge", "sub_category": "History", "url": "http://x",
    "videoID": "x", "question_id": "001-1", "task_type": "Counting", "question": "Who is it?",
    "options": ["A. Bob.", "B. Ann.", "C. Eve.", "D. Jim."], "answer": "B", "subtitles": "A text about Ann.",
}  # fmt: skip


def one(tmp_path: Path, name: str, record: dict) -> Item:
    (item,) = build(tmp_path / f"{name}.jsonl", [record])
    return item


@pytest.mark.parametrize(
    ("task", "metric"),
    [("passkey", "string_match_part"), ("longbook_qa_eng", "qa_f1"), ("longbook_sum_eng", "rouge_l")],
)
def test_records_of_infinitebench_have_the_task_of_their_file(tmp_path, task, metric):
    (item,) = build(tmp_path / f"{task}.jsonl", [INFINITE], 2048)
    assert (item.task, item.metric, item.answers) == (task, metric, ("Ann",))
    assert text(item) == ("A text about Ann.", "\n\nWho is it?\nAnswer:")
    assert score(item, "Ann") == pytest.approx(1, abs=1e-6)


def test_numbers_of_infinitebench_are_answers(tmp_path):
    item = one(tmp_path, "math_find", INFINITE | {"answer": 17})
    assert [score(item, said) for said in ("17", "71")] == [1, 0]


CHOICES = {
    "InfiniteBench": ("longbook_choice_eng", CHOOSING, "Who is it?"),
    "InfiniteBench by letter": ("code_debug", CHOOSING | {"answer": "B"}, "Who is it?"),
    "MileBench": ("any", MILE, "A. Bob\nB. Ann"),
    "Video-MME": ("videomme", VIDEO, "A. Bob.\nB. Ann."),
}


@pytest.mark.parametrize("case", CHOICES)
def test_choices_are_asked_by_letter(tmp_path, case):
    name, record, asked = CHOICES[case]
    item = one(tmp_path, name, record)
    context, question = text(item)
    assert context.endswith("A text about Ann.")
    assert asked in question
    assert "\nB. Ann" in question
    assert "B. B." not in question
    assert item.metric == "choice_letter"
    assert item.metric in METRICS
    assert [score(item, said) for said in ("B", "The answer is A.", "Ann")] == [1, 0, 0]


def test_open_questions_of_milebench(tmp_path):
    item = one(tmp_path, "any", MILE | {"task_instance": {"context": "A text.", "choice_list": None}})
    assert text(item) == ("Read.\n\nA text.", "\nAnswer:")
    assert (item.metric, score(item, "Ann")) == ("rouge_l", pytest.approx(1, abs=1e-6))


def without(record: dict, *names: str) -> dict:
    return {name: value for name, value in record.items() if name not in names}


BAD = {
    "pictures": (MILE | {"task_instance": MILE["task_instance"] | {"images_path": ["a.png"]}},
                 r"file: got pictures or a video in record 1 of '.*', allowed: records of text"),
    "a video": (without(VIDEO, "subtitles"), r"file: got pictures or a video in record 1 of '.*', allowed: records"),
    "no choice": (MILE | {"response": "Jim"}, r"file: got record 1 of '.*' \(.*none of the choices\), allowed: JSON"),
    "one choice": (CHOOSING | {"options": ["Ann"]}, r"file: got record 1 of '.*' \(.*1 choices\), allowed: JSON"),
    "no answer": (CHOOSING | {"answer": []}, r"file: got record 1 of '.*' \(.*none of the choices"),
    "no field": (without(VIDEO, "question"), r"file: got record 1 of '.*' \(question: Field required\), allowed: JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_records_get_one_sentence(tmp_path, case):
    record, sentence = BAD[case]
    path = tmp_path / "longbook_choice_eng.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigurationError) as caught:
        plan_file(path, {}, prompter(), CONTEXT, None)
    assert re.match(sentence, str(caught.value))
    assert "\n" not in str(caught.value)


def test_an_open_question_needs_an_answer(tmp_path):
    with pytest.raises(ConfigurationError, match=r"\(Value error, an empty answer\), allowed: JSON lines of LongBench"):
        one(tmp_path, "passkey", INFINITE | {"answer": []})


def test_choices_that_look_like_letters(tmp_path):
    options = ["A. B", "B. A", "C. D"]
    assert one(tmp_path, "video", VIDEO | {"options": options, "answer": "B"}).answers == ("B",)
    choosing = CHOOSING | {"options": ["B", "A"], "answer": "B"}
    assert one(tmp_path, "longbook_choice_eng", choosing).answers == ("A",)


def test_an_unknown_task_of_infinitebench_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"file: got 'math_calc' in record 1 of .*, allowed: passkey, "):
        one(tmp_path, "math_calc", INFINITE)
