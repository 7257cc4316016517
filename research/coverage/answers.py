"""Questions on needle-8m under fixed budgets and under coverage targets, with the pages that each of them reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.progress import Progress

from bench.common.console import open_console
from bench.common.models import load_tokenizer
from bench.common.results import Row
from research.study.documents import TASKS, Document, build_documents
from research.study.pipeline import Decoder, Prefix
from research.study.plan import PAIRS
from research.study.run import answer_questions, open_results
from research.study.settings import Setting
from vllm_sparse_plugin.policies import UniqueSelection
from vllm_sparse_plugin.tools.needles import STRESS_TASKS
from vllm_sparse_plugin.tools.provenance import describe_run

DENSE, FIXED, COVERAGE = "dense", "fixed", "coverage"
BUDGETS = (64, 128, 256, 512, 1024, 2048)
"""In tokens."""
TARGETS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
TASKS_ASKED = (*TASKS, *STRESS_TASKS)
"""Those whose needles lie in code, and the one whose documents are nothing but needles."""


def settings_of_rules(targets: Sequence[float] = TARGETS) -> dict[tuple[str, float], Setting]:
    """The settings by rule and target: a budget in tokens, or a share; the limits of a coverage are the default's."""
    policy = UniqueSelection()
    size = policy.page_size
    least, most, _ = policy.covering(1.0)
    base = Setting(PAIRS, size, sink_pages=policy.sink_pages, recent_pages=policy.recent_pages)
    settings: dict[tuple[str, float], Setting] = {(DENSE, 1.0): Setting(page_size=size)}
    settings |= {(FIXED, budget): replace(base, budget_tokens=budget) for budget in BUDGETS}
    for share in targets:
        limits = replace(base, budget_tokens=most * size, least_tokens=least * size)
        settings[COVERAGE, share] = replace(limits, coverage=share)
    return settings


def complete_pages(document: Document, page_size: int) -> float:
    """Complete pages that a token of the document's questions and answers has before it, their mean."""
    lengths = [len(document.tokens) + 1 + i for tail in document.tails for i in range(len(tail.tokens))]
    return sum(length // page_size for length in lengths) / len(lengths)


def measure(
    output: Path,
    folder: Path,
    contexts: Sequence[int],
    targets: Sequence[float],
    count: int,
    seed: int,
    device: str,
    time_limit: float,
    commit: str | None,
) -> bool:
    """Ask what the file lacks, a line for each document and setting; return whether the time was enough."""
    end = time.monotonic() + time_limit
    tokenizer, decoder = load_tokenizer(folder), Decoder(folder, device)
    file, done = open_results(output, describe_run(folder, commit))
    with file, Progress(console=open_console()) as progress:
        for context in contexts:
            by_task = {task: build_documents(tokenizer, task, context, count, seed) for task in TASKS_ASKED}
            # The first document of every task, then the second, and so on.
            in_turn = [(task, documents[index]) for index in range(count) for task, documents in by_task.items()]
            for task, document in progress.track(in_turn, description=str(context)):
                about = {"task": task, "context_tokens": context, "document": document.name}
                prefix: Prefix | None = None
                for (rule, target), setting in settings_of_rules(targets).items():
                    if (document.name, setting.name) in done:
                        continue
                    if time.monotonic() > end:
                        return False
                    prefix = prefix or decoder.prefill(document.tokens)
                    row: Row = about | {"setting": setting.name, "rule": rule, "target": target}
                    row |= {"asked": len(document.tails)}
                    row |= answer_questions(decoder, prefix, document, setting, folder)
                    if setting.is_dense:
                        row["pages_read"] = round(complete_pages(document, setting.page_size), 2)
                    file.write(row)
    return True
