"""Sparse prefill in one attention layer, with vLLM's metadata and KV-cache update on a CPU."""

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from sparse_kernels.batch import Prompts, Softmax
from sparse_kernels.block_prefill import plan_tiles, prefill_blocks
from sparse_kernels.cache import KVCache
from sparse_kernels.token_prefill import TokenRule, attended_pairs, token_prefill
from support.engines import MODEL, run_engine
from support.layer import LayerHarness
from transformers import AutoTokenizer

from vllm_sparse_plugin.config import BlockPrefill, ZipVLPrefill
from vllm_sparse_plugin.config.cuts import PromptCuts
from vllm_sparse_plugin.tools.needles import build_questions, is_correct

DENSE_TOLERANCE = 2e-2
"""vLLM's CPU kernel rounds probabilities to bfloat16; outputs here are averages of unit normals."""
BLOCKS = {"method": "blocks", "min_context_tokens": 256, "query_stride": 1}
FEW = BLOCKS | {"density": 0.01, "min_blocks": 2}
POLICIES = ("unique", "dense", "streaming_llm", "quest", "art")


def harness_of(model: str, backend: str = "unique", layer_index: int = 0, **prefill: object) -> LayerHarness:
    settings = {"prefill": FEW | prefill, **decoding(backend)}
    return LayerHarness(model, settings=settings, backend=backend, layer_index=layer_index)


def decoding(backend: str) -> dict[str, object]:
    """Settings for sparse decoding at short contexts, in pages of 16 tokens."""
    no_pages = ("dense", "zipvl", "zipvl_paper")
    shortest: dict[str, object] = {} if backend in no_pages else {"min_context_tokens": 64}
    if backend not in (*no_pages, "art"):
        shortest["selection"] = {"budget_tokens": 64, "page_size": 16}
    return shortest


def is_dense(harness: LayerHarness, request, output: torch.Tensor, token: int) -> bool:
    return bool((output[token].double() - harness.dense(request, token)).abs().max() < DENSE_TOLERANCE)


@pytest.mark.parametrize("backend", POLICIES)
def test_long_prompts_read_blocks_and_short_ones_everything(model, backend):
    """Tiles beyond `min_context_tokens` and the smallest number of blocks choose. Decoding tokens are not affected."""
    harness = harness_of(model, backend)
    long, short = harness.request(600), harness.request(200)
    output, whole = harness.step([(long, 600), (short, 200)])
    assert output.isfinite().all()
    assert [is_dense(harness, long, output, token) for token in (0, 255, 256, 599)] == [True, True, False, False]
    assert all(is_dense(harness, short, whole, token) for token in (0, 199))
    read, past = harness.layer.impl.plan.prefill.counters[:, :2].unbind(1)
    # Tiles of 600 tokens begin at 0, 64, ...; the prompt of 200 has none that chooses; 2 blocks from 256 on.
    assert past.tolist() == [sum(range(10))] * 2
    assert read.tolist() == [sum(range(4)) + 6 * 2] * 2


