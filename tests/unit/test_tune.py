"""`vllm-sparse tune` over result files that no engine made."""

import json
import math
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from vllm_sparse_plugin.config import KEY, resolve
from vllm_sparse_plugin.config.account import ModelKeys
from vllm_sparse_plugin.tools import endings
from vllm_sparse_plugin.tools.cli import main, tune
from vllm_sparse_plugin.tools.eval import statistics

MODEL = Path(__file__).parents[2] / "models" / "needle-8m"
PROMPTS = 40
KEPT = {
    "dense": 20, "dense-again": 19, "unique-256": 10, "unique-1024": 15, "unique-4096": 19, "unique-8192": 20,
    "snapkv-256": 12, "snapkv-1024": 19, "art": 19, "backend-dense": 20,
}  # fmt: skip
"""Of twenty positions of a prompt, those whose most likely token is that of dense attention."""


def shares_of(label: str) -> dict[str, float]:
    """Of what a setting with a budget has: a share of 8,192 tokens."""
    name, _, budget = label.rpartition("-")
    read = int(budget) / 8192 if budget.isdigit() else {"art": 0.9}.get(label, 1.0)
    kept = read if name == "snapkv" else 1.0
    statistics = 1 / 16 if name == "unique" and read < 1 else 0.0
    return {
        "key_read_share": read, "key_kept_share": kept, "kv_read_share": read + statistics,
        "memory_share": kept + statistics,
    }  # fmt: skip


def result(label: str, prompt: int) -> dict[str, object]:
    sure, unsure = {1: math.log(0.75), 2: math.log(0.25)}, {1: math.log(0.25), 2: math.log(0.75)}
    return {
        "id": f"completion/line {prompt}", "task": "completion", "context_tokens": 8192, "prompt_tokens": 8192,
        "forced_tokens": 20, "digest": "0", "answers": [], "completion": "", "metric": "nll",
        "score": 1 + 0.02 * (20 - KEPT[label]), "seconds": 1.5, **shares_of(label),
        "predictions": [sure if position < KEPT[label] else unsure for position in range(20)],
    }  # fmt: skip


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"text {i}"}) + "\n" for i in range(PROMPTS)))
    return path


@pytest.fixture
def evaluations(monkeypatch) -> list[list[str]]:
    """Commands that were run, each of which wrote what `KEPT` says."""
    commands: list[list[str]] = []

    def evaluate(command: list[str]) -> tuple[int, str]:
        commands.append(command)
        given = dict(pairwise(command))
        label, path = given["--label"], Path(given["--output"])
        asked = len(Path(given["--completions"]).read_text().splitlines())
        found = (result(label, i) for i in range(asked))
        rows = [{"settings": {"label": label, "decode_from": "prompt"}}, *found]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return 0, ""

    monkeypatch.setattr(tune, "_run", evaluate)
    monkeypatch.setattr(statistics, "_RESAMPLES", 99)
    return commands


