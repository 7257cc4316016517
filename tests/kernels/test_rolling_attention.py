"""Attention with rolling positions beside StreamingLLM as the paper has it: keys turned to their places in a cache."""

import functools
from dataclasses import replace

import pytest
import torch
from sparse_kernels.batch import Softmax
from sparse_kernels.rolling_attention import RollingWindow, Rotation, attend_rolling
from support.paged import assert_as_accurate, dense_attention
from support.prefill import Prefill, make_prefill

HEAD_SIZE, BLOCK = 16, 32
SOFTMAX = Softmax(0.25)
WINDOW = RollingWindow(sink_tokens=4, cache_tokens=48, whole_tokens=48)
RAGGED = [(70, 70), (33, 3), (0, 0), (300, 11), (65, 1), (47, 1), (48, 1), (49, 1), (200, 30), (3, 2)]
"""Contexts and their newest tokens, which are the queries."""


@functools.cache
def angles(rotary_size: int) -> torch.Tensor:
    """Of each position: `[positions, rotary_size / 2]` float64."""
    frequencies = 100.0 ** -(torch.arange(0, rotary_size, 2, dtype=torch.float64) / rotary_size)
    return torch.arange(400, dtype=torch.float64)[:, None] * frequencies


def rotation(rotary_size: int = HEAD_SIZE, interleaved: bool = False, factor: float = 1.0) -> Rotation:
    of_position = angles(rotary_size)
    return Rotation((factor * torch.cat([of_position.cos(), of_position.sin()], dim=1)).float(), interleaved)


def turned(x: torch.Tensor, by: torch.Tensor, made: Rotation) -> torch.Tensor:
    """Queries or keys `[num_tokens, heads, head_size]`, turned by `[num_tokens]` further positions."""
    size, result = made.rotary_size, x.clone()
    elements = torch.arange(size)
    one, other = (elements[::2], elements[1::2]) if made.interleaved else elements.chunk(2)
    angle = (by[:, None] * angles(size)[1]).to(x.dtype)[:, None]
    result[..., one] = angle.cos() * x[..., one] - angle.sin() * x[..., other]
    result[..., other] = angle.sin() * x[..., one] + angle.cos() * x[..., other]
    return result


def as_the_paper(
    prefill: Prefill, window: RollingWindow, made: Rotation, softmax: Softmax, dtype: torch.dtype
) -> torch.Tensor:
    """Outputs of all query tokens, each from a cache of its own whose keys are turned to their places in it."""
    outputs = torch.full(prefill.batch.query.shape, torch.nan, dtype=dtype)
    for request, chunk in enumerate(prefill.chunks):
        length = int(prefill.batch.seq_lens[request])
        for token in range(chunk.start, chunk.stop):
            position = length - (chunk.stop - token)
            cached = list(range(position + 1))
            if len(cached) > window.whole_tokens:
                cached = cached[: window.sink_tokens] + cached[-window.newest_tokens :]
            where = torch.tensor(cached)
            keys = prefill.keys[request][where].to(dtype)
            query = prefill.batch.query[token][None].to(dtype)
            place = torch.arange(len(cached))
            if len(cached) <= position:
                keys = turned(turned(keys, -where, made), place, made)
                query = turned(turned(query, torch.tensor([-position]), made), place[-1:], made)
            outputs[token] = dense_attention(
                query[0].unflatten(0, (keys.shape[1], -1)), keys, prefill.values[request][where], softmax.scale,
                softcap=softmax.softcap, dtype=dtype,
            )  # fmt: skip
    return outputs


def run(
    prefill: Prefill, window: RollingWindow = WINDOW, made: Rotation | None = None, softmax: Softmax = SOFTMAX
) -> torch.Tensor:
    return attend_rolling(prefill.batch, prefill.cache, softmax, window, made or rotation(), prefill.output())


