"""Lossless mode in whole engines on a GPU: sparse steps draft, and the tokens are those of dense decoding."""

import json
import math
import random
import re
from typing import Any

import pytest
import torch
from support.gpu_engines import MODEL, engine
from transformers import AutoTokenizer

from vllm_sparse_plugin.tools.needles import build_questions, is_correct

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TIES = {"auto": 2**-3, "fp8": 2**-2}
"""Leads of the likeliest token that rounding may reverse, by cache type: one bfloat16 step of each of two logits
between 8 and 16, the range of the model's largest logits; two steps with an 8-bit cache, because tokens that are
verified together are rounded differently from a single token."""
PARTED = {"auto": 4, "fp8": 2}
"""Up to one in this many answers may differ at such a lead."""
LONGEST = 16_384
DIGITS = r"[0-9]{3}-[0-9]{4}"
LOSSLESS = {
    "lossless": {"draft_tokens": 8, "draft_length": "fixed", "min_context_tokens": 2000},
    "selection": {"budget_tokens": 1024},
}
PIECEWISE = {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}


def lossless(**settings: Any) -> dict[str, Any]:
    chosen = LOSSLESS | {"lossless": LOSSLESS["lossless"] | settings}
    return {"additional_config": {"sparse_attention": chosen}}


def go_on(llm: Any, prompts: list[list[int]], **sampling: Any) -> list[Any]:
    """The continuations of a batch of prompts, greedy unless `sampling` says otherwise."""
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0, "max_tokens": 96, "ignore_eos": True} | sampling)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [done.outputs[0] for done in llm.generate(asked, params, use_tqdm=False)]


def counted(llm: Any, name: str) -> int:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def questions(tokenizer):
    return [
        question
        for context in (4096, 13_000)
        for task in ("multikey", "kv")
        for question in build_questions(tokenizer, task, context, 4, seed=5)
    ]


@pytest.fixture(scope="module")
def prompts(questions, tokenizer):
    """Questions, the beginnings of their documents, and two prompts too short for drafts."""
    asked = [tokenizer.encode(question.prompt) for question in questions]
    lengths = [3990, 3500, 2007, 300, 12_100, 9001, 5003, 1990] * 2
    return asked + [prompt[:length] for prompt, length in zip(asked, lengths, strict=True)]


@pytest.fixture(scope="module")
def dense(prompts):
    """Continuations of dense decoding with log probabilities of alternatives, by cache type."""
    found = {}
    for dtype in ("auto", "fp8"):
        with engine(attention_backend="dense", kv_cache_dtype=dtype) as llm:
            found[dtype] = go_on(llm, prompts, logprobs=20)
    return found


