"""Measures the settings of the plan and writes a line for each document and setting as soon as it is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from bench.common.console import open_console
from bench.common.models import NEEDLE_8M, load_tokenizer
from bench.common.results import ResultFile, Row, read_runs
from research.study.documents import TASKS, TEXT, TEXT_TOKENS, Document, load_documents
from research.study.pipeline import Decoder, Prefix
from research.study.plan import STAGES, Stage
from research.study.settings import Setting
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.provenance import describe_run

Build = tuple[str, int, int]
"""Task, context in tokens and number of documents."""


def chosen_stages(names: list[str] | None, contexts: list[int] | None, patterns: list[str] | None) -> list[Stage]:
    """The plan's stages, by name, with the settings that match one of `patterns`.

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
        settings = tuple(
            setting
            for setting in stage.settings
            if not patterns or any(fnmatchcase(setting.name, pattern) for pattern in patterns)
        )
        if lengths and settings:
            stages.append(replace(stage, contexts=lengths, settings=settings))
    if not stages:
        raise ConfigurationError("setting, context: got none that the stages have, allowed: see research/study/plan.py")
    return stages


class _Prefills:
    """Documents after their prefill: on a GPU in memory, and for a CPU, where it takes long, in a folder."""

    def __init__(self, decoder: Decoder, folder: Path | None, kept: int) -> None:
        on_cpu = decoder.device.type == "cpu"
        self._decoder, self._folder, self._kept = decoder, folder if on_cpu else None, 1 if on_cpu else kept
        self._prefixes: dict[str, Prefix] = {}

    def get(self, document: Document) -> Prefix:
        """Prefill a document unless that has been done."""
        if document.name not in self._prefixes:
            while len(self._prefixes) >= self._kept:
                self._prefixes.pop(next(iter(self._prefixes)))
            self._prefixes[document.name] = self._load(document)
        return self._prefixes[document.name]

    def _load(self, document: Document) -> Prefix:
        path = self._folder / f"{document.name}.pt" if self._folder else None
        if path and path.exists():
            tokens, keys, values = torch.load(path)
            if tokens == document.tokens:
                return Prefix(list(keys), list(values))
        prefix = self._decoder.prefill(document.tokens)
        if path:
            part = path.with_suffix(".part")
            torch.save((document.tokens, torch.stack(prefix.keys), torch.stack(prefix.values)), part)
            part.replace(path)
        return prefix


def answer_questions(
    decoder: Decoder, prefix: Prefix, document: Document, setting: Setting, folder: Path = NEEDLE_8M
) -> Row:
    """Answer a document's questions with the tokens of the model in `folder`; returns the columns of a result."""
    tokenizer = load_tokenizer(folder)
    decoded = decoder.decode(prefix, [tail.tokens for tail in document.tails], setting)
    right = [tail.is_right(best, tokenizer) for tail, best in zip(document.tails, decoded.best.tolist(), strict=True)]
    return {"right": "".join("01"[each] for each in right), "pages_read": round(decoded.pages_read, 2)}


def read_text(decoder: Decoder, prefix: Prefix, document: Document, setting: Setting) -> Row:
    """Decode the document's own newest tokens; returns the columns of a result."""
    begin = prefix.num_tokens - TEXT_TOKENS
    decoded = decoder.decode(prefix.first(begin), [document.tokens[begin:]], setting)
    return {"loss": round(-decoded.log_probability.mean().item(), 5), "pages_read": round(decoded.pages_read, 2)}


def open_results(path: Path, about: Mapping[str, Any]) -> tuple[ResultFile, set[tuple[str, str]]]:
    """The result file to append to, after a line about this run, and the documents and settings that it holds."""
    done: set[tuple[str, str]] = set()
    if path.exists() and (written := path.read_text(encoding="utf-8")):
        # A process that was killed may have left part of a line.
        path.write_text(written[: written.rfind("\n") + 1], encoding="utf-8")
        done = {(row["document"], row["setting"]) for run in read_runs(path) for row in run.rows}
    file = ResultFile(path)
    file.write(about)
    return file, done


def measure(
    output: Path,
    stages: list[Stage],
    documents: int,
    seed: int,
    device: str,
    folder: Path | None,
    shard: tuple[int, int],
    time_limit: float,
    commit: str | None,
) -> bool:
    """Measure what the file lacks; return whether the time was enough."""
    end = time.monotonic() + time_limit
    file, done = open_results(output, describe_run(NEEDLE_8M, commit))
    with file, Progress(console=open_console()) as progress:
        source = document_source(seed, folder)
        decoder = Decoder(NEEDLE_8M, device)
        prefills = _Prefills(decoder, folder, kept=2 * len(TASKS) * documents)
        for stage in stages:
            for context in stage.contexts:
                by_task = [source(build) for build in builds_of(stage, documents) if build[1] == context]
                # The first document of every task, then the second, and so on.
                in_turn = [document for row in zip(*by_task, strict=True) for document in row][shard[0] :: shard[1]]
                for document in progress.track(in_turn, description=f"{stage.name} {context}"):
                    name = f"{TEXT}-{document.name}" if stage.of_text else document.name
                    for setting in _lacking(stage, name, done):
                        if time.monotonic() > end:
                            return False
                        begin = time.perf_counter()
                        prefix = prefills.get(document)
                        read = read_text if stage.of_text else answer_questions
                        row = {"document": name, "setting": setting.name}
                        row |= read(decoder, prefix, document, setting)
                        row["seconds"] = round(time.perf_counter() - begin, 3)
                        file.write(row)
                        done.add((name, setting.name))
    return True


def document_source(seed: int, folder: Path | None) -> Callable[[Build], list[Document]]:
    """What returns the documents of a build, each made or read once."""
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(NEEDLE_8M)

    def load(build: Build) -> list[Document]:
        task, context, count = build
        return load_documents(folder, tokenizer, task, context, count, seed)

    return cache(load)


def builds_of(stage: Stage, documents: int) -> list[Build]:
    """The documents of a stage; where there are fewer tasks, more of each."""
    count = documents * len(TASKS) // len(stage.tasks)
    return [(task, context, count) for context in stage.contexts for task in stage.tasks]


def _lacking(stage: Stage, document: str, done: set[tuple[str, str]]) -> list[Setting]:
    """What has not been measured, with settings that keep the same of a page next to each other."""

    def kept(setting: Setting) -> str:
        return f"{setting.stress} {setting.page_size} {setting.score and setting.score.summary_key}"

    return sorted((each for each in stage.settings if (document, each.name) not in done), key=kept)
