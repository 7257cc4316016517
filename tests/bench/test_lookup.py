"""The model that looks tokens up, in float64 and over a million positions."""

import math

import pytest
import torch

from bench.common.lookup import (
    GROUP,
    LOST,
    LOUD,
    TOLERATED,
    VOCABULARY,
    Shape,
    draw_document,
    make_config,
    make_weights,
)
from vllm_sparse_plugin.errors import ConfigurationError

SMALL = Shape(layers=3, kv_heads=2, group=1, head_size=64)
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


def test_every_depth_is_answered_in_float64():
    logits, right = ask_all(SMALL, 8192, 8, 4)
    assert torch.equal(logits.argmax(-1), right)


@pytest.mark.parametrize("shape", [Shape(), Shape(layers=16, kv_heads=2, group=2, head_size=64)])
def test_the_answer_leads_and_no_token_but_the_lost_one_is_near(shape):
    logits, right = ask_all(shape, 300, 8, 20)
    assert torch.equal(logits.argmax(-1), right)
    answers = logits.gather(-1, right[..., None])[..., 0]
    lost = logits[..., LOST].clone()
    assert ((answers - lost) / answers).min() > 0.75 * TOLERATED
    logits.scatter_(-1, right[..., None], 0)[..., LOST] = 0
    assert (answers - logits.amax(-1)).min() > 5


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


@pytest.mark.parametrize("head_size", [64, 128])
def test_keys_of_a_group_are_orthogonal_in_every_head(head_size):
    shape = Shape(layers=2, kv_heads=4, head_size=head_size)
    weights = dict(make_weights(shape))
    codes = weights["model.embed_tokens.weight"][LOUD.start : LOUD.start + GROUP, :head_size]
    keys = weights["model.layers.1.self_attn.k_proj.weight"].unflatten(0, (4, head_size))
    for head in keys:
        seen = (codes @ head[:, head_size : 2 * head_size].T).sign()
        assert torch.equal(seen @ seen.T, torch.eye(GROUP, dtype=torch.float64) * (head_size - 32))
    assert not torch.equal(keys[0], keys[1])


def test_documents_hold_their_needles_once_from_start_to_end():
    document = draw_document(1000, 5, 3, seed=1)
    loud = [place for place, token in enumerate(document.tokens) if token in LOUD]
    places = [needle.position + offset for needle in document.needles for offset in range(4)]
    assert loud == places
    assert (places[0], places[-1]) == (1, 999)
    assert len({document.tokens[place] for place in loud}) == 20
    assert all(document.tokens[each.position : each.position + 4] == list(each.tokens) for each in document.needles)
    assert draw_document(1000, 5, 3, seed=2).needles[0].tokens != document.needles[0].tokens


REFUSED = {
    "one layer": (lambda: Shape(layers=1), "layers: got 1, allowed: 2 or more"),
    "head size": (lambda: Shape(head_size=96), "head_size: got 96, allowed: 64 or 128"),
    "needles": (lambda: draw_document(10_000, 65, 1, 0), "needles: got 65, allowed: from 2 to 64"),
    "answer": (lambda: draw_document(10_000, 2, 32, 0), "answer_tokens: got 32, allowed: from 1 to 31"),
    "length": (lambda: draw_document(20, 5, 3, 0), "context: got a document of 20 tokens, allowed: more than .* 20"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_shapes_and_documents_are_refused(case):
    call, sentence = REFUSED[case]
    with pytest.raises(ConfigurationError, match=sentence):
        call()
