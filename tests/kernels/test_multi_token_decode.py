"""Several query tokens of each request over whole contexts, compared with attention token by token in float64."""

from dataclasses import dataclass, replace

import pytest
import torch
from sparse_kernels.batch import DecodeBatch, DecodeOutput, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.multi_token_decode import multi_token_decode
from support.paged import assert_as_accurate, dense_attention, make_batch

LENGTHS = [length for edge in (9, 64, 640) for length in (edge - 1, edge, edge + 1)]
"""Contexts that end around the edges of query tokens, blocks and steps of keys."""


@dataclass
class Requests:
    """Requests in a cache full of garbage, some of which have no context."""

    batch: DecodeBatch
    cache: KVCache
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def expected(self, softmax: Softmax, dtype: torch.dtype) -> torch.Tensor:
        """Attention token by token; zero without a context."""
        batch, cache = self.batch, self.cache
        expected = torch.zeros(batch.query.shape, dtype=dtype)
        sinks = None if softmax.sink_logits is None else softmax.sink_logits.cpu()
        for token in range(batch.num_tokens):
            request, place = divmod(token, batch.tokens_per_request)
            context = int(batch.seq_lens[request]) - (batch.tokens_per_request - 1 - place)
            if context <= 0:
                continue
            keys, values = (part[request][:context] for part in (self.keys, self.values))
            query = batch.query[token].cpu().to(dtype).unflatten(0, (cache.num_kv_heads, -1))
            expected[token] = dense_attention(
                query, keys, values, softmax.scale, sinks=sinks, softcap=softmax.softcap, dtype=dtype,
            )  # fmt: skip
        return expected


def make_requests(
    lengths: list[int],
    tokens: int,
    num_kv_heads: int = 2,
    group: int = 4,
    head_size: int = 16,
    block_size: int = 64,
    dtype: torch.dtype = torch.float32,
) -> Requests:
    """Requests with given contexts (0 for padding), and equal numbers of query tokens."""
    paged = make_batch([max(1, n) for n in lengths], num_kv_heads, head_size, block_size)
    # A slice of a wider tensor, as vLLM's query is.
    wide = torch.randn(tokens * len(lengths), num_kv_heads * group + 3, head_size)
    query = wide[:, : num_kv_heads * group].to(dtype)
    batch = DecodeBatch(query, paged.block_table.int(), torch.tensor(lengths, dtype=torch.int32))
    return Requests(batch, paged.cache, paged.keys, paged.values)


def run(made: Requests, softmax: Softmax) -> torch.Tensor:
    """The Triton kernels: in their interpreter, or on a GPU if there is one."""
    from sparse_kernels.multi_token_decode import triton

    batch, cache, device = made.batch, made.cache, "cuda" if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        cache = KVCache.from_rows(cache.rows.cuda(), cache.page_size)
    batch = DecodeBatch(*(tensor.to(device) for tensor in (batch.query, batch.block_table, batch.seq_lens)))
    if softmax.sink_logits is not None:
        softmax = replace(softmax, sink_logits=softmax.sink_logits.to(device))
    output = DecodeOutput.like(batch.query).heads.fill_(torch.nan)
    triton.multi_token_decode(batch, cache, softmax, output)
    return output.cpu()


CASES = {
    "edges": {"lengths": LENGTHS, "tokens": 9},
    "two tokens": {"lengths": [700, 1, 2, 65], "tokens": 2},
    "one token": {"lengths": [700, 1, 2, 65], "tokens": 1},
    "padding": {"lengths": [0, 300, 0, 3, 0], "tokens": 5},
    "no group": {"lengths": [700, 90], "tokens": 3, "group": 1},
    "more rows than a tile, three heads to a group": {"lengths": [700, 90], "tokens": 25, "group": 3},
    "several tiles": {"lengths": [300, 90], "tokens": 9, "group": 16, "num_kv_heads": 1},
    "blocks that no step divides": {"lengths": [700, 47, 48, 49], "tokens": 3, "block_size": 48},
    "small blocks": {"lengths": [300, 17], "tokens": 3, "block_size": 16},
    "blocks of several steps": {"lengths": [700, 129], "tokens": 3, "block_size": 128},
    "heads of 96": {"lengths": [700, 65], "tokens": 3, "head_size": 96},
    "heads of 256": {"lengths": [300, 65], "tokens": 3, "head_size": 256, "num_kv_heads": 1},
}
SOFTMAXES = {
    "plain": Softmax(0.25),
    "softcap": Softmax(0.25, 3.0),
    "sinks": Softmax(0.25, 0.0, torch.linspace(-3, 5, 8)),
}


@pytest.fixture(autouse=True)
def _compiled_or_interpreted(request: pytest.FixtureRequest) -> None:
    if not torch.cuda.is_available():
        request.getfixturevalue("interpreted")


