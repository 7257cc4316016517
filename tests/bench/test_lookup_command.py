"""`bench.quality lookup`: engines of a CPU answer, a window does not, and wrong answers end the command."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.engines import in_fresh_process

from bench.common.lookup import Shape, save_lookup
from bench.common.results import ResultFile, read_run
from bench.quality import lookup
from bench.quality.__main__ import main as quality_main
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.provenance import describe_run

CONTEXT, REQUESTS, NEEDLES, ANSWER = 2048, 2, 4, 4
BUDGET = {"selection": {"budget_tokens": 128}}
ARGUMENTS = ["--context", "2K", "--needles", "4", "--answer-tokens", "4"]


def _job(folder, output, variant, settings):
    return lookup.Job(
        model=str(folder), variant=variant,
        additional_config=None if settings is None else json.dumps({"sparse_attention": settings}),
        engine_args={"max_num_batched_tokens": 1024}, context=CONTEXT, requests=REQUESTS, needles=NEEDLES,
        answer_tokens=ANSWER, seed=1, output=str(output),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "settings", "found"),
    [
        ("unique", BUDGET, [True] * NEEDLES),
        ("unique_offload", BUDGET, [True] * NEEDLES),
        # The needles at both ends are among the first and the newest tokens.
        ("streaming_llm", None, [True, False, False, True]),
    ],
)
def test_an_engine_answers_what_it_can_see(tmp_path, variant, settings, found):
    save_lookup(tmp_path, Shape(layers=3, kv_heads=2, head_size=64), CONTEXT)
    output = tmp_path / "found.jsonl"
    with ResultFile(output, describe_run(tmp_path, "abc")):
        pass
    in_fresh_process(lookup.lookup_engine, _job(tmp_path, output, variant, settings).model_dump_json())
    rows = read_run(output).rows
    assert [(row["needle"], row["request"]) for row in rows] == [
        (needle, request) for needle in range(NEEDLES) for request in range(REQUESTS)
    ]
    assert [row["answer"] == row["right_answer"] for row in rows] == [each for each in found for _ in range(REQUESTS)]
    # The prompt itself attends densely, so its token is right.
    assert all(row["answer"][0] == row["right_answer"][0] for row in rows)
    assert all(row["cached_tokens"] >= 1024 for row in rows[REQUESTS:]) or variant == "streaming_llm"
    assert {row["attention_backend"] for row in rows} == {variant.upper()}


REFUSED = {
    "two contexts": (["--context", "2K,4K"], "context: got '2K,4K', allowed: one size"),
    "short context": (["--context", "24"], "context: got a document of 19 tokens, allowed: more than those of"),
    "too many needles": (["--needles", "65"], "needles: got 65, allowed: from 2 to 64"),
    "unknown variant": (["--variant", "fast"], "variant: got 'fast', allowed: dense, "),
    "no object": (["--engine-args", "[]"], "engine_args: got '[]', allowed: a JSON object"),
    "wrong setting": (
        ["--additional-config", '{"sparse_attention": {"selection": {"budget_tokens": 1}}}'],
        "sparse_attention.selection.budget_tokens: got 1, allowed: ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_command_refuses(refused, tmp_path, case):
    arguments, sentence = REFUSED[case]
    assert refused(quality_main, "lookup", "--output", str(tmp_path / "out"), *ARGUMENTS, *arguments).startswith(
        sentence
    )


def test_requests_that_do_not_fit_the_cache_together_are_refused(tmp_path):
    job = _job(tmp_path, tmp_path / "out", "unique", None)
    cache = SimpleNamespace(num_gpu_blocks=2 * CONTEXT // 64 + 1, block_size=64)
    engine = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache)))
    lookup.check_cache(engine, job)
    cache.num_gpu_blocks -= 1
    with pytest.raises(ConfigurationError, match=r"requests: got 2 of 2048 tokens, .* KV cache of 4032 tokens"):
        lookup.check_cache(engine, job)


def _engine(wrong, code):
    """Stands for an engine whose answers are right, except that of one request to one needle."""

    def run_python(module, arguments, seconds):
        job = lookup.Job.model_validate_json(arguments[1])
        with ResultFile(Path(job.output)) as file:
            for request, document in enumerate(job.documents()):
                for index, needle in enumerate(document.needles):
                    answer = [0] * ANSWER if (request, index) == wrong else list(needle.answer)
                    file.write(
                        {
                            "variant": job.variant, "request": request, "needle": index, "position": needle.position,
                            "answer": answer, "right_answer": needle.answer, "ms_per_token": 2.0,
                        }
                    )  # fmt: skip
        return code

    return run_python


@pytest.mark.parametrize(
    ("wrong", "code", "ended", "sentence"),
    [
        (None, 0, 0, ""),
        ((1, 2), 0, 3, "error: unique, request 1, position 1359: got [0, 0, 0, 0], right is ["),
        (None, 1, 3, "error: unique: ended with exit code 1"),
        (None, None, 3, "error: unique: not done by the deadline"),
    ],
)
def test_a_wrong_answer_or_a_failed_engine_ends_the_command(
    tmp_path, monkeypatch, capsys, wrong, code, ended, sentence
):
    monkeypatch.setattr(lookup, "run_python", _engine(wrong, code))
    monkeypatch.setattr(sys, "argv", ["quality", "lookup", "--output", str(tmp_path / "found.jsonl"), *ARGUMENTS])
    with pytest.raises(SystemExit) as stopped:
        quality_main()
    out, err = capsys.readouterr()
    assert stopped.value.code == ended
    assert err.startswith(sentence)
    assert ("1/2" in out) == (wrong is not None)
