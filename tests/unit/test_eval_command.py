import fcntl
import functools
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.completions import StubServer, serve
from transformers import AutoTokenizer

from vllm_sparse_plugin.config import KEY
from vllm_sparse_plugin.tools.cli import evaluate, main, result_files
from vllm_sparse_plugin.tools.eval.endpoints import EndpointError, Reply, Request
from vllm_sparse_plugin.tools.eval.results import ResultFile, read_results
from vllm_sparse_plugin.tools.needles import library_text

MODEL = Path(__file__).parents[2] / "models" / "needle-8m"
NEEDLES = ["--task", "multikey", "--questions", "4", "--label", "mine"]


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def find(tokens: list[int]) -> list[int]:
    """The answer of a perfect reader to a question about one needle."""
    document, question = tokenizer().decode(tokens).rsplit("\n", 1)
    key = re.fullmatch(r"What is the special magic number for (.+)\? Answer:", question)[1]
    value = re.search(rf"magic number for {key} is: (\d+)\.", document)[1]
    return tokenizer().encode(f" {value}", add_special_tokens=False)


@pytest.fixture
def stub():
    with serve(StubServer(find, tokenizer().decode)) as running:
        yield running


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "results.jsonl"


@pytest.fixture
def run(monkeypatch, capsys, stub, output):
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str, base: tuple[str, ...] | None = None) -> tuple[int, str, str]:
        if base is None:
            base = ("--base-url", stub.url, "--tokenizer", str(MODEL), "--output", str(output))
        monkeypatch.setattr(sys, "argv", ["vllm-sparse", "eval", *base, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return call


def refused(result: tuple[int, str, str], code: int = 2) -> str:
    found, _, err = result
    assert found == code
    assert "Traceback" not in err
    (line,) = err.splitlines()
    return line.removeprefix("error: ")


def cells(out: str, task: str) -> list[str]:
    (line,) = (line for line in out.splitlines() if line.startswith(f"│ {task} "))
    return [cell.strip() for cell in line.split("│")[1:-1]]


def rewrite(source: Path, target: Path, label: str, **scores: float) -> None:
    """Copy a file of results under another label, with changed scores of some items."""
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    lines[0]["settings"]["label"] = label
    for line in lines[1:]:
        line["score"] = scores.get(line["id"], line["score"])
    target.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_from_the_prompt(run, stub, output):
    code, out, err = run(*NEEDLES)
    assert (code, err) == (0, "")
    assert cells(out, "multikey") == ["multikey", "4,096", "4", "1.000 [0.510, 1.000]"]
    held = read_results(output)
    assert (held.label, list(held.results)) == ("mine", [f"multikey/4096/{i}" for i in range(4)])
    about = json.loads(output.read_text().splitlines()[0])
    assert {"date", "command", "model", "versions", "hardware", "settings"} <= about.keys()
    assert about["settings"]["decode_from"] == "prompt"
    assert about["server"] == {"vllm": "0.32.0"}
    assert {"rapidfuzz", "scipy"} <= about["versions"].keys()
    for asked, result in zip(stub.requests, held.results.values(), strict=True):
        assert asked["temperature"] == 0
        assert asked["max_tokens"] == 16
        assert "vllm_xargs" not in asked
        assert "logprobs" not in asked
        assert (len(asked["prompt"]), result.forced_tokens) == (result.prompt_tokens, 0)
        assert result.completion == f" {result.answers[0]}"
        assert (result.score, result.metric) == (1, "exact_first_line")


def test_a_run_from_the_question_forces_its_tokens(run, stub, output):
    run(*NEEDLES)
    prompts = [asked["prompt"] for asked in stub.requests]
    before = read_results(output).results
    output.unlink()
    stub.requests.clear()
    code, out, _ = run(*NEEDLES, "--decode-from", "question")
    assert code == 0
    assert "mine, from the question" in out
    after = read_results(output).results
    for asked, prompt, result in zip(stub.requests, prompts, after.values(), strict=True):
        forced = asked["vllm_xargs"]["forced_token_ids"]
        assert asked["prompt"] + forced == prompt
        assert tokenizer().decode(forced).startswith("\nWhat is the special magic number for ")
        assert asked["max_tokens"] == len(forced) + 16
        assert asked["return_token_ids"] is True
        assert result.forced_tokens == len(forced)
        assert result.completion == f" {result.answers[0]}"
    assert [each.digest for each in after.values()] == [each.digest for each in before.values()]


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\\n{{ message.content }}<|im_end|>\\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\\n\\n"
    "{{ message.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\\n\\n{% endif %}"
)


@pytest.fixture(params=["ChatML", "Llama"])
def chat_model(request, tmp_path) -> tuple[Path, int]:
    """A tokenizer whose template ends each message with an end token, and that token. ChatML uses the tokenizer's end
    token, Llama 3.1 another one from its generation_config.json."""
    folder = tmp_path / "chat"
    chat = AutoTokenizer.from_pretrained(MODEL)
    marks = ["<|im_start|>", "<|im_end|>"] if request.param == "ChatML" else [
        "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    ]  # fmt: skip
    chat.add_special_tokens({"additional_special_tokens": marks})
    chat.chat_template = CHATML if request.param == "ChatML" else LLAMA
    end = chat.convert_tokens_to_ids(marks[-1])
    if request.param == "ChatML":
        chat.eos_token = marks[-1]
    chat.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [chat.eos_token_id, end]}))
    return folder, end


