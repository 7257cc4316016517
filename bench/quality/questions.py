"""Needle questions for engines of several settings."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

from bench.common.models import Model, load_tokenizer
from vllm_sparse_plugin.errors import ConfigurationError, expect_known
from vllm_sparse_plugin.tools.needles import MIN_CONTEXT_TOKENS, STRESS_TASKS, TASKS, Question, build_questions


def check(model: Model, contexts: Sequence[int], tasks: Sequence[str], count: int) -> None:
    """Raise ConfigurationError for bad input before anything is computed."""
    limit = int(model.config["max_position_embeddings"])
    for context in contexts:
        if not MIN_CONTEXT_TOKENS <= context <= limit:
            raise ConfigurationError(
                f"context: got {context} tokens, allowed: from {MIN_CONTEXT_TOKENS} to the model's {limit}"
            )
    expect_known("task", tasks, (*TASKS, *STRESS_TASKS))
    if count < 1:
        raise ConfigurationError(f"questions: got {count}, allowed: 1 or more")


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
