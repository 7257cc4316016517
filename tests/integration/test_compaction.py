"""Compaction in one attention layer, with vLLM's metadata and KV-cache update on a CPU, and in engines."""

from pathlib import Path

import pytest
import torch
from sparse_kernels.batch import Softmax
from sparse_kernels.compaction import CompactionRule
from support.bare_layer import LayerBatch
from support.engines import MODEL, run_engine, save_shallow
from support.layer import LayerHarness, Request
from support.needles import needle_range
from support.paged import dense_attention
from support.snapkv import kept_tokens, votes_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_plugin.compaction.step import keeps_queries
from vllm_sparse_plugin.evictions.zipvl import ZipVLCompaction
from vllm_sparse_plugin.requests.rows import preempt
from vllm_sparse_plugin.tools.needles import build_questions, is_correct

DENSE_TOLERANCE = 2e-2
"""vLLM's CPU kernel rounds probabilities to bfloat16; outputs here are averages of unit normals."""
TIE = 0.05
"""Largest difference in nats between equally likely tokens."""
BLOCK = 32
SLIDING = {"method": "streaming_llm", "budget_tokens": 104, "sink_tokens": 8, "min_context_tokens": 0}


def harness_of(model: str, backend: str = "dense", compaction: dict | None = None, **settings: object) -> LayerHarness:
    """A layer with small blocks; decoding is sparse at any length."""
    always = {} if backend == "dense" else {"min_context_tokens": 0}
    settings = {"compaction": compaction} | always | settings
    return LayerHarness(model, settings=settings, backend=backend, block_size=BLOCK, num_blocks=120)


def poison(harness: LayerHarness, request: Request, kept: set[int]) -> None:
    """Fills the blocks that a request has given back with values that would spoil every output."""
    left_out = [block for index, block in enumerate(request.blocks) if index not in kept]
    harness.cache[left_out] = torch.nan