def test_a_forced_end_of_a_message_does_not_end_the_request(run, stub, output, chat_model):
    folder, end = chat_model
    answer = tokenizer().encode(" 1234567", add_special_tokens=False)
    stub.ends, stub.answer = frozenset({end}), lambda _: [*answer, end, *answer]
    base = ("--base-url", stub.url, "--tokenizer", str(folder), "--output", str(output))
    code, _, err = run(*NEEDLES, "--chat", "--decode-from", "question", base=base)
    assert (code, err) == (0, "")
    assert all(end in asked["vllm_xargs"]["forced_token_ids"] for asked in stub.requests)
    # After a forced end token vLLM does not end the answer. It is cut here.
    assert {result.completion for result in read_results(output).results.values()} == {" 1234567"}


def test_a_prompt_with_a_chat_template_is_scored_to_its_end(run, stub, output, chat_model, tmp_path):
    folder, end = chat_model
    chat, prompts = AutoTokenizer.from_pretrained(folder), tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "x = 1\n" * 40}]
    text = chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompts.write_text(json.dumps({"prompt": text}))
    stub.ends = frozenset({end})
    base = ("--base-url", stub.url, "--tokenizer", str(folder), "--output", str(output))
    code, _, err = run("--completions", str(prompts), "--scored-tokens", "32", base=base)
    assert (code, err) == (0, "")
    (asked,) = stub.requests
    assert end in asked["vllm_xargs"]["forced_token_ids"][:-1]
    assert next(iter(read_results(output).results.values())).forced_tokens == 32


def test_an_end_that_the_tokenizer_does_not_know_is_named(run, stub, output):
    ends = tokenizer().encode(" number", add_special_tokens=False)
    stub.ends = frozenset(ends)
    said = refused(run(*NEEDLES, "--decode-from", "question"), 3)
    assert said == (
        f"the model stub ended a request at the forced token {ends[0]}; --tokenizer must be a folder whose "
        "generation_config.json has it as `eos_token_id`; the same command continues from here"
    )


class ScoringEngine:
    """Answers every question; counts how often an engine was started."""

    started = 0

    def __init__(self, *_: object) -> None:
        type(self).started += 1

    def complete(self, requests: Iterable[Request]) -> Iterator[Reply]:
        for request in requests:
            assert request.ignores_end
            yield Reply([], [-0.5] * len(request.forced), 0.1, (), None)

    def close(self) -> None:
        pass


@pytest.fixture
def evaluate_in_process(run, tmp_path, output, monkeypatch):
    """Scores a prompt with a copy of needle-8m in a folder of the same name; returns the refusal."""
    monkeypatch.setattr(ScoringEngine, "started", 0)
    monkeypatch.setitem(sys.modules, "vllm_sparse_plugin.tools.eval.engine", SimpleNamespace(Engine=ScoringEngine))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "x = 1\n" * 400}))

    def call(model: Path, *arguments: str) -> str | None:
        base = ("--in-process", "--model", str(model), "--output", str(output))
        result = run("--completions", str(prompts), "--scored-tokens", "8", *arguments, base=base)
        return None if result[0] == 0 else refused(result)

    return call


