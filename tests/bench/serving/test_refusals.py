"""Command lines that are refused before an engine starts."""

import pytest

from bench.common.models import SHAPES
from bench.serving.__main__ import main as serving_main

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
    "no load": (["--load", "2K="], "load: got '2K=', allowed: COUNTxCONTEXT"),
    "context too long": (["--load", "1x256K"], "load: got a context of 262144 tokens, allowed: from "),
    "context too short": (["--load", "1x600"], "load: got a context of 600 tokens, allowed: from 640, "),
    "too many requests": (["--load", "64x2K", "--max-num-seqs", "32"], "load: got 64 requests, allowed: at most "),
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
}


LOSSLESS = {
    "no rate": (["--acceptance", "0.9,1.5"], "acceptance: got '1.5', allowed: numbers from 0 to 1, or model"),
    "context too short": (["--load", "1x1K", "--new-tokens", "200"], "load: got a context of 1024 tokens, allowed: "),
}
CASES = [
    (command, case)
    for command, cases in (("decode", DECODE), ("serve", SERVE), ("prefill", PREFILL), ("lossless", LOSSLESS))
    for case in cases.items()
]


@pytest.mark.parametrize(("command", "case"), CASES, ids=[f"{command}: {case[0]}" for command, case in CASES])
def test_bad_input_is_refused(refused, tmp_path, command, case):
    arguments, sentence = case[1]
    assert refused(serving_main, command, "--output", str(tmp_path / "out"), *arguments).startswith(sentence)


@pytest.mark.parametrize("command", ["decode", "serve"])
def test_results_that_cannot_be_written_are_refused(refused, tmp_path, command):
    output = tmp_path / "missing" / "out"
    assert refused(serving_main, command, "--output", str(output)) == (
        f"output: got {str(output)!r} (No such file or directory), allowed: a file that can be written"
    )