def test_what_a_layer_does_is_what_the_operation_does(model):
    harness = harness_of(model)
    request = harness.request(600)
    (output,) = harness.step([(request, 600)])
    plan, impl = harness.layer.impl.plan, harness.layer.impl
    lens = torch.tensor([0, 600], dtype=torch.int32), torch.tensor([request.blocks], dtype=torch.int32)
    prompts = Prompts(*lens, lens[0][1:], (600,), (600,))
    tiles = plan_tiles(prompts, plan.prefill.rule, impl.num_heads // impl.num_kv_heads)
    expected = torch.empty_like(output)
    batch = prompts.batch(request.fresh)
    prefill_blocks(batch, impl.statistics_cache, Softmax(impl.scale), plan.prefill.rule, tiles, output=expected)
    assert isinstance(impl.statistics_cache, KVCache)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("backend", ["unique", "dense", "streaming_llm"])
def test_chunks_of_whole_tiles_change_nothing_and_decoding_goes_on_beside(model, backend):
    data = {}
    generator = torch.Generator().manual_seed(3)
    shapes = ((8, 64), (2, 64), (2, 64))
    data = tuple(torch.randn(600, *shape, generator=generator).bfloat16() for shape in shapes)
    at_once = harness_of(model, backend)
    request = at_once.request(600)
    (expected,) = at_once.step([(request, 600)], {0: data})
    chunked = harness_of(model, backend)
    decoding, request, done = chunked.request(300), chunked.request(600), []
    chunked.step([(decoding, 300)])
    for begin, end in ((0, 320), (320, 512), (512, 600)):
        part = tuple(tensor[begin:end] for tensor in data)
        beside, output = chunked.step([(decoding, 1), (request, end - begin)], {1: part})
        done.append(output)
        assert is_dense(chunked, decoding, beside, 0) == (backend == "dense")
    # Chunks whose contexts end before the choice begins run vLLM's kernel, the others the operation.
    assert torch.equal(torch.cat(done)[320:], expected[320:])


def test_density_of_one_reads_everything(model):
    harness = LayerHarness(model, settings={"prefill": BLOCKS | {"density": 1.0}, **decoding("unique")})
    request = harness.request(600)
    (output,) = harness.step([(request, 600)])
    assert all(is_dense(harness, request, output, token) for token in range(0, 600, 37))
    read, past = harness.layer.impl.plan.prefill.counters[:, :2].unbind(1)
    assert torch.equal(read, past)


def test_leading_layers_and_windows_stay_dense(model):
    assert harness_of(model, layer_index=1, first_dense_layers=2).layer.impl.plan.prefill is None
    assert harness_of(model, layer_index=2, first_dense_layers=2).layer.impl.plan.prefill is not None
    settings = {"prefill": FEW}
    windowed = LayerHarness(model, settings=settings, per_layer_sliding_window=64)
    assert windowed.layer.impl.plan.prefill is None
    harness = harness_of(model, layer_index=1, first_dense_layers=2)
    request = harness.request(600)
    (output,) = harness.step([(request, 600)])
    assert is_dense(harness, request, output, 599)


@pytest.mark.parametrize("backend", ["dense", "streaming_llm", "art"])
def test_statistics_for_prefill_leave_decode_steps_their_bits(model, backend):
    """Pages of StreamingLLM and ART have 16 tokens, those of the statistics 8."""
    outputs = []
    for prefill in (None, FEW | {"min_context_tokens": 4096}):
        settings = {"prefill": prefill, **decoding(backend)}
        harness = LayerHarness(model, settings=settings, backend=backend)
        assert (harness.layer.impl.plan.statistics is None) == (prefill is None)
        generator = torch.Generator().manual_seed(5)
        request, steps = harness.request(300), []
        for new in (300, *[1] * 8):
            data = tuple(torch.randn(new, *of, generator=generator).bfloat16() for of in ((8, 64), (2, 64), (2, 64)))
            steps += harness.step([(request, new)], {0: data})
        outputs.append(torch.cat(steps))
    assert torch.equal(*outputs)


KEEPING = {
    "method": "zipvl", "tau": 0.6, "recent_probes": 8, "random_probes": 8, "seed": 3, "min_context_tokens": 0,
}  # fmt: skip
ZERO = {"others": "zero", "sink_tokens": 0}


def keeping_harness(model: str, backend: str = "zipvl", layer_index: int = 0, **changes: object) -> LayerHarness:
    settings = {"prefill": KEEPING | changes, **decoding(backend)}
    return LayerHarness(model, settings=settings, backend=backend, layer_index=layer_index)


@pytest.mark.parametrize("backend", ["zipvl", "zipvl_paper", "unique"])
def test_a_fixed_ratio_keeps_the_same_share_in_every_layer(model, backend):
    kept = []
    for layer in (0, 1):
        ratio = {"tau": None, "fixed_ratio": 0.3, "sink_tokens": 0}
        harness = keeping_harness(model, backend, layer, **ratio)
        requests = harness.request(300), harness.request(90)
        harness.step([(requests[0], 300), (requests[1], 90)])
        kept += harness.layer.impl.plan.prefill.counters[:, :2].tolist()
    # A last token that is not among the others joins.
    assert all(of == 390 and 90 + 27 <= tokens <= 90 + 27 + 2 for tokens, of in kept)


@pytest.mark.parametrize("backend", ["zipvl", "zipvl_paper", "unique"])
def test_tau_of_one_keeps_every_token(model, backend):
    harness = keeping_harness(model, backend, tau=1.0)
    requests = harness.request(300), harness.request(90)
    outputs = harness.step([(requests[0], 300), (requests[1], 90)])
    for request, output in zip(requests, outputs, strict=True):
        assert all(is_dense(harness, request, output, token) for token in range(0, len(output), 17))
    assert harness.metadata.prompts is not None
    assert harness.layer.impl.plan.prefill.counters[:, :2].tolist() == [[390, 390]] * 2


@pytest.mark.parametrize(
    ("backend", "form"),
    [("zipvl", {}), ("zipvl_paper", {}), ("unique", {"local_tokens": 16}), ("streaming_llm", ZERO)],
)
def test_kept_tokens_of_each_chunk_are_the_operations_beside_requests_that_decode(model, backend, form):
    harness = keeping_harness(model, backend, **form)
    decoding, request = harness.request(300), harness.request(400)
    harness.step([(decoding, 300)])
    plan, impl = harness.layer.impl.plan.prefill, harness.layer.impl
    zero = backend in ("zipvl_paper", "streaming_llm")
    form = form or (ZERO if zero else {})
    assert plan.rule == TokenRule(tau=0.6, recent_probes=8, random_probes=8, seed=3, **form)
    assert (impl.statistics_cache is None) == (backend != "unique")
    for done, new in ((0, 230), (230, 170)):
        plan.counters.zero_()
        beside, output = harness.step([(decoding, 1), (request, new)])
        assert is_dense(harness, decoding, beside, 0) == (backend in ("zipvl", "zipvl_paper"))
        lengths = torch.tensor([done + new], dtype=torch.int32)
        start, table = (torch.tensor(given, dtype=torch.int32) for given in ([0, new], [request.blocks]))
        batch = Prompts(start, table, lengths, (new,), (done + new,)).batch(request.fresh)
        expected = torch.full_like(output, torch.nan)
        kept = token_prefill(batch, impl.cache, Softmax(impl.scale), plan.rule, expected)
        assert torch.equal(output, expected)
        assert output.eq(0).flatten(1).all(dim=1).any() == zero
        assert output[-1].ne(0).any()
        assert not is_dense(harness, request, output, new - 1)
        pairs = attended_pairs(kept, batch, plan.rule).tolist()
        assert plan.counters.tolist() == [[int(kept.counts), done + new, *pairs]] * 2
        assert int(kept.counts) < done + new


def test_contexts_shorter_than_the_shortest_are_attended_whole(model):
    harness = keeping_harness(model, "zipvl_paper", min_context_tokens=201)
    long, short = harness.request(201), harness.request(200)
    output, whole = harness.step([(long, 201), (short, 200)])
    assert all(is_dense(harness, short, whole, token) for token in (0, 199))
    assert output.eq(0).flatten(1).all(dim=1).any()
    assert harness.layer.impl.plan.prefill.counters[0, 1] == 201
    harness.step([(harness.request(200), 200)])
    assert harness.metadata.prompts is None


def test_short_contexts_are_attended_whole_unless_asked_otherwise(model):
    """As with other methods, short prompts have the tokens of dense attention."""
    settings = {"prefill": {name: value for name, value in KEEPING.items() if name != "min_context_tokens"}}
    harness = LayerHarness(model, settings=settings, backend="zipvl")
    request, context = harness.request(1024), 0
    for chunk, is_whole in ((30, True), (990, True), (4, False)):
        harness.step([(request, chunk)])
        context += chunk
        assert (harness.metadata.prompts is None) == is_whole, context


def test_layers_that_keep_every_token(model):
    assert keeping_harness(model, layer_index=1, first_dense_layers=2).layer.impl.plan.prefill is None
    assert keeping_harness(model, layer_index=2, first_dense_layers=2).layer.impl.plan.prefill is not None
    windowed = LayerHarness(model, settings={"prefill": KEEPING}, backend="zipvl", per_layer_sliding_window=64)
    assert windowed.layer.impl.plan.prefill is None


def test_an_engine_answers_from_sparse_prompts_cached_or_not_and_counts_what_they_read():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    questions = build_questions(tokenizer, "multikey", 4096, 2, seed=5)
    prefill = {"min_context_tokens": 512, "min_blocks": 4, "density": 0.1}
    arguments = {"max_model_len": 5120, "max_num_batched_tokens": 1024}
    with run_engine("unique_prefill", {"prefill": prefill}, **arguments) as engine:
        prompts = [question.prompt for question in questions]
        cold = [engine.answer([prompt], max_tokens=24)[0] for prompt in prompts]
        hits = engine.metric("vllm:prefix_cache_hits_total")
        cached = engine.answer(prompts, max_tokens=24, ignore_eos=True)
        assert engine.metric("vllm:prefix_cache_hits_total") > hits
        assert [again[: len(first)] for first, again in zip(cold, cached, strict=True)] == cold
        texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in cold]
        assert all(is_correct(question, text) for question, text in zip(questions, texts, strict=True)), texts
        read, past = (engine.metric(f"vllm_sparse_prefill_density_{part}") for part in ("sum", "count"))
        assert 0 < read < past / 2
        weight, tiles = (engine.metric(f"vllm_sparse_prefill_mass_{part}") for part in ("sum", "count"))
        assert tiles / 2 < weight < tiles