@pytest.mark.parametrize("change", ["weights", "config.json", "tokenizer_config.json"])
def test_results_of_a_model_are_not_taken_for_those_of_another_one(evaluate_in_process, output, tmp_path, change):
    first, second = tmp_path / "a" / "model", tmp_path / "b" / "model"
    for folder in (first, second):
        shutil.copytree(MODEL, folder)
    assert evaluate_in_process(first) is None
    # The same model elsewhere: nothing is left to do, and no engine starts.
    assert evaluate_in_process(second) is None
    assert ScoringEngine.started == 1
    before = output.read_bytes()
    changed = second / ("model.safetensors" if change == "weights" else change)
    if change == "weights":
        content = bytearray(changed.read_bytes())
        content[-1] ^= 1
        changed.write_bytes(content)
    else:
        changed.write_text(json.dumps(json.loads(changed.read_text()) | {"note": 1}))
    assert evaluate_in_process(second).startswith(f"output: got {str(output)!r} made with contents {{")
    assert ScoringEngine.started == 1
    assert output.read_bytes() == before


def test_a_file_that_settings_name_may_not_change_under_a_run(evaluate_in_process, output, tmp_path):
    settings, template = tmp_path / "my.yaml", tmp_path / "chat.jinja"
    settings.write_text("selection: {policy: unique, budget_tokens: 512}\n")
    template.write_text("{{ messages }}")
    given = ("--attention-backend", "unique", "--additional-config", json.dumps({KEY: {"config": str(settings)}}))
    given += ("--engine-args", json.dumps({"chat_template": str(template)}))
    assert evaluate_in_process(MODEL, *given) is None
    settings.write_text("# the same\nselection: {budget_tokens: 512, policy: unique}\n")
    assert evaluate_in_process(MODEL, *given) is not None  # the file differs
    settings.write_text("selection: {policy: unique, budget_tokens: 512}\n")
    assert evaluate_in_process(MODEL, *given) is None
    template.write_text("{{ messages[0] }}")
    assert "made with contents" in evaluate_in_process(MODEL, *given)
    settings.write_text("selection: {policy: nope}\n")
    assert evaluate_in_process(MODEL, *given).startswith("sparse_attention.selection")


def test_a_preset_may_not_change_under_a_run(evaluate_in_process, monkeypatch):
    from vllm_sparse_plugin.config import sources

    given = ("--attention-backend", "unique")
    assert evaluate_in_process(MODEL, *given) is None
    read = sources._read_preset

    def other(field: str, name: str) -> dict:
        found = read(field, name)
        return found | {"selection": found["selection"] | {"budget_tokens": 1024}}

    monkeypatch.setattr(sources, "_read_preset", other)
    assert "made with contents" in evaluate_in_process(MODEL, *given)


def test_ctrl_c_does_not_wait_for_a_server_that_does_not_answer(run, stub, output):
    never = threading.Event()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def answer(_: list[int]) -> list[int]:
        os.kill(os.getpid(), signal.SIGINT)
        never.wait()
        return []

    stub.answer = answer
    try:
        code, _, err = run(*NEEDLES)
        assert (code, err) == (130, "Ctrl-C: stopping; repeat to kill the processes that still run\n")
        # A thread that is not a daemon would keep the process alive.
        assert all(thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())
    finally:
        never.set()
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_in_the_process_is_ended(run, output, monkeypatch, fails):
    """At the interpreter's exit, the processes of a GPU's engine were waited for forever."""
    ended = []

    class FakeEngine:
        def __init__(self, *_: object) -> None:
            pass

        def complete(self, requests: Iterable[Request]) -> Iterator[Reply]:
            for request in requests:
                if fails:
                    raise EndpointError("did not answer a question (it is dead)")
                yield Reply(find(request.prompt), [], 0.1, (), None)

        def close(self) -> None:
            ended.append(len(read_results(output).results))

    monkeypatch.setitem(sys.modules, "vllm_sparse_plugin.tools.eval.engine", SimpleNamespace(Engine=FakeEngine))
    code, _, err = run(*NEEDLES, base=("--in-process", "--model", str(MODEL), "--output", str(output)))
    assert (code, ended) == ((3, [0]) if fails else (0, [4])), err


def test_a_file_takes_the_results_of_one_run_at_a_time(run, stub, output):
    """A run that another process has begun keeps its lock to its end, even while the file is empty."""
    with output.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        sentence = refused(run(*NEEDLES))
    assert sentence == (
        f"output: got {str(output)!r}, which another run is writing, allowed: another file, or this one when that run "
        "has ended"
    )
    assert not stub.requests
    assert not output.read_bytes()
    assert run(*NEEDLES)[0] == 0
    assert len(read_results(output).results) == 4


