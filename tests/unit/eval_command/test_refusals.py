"""Bad input and unsuitable servers."""

import re

import pytest
from support.eval_command import MODEL, NEEDLES, refused

from vllm_sparse_plugin.tools.eval.results import read_results
from vllm_sparse_plugin.tools.needles import library_text

BAD_RESULTS = {
    "no JSON": ("{", "(line 1: "),
    "a number": ("5\n", "(line 1: "),
    "another file": ('{"versions": {}}\n', "(line 1: an unknown record)"),
    "a broken line": ('{"settings": {"label": "x"}}\n{"id": 1}\n', "(line 2: an unknown record)"),
}


@pytest.mark.parametrize("case", BAD_RESULTS)
def test_a_file_that_is_no_result_gets_one_sentence_and_is_not_written_to(run, output, case):
    content, reason = BAD_RESULTS[case]
    output.write_text(content)
    for arguments in (("show", str(output)), NEEDLES):
        message = refused(run(*arguments, base=() if "show" in arguments else None))
        assert message.startswith(f"results: got {str(output)!r} {reason}")
        assert message.endswith("allowed: a file of `vllm-sparse eval`")
    assert output.read_text() == content


REFUSED = {
    "context too long": (["--context", "8193"], "context: got 8193 tokens, allowed: at most the 8192 of stub"),
    "unknown task": (["--task", "foo"], "task: got 'foo', allowed: ruler, needles, "),
    "plot": (["--plot", "x.pdf"], "plot: got 'x.pdf', allowed: a name that ends in .png or .svg"),
    "engine": (
        ["--attention-backend", "unique"],
        "attention_backend: got a setting of the engine, allowed: with --in-p",
    ),
    "chat": (["--chat"], "chat: got a tokenizer without a chat template, allowed: "),
    "model": (["--model", "other"], "model: got 'other', allowed at http://127.0.0.1:"),
    "tokenizer": (
        ["--tokenizer", "missing"],
        "tokenizer: got 'missing', which does not exist, allowed: ",
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


@pytest.mark.parametrize("url", ["foo", "http://[bad", "http://127.0.0.1:1/v1"])
def test_an_address_that_is_none(run, output, url):
    message = refused(run(*NEEDLES, "--base-url", url))
    assert message.startswith(f"base_url: got '{url.removesuffix('/')}")
    assert message.endswith("), allowed: the address of an OpenAI-compatible server")


@pytest.mark.parametrize("body", ["<html>", '{"data": [{}]}'])
def test_a_server_of_something_else(run, stub, body):
    stub.body = body
    message = refused(run(*NEEDLES))
    assert re.match(r"(base_url: got 'http.+, allowed: the address|model: got None, allowed at)", message)


@pytest.mark.parametrize("body", ["<html>", '{"choices": []}', '{"choices": [{"text": null}]}'])
def test_answers_in_another_shape(run, stub, output, body):
    stub.answer_body = body
    assert refused(run(*NEEDLES), 3).startswith("the model stub did not answer a question (")
    assert read_results(output).results == {}


def test_what_a_server_answers_while_it_stops_is_not_scored(run, stub, output):
    """vLLM then sends what it has so far, with status 200."""
    stub.finish_reason = "abort"
    assert refused(run(*NEEDLES), 3) == (
        "the model stub ended a request before its answer was complete (finish_reason 'abort'); the same command "
        "continues from here"
    )
    assert read_results(output).results == {}
    stub.finish_reason = "stop"
    assert run(*NEEDLES)[0] == 0
    assert {result.score for result in read_results(output).results.values()} == {1.0}


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
