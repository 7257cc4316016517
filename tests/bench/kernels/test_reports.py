"""Tables and figures of results, and options of the command."""

import dataclasses
import json
import sys
from importlib.machinery import ModuleSpec

import pytest
import torch
from support.bench.kernels import CPU, FakeTimer
from typer.testing import CliRunner

from bench.common.results import ResultFile
from bench.kernels import report, runner, timing
from bench.kernels.__main__ import main
from bench.kernels.calls import imported
from bench.kernels.cases import QUICK, Geometry, Grid
from bench.kernels.cli import app, grid_of
from bench.kernels.providers import PROVIDERS, Op
from bench.kernels.workload import Workload
from vllm_sparse_plugin.tools.provenance import describe_run


def test_a_spread_is_median_and_percentiles():
    spread = timing.Spread.of([5.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    assert (spread.median_us, spread.p20_us, spread.p80_us, spread.repeats) == (3.5, 2.0, 5.0, 6)
    assert timing.Spread.of([7.0]).p80_us == 7.0


def test_long_calls_are_copied_less_often():
    assert [timing.warm_copies(us) for us in (0.0, 5.0, 150.0, 4000.0)] == [20, 20, 13, 1]


RUN = {
    "versions": {},
    "hardware": {"gpu": "a GPU"},
    "read_bandwidth_gb_s": 4000.0,
    "launch_floor": timing.Timing(timing.Spread.of([2.0]), timing.Spread.of([1.0]), 20).fields(),
}


@pytest.fixture
def results(tmp_path):
    """A result file of the quick grid with all measurements except those of one rival."""

    class NoInputs(Workload):
        def decode_inputs(self, case):
            return case

        topk_inputs = decode_inputs

    ops = {
        name: Op(
            lambda workload, case: case,
            [
                dataclasses.replace(
                    each,
                    load=imported("no_such:x") if each.name == "FlashInfer" else lambda: None,
                    prepare=lambda loaded, inputs: lambda: None,
                    check=lambda inputs, calls: None,
                )
                for each in op.providers
            ],
        )
        for name, op in PROVIDERS.items()
    }
    path = tmp_path / "results.jsonl"
    workload = NoInputs(Geometry(), CPU, max_blocks=10**6)
    with ResultFile(path, RUN) as file:
        runner.Runner(ops, workload, FakeTimer(), 1e12, file.write, lambda: 1.0).run(QUICK.plan())
    return path


def test_results_are_read_as_they_were_written(results):
    found = report.read_results(results)
    assert found.about == json.loads(json.dumps(RUN))
    assert len(found.rows) == sum(
        provider.serves(case) for op, case in QUICK.plan() for provider in PROVIDERS[op].providers
    )


def test_the_table_shows_times_ratios_and_what_is_missing(results):
    done = CliRunner().invoke(app, ["table", str(results)])
    assert done.exit_code == 0, done.output
    assert "32q1s128K g4" in done.output
    assert "20.0 / 10.0  2.00x" in done.output
    assert "unavailable, 8 rows: FlashInfer: ModuleNotFoundError: No module named 'no_such'" in done.output


def test_figures_are_drawn_without_a_gpu(results, tmp_path):
    pytest.importorskip("matplotlib")
    done = CliRunner().invoke(app, ["plot", str(results), "--folder", str(tmp_path / "figures"), "--formats", "svg"])
    assert done.exit_code == 0, done.output
    files = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert files == [
        "attend_group4.svg",
        "decode_group4.svg",
        "prefill_group4.svg",
        "score_group4.svg",
        "speed_up_flashattention_3.svg",
        "topk.svg",
        "write_group4.svg",
    ]
    assert all((tmp_path / "figures" / name).stat().st_size > 5000 for name in files)


def test_options_replace_parts_of_the_grid():
    grid = grid_of(quick=True, only=["decode,topk"], grid=None, groups=["8"])
    assert (grid.ops, grid.steps, grid.groups) == (("decode", "topk"), QUICK.steps, (8,))
    steps = grid_of(True, ["attend"], ["8K,2K=2", "32K=4,1"], ["8"]).plan()
    assert [(case.batch, case.context) for _, case in steps if case.format == "int4"] == [
        (1, 32768), (2, 2048), (2, 8192), (4, 32768)
    ]  # fmt: skip
    assert grid_of(False, None, None, None) == Grid()
    both = grid_of(False, ["decode"], ["128K=1"], ["4"], ["leveled,int4"]).plan()
    assert [case.format for _, case in both] == ["leveled", "int4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--output", "x", "--only", "decode,sort"], "got 'sort', allowed: decode, route, route_unique, topk"),
        (["run", "--output", "x", "--grid", "2M=1"], "got '2M=1', allowed: CONTEXT=BATCH,..."),
        (["run", "--output", "x", "--grid", "2K=max"], "got '2K=max', allowed: CONTEXT=BATCH,..."),
        (["run", "--output", "x", "--groups", "2M"], "got '2M', allowed: positive integers"),
        (["run", "--output", "x", "--formats", "int3"], "got 'int3', allowed: int4, leveled, int8, int2, fp8, bf16"),
        (["run", "--output", "x", "--time-limit", "0"], "Invalid value for '--time-limit'"),
        (["run", "--output", "x"], "no CUDA device"),
        (["run"], "--output"),
        (["table", "no-such-file"], "no-such-file"),
        (["plot", __file__, "--folder", "x"], "test_reports.py"),
        (["plot", __file__, "--folder", "x", "--formats", "gif"], "got 'gif', allowed: svg, png"),
    ],
)
def test_bad_input_ends_in_one_message(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("program", "module", "command"),
    [
        ("/checkout/bench/kernels/__main__.py", "bench.kernels.__main__", "python -m bench.kernels"),
        ("/checkout/bench/decode_cpu.py", None, "python bench/decode_cpu.py"),
        ("/environment/bin/vllm-sparse", None, "vllm-sparse"),
    ],
)
def test_the_recorded_command_has_no_paths_of_the_machine(program, module, command, monkeypatch):
    spec = ModuleSpec(module, None) if module else None
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(sys, "argv", [program, "run", "--output", "/somewhere/out.jsonl", "--only", "topk,score"])
    described = describe_run(packages=["rich", "no-such"])
    assert described["command"] == f"{command} run --output out.jsonl --only topk,score"
    assert "model" not in described
    assert "rich" in described["versions"]
    assert "no-such" not in described["versions"]