def test_a_run_that_was_cut_short_goes_on(run, stub, output):
    stub.answers_left = 2
    assert refused(run(*NEEDLES), 3) == (
        "the model stub did not answer a question (HTTP 400: the engine is dead); the same command continues from here"
    )
    assert len(read_results(output).results) == 2
    kept = output.read_text()
    output.write_text(kept + '{"id": "multikey/4096/2", "ta')  # the end of a run that was killed
    stub.answers_left = None
    stub.requests.clear()
    code, out, _ = run(*NEEDLES)
    assert code == 0
    assert len(stub.requests) == 2
    assert cells(out, "multikey")[2] == "4"
    text = output.read_text()
    assert text.startswith(kept)
    # Each part begins with the line that describes its run.
    assert ["settings" in line for line in text.splitlines()] == [True, False, False, True, False, False]
    stub.requests.clear()
    assert run(*NEEDLES)[0] == 0
    assert (stub.requests, output.read_text()) == ([], text)


OTHER_SETTINGS = {
    "seed": (["--seed", "1"], "seed 0, allowed: one made with 1"),
    "questions": (["--questions", "5"], "questions 4, allowed: one made with 5"),
    "decode_from": (["--decode-from", "question"], "decode_from 'prompt', allowed: one made with 'question'"),
    "label": (["--label", "other"], "label 'mine', allowed: one made with 'other'"),
    "tasks": (["--task", "kv"], "tasks ['multikey'], allowed: one made with ['multikey', 'kv']"),
    "contexts": (["--context", "5000"], "contexts [4096], allowed: one made with [5000]"),
}


@pytest.mark.parametrize("case", OTHER_SETTINGS)
def test_a_file_made_with_other_settings_is_refused_and_kept(run, output, case):
    run(*NEEDLES)
    text = output.read_text()
    more, sentence = OTHER_SETTINGS[case]
    assert refused(run(*NEEDLES, *more)) == f"output: got {str(output)!r} made with {sentence}, or a new file"
    assert output.read_text() == text


def test_defaults_that_are_spelled_out_go_on_with_a_run(run, stub, output):
    stub.answers_left = 2
    run("--task", "multikey", "--context", "4096")
    stub.answers_left = None
    stub.answer = lambda _: []
    spelled = ["--task", "multikey", "--questions", "20", "--seed", "0", "--decode-from", "prompt", "--label", "stub"]
    code, _, err = run(*spelled, "--scored-tokens", "256")
    assert (code, err) == (0, "")
    assert len(read_results(output).results) == 20


