"""The command `vllm-sparse needles` with stub servers."""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_sparse_plugin.tools import server
from vllm_sparse_plugin.tools.cli import main, needle_test
from vllm_sparse_plugin.tools.eval.items import Item
from vllm_sparse_plugin.tools.provenance import describe_run

STUB = Path(__file__).parents[1] / "support" / "stub_server.py"
ANSWERS = {"1": "11", "2": "22", "3": "33"}


def item(task: str, number: int) -> Item:
    return Item(f"{task}/{number}", task, 4096, [0], [number], (str(11 * number),), 16, "exact_first_line")


@pytest.fixture
def needles(monkeypatch, capsys, tmp_path):
    """Runs the command on three questions; returns exit code, output, errors and process ids of the servers."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    # Background jobs of a shell ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def call(*arguments: str, answers: dict[str, dict[str, str]], **settings: object) -> SimpleNamespace:
        described = {"answers": answers, "pids": str(tmp_path), **settings}
        monkeypatch.setenv("STUB_SERVER", json.dumps(described))
        monkeypatch.setenv("COLUMNS", "200")
        stub = partial(server.ServerSettings, program=(sys.executable, str(STUB)))
        monkeypatch.setattr(needle_test, "ServerSettings", stub)
        monkeypatch.setattr(needle_test, "is_cpu_build", lambda: True)
        monkeypatch.setattr(needle_test, "_prompter", lambda _model: None)
        questions = [item("multikey", 1), item("multikey", 2), item("kv", 3)]
        monkeypatch.setattr(needle_test, "_items", lambda *_: questions)
        monkeypatch.setattr(sys, "argv", ["vllm-sparse", "needles", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        pids = {path.name: int(path.read_text()) for path in tmp_path.iterdir() if path.suffix != ".jsonl"}
        return SimpleNamespace(code=ended.value.code or 0, out=out, err=err, pids=pids)

    yield call
    for number, handler in previous.items():
        signal.signal(number, handler)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_rows_come_before_a_table_with_its_totals(needles, tmp_path):
    report = tmp_path / "report.jsonl"
    done = needles("--json", str(report), answers={"dense": ANSWERS, "unique": ANSWERS | {"2": "no"}})
    assert done.code == 1  # two of three are less than 95 %
    lines = [line.rsplit(",", 1)[0] for line in done.out.splitlines() if " right, " in line]
    assert lines == [
        "dense: multikey at 4096 tokens: 2 of 2 right",
        "dense: kv at 4096 tokens: 1 of 1 right",
        "unique: multikey at 4096 tokens: 1 of 2 right",
        "unique: kv at 4096 tokens: 1 of 1 right",
    ]
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.out.splitlines() if line.startswith("│")]
    assert [row[:6] for row in table] == [
        ["multikey", "4096", "2/2", "1/2", "25.0%", "100.0%"],
        ["kv", "4096", "1/1", "1/1", "25.0%", "100.0%"],
        # The first answers, and those that differ.
        ["multikey", "4096", "11", "11", "11"],
        ["multikey", "4096", "22", "22", "no"],
        ["kv", "4096", "33", "33", "33"],
    ]
    assert "The seconds are no gain" in done.out
    assert "unique 2/3 (0.21 to 0.94), dense 3/3 (0.44 to 1.00): unique reaches 0.667" in done.out
    assert "--all" in done.out.splitlines()[-1]
    run, *answers = map(json.loads, report.read_text().splitlines())
    assert run.keys() == describe_run(Path("model")).keys()
    assert [(answer["backend"], answer["correct"]) for answer in answers] == [
        *[("dense", True)] * 3, ("unique", True), ("unique", False), ("unique", True),
    ]  # fmt: skip
    assert not any(map(is_running, done.pids.values()))


def test_what_only_a_server_can_count_has_no_share(needles):
    done = needles("--attention-backend", "art", answers={"dense": ANSWERS, "art": ANSWERS})
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.out.splitlines() if line.startswith("│")]
    assert {tuple(row[4:6]) for row in table if len(row) == 8} == {("?", "100.0%")}


def test_equal_answers_are_enough_and_all_says_nothing_of_more(needles):
    done = needles("--all", answers={"dense": ANSWERS, "unique": ANSWERS})
    assert done.code == 0
    assert "--all" not in done.out


def test_a_server_that_fails_ends_the_command_in_one_sentence(needles):
    done = needles(answers={"dense": ANSWERS, "unique": ANSWERS}, fails="unique")
    assert done.code == 3
    begin = "error: the unique server ended with exit code 1 (ValueError: there is no cache); its log is "
    assert done.err.startswith(begin)
    assert len(done.err.splitlines()) == 1
    assert "ValueError" in Path(done.err.removeprefix(begin).strip()).read_text()
    assert not any(map(is_running, done.pids.values()))


def test_ctrl_c_stops_the_servers_and_ends_the_command_in_one_sentence(needles):
    done = needles(answers={"dense": ANSWERS, "unique": ANSWERS}, interrupts=True)
    assert done.code == 130
    assert done.err == "Ctrl-C: stopping\n"
    assert done.pids.keys() == {"dense", "unique"}
    assert not any(map(is_running, done.pids.values()))


VLLM_LOG = """\
WARNING 11-25 [system_utils.py:325] Found ulimit of 1024. Consider raising it. OSError: [Errno 24] Too many open files
(EngineCore pid=9) ERROR 11-25 [core.py:1001] EngineCore failed to start.
(EngineCore pid=9) ERROR 11-25 [core.py:1001] Traceback (most recent call last):
(EngineCore pid=9) ERROR 11-25 [core.py:1001]   File "x.py", line 1, in load
(EngineCore pid=9) ERROR 11-25 [core.py:1001] KeyError: 'model.embed'
(EngineCore pid=9) ERROR 11-25 [core.py:1001] During handling of the above exception, another exception occurred:
(EngineCore pid=9) ERROR 11-25 [core.py:1001] ValueError: Decrease --kv-cache-memory-bytes or VLLM_CPU_KVCACHE_SPACE.
(EngineCore pid=9) RuntimeError: Worker failed with error 'x', please check the stack trace above for the root cause
(APIServer pid=7)   File "y.py", line 2, in wait
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (VLLM_LOG, "ValueError: Decrease --kv-cache-memory-bytes or VLLM_CPU_KVCACHE_SPACE."),
        ("INFO: all is well\n", None),
        ("", None),
        ("RuntimeError: Engine core initialization failed.", "RuntimeError: Engine core initialization failed."),
        (VLLM_LOG + "error: block_size: got 40, allowed: 32\n", "error: block_size: got 40, allowed: 32"),
    ],
)
def test_the_last_error_of_a_log_that_is_no_aftermath_is_the_cause(log, error):
    assert server.last_error(log) == error


