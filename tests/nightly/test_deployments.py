"""Sparse attention answers in every deployment of vLLM as in a plain engine, which answers as dense attention does."""

import importlib.util
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest
import torch
import transformers
from support.asker import Asker
from support.continuations import Continuation, gap_at_first_difference
from support.deployments import (
    DEPLOYMENTS,
    NEW_TOKENS,
    TIE,
    WANTED,
    Answers,
    answers_of,
    ask_ranks,
    nixl_pair,
    plainly,
    prefilled,
    prompts,
    server,
)
from support.engines import MODEL, in_fresh_process
from support.families.engines import draw_weights, prompt
from support.families.table import FAMILIES

from vllm_sparse_plugin.config import KEY

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
GPUS = torch.cuda.device_count()


def expect_same(expected: Answers, found: Answers, tie: float = TIE) -> None:
    """Compares answers with the expected ones, which may be given several times."""
    assert found
    pairs = [(expected[index % len(expected)], answer) for index, answer in enumerate(found)]
    gaps = [gap_at_first_difference(*pair) for pair in pairs]
    assert [gap for gap in gaps if gap is not None and gap > tie] == []


@pytest.fixture(scope="module")
def plain() -> Answers:
    return in_fresh_process(plainly, "unique", {})


def test_a_plain_engine_answers_as_dense_attention_does(plain):
    def before_the_end(answers: Answers) -> Answers:
        end = transformers.AutoTokenizer.from_pretrained(MODEL).eos_token_id
        cuts = [each.tokens.index(end) + 1 if end in each.tokens else NEW_TOKENS for each in answers]
        return [Continuation(each.tokens[:cut], each.logprobs[:cut]) for each, cut in zip(answers, cuts, strict=True)]

    dense = in_fresh_process(plainly, None, {})
    expect_same(before_the_end(dense), before_the_end(plain))


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_deployment_answers_as_a_plain_engine_does(name, plain):
    deployment = DEPLOYMENTS[name]
    if deployment.package and importlib.util.find_spec(deployment.package) is None:
        pytest.skip(f"{deployment.package} is not installed")
    if (deployment.needs_gpu and not GPUS) or 0 < GPUS < deployment.gpus:
        pytest.skip(f"needs {deployment.gpus} GPU(s)")
    expect_same(plain, in_fresh_process(answers_of, name, "unique"))


SELECTION = {"selection": {"budget_tokens": 256}, "min_context_tokens": 0}
KEPT = {"compaction": {"budget_tokens": 256, "min_context_tokens": 0}}


@pytest.mark.parametrize(
    ("backend", "settings"),
    [("unique", SELECTION), ("art", {"min_context_tokens": 0}), ("snapkv", KEPT), ("h2o", KEPT)],
)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_an_engine_answers_beside_one_without_requests(family, backend, settings, tmp_path):
    """Engines of a mixture of experts compute every step together: one without requests computes a dummy step."""
    if family == "qwen3_moe" and GPUS < 2:
        pytest.skip("vLLM's CPU build has no communication between the experts of several engines")
    FAMILIES[family].write(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    made = transformers.AutoModelForCausalLM.from_config(config)
    draw_weights(made)
    made.to(config.dtype).save_pretrained(tmp_path)
    questions = [prompt(length)["prompt_token_ids"] for length in (600, 1500)]
    arguments = ["--skip-tokenizer-init", "--data-parallel-size"]
    more = {"detokenize": False, "logprobs": 20}
    found = []
    for engines, order in (("1", [0, 0]), ("2", [0, 1, 0])):
        with server(
            "ranks", *arguments, engines, model=tmp_path, backend=backend, settings={KEY: settings}
        ) as launched:
            found.append(ask_ranks(launched.client, tmp_path.name, order, questions, **more))
    (expected, _), (first, second, again) = found
    expect_same(first, second)
    expect_same(expected, first + again)


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
def test_clients_that_leave_between_two_servers_keep_no_block():
    """A client leaves before its prompt is computed, between the servers, while blocks move, or after a token."""
    with nixl_pair(kv_lease_duration=20) as (prefill, decode):
        askers = [Asker(each.client, MODEL.name, NEW_TOKENS) for each in (prefill, decode)]
        before = [asker.used_blocks() for asker in askers]
        alone = [askers[1].ask(each, kv_transfer_params=prefilled(prefill.client, each)) for each in prompts()]

        def leave(client, patience, **fields):
            body = {"model": MODEL.name, "temperature": 0, "ignore_eos": True, **fields}
            with suppress(httpx.TimeoutException):
                httpx.post(f"{client.base_url}completions", json=body, timeout=patience, trust_env=False)

        def ask(number):
            tokens, patience = prompts()[number % 4], (0.01, 0.05, 0.2, 0.4)[number // 4 % 4]
            kind = ("prefill", "between", "moving", "token", "answer")[number % 5]
            if kind == "prefill":
                return leave(prefill.client, patience, prompt=tokens, max_tokens=1, kv_transfer_params=WANTED)
            blocks = prefilled(prefill.client, tokens)
            if kind == "moving":
                leave(decode.client, patience, prompt=tokens, max_tokens=NEW_TOKENS, kv_transfer_params=blocks)
            elif kind == "token":
                askers[1].hang_up(tokens, 1, kv_transfer_params=blocks)
            return (alone[number % 4], askers[1].ask(tokens, kv_transfer_params=blocks)) if kind == "answer" else None

        numbers = random.Random(0).sample(range(100), 100)
        with ThreadPoolExecutor(8) as pool:
            pairs = [pair for pair in pool.map(ask, numbers) if pair is not None]
        expect_same([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        assert [asker.used_blocks() for asker in askers] == before
