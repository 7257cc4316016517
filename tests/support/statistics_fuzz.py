"""Drives a whole engine through random schedules and checks the statistics in its cache after every step."""

import random
import tempfile
from collections import Counter
from pathlib import Path

import torch
from sparse_kernels.page_statistics.reference import quantise, summarise
from support.engines import save_shallow
from vllm import LLM, SamplingParams

STEPS = 120
CHUNK = 256
BLOCKS = 18
GARBAGE = 1e6


def check(layer, blocks: list[int], computed: int) -> int:
    """Compares the stored statistics of a request's complete pages with those of the keys in its blocks."""
    impl = layer.impl
    page_size, per_block = impl.plan.page_size, impl.cache.keys.pages_per_block
    page = torch.arange(computed // page_size)
    block, within = torch.tensor(blocks)[page // per_block], page % per_block
    keys = impl.cache.keys.gather(block[:, None], torch.arange(impl.num_kv_heads), within[:, None])
    assert bool((keys.abs() < GARBAGE / 1000).all())
    vectors, spread = summarise(impl.cache.statistics.kind, keys)
    codes = impl.cache.statistics.kind.codes
    stored, scales = codes.pack(vectors) if codes else quantise(vectors, torch.int8)
    stored = stored if codes else stored.flatten(-2)
    assert torch.equal(impl.cache.statistics.vectors[block, :, within], stored)
    assert torch.equal(impl.cache.statistics.scales[block, :, within], scales)
    if spread is not None:
        assert torch.equal(impl.cache.statistics.spread[block, :, within], spread.bfloat16())
    return len(page)


def spoil(layer, blocks: list[int], computed: int) -> None:
    """Overwrites the keys and values after a request's tokens, in its own blocks: those of drafts."""
    cache = layer.impl.cache
    block_size = cache.keys.page_size * cache.keys.pages_per_block
    token = torch.arange(computed, len(blocks) * block_size)
    block, heads = torch.tensor(blocks)[token // block_size], torch.arange(layer.impl.num_kv_heads)
    rows = torch.full((len(token), len(heads), cache.keys.head_size), GARBAGE, dtype=torch.bfloat16)
    for part in (cache.keys, cache.values):
        part.scatter_tokens(block[:, None], heads, (token % block_size)[:, None], rows)


def _start(model: Path, backend: str, settings: dict[str, object]) -> LLM:
    return LLM(
        model=str(model),
        attention_backend=backend,
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=6,
        num_gpu_blocks_override=BLOCKS,
        kv_cache_memory_bytes=1 << 28,
        additional_config={
            "sparse_attention": {"selection": {"budget_tokens": 128}, "min_context_tokens": 0, **settings}
        },
    )


def check_random_schedules(seed: int, backend: str, settings: dict[str, object], longest: int = 100) -> Counter[str]:
    """Run an engine in this process and return the counts of events; AssertionError for wrong statistics.

    Answers have at most `longest` tokens. Keys and values after the tokens of every request are garbage when a step
    begins.
    """
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        llm = _start(save_shallow(Path(folder), layers=2), backend, settings)
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    scheduler = core.scheduler
    runner = core.model_executor.driver_worker.worker.model_runner
    layers = list(runner.compilation_config.static_forward_context.values())
    garbage = torch.Generator().manual_seed(seed)
    for layer in layers:
        # Finite, because vLLM's attention requires this beyond the context.
        layer.kv_cache.copy_(torch.randn(layer.kv_cache.shape, generator=garbage) * GARBAGE)

    prefixes = [[0] + [rng.randrange(3, 4000) for _ in range(400)] for _ in range(3)]
    seen: Counter[str] = Counter()
    live: dict[str, object] = {}
    for step in range(STEPS):
        if len(scheduler.running) + len(scheduler.waiting) < 6 and rng.random() < 0.6:
            prompt = rng.choice(prefixes)[: rng.choice([0, 130, 256, 390])] or [0]
            prompt = prompt + [rng.randrange(3, 4000) for _ in range(rng.choice([1, 7, 63, 200]))]
            engine.add_request(
                f"r{step}",
                {"prompt_token_ids": prompt},
                SamplingParams(temperature=0, max_tokens=rng.choice([1, 30, longest]), ignore_eos=True),
            )
        engine.step()
        for request in scheduler.running:
            # A first step computes at most a chunk, unless it starts from the prefix cache.
            seen["hits"] += request.request_id not in live and request.num_computed_tokens > CHUNK
            live[request.request_id] = request
            blocks = scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
            for layer in layers:
                seen["pages"] += check(layer, blocks, request.num_computed_tokens)
            seen["decodes"] += request.num_computed_tokens > request.num_prompt_tokens
            seen["chunks"] += request.num_computed_tokens < request.num_prompt_tokens
            seen["drafts"] += len(request.spec_token_ids)
            for layer in layers:
                spoil(layer, blocks, request.num_computed_tokens)
    seen["preemptions"] = sum(request.num_preemptions for request in live.values())
    return seen
