"""Command lines that are refused before an engine starts."""

import pytest
from support.bench.serving import decode_rows, write_results

from bench.common.models import SHAPES, open_model
from bench.common.options import ClientRow
from bench.serving.__main__ import main as serving_main
from bench.serving.serve import fit, make_loads


def test_prefill_refuses_a_backend_that_there_is_not(refused, tmp_path):
    sentence = refused(serving_main, "prefill-cpu", "--backend", "fastest", "--output", str(tmp_path / "out"))
    assert sentence.startswith("backend: got 'fastest', allowed: dense, unique")


SERVING = {
    "unknown backend": (["--variant", "fastest"], "variant: got 'fastest', allowed: dense, flash_attn, "),
    "unknown KV cache": (["--variant", "unique:int3"], "variant: got 'unique:int3', allowed: "),
    "wrong settings": (
        ["--variant", "unique", "--additional-config", '{"sparse_attention": {"selection": {"sink_pages": -1}}}'],
        "sparse_attention.selection.sink_pages: got -1, allowed: ",
    ),
    "no model": (
        ["--model", "missing"],
        f"model: got 'missing', allowed: needle-8m, {', '.join(SHAPES)} or ",
    ),
}
DECODE = SERVING | {
    "no batch": (["--grid", "2K="], "grid: got '2K=', allowed: CONTEXT=BATCH,..."),
    "no number": (["--grid", "many=1"], "grid: got 'many=1', allowed: "),
    "batch of none": (["--grid", "2K=0"], "grid: got '2K=0', allowed: "),
    "context twice": (["--grid", "2K=1", "--grid", "2048=2"], "grid: got '2048=2', allowed: "),
    "context twice in one": (["--grid", "2K,2048=1"], "grid: got '2K,2048=1', allowed: "),
    "context too long": (["--grid", "256K=1"], "grid: got a context of 262144 tokens, allowed: from "),
    "context too short": (["--grid", "100=1"], "grid: got a context of 100 tokens, allowed: from "),
    "batch too large": (["--grid", "2K=64"], "grid: got a batch of 64, allowed: at most max_num_seqs = 32"),
}
SERVE = SERVING | {
    "unknown workload": (["--workload", "chat"], "workload: got 'chat', allowed: random, shared_prefix"),
    "load of none": (["--load", "32K=0"], "load: got '32K=0', allowed: CONTEXT=REQUESTS, such as 32K=32"),
    "prompt too long": (["--load", "256K=1"], "load: got a context of 262144 tokens, allowed: from 64 to the model's "),
}
PREFILL = SERVING | {
    "no context": (["--grid", "many"], "grid: got 'many', allowed: "),
    "context too long": (["--grid", "256K"], "grid: got a context of 262144 tokens, allowed: from 256 to the model's "),
    "context too short": (["--grid", "255"], "grid: got a context of 255 tokens, allowed: from 256 to the model's "),
    "no load": (["--load", "32K"], "load: got '32K', allowed: CONTEXT=REQUESTS, such as 32K=32"),
    "load of none": (["--load", "32K=0"], "load: got '32K=0', allowed: CONTEXT=REQUESTS, such as 32K=32"),
    "load too long": (["--load", "256K=1"], "load: got a context of 262144 tokens, allowed: from 256 to the model's "),
}


@pytest.mark.parametrize("case", PREFILL)
def test_prefill_refuses(refused, tmp_path, case):
    arguments, sentence = PREFILL[case]
    found = refused(serving_main, "prefill", "--variant", "unique", "--output", str(tmp_path / "out"), *arguments)
    assert found.startswith(sentence)


@pytest.mark.parametrize("case", DECODE)
def test_decode_refuses(refused, tmp_path, case):
    arguments, sentence = DECODE[case]
    assert refused(serving_main, "decode", "--output", str(tmp_path / "out"), *arguments).startswith(sentence)


@pytest.mark.parametrize("case", SERVE)
def test_serve_refuses(refused, tmp_path, case):
    arguments, sentence = SERVE[case]
    assert refused(serving_main, "serve", "--output", str(tmp_path / "out"), *arguments).startswith(sentence)


def test_a_prompt_of_the_whole_context_leaves_room_for_its_answer():
    with open_model("llama-3.1-8b") as model:
        assert [fit(context, model, 128) for context in (32768, 131072)] == [32768, 131072 - 128 - 16]
    loads = make_loads(["random"], [ClientRow(context=32768, requests=1)], 128, 2)
    assert [(each.input_tokens, each.concurrency, each.requests) for each in loads] == [(32768, 1, 4)]


def test_capacity_refuses_a_cache_that_is_none(refused, tmp_path):
    output = ("capacity", "--output", str(tmp_path / "out"))
    found = refused(serving_main, *output, "--cache-tokens", "some")
    assert found == "cache_tokens: got 'some', allowed: a positive integer or max"
    assert refused(serving_main, *output, "--again") == "again: got true without a window, allowed: --window SECONDS"
    assert refused(serving_main, *output, "--input-tokens", "131072").startswith("input_tokens: got 131072, allowed ")


@pytest.mark.parametrize("command", ["decode", "serve", "capacity"])
def test_results_that_cannot_be_written_are_refused(refused, tmp_path, command):
    output = tmp_path / "missing" / "out"
    assert refused(serving_main, command, "--output", str(output)) == (
        f"output: got {str(output)!r} (No such file or directory), allowed: a file that can be written"
    )


def test_plot_refuses_what_is_no_result_or_no_picture(refused, tmp_path):
    results = write_results(tmp_path / "decode.jsonl", decode_rows())
    text = tmp_path / "text"
    text.write_text("{}\n")
    plot = ("plot", "--output", str(tmp_path / "out.png"))
    assert refused(serving_main, *plot, str(text)).startswith(f"results: got {str(text)!r}, allowed: ")
    assert refused(serving_main, *plot, str(tmp_path / "missing")).startswith("results: got ")
    assert refused(serving_main, *plot, str(results), "--batch", "5") == (
        "batch: got 0 of the measured batches [1, 6], allowed: 1 to 6 of them"
    )
    picture = str(tmp_path / "out.txt")
    assert refused(serving_main, "plot", str(results), "--output", picture) == (
        f"output: got {picture!r}, allowed: a name that ends in .png or .svg"
    )
