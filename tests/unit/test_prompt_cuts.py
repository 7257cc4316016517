"""Where vLLM's scheduler cuts the prompts of sparse prefill, alone and beside other requests."""

import random

import pytest
from support.engines import MODEL
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import KVCacheConfig, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

import vllm_sparse_plugin
from vllm_sparse_plugin.config import BlockPrefill, ZipVLPrefill
from vllm_sparse_plugin.config.cuts import PromptCuts
from vllm_sparse_plugin.errors import ConfigurationError

BLOCK, SEQS, BUDGET = 64, 17, 512
BLOCKS = {"method": "blocks", "min_context_tokens": 256, "min_blocks": 1}
ZIPVL = {"method": "zipvl"}
HALF_WINDOW = (BUDGET - SEQS + 1) // 128 * 128


def arguments(prefill: dict, **more: object) -> dict:
    return {
        "model": str(MODEL), "attention_backend": "dense", "max_model_len": 4096, "max_num_seqs": SEQS,
        "additional_config": {"sparse_attention": {"prefill": prefill}}, "max_num_batched_tokens": BUDGET,
        "block_size": BLOCK, "enforce_eager": True,
    } | more  # fmt: skip


class Server:
    """A scheduler, and a model that answers 5."""

    def __init__(self, prefill: dict, **more: object) -> None:
        vllm_sparse_plugin.register()
        config = EngineArgs(**arguments(prefill, **more)).create_engine_config()
        config.cache_config.num_gpu_blocks = 1500
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=config.model_config.dtype)
        cache = KVCacheConfig(1500, [], [KVCacheGroupSpec(["layer"], spec)])
        manager = StructuredOutputManager(config)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(config, cache, manager, block_size=BLOCK)
        init_none_hash(sha256)
        self.chunks: dict[str, list[tuple[int, int]]] = {}

    def ask(self, name: str, prompt: list[int], answer: int = 1) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=hasher))

    def step(self) -> None:
        before = {name: request.num_computed_tokens for name, request in self.scheduler.requests.items()}
        output = self.scheduler.schedule()
        hits = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        made = []
        for name, count in output.num_scheduled_tokens.items():
            start = hits.get(name, before[name])
            self.chunks.setdefault(name, []).append((start, start + count))
            made.append([] if self.scheduler.requests[name].is_prefill_chunk else [5])
        names = list(output.num_scheduled_tokens)
        places = {name: place for place, name in enumerate(names)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(names, places, made))

    def run(self, name: str) -> list[tuple[int, int]]:
        """Run until a request has its first token; return its chunks."""
        while name in self.scheduler.requests:
            self.step()
        return self.chunks[name]


def prompt_of(tokens: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(tokens)]


def beside_neighbours(prefill: dict, prompt: list[int], seed: int, **more: object) -> list[tuple[int, int]]:
    """The chunks of a prompt on a busy server, whose prompts may begin like this one."""
    draw, server = random.Random(seed), Server(prefill, **more)
    for number in range(16):
        shared = prompt[: draw.choice([0, 0, draw.randrange(len(prompt))])]
        server.ask(f"neighbour {number}", [*shared, *prompt_of(draw.randrange(1, 900), number)], draw.randrange(1, 60))
        for _ in range(draw.randrange(3)):
            server.step()
    server.ask("ours", prompt)
    return server.run("ours")


@pytest.mark.parametrize("tokens", [129, 384, 900, 1025, 1700])
@pytest.mark.parametrize("seed", range(4))
def test_chunks_that_choose_together_are_the_same_beside_neighbours(tokens, seed):
    prompt = prompt_of(tokens, 77)
    server = Server(ZIPVL)
    server.ask("ours", prompt)
    alone = server.run("ours")
    assert alone[0][0] == 0
    assert alone[-1][1] == tokens
    busy = beside_neighbours(ZIPVL, prompt, seed)
    # A hit replaces whole chunks.
    assert busy == alone[-len(busy) :]


@pytest.mark.parametrize("tokens", [130, 449, 900, 1700])
@pytest.mark.parametrize("seed", range(4))
def test_tiles_are_never_divided_beside_neighbours(tokens, seed):
    chunks = beside_neighbours(BLOCKS, prompt_of(tokens, 78), seed)
    ends = [end for _, end in chunks]
    assert ends[-1] == tokens
    assert all(end % 64 == 0 for end in ends[:-1])
    # Dense kernels compute the first 256 tokens in any case, and a last token runs like a decoding one.
    assert chunks[0][0] >= 256 or tokens <= 256 or 256 in ends
    assert tokens % 64 != 1 or chunks[-1] == (tokens - 1, tokens)


