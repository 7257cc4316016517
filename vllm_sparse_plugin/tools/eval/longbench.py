"""LongBench (arXiv 2308.14508) and LongBench-Pro (arXiv 2601.02872), from the user's files.

Files may also hold records of other benchmarks, see `benchmarks`. Each record becomes one item. The prompts are short
and written for this plugin, unless the user gives LongBench's file of prompts. Metrics and answer lengths are those of
the benchmarks. Long texts are cut in the middle, as in both benchmarks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.eval.benchmarks import (
    MARKS,
    Asked,
    InfiniteRecord,
    MileRecord,
    VideoRecord,
    has_pictures,
    tasks_of,
)
from vllm_sparse_plugin.tools.eval.items import Item, PlannedItem, Prompter
from vllm_sparse_plugin.tools.files import parse_json, read_json, read_text
from vllm_sparse_plugin.tools.needles import longest_fit

_ALLOWED = "JSON lines of LongBench, LongBench-Pro, InfiniteBench, MileBench or Video-MME"
_QUESTION = "Read the text.\n\n{context}\n\nQuestion: {input}\nGive only the answer, in a few words.\nAnswer:"
_QUESTION_ZH = "阅读文本。\n\n{context}\n\n问题：{input}\n只用几个词给出答案。\n答案："
_REPORT = "Read the text.\n\n{context}\n\nSummarise the text on one page.\nSummary:"
_EXAMPLES = "{context}\n{input}"
_CODE = "Complete the code with its next line.\n\n{context}{input}\n\nThe next line is:\n"
_PRO_ANSWER_TOKENS = 1024


@dataclass(frozen=True)
class _Dataset:
    metric: str
    answer_tokens: int
    prompt: str


_DATASETS = {
    "narrativeqa": _Dataset("qa_f1", 128, _QUESTION),
    "qasper": _Dataset("qa_f1", 128, _QUESTION),
    "multifieldqa_en": _Dataset("qa_f1", 64, _QUESTION),
    "multifieldqa_zh": _Dataset("qa_f1_zh", 64, _QUESTION_ZH),
    "hotpotqa": _Dataset("qa_f1", 32, _QUESTION),
    "2wikimqa": _Dataset("qa_f1", 32, _QUESTION),
    "musique": _Dataset("qa_f1", 32, _QUESTION),
    "dureader": _Dataset("rouge_l_zh", 128, "阅读文章。\n\n{context}\n\n问题：{input}\n答案："),
    "gov_report": _Dataset("rouge_l", 512, _REPORT),
    "qmsum": _Dataset(
        "rouge_l", 512, "Read the transcript.\n\n{context}\n\n{input}\nAnswer in a few sentences.\nAnswer:"
    ),
    "multi_news": _Dataset("rouge_l", 512, _REPORT),
    "vcsum": _Dataset("rouge_l_zh", 512, "阅读会议记录。\n\n{context}\n\n写一段总结。\n总结："),
    "trec": _Dataset("classification_first_line", 64, _EXAMPLES),
    "triviaqa": _Dataset("qa_f1_first_line", 32, _EXAMPLES),
    "samsum": _Dataset("rouge_l_first_line", 128, _EXAMPLES),
    "lsht": _Dataset("classification_first_line", 64, _EXAMPLES),
    "passage_count": _Dataset(
        "number_share",
        32,
        "{context}\n\nSome paragraphs above are repeated. How many different ones are there?\nNumber:",
    ),
    "passage_retrieval_en": _Dataset(
        "number_share",
        32,
        "{context}\n\nThis is the abstract of a paragraph:\n\n{input}\n\nOf which? Answer like: Paragraph 1\nAnswer:",
    ),
    "passage_retrieval_zh": _Dataset(
        "number_share", 32, "{context}\n\n这是其中一个段落的摘要：\n\n{input}\n\n是哪一段？回答格式：段落1\n答案："
    ),
    "lcc": _Dataset("code_similarity", 64, _CODE),
    "repobench-p": _Dataset("code_similarity", 64, _CODE),
}
_PRO_METRICS = {
    "T1.1": "ndcg", "T1.2": "ndcg", "T2.1": "pairwise_accuracy", "T2.2": "pairwise_accuracy",
    "T3.1": "line_accuracy", "T3.2": "line_accuracy", "T4.1": "summary_rouge_l", "T4.2": "summary_rouge_l",
    "T5.1": "line_f1", "T5.2": "line_f1", "T6.1": "line_recall", "T6.2": "line_f1", "T6.3": "pairwise_accuracy",
    "T7.1": "line_f1", "T7.2": "line_f1", "T7.3": "line_f1", "T8.1": "line_recall", "T8.2": "line_recall",
    "T8.3": "line_recall", "T9.1": "line_f1", "T9.2": "line_f1", "T10.1": "line_recall", "T10.2": "line_recall",
    "T11.1": "line_accuracy", "T11.2": "line_accuracy",
}  # fmt: skip
"""By number of the secondary task. T4 lacks half of its official score, the similarity of embeddings."""


class _Record(BaseModel):
    """A line of LongBench."""

    dataset: str
    context: str
    input: str
    answers: list[str] = Field(min_length=1)
    all_classes: list[str] | None = None

    @property
    def task(self) -> str:
        return self.dataset.removesuffix("_e")

    def asked(self, prompts: dict[str, str]) -> Asked:
        """Return the question of the record, with the user's prompt or the built-in one."""
        dataset = _DATASETS[self.task]
        head, _, tail = prompts.get(self.task, dataset.prompt).partition("{context}")
        before, after = head.format(input=self.input), tail.format(input=self.input)
        classes = tuple(self.all_classes or [])
        answers = tuple(self.answers)
        return Asked(
            before=before,
            context=self.context,
            after=after,
            answers=answers,
            answer_tokens=dataset.answer_tokens,
            metric=dataset.metric,
            classes=classes,
        )


