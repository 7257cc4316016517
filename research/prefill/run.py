"""Measures the settings of the plan and writes a line for each document and setting as soon as it is known."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from rich.progress import Progress

from bench.common.console import open_console
from bench.common.models import NEEDLE_8M, load_tokenizer
from bench.common.results import Row
from research.prefill.pipeline import Decoded, Prefiller, Tail
from research.prefill.plan import DENSE_DECODE, DOCUMENTS, SPARSE_DECODE, STAGES, Stage
from research.prefill.rules import Setting, ZipVL
from research.study.documents import TEXT, TEXT_TOKENS, Document
from research.study.documents import Tail as Question
from research.study.run import document_source, open_results
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.provenance import describe_run


@dataclass(frozen=True)
class Selection:
    """What of the plan is measured."""

    stages: Sequence[Stage]
    seed: int = 0
    """Of documents and needles."""
    time_limit: float = 3600
    """In seconds."""


def _right(questions: Sequence[Question], decoded: Decoded, extra: int) -> str:
    """1 for each right answer, 0 for each wrong one; `extra` tokens of the document come before each question."""
    tokenizer = load_tokenizer(NEEDLE_8M)
    best = decoded.best[:, extra:].tolist()
    return "".join("01"[tail.is_right(row, tokenizer)] for tail, row in zip(questions, best, strict=True))


def _loss(questions: Sequence[Question], decoded: Decoded, extra: int) -> float:
    """Mean negative log-probability of a token of the answers, of which each counts alike."""
    total = 0.0
    for row, question in zip(decoded.log_probability, questions, strict=True):
        end = extra + len(question.tokens) - 1
        total -= row[end - question.answer_tokens : end].mean().item()
    return total / len(questions)


def answer(prefiller: Prefiller, document: Document, setting: Setting, seed: int) -> Row:
    """Prefill a document with each of its questions, and answer them under dense and under sparse decode."""
    whole = len(document.tokens) // setting.tile * setting.tile
    prefilled = prefiller.prefill(document.tokens[:whole], setting, seed)
    rest = document.tokens[whole:]
    tails = [Tail([*rest, *tail.tokens], len(rest) + len(tail.tokens) - tail.answer_tokens) for tail in document.tails]
    dense, sparse = (prefiller.decode(prefilled, tails, setting, each, seed) for each in (DENSE_DECODE, SPARSE_DECODE))
    return {
        "right": _right(document.tails, dense, len(rest)),
        "right_sparse": _right(document.tails, sparse, len(rest)),
        "answer_loss": round(_loss(document.tails, dense, len(rest)), 6),
        "prefill_loss": round(prefilled.loss, 5),
        "density": [round(each, 4) for each in prefilled.density],
    }


def read_text(prefiller: Prefiller, document: Document, setting: Setting, seed: int) -> Row:
    """Prefill a document but for its newest tokens, and decode those densely."""
    prompt = len(document.tokens) - TEXT_TOKENS
    whole = prompt // setting.tile * setting.tile
    prefilled = prefiller.prefill(document.tokens[:whole], setting, seed)
    tail = Tail(document.tokens[whole:], prompt - whole)
    decoded = prefiller.decode(prefilled, [tail], setting, DENSE_DECODE, seed)
    return {
        "text_loss": round(-decoded.log_probability[0, prompt - whole - 1 :].mean().item(), 5),
        "density": [round(each, 4) for each in prefilled.density],
    }


def answer_after_zipvl(prefiller: Prefiller, document: Document, setting: ZipVL, seed: int) -> Row:
    """Prefill a document with each of its questions by ZipVL, and answer from everything and from the kept tokens."""
    rows: list[Row] = []
    for question in document.tails:
        tail = Tail(question.tokens, len(question.tokens) - question.answer_tokens)
        whole, kept = (prefiller.zipvl(document.tokens, tail, setting, drop, seed) for drop in (False, True))
        rows.append(
            {
                "right": _right([question], whole, 0),
                "right_sparse": _right([question], kept, 0),
                "answer_loss": _loss([question], whole, 0),
                "share": whole.share,
            }
        )
    return {
        "right": "".join(row["right"] for row in rows),
        "right_sparse": "".join(row["right_sparse"] for row in rows),
        "answer_loss": round(sum(row["answer_loss"] for row in rows) / len(rows), 6),
        "density": [round(sum(layer) / len(rows), 4) for layer in zip(*(row["share"] for row in rows), strict=True)],
    }


def measure(output: Path, selection: Selection, device: str, folder: Path | None, commit: str | None) -> bool:
    """Measure what the file lacks; return whether the time was enough.

    Args:
        output: of JSON lines; it may hold measurements already.
        selection: what to measure.
        device: torch's name of it.
        folder: keeps the documents.
        commit: to record, if the checkout cannot say it itself.
    """
    end = time.monotonic() + selection.time_limit
    file, done = open_results(output, describe_run(NEEDLE_8M, commit))
    with file, Progress(console=open_console()) as progress:
        source = document_source(selection.seed, folder)
        prefiller = Prefiller(NEEDLE_8M, device)
        for stage in selection.stages:
            for context in stage.contexts:
                by_task = [source((task, context, DOCUMENTS))[: stage.documents] for task in stage.tasks]
                # The first document of every task, then the second, and so on.
                in_turn = [document for row in zip(*by_task, strict=True) for document in row]
                for document in progress.track(in_turn, description=f"{stage.name} {context}"):
                    asked = Document(document.name, document.tokens, document.tails[: stage.questions])
                    name = f"{TEXT}-{document.name}" if stage.kind == "text" else document.name
                    for setting in stage.settings:
                        if (name, setting.name) in done:
                            continue
                        if time.monotonic() > end:
                            return False
                        begin = time.perf_counter()
                        seed = zlib.crc32(name.encode())
                        if isinstance(setting, ZipVL):
                            measured = answer_after_zipvl(prefiller, asked, setting, seed)
                        else:
                            read = read_text if stage.kind == "text" else answer
                            measured = read(prefiller, asked, setting, seed)
                        seconds = round(time.perf_counter() - begin, 3)
                        file.write({"document": name, "setting": setting.name} | measured | {"seconds": seconds})
                        done.add((name, setting.name))
    return True


def chosen_stages(
    names: list[str] | None, contexts: list[int] | None, patterns: list[str] | None, documents: int | None
) -> list[Stage]:
    """The plan's stages.

    Args:
        names: of stages; all of them by default.
        contexts: in tokens; those of the stages by default.
        patterns: of settings; a stage then has all settings of the plan that match, in place of its own.
        documents: per task and context; as many as a stage has by default.

    Raises:
        ConfigurationError: for an unknown stage, or if nothing is left.
    """
    known = {stage.name: stage for stage in STAGES}
    for name in names or []:
        if name not in known:
            raise ConfigurationError(f"stage: got {name!r}, allowed: {', '.join(known)}")
    stages = []
    for stage in (known[name] for name in names or known):
        lengths = tuple(context for context in stage.contexts if not contexts or context in contexts)
        settings = stage.settings
        if patterns:
            alike = [other.settings for other in STAGES if (other.kind == "zipvl") == (stage.kind == "zipvl")]
            plan = {setting.name: setting for group in alike for setting in group}
            settings = tuple(
                setting for name, setting in plan.items() if any(fnmatchcase(name, pattern) for pattern in patterns)
            )
        if lengths and settings:
            count = documents or stage.documents
            stages.append(replace(stage, contexts=lengths, settings=settings, documents=count))
    if not stages:
        raise ConfigurationError(
            "setting, context: got none that the stages have, allowed: see research/prefill/plan.py"
        )
    return stages
