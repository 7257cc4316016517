"""Questions that a server answers, and their scores."""

import json
import math
from pathlib import Path

import pytest
from support.eval_command import MODEL, NEEDLES, cells, refused, tokenizer
from transformers import AutoTokenizer

from vllm_sparse_plugin.tools.eval.results import read_results
from vllm_sparse_plugin.tools.needles import library_text


def test_a_run_from_the_prompt(run, stub, output):
    code, out, err = run(*NEEDLES)
    assert (code, err) == (0, "")
    assert cells(out, "multikey") == ["multikey", "4,096", "4", "1.000 [-]"]
    held = read_results(output)
    assert (held.label, list(held.results)) == ("mine", [f"multikey/4096/{i}" for i in range(4)])
    about = json.loads(output.read_text().splitlines()[0])
    assert {"date", "command", "model", "versions", "hardware", "settings"} <= about.keys()
    assert about["settings"]["decode_from"] == "prompt"
    assert about["settings"]["server"] == {
        "vllm": "0.32.0", "root": None, "max_model_len": 8192, "cache": {}, "sparse_attention": None,
    }  # fmt: skip
    assert "scipy" in about["versions"]
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


def test_an_end_that_the_tokenizer_does_not_know_is_named(run, stub, output):
    ends = tokenizer().encode(" number", add_special_tokens=False)
    stub.ends = frozenset(ends)
    said = refused(run(*NEEDLES, "--decode-from", "question"), 3)
    assert said == (
        f"the model stub ended a request at the forced token {ends[0]}; --tokenizer must be a folder whose "
        "generation_config.json has it as `eos_token_id`; the same command continues from here"
    )


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


def test_ruler_is_asked_if_nothing_else_is(run, stub, output):
    stub.answer = lambda _: []
    code, out, _ = run("--questions", "1")
    assert code == 0
    tasks = [result.task for result in read_results(output).results.values()]
    assert len(tasks) == 11
    assert cells(out, "all")[2] == "11"