def test_another_file_of_the_same_name_is_noticed(run, output, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(library_text(0, 60_000))
    ask = ["--text", str(text), "--context", "2048", "--questions", "2", "--scored-tokens", "8"]
    assert run(*ask)[0] == 0
    text.write_text(library_text(5_000, 60_000))
    assert "made with files {'text.txt': " in refused(run(*ask))


def test_perplexity_is_decoded_whatever_the_mode(run, stub, output, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(library_text(0, 60_000))
    stub.logprob = -0.25
    code, out, _ = run("--text", str(text), "--context", "2048", "--questions", "3", "--scored-tokens", "8")
    assert code == 0
    for asked, result in zip(stub.requests, read_results(output).results.values(), strict=True):
        assert len(asked["vllm_xargs"]["forced_token_ids"]) == asked["max_tokens"] == result.forced_tokens == 8
        assert (len(asked["prompt"]), asked["logprobs"], asked["temperature"]) == (2040, 20, 0)
        assert (result.score, result.metric, result.completion) == (0.25, "nll", "")
    value = f"{math.exp(0.25):.3f}"
    assert cells(out, "perplexity") == ["perplexity", "2,048", "3", f"{value} [{value}, {value}]"]


def test_completions_are_scored_or_a_prompts_own_newest_tokens(run, stub, output, tmp_path):
    lines = tmp_path / "prompts.jsonl"
    prose = library_text(0, 9_000)
    entries = [{"prompt": prose, "completion": " return 7\n"}, {"prompt": prose}]
    lines.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    code, out, err = run("--completions", str(lines), "--scored-tokens", "3")
    assert (code, err) == (0, "")
    with_one, without = stub.requests
    whole = tokenizer().encode(prose)
    scored = tokenizer().encode(prose + " return 7\n")[len(with_one["prompt"]) :]
    assert with_one["vllm_xargs"]["forced_token_ids"] == scored[:3]
    assert tokenizer().decode(scored).endswith(" return 7\n")
    assert without["prompt"] + without["vllm_xargs"]["forced_token_ids"] == whole
    assert len(without["vllm_xargs"]["forced_token_ids"]) == 3
    assert list(read_results(output).results) == ["completion/line 1", "completion/line 2"]
    assert cells(out, "completion")[2] == "2"
    lines.write_text(json.dumps({"prompt": "ab"}) + "\n")
    output.unlink()
    short = len(tokenizer().encode("ab"))
    assert refused(run("--completions", str(lines))) == (
        f"completions: got {short} tokens in line 1, allowed: more than the 256 that are scored, or a completion"
    )
    assert refused(run("--completions", "/nowhere")).startswith("completions: got '/nowhere' (No such file")


def test_requests_are_under_way_together_and_answers_stay_in_order(run, stub, output):
    assert run(*NEEDLES, "--concurrency", "3")[0] == 0
    held = read_results(output)
    assert list(held.results) == [f"multikey/4096/{i}" for i in range(4)]
    assert all(result.score == 1 for result in held.results.values())


def test_longbench_is_scored_by_its_metric(run, stub, output, tmp_path):
    records = [
        {"dataset": "qasper", "context": "A text.", "input": "Who?", "answers": ["red house"], "all_classes": None}
    ] * 3
    path = tmp_path / "qasper.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    stub.answer = lambda _: tokenizer().encode(" The red, big house!", add_special_tokens=False)
    code, out, _ = run("--file", str(path), "--decode-from", "question")
    assert code == 0
    # The context is the model's, because none was given.
    assert cells(out, "qasper")[:3] == ["qasper", "8,192", "3"]
    assert [result.score for result in read_results(output).results.values()] == [0.8] * 3


def test_ruler_is_asked_if_nothing_else_is(run, stub, output):
    stub.answer = lambda _: []
    code, out, _ = run("--questions", "1")
    assert code == 0
    assert "qa_1 is skipped: it needs a file, --squad." in out
    assert "qa_2 is skipped: it needs a file, --hotpotqa." in out
    tasks = [result.task for result in read_results(output).results.values()]
    assert len(tasks) == 11
    assert cells(out, "all")[2] == "11"


def test_results_side_by_side(run, output, tmp_path):
    run(*NEEDLES)
    other, picture = tmp_path / "other.jsonl", tmp_path / "scores.svg"
    rewrite(output, other, "theirs", **{"multikey/4096/1": 0})
    code, out, err = run("show", str(output), str(other), "--plot", str(picture), base=())
    assert (code, err) == (0, "")
    assert cells(out, "multikey") == ["multikey", "4,096", "4", "1.000 [0.510, 1.000]", "0.750 [0.301, 0.954]"]
    drawn = picture.read_text()
    assert all(f"<!-- {name} -->" in drawn for name in ("mine", "theirs", "multikey", "4K"))


def test_the_share_of_the_cache_that_was_read_is_shown_where_it_is_known(run, output, tmp_path):
    run(*NEEDLES)
    assert "bytes read" not in run("show", str(output), base=())[1]
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    for line, share in zip(lines[1:], (0.5, 0.25, 0.5, 0.25), strict=True):
        line["kv_read_share"] = share
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = run("show", str(output), str(other), base=())[1]
    assert cells(out, "multikey")[3:] == ["1.000 [0.510, 1.000]", "1.000 [0.510, 1.000]", "37.5%"]
    lines[2]["kv_read_share"] = None
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # A mean of some of the answers would be that of others.
    assert "bytes read" not in run("show", str(other), base=())[1]


def test_a_comparison_on_the_same_items(run, output, tmp_path):
    run(*NEEDLES)
    other, picture = tmp_path / "other.jsonl", tmp_path / "differences.png"
    rewrite(output, other, "theirs", **{"multikey/4096/1": 0, "multikey/4096/2": 0})
    code, out, err = run("compare", str(output), str(other), "--plot", str(picture), base=())
    assert (code, err) == (0, "")
    # Two of four lost: 2 / 2**2.
    assert cells(out, "multikey")[:5] == ["multikey", "4,096", "4", "1.000", "0.500"]
    assert cells(out, "multikey")[5].startswith("-0.500 [-0.8")
    assert cells(out, "multikey")[6] == "0.500"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_only_shared_items_are_compared(run, output, tmp_path):
    run(*NEEDLES)
    other = tmp_path / "other.jsonl"
    rewrite(output, other, "theirs")
    other.write_text("".join(other.read_text().splitlines(keepends=True)[:3]))
    assert cells(run("compare", str(output), str(other), base=())[1], "multikey")[2] == "2"


def test_a_ratio_of_perplexities(run, stub, output, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(library_text(0, 60_000))
    run("--text", str(text), "--context", "2048", "--questions", "2", "--scored-tokens", "8")
    other = tmp_path / "other.jsonl"
    rewrite(output, other, "theirs", **{f"perplexity/2048/{i}": 0.6 for i in range(2)})
    out = run("compare", str(output), str(other), base=())[1]
    ratio = f"{math.exp(0.1):.3f}"
    assert cells(out, "perplexity")[5] == f"{ratio} [{ratio}, {ratio}]"


def lines_of(out: str) -> list[list[str]]:
    """Cells of the table of next tokens."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    return [row for row in rows if row[0] == "2,048"]


def test_next_tokens_of_the_same_text_are_compared(run, stub, output, tmp_path):
    text, other = tmp_path / "text.txt", tmp_path / "other.jsonl"
    text.write_text(library_text(0, 60_000))
    options = ("--text", str(text), "--context", "2048", "--questions", "2", "--scored-tokens", "4")
    base = ("--base-url", stub.url, "--tokenizer", str(MODEL), "--output")
    half = math.log(0.5)
    stub.predictions = [{7: half, 9: math.log(0.4), 11: -20.0}, {7: 0.0}, {8: half, 9: half}, {1: -20.0}]
    assert run(*options, base=(*base, str(output)))[0] == 0
    # The likeliest token is always kept; other tokens only if they matter.
    kept = read_results(output).results["perplexity/2048/0"].predictions
    assert [list(at) for at in kept] == [[7, 9], [7], [8, 9], [1]]
    stub.predictions = [{9: half, 7: math.log(0.4)}, {7: 0.0}, {9: half, 8: half}, {2: 0.0}]
    assert run(*options, base=(*base, str(other)))[0] == 0
    out = run("compare", str(output), str(other), base=())[1]
    # The second and third position have the same most likely token. Both windows have the same shares, which does not
    # make them certain.
    unmeasured = [["0.500 [0.095, 0.905]", "not measured", "not measured"]]
    assert [line[4:] for line in lines_of(out) if line[1] == "same most likely token"] == unmeasured
    assert "of stub is not measured" in out
    again = tmp_path / "again.jsonl"
    stub.predictions = [{7: half, 9: math.log(0.4)}, {7: 0.0}, {8: half, 9: half}, {2: 0.0}]
    assert run(*options, "--other-batches", base=(*base, str(again)))[0] == 0
    assert read_results(again).settings["other_batches"] is True
    out = run("compare", str(output), str(other), "--again", str(again), base=())[1]
    assert "of stub is not measured" not in out
    # Overlaps .8 and, but for what lists leave, .1 at the first position, then 1, 1 and 0.
    found = {line[1]: [float(cell.split()[0]) for cell in line[4:]] for line in lines_of(out)}
    assert found["same most likely token"] == [0.5, 0.75, 0.25]
    assert found["overlap of the distributions"] == pytest.approx([0.725, 0.75, 0.025], abs=2e-3)
    assert found["Kullback-Leibler divergence, nats"][2] == pytest.approx(0.25 * 0.1 * math.log(0.5 / 0.4), abs=2e-3)
    rewrite(output, other, "theirs")
    other.write_text(re.sub(r'"predictions": \[[^\]]*\]', '"predictions": []', other.read_text()))
    assert "Next tokens" not in run("compare", str(output), str(other), base=())[1]


def test_files_of_other_questions_are_not_compared(run, output, tmp_path):
    run(*NEEDLES)
    other = tmp_path / "other.jsonl"
    lines = output.read_text()
    other.write_text(re.sub(r'"digest":"\w+"', '"digest":"0"', lines))
    assert refused(run("compare", str(output), str(other), base=())) == (
        f"results: got {str(output)!r} and {str(other)!r}, whose item multikey/4096/0 differs, allowed: runs with the "
        "same tokenizer, seed and files"
    )
    other.write_text(lines.replace("multikey/4096", "multikey/5000"))
    assert "without an item in common, allowed: runs of" in refused(run("compare", str(output), str(other), base=()))


BAD_RESULTS = {
    "missing": (None, "(No such file or directory)"),
    "empty": ("", "(line 1: "),
    "no JSON": ("{", "(line 1: "),
    "a number": ("5\n", "(line 1: "),
    "another file": ('{"versions": {}}\n', "(line 1: an unknown record)"),
    "a broken line": ('{"settings": {"label": "x"}}\n{"id": 1}\n', "(line 2: an unknown record)"),
}


@pytest.mark.parametrize("command", ["show", "compare"])
@pytest.mark.parametrize("case", BAD_RESULTS)
def test_a_file_that_is_no_result_gets_one_sentence(run, output, case, command):
    content, reason = BAD_RESULTS[case]
    if content is not None:
        output.write_text(content)
    files = [str(output)] * (2 if command == "compare" else 1)
    message = refused(run(command, *files, base=()))
    assert message.startswith(f"results: got {str(output)!r} {reason}")
    assert message.endswith("allowed: a file of `vllm-sparse eval`")


@pytest.mark.parametrize("content", [each for each, _ in BAD_RESULTS.values() if each])
def test_a_file_that_is_no_result_is_not_written_to(run, output, content):
    output.write_text(content)
    assert f"results: got {str(output)!r} (line " in refused(run(*NEEDLES))
    assert output.read_text() == content


REFUSED = {
    "context too long": (["--context", "8193"], "context: got 8193 tokens, allowed: at most the 8192 of stub"),
    "context too short": (["--context", "4095"], "context: got 4095 tokens, allowed: 4096 or more"),
    "unknown task": (["--task", "foo"], "task: got 'foo', allowed: ruler, needles, "),
    "file missing": (["--task", "qa_1"], "task: got qa_1 without a file, allowed: with --squad FILE"),
    "mode": (["--decode-from", "answer"], "decode_from: got 'answer', allowed: prompt or question"),
    "plot": (["--plot", "x.pdf"], "plot: got 'x.pdf', allowed: a name that ends in .png or .svg"),
    "engine": (
        ["--attention-backend", "unique"],
        "attention_backend: got a setting of the engine, allowed: with --in-p",
    ),
    "engine JSON": (["--engine-args", "["], "engine_args: got text that is not JSON ("),
    "chat": (["--chat"], "chat: got a tokenizer without a chat template, allowed: "),
    "longbench": (["--file", "missing.jsonl"], "file: got 'missing.jsonl' (No such file or directory), allowed: "),
    "prompts": (
        ["--file", "x", "--prompts", "missing"],
        "prompts: got 'missing' (No such file or directory), allowed: ",
    ),
    "text": (["--text", "missing.txt"], "text: got 'missing.txt' (No such file or directory), allowed: a file of text"),
    "model": (["--model", "other"], "model: got 'other', allowed at http://127.0.0.1:"),
    "tokenizer": (
        ["--tokenizer", "missing"],
        "tokenizer: got 'missing', allowed: a folder with a tokenizer, or a name ",
    ),
    "output": (
        ["--output", "missing/x"],
        "output: got 'missing/x' (No such file or directory), allowed: a file that can",
    ),
    "no model": (["--in-process"], "model: got none, allowed with --in-process: a folder or name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_gets_one_sentence_before_anything_is_asked(run, stub, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    arguments, sentence = REFUSED[case]
    assert refused(run(*arguments)).startswith(sentence)
    assert stub.requests == []


def test_files_of_the_same_name_are_refused(run, tmp_path):
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "x.txt", tmp_path / "a" / "x.txt"):
        path.write_text(library_text(0, 60_000))
    texts = ["--text", str(tmp_path / "x.txt"), "--text", str(tmp_path / "a" / "x.txt")]
    assert refused(run(*texts, "--context", "1024")) == "file: got x.txt twice, allowed: files of different names"


def test_a_context_given_twice_is_asked_once(run, stub):
    assert run(*NEEDLES, "--context", "4096", "--context", "4096")[0] == 0
    assert len(stub.requests) == 4


def test_no_output_is_refused(run):
    assert refused(run("--task", "kv", base=())) == "output: got none, allowed: a file for the results"


def test_a_server_that_cannot_be_reached(run, stub, output):
    with serve(StubServer(find, tokenizer().decode)) as gone:
        pass
    base = ("--base-url", gone.url, "--tokenizer", str(MODEL), "--output", str(output))
    message = refused(run(*NEEDLES, base=base))
    assert re.fullmatch(r"base_url: got '.+/v1/' \(.*refused\), allowed: the address of an OpenAI-co.+ server", message)
    assert not output.exists()


@pytest.mark.parametrize("url", ["foo", "http://[bad", "ftp://x/", "http://nosuchhost.invalid/v1"])
def test_an_address_that_is_none(run, output, url):
    message = refused(run(*NEEDLES, "--base-url", url))
    assert message.startswith(f"base_url: got '{url.removesuffix('/')}")
    assert message.endswith("), allowed: the address of an OpenAI-compatible server")


@pytest.mark.parametrize("body", ["<html>", "[]", '{"data": 5}', '{"data": [{}]}'])
def test_a_server_of_something_else(run, stub, body):
    stub.body = body
    message = refused(run(*NEEDLES))
    assert re.match(r"(base_url: got 'http.+, allowed: the address|model: got None, allowed at)", message)


@pytest.mark.parametrize("body", ["<html>", "[]", "{}", '{"choices": []}'])
def test_answers_in_another_shape(run, stub, output, body):
    stub.answer_body = body
    assert refused(run(*NEEDLES, "--decode-from", "question"), 3).startswith(
        "the model stub did not answer a question ("
    )
    assert read_results(output).results == {}


def test_one_of_several_models_has_to_be_named(run, stub):
    stub.models = ("one", "two")
    assert refused(run(*NEEDLES)).startswith("model: got None, allowed at http://")
    assert run(*NEEDLES, "--model", "two")[0] == 0
    assert {asked["model"] for asked in stub.requests} == {"two"}


def test_a_file_of_prompts_needs_the_models_length(run, stub, tmp_path):
    stub.max_model_len = None
    record = {"dataset": "trec", "context": "x", "input": "y", "answers": ["z"], "all_classes": ["z"]}
    (tmp_path / "f.jsonl").write_text(json.dumps(record))
    arguments = ["--file", str(tmp_path / "f.jsonl")]
    assert refused(run(*arguments)) == "context: got none, allowed with --file here: the most tokens of a prompt"
    stub.answer = lambda _: []
    assert run(*arguments, "--context", "2048")[0] == 0


def test_a_server_that_does_not_force_tokens_is_noticed(run, stub, output):
    stub.forces = False
    stub.answer = lambda _: [5] * 40
    assert refused(run(*NEEDLES, "--decode-from", "question"), 3) == (
        "the model stub does not force tokens; start it with --logits-processors "
        "vllm_sparse_plugin.tools.forced_tokens:ForcedTokens; the same command continues from here"
    )
    assert read_results(output).results == {}


@pytest.mark.parametrize("logprob", [0, None])
def test_log_probabilities_of_the_forced_choice_are_noticed(run, stub, tmp_path, logprob):
    text = tmp_path / "text.txt"
    text.write_text(library_text(0, 60_000))
    stub.logprob = logprob
    assert refused(run("--text", str(text), "--context", "2048", "--questions", "1", "--scored-tokens", "8"), 3) == (
        "the model stub does not return the model's log probabilities; start it with --logprobs-mode raw_logprobs; the "
        "same command continues from here"
    )


def test_perplexity_alone_has_no_plot_of_differences(run, output, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(library_text(0, 60_000))
    run("--text", str(text), "--context", "2048", "--questions", "1", "--scored-tokens", "8")
    picture = str(tmp_path / "x.png")
    assert "plot: got perplexity alone" in refused(run("compare", str(output), str(output), "--plot", picture, base=()))
    assert run("show", str(output), "--plot", picture, base=())[0] == 0


def test_a_picture_that_cannot_be_written(run, output, tmp_path):
    run(*NEEDLES)
    picture = str(tmp_path / "missing" / "x.png")
    message = refused(run("show", str(output), "--plot", picture, base=()))
    assert message == f"plot: got {picture!r} (No such file or directory), allowed: a file that can be written"


def test_a_missing_extra_is_named(run, monkeypatch):
    for module in (evaluate, result_files):
        monkeypatch.setattr(module, "_EXTRA", {"no_such_module": "no-such-package"})
    for arguments in ((*NEEDLES,), ("show", "x"), ("compare", "x", "y")):
        message = refused(run(*arguments, base=() if "x" in arguments else None))
        assert message == (
            "vllm-sparse eval: got no no-such-package, allowed: with the packages of its extra, "
            "pip install no-such-package"
        )


def test_metrics_of_files_alone_need_their_packages(run, output, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "_EXTRA_OF_FILES", {"no_such_module": "no-such-package"})
    for package in ("rapidfuzz", "rouge", "pytrec_eval", "jieba"):
        monkeypatch.setitem(sys.modules, package, None)
    assert run(*NEEDLES)[0] == 0
    assert "got no no-such-package" in refused(run("--file", str(tmp_path / "x")))


def test_the_key_of_a_server_is_not_written(run, stub, output, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    run(*NEEDLES)
    assert "secret-key" not in output.read_text()


def test_an_empty_file_is_a_new_one(run, output):
    output.touch()
    assert run(*NEEDLES)[0] == 0
    assert isinstance(read_results(output), ResultFile)
