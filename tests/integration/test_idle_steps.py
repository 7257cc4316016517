"""Steps without requests, which data-parallel engines of experts compute, leave caches and answers alone."""

from pathlib import Path

import pytest
from support.engines import Engine, run_engine, save_shallow

from vllm_sparse_plugin.tools.needles import library_text

_SELECTION = {"selection": {"budget_tokens": 64}, "min_context_tokens": 256}
SETTINGS = {
    "unique": _SELECTION,
    "art": {"min_context_tokens": 256},
    "unique_prefill": _SELECTION | {"prefill": {"min_context_tokens": 256, "min_blocks": 2}},
}


def logprobs(engine: Engine) -> list[list[dict[int, float]]]:
    """The log probabilities of two batches of the same prompts. The second batch has prefix hits."""
    prompts = [list(library_text(start, length).encode()) for start, length in ((0, 600), (50_000, 1500), (9000, 900))]
    return [engine.expect(prompts, max_tokens=12) for _ in range(2)]


@pytest.mark.parametrize("backend", SETTINGS)
def test_steps_without_requests_change_no_answer(tmp_path: Path, backend: str) -> None:
    small = {
        "model": str(save_shallow(tmp_path / "model", 2)), "num_gpu_blocks_override": 60, "block_size": 128,
        "max_model_len": 2048, "max_num_batched_tokens": 512,
    }  # fmt: skip
    with run_engine(backend, SETTINGS[backend], **small) as engine:
        alone = logprobs(engine)
    with run_engine(backend, SETTINGS[backend], **small) as engine:
        engine.idle_after_steps()
        assert logprobs(engine) == alone