def test_an_engine_finds_needles_with_important_tokens_cached_or_not():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    questions = build_questions(tokenizer, "multikey", 4096, 2, seed=5)
    arguments = {"max_model_len": 5120, "max_num_batched_tokens": 2048}
    with run_engine("zipvl", {"prefill": {"tau": 0.9}}, **arguments) as engine:
        prompts = [question.prompt for question in questions]
        for _ in range(2):
            answers = engine.answer(prompts, max_tokens=24)
            texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answers]
            assert all(is_correct(question, text) for question, text in zip(questions, texts, strict=True)), texts
        assert engine.metric("vllm:prefix_cache_hits_total") > 0
        # Counts are copied every few steps.
        engine.answer(prompts[:1], max_tokens=40, ignore_eos=True)
        for name in ("density", "pairs"):
            read, of = (engine.metric(f"vllm_sparse_prefill_{name}_{part}") for part in ("sum", "count"))
            assert 0 < read < 0.7 * of


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("backend", "prefill"), [("dense", FEW), ("unique", FEW), ("zipvl", KEEPING), ("zipvl_paper", KEEPING)]
)
def test_neighbours_change_no_bit_of_a_prompt(model, backend, prefill, seed):
    """An idle server has room for the whole prompt. A busy one cuts it where `PromptCuts` allows, beside others."""
    draw, tokens = random.Random(seed), 641
    section = (ZipVLPrefill if backend.startswith("zipvl") else BlockPrefill)(**prefill)
    cuts = PromptCuts.of(section, 300, 128, 1)

    def served(rooms: Iterator[int], beside: bool) -> torch.Tensor:
        harness = LayerHarness(model, settings={"prefill": prefill, **decoding(backend)}, backend=backend)
        request, outputs = harness.request(tokens), []
        while (start := len(request.keys)) < tokens:
            end = cuts.end(start, min(start + next(rooms), tokens), tokens)
            if end == start:
                continue
            part = tuple(of[start:end] for of in data)
            others = [(harness.request(80), draw.randrange(2, 80)) for _ in range(draw.randrange(3))] if beside else []
            outputs.append(harness.step([(request, end - start), *others], {0: part})[0])
            for other, _ in others:
                harness.release(other)
        return torch.cat(outputs)

    generator = torch.Generator().manual_seed(seed)
    data = [torch.randn(tokens, heads, 64, generator=generator).bfloat16() for heads in (8, 2, 2)]
    alone = served(itertools.repeat(tokens), beside=False)
    busy = served(iter(lambda: draw.randrange(1, 400), 0), beside=True)
    # vLLM's kernels compute the first tokens.
    assert torch.equal(alone[cuts.dense_tokens :], busy[cuts.dense_tokens :])
    assert (alone.double() - busy.double()).abs().amax() < DENSE_TOLERANCE
