"""`bench.quality`: the model that looks tokens up, and settings of `vllm-sparse eval`."""

import json
import math

import pytest
import torch
from support.engines import in_fresh_process
from typer.testing import CliRunner

from bench import quality
from bench.common.lookup import LOST, LOUD, VOCABULARY, Shape, draw_document, make_config, make_weights
from bench.common.results import read_run
from vllm_sparse_plugin.errors import ConfigurationError

Weights = dict[str, torch.Tensor]


def rotate(states: torch.Tensor, angles: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Rotates the first elements of states [tokens, heads, size] by angles [tokens, pairs]."""
    cos, sin = (each[:, None].to(dtype) for each in (angles.cos(), angles.sin()))
    pairs = angles.shape[-1]
    first, second, rest = states.split([pairs, pairs, states.shape[-1] - 2 * pairs], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def frequencies(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    rope = make_config(shape, 1)["rope_parameters"]
    dim = int(shape.head_size * rope["partial_rotary_factor"])
    return 1 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=dtype) / dim)


def norm(states: torch.Tensor) -> torch.Tensor:
    return states * (states.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def forward(
    weights: Weights, shape: Shape, tokens: list[int], asked: int, broken: tuple[int, int] | None = None
) -> torch.Tensor:
    """The logits of the last `asked` tokens, in float64. `broken` is a layer and a KV head that reads nothing."""
    positions, size = torch.arange(len(tokens)), shape.head_size
    angles = positions.double()[:, None] * frequencies(shape, torch.float64)
    hidden = weights["model.embed_tokens.weight"][tokens]
    for layer in range(shape.layers):
        q, k, v, o = (weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"] for name in "qkvo")
        normed = norm(hidden)
        queries, keys, values = ((normed @ weight.T).unflatten(-1, (-1, size)) for weight in (q, k, v))
        queries, keys = rotate(queries, angles), rotate(keys, angles)
        keys, values = (each.repeat_interleave(shape.group, 1) for each in (keys, values))
        outputs = torch.zeros_like(queries)
        for begin in range(0, len(tokens), 512):
            part, visible = slice(begin, begin + 512), slice(0, begin + 512)
            scores = torch.einsum("qhd,khd->hqk", queries[part], keys[visible]) * size**-0.5
            scores.masked_fill_(positions[visible] > positions[part, None], -math.inf)
            outputs[part] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values[visible])
        if broken is not None and broken[0] == layer:
            outputs[:, broken[1] * shape.group : (broken[1] + 1) * shape.group] = 0
        hidden = hidden + outputs.flatten(1) @ o.T
    return norm(hidden[-asked:]) @ weights["lm_head.weight"].T


def ask_all(
    shape: Shape, length: int, needles: int, answer: int, broken: tuple[int, int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of the answers to all needles of a document with weights in bfloat16, and the right answers."""
    document = draw_document(length, needles, answer, seed=1)
    appended = [token for needle in document.needles for token in needle.tokens]
    weights = {name: weight.bfloat16().double() for name, weight in make_weights(shape)}
    logits = forward(weights, shape, document.tokens + appended, len(appended), broken)
    right = torch.tensor([needle.answer for needle in document.needles])
    return logits.unflatten(0, (needles, 1 + answer))[:, :-1], right


@pytest.mark.parametrize("broken", [(1, 0), (3, 7)])
def test_one_head_that_reads_nothing_loses_every_answer(broken):
    logits, _ = ask_all(Shape(), 300, 8, 4, broken)
    assert set(logits.argmax(-1).flatten().tolist()) == {LOST}


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_previous_token_is_found_among_a_million(head_size, stored):
    """Loud tokens before loud tokens, whose keys are shortest, among quiet ones; queries and keys are rounded."""
    shape, longest = Shape(layers=2, kv_heads=1, head_size=head_size), 1 << 20
    weights = {name: weight.bfloat16() for name, weight in make_weights(shape)}
    normed = norm(weights["model.embed_tokens.weight"][[LOUD[0], VOCABULARY - 1]].float()).bfloat16()
    query, key = (normed @ weights[f"model.layers.0.self_attn.{name}_proj.weight"].T for name in "qk")
    # As vLLM: angles in float32, their cosines in the type of the model.
    angles = torch.arange(longest, dtype=torch.float32)[:, None] * frequencies(shape, torch.float32)
    asked = torch.tensor([1, 2, 1000, longest // 2, longest - 2, longest - 1])
    queries = rotate(query[:1, None].expand(len(asked), -1, -1), angles[asked], torch.bfloat16)[:, 0]
    keys = rotate(key[1:, None].expand(longest, -1, -1), angles, torch.bfloat16)[:, 0]
    keys[asked - 1] = rotate(key[:1, None].expand(len(asked), -1, -1), angles[asked - 1], torch.bfloat16)[:, 0]
    rotary = 2 * angles.shape[-1]
    queries, keys = (each[:, :rotary].to(stored).float() for each in (queries, keys))
    scores = queries @ keys.T * head_size**-0.5
    scores.masked_fill_(torch.arange(longest) > asked[:, None], -math.inf)
    weight = scores.softmax(-1)[torch.arange(len(asked)), asked - 1]
    assert weight.min() > 0.999, weight


def look_up(arguments: list[str]) -> int:
    return CliRunner().invoke(quality.app, ["lookup", *arguments]).exit_code


@pytest.mark.parametrize(
    ("variant", "backend", "settings", "found"),
    [
        ("unique_offload", "UNIQUE", {"selection": {"budget_tokens": 128}}, [True] * 4),
        # The needles at both ends are among the first and the newest tokens.
        ("streaming_llm", "STREAMING_LLM", {}, [True, False, False, True]),
    ],
)
def test_an_engine_answers_what_it_can_see_and_a_wrong_answer_ends_the_command(
    tmp_path, variant, backend, settings, found
):
    output = tmp_path / "found.jsonl"
    code = in_fresh_process(look_up, [
        "--context", "2K", "--needles", "4", "--answer-tokens", "4", "--layers", "3", "--kv-heads", "2",
        "--head-size", "64", "--variant", variant, "--output", str(output),
        "--additional-config", json.dumps({"sparse_attention": settings}),
    ])  # fmt: skip
    assert code == (0 if all(found) else 3)
    rows = read_run(output).rows
    assert [row["answer"] == row["right_answer"] for row in rows] == [each for each in found for _ in range(2)]
    assert {row["attention_backend"] for row in rows} == {backend}


def test_settings_are_those_of_additional_config():
    text = "snapkv:2048+stopping.dense_order=votes+stopping.scale_tolerance=1e-3+min_context_tokens=0"
    name, backend, key, config = quality.Setting.parse(text).options
    assert (name, backend, key) == ("--attention-backend", "snapkv", "--additional-config")
    assert json.loads(config)["sparse_attention"] == {
        "compaction": {"method": "snapkv", "budget_tokens": 2048},
        "stopping": {"dense_order": "votes", "scale_tolerance": 0.001},
        "min_context_tokens": 0,
    }
    assert quality.Setting.parse("art").options == ("--attention-backend", "art")
    for wrong in ("art:512", "nothing", "unique:-1", "art+stopping.patience", "art+stopping.nothing=1"):
        with pytest.raises(ConfigurationError):
            quality.Setting.parse(wrong)
