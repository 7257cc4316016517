"""Records of InfiniteBench (arXiv 2402.13718), MileBench (arXiv 2404.18532) and Video-MME (arXiv 2405.21075).

Field names are those of the benchmarks' public files, one record per line. The prompts are short and written for this
plugin. Items are token ids, so only text is asked: pictures and videos are refused. A video is asked by its subtitles.
"""

from __future__ import annotations

from string import ascii_uppercase
from typing import NamedTuple

from pydantic import BaseModel, Field, model_validator


class Asked(NamedTuple):
    """The question of a record."""

    before: str
    """Text before the context."""
    context: str
    """Text whose middle is cut if it is too long."""
    after: str
    """The question, after the context."""
    answers: tuple[str, ...]
    answer_tokens: int
    """Maximum tokens of the answer."""
    metric: str
    """Name in `metrics.METRICS`."""
    classes: tuple[str, ...] = ()
    """Labels to choose from."""


_CHOOSE = "Answer with the letter of the right choice.\nAnswer:"
_CHOICE_TOKENS = 16

_INFINITE = {
    "passkey": ("string_match_part", 8),
    "number_string": ("string_match_part", 16),
    "kv_retrieval": ("string_match_part", 64),
    "longbook_qa_eng": ("qa_f1", 40),
    "longbook_qa_chn": ("qa_f1_zh", 40),
    "longbook_sum_eng": ("rouge_l", 1200),
    "longbook_choice_eng": ("choice_letter", _CHOICE_TOKENS),
    "longdialogue_qa_eng": ("string_match_part", 40),
    "code_debug": ("choice_letter", _CHOICE_TOKENS),
    "math_find": ("number_share", 8),
}
"""Metric and answer length of InfiniteBench's tasks, by file name."""


class InfiniteRecord(BaseModel):
    """A line of InfiniteBench. The task is the name of its file."""

    context: str
    input: str
    answer: str | list[str | int | float] | int | float
    options: list[str] = []
    task: str

    def asked(self) -> Asked:
        """Return the question of the record."""
        metric, answer_tokens = _INFINITE[self.task]
        right = self.answer if isinstance(self.answer, list) else [self.answer]
        answers = tuple(str(each) for each in right)
        if metric == "choice_letter":
            return _choice(self.context, self.input, self.options, _letter_of(answers[0], self.options))
        after = f"\n\n{self.input}\nAnswer:"
        return Asked(
            before="", context=self.context, after=after, answers=answers, answer_tokens=answer_tokens, metric=metric
        )

    @model_validator(mode="after")
    def _answers_are_choices(self) -> InfiniteRecord:
        if _INFINITE.get(self.task, ("",))[0] == "choice_letter":
            right = self.answer[0] if isinstance(self.answer, list) and self.answer else self.answer
            _require_choice(str(right), self.options)
        elif self.answer == []:
            raise ValueError("an empty answer")
        return self


class _MileInstance(BaseModel):
    context: str
    images_path: list[str] = Field(default=[], max_length=0)
    choice_list: list[str] | None = None


class MileRecord(BaseModel):
    """A line of MileBench without pictures."""

    sample_id: int | str
    task_instance: _MileInstance
    response: str
    task_instruction: str = ""
    task: str

    def asked(self) -> Asked:
        """Return the question of the record."""
        context, choices = self.task_instance.context, self.task_instance.choice_list
        if choices:
            return _choice(context, "", choices, _letter_of(self.response, choices), self.task_instruction)
        return Asked(
            before=_paragraph(self.task_instruction),
            context=context,
            after="\nAnswer:",
            answers=(self.response,),
            answer_tokens=128,
            metric="rouge_l",
        )

    @model_validator(mode="after")
    def _answers_are_choices(self) -> MileRecord:
        if self.task_instance.choice_list:
            _require_choice(self.response, self.task_instance.choice_list)
        return self


class VideoRecord(BaseModel):
    """A line of Video-MME, with the subtitles of its video as text."""

    question_id: str
    question: str
    options: list[str] = Field(min_length=2)
    answer: str
    subtitles: str
    task_type: str = "video"
    task: str

    def asked(self) -> Asked:
        """Return the question of the record."""
        choices = [option.removeprefix(f"{letter}. ") for letter, option in _lettered(self.options)]
        return _choice(self.subtitles, self.question, choices, self.answer, "These are the subtitles of a video.")

    @model_validator(mode="after")
    def _answers_are_choices(self) -> VideoRecord:
        _require_choice(self.answer, list(dict(_lettered(self.options))))
        return self


MARKS: tuple[tuple[str, type[InfiniteRecord | MileRecord | VideoRecord]], ...] = (
    ("task_instance", MileRecord),
    ("question_id", VideoRecord),
    ("answer", InfiniteRecord),
)
"""Fields that identify a kind of record, and the kind. The first match wins."""


def tasks_of(kind: type[BaseModel]) -> tuple[str, ...] | None:
    """Return the tasks that records of a kind may have; None for any task."""
    return tuple(_INFINITE) if kind is InfiniteRecord else None


def has_pictures(record: dict[str, object]) -> bool:
    """Return whether a record asks about pictures, or about a video without subtitles."""
    instance = record.get("task_instance")
    if isinstance(instance, dict) and instance.get("images_path"):
        return True
    return "question_id" in record and "subtitles" not in record


def _choice(context: str, question: str, choices: list[str], letter: str, before: str = "") -> Asked:
    lettered = _lettered(choices)
    lines = "\n".join(f"{label}. {choice}" for label, choice in lettered)
    after = f"\n\n{_paragraph(question)}{lines}\n{_CHOOSE}"
    return Asked(
        before=_paragraph(before),
        context=context,
        after=after,
        answers=(letter,),
        answer_tokens=_CHOICE_TOKENS,
        metric="choice_letter",
        classes=tuple(dict(lettered)),
    )


def _letter_of(answer: str, choices: list[str]) -> str:
    """Return the letter of the choice with this text. Without such a choice, the answer is the letter."""
    return next((letter for letter, choice in _lettered(choices) if choice == answer), answer)


def _lettered(choices: list[str]) -> list[tuple[str, str]]:
    return list(zip(ascii_uppercase, choices, strict=False))


def _paragraph(text: str) -> str:
    return f"{text}\n\n" if text else ""


def _require_choice(answer: str, choices: list[str]) -> None:
    if not 2 <= len(choices) <= len(ascii_uppercase):
        raise ValueError(f"{len(choices)} choices")
    if answer not in choices and answer not in ascii_uppercase[: len(choices)]:
        raise ValueError("an answer that is none of the choices")