@pytest.mark.parametrize(
    ("case", "softmax"), [*((case, "plain") for case in CASES), ("edges", "softcap"), ("padding", "sinks")]
)
def test_every_token_attends_to_what_comes_before_it(case, softmax):
    made = make_requests(**CASES[case])
    exact, single = (made.expected(SOFTMAXES[softmax], dtype) for dtype in (torch.float64, torch.float32))
    if torch.cuda.is_available():
        made.batch = replace(made.batch, query=made.batch.query.bfloat16())
        exact = made.expected(SOFTMAXES[softmax], torch.float64)
        # A row's weights and its output are rounded to 8 bits of mantissa each.
        error = (run(made, SOFTMAXES[softmax]).double() - exact).norm(dim=-1)
        assert (error <= 2**-7 * exact.norm(dim=-1)).all()
        return
    # Logits are rounded once more on their way to the base 2.
    assert_as_accurate(run(made, SOFTMAXES[softmax]), exact, single, roundings=2)
    output = DecodeOutput(torch.full(exact.shape, torch.nan, dtype=torch.bfloat16))
    assert_as_accurate(multi_token_decode(made.batch, made.cache, SOFTMAXES[softmax], output), exact, single)


def test_16_bits_are_rounded_as_the_matrix_units_do():
    made = make_requests([700, 0, 64, 300], 9, head_size=64, dtype=torch.bfloat16)
    exact = made.expected(Softmax(0.125), torch.float64)
    found = run(made, Softmax(0.125))
    error = (found.double() - exact).norm(dim=-1)
    assert (error <= 2**-7 * exact.norm(dim=-1)).all()
    assert not found[9:18].any()


def test_a_request_is_the_same_in_every_batch_of_a_size():
    """Pieces depend only on a context's length and on the number of requests."""
    made = make_requests([700, 90, 300], 5, dtype=torch.bfloat16)
    whole = run(made, Softmax(0.25))
    order = torch.tensor([2, 0, 1])
    others = replace(
        made.batch, query=made.batch.query.unflatten(0, (3, 5))[order].flatten(0, 1),
        block_table=made.batch.block_table[order], seq_lens=made.batch.seq_lens[order],
    )  # fmt: skip
    parted = run(replace(made, batch=others), Softmax(0.25))
    assert torch.equal(parted.unflatten(0, (3, 5)), whole.unflatten(0, (3, 5))[order])


def test_pieces_without_tokens_count_for_nothing(monkeypatch):
    """A short context next to a long one leaves most of its pieces empty."""
    from sparse_kernels.multi_token_decode import triton

    monkeypatch.setattr(triton, "_LEAST_TOKENS", 16)
    made = make_requests([5, 700, 64], 4)
    exact, single = (made.expected(Softmax(0.25), dtype) for dtype in (torch.float64, torch.float32))
    if torch.cuda.is_available():
        made.batch = replace(made.batch, query=made.batch.query.bfloat16())
        exact = made.expected(Softmax(0.25), torch.float64)
        error = (run(made, Softmax(0.25)).double() - exact).norm(dim=-1)
        assert (error <= 2**-7 * exact.norm(dim=-1)).all()
        return
    assert_as_accurate(run(made, Softmax(0.25)), exact, single, roundings=2)


@pytest.mark.parametrize("pieces", [False, True], ids=["one piece", "several pieces"])
def test_a_key_that_is_nan_makes_the_outputs_nan_that_attend_to_it(pieces, monkeypatch):
    """As in dense attention; no other output changes."""
    from sparse_kernels.multi_token_decode import triton

    if pieces:
        monkeypatch.setattr(triton, "_LEAST_TOKENS", 16)
    made = make_requests([300, 301, 90], 4, dtype=torch.bfloat16)
    for request, token in ((0, 17), (1, 298)):  # the second one is among the newest: one query token precedes it
        block, within = made.batch.block_table[request, token // 64], token % 64
        made.cache.keys.view[block, 1, within // 8, 0, within % 8, 5] = torch.nan
        made.keys[request][token, 1, 5] = torch.nan
    expected, found = made.expected(Softmax(0.25), torch.float64), run(made, Softmax(0.25))
    assert expected.isnan().any(dim=-1).sum() == 4 * (4 + 3)
    assert torch.equal(found.isnan(), expected.isnan())


def test_packed_blocks_are_refused():
    from sparse_kernels.multi_token_decode import triton

    made = make_requests([60], 3, dtype=torch.bfloat16)
    packed = KVCache(*(replace(part, token_dims=(1,)) for part in (made.cache.keys, made.cache.values)))
    with pytest.raises(ValueError, match=r"^keys and values: got packed blocks"):
        triton.multi_token_decode(made.batch, packed, Softmax(1.0), torch.empty_like(made.batch.query))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_serves_other_lengths():
    made = make_requests([700, 90, 300], 5, dtype=torch.bfloat16)
    batch, softmax = made.batch, Softmax(0.25)
    cache = KVCache.from_rows(made.cache.rows.cuda(), made.cache.page_size)
    on_device = DecodeBatch(batch.query.cuda(), batch.block_table.cuda(), batch.seq_lens.cuda())
    multi_token_decode(on_device, cache, softmax)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = multi_token_decode(on_device, cache, softmax)
    for lengths in ([700, 90, 300], [64, 0, 7], [699, 89, 1]):
        on_device.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        expected = replace(made, batch=replace(batch, seq_lens=torch.tensor(lengths, dtype=torch.int32))).expected(
            softmax, torch.float64
        )
        error = (output.double().cpu() - expected).norm(dim=-1)
        assert (error <= 2**-7 * expected.norm(dim=-1)).all()


@pytest.mark.parametrize("contexts", [4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 264, 384, 512, 768])
def test_programs_fill_whole_waves(contexts):
    from sparse_kernels.multi_token_decode import triton

    programs, at_once = contexts * triton._pieces(contexts, 132), 264
    assert programs / (-(-programs // at_once) * at_once) >= 0.94
