"""Attention with rolling positions, compared with StreamingLLM's definition: keys rotated to their places in a
cache."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from sparse_kernels.batch import Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.rolling_attention import RollingWindow, Rotation, attend_rolling
from support.paged import assert_as_accurate, dense_attention
from support.prefill import Prefill, make_prefill

HEAD_SIZE, BLOCK = 16, 32
SOFTMAX = Softmax(0.25)
WINDOW = RollingWindow(sink_tokens=4, cache_tokens=48, whole_tokens=48)
RAGGED = [(70, 30), (33, 3), (0, 0), (300, 11), (65, 1), (47, 1), (48, 1), (49, 1), (200, 7), (3, 2)]
"""Contexts and their newest tokens, which are the queries."""


@functools.cache
def angles(rotary_size: int) -> torch.Tensor:
    """Angles of each position: `[positions, rotary_size / 2]` float64."""
    frequencies = 100.0 ** -(torch.arange(0, rotary_size, 2, dtype=torch.float64) / rotary_size)
    return torch.arange(400, dtype=torch.float64)[:, None] * frequencies


def rotation(rotary_size: int = HEAD_SIZE, interleaved: bool = False, factor: float = 1.0) -> Rotation:
    of_position = angles(rotary_size)
    return Rotation((factor * torch.cat([of_position.cos(), of_position.sin()], dim=1)).float(), interleaved)


def turned(x: torch.Tensor, by: torch.Tensor, made: Rotation) -> torch.Tensor:
    """Queries or keys `[num_tokens, heads, head_size]`, rotated by `[num_tokens]` further positions."""
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
    """Outputs of all query tokens, each from a separate cache with keys rotated to their places in it."""
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


def triton_run(
    prefill: Prefill, window: RollingWindow = WINDOW, made: Rotation | None = None, softmax: Softmax = SOFTMAX
) -> torch.Tensor:
    from sparse_kernels.rolling_attention import triton

    output = prefill.output()
    triton.attend_rolling(prefill.batch, prefill.cache, softmax, window, made or rotation(), output)
    return output


Run = Callable[..., torch.Tensor]


@pytest.fixture(params=["reference", "triton"])
def attend(request: pytest.FixtureRequest) -> Run:
    """Runs the operation in torch, or in Triton's interpreter."""
    if request.param == "reference":
        return run
    request.getfixturevalue("interpreted")
    return triton_run


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
def test_outputs_are_those_of_a_cache_whose_keys_are_turned_to_their_places(attend, window, made, softmax):
    prefill = make_prefill(RAGGED, block_size=BLOCK, dtype=torch.float32)
    exact, low = (as_the_paper(prefill, window, made, softmax, dtype) for dtype in (torch.float64, torch.float32))
    actual = attend(prefill, window, made, softmax)
    assert_as_accurate(actual, exact, low)
    # At the positions of the text the sinks would get other weights.
    nowhere = torch.tensor([1.0, 0.0]).repeat_interleave(made.rotary_size // 2).expand_as(made.table)
    parted = (attend(prefill, window, replace(made, table=nowhere), softmax) - actual).abs().amax(dim=(1, 2)) > 1e-3
    positions = torch.cat([torch.arange(length - new, length) for length, new in RAGGED])
    rolling = positions >= window.whole_tokens
    assert not parted[~rolling].any()
    assert not rolling.any() or (parted[rolling].float().mean() > 0.9) == (window.sink_tokens > 0)


def test_a_token_has_the_same_output_however_its_prompt_is_cut(attend):
    whole = make_prefill([(300, 300)], block_size=BLOCK)
    expected = attend(whole)
    begin = 0
    for new in (1, 40, 7, 130, 1, 1, 120):
        end = begin + new
        part = replace(
            whole.batch, query=whole.batch.query[begin:end], query_start=torch.tensor([0, new], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
        )  # fmt: skip
        chunk = attend(replace(whole, batch=part))
        assert (chunk.float() - expected[begin:end].float()).abs().max() < 2e-2
        begin = end
    assert begin == 300


def test_what_no_token_reads_may_be_anything(attend):
    prefill = make_prefill([(300, 20)], block_size=BLOCK)
    before = attend(prefill)
    # The window of the oldest query, at 280, begins at 237.
    for block in range(1, 237 // BLOCK):
        for paged in (prefill.cache.keys, prefill.cache.values):
            paged.view[prefill.batch.block_table[0, block]] = torch.nan
    # Columns after the context name one of these blocks.
    prefill.batch.block_table[0, -(-300 // BLOCK) :] = prefill.batch.block_table[0, 1]
    after = attend(prefill)
    assert after.isfinite().all()
    assert torch.equal(before, after)


def test_requests_without_a_context_become_zero_and_tokens_without_a_request_stay(attend):
    prefill = make_prefill([(0, 0), (60, 3), (0, 2), (0, 0)], block_size=BLOCK, padding=4)
    output = attend(prefill)
    assert output[:3].isfinite().all()
    assert output[:3].any(dim=2).all()
    assert not output[3:5].any()
    assert output[5:].isnan().all()


LENGTHS = [length for edge in (1, 4, 32, 44, 48, 64, 96, 112, 128) for length in (edge - 1, edge, edge + 1)]
"""Contexts that end around the edges of sinks, windows, blocks and tiles of keys."""
TRITON_CASES = {
    "requests that decode": {"requests": [(length, 1) for length in LENGTHS[1:]]},
    "chunks at edges": {"requests": [(length, min(length, 5)) for length in LENGTHS]},
    "tiles of several tokens": {"requests": [(150, 150), (33, 33)], "num_kv_heads": 1, "group": 1},
    "more requests than are looked up at once": {
        "requests": [(5 + request % 9, 1) for request in range(130)], "num_kv_heads": 1, "group": 1,
    },
    "group of 3, heads of 96": {"requests": [(150, 40), (49, 1)], "group": 3, "head_size": 96},
    "group of 8, heads of 64": {"requests": [(150, 9), (49, 1)], "group": 8, "head_size": 64},
    "group of 16, heads of 128": {"requests": [(150, 5), (49, 1)], "num_kv_heads": 1, "group": 16, "head_size": 128},
    "a group larger than a tile": {"requests": [(150, 2), (49, 1)], "num_kv_heads": 1, "group": 72},
    "heads of 256": {"requests": [(150, 9)], "num_kv_heads": 1, "group": 2, "head_size": 256},
    "float16": {"requests": RAGGED, "dtype": torch.float16},
}  # fmt: skip


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("case", "bound"), [("requests that decode", 6), *((case, 1) for case in TRITON_CASES)])
def test_triton_equals_the_reference(case, bound):
    given = TRITON_CASES[case]
    prefill = make_prefill(**given, block_size=BLOCK)
    longest = max(new for _, new in given["requests"])
    # The number of rows per tile follows from the host's upper bound.
    prefill = replace(prefill, batch=replace(prefill.batch, max_query_tokens=bound * longest))
    if prefill.batch.query.dtype == torch.float16:
        halves = (
            replace(paged, view=paged.view.nan_to_num(0, 0, 0).clamp(-400, 400).half())
            for paged in (prefill.cache.keys, prefill.cache.values)
        )
        prefill = replace(prefill, cache=KVCache(*halves))
    head_size = prefill.cache.head_size
    softmax, made = Softmax(head_size**-0.5), rotation(head_size)
    expected, actual = (attend(prefill, made=made, softmax=softmax).float() for attend in (run, triton_run))
    # Weights and outputs are rounded to 8 bits of mantissa each.
    error = (actual - expected).norm(dim=-1)
    assert (error <= 2**-7 * expected.norm(dim=-1)).all()


@pytest.mark.usefixtures("interpreted")
def test_turning_a_query_takes_no_bits_off_it():
    """Otherwise logits of tens would have errors of some hundredths, and weights of some percent."""
    prefill = make_prefill([(150, 9), (90, 1)], block_size=BLOCK, head_size=64)
    window, softmax = RollingWindow(24, 48, 48), Softmax(0.5)
    expected, actual = (attend(prefill, window, rotation(64), softmax).float() for attend in (run, triton_run))
    error = (actual - expected).norm(dim=-1)
    assert (error <= 2**-7 * expected.norm(dim=-1)).all()


@pytest.mark.usefixtures("interpreted")
def test_a_part_of_a_batch_leaves_the_other_requests_alone():
    prefill = make_prefill(RAGGED, block_size=BLOCK)
    whole = triton_run(prefill)
    output = triton_run(replace(prefill, batch=prefill.batch.requests(3, 6)))
    tokens = slice(prefill.chunks[3].start, prefill.chunks[5].stop)
    assert torch.equal(output[tokens], whole[tokens])
    assert output[: tokens.start].isnan().all()
    assert output[tokens.stop :].isnan().all()


@pytest.mark.usefixtures("interpreted")
def test_packed_blocks_are_refused():
    prefill = make_prefill([(60, 3)], block_size=BLOCK)
    keys, values = (replace(one, token_dims=(1,)) for one in (prefill.cache.keys, prefill.cache.values))
    with pytest.raises(ValueError, match=r"^keys and values: got packed blocks"):
        triton_run(replace(prefill, cache=KVCache(keys, values)))


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
    prefill = make_prefill([(300, 20)], block_size=BLOCK).alone(0)
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        run(prefill, window, made, softmax)
