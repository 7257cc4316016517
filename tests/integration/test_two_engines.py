"""Engines with different backends and settings in one process answer as each does alone."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.engines import Engine, run_engine, save_shallow
from vllm.exceptions import VLLMValidationError

from vllm_sparse_plugin.tools.needles import library_text

SMALL = {
    "num_gpu_blocks_override": 80, "block_size": 128, "max_model_len": 2048, "max_num_batched_tokens": 1024,
    "enable_prefix_caching": False,
}  # fmt: skip


class Case(NamedTuple):
    """An engine, and arguments that its requests may have."""

    backend: str
    config: dict[str, Any]
    arguments: dict[str, Any] | None = None


PAIRS = {
    "pages and eviction": (
        Case("unique", {"selection": {"budget_tokens": 64}, "min_context_tokens": 256}, {"sparse_budget_tokens": 256}),
        Case("snapkv", {"compaction": {"budget_tokens": 128, "min_context_tokens": 256}}),
    ),
    "drafts and sparse prefill": (
        Case("lossless", {"selection": {"budget_tokens": 64}, "min_context_tokens": 256}),
        Case("zipvl_paper", {"prefill": {"tau": 0.3, "min_context_tokens": 256}}),
    ),
}


def answers_of(engine: Engine, case: Case) -> list[list[int]]:
    """Answers to a batch of prompts; one of them has the arguments of the case."""
    prompts = [library_text(start, 3000) for start in (0, 50_000, 100_000)]
    return engine.answer(prompts, 12, True, [None, case.arguments, None])


@pytest.mark.parametrize("pair", PAIRS)
def test_engines_of_one_process_answer_as_they_do_alone(tmp_path: Path, pair: str) -> None:
    first, second = PAIRS[pair]
    small = SMALL | {"model": str(save_shallow(tmp_path / "model", 2))}
    with run_engine(second.backend, second.config, **small) as engine:
        second_alone = answers_of(engine, second)
    with run_engine(first.backend, first.config, **small) as engine:
        first_alone = answers_of(engine, first)
        assert first_alone != second_alone
        beside = engine.beside(second.backend, second.config, **small)
        for _ in range(2):
            assert answers_of(engine, first) == first_alone
            assert answers_of(beside, second) == second_alone
        if first.arguments is not None:
            # Each engine checks the requests that it gets.
            with pytest.raises(
                VLLMValidationError, match="sparse_budget_tokens: got 256 with policy dense, allowed: none"
            ):
                answers_of(beside, second._replace(arguments=first.arguments))
            assert answers_of(beside, second) == second_alone


def test_the_model_of_an_ended_engine_holds_no_cache(tmp_path: Path) -> None:
    with run_engine("unique", model=str(save_shallow(tmp_path / "model", 2)), **SMALL) as engine:
        engine.answer([library_text(0, 3000)], 2)
        assert engine.end() == 0
