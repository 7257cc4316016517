import functools
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from vllm_sparse_plugin.tools.needles import ALL_TASKS, Question, answer_tokens, build_questions, is_correct

CONTEXT = 4096
FAR = 512
COUNT = 8  # the last needle of a document is asked for, too
NEEDLES = {"multiquery": 3}


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "models" / "needle-8m")


@functools.cache
def questions(task: str) -> list[Question]:
    return build_questions(tokenizer(), task, CONTEXT, COUNT, seed=0)


def tokens(text: str) -> int:
    return len(tokenizer().encode(text))


@pytest.mark.parametrize("task", ALL_TASKS)
def test_prompts_fill_the_context_and_leave_room_for_the_answer(task):
    assert len(questions(task)) == COUNT
    for question in questions(task):
        assert question.task == task
        assert question.context_tokens == CONTEXT
        assert 0.98 * CONTEXT <= tokens(question.prompt) <= CONTEXT - answer_tokens(task)


@pytest.mark.parametrize("task", ALL_TASKS)
def test_answers_fit_their_room(task):
    for question in questions(task):
        # The tokenizer adds <|bos|> here, an answer ends with <|eos|>: as many.
        assert tokens(f" {question.answer}") <= answer_tokens(task)


@pytest.mark.parametrize("task", ALL_TASKS)
def test_every_value_of_an_answer_is_in_the_prompt_once_and_far_from_its_end(task):
    for question in questions(task):
        values = question.answer.split(", ")
        assert len(values) == NEEDLES.get(task, 1)
        for value in values:
            assert question.prompt.count(value) == 1
            assert tokens(question.prompt[question.prompt.index(value) :]) >= FAR


@pytest.mark.parametrize("task", ALL_TASKS)
def test_the_asked_keys_belong_to_the_values_of_the_answer(task):
    for question in questions(task):
        document, _, line = question.prompt.rpartition("\n")
        if task == "kv":
            pairs = dict(re.findall(r'^"(\w+)": "(\w+)",$', document, re.MULTILINE))
            keys = re.findall(r'"(\w+)"', line)
        else:
            pairs = dict(re.findall(r"^The special magic number for (\w+ \w+) is: (\d+)\.$", document, re.MULTILINE))
            keys = re.search(r"for (.*)\? Answer:$", line)[1].split(", ")
        assert ", ".join(pairs[key] for key in keys) == question.answer
        assert len(pairs) == {"single": 1, "multikey": 16, "multiquery": 24, "kv": 16}.get(task, len(pairs))


@pytest.mark.parametrize("task", ALL_TASKS)
def test_the_same_seed_gives_the_same_questions_and_another_seed_others(task):
    again = build_questions(tokenizer(), task, CONTEXT, COUNT, seed=0)
    assert again == questions(task)
    other = build_questions(tokenizer(), task, CONTEXT, COUNT, seed=1)
    assert {question.answer for question in other}.isdisjoint(question.answer for question in again)


@pytest.mark.parametrize("task", ALL_TASKS)
def test_questions_of_a_document_differ_in_their_last_line_only(task):
    documents = {question.prompt.rpartition("\n")[0] for question in questions(task)}
    assert len(documents) == (COUNT if task == "single" else 1)
    assert len({question.prompt for question in questions(task)}) == COUNT


def test_a_document_has_eight_questions():
    asked = build_questions(tokenizer(), "kv", CONTEXT, 9, seed=0)
    documents = [question.prompt.rpartition("\n")[0] for question in asked]
    assert len(asked) == 9
    assert len(set(documents[:8])) == 1
    assert documents[8] != documents[0]


@pytest.mark.parametrize(
    ("completion", "right"),
    [(" 1, 2", True), (" 1, 2 \n\n3", True), ("\n1, 2\n3", True), ("", False), ("1, 2.", False), ("x\n1, 2", False),
     ("1", False), ("2, 1", False), ("1, 2, 3", False)],
)  # fmt: skip
def test_the_first_line_is_the_answer(completion, right):
    assert is_correct(Question("multiquery", CONTEXT, "prompt", "1, 2"), completion) == right
