import functools
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools import needles
from vllm_sparse_plugin.tools.eval import ruler
from vllm_sparse_plugin.tools.eval.items import Item, Prompter, score
from vllm_sparse_plugin.tools.eval.tasks import GROUPS, NAMES, choose_tasks, plan_perplexity, plan_tasks

CONTEXT = 4096
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}\n{% endfor %}<|assistant|>"
MAGIC = re.compile(r"^The special magic (number|uuid) for (.+) is: (.+)\.$", re.MULTILINE)


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "models" / "needle-8m")


@functools.cache
def prompter() -> Prompter:
    return Prompter(tokenizer())


def chat_prompter(template: str = TEMPLATE) -> Prompter:
    chat = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "models" / "needle-8m")
    chat.chat_template = template
    return Prompter(chat, chat=True)


@functools.cache
def item(task: str, context: int = CONTEXT, index: int = 0, seed: int = 0) -> Item:
    return ruler.build_item(ruler.TASKS[task], task, prompter(), context, index, seed)


def text(found: Item) -> tuple[str, str]:
    return prompter().decode(found.context), prompter().decode(found.question)


@pytest.mark.parametrize("task", ruler.TASKS)
def test_prompts_fill_the_context_and_leave_room_for_the_answer(task):
    found = item(task)
    assert found.id == f"{task}/{CONTEXT}/0"
    limit = CONTEXT - found.answer_tokens
    assert 0.97 * limit <= len(found.context) + len(found.question) <= limit


@pytest.mark.parametrize("task", ruler.TASKS)
def test_the_right_answer_scores_all_and_another_nothing(task):
    found = item(task)
    assert score(found, f" {', '.join(found.answers)}.") == 1
    assert score(found, " no idea") == 0
    assert score(found, found.answers[0]) == pytest.approx(1 / len(found.answers))


@pytest.mark.parametrize("task", ruler.TASKS)
def test_the_same_seed_gives_the_same_prompt_and_another_another(task):
    again = ruler.build_item(ruler.TASKS[task], task, prompter(), CONTEXT, 0, 0)
    assert again == item(task)
    assert again.digest == item(task).digest
    others = [item(task, index=1), item(task, seed=1)]
    assert {found.answers for found in others}.isdisjoint({again.answers})
    assert len({found.digest for found in (again, *others)}) == 3


# Kinds of values and keys, different keys in the text (None: as many as fit), values of a key, keys asked for.
NEEDLES = {
    "niah_single_1": ("number", "words", 1, 1, 1),
    "niah_single_2": ("number", "words", 1, 1, 1),
    "niah_single_3": ("uuid", "words", 1, 1, 1),
    "niah_multikey_1": ("number", "words", 4, 1, 1),
    "niah_multikey_2": ("number", "words", None, 1, 1),
    "niah_multikey_3": ("uuid", "uuid", None, 1, 1),
    "niah_multivalue": ("number", "words", 1, 4, 1),
    "niah_multiquery": ("number", "words", 4, 1, 4),
}
PATTERNS = {
    "number": r"\d{7}",
    "words": r"[a-z]{6} [a-z]{6}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}",
}


@pytest.mark.parametrize("task", NEEDLES)
def test_the_keys_asked_for_have_the_values_of_the_answer(task):
    kind, key_kind, keys, values_per_key, asked = NEEDLES[task]
    found = item(task)
    context, question = text(found)
    needles_found = [(key, value) for kind_found, key, value in MAGIC.findall(context) if kind_found == kind]
    counts = Counter(key for key, _ in needles_found)
    assert len(counts) == keys if keys else len(counts) > 30
    assert set(counts.values()) == {values_per_key}
    for key, value in needles_found:
        assert re.fullmatch(PATTERNS[key_kind], key)
        assert re.fullmatch(PATTERNS[kind], value)
    wanted = re.fullmatch(rf"\nWhat (?:is|are|are all) the special magic {kind}s? for (.+)\? Answer:", question)[1]
    assert len(wanted.split(", ")) == asked
    expected = [value for key in wanted.split(", ") for found_key, value in needles_found if found_key == key]
    assert Counter(found.answers) == Counter(expected)