@pytest.mark.parametrize(
    ("window", "made", "softmax"),
    [
        pytest.param(WINDOW, rotation(), SOFTMAX, id="halves"),
        pytest.param(WINDOW, rotation(interleaved=True), SOFTMAX, id="neighbours"),
        pytest.param(WINDOW, rotation(8), SOFTMAX, id="a part of a head"),
        pytest.param(WINDOW, rotation(8, interleaved=True, factor=1.35), SOFTMAX, id="a factor"),
        pytest.param(WINDOW, rotation(), Softmax(0.25, 2.0), id="softcap"),
        pytest.param(RollingWindow(70, 100, 100), rotation(), SOFTMAX, id="sinks in several blocks"),
        pytest.param(RollingWindow(4, 48, 90), rotation(), SOFTMAX, id="longer contexts whole"),
        pytest.param(RollingWindow(0, 48, 48), rotation(), SOFTMAX, id="no sinks"),
    ],
)
def test_outputs_are_those_of_a_cache_whose_keys_are_turned_to_their_places(window, made, softmax):
    prefill = make_prefill(RAGGED, block_size=BLOCK, dtype=torch.float32)
    exact, low = (as_the_paper(prefill, window, made, softmax, dtype) for dtype in (torch.float64, torch.float32))
    actual = run(prefill, window, made, softmax)
    assert_as_accurate(actual, exact, low)
    # At the positions of the text the sinks would get other weights.
    nowhere = torch.tensor([1.0, 0.0]).repeat_interleave(made.rotary_size // 2).expand_as(made.table)
    parted = (run(prefill, window, replace(made, table=nowhere), softmax) - actual).abs().amax(dim=(1, 2)) > 1e-3
    positions = torch.cat([torch.arange(length - new, length) for length, new in RAGGED])
    rolling = positions >= window.whole_tokens
    assert not parted[~rolling].any()
    assert not rolling.any() or (parted[rolling].float().mean() > 0.9) == (window.sink_tokens > 0)


def test_a_token_has_the_same_output_however_its_prompt_is_cut():
    whole = make_prefill([(300, 300)], block_size=BLOCK)
    expected = run(whole)
    begin = 0
    for new in (1, 40, 7, 130, 1, 1, 120):
        end = begin + new
        part = replace(
            whole.batch, query=whole.batch.query[begin:end], query_start=torch.tensor([0, new], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
        )  # fmt: skip
        chunk = run(replace(whole, batch=part))
        assert (chunk.float() - expected[begin:end].float()).abs().max() < 2e-2
        begin = end
    assert begin == 300


def test_what_no_token_reads_may_be_anything():
    prefill = make_prefill([(300, 20)], block_size=BLOCK)
    before = run(prefill)
    # The window of the oldest query, at 280, begins at 237.
    for block in range(1, 237 // BLOCK):
        for paged in (prefill.cache.keys, prefill.cache.values):
            paged.view[prefill.batch.block_table[0, block]] = torch.nan
    after = run(prefill)
    assert after.isfinite().all()
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("window", "made", "softmax", "sentence"),
    [
        (RollingWindow(-1, 48, 48), None, Softmax(1.0), "sink_tokens: got -1, allowed: at least 0"),
        (RollingWindow(4, 4, 48), None, Softmax(1.0), "cache_tokens: got 4, allowed: at least 5"),
        (RollingWindow(4, 48, 47), None, Softmax(1.0), "whole_tokens: got 47, allowed: at least 48"),
        (
            WINDOW,
            Rotation(torch.ones(252, HEAD_SIZE)),
            Softmax(1.0),
            "rotation: got 252 positions, allowed: at least 253",
        ),
        (WINDOW, Rotation(torch.ones(400, 32)), Softmax(1.0), "rotation: got 32 elements, allowed: 2 to 16"),
        (WINDOW, None, Softmax(1.0, 0.0, torch.zeros(4)), "sink_logits: got some, allowed: None"),
    ],
)
def test_what_cannot_be_attended_to_is_refused(window, made, softmax, sentence):
    prefill = make_prefill([(300, 20)], block_size=BLOCK)
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        run(prefill, window, made, softmax)
