"""Needle questions for engines of several settings."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

from bench.common.models import Model, load_tokenizer
from vllm_sparse_plugin.tools.needles import Question, build_questions, check_questions


def check(model: Model, contexts: Sequence[int], tasks: Sequence[str], count: int) -> None:
    """Raise ConfigurationError for bad input before anything is computed."""
    check_questions(tasks, contexts, count, int(model.config["max_position_embeddings"]))


def write_questions(
    model: Model, contexts: Sequence[int], tasks: Sequence[str], count: int, seed: int, processes: int
) -> list[Question]:
    """Return `count` questions for each context and task. Documents are fitted to their length in parallel."""
    load_tokenizer(model.folder)  # a folder without a tokenizer is refused here, before a child starts
    pairs = list(product(contexts, tasks))
    build = partial(_build, model.folder, count, seed)
    # Spawned, because the parent may have threads and a CUDA context.
    with ProcessPoolExecutor(min(processes, len(pairs)), multiprocessing.get_context("spawn")) as pool:
        return [question for questions in pool.map(build, pairs) for question in questions]


def _build(folder: Path, count: int, seed: int, pair: tuple[int, str]) -> list[Question]:
    context, task = pair
    return build_questions(load_tokenizer(folder), task, context, count, seed)
