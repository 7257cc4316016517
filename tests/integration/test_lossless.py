"""Lossless mode in whole engines: sparse steps draft, and the tokens equal those of dense decoding."""

import math
import random

import pytest
from support.engines import MODEL, in_fresh_process, run_engine
from support.statistics_fuzz import check_random_schedules
from transformers import AutoTokenizer

from vllm_sparse_plugin.tools.needles import build_questions, is_correct

LOSSLESS = {
    "lossless": {"draft_tokens": 4, "draft_length": "fixed", "min_context_tokens": 2000},
    "min_context_tokens": 0,
}
ARGUMENTS = {"max_num_batched_tokens": 2048, "max_model_len": 4608}
TIE = 1.01 * 2**-3
"""More than one step of a bfloat16 logit between 16 and 32, where the largest logits of needle-8m lie."""
DIGITS = r"[0-9]{3}-[0-9]{4}"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def questions(tokenizer):
    """Two documents, two questions each."""
    return [question for task in ("multikey", "kv") for question in build_questions(tokenizer, task, 4096, 2, seed=5)]


@pytest.fixture(scope="module")
def texts(questions, tokenizer):
    """Truncated documents, and one text too short for drafts."""
    whole = [tokenizer.encode(question.parts[0]) for question in questions[::2]]
    return [whole[0][:3001], whole[0][:2600], whole[1][:2503], whole[1][:300]]


@pytest.fixture(scope="module")
def lossless(questions, texts, tokenizer):
    """The answers and counts of an engine in lossless mode."""
    prompts = [*(tokenizer.encode(question.prompt) for question in questions), *texts]
    rng = random.Random(3)
    with run_engine("unique", LOSSLESS, **ARGUMENTS) as engine:
        short = engine.answer([texts[3]], max_tokens=32, ignore_eos=True)
        undrafted = engine.metric("vllm:spec_decode_num_drafts_total")
        answers = engine.answer(prompts[:4]), engine.answer(texts, max_tokens=64, ignore_eos=True)
        drafted, accepted, hits = (
            engine.metric(f"vllm:{name}_total")
            for name in ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "prefix_cache_hits")
        )
        longest = engine.answer([texts[0] + texts[1][: 4608 - 3001 - 21]], max_tokens=100, ignore_eos=True)
        beginnings = [[*texts[2], rng.randrange(3, 4000)] for _ in range(24)]
        sampled = engine.sample(beginnings, max_tokens=40)
        followed = engine.follow(tokenizer.decode(texts[2][1:]), DIGITS)
        few = [engine.sample([text], max_tokens=16, top_k=2)[0] for text in (texts[3], texts[2])]
    return answers, (undrafted, short), (drafted, accepted, hits), longest, sampled, followed, few


def test_tokens_are_those_of_dense_decoding(lossless, questions, texts, tokenizer):
    prompts = [tokenizer.encode(question.prompt) for question in questions]
    answered, continued = lossless[0]
    assert all(
        is_correct(question, tokenizer.decode(tokens, skip_special_tokens=True))
        for question, tokens in zip(questions, answered, strict=True)
    )
    with run_engine("dense", **ARGUMENTS) as engine:
        leads = engine.leads_where_parted(prompts, engine.answer(prompts), answered)
        dense = engine.answer(texts, max_tokens=64, ignore_eos=True)
        leads += engine.leads_where_parted(texts, dense, continued)
    assert all(abs(lead) < TIE for lead in leads), leads
    assert len(leads) <= 2, leads


def test_most_drafts_are_accepted_and_prefixes_are_hit(lossless):
    drafted, accepted, hits = lossless[2]
    assert drafted > 100
    assert 0.8 < accepted / drafted <= 1
    assert hits > 3000


def test_contexts_too_short_to_gain_are_not_drafted_for(lossless):
    undrafted, (tokens,) = lossless[1]
    assert undrafted == 0
    assert len(tokens) == 32


def test_the_longest_context_is_reached(lossless):
    (tokens,) = lossless[3]
    assert len(tokens) == 21


def test_structured_output_follows_its_grammar(lossless):
    import re

    assert re.fullmatch(DIGITS, lossless[5])


def test_the_backend_drafts_as_long_as_pays_and_leaves_the_tokens_as_they_are(lossless, texts):
    settings = {"lossless": {"draft_tokens": 4, "min_context_tokens": 2000}, "min_context_tokens": 0}
    with run_engine("lossless", settings, **ARGUMENTS) as engine:
        (tokens,) = engine.answer([texts[2]], max_tokens=64, ignore_eos=True)
        drafts, steps = (
            engine.metric(name) for name in ("vllm:spec_decode_num_drafts_total", "vllm_sparse_lossless_gain_count")
        )
        leads = engine.leads_where_parted([texts[2]], [tokens], [lossless[0][1][2]])
    assert all(abs(lead) < TIE for lead in leads), leads
    # The start tries three steps with drafts and three without. Later steps depend on their times.
    assert 3 <= drafts < steps


def test_steps_that_read_pages_of_an_earlier_step_leave_the_tokens_as_they_are(lossless, texts):
    kept = {**LOSSLESS["lossless"], "draft_tokens": 12, "score_every": 12}
    with run_engine("unique", LOSSLESS | {"lossless": kept}, **ARGUMENTS) as engine:
        continued = engine.answer(texts, max_tokens=64, ignore_eos=True)
        accepted, drafted = (
            engine.metric(f"vllm:spec_decode_num_{name}_tokens_total") for name in ("accepted", "draft")
        )
        leads = engine.leads_where_parted(texts, continued, lossless[0][1])
    assert all(abs(lead) < TIE for lead in leads), leads
    assert 0.4 < accepted / drafted <= 1, accepted / drafted


def test_sampled_tokens_have_the_distribution_that_the_model_gives_them(lossless):
    """Frequencies of the two likeliest tokens, at positions with known distributions."""
    places = [
        (token, sorted(likeliest, key=likeliest.get, reverse=True)[:2], likeliest)
        for each in lossless[4]
        for token, likeliest in zip(each.tokens, each.likeliest, strict=True)
    ]
    assert len(places) == 24 * 40
    for rank in range(2):
        probabilities = [math.exp(likeliest[ranked[rank]]) for _, ranked, likeliest in places]
        drawn = sum(token == ranked[rank] for token, ranked, _ in places)
        deviation = math.sqrt(sum(p * (1 - p) for p in probabilities))
        assert abs(drawn - sum(probabilities)) < 4 * deviation, (drawn, sum(probabilities), deviation)


def test_tokens_are_drawn_of_the_likeliest_with_drafts_and_without(lossless):
    """A step without drafts, for example for a short context, has no draft rows."""
    for each in lossless[6]:
        assert len(each.tokens) == 16
        for token, place in zip(each.tokens, each.likeliest, strict=True):
            # A token that ties with the second likeliest may be drawn in its place.
            assert place[token] >= sorted(place.values())[-2], place


def test_what_drafts_write_is_never_read_and_statistics_are_those_of_verified_keys():
    drafts = {"draft_tokens": 5, "draft_length": "fixed", "min_context_tokens": 0, "score_every": 3}
    settings = {"lossless": drafts}
    seen = in_fresh_process(check_random_schedules, 1, "unique", settings, 400)
    assert min(seen[kind] for kind in ("pages", "decodes", "chunks", "hits", "preemptions", "drafts")) > 0, seen
