"""Whole engines: vLLM's scheduler, prefix cache and server around the sparse backend."""

import json
import random
from pathlib import Path

import pytest
from openai import BadRequestError, OpenAI
from rich.console import Console
from support.engines import MODEL, in_fresh_process, run_engine, save_shallow, sum_of_metric
from support.needle_text import write_needle_text
from support.statistics_fuzz import check_random_schedules
from transformers import AutoTokenizer
from typer.testing import CliRunner

from vllm_sparse_plugin.tools.cli.app import app
from vllm_sparse_plugin.tools.eval import FORCED_TOKENS_PROCESSOR
from vllm_sparse_plugin.tools.eval.results import ResultFile, read_results
from vllm_sparse_plugin.tools.needles import build_questions, is_correct
from vllm_sparse_plugin.tools.server import ServerError, ServerSettings, run_server

CONTEXT = 4096
DENSE = {"sparse": "dense"}
BUDGET = {"selection": {"budget_tokens": 512}}
"""An eighth of the context."""
_CHAT = [{"role": "user", "content": "?"}]
ENDPOINTS = {
    "completions": {"prompt": "?"},
    "chat/completions": {"messages": _CHAT},
    "chat/completions/batch": {"messages": [_CHAT]},
    "responses": {"input": "?"},
    "messages": {"messages": _CHAT, "max_tokens": 1},
}
"""Endpoints that check a request before they generate, and their request bodies."""


def server(backend: str | None, *arguments: str, config: dict) -> ServerSettings:
    return ServerSettings(MODEL, 16_384, backend, json.dumps({"sparse_attention": config}), arguments)


def ask(client: OpenAI, prompt: str | list[str]) -> list[list[int]]:
    reply = client.completions.create(
        model=MODEL.name, prompt=prompt, temperature=0, max_tokens=16, extra_body={"return_token_ids": True}
    )
    return [choice.token_ids for choice in reply.choices]


def metric(client: OpenAI, name: str) -> float:
    return sum_of_metric(client._client.get(str(client.base_url).removesuffix("v1/") + "metrics").text, name)


