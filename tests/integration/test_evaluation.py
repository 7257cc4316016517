"""`vllm-sparse eval` with an engine in its own process, under a policy that does not read the needles."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.engines import in_fresh_process
from support.eval_engines import ask_and_be_refused, ask_engine
from support.needle_text import write_needle_text

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.eval.endpoints import Request
from vllm_sparse_plugin.tools.eval.engine import Engine
from vllm_sparse_plugin.tools.eval.fidelity import overlap
from vllm_sparse_plugin.tools.eval.noise import in_other_batches
from vllm_sparse_plugin.tools.eval.results import read_results

SNAPKV = {"sparse_attention": {"compaction": {"budget_tokens": 256, "min_context_tokens": 512}}}
MODEL = Path(__file__).parents[2] / "models" / "needle-8m"


def run_command(arguments: list[str]) -> int:
    """Run a command of `vllm-sparse` in this process; returns its exit code."""
    from vllm_sparse_plugin.tools.cli import main

    sys.argv = ["vllm-sparse", *arguments]
    try:
        main()
    except SystemExit as end:
        return end.code or 0
    return 0


def test_an_engine_in_the_process_decodes_under_its_policy(tmp_path):
    output, text = tmp_path / "results.jsonl", write_needle_text(tmp_path / "text.txt", MODEL)
    engine = ["--in-process", "--model", str(MODEL), "--attention-backend", "streaming_llm", "--concurrency", "2"]
    # Attention sees what the cache keeps, which is shorter than contexts that are read whole by default.
    settings = {"sparse_attention": {"stopping": {}, "min_context_tokens": 256}}
    engine += ["--engine-args", json.dumps({"enforce_eager": True}), "--additional-config", json.dumps(settings)]
    command = ["eval", *engine, "--output", str(output), *text.options, "--task", "multikey"]
    assert in_fresh_process(run_command, [*command, "--decode-from", "question"]) == 0
    found = read_results(output)
    assert found.settings["engine"] == {
        "enforce_eager": True, "attention_backend": "streaming_llm", "additional_config": settings,
    }  # fmt: skip
    needle, prose = found.results.values()
    assert (needle.task, needle.score) == ("multikey", 0)
    # The workers' counts: at most the budget of 512 of 4,096 tokens, and the incomplete page.
    assert 0.05 < needle.kv_read_share < 520 / 4000
    # The window and less than three blocks of 128 tokens.
    assert needle.kv_read_share <= needle.key_kept_share < (512 + 3 * 128) / 4000
    # Log probabilities of the prompt would be dense, and as low as those of unique (test_engine.py).
    assert (prose.metric, prose.forced_tokens > 15) == ("nll", True)
    assert prose.score > 2
    assert len(prose.predictions) == prose.forced_tokens
    assert all(0.5 < sum(map(math.exp, at.values())) <= 1.001 for at in prose.predictions)


def test_dense_attention_is_not_itself_in_other_batches_and_eviction_is_accounted_for():
    """Another chunk of the prefill changes all bits, but hardly what is expected."""
    prompt, forced = [100 + 37 * place % 900 for place in range(1400)], list(range(200, 224))
    asked = [Request(prompt[start:], forced, 0, ignores_end=True) for start in (0, 7, 13)]
    dense = {"enforce_eager": True, "max_num_batched_tokens": 2048, "block_size": 64}
    other, requests = in_other_batches(dense, 1)
    snapkv = {**dense, "attention_backend": "snapkv", "additional_config": SNAPKV}
    runs = [
        ask_engine(MODEL, arguments, 2048, batch, asked)
        for arguments, batch in ((dense, 1), (other, requests), (snapkv, 1))
    ]
    first, again, evicted = ([reply.predictions for reply in run] for run in runs)
    assert first != again
    own = [overlap(*pair) for pair in zip(first, again, strict=True)]
    kept = [overlap(*pair) for pair in zip(first, evicted, strict=True)]
    assert all(0.9 < share < 1 for share in own)
    assert sum(kept) < sum(own)
    assert [reply.shares for reply in runs[0]] == [(1, 1, 1, 1)] * 3
    for reply, request in zip(runs[2], asked, strict=True):
        # The four blocks of the budget and the incomplete one, with the tokens that are decoded.
        contexts = [len(request.prompt) + place for place in range(1, len(forced))]
        gone = (len(request.prompt) // 64 - 4) * 64
        share = sum(context - gone for context in contexts) / sum(contexts)
        assert reply.shares == pytest.approx((share,) * 4)


def test_a_forced_end_token_does_not_end_a_request():
    """vLLM looks for end tokens before it looks at `min_tokens`."""
    end, text = 1, list(range(100, 180))
    requests = [Request(text, [7, end, 8, end], 0, ignores_end=True), Request(text, [7, end, 8], 4, ignores_end=True)]
    ending = replace(requests[0], ignores_end=False)
    (scored, answered), (error,) = ask_and_be_refused(MODEL, {"enforce_eager": True}, 256, requests, [ending])
    assert error.startswith("ended a request at the forced token 1; --tokenizer must")
    assert len(scored.logprobs) == 4
    assert len(answered.answer) == 4


REFUSED = {
    "length": (40_000, {}, "context: got 40000 tokens, allowed: at most the model's 32768"),
    "argument": (4096, {"nope": 1}, "in_process: got '.*' with {'nope': 1} .*'nope'.*, allowed: what vLLM serves"),
    "backend": (4096, {"attention_backend": "nope"}, "in_process: .*Unknown attention backend: 'NOPE'.*, allowed: "),
    "settings": (
        4096,
        {"attention_backend": "unique", "additional_config": {"sparse_attention": {"selection": {"page_size": 12}}}},
        "sparse_attention.selection.page_size: got 12, allowed: 8, 16 or 32",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_engine_that_cannot_be_started_is_refused_in_one_sentence(case):
    most_tokens, arguments, sentence = REFUSED[case]
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        Engine(str(MODEL), arguments, most_tokens, forcing=True, batch=1)
    assert "\n" not in str(caught.value)
