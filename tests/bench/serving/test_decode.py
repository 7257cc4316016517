"""Measured decode steps."""

import sys
from contextlib import contextmanager

import pytest
from support.bench.serving import decode_rows, settings, write_results

from bench.common.models import open_model
from bench.common.options import parse_grid
from bench.common.results import read_run
from bench.serving.__main__ import main as serving_main
from bench.serving.decode import draw_prompts, forecast_seconds, measure_batch
from bench.serving.decode import table as decode_table
from bench.serving.plot import _draw


def test_prompts_differ_at_once_and_short_ones_begin_long_ones():
    prompts = draw_prompts(6, 100, 4096)
    assert len({prompt[0] for prompt in prompts}) == 6
    assert {len(prompt) for prompt in prompts} == {100}
    assert all(2 < token < 4096 for prompt in prompts for token in prompt)
    assert draw_prompts(2, 100, 4096) == prompts[:2]


def test_the_forecast_counts_each_token_of_a_prompt_once():
    with open_model("llama-3.1-8b") as model:
        short = forecast_seconds(model, settings(grid=parse_grid(["32K=1,8"])))
        again = forecast_seconds(model, settings(grid=parse_grid(["32K=8,8"]), repeats=1))
        longer = forecast_seconds(model, settings(grid=parse_grid(["32K=1,8", "64K=8"])))
        alone = forecast_seconds(model, settings(grid=parse_grid(["64K=8"])))
    assert again == pytest.approx(short, rel=0.05)
    assert alone < longer < alone + 2


def test_times_are_differences_over_new_tokens(monkeypatch):
    clock = 0.0
    asked = []

    def generate(prompts, tokens):
        nonlocal clock
        asked.append(tokens)
        clock += 5 + tokens * 0.002 + (0.004 if len(asked) == 5 else 0)
        return [96 for _ in prompts]

    monkeypatch.setattr("bench.serving.decode.time.perf_counter", lambda: clock)
    columns = measure_batch(generate, [[1] * 100], settings(), 90)
    assert asked == [1, 5, 5, 1, 5, 1, 5, 1]
    assert columns["ms_per_token"] == pytest.approx(2)
    assert columns["ms_per_token_p80"] > columns["ms_per_token_p20"] == pytest.approx(2)
    assert columns["prefill_seconds"] == pytest.approx(5.002)


def test_a_time_that_includes_prefill_is_no_result():
    with pytest.raises(RuntimeError, match="only 16 of a prompt's tokens came from the prefix cache, not 90"):
        measure_batch(lambda prompts, _: [16 for _ in prompts], [[1] * 100], settings(), 90)


def test_the_table_has_a_column_for_each_variant_and_a_dash_where_nothing_was_measured():
    lines = decode_table(decode_rows())
    assert [column.header for column in lines.columns] == ["context", "batch", "flash_attn", "unique"]
    cells = [list(column.cells) for column in lines.columns]
    assert cells[1] == ["1", "6", "1", "6", "1", "6", "24"]
    assert cells[3][-2:] == ["5.80", "-"]


def test_the_table_has_a_column_for_steps_of_one_token():
    rows = [row | {"one_token": False} for row in decode_rows()]
    again = [row | {"one_token": True, "ms_per_token": 1.5} for row in rows if row["variant"] == "unique"]
    lines = decode_table([*rows, *again])
    assert [column.header for column in lines.columns][3:] == ["unique", "unique, one token"]
    assert set(lines.columns[4].cells) == {"1.50"}


def test_the_plot_has_a_line_for_steps_of_one_token():
    pytest.importorskip("matplotlib")
    rows = [row for row in decode_rows() if row["batch"] == 1]
    again = [row | {"one_token": True, "ms_per_token": 1.5} for row in rows if row["variant"] == "unique"]
    (panel,) = _draw([*rows, *again], [1], "").axes
    lines = {line.get_label(): list(line.get_ydata()) for line in panel.lines}
    assert list(lines) == ["flash_attn", "unique", "unique, one token"]
    assert min(lines["unique"]) > 5
    assert set(lines["unique, one token"]) == {1.5}


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plot_draws_a_panel_for_each_batch(monkeypatch, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    results = write_results(tmp_path / "decode.jsonl", decode_rows())
    picture = tmp_path / f"decode{suffix}"
    monkeypatch.setattr(sys, "argv", ["bench", "plot", str(results), "--output", str(picture)])
    with pytest.raises(SystemExit) as ended:
        serving_main()
    assert not ended.value.code
    assert picture.stat().st_size > 5000


def test_decode_times_on_a_cpu_are_written_as_they_are_measured(monkeypatch, tmp_path, capsys):
    served = []

    @contextmanager
    def run_server(name, settings, _console):
        served.append((name, settings.backend))
        yield name

    monkeypatch.setattr("bench.serving.decode_cpu.run_server", run_server)
    monkeypatch.setattr(
        "bench.serving.decode_cpu.decode_seconds",
        lambda client, prompt, repeats: [len(prompt) * (1e-6 if client == "unique" else 3e-6)] * repeats,
    )
    monkeypatch.setattr("bench.serving.decode_cpu.operation_seconds", lambda context: {"score": context * 1e-9})
    output = tmp_path / "out.jsonl"
    arguments = ["decode-cpu", "--context", "2K,4K", "--repeats", "2", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        serving_main()
    assert not ended.value.code
    assert served == [("dense", None), ("unique", "unique")]
    rows = read_run(output).rows
    assert [(row.get("backend"), row["context_tokens"]) for row in rows] == [
        ("dense", 2048), ("dense", 4096), ("unique", 2048), ("unique", 4096), (None, 2048), (None, 4096)
    ]  # fmt: skip
    assert len(rows[0]["seconds_per_token"]) == 2
    assert "3.00" in capsys.readouterr().out
