"""Measured accuracy of budgets and formats."""

import json

import pytest

from bench.common.models import SHAPES, open_model
from bench.quality.__main__ import main as quality_main
from bench.quality.accuracy import all_settings, unfinished
from bench.quality.accuracy import tables as accuracy_tables

QUALITY = {
    "context too short": (["--context", "100"], "context: got 100 tokens, allowed: from 4096 to the model's 32768"),
    "unknown task": (["--task", "riddle"], "task: got 'riddle', allowed: single, "),
    "no questions": (["--questions", "0"], "questions: got 0, allowed: 1 or more"),
}
ACCURACY = QUALITY | {
    "sparse as dense": (["--dense", "unique"], "dense: got 'unique', allowed: a backend of vLLM"),
    "dense as sparse": (["--sparse", "flash_attn"], "sparse: got 'flash_attn', allowed: a backend of the plugin"),
    "unknown format": (["--statistics", "int3"], "sparse_attention.selection.statistics: got 'int3', allowed: "),
    "no budget": (["--pages", "1"], "sparse_attention.selection.budget_tokens: got 8, allowed: "),
}


@pytest.mark.parametrize("case", ACCURACY)
def test_accuracy_refuses(refused, tmp_path, case):
    arguments, sentence = ACCURACY[case]
    assert refused(quality_main, "accuracy", "--output", str(tmp_path / "out"), *arguments).startswith(sentence)


def test_accuracy_measures_every_budget_and_format():
    found = all_settings(["dense"], ["unique"], [64, 8], ["int8", "bf16"])
    names = ["dense", "unique int8 64", "unique int8 8", "unique bf16 64", "unique bf16 8"]
    assert [setting.name for setting in found] == names
    assert json.loads(found[2].additional_config)["sparse_attention"]["selection"]["budget_tokens"] == 64
    rows = [
        {
            "setting": setting.name,
            "variant": setting.variant.name,
            "statistics": setting.statistics,
            "budget_pages": setting.pages,
            "task": "kv",
            "context_tokens": 4096,
            "questions": 8,
            "correct": i,
        }
        for i, setting in enumerate(found)
    ]
    first, second = accuracy_tables(rows)
    assert [column.header for column in first.columns] == ["context", "task", "dense", "64 pages", "8 pages"]
    assert [list(column.cells) for column in second.columns][2:] == [["0/8"], ["3/8"], ["4/8"]]


def test_after_a_failure_the_engines_behind_it_are_still_asked():
    found = all_settings(["dense"], ["unique"], [64, 8], ["int8"])
    rows = [{"setting": "dense"}] * 2 + [{"setting": "unique int8 64"}]
    assert unfinished(found, rows, 2) == 1
    assert unfinished(found, rows * 2, 2) == 2
    assert unfinished(found[:1], rows, 2) == 0


def test_shapes_have_what_is_read_of_a_model():
    for name in SHAPES:
        with open_model(name) as model:
            assert model.prefill_flops(0, 1024) < model.prefill_flops(0, 2048) / 2