@pytest.fixture(scope="module")
def questions():
    """Two documents, two questions each."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return [
        question for task in ("multikey", "kv") for question in build_questions(tokenizer, task, CONTEXT, 2, seed=5)
    ]


def evaluate(client: OpenAI, output: Path, *arguments: str) -> tuple[ResultFile, float, float]:
    """Run `vllm-sparse eval` and return its results, and the numbers of tokens that the server prefilled and
    decoded."""
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = [metric(client, name) for name in names]
    base = ["--base-url", str(client.base_url), "--tokenizer", str(MODEL), "--output", str(output)]
    done = CliRunner().invoke(app, ["eval", *base, *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    prefilled, decoded = (metric(client, name) - count for name, count in zip(names, before, strict=True))
    return read_results(output), prefilled, decoded


def ask_by_new_connections(client: OpenAI) -> tuple[list[str], set[tuple[int, ...]], float]:
    """Messages of refused requests, different answers to one prompt, and requests that the server has counted.

    Every request has its own connection. The operating system gives it to one of the API processes.
    """

    def ask_for(budget: int) -> tuple[int, ...]:
        reply = client.completions.create(
            model=MODEL.name, prompt=[7] * 900, max_tokens=24, temperature=0, extra_headers={"Connection": "close"},
            extra_body={"ignore_eos": True, "return_token_ids": True, "vllm_xargs": {"sparse_budget_tokens": budget}},
        )  # fmt: skip
        return tuple(reply.choices[0].token_ids)

    refused = []
    for _ in range(12):
        with pytest.raises(BadRequestError) as caught:
            ask_for(12)
        refused.append(caught.value.body["message"])
    before = metric(client, "vllm:request_success_total")
    answers = {ask_for(64) for _ in range(6)}
    return refused, answers, metric(client, "vllm:request_success_total") - before


@pytest.fixture(scope="module")
def unique_server(questions, tmp_path_factory):
    """The answers of a sparse server of two API processes, and the results of `vllm-sparse eval`.

    Tests show that engines without the processor for forced tokens give the same answers.
    """
    arguments = ("--max-num-batched-tokens", "16384", "--logits-processors", FORCED_TOKENS_PROCESSOR)
    arguments += ("--max-model-len", "auto", "--api-server-count", "2")
    settings = server("unique", *arguments, config=BUDGET)
    with run_server("unique", settings, Console()) as client:
        first, hits = [], []
        for question in questions:
            before = metric(client, "vllm:prefix_cache_hits_total")
            first.append(ask(client, question.prompt)[0])
            hits.append(metric(client, "vllm:prefix_cache_hits_total") - before)
        together = ask(client, [question.prompt for question in questions])
        texts = [
            client.completions.create(model=MODEL.name, prompt=q.prompt, temperature=0, max_tokens=16).choices[0].text
            for q in questions
        ]
        read_share = [metric(client, f"vllm_sparse_kv_read_share_{part}") for part in ("sum", "count")]
        refused = {
            (path, stream): client._client.post(
                f"{client.base_url}{path}",
                json=asked | {"model": MODEL.name, "stream": stream, "vllm_xargs": {"sparse_budget_tokens": 12}},
            )
            for path, asked in ENDPOINTS.items()
            for stream in (False, True)
        }
        beams = {"use_beam_search": True, "vllm_xargs": DENSE}
        with pytest.raises(BadRequestError, match="sparse: got a value with beam search, allowed: none"):
            client.completions.create(model=MODEL.name, prompt="?", n=2, extra_body=beams)
        with pytest.raises(BadRequestError, match="sparse: got a field of the request, allowed: an entry of"):
            client.completions.create(model=MODEL.name, prompt="?", extra_body=DENSE)
        samples = client.completions.create(model=MODEL.name, prompt="?", n=2, extra_body={"vllm_xargs": DENSE})
        assert len(samples.choices) == 2
        folder = tmp_path_factory.mktemp("eval")
        asked = ["--task", "multikey", "--task", "niah_multiquery", "--questions", "1"]
        runs = [
            evaluate(client, folder / f"{start}.jsonl", *asked, "--decode-from", start)
            for start in ("prompt", "question")
        ]
        text = write_needle_text(folder / "text.txt", MODEL)
        runs.append(evaluate(client, folder / "text.jsonl", *text.options))
        connections = ask_by_new_connections(client)
        return (first, hits, together, texts), runs, read_share, refused, connections


@pytest.fixture(scope="module")
def answers(unique_server):
    """The answers of a sparse server, and its prefix-cache hits between the questions of a document."""
    return unique_server[0]


def test_evaluation_decodes_the_question_where_asked_to_and_finds_the_same_answers(unique_server):
    (prompt, prefilled, decoded), (question, prefilled_less, decoded_more), _ = unique_server[1]
    from_prompt, from_question = (list(file.results.values()) for file in (prompt, question))
    assert len(from_prompt) == 2
    assert [each.score for each in from_prompt] == [each.score for each in from_question] == [1] * 2
    assert [each.digest for each in from_prompt] == [each.digest for each in from_question]
    assert {each.forced_tokens for each in from_prompt} == {0}
    assert min(each.forced_tokens for each in from_question) > 15
    forced = sum(each.forced_tokens for each in from_question)
    # The engine's counts show that it decoded the questions.
    assert prefilled == sum(each.prompt_tokens for each in from_prompt)
    assert prefilled_less == prefilled - forced
    assert decoded_more == decoded + forced


def test_decoded_text_is_scored_as_the_policy_sees_it(unique_server):
    file, prefilled, decoded = unique_server[1][2]
    (result,) = file.results.values()
    assert (prefilled + decoded, decoded) == (result.prompt_tokens, result.forced_tokens)
    # The budget contains the needle, so its number is likely. streaming_llm does not read it (test_evaluation.py).
    assert result.score < 1


def test_needles_are_found_and_a_shared_prefix_is_served_from_the_cache(questions, answers):
    _, hits, _, texts = answers
    assert all(is_correct(question, text) for question, text in zip(questions, texts, strict=True))
    assert hits[0] == 0
    assert hits[1] >= CONTEXT - 700
    assert hits[3] >= CONTEXT - 700


def test_a_batch_answers_as_its_requests_alone(answers):
    alone, _, together, _ = answers
    assert together == alone


def test_a_server_counts_what_it_reads(unique_server):
    read, in_context = unique_server[2]
    # 512 tokens of the context, and up to 7 of the incomplete page.
    assert 512 / (CONTEXT + 100) < read / in_context < 519 / (CONTEXT - 600)


BAD_BUDGET = "sparse_budget_tokens: got 12, allowed: a multiple of page_size (8), from 24 to 1048576"


def test_a_request_with_a_bad_budget_is_answered_with_a_sentence_by_every_endpoint(unique_server):
    for endpoint, reply in unique_server[3].items():
        assert reply.status_code == 400, endpoint
        assert reply.json()["error"]["message"] == BAD_BUDGET, endpoint


def test_two_api_servers_check_every_request_and_share_the_metrics_of_one_engine(unique_server):
    refused, answers, counted = unique_server[4]
    assert refused == [BAD_BUDGET] * 12
    assert len(answers) == 1
    assert counted == 6


def test_small_prefill_chunks_and_no_prefix_cache_give_the_same_answers(questions, answers):
    with run_engine("unique", BUDGET, max_num_batched_tokens=512, enable_prefix_caching=False) as engine:
        # One of each document.
        assert engine.answer([question.prompt for question in questions[::2]]) == answers[0][::2]


def test_ngram_speculation_keeps_greedy_answers(questions, answers):
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with run_engine("unique", BUDGET, speculative_config=speculation) as engine:
        assert engine.answer([question.prompt for question in questions]) == answers[0]
        assert engine.metric("vllm:spec_decode_num_draft_tokens_total") > 0
        # Nothing repeats in such a short prompt, so one step has no draft.
        (few,) = engine.sample([[0, 5, 6, 7]], max_tokens=8, top_k=2)
        assert all(len(place) == 2 for place in few.likeliest)


def test_preempted_requests_finish_with_right_answers():
    """Four requests of 4,096 tokens that write 100 more need 132 blocks of 128 tokens, and have 129.

    Tokens after the answers may change: vLLM prefills the output of a preempted request densely. Another test checks
    the statistics byte by byte.
    """
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    asked = [build_questions(tokenizer, "kv", 4096, 1, seed=seed)[0] for seed in range(4)]
    config = {**BUDGET, "min_context_tokens": 0}
    with run_engine("unique", config, num_gpu_blocks_override=130, max_model_len=7000) as engine:
        replies = engine.answer([question.prompt for question in asked], max_tokens=100, ignore_eos=True)
        assert engine.metric("vllm:num_preemptions_total") > 0
    assert [len(reply) for reply in replies] == [100] * 4
    texts = tokenizer.batch_decode(replies, skip_special_tokens=True)
    assert all(is_correct(question, text) for question, text in zip(asked, texts, strict=True)), texts


def test_a_budget_beyond_the_context_gives_the_tokens_of_dense_attention(tmp_path):
    model = str(save_shallow(tmp_path, layers=2))
    rng = random.Random(1)
    lengths = [rng.randrange(20, 1500 if index % 5 == 0 else 400) for index in range(50)]
    prompts = [[0, *(rng.randrange(3, 4000) for _ in range(length))] for length in lengths]
    config = {"selection": {"budget_tokens": 2048, "anchor_layers": 2}, "min_context_tokens": 0}
    with run_engine("unique", config, model=model, max_num_seqs=8) as engine:
        sparse = engine.answer(prompts, max_tokens=8)
    with run_engine(None, model=model, max_num_seqs=8) as engine:
        dense = engine.answer(prompts, max_tokens=8)
        leads = engine.leads_where_parted(prompts, dense, sparse)
    assert len(leads) <= 3, leads
    assert all(abs(lead) < 0.05 for lead in leads), leads


@pytest.mark.parametrize("backend", ["unique", "quest"])
def test_statistics_survive_random_schedules(backend):
    seen = in_fresh_process(check_random_schedules, 1, backend, {})
    assert min(seen[kind] for kind in ("pages", "decodes", "chunks", "hits", "preemptions")) > 0, seen


def test_attention_that_stops_says_how_far_it_reads():
    (question,) = build_questions(AutoTokenizer.from_pretrained(MODEL), "kv", 4096, 1, seed=5)
    config = {"stopping": {"scale_tolerance": 1e-3, "block_tokens": 64}, "min_context_tokens": 0}
    with run_engine("art", config) as engine:
        (answer,) = engine.answer([question.prompt])
        # Counters are written at intervals.
        engine.answer([question.prompt], max_tokens=64, ignore_eos=True)
        read, context, blocks, rows = (
            engine.metric(f"vllm_sparse_{name}")
            for name in (
                "kv_read_share_sum",
                "kv_read_share_count",
                "blocks_read_sum",
                "blocks_read_count",
            )
        )
    assert answer
    assert 0 < read < context
    # 8 layers with 2 KV heads: every step adds the same number.
    assert rows % 16 == 0
    assert context > 4000 * rows
    assert 64 * blocks > read - 15 * rows


def test_a_server_with_bad_settings_ends_with_one_sentence():
    with (
        pytest.raises(ServerError, match=r"exit code 2") as caught,
        run_server("refused", server("unique", config={"selection": {"page_size": 12}}), Console()),
    ):
        pass
    lines = [line for line in str(caught.value).splitlines() if line.startswith("error: ")]
    assert lines == ["error: sparse_attention.selection.page_size: got 12, allowed: 8, 16 or 32"]
    assert "Traceback" not in str(caught.value)