@pytest.fixture
def run(monkeypatch, capsys, prompts, tmp_path):
    def call(*arguments: str) -> tuple[int, str, str]:
        base = ["--model", str(MODEL), "--prompts", str(prompts), "--output", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["vllm-sparse", "tune", *base, *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return call


def rows(out: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    return {name: rest for name, *rest in cells}


BUDGETS = ("--budget", "4096", "--budget", "256", "--budget", "1024")


@pytest.mark.parametrize(
    ("measure", "most", "excess", "chosen"),
    [
        ("agreement", 0.2, ["+45.0%", "+20.0%", "+0.0%"], "unique-4096"),
        ("overlap", 0.5, ["+22.5%", "+10.0%", "+0.0%"], "unique-256"),
        ("likelihood", 0.3, ["+16.1%", "+7.5%", "+0.0%"], "unique-1024"),
    ],
)
def test_what_reads_least_without_losing_more_beyond_the_noise_is_chosen(
    run, evaluations, tmp_path, measure, most, excess, chosen
):
    """Dense attention in other batches changes one token of twenty itself."""
    code, out, err = run(*BUDGETS, "--measure", measure, "--most-excess", str(most))
    assert (code, err) == (0, "")
    found = rows(out)
    assert list(found) == ["unique-256", "unique-1024", "unique-4096", "dense, other batches"]
    settings = {name: cells for name, cells in found.items() if name.startswith("unique")}
    assert [cells[1].split()[0] for cells in settings.values()] == excess
    assert [cells[5:8] for cells in settings.values()] == [
        ["3.1%", "100.0%", "9.4%"], ["12.5%", "100.0%", "18.8%"], ["50.0%", "100.0%", "56.2%"],
    ]  # fmt: skip
    assert [name for name, cells in found.items() if cells[8] == "chosen"] == [chosen]
    assert "Least bytes read per token first." in out
    _, *lines = map(json.loads, (tmp_path / "out" / "frontier.jsonl").read_text().splitlines())
    assert [line["setting"] for line in lines] == ["unique-4096", "unique-256", "unique-1024"]
    assert [line["agreement"]["value"] for line in lines] == pytest.approx([0.95, 0.5, 0.75])
    assert [line["dense_again"]["agreement"]["value"] for line in lines] == pytest.approx([0.95] * 3)
    assert [line["excess"]["agreement"]["value"] for line in lines] == pytest.approx([0, 0.45, 0.2])
    assert [line["nll"]["value"] for line in lines] == pytest.approx([0.02, 0.2, 0.1])
    assert [line["excess"]["nll"]["value"] for line in lines] == pytest.approx([0, 0.18, 0.08])
    # Half of a nat of KL divergence where a position differs: .75 log 3 + .25 log (1 / 3).
    assert [line["kl"]["value"] for line in lines] == pytest.approx([0.05 * 0.5493, 0.2747, 0.1373], abs=1e-3)
    assert lines[1]["key_read_share"] == pytest.approx(1 / 32)
    preset = tmp_path / "out" / "sparse.yaml"
    tokens = int(chosen.split("-")[1])
    assert resolve({"config": str(preset)}, "unique").selection.budget_tokens == tokens
    assert "lost beyond the noise of dense attention" in preset.read_text()
    assert str(preset) in out.splitlines()[-1]
    serve = f"vllm-sparse serve {MODEL} --attention-backend unique --additional-config "
    assert out.splitlines()[-1].startswith(serve)


def test_eviction_is_chosen_by_what_it_keeps(run, evaluations, tmp_path):
    both = ("--attention-backend", "unique", "--attention-backend", "snapkv", "--budget", "1024", "--budget", "256")
    code, out, _ = run(*both, "--minimise", "memory", "--most-excess", "0.2")
    assert code == 0
    found = rows(out)
    assert "Least memory of the KV cache first." in out
    assert found["snapkv-1024"][5:8] == ["12.5%", "12.5%", "12.5%"]
    assert found["unique-1024"][5:8] == ["12.5%", "100.0%", "106.2%"]
    assert found["snapkv-1024"][8] == "chosen"
    preset = resolve({"config": str(tmp_path / "out" / "sparse.yaml")}, "snapkv")
    assert preset.compaction.budget_tokens == 1024
    # By bytes it is the same here: what is kept is read.
    assert run(*both, "--most-excess", "0.2")[0] == 0


@pytest.mark.parametrize("backend", ["unique", "quest", "streaming_llm", "snapkv", "pyramidkv", "h2o"])
def test_every_budget_moves_what_is_read_or_kept(backend):
    """Of a prompt of 30,000 tokens."""
    shares = []
    for setting in tune._settings([backend], None):
        keys = ModelKeys(resolve(setting.section, backend), 32, 128, 64)
        shares.append(keys.shares(30_000)[:2])
    assert len(shares) == len(tune.BUDGETS)
    assert sorted(set(shares)) == shares
    assert backend in ("unique", "quest") or all(kept < 0.2 for _, kept in shares)


def test_every_engine_decodes_the_same_tokens_under_its_own_settings(run, evaluations):
    assert run(*BUDGETS, "--attention-backend", "art", "--attention-backend", "unique", "--most-excess", "0.2")[0] == 0
    options = [dict(pairwise(command)) for command in evaluations]
    assert [each["--label"] for each in options] == [
        "dense", "dense-again", "art", "unique-4096", "unique-256", "unique-1024",
    ]  # fmt: skip
    assert len({each["--completions"] for each in options}) == 1
    assert not any("--attention-backend" in each for each in options[:2])
    assert ["--other-batches" in command for command in evaluations] == [False, True, *[False] * 4]
    assert [each["--attention-backend"] for each in options[2:]] == ["art", *["unique"] * 3]
    sections = [json.loads(each["--additional-config"])[KEY] for each in options[2:]]
    assert sections[0] == {}
    assert [section["selection"]["budget_tokens"] for section in sections[1:]] == [4096, 256, 1024]


def test_what_half_of_the_prompts_chooses_the_other_half_must_confirm(run, evaluations, monkeypatch, tmp_path):
    """The settings lose nothing on the prompts that choose them."""
    made = result
    monkeypatch.setitem(
        globals(), "result", lambda label, i: made("dense-again" if i % 2 == 0 else label, i) | shares_of(label)
    )
    code, out, _ = run("--budget", "1024", "--most-excess", "0.2")
    assert code == 1
    assert "unique-1024 was chosen on half of the prompts, but the other half does not show that it loses" in out
    assert rows(out)["unique-1024"][2].startswith("+0.0%")
    assert rows(out)["unique-1024"][3].startswith("+20.0%")
    assert not (tmp_path / "out" / "sparse.yaml").exists()


def test_prompts_that_cannot_show_the_bound_are_told_at_the_start(run, evaluations, prompts):
    prompts.write_text("".join(json.dumps({"prompt": f"text {i}"}) + "\n" for i in range(6)))
    few = (
        "6 prompts are few: 3 judge, and cannot show a loss of at most 1.0% for settings that change nothing. Give 96 "
    )
    assert run("--budget", "1024")[1].startswith(few)
    assert "are few" not in run("--budget", "1024", "--most-excess", "0.5")[1]


def test_the_preset_of_an_earlier_run_is_removed_where_everything_loses_more(run, evaluations, tmp_path):
    """Its settings lose more than this run allows, and servers would read them as its result."""
    preset = tmp_path / "out" / "sparse.yaml"
    assert run("--budget", "256", "--most-excess", "0.7")[0] == 0
    assert preset.exists()
    code, out, _ = run("--budget", "256", "--most-excess", "0.2")
    assert (code, preset.exists()) == (1, False)
    assert out.splitlines()[-1] == f"Removed {preset} of an earlier run."
    assert "No setting that reads or keeps less is shown to lose at most 20% of tokens beyond the noise" in out
    assert "Removed" not in run("--budget", "256", "--most-excess", "0.2")[1]


def test_what_reads_everything_is_not_chosen(run, evaluations):
    code, out, _ = run("--budget", "1024", "--budget", "8192")
    assert code == 1
    assert rows(out)["unique-8192"][0].startswith("1.000 [")
    assert rows(out)["unique-8192"][5] == "100.0%"


CHANGED = {
    "prompts": lambda row: row.update(digest="1"),
    "fewer prompts": lambda row: row.update(id=row["id"].replace("line 2", "line 9")),
    "model": lambda row: row.get("settings", {}).update(contents={"model": "1"}),
    "versions": lambda row: row.get("settings", {}).update(versions={"vllm": "1"}),
}


@pytest.mark.parametrize("changed", CHANGED)
def test_results_of_other_prompts_or_another_model_are_not_compared(run, evaluations, tmp_path, monkeypatch, changed):
    """A file or the model was replaced while an engine ran. Its answers to other texts looked like a loss."""
    evaluate, label = tune._run, "dense-again" if changed == "prompts" else "unique-1024"

    def change(command: list[str]) -> tuple[int, str]:
        found = evaluate(command)
        given = dict(pairwise(command))
        if given["--label"] == label:
            rows = [json.loads(row) for row in Path(given["--output"]).read_text().splitlines()]
            for row in rows:
                if ("id" in row) == ("prompts" in changed):
                    CHANGED[changed](row)
            Path(given["--output"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return found

    monkeypatch.setattr(tune, "_run", change)
    code, out, err = run("--budget", "1024", "--most-excess", "0.5")
    out_folder = tmp_path / "out"
    assert (code, rows(out), len(err.splitlines())) == (2, {}, 1)
    assert err.startswith(
        f"error: output: got {str(out_folder / 'dense.jsonl')!r} and {str(out_folder / f'{label}.jsonl')!r} of other "
    )
    assert not (out_folder / "sparse.yaml").exists()


def test_other_settings_of_the_engine_hold_for_every_engine(run, evaluations):
    arguments = {"additional_config": {"other": 1}, "attention_backend": "FLASHINFER"}
    assert run("--budget", "4096", "--most-excess", "0.2", "--engine-args", json.dumps(arguments))[0] == 0
    for command in evaluations:
        given = dict(pairwise(command))
        found = json.loads(given["--engine-args"]) | (
            {"additional_config": json.loads(given["--additional-config"])} if "--additional-config" in given else {}
        )
        assert found["additional_config"]["other"] == 1
        assert (KEY in found["additional_config"]) == (given["--label"] == "unique-4096")


def test_a_signal_ends_the_engine_too(tmp_path):
    """The evaluation and what it has started ignore the first signal, as an engine that loads a model may."""
    child = tmp_path / "child.py"
    child.write_text(
        "import os, pathlib, signal, subprocess, sys, time\n"
        "for number in (signal.SIGTERM, signal.SIGINT):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "if len(sys.argv) > 2:\n"
        "    engine = subprocess.Popen([sys.executable, __file__, sys.argv[1]])\n"
        "    pathlib.Path(sys.argv[1]).write_text(f'{os.getpid()} {engine.pid}')\n"
        "    os.kill(os.getppid(), int(sys.argv[2]))\n"
        "    while True:\n"
        "        os.kill(os.getppid(), int(sys.argv[2]))\n"
        "        time.sleep(0.05)\n"
        "signal.pause()\n"
    )
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, str(child), str(tmp_path / "pids"), str(int(signal.SIGINT))]
    try:
        with pytest.raises(SystemExit) as ended:
            endings.run(lambda: tune._run(command))
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert ended.value.code == 128 + signal.SIGINT
    evaluation, engine = map(int, (tmp_path / "pids").read_text().split())
    with pytest.raises(ProcessLookupError):
        os.kill(evaluation, 0)
    while is_running(engine):  # it was killed a moment ago; the limit of the test is the limit of this
        os.sched_yield()


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie, whom its parent, the first process, has yet to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


REFUSED = {
    "most_excess": (("--most-excess", "1.5"), "most_excess: got 1.5, allowed: 0 or more, below 1"),
    "a budget that moves nothing": (
        ("--attention-backend", "art", "--budget", "512"),
        "budget: got 512 with art, where it has no effect, allowed: none, or with a backend that has a budget",
    ),
    "a budget of what is kept": (
        ("--attention-backend", "snapkv", "--budget", "7"),
        "sparse_attention.compaction.budget_tokens: got 7, ",
    ),
    "engine_args": (("--engine-args", "{"), "engine_args: got text that is not JSON"),
    "a sparse reference": (
        ("--engine-args", '{"attention_backend": "unique"}'),
        "engine_args: got attention_backend 'unique', allowed: --attention-backend for settings to try",
    ),
    "settings that no engine would get": (
        ("--engine-args", '{"additional_config": {"sparse_attention": {"first_dense_layers": 2}}}'),
        "engine_args: got additional_config.sparse_attention, allowed: ",
    ),
    "additional_config": (("--engine-args", '{"additional_config": 5}'), "engine_args: got additional_config 5, "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_any_engine_starts(run, evaluations, case):
    arguments, sentence = REFUSED[case]
    code, out, err = run(*arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"error: {sentence}")
    assert evaluations == []


@pytest.mark.parametrize(
    ("returned", "said"),
    [(2, "completions: got 3 tokens"), (3, "the engine of dense ended with exit code 3: completions: got 3 tokens")],
)
def test_what_an_evaluation_says_is_passed_on(run, monkeypatch, returned, said):
    log = "WARNING\nerror: completions: got 3 tokens\nlate log line\n"
    monkeypatch.setattr(tune, "_run", lambda _: (returned, log))
    code, _, err = run()
    assert (code, err) == (returned, f"error: {said}\n")