class _ProRecord(BaseModel):
    """A line of LongBench-Pro."""

    context: str
    question_nonthinking: str
    answer: list[str] = Field(min_length=1)
    secondary_task: str
    language: Literal["English", "Chinese"]

    @property
    def task(self) -> str:
        return self.secondary_task.partition(" ")[0]

    def asked(self) -> Asked:
        """Return the question of the record."""
        metric = _PRO_METRICS[self.task]
        if metric == "summary_rouge_l" and self.language == "Chinese":
            metric = "summary_rouge_l_zh"
        after = f"\n\n\n\n{self.question_nonthinking}"
        return Asked(
            before="",
            context=self.context,
            after=after,
            answers=tuple(self.answer),
            answer_tokens=_PRO_ANSWER_TOKENS,
            metric=metric,
        )


_AnyRecord = _Record | _ProRecord | InfiniteRecord | MileRecord | VideoRecord


def read_prompts(path: Path) -> dict[str, str]:
    """Read LongBench's file of prompts: JSON with one text per data set, with `{context}` and optionally `{input}`.

    Raises:
        ConfigurationError: the file is not in this format.
    """
    allowed = "JSON of prompts with {context} by data set"
    try:
        prompts = read_json(path, "prompts", allowed)
        for prompt in prompts.values():
            head, mark, tail = prompt.partition("{context}")
            if not mark or not (head + tail).format(input="").strip():
                raise ValueError(f"a prompt without {{context}} or words: {prompt!r:.40}")
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        raise ConfigurationError(f"prompts: got {str(path)!r} ({error!s:.80}), allowed: {allowed}") from None
    return dict(prompts)


def plan_file(
    path: Path, prompts: dict[str, str], prompter: Prompter, context_tokens: int, most: int | None
) -> list[PlannedItem]:
    """Return an item of at most `context_tokens` tokens for each of the first `most` records of a task in a file.

    Raises:
        ConfigurationError: the file cannot be read, or a record is invalid; the message has its number.
    """
    planned: list[PlannedItem] = []
    taken: dict[str, int] = {}
    for number, record in enumerate(_records(path), 1):
        known = _known_tasks(record)
        if known is not None and record.task not in known:
            raise ConfigurationError(
                f"file: got {record.task!r} in record {number} of {str(path)!r}, allowed: {', '.join(known)}"
            )
        index = taken[record.task] = taken.get(record.task, -1) + 1
        if most is None or index < most:
            name = f"{record.task}/{context_tokens}/{path.name}/{number}"
            planned.append(PlannedItem(name, partial(_build, name, record, prompts, prompter, context_tokens)))
    return planned


def _known_tasks(record: _AnyRecord) -> Collection[str] | None:
    if isinstance(record, _Record):
        return _DATASETS
    return _PRO_METRICS if isinstance(record, _ProRecord) else tasks_of(type(record))


def _build(name: str, record: _AnyRecord, prompts: dict[str, str], prompter: Prompter, context_tokens: int) -> Item:
    asked = record.asked(prompts) if isinstance(record, _Record) else record.asked()
    before, text, after, answers, answer_tokens, metric, classes = asked
    limit = context_tokens - answer_tokens

    def cut(size: int) -> str:
        # The middle is cut, as in both benchmarks: the ends matter most.
        return text[: (size + 1) // 2] + text[len(text) - size // 2 :]

    def tokens(size: int) -> int:
        return len(prompter.encode(before + cut(size) + after))

    size = len(text)
    if tokens(size) > limit:
        size = longest_fit(size, tokens, limit)
        if size == 0:
            raise ConfigurationError(f"context: got {context_tokens} tokens, allowed: more for {name}")
    context, question = prompter.split(before + cut(size), after)
    return Item(
        id=name,
        task=record.task,
        context_tokens=context_tokens,
        context=context,
        question=question,
        answers=answers,
        answer_tokens=answer_tokens,
        metric=metric,
        classes=classes,
    )


def _kind_of(record: Any) -> type[_AnyRecord]:
    if not isinstance(record, dict) or "dataset" in record:
        return _Record
    if "secondary_task" in record:
        return _ProRecord
    return next((kind for mark, kind in MARKS if mark in record), _Record)


def _records(path: Path) -> Iterator[_AnyRecord]:
    for number, record in enumerate(_parse(path), 1):
        kind = _kind_of(record)
        if isinstance(record, dict) and has_pictures(record):
            raise ConfigurationError(
                f"file: got pictures or a video in record {number} of {str(path)!r}, allowed: records of text, and "
                "videos with their subtitles"
            )
        named = kind not in (_Record, _ProRecord)
        try:
            yield kind.model_validate({"task": path.stem, **record} if named else record)
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
            raise ConfigurationError(
                f"file: got record {number} of {str(path)!r} ({reason}), allowed: {_ALLOWED}"
            ) from None


def _parse(path: Path) -> list[Any]:
    """Return the records of a file of JSON lines or of one JSON list."""
    text = read_text(path, "file", _ALLOWED)
    if text.lstrip().startswith("["):
        return list(parse_json(text, path, "file", _ALLOWED))
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            records.append(parse_json(line, path, "file", _ALLOWED, number))
    if not records:
        raise ConfigurationError(f"file: got {str(path)!r} without a record, allowed: {_ALLOWED}")
    return records
