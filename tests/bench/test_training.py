import json
import os
import subprocess
import sys

import pytest
import torch
from support.llama import save_llama
from typer.testing import CliRunner

from bench.common.results import ROOT
from bench.training import PASSES, Shape, app, forward_of, is_available
from vllm_sparse_plugin.policies import UniqueSelection


def test_a_budget_of_everything_is_the_dense_pass():
    inputs = Shape(4, 2, 32, torch.float32).draw(64, "cpu")
    selection = UniqueSelection(budget_tokens=64, statistics="int8")
    dense = forward_of("math", inputs, selection)()
    for name in ("soft", "hard"):
        torch.testing.assert_close(forward_of(name, inputs, selection)(), dense)


def test_a_line_is_written_for_each_pass(tmp_path):
    path = tmp_path / "training.jsonl"
    shape = ["--query-heads", "4", "--kv-heads", "2", "--head-size", "32", "--budget-tokens", "32", "--repeats", "2"]
    arguments = ["run", "--output", str(path), "--device", "cpu", "--context", "64,128", *shape]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    about, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert "versions" in about
    assert [(row["context_tokens"], row["pass"]) for row in rows] == [
        (tokens, name) for tokens in (64, 128) for name in PASSES if is_available(name, "cpu")
    ]
    for row in rows:
        assert row["both"]["median_ms"] >= row["forward"]["p20_ms"] > 0
        assert row["backward"]["repeats"] == 2


def test_two_processes_train_as_one(tmp_path):
    model = save_llama(tmp_path / "tiny", longest=64)

    def arguments(output, rows_per_step):
        settings = json.dumps({"rows_per_step": rows_per_step, "lora_rank": 2, "learning_rate": 0.01})
        shape = ["--model", str(model), "--context", "64", "--steps", "3", "--budget-tokens", "32", "--device", "cpu"]
        return ["steps", "--output", str(output), *shape, "--settings", settings]

    done = CliRunner().invoke(app, arguments(tmp_path / "one.jsonl", 2))
    assert done.exit_code == 0, done.output
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "bench.training", *arguments(tmp_path / "two.jsonl", 1)]
    subprocess.run(command, check=True, timeout=300, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    one, two = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()[1:]]
        for name in ("one.jsonl", "two.jsonl")
    )
    assert [row["processes"] for row in one + two] == [1, 1, 1, 2, 2, 2]
    # The loss of a step shows whether the gradients of the previous step covered all rows.
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], abs=1e-3)
    assert [row["gradient_norm"] for row in two] == pytest.approx([row["gradient_norm"] for row in one], rel=1e-2)
    assert abs(one[-1]["loss"] - one[0]["loss"]) > 0.05