def test_only_whole_chunks_are_shared():
    prompt, window = prompt_of(1700, 79), HALF_WINDOW
    server = Server(ZIPVL)
    server.ask("first", prompt[: window + 200], answer=300)
    server.run("first")
    server.ask("second", prompt)
    assert server.run("second")[0][0] == window
    server.ask("third", [*prompt, 1, 2])
    assert server.run("third")[0][0] == 1700 // window * window


def test_a_resumed_prompt_is_cut_as_before():
    server = Server(BLOCKS)
    server.ask("ours", prompt_of(450, 80), answer=100)
    while server.scheduler.requests["ours"].num_output_tokens < 40:
        server.step()
    before = [chunk for chunk in server.chunks.pop("ours") if chunk[1] <= 450]
    server.scheduler.reset_prefix_cache(reset_running_requests=True)
    server.step()
    server.step()
    server.step()
    assert server.chunks["ours"][: len(before)] == before


def test_cuts_of_every_prompt():
    cuts = PromptCuts(64, False, 256, 3)
    assert [cuts.end(0, end, 1000) for end in (63, 64, 200, 256, 900)] == [0, 64, 192, 256, 256]
    assert [cuts.end(256, end, 1000) for end in (300, 320, 999, 1000)] == [256, 320, 960, 1000]
    # A tail of three tokens runs like a decoding token, in every step.
    assert [cuts.end(256, 963, 963), cuts.end(960, 963, 963), cuts.end(256, 964, 964)] == [960, 963, 964]
    assert PromptCuts.of(ZipVLPrefill(), 1000, 64, 1) == PromptCuts(896, True, 0, 1)
    assert PromptCuts.of(ZipVLPrefill(), 1000, 96, 1) == PromptCuts(768, True, 0, 1)
    assert PromptCuts.of(ZipVLPrefill(), 1000, 1056, 1) == PromptCuts(896, True, 0, 1)
    assert PromptCuts.of(BlockPrefill(tile_tokens=128), 1000, 64, 1).every == 128


def test_dense_tokens_are_those_of_the_kernels_rule():
    from vllm_sparse_plugin.attention.prefill import reads_less

    for tile in (64, 128):
        for block in (64, 128):
            for values in ((1, 0), (4, 100), (16, 8192), (200, 512)):
                least, shortest = values
                prefill = BlockPrefill(
                    tile_tokens=tile, block_tokens=block, min_blocks=least, min_context_tokens=shortest
                )
                assert prefill.dense_tokens % tile == 0
                assert not reads_less(prefill.rule(), prefill.dense_tokens)
                assert reads_less(prefill.rule(), prefill.dense_tokens + 1)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            {"max_num_batched_tokens": 79},
            "max_num_batched_tokens: got 79 with sparse_attention.prefill and max_num_seqs 17, allowed with attention "
            "backend dense: at least 80",
        ),
        (
            {"long_prefill_token_threshold": 63},
            "long_prefill_token_threshold: got 63 with sparse_attention.prefill, allowed with attention backend dense: "
            "0, or at least 64",
        ),
        (
            {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
            "scheduler_cls: got vllm.v1.core.sched.scheduler.Scheduler with sparse_attention.prefill, which cuts "
            "prompts at fixed positions, allowed with attention backend dense: none",
        ),
    ],
)  # fmt: skip
def test_engines_without_room_for_a_chunk_are_refused(more, sentence):
    vllm_sparse_plugin.register()
    with pytest.raises(ConfigurationError) as error:
        EngineArgs(**arguments(BLOCKS, **more)).create_engine_config()
    assert str(error.value) == sentence


def test_connectors_and_chunks_that_choose_together_exclude_each_other():
    vllm_sparse_plugin.register()
    connector = {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}}
    assert EngineArgs(**arguments(BLOCKS, **connector)).create_engine_config()
    with pytest.raises(ConfigurationError, match=r"^sparse_attention\.prefill: got zipvl with a KV connector, "):
        EngineArgs(**arguments(ZIPVL, **connector)).create_engine_config()