def streamed(context: int, window: int = 96) -> set[int]:
    """Blocks of a context that StreamingLLM keeps."""
    return {0, *range((context - window) // BLOCK, -(-context // BLOCK))}


def expected(harness: LayerHarness, request: Request, kept: set[int]) -> torch.Tensor:
    """Attention of the newest token to the tokens of some blocks."""
    part = [token for token in range(len(request.keys)) if token // BLOCK in kept]
    alone = Request([], 0, request.keys[part], request.values[part], request.fresh[-1:])
    return harness.dense(alone)


@pytest.mark.parametrize("chunk", [300, 130])
def test_a_window_is_attended_to_and_what_was_given_back_is_never_read(model, chunk):
    harness = harness_of(model, compaction=SLIDING)
    request, beside = harness.request(300), harness.request(500)
    for begin in range(0, 300, chunk):
        (output,) = harness.step([(request, min(chunk, 300 - begin))])
        # Prompt tokens read everything.
        assert (output[-1].double() - harness.dense(request)).abs().max() < DENSE_TOLERANCE
    for _ in range(56):  # the window passes two blocks
        output, whole = harness.step([(request, 1), (beside, 5)])
        kept = streamed(len(request.keys))
        assert (output[0].double() - expected(harness, request, kept)).abs().max() < DENSE_TOLERANCE
        assert (whole[-1].double() - harness.dense(beside)).abs().max() < DENSE_TOLERANCE
        poison(harness, request, kept)
    assert len(kept) < len(request.blocks) // 2


def test_streaming_llm_reads_the_same_pages_of_a_cache_that_gives_back_what_it_does_not_read(model):
    outputs = []
    for compaction in (None, SLIDING):
        harness = harness_of(
            model, "streaming_llm", compaction, selection={"policy": "streaming_llm", "budget_tokens": 104}
        )
        request = harness.request(300)
        steps = [harness.step([(request, 300)])[0]]
        for _ in range(24):
            steps += harness.step([(request, 1)])
            if compaction:
                poison(harness, request, streamed(len(request.keys)))
        outputs.append(torch.cat(steps))
    assert outputs[1].isfinite().all()
    assert torch.equal(*outputs)


def test_chunks_behind_the_prompt_read_the_window_of_their_first_token(model):
    """After a preemption, output is computed again in chunks."""
    harness = harness_of(model, compaction=SLIDING)
    request = harness.request(200)
    harness.step([(request, 250)])  # continues into the output, and reads everything
    (output,) = harness.step([(request, 70)])
    kept = streamed(251) | set(range(250 // BLOCK, 10))
    assert (output[-1].double() - expected(harness, request, kept)).abs().max() < DENSE_TOLERANCE
    assert output.isfinite().all()


SNAPKV = {"method": "snapkv", "budget_tokens": 96, "window_tokens": 8, "pool_tokens": 5, "min_context_tokens": 0}
RULE = CompactionRule(window_tokens=8, pool_tokens=5, sink_tokens=4)
H2O = {"method": "h2o", "budget_tokens": 96, "min_context_tokens": 0}


def voted(request: Request, query: torch.Tensor) -> list[set[int]]:
    """Tokens of a prompt that SnapKV keeps, per KV head; `query` is that of its last 8 tokens."""
    prompt = request.prompt_tokens
    return kept_tokens(query, request.keys[:prompt], 96 + prompt % BLOCK, Softmax(0.125), RULE, BLOCK)


def kept_attention(harness: LayerHarness, request: Request, kept: list[set[int]], token: int = -1) -> torch.Tensor:
    """Attention of a token after the prompt to the kept tokens of each KV head, and to tokens after the prompt."""
    context = len(request.keys) - len(request.fresh) + range(len(request.fresh))[token] + 1
    visible = torch.zeros(harness.num_kv_heads, context, dtype=torch.bool)
    visible[:, request.prompt_tokens :] = True
    for head, tokens in enumerate(kept):
        visible[head, sorted(tokens)] = True
    query = request.fresh[token].unflatten(0, (harness.num_kv_heads, -1))
    return dense_attention(query, request.keys[:context], request.values[:context], harness.layer.impl.scale, visible)


def is_kept(harness: LayerHarness, request: Request, output: torch.Tensor, kept: list[set[int]], token: int = -1):
    return bool((output[token].double() - kept_attention(harness, request, kept, token)).abs().max() < DENSE_TOLERANCE)


@pytest.mark.parametrize("chunks", [[300], [256, 44], [297, 3], [293, 2, 2, 2, 1], [290, *[1] * 10]])
def test_snapkv_keeps_what_the_last_queries_of_a_prompt_vote_for_however_it_is_cut(model, chunks):
    harness = harness_of(model, "dense", SNAPKV)
    request, beside = harness.request(300), harness.request(900)
    queries = []
    for new in chunks:
        output, _ = harness.step([(request, new), (beside, 5)])
        queries.append(request.fresh)
        assert (output[-1].double() - harness.dense(request)).abs().max() < DENSE_TOLERANCE
    kept = voted(request, torch.cat(queries)[-8:])
    for step in range(24):  # into the next block
        output, whole = harness.step([(request, 1), (beside, 5)])
        assert is_kept(harness, request, output, kept)
        assert (whole[-1].double() - harness.dense(beside)).abs().max() < DENSE_TOLERANCE
        if step == 0:
            # The first step moves the kept tokens. Then the scheduler gives the other blocks to other requests.
            poison(harness, request, set(range(300 // BLOCK - 3, 12)))
    assert not harness.builder.compaction._requests[request.name].windows


@pytest.mark.parametrize("moves_late", [False, True])
def test_tokens_move_in_the_step_that_ends_the_prompt_or_in_the_next_one(model, monkeypatch, moves_late):
    harness = harness_of(model, "dense", SNAPKV)
    request = harness.request(300)
    (output,) = harness.step([(request, 299)])
    query = request.fresh[-8:]
    if moves_late:
        # A replayed graph would run only kernels: the prompt's last token is not observed and does not vote.
        monkeypatch.setattr(type(harness.layer.impl), "observe", lambda *_: None)
        monkeypatch.setattr(type(harness.layer.impl), "compact_ended", lambda *_: None)
    (output,) = harness.step([(request, 1)])
    assert (output[-1].double() - harness.dense(request)).abs().max() < DENSE_TOLERANCE
    last = 298
    if not moves_late:
        query, last = torch.cat([query[1:], request.fresh]), 299
    kept = kept_tokens(query, request.keys, 96 + 300 % BLOCK, Softmax(0.125), RULE, BLOCK, last_query=last)
    if not moves_late:
        poison(harness, request, set(range(300 // BLOCK - 3, 12)))
    for _ in range(2):
        (output,) = harness.step([(request, 1)])
        assert is_kept(harness, request, output, kept)
        poison(harness, request, set(range(300 // BLOCK - 3, 12)))


@pytest.mark.parametrize(("settings", "keeps"), [(SNAPKV, True), (H2O, True), (SLIDING, False)])
def test_the_runner_of_layers_whose_queries_vote_is_noted(model, settings, keeps):
    """It computes tokens of prompts outside full CUDA graphs."""
    assert keeps_queries(harness_of(model, "dense", settings)) is keeps


def test_a_request_that_begins_behind_a_hit_moves_its_own_tokens_whatever_had_its_name(model):
    """An earlier request of the same name ended its prompt in its only step, which began before the hit."""
    harness = harness_of(model, "dense", SNAPKV)
    first = harness.request(300)
    harness.step([(first, 300)])
    request = harness.request(300, first, 4)
    request.name = first.name
    harness.step([(request, 300 - 4 * BLOCK)])
    kept = voted(request, request.fresh[-8:])
    (output,) = harness.step([(request, 1)])
    assert is_kept(harness, request, output, kept)


@pytest.mark.parametrize("chunks", [[300], [130, 167, 3]])
def test_h2o_keeps_what_all_queries_of_a_prompt_vote_for(model, chunks):
    harness = harness_of(model, "dense", H2O)
    request, queries = harness.request(300), []
    for new in chunks:
        harness.step([(request, new)])
        queries.append(request.fresh)
    rule = CompactionRule(window_tokens=0, pool_tokens=1, sink_tokens=4, recent_share=0.5, every_query=True)
    kept = kept_tokens(torch.cat(queries), request.keys, 96 + 300 % BLOCK, Softmax(0.125), rule, BLOCK)
    for step in range(3):
        (output,) = harness.step([(request, 1)])
        assert is_kept(harness, request, output, kept)
        if step == 0:
            poison(harness, request, set(range(300 // BLOCK - 3, 12)))
    assert not harness.builder.compaction._requests[request.name].votes


def test_zipvl_keeps_the_same_tokens_of_a_prompt_however_it_is_cut(model):
    settings = ZipVLCompaction(budget_tokens=96, min_context_tokens=0, recent_probes=8, random_probes=8)
    outputs = []
    generator = torch.Generator().manual_seed(7)
    data = tuple(torch.randn(303, *of, generator=generator).bfloat16() for of in ((8, 64), (2, 64), (2, 64)))
    for chunks in ([300], [130, 167, 3]):
        harness = harness_of(model, "dense", settings.model_dump(exclude_none=True))
        request, begin = harness.request(300), 0
        for step, new in enumerate([*chunks, 1, 1, 1]):
            given = tuple(part[begin : begin + new] for part in data)
            (output,) = harness.step([(request, new)], {0: given})
            begin += new
            if step == len(chunks):
                poison(harness, request, set(range(300 // BLOCK - 3, 12)))
        outputs.append(output)
        assert not harness.builder.compaction._requests[request.name].votes
    kept = kept_tokens(data[0][:300], request.keys[:300], 96 + 300 % BLOCK, Softmax(0.125), settings.rule(), BLOCK)
    assert kept[0] == kept[1]
    assert is_kept(harness, request, outputs[0], kept)
    assert torch.equal(*outputs)


PROTECTED = {"sparse_protect": "10:40,150:170,1000:1010"}
RANGES = {*range(10, 40), *range(150, 170)}
"""A prompt of 300 tokens ends before the last range."""


@pytest.mark.parametrize("chunks", [[300], [290, *[1] * 10]])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_request_keeps_the_tokens_that_it_protects_beside_others(model, chunks, resumes):
    harness = harness_of(model, "dense", SNAPKV)
    request, beside = harness.request(300), harness.request(300)
    request.arguments = PROTECTED
    if resumes:
        harness.step([(request, 300)])
        harness.step([(request, 1)])
        harness.release(request)
    queries: tuple[list, list] = [], []
    for new in chunks:
        harness.step([(request, new), (beside, new)])
        for each, of_each in zip((request, beside), queries, strict=True):
            of_each.append(each.fresh)
    votes, others = (torch.cat(of_each)[-8:] for of_each in queries)
    softmax = Softmax(0.125)
    kept = kept_tokens(votes, request.keys, 96 + 300 % BLOCK, softmax, RULE, BLOCK, protected=RANGES)
    assert all(len(of_head - voted_for) > 10 for of_head, voted_for in zip(kept, voted(request, votes), strict=True))
    plain = voted(beside, others)
    for _ in range(3):
        output, unprotected = harness.step([(request, 1), (beside, 1)])
        assert is_kept(harness, request, output, kept)
        assert is_kept(harness, beside, unprotected, plain)
        poison(harness, request, set(range(300 // BLOCK - 3, 12)))


def test_a_step_that_ends_many_prompts_marks_the_protected_tokens_of_one_at_a_time(model):
    harness = harness_of(model, "dense", SNAPKV)
    requests = [harness.request(300), harness.request(200)]
    for request in requests:
        request.arguments = PROTECTED
    seen, compact = [], harness.layer.impl.compact

    def watch(layer, window, prompt, *others):
        seen.append(prompt.protected.nonzero().flatten().tolist())
        compact(layer, window, prompt, *others)

    harness.layer.impl.compact = watch
    harness.step([(request, request.prompt_tokens) for request in requests])
    assert seen == [sorted(at for at in RANGES if at < request.prompt_tokens) for request in requests]
    compaction = harness.builder.compaction
    assert [each.ends.protected for each in compaction.observed] == [None, None]
    harness.step([(request, 1) for request in requests])
    assert [state.marks for state in compaction._requests.values()] == [None, None]


@pytest.mark.parametrize("blocks", [2, 4])
def test_a_request_protects_what_it_names_itself_whatever_had_its_name(model, blocks):
    """An earlier request of its name was aborted at or before the hit, and protected other tokens."""
    harness = harness_of(model, "dense", SNAPKV)
    other, first = harness.request(300), harness.request(300)
    harness.step([(other, 300)])
    first.arguments = {"sparse_protect": "200:230"}
    harness.step([(first, 2 * BLOCK)])
    harness.release(first)
    request = harness.request(300, other, blocks)
    request.name, request.arguments = first.name, PROTECTED
    harness.step([(request, 300 - blocks * BLOCK)])
    votes = request.fresh[-8:]
    kept = kept_tokens(votes, request.keys, 96 + 300 % BLOCK, Softmax(0.125), RULE, BLOCK, protected=RANGES)
    (output,) = harness.step([(request, 1)])
    assert is_kept(harness, request, output, kept)


def test_heavy_hitters_make_room_for_protected_tokens_and_the_newest_do_not(model):
    harness = harness_of(model, "dense", H2O)
    request = harness.request(300)
    request.arguments = {"sparse_protect": "10:54"}  # 96 - 48 - 4 tokens
    harness.step([(request, 300)])
    rule = CompactionRule(window_tokens=0, pool_tokens=1, sink_tokens=4, recent_share=0.5, every_query=True)
    count, softmax = 96 + 300 % BLOCK, Softmax(0.125)
    kept = kept_tokens(request.fresh, request.keys, count, softmax, rule, BLOCK, protected=range(10, 54))
    # 12 of the newest 48 are in the incomplete block, which is kept in addition.
    assert len(kept[0] - {*range(4), *range(10, 54), *range(252, 300)}) == 12
    (output,) = harness.step([(request, 1)])
    assert is_kept(harness, request, output, kept)


@pytest.mark.parametrize("order", ["newest", "votes"])
@pytest.mark.parametrize("sink_pages", [0, 1])
def test_attention_that_stops_has_read_the_newest_or_the_most_voted_of_what_is_kept(model, order, sink_pages):
    """Every interval is stable here, so attention stops after the second one of 64 tokens."""
    stopping = {"scale_tolerance": 1000.0, "direction_tolerance": 16.0, "patience": 1, "block_tokens": 64}
    harness = harness_of(
        model, "art", SNAPKV | {"budget_tokens": 320},
        stopping=stopping | {"dense_order": order, "dense_sink_pages": sink_pages},
    )  # fmt: skip
    request = harness.request(700)
    harness.step([(request, 700)])
    query = request.fresh[-8:]
    kept = kept_tokens(query, request.keys, 320 + 700 % BLOCK, Softmax(0.125), RULE, BLOCK)
    (output,) = harness.step([(request, 1)])
    poison(harness, request, set(range(700 // BLOCK - 10, 22)))
    read: dict[str, list[set[int]]] = {"newest": [], "votes": []}
    for head, of_head in enumerate(kept):
        votes = votes_of(query.unflatten(1, (2, -1))[:, head], request.keys[:700, head], 699, Softmax(0.125))
        window = 700 - 8
        in_text = [token for token in sorted(of_head) if token < 700 // BLOCK * BLOCK]
        pooled = [max(votes[max(0, token - 2) : min(window, token + 3)]) for token in range(window)]
        pooled += [1e9] * 8
        by_votes = in_text[:4] + sorted(in_text[4:], key=lambda token: (pooled[token], token))
        for name, stored in (("newest", in_text), ("votes", by_votes)):
            tokens = [*stored, *range(700 // BLOCK * BLOCK, 701)]
            pages = [tokens[first : first + 16] for first in range(0, len(tokens), 16)]
            newest = pages[sink_pages:-1][::-1][: 8 - sink_pages]
            read[name].append({token for page in pages[:sink_pages] + newest + pages[-1:] for token in page})
    assert {name: is_read(harness, request, output, tokens) for name, tokens in read.items()} == {
        "newest": order == "newest",
        "votes": order == "votes",
    }


def is_read(harness: LayerHarness, request: Request, output: torch.Tensor, read: list[set[int]]) -> bool:
    visible = torch.zeros(harness.num_kv_heads, len(request.keys), dtype=torch.bool)
    for head, tokens in enumerate(read):
        visible[head, sorted(tokens)] = True
    query = request.fresh[-1].unflatten(0, (harness.num_kv_heads, -1))
    wanted = dense_attention(query, request.keys, request.values, harness.layer.impl.scale, visible)
    return bool((output[-1].double() - wanted).abs().max() < DENSE_TOLERANCE)


def test_selection_goes_on_over_what_is_kept(model):
    """With all pages as budget, all kept tokens and moved statistics are read; with a small budget, some of them."""
    outputs = []
    for budget in (64, 512):
        harness = harness_of(model, "unique", SNAPKV, selection={"policy": "unique", "budget_tokens": budget})
        request = harness.request(300)
        harness.step([(request, 300)])
        kept = voted(request, request.fresh[-8:])
        (output,) = harness.step([(request, 1)])
        poison(harness, request, set(range(300 // BLOCK - 3, 12)))
        (output,) = harness.step([(request, 1)])
        outputs.append(is_kept(harness, request, output, kept))
        assert output.isfinite().all()
    assert outputs == [False, True]


def test_a_resumed_request_keeps_the_same_tokens(model):
    harness = harness_of(model, "dense", SNAPKV)
    request = harness.request(300)
    generator = torch.Generator().manual_seed(7)
    data = tuple(torch.randn(330, *of, generator=generator).bfloat16() for of in ((8, 64), (2, 64), (2, 64)))

    def step(begin: int, end: int) -> torch.Tensor:
        return harness.step([(request, end - begin)], {0: tuple(part[begin:end] for part in data)})[0]

    step(0, 300)
    kept = voted(request, request.fresh[-8:])
    for position in range(300, 320):
        assert is_kept(harness, request, step(position, position + 1), kept)
    harness.release(request)
    harness.free = harness.free[::-1]
    step(0, 200)
    # The last chunk of the prompt continues into the output, and reads everything.
    crossing = step(200, 310)
    assert (crossing[-1].double() - harness.dense(request)).abs().max() < DENSE_TOLERANCE
    output = step(310, 320)
    assert all(is_kept(harness, request, output, kept, token) for token in (0, 5, 9))
    poison(harness, request, set(range(300 // BLOCK - 3, 12)))
    for position in range(320, 330):
        assert is_kept(harness, request, step(position, position + 1), kept)


def test_a_prompt_that_keeps_everything_is_served_as_without_the_section(model):
    outputs = []
    for compaction in (None, SNAPKV | {"budget_tokens": 320}, SNAPKV | {"min_context_tokens": 301}):
        harness = harness_of(model, "unique", compaction, selection={"policy": "unique", "budget_tokens": 64})
        request = harness.request(300)
        outputs.append(torch.cat([harness.step([(request, new)])[0] for new in (200, 100, *[1] * 30)]))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_lengths_on_the_host_are_those_that_attention_sees(model, monkeypatch):
    common, seen = LayerBatch.common, []
    monkeypatch.setattr(LayerBatch, "common", lambda self: common(self).replace(seq_lens_cpu_upper_bound=self.seq_lens))
    harness = harness_of(model, "dense", SNAPKV)
    condense = harness.builder.compaction.condense

    def watch(step: CommonAttentionMetadata) -> CommonAttentionMetadata:
        step = condense(step)
        seen.append((step.seq_lens.tolist(), step.seq_lens_cpu_upper_bound.tolist(), step.max_seq_len))
        return step

    monkeypatch.setattr(harness.builder.compaction, "condense", watch)
    requests = [harness.request(300), harness.request(60)]
    harness.step([(request, request.prompt_tokens) for request in requests])
    harness.step([(request, 1) for request in requests])
    left = 300 // BLOCK - 3
    assert seen == [([300, 60], [300, 60], 300), ([301 - left * BLOCK, 61],) * 2 + (301 - left * BLOCK,)]


def test_what_is_known_of_requests_that_are_gone_is_forgotten(model):
    harness = harness_of(model, "dense", SNAPKV)
    other = harness.request(200)
    for _ in range(4):
        request = harness.request(200)
        harness.step([(request, 150), (other, 10)])
        harness.step([(other, 10)])  # steps may omit a request for a while
        assert set(harness.builder.compaction._requests) == {other.name, request.name}
        harness.release(request)
    harness.step([(other, 10)])
    assert list(harness.builder.compaction._requests) == [other.name]


def test_a_preempted_prompt_holds_no_votes_while_it_waits(model):
    """vLLM's first model runner knows it on. It will be computed from its beginning."""
    harness = harness_of(model, "dense", H2O)
    request, other = harness.request(300), harness.request(60)
    harness.step([(request, 150), (other, 10)])
    states = harness.builder.compaction._requests
    assert states[request.name].votes
    preempt(harness, [request.name], [other.name])
    harness.step([(other, 10)])
    assert list(harness.builder.compaction._requests) == [other.name]


def assert_likeliest(folder: Path, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Every token of greedy answers is the likeliest one in transformers, except at ties."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        likely = logits.log_softmax(dim=-1)
        chosen = likely.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (likely.amax(dim=-1) - chosen).max() < TIE


def test_protected_needles_are_found_among_heavy_hitters():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    questions = build_questions(tokenizer, "multikey", 4096, 4, seed=1)
    needles = [{"sparse_protect": needle_range(tokenizer, question)} for question in questions]
    shares = []
    with run_engine("dense", {"compaction": {"method": "h2o", "budget_tokens": 512, "every": 64}}) as engine:
        for arguments in (needles, None):
            answers = engine.answer([question.prompt for question in questions], 24, arguments=arguments)
            texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
            shares.append(sum(map(is_correct, questions, texts)) / len(questions))
    assert shares == [1.0, 0.0]


@pytest.mark.parametrize(("backend", "caches_prefixes"), [("snapkv", True), ("pyramidkv", False), ("h2o", False)])
def test_an_engine_gives_every_block_back_and_serves_short_prompts_densely(tmp_path, backend, caches_prefixes):
    def prompts(count: int, length: int) -> list[list[int]]:
        return [[(number * 7919 + word) % 480 + 10 for number in range(length)] for word in range(count)]

    folder, short, crowd = save_shallow(tmp_path, layers=4), prompts(3, 250), prompts(10, 600)
    window = {} if backend == "h2o" else {"window_tokens": 32}
    settings = {"compaction": {"budget_tokens": 256, "min_context_tokens": 300, **window}}
    # A pyramid has four block tables, one for each of the four layers, so its blocks have a quarter of the size.
    blocks = 100 if backend == "pyramidkv" else 25
    with run_engine(
        backend, settings, model=str(folder), num_gpu_blocks_override=blocks, max_model_len=1152,
        max_num_batched_tokens=1024, block_size=128, max_num_seqs=10, enable_prefix_caching=caches_prefixes,
    ) as engine:  # fmt: skip
        expected = engine.answer(short, max_tokens=24, ignore_eos=True)
        assert_likeliest(folder, short, expected)
        assert engine.metric("vllm_sparse_blocks_freed_sum") == 0
        # Ten requests with up to six blocks exceed the pool: some are preempted and resumed.
        answers = engine.answer(crowd, max_tokens=100, ignore_eos=True)
        assert [len(tokens) for tokens in answers] == [100] * len(crowd)
        freed, requests = (engine.metric(f"vllm_sparse_blocks_freed_{part}") for part in ("sum", "count"))
        assert freed >= requests >= len(crowd)
        # Of contexts of 601 to 700 tokens two blocks are given back on average, of short ones none; the rest is read.
        read, kept = (
            [engine.metric(f"vllm_sparse_{share}_share_{part}") for part in ("sum", "count")]
            for share in ("kv_read", "kept")
        )
        assert read == kept
        assert (601 - 256) / 601 < kept[0] / kept[1] < (700 - 256) / 700 + 0.1
        assert engine.metric("vllm:num_preemptions_total") > 0
        assert engine.metric("vllm:kv_cache_usage_perc") == 0
        assert engine.answer(short, max_tokens=24, ignore_eos=True) == expected
        if not caches_prefixes:
            # The cache is empty, so the same steps follow. Reading a freed block would change answers.
            engine.spoil_freed_blocks()
            assert engine.answer(crowd, max_tokens=100, ignore_eos=True) == answers