CASES = {
    "graphs": {},
    "compiled, graphs in pieces": {"compilation_config": PIECEWISE},
    "eager": {"enforce_eager": True, "compilation_config": {}},
    "small chunks, no prefix cache": {"max_num_batched_tokens": 512, "enable_prefix_caching": False},
    "not scheduled ahead": {"async_scheduling": False},
    "three at once": {"max_num_seqs": 3},
    "one at once": {"max_num_seqs": 1},
    "blocks are scarce": {"num_gpu_blocks_override": 700},
    "few sizes are captured": {"compilation_config": PIECEWISE | {"cudagraph_capture_sizes": [1, 2, 5, 7]}},
    "fp8": {"kv_cache_dtype": "fp8"},
    "as long as pays": lossless(draft_length="adaptive"),
    "pages of one choice": lossless(score_every=8),
    "pages of three choices": lossless(score_every=3),
    "pages of one choice, as long as pays": lossless(score_every=8, draft_length="adaptive"),
    "pages of one choice, eager": lossless(score_every=8) | {"enforce_eager": True, "compilation_config": {}},
    "pages of one choice, blocks are scarce": lossless(score_every=8) | {"num_gpu_blocks_override": 700},
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_dense_decoding(case, prompts, questions, dense, tokenizer):
    arguments = CASES[case]
    with engine(**lossless() | arguments) as llm:
        found = go_on(llm, prompts)
        drafted, accepted = (counted(llm, f"spec_decode_num_{name}_tokens") for name in ("draft", "accepted"))
        pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        assert pool.get_usage() == 0
    dtype = arguments.get("kv_cache_dtype", "auto")
    leads = []
    for one, other in zip(dense[dtype], found, strict=True):
        places = zip(one.token_ids, other.token_ids, one.logprobs, strict=True)
        parted = next((place for place in places if place[0] != place[1]), None)
        if parted is not None:
            token, instead, likeliest = parted
            leads.append(likeliest[token].logprob - getattr(likeliest.get(instead), "logprob", -math.inf))
    print(f"{case}: {accepted / drafted:.3f} of {drafted} drafts accepted, leads where answers part {leads}")
    assert all(abs(lead) < 1.01 * TIES[dtype] for lead in leads), leads
    assert len(leads) <= len(prompts) // PARTED[dtype], leads
    # For a model this small drafts may cost more than they gain.
    assert drafted > (0 if case.endswith("as long as pays") else 2000)
    # Without asynchronous scheduling, undrafted requests verify their newest token, which is seldom right.
    assert 0.5 < accepted / drafted <= 1
    answers = [tokenizer.decode(done.token_ids, skip_special_tokens=True) for done in found[: len(questions)]]
    assert sum(map(is_correct, questions, answers)) >= 0.9 * len(questions)


@pytest.mark.parametrize("score_every", [1, 8])
def test_prefixes_are_forgotten_while_drafts_are_in_flight(prompts, questions, tokenizer, monkeypatch, score_every):
    """Requests are preempted whenever the cache is reset, and start again."""
    with engine(**lossless(score_every=score_every), num_gpu_blocks_override=700) as llm:
        step, steps = llm.llm_engine.step, []

        def reset_and_step():
            steps.append(len(steps) % 50 == 49 and llm.reset_prefix_cache(reset_running_requests=True))
            return step()

        monkeypatch.setattr(llm.llm_engine, "step", reset_and_step)
        found = go_on(llm, prompts)
        assert any(steps)
        assert counted(llm, "num_preemptions") > 0
        assert llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_usage() == 0
    answers = [tokenizer.decode(done.token_ids, skip_special_tokens=True) for done in found[: len(questions)]]
    assert sum(map(is_correct, questions, answers)) >= 0.9 * len(questions)


def test_log_probabilities_of_short_prompts_are_those_of_dense_attention(prompts):
    """A prompt that is as short as the drafts of a batch is no batch of drafts."""
    asked = [prompt[:length] for prompt, length in zip(prompts, [2, 9, 17, 40, 129, 260], strict=False)]
    found = []
    for arguments in ({"attention_backend": "dense"}, lossless()):
        with engine(**arguments) as llm:
            found.append([done.prompt_logprobs for done in prompt_log_probabilities(llm, asked)])
    for one, other in zip(*found, strict=True):
        for expected, actual in zip(one[1:], other[1:], strict=True):
            assert expected.keys() == actual.keys()
            assert all(abs(expected[token].logprob - actual[token].logprob) < TIES["auto"] for token in expected)


def prompt_log_probabilities(llm: Any, prompts: list[list[int]]) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


SCHEMA = {
    "type": "object",
    "properties": {"code": {"type": "string", "pattern": "^[0-9]{3}$"}, "sure": {"type": "boolean"}},
    "required": ["code", "sure"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_sixteen_requests_follow_a_schema(backend, prompts, tokenizer):
    pytest.importorskip({"xgrammar": "xgrammar", "guidance": "llguidance"}[backend])
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = SamplingParams(temperature=0, max_tokens=64, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    asked = [tokenizer.decode(prompt[:3000]) for prompt in prompts[:16]]
    assert len(asked) == 16
    # Otherwise the model answers with spaces.
    grammars = {"backend": backend, "disable_any_whitespace": True}
    with engine(**lossless(), structured_outputs_config=grammars) as llm:
        texts = [done.outputs[0].text for done in llm.generate(asked, params, use_tqdm=False)]
    for text in texts:
        answer = json.loads(text)
        assert re.fullmatch("[0-9]{3}", answer["code"])
        assert isinstance(answer["sure"], bool)


@pytest.fixture(scope="module")
def session(prompts, tokenizer):
    """One engine's answers: sampled tokens, tokens of a grammar, the longest context, and answers after prefix hits."""
    rng = random.Random(3)
    beginnings = [[*prompts[0][:3000], rng.randrange(3, 4000)] for _ in range(32)]
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    with engine(**lossless()) as llm:
        first = go_on(llm, prompts[:4])
        again = go_on(llm, prompts[:4])
        hits = counted(llm, "prefix_cache_hits")
        sampled = go_on(llm, beginnings, temperature=1, logprobs=2, max_tokens=64)
        constraint = SamplingParams(
            temperature=0, max_tokens=80, structured_outputs=StructuredOutputsParams(regex=DIGITS)
        )
        followed = llm.generate(tokenizer.decode(prompts[4][:6000]), constraint, use_tqdm=False)[0].outputs[0].text
        longest = go_on(llm, [(prompts[-1] * 20)[: LONGEST - 21]], max_tokens=100)[0]
    return first, again, hits, sampled, followed, longest


def test_prefixes_are_hit_and_hold_what_was_verified(session):
    first, again, hits, *_ = session
    assert hits > 10_000
    # Attention to a cached prefix adds in another order, so one answer may differ at a tie.
    assert sum(one.token_ids == other.token_ids for one, other in zip(first, again, strict=True)) >= 3


def test_sampled_tokens_have_the_distribution_that_the_model_gives_them(session):
    places = [
        (token, {other: each.logprob for other, each in likeliest.items()})
        for done in session[3]
        for token, likeliest in zip(done.token_ids, done.logprobs, strict=True)
    ]
    assert len(places) == 32 * 64
    for rank in range(2):
        ranked = [sorted(likeliest, key=likeliest.get, reverse=True)[rank] for _, likeliest in places]
        probabilities = [math.exp(likeliest[token]) for token, (_, likeliest) in zip(ranked, places, strict=True)]
        drawn = sum(token == place[0] for token, place in zip(ranked, places, strict=True))
        deviation = math.sqrt(sum(p * (1 - p) for p in probabilities))
        assert abs(drawn - sum(probabilities)) < 4 * deviation, (drawn, sum(probabilities), deviation)


def test_structured_output_follows_its_grammar(session):
    assert re.fullmatch(DIGITS, session[4])


def test_the_longest_context_is_reached(session):
    assert len(session[5].token_ids) == 21
