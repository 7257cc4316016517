"""Bad input and unsuitable servers."""

import re

import pytest
from support.completions import StubServer, serve
from support.eval_command import MODEL, NEEDLES, find, refused, tokenizer

from vllm_sparse_plugin.tools.eval.results import read_results
from vllm_sparse_plugin.tools.needles import library_text

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
    "plot": (["--plot", "x.pdf"], "plot: got 'x.pdf', allowed: a name that ends in .png or .svg"),
    "engine": (
        ["--attention-backend", "unique"],
        "attention_backend: got a setting of the engine, allowed: with --in-p",
    ),
    "engine JSON": (["--engine-args", "["], "engine_args: got text that is not JSON ("),
    "chat": (["--chat"], "chat: got a tokenizer without a chat template, allowed: "),
    "text": (["--text", "missing.txt"], "text: got 'missing.txt' (No such file or directory), allowed: a file of text"),
    "model": (["--model", "other"], "model: got 'other', allowed at http://127.0.0.1:"),
    "tokenizer": (
        ["--tokenizer", "missing"],
        "tokenizer: got 'missing', which does not exist, allowed: ",
    ),
    "output": (
        ["--output", "missing/x"],
        "output: got 'missing/x' (No such file or directory), allowed: a file that can",
    ),
    "tokenizer of the hub": (
        ["--tokenizer", "some/name"],
        "tokenizer: got 'some/name', neither a folder nor in the cache, allowed: a folder, or this name after "
        "`hf download some/name`",
    ),
    "backend": (
        ["--in-process", "--model", str(MODEL), "--attention-backend", "uniqe"],
        "attention_backend: got 'uniqe', allowed: unique, ",
    ),
    "section": (
        ["--in-process", "--attention-backend", "unique", "--additional-config", '{"sparse_atention": {}}'],
        "additional_config: got the key 'sparse_atention' (did you mean 'sparse_attention'?)",
    ),
    "settings without a backend": (
        ["--in-process", "--additional-config", '{"sparse_attention": {}}'],
        "sparse_attention: got settings but no attention backend of this plugin",
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


@pytest.mark.parametrize("body", ["<html>", "[]", "{}", '{"choices": []}', '{"choices": [{"text": null}]}'])
@pytest.mark.parametrize("decode_from", ["prompt", "question"])
def test_answers_in_another_shape(run, stub, output, body, decode_from):
    stub.answer_body = body
    assert refused(run(*NEEDLES, "--decode-from", decode_from), 3).startswith(
        "the model stub did not answer a question ("
    )
    assert read_results(output).results == {}


@pytest.mark.parametrize("decode_from", ["prompt", "question"])
def test_what_a_server_answers_while_it_stops_is_not_scored(run, stub, output, decode_from):
    """vLLM then sends what it has so far, with status 200."""
    stub.finish_reason = "abort"
    assert refused(run(*NEEDLES, "--decode-from", decode_from), 3) == (
        "the model stub ended a request before its answer was complete (finish_reason 'abort'); the same command "
        "continues from here"
    )
    assert read_results(output).results == {}
    stub.finish_reason = "stop"
    assert run(*NEEDLES, "--decode-from", decode_from)[0] == 0
    assert {result.score for result in read_results(output).results.values()} == {1.0}


def test_one_of_several_models_has_to_be_named(run, stub):
    stub.models = ("one", "two")
    assert refused(run(*NEEDLES)).startswith("model: got None, allowed at http://")
    assert run(*NEEDLES, "--model", "two")[0] == 0
    assert {asked["model"] for asked in stub.requests} == {"two"}


def test_a_server_that_does_not_force_tokens_is_noticed(run, stub, output):
    stub.forces = False
    stub.answer = lambda _: [5] * 40
    assert refused(run(*NEEDLES, "--decode-from", "question"), 3) == (
        "the model stub does not force tokens; start it with --logits-processors "
        "vllm_sparse_plugin.tools.forced_tokens:ForcedTokens; the same command continues from here"
    )
    assert read_results(output).results == {}


@pytest.mark.parametrize("logprob", [0, None, 14.5])
def test_log_probabilities_of_the_forced_choice_and_logits_are_noticed(run, stub, tmp_path, logprob):
    text = tmp_path / "text.txt"
    text.write_text(library_text(0, 60_000))
    stub.logprob = logprob
    assert refused(run("--text", str(text), "--context", "2048", "--questions", "1", "--scored-tokens", "8"), 3) == (
        "the model stub does not return the model's log probabilities; start it with --logprobs-mode raw_logprobs; the "
        "same command continues from here"
    )


@pytest.mark.parametrize("positions", [1, 9])
def test_likeliest_tokens_of_a_part_of_the_positions_are_noticed(run, stub, output, tmp_path, positions):
    """A comparison of such a file with a whole one ended in a traceback."""
    text = tmp_path / "text.txt"
    text.write_text(library_text(0, 60_000))
    stub.predictions = [{5: -0.5}] * positions
    arguments = ("--text", str(text), "--context", "2048", "--questions", "1", "--scored-tokens", "8")
    assert refused(run(*arguments), 3).startswith("the model stub did not answer a question (not in the format ")
    assert read_results(output).results == {}
