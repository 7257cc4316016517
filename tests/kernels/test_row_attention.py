"""One query token over its whole context and over some pages, compared with the formula in float64."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from sparse_kernels.batch import QueryTokens, Softmax
from sparse_kernels.page_coverage import api, page_logits, row_page_logits
from sparse_kernels.row_attention import RowAttention, attend_row
from support.paged import PagedBatch, make_batch

pytestmark = pytest.mark.usefixtures("interpreted")

CONTEXT = 1100
"""More than one program's piece, and not a whole number of pages."""


def ways_to_attend() -> list[Callable[..., RowAttention]]:
    """The implementation in torch and, if Triton is installed, in its interpreter."""
    ways = [attend_row]
    if find_spec("triton") is not None:
        from sparse_kernels.row_attention import triton

        ways.append(triton.attend_row)
    return ways


def expected_of(batch: PagedBatch, query: torch.Tensor, read: torch.Tensor, softmax: Softmax, dtype: torch.dtype):
    """Page sums and the outputs over read tokens and over all tokens, token by token."""
    keys, values = (part[0].transpose(0, 1).to(dtype) for part in (batch.keys, batch.values))
    logits = torch.einsum("hgd,hnd->hgn", query.to(dtype), keys) * softmax.scale
    if softmax.softcap:
        logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
    page = torch.arange(CONTEXT) // batch.page_size
    by_page = [logits[..., page == p].logsumexp(dim=-1) for p in range(int(page[-1]) + 1)]
    outputs = []
    for seen in (read[:, page], torch.ones_like(read[:, page])):
        shown = logits.masked_fill(~seen[:, None], -torch.inf)
        if softmax.sink_logits is not None:
            sink = softmax.sink_logits.to(dtype).view(len(keys), -1, 1)
            shown = torch.cat([shown, sink], dim=-1)
        outputs.append(torch.einsum("hgn,hnd->hgd", shown.softmax(dim=-1)[..., :CONTEXT], values))
    return torch.stack(by_page, dim=-1), *outputs


@pytest.mark.parametrize(
    ("page_size", "head_size", "group", "softcap", "sinks"),
    [(8, 64, 4, 0.0, False), (16, 96, 1, 0.0, True), (32, 64, 12, 5.0, True)],
)
def test_both_outputs_and_what_pages_weigh(page_size, head_size, group, softcap, sinks):
    """A GPU rounds weights to two numbers of 8 bits, with an error of at most 2^-17 each."""
    batch = make_batch([CONTEXT], 2, head_size, page_size=page_size)
    query = torch.randn(1, 2, group, head_size).mul(2).bfloat16()
    softmax = Softmax(0.25, softcap, torch.linspace(-2, 4, 2 * group) if sinks else None)
    pages_per_block = batch.paged_keys.pages_per_block
    num_pages = batch.block_table.shape[1] * pages_per_block
    read = torch.rand(1, 2, num_pages) < 0.2
    # One head reads nothing of the first piece.
    read[0, 1, : 1024 // page_size] = False
    read[..., CONTEXT // page_size] = True
    exact = expected_of(batch, query[0], read[0], softmax, torch.float64)
    single = expected_of(batch, query[0], read[0], softmax, torch.float32)
    assert (exact[1] - exact[2]).abs().max() > 0.1
    largest = max(float(values.abs().max()) for values in batch.values)
    for number, attend in enumerate(ways_to_attend()):
        token = QueryTokens(query, batch.block_table, batch.context_lens)
        found = attend(token, batch.cache, read, softmax)
        filled = exact[0].shape[-1]
        assert found.page_sums[..., filled:].eq(-torch.inf).all()
        parts = found.page_sums[0, ..., :filled], found.sparse[0], found.dense[0]
        for name, part, wanted, rounded in zip(RowAttention._fields, parts, exact, single, strict=True):
            allowed = 2 * float((rounded - wanted).abs().max()) + torch.finfo(torch.float32).eps * largest
            if number == 1 and name != "page_sums":
                allowed += 2**-17 * largest
            # A softcap takes an exponential and a division, each with an error.
            allowed += 4 * torch.finfo(torch.float32).eps * softcap
            assert float((part - wanted).abs().max()) <= allowed, name


@pytest.mark.parametrize(("kind", "statistics"), [("quarters", "int4"), ("sketch", "int2")])
def test_estimates_of_a_row_are_those_of_its_records(kind, statistics, monkeypatch):
    batch = make_batch([300], 2, 64, statistics=statistics, kind=kind)
    query = torch.randn(1, 2, 4, 64).bfloat16()
    token, softmax = QueryTokens(query, batch.block_table, batch.context_lens), Softmax(0.25, 3.0)
    num_pages = batch.block_table.shape[1] * batch.paged_keys.pages_per_block
    # Records are read in pieces of one block.
    monkeypatch.setattr(api, "_PIECE_PAGES", 1)
    found = row_page_logits(token, batch.cache, num_pages, softmax)
    records = batch.statistics.summaries(batch.block_table[0].long())[0]
    assert torch.equal(found, page_logits(query[0], records, batch.page_size, softmax))
    assert row_page_logits(token, make_batch([300], 2, 64).cache, num_pages, softmax) is None


def test_pages_that_are_no_blocks_are_refused():
    batch = make_batch([300], 2, 64)
    token = QueryTokens(torch.zeros(1, 2, 4, 64).bfloat16(), batch.block_table, batch.context_lens)
    with pytest.raises(ValueError, match=r"read: got \[1, 2, 39\] for 1 tokens, allowed: \[1, 2, a multiple of"):
        attend_row(token, batch.cache, torch.zeros(1, 2, 39, dtype=torch.bool), Softmax(1.0))
