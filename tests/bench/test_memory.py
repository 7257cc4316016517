"""Long prompts in an engine that gives nearly all memory to the KV cache."""

import math
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from bench.common.engine import Variant
from bench.common.models import Model
from bench.common.results import read_run
from bench.robustness.__main__ import app
from bench.robustness.memory import command
from bench.robustness.memory.command import Watch, ask, faults_of, free_columns, watched
from vllm_sparse_plugin.errors import ConfigurationError

GIB = 2**30


def test_the_lowest_number_is_kept():
    watch = Watch(iter([9, 2, 7, 8, 6]).__next__)
    for _ in range(2):
        watch.look()
    assert [watch.restart(), watch.restart()] == [2, 6]


def test_a_thread_looks():
    numbers, was_read = iter([9, 7, 2, 8]), threading.Event()

    def read() -> int:
        number = next(numbers, None)
        if number is None:
            was_read.set()
        return number or 8

    with watched(read) as watch:
        assert was_read.wait(60)
        assert watch.restart() == 2


def test_memory_beyond_the_share_is_counted():
    assert free_columns(3 * GIB, 80 * GIB, 0.97) == {"lowest_free_gib": 3.0, "beyond_share_gib": 0}
    assert free_columns(GIB, 80 * GIB, 0.97) == {"lowest_free_gib": 1.0, "beyond_share_gib": 1.4}


def answered(tokens: int, logprob: float = -1.0) -> SimpleNamespace:
    steps = [{5: SimpleNamespace(logprob=logprob)}] * tokens
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5] * tokens, logprobs=steps)])


@pytest.mark.parametrize(
    ("done", "faults"),
    [
        ([answered(32)] * 2, []),
        ([answered(32)], ["1 of 2 answers are complete"]),
        ([answered(32), answered(31)], ["1 of 2 answers are complete"]),
        ([answered(32), answered(32, math.nan)], ["log probabilities are not finite"]),
    ],
)
def test_answers_that_are_missing_or_not_finite_are_faults(done, faults):
    assert faults_of(done, 2) == faults


@pytest.mark.parametrize("fails", [False, True])
def test_the_row_has_the_memory_of_start_and_prompts_or_the_failure(monkeypatch, fails):
    given = {}

    def generate(prompts, sampling, use_tqdm):
        given["prompts"] = prompts
        if fails:
            raise torch.OutOfMemoryError("CUDA out of memory\nmore")
        return [answered(sampling.max_tokens)] * len(prompts)

    @contextmanager
    def engine(model, variant, additional_config, **options):
        given.update(options)
        cache = SimpleNamespace(num_gpu_blocks=10, block_size=64)
        metrics = [SimpleNamespace(name="vllm:num_preemptions", value=3)]
        config = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache))
        yield SimpleNamespace(generate=generate, get_metrics=lambda: metrics, llm_engine=config), "UNIQUE"

    monkeypatch.setattr(command, "engine", engine)
    cuda = {
        "mem_get_info": lambda: (2 * GIB, 80 * GIB), "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: 70 * GIB, "max_memory_reserved": lambda: 71 * GIB,
        "memory_stats": lambda: {"num_alloc_retries": 1},
    }  # fmt: skip
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    model = Model(None, True, {"vocab_size": 100})
    row = ask(model, Variant.parse("unique"), 256, 2, 0.97)
    assert (given["gpu_memory_utilization"], given["max_model_len"]) == (0.97, 256)
    assert [len(prompt["prompt_token_ids"]) for prompt in given["prompts"]] == [224, 224]
    assert row["started"] == {"lowest_free_gib": 2.0, "beyond_share_gib": 0.4}
    if fails:
        assert row["faults"] == ["OutOfMemoryError: CUDA out of memory"]
        return
    assert row["faults"] == []
    assert row["asked"] == {
        "lowest_free_gib": 2.0, "beyond_share_gib": 0.4, "most_allocated_gib": 70.0, "most_reserved_gib": 71.0,
        "allocation_retries": 1,
    }  # fmt: skip
    assert (row["preemptions"], row["kv_cache_tokens"], row["backend"]) == (3, 640, "UNIQUE")


def run(output, *arguments: str) -> int:
    try:
        app(["memory", "--output", str(output), *arguments], standalone_mode=True)
    except SystemExit as error:
        return int(error.code or 0)
    return 0


def test_a_machine_without_a_gpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "describe_gpu", dict)
    with pytest.raises(ConfigurationError, match=r"^device: got no NVIDIA GPU, allowed: a machine with one$"):
        run(tmp_path / "rows")


def test_each_variant_has_a_process_and_one_that_ends_is_a_row(tmp_path, monkeypatch):
    output, asked = tmp_path / "rows", []

    def run_python(module, arguments, seconds, log):
        log.write_text("its log")
        if "h2o" in arguments:
            return 1
        app(arguments, standalone_mode=False)
        return 0

    def ask(*given):
        asked.append(given[1:])
        return {"faults": []}

    monkeypatch.setattr(command, "ask", ask)
    monkeypatch.setattr(command, "describe_gpu", lambda: {"gpu": "one"})
    monkeypatch.setattr(command, "run_python", run_python)
    assert run(output, "--variant", "unique", "--variant", "h2o") == 3
    first, second = read_run(output).rows
    about = {"variant": "unique", "context_tokens": 131072, "requests": 6, "utilization": 0.97}
    assert (first, asked) == (about | {"faults": []}, [(Variant.parse("unique"), 131072, 6, 0.97)])
    assert second == {"variant": "h2o", "faults": ["its process ended with 1"]}
    assert run(output, "--variant", "unique") == 0