def test_variables_are_assigned_along_one_chain():
    found = item("vt")
    context, question = text(found)
    shown, _, asked = context.partition("Answer: ")
    value = re.fullmatch(r"\nFind all variables that are assigned the value (\d+)\. Answer:", question)[1]
    assert value not in shown
    chain = [name for name, before in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", asked, re.MULTILINE)]
    assert tuple(chain) == found.answers
    assert len(set(chain)) == 5
    assigned = dict(re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", asked, re.MULTILINE))
    assert [assigned[name] for name in chain] == [value, *chain[:-1]]
    example = dict(re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", shown, re.MULTILINE))
    assert not set(example) & set(chain)
    assert asked.startswith(", ".join(example))


def test_common_words_are_thirty_times_in_the_list_and_the_others_three_times():
    found = item("cwe")
    context, question = text(found)
    listed = re.findall(r"(\d+)\. (\w+)", context.rpartition("than others.\n")[2])
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    counts = Counter(word for _, word in listed)
    assert {word for word, count in counts.items() if count == 30} == set(found.answers)
    assert set(counts.values()) == {30, 3}
    assert len(found.answers) == 10
    assert "10 most common words" in question
    example, answer = re.search(r"than others\.\n(.+)\n.+ Answer: (.+)\n", context).groups()
    most = [word for word, count in Counter(re.findall(r"\d+\. (\w+)", example)).items() if count == 3]
    assert set(most) == set(re.findall(r"\d+\. (\w+)", answer))
    assert not set(most) & set(counts)


def test_the_most_frequent_coded_words_come_after_the_dots():
    found = item("fwe")
    context, _ = text(found)
    ranked = Counter(context.partition("\n")[2].split()).most_common()
    assert [word for word, _ in ranked[:4]] == ["...", *found.answers]
    counts = [count for _, count in ranked]
    # The square of the rank.
    assert counts[1] / counts[0] == pytest.approx(1 / 4, rel=0.02)
    assert counts[2] / counts[0] == pytest.approx(1 / 9, rel=0.02)
    assert counts[3] > counts[4]


def test_a_context_that_is_too_small_for_a_task_is_refused():
    with pytest.raises(ConfigurationError, match="context: got 1024 tokens, allowed: more for the task cwe"):
        item("cwe", 1024)
    with pytest.raises(ConfigurationError, match="context: got 1024 tokens, allowed: 4096 or more"):
        plan_tasks(["vt"], prompter(), [CONTEXT, 1024], 1, 0)


def test_tasks_come_by_name_or_in_groups():
    assert len(GROUPS["ruler"]) == 11
    assert GROUPS["needles"] == needles.TASKS
    assert len(set(NAMES)) == len(NAMES)
    assert choose_tasks(["ruler", "kv", "vt"]) == [*ruler.TASKS, "kv"]
    with pytest.raises(ConfigurationError, match=r"task: got 'niah', allowed: ruler, needles, niah_single_1, "):
        choose_tasks(["niah"])


def test_needles_are_those_of_the_command_cut_at_the_question():
    questions = needles.build_questions(tokenizer(), "multikey", CONTEXT, 2, 3)
    found = [each.build() for each in plan_tasks(["multikey"], prompter(), [CONTEXT], 2, 3)]
    for question, each in zip(questions, found, strict=True):
        assert each.context + each.question == tokenizer().encode(question.prompt)
        assert prompter().decode(each.question).startswith("\nWhat is the special magic number for ")
        assert each.answers == (question.answer,)
        assert (each.answer_tokens, each.metric) == (needles.answer_tokens("multikey"), "exact_first_line")
    assert found[0].context == found[1].context


def test_a_token_over_the_boundary_belongs_to_the_question():
    # `return` is one token, `ret` and `urn` are others.
    whole = tokenizer().encode("def f(): return")
    context, question = prompter().split("def f(): ret", "urn")
    assert context + question == whole
    assert prompter().decode(question).endswith("return")


def test_a_chat_template_holds_the_question_and_its_special_tokens():
    chat = chat_prompter()
    context, question = chat.split("Some text.\n", "\nWhat is it?", " Answer:")
    assert chat.decode(context) == "<|user|>Some text.\n"
    assert chat.decode(question) == "\nWhat is it?\n<|assistant|> Answer:"
    assert context + question == chat.encode("Some text.\n\nWhat is it?", " Answer:")
    assert tokenizer().bos_token_id not in context


def test_a_chat_template_that_loses_the_question_is_refused():
    with pytest.raises(ConfigurationError, match="chat: got a template that changes the question"):
        chat_prompter("{{ messages[0].content | upper }}").split("Some text.\n", "\nWhat is it?")
    with pytest.raises(ConfigurationError, match="chat: got a tokenizer without a chat template"):
        Prompter(tokenizer(), chat=True)


@pytest.fixture
def prose(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(needles.library_text(0, 40_000))
    return path


def test_perplexity_scores_the_newest_tokens_of_windows_that_share_none(prose):
    planned = plan_perplexity([prose], prompter(), [1024, 2048], 3, 100)
    found = [each.build() for each in planned]
    assert [each.id for each in planned] == [each.id for each in found]
    assert [each.id for each in found[:4]] == [*(f"perplexity/1024/{i}" for i in range(3)), "perplexity/2048/0"]
    tokens = tokenizer().encode(prose.read_text(), add_special_tokens=False)
    ends = []
    for each in found[:3]:
        assert len(each.context) + len(each.question) == 1024
        assert len(each.question) == 100
        assert each.context[0] == tokenizer().bos_token_id
        window = each.context[1:] + each.question
        start = next(i for i in range(len(tokens)) if tokens[i : i + len(window)] == window)
        ends.append(start + len(window))
        assert (each.metric, each.answer_tokens) == ("nll", 0)
    assert ends[0] == 1023
    assert ends[-1] == len(tokens)
    assert min(second - first for first, second in pairwise(ends)) >= 100


def test_too_little_text_is_refused(prose):
    with pytest.raises(
        ConfigurationError, match=r"text: got \d+ tokens, allowed: 131071 or more for 1 windows of 131072"
    ):
        plan_perplexity([prose], prompter(), [131072], 1, 100)
    for scored in (0, 1024):
        with pytest.raises(ConfigurationError, match=f"scored_tokens: got {scored}, allowed: 1 to 1022"):
            plan_perplexity([prose], prompter(), [1024], 1, scored)