def test_on_a_gpu_one_server_has_ended_when_the_next_one_starts(needles, monkeypatch):
    started: list[list[str]] = []
    launch = server.LaunchedServer.__init__

    def record(self, name, settings):
        started.append([name, *(other for other in alive if is_running(alive[other]))])
        launch(self, name, settings)
        alive[name] = self.process.pid

    alive: dict[str, int] = {}
    monkeypatch.setattr(server.LaunchedServer, "__init__", record)
    ask = needle_test._ask
    for cpu, expected in [(True, [["dense"], ["unique", "dense"]]), (False, [["dense"], ["unique"]])]:
        started.clear()
        alive.clear()

        def check(*arguments, cpu=cpu):
            monkeypatch.setattr(needle_test, "is_cpu_build", lambda: cpu)
            return ask(*arguments)

        monkeypatch.setattr(needle_test.os, "cpu_count", lambda cpu=cpu: 2 if cpu else 1)
        monkeypatch.setattr(needle_test, "_ask", check)
        assert needles(answers={"dense": ANSWERS, "unique": ANSWERS}).code == 0
        assert started == expected


def test_a_server_is_asked_with_the_key_of_its_environment(needles, monkeypatch):
    asked = []
    monkeypatch.setattr(server, "OpenAI", lambda **options: asked.append(options["api_key"]) or sys.exit(7))
    for key in ("secret", ""):
        monkeypatch.setenv("VLLM_API_KEY", key)
        needles(answers={"dense": ANSWERS, "unique": ANSWERS})
    assert asked == ["secret", "none"]
