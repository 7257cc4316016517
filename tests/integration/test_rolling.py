"""Rolling positions in a layer, with vLLM's metadata and KV-cache update on a CPU, and in an engine."""

import pytest
import torch
from support.engines import MODEL, run_engine
from support.layer import LayerHarness, Request
from support.paged import dense_attention
from support.rolling import CACHE, ROLLING, SINKS, WindowedModel, distance, library_tokens
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.llama import LlamaAttention

from vllm_sparse_plugin.attention.rolling import rotation_of
from vllm_sparse_plugin.errors import ConfigurationError

BLOCK, MAX_POSITIONS = 32, 1 << 18
TOLERANCE = 2e-2
"""vLLM's CPU kernel rounds probabilities to bfloat16; outputs here are averages of unit normals."""
ROPES = {
    "plain": {"rope_type": "default"},
    "part": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "ntk": {"rope_type": "ntk", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
}  # fmt: skip


def attention(rotary: nn.Module | None, layer: nn.Module | None = None, kind: type = LlamaAttention) -> nn.Module:
    """A model's module around a layer, with the attributes that are read."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    module.attn, module.rotary_emb = layer, rotary
    return module


class RollingHarness(LayerHarness):
    """A layer of a model that rotates queries and keys."""

    def get_model(self) -> nn.Module:
        (layer,) = get_current_vllm_config().compilation_config.static_forward_context.values()
        return nn.ModuleList([attention(get_rope(64, MAX_POSITIONS, dtype=torch.float32), layer)])

    def rolled(self, request: Request, token: int) -> torch.Tensor:
        """Attention of a token of the latest step, with its sinks' keys rotated forward, in float64."""
        position = len(request.keys) - len(request.fresh) + token
        keys, query = request.keys[: position + 1].double(), request.fresh[token].double()
        visible = torch.ones(self.num_kv_heads, position + 1, dtype=torch.bool)
        if position >= CACHE:
            visible[:, SINKS : position + 1 - (CACHE - SINKS)] = False
            angle = (position - (CACHE - 1)) * 10000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
            first, second = keys[:SINKS].chunk(2, dim=-1)
            cos, sin = angle.cos(), angle.sin()
            keys[:SINKS] = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return dense_attention(
            query.unflatten(0, (self.num_kv_heads, -1)), keys, request.values[: position + 1].double(),
            self.layer.impl.scale, visible,
        )  # fmt: skip

    def is_rolled(self, request: Request, output: torch.Tensor) -> bool:
        """Whether all outputs of a request equal `rolled`."""
        expected = torch.stack([self.rolled(request, token) for token in range(len(output))])
        return bool((output.double() - expected).abs().max() < TOLERANCE)


def harness_of(model: str, positions: str) -> RollingHarness:
    settings = {"compaction": {**ROLLING, "positions": positions}}
    return RollingHarness(model, settings=settings, backend="dense", block_size=BLOCK, num_blocks=120)


@pytest.mark.parametrize("chunks", [[300], [60, 44, 1, 130, 65]])
def test_every_token_sees_its_sinks_directly_before_its_window(model, chunks):
    harness = harness_of(model, "rolling")
    request, beside, short = harness.request(300), harness.request(500), harness.request(10)
    for new in (*chunks, *[1] * 40):
        outputs = harness.step([(short, 1), (request, new), (beside, 5)])
        for one, output in zip((short, request, beside), outputs, strict=True):
            assert harness.is_rolled(one, output)
        if len(request.keys) >= 300:
            # Blocks between the sinks and the window have been given back.
            left = range(1, (len(request.keys) - (CACHE - SINKS)) // BLOCK)
            harness.cache[[request.blocks[block] for block in left]] = torch.nan
    assert len(left) > 5
    # Blocks of a shared prefix hold what each request would compute.
    shared = harness.request(400, beside, shared_blocks=len(beside.keys) // BLOCK)
    assert harness.is_rolled(shared, harness.step([(shared, 200)])[0])


def test_a_context_that_fits_the_cache_is_served_as_at_the_positions_of_the_text(model):
    outputs = []
    for positions in ("text", "rolling"):
        harness = harness_of(model, positions)
        request = harness.request(90)
        outputs.append(torch.cat([harness.step([(request, new)])[0] for new in (90, *[1] * 24)]))
    assert torch.equal(*(output[:CACHE] for output in outputs))
    assert (outputs[0][CACHE:] - outputs[1][CACHE:]).abs().max() > 2 * TOLERANCE


@pytest.fixture
def config():
    """The configuration that vLLM's modules read when they are created."""
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.mark.usefixtures("config")
@pytest.mark.parametrize("style", [True, False])
@pytest.mark.parametrize("rope", ROPES)
def test_a_query_is_turned_back_to_where_vllm_would_have_turned_it(rope, style):
    rotary = get_rope(64, 4096, style, {"rope_theta": 10000, **ROPES[rope]}, torch.float32)
    made = rotation_of(attention(rotary), 4096)
    query = torch.randn(40, 3, 64, generator=torch.Generator().manual_seed(0))
    position, back = torch.arange(3000, 3040), torch.arange(40) * 70
    at, earlier = (rotary.forward_native(where, query.flatten(1))[0] for where in (position, position - back))
    assert (made.turn_back(at.view_as(query), back) - earlier.view_as(query)).abs().max() < 2e-3


class Derived(LlamaAttention):
    """Another class of another module."""


REFUSED = {
    "nobody knows the module": (lambda: None, "rolling with unknown layers"),
    "another module": (lambda: attention(get_rope(64, 4096), kind=Derived), "rolling with Derived layers"),
    "no positions": (lambda: attention(None), "rolling with no rotary positions"),
    "positions that follow from the length": (
        lambda: attention(get_rope(64, 4096, rope_parameters={"rope_type": "dynamic", "factor": 2.0})),
        "rolling with DynamicNTKScalingRotaryEmbedding",
    ),
    "positions of several dimensions": (
        lambda: attention(get_rope(64, 4096, rope_parameters={"rope_type": "default", "mrope_section": [8, 12, 12]})),
        "rolling with MRotaryEmbedding",
    ),
    "a table that is too short": (lambda: attention(get_rope(64, 2048)), "max_model_len: got 4096"),
}


@pytest.mark.usefixtures("config")
@pytest.mark.parametrize("case", REFUSED)
def test_positions_that_are_not_proven_to_be_plain_rotations_are_refused(case):
    module, sentence = REFUSED[case]
    with pytest.raises(ConfigurationError, match=sentence):
        rotation_of(module(), 4096)


def test_an_engine_says_what_a_plain_computation_does():
    folder = MODEL.parent / "witness-6m"  # its attention depends on its sinks
    text = library_tokens(folder, 1300)
    crowd, long = [text[60 * part : 60 * part + 60] for part in range(10)], [text[600:1300], text[600:1200]]
    with run_engine(
        "dense", {"compaction": ROLLING}, model=str(folder), max_model_len=768, max_num_batched_tokens=256,
        block_size=BLOCK, num_gpu_blocks_override=26, max_num_seqs=10,
    ) as engine:  # fmt: skip
        # Ten requests that outgrow the cache exceed the pool: some are preempted and resumed.
        drawn = engine.sample(crowd, 90)
        assert engine.metric("vllm:num_preemptions_total") > 0
        # The second prompt is the beginning of the first, and is asked twice.
        drawn += [engine.sample([prompt], 40)[0] for prompt in (*long, long[1])]
        assert engine.metric("vllm:prefix_cache_hits_total") > 500
        assert engine.metric("vllm_sparse_blocks_freed_sum") > 0
        assert engine.metric("vllm:kv_cache_usage_perc") == 0
    model, prompts = WindowedModel(folder), [*crowd, *long, long[1]]
    rolling, text_positions = (
        [distance(model, prompt, one, rolls) for prompt, one in zip(prompts, drawn, strict=True)]
        for rolls in (True, False)
    )
    assert max(rolling) < 0.05
    assert max(text_positions[-3:]) > 0.1
