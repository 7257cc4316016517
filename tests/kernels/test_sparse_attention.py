from dataclasses import replace

import pytest
import torch
from sparse_kernels.batch import Softmax
from sparse_kernels.sparse_attention import attend_pages, reference
from support.paged import assert_as_accurate, dense_attention, make_batch

CONTEXTS = [63, 64, 65, 1, 7, 8, 9, 500, 512, 300]
SHAPES = [(1, 1, 64), (2, 4, 64), (1, 16, 128), (2, 3, 96), (1, 8, 256)]
IMPLEMENTATIONS = [attend_pages, reference.attend_pages]
PAGE_SIZES = [8, 16, 32]
COMPILED = [(2, 4, 64, 8), (2, 3, 96, 32), (1, 1, 256, 16)]
"""KV heads, group size, head size and page size. Each takes seconds to compile, so the list is short.

Tests of other properties use the second shape.
"""
ATTENDED = [
    *(pytest.param(attend_pages, *case, id="-".join(map(str, (*case, "compiled")))) for case in COMPILED),
    *(
        pytest.param(reference.attend_pages, *shape, page_size, id="-".join(map(str, (*shape, page_size, "reference"))))
        for shape in SHAPES
        for page_size in PAGE_SIZES
    ),
]


def random_pages(batch, num_kv_heads: int, k: int, seed: int = 0) -> torch.Tensor:
    """Distinct pages for each request and head, -1 if there are fewer than k."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.full((len(batch.keys), num_kv_heads, k), -1)
    for request, count in enumerate(batch.num_pages.tolist()):
        for head in range(num_kv_heads):
            chosen = torch.randperm(count, generator=generator)[:k].sort().values
            pages[request, head, : len(chosen)] = chosen
    return pages


def visible_tokens(batch, pages: torch.Tensor, request: int) -> torch.Tensor:
    context = int(batch.context_lens[request])
    visible = torch.zeros(pages.shape[1], context, dtype=torch.bool)
    for head in range(pages.shape[1]):
        for page in pages[request, head].tolist():
            if page >= 0:
                visible[head, page * batch.page_size : (page + 1) * batch.page_size] = True
    visible[:, context // batch.page_size * batch.page_size :] = True
    return visible


@pytest.mark.parametrize(("attend", "num_kv_heads", "group_size", "head_size", "page_size"), ATTENDED)
@pytest.mark.parametrize("extras", [{}, {"sinks": True}, {"softcap": 5.0}], ids=["plain", "sinks", "softcap"])
def test_attends_exactly_the_selection_and_the_incomplete_page(
    attend, num_kv_heads, group_size, head_size, page_size, extras
):
    # A context always has a selected page or an incomplete one.
    batch = make_batch(CONTEXTS, num_kv_heads, head_size, page_size=page_size)
    query = torch.randn(len(CONTEXTS), num_kv_heads, group_size, head_size).bfloat16()
    sinks = torch.randn(num_kv_heads * group_size) if extras.get("sinks") else None
    softcap = extras.get("softcap", 0.0)
    pages = random_pages(batch, num_kv_heads, 5)
    scale = head_size**-0.5
    output = attend(batch.tokens(query), batch.cache, pages, Softmax(scale, softcap, sinks))
    assert output.shape == (len(CONTEXTS), num_kv_heads * group_size, head_size)
    for request in range(len(CONTEXTS)):
        visible = visible_tokens(batch, pages, request)
        arguments = query[request], batch.keys[request], batch.values[request], scale, visible, sinks, softcap
        exact, single = dense_attention(*arguments), dense_attention(*arguments, dtype=torch.float32)
        assert_as_accurate(output[request], exact, single)


@pytest.mark.parametrize("attend", IMPLEMENTATIONS, ids=["compiled", "reference"])
def test_selecting_every_page_is_dense_attention(attend):
    batch = make_batch(CONTEXTS, 2, 64)
    query = torch.randn(len(CONTEXTS), 2, 4, 64).bfloat16()
    every = torch.arange(64).expand(len(CONTEXTS), 2, -1)
    pages = torch.where(every < batch.num_pages[:, None, None], every, -1)
    output = attend(batch.tokens(query), batch.cache, pages, Softmax(0.125))
    for request in range(len(CONTEXTS)):
        arguments = query[request], batch.keys[request], batch.values[request], 0.125
        assert_as_accurate(
            output[request], dense_attention(*arguments), dense_attention(*arguments, dtype=torch.float32)
        )


def test_a_token_does_not_depend_on_its_neighbours():
    batch = make_batch(CONTEXTS, 2, 64)
    query = torch.randn(len(CONTEXTS), 2, 4, 64).bfloat16()
    pages = random_pages(batch, 2, 8)
    together = attend_pages(batch.tokens(query), batch.cache, pages, Softmax(0.125))
    for request in range(len(CONTEXTS)):
        row = slice(request, request + 1)
        alone = attend_pages(batch.tokens(query)[row], batch.cache, pages[row], Softmax(0.125))
        assert torch.equal(alone[0], together[request])


def test_extreme_logits_do_not_overflow():
    batch = make_batch([40], 1, 64)
    query = torch.full((1, 1, 4, 64), 1e4).bfloat16()
    pages = torch.arange(5).view(1, 1, 5)
    output = attend_pages(batch.tokens(query), batch.cache, pages, Softmax(1.0))
    assert output.isfinite().all()


def test_softmax_of_a_wide_range_of_logits():
    """Weights range from 1 to numbers that round to 0."""
    batch = make_batch([512], 1, 64)
    query = torch.randn(1, 1, 4, 64).bfloat16() * torch.tensor([0.1, 1, 4, 30]).bfloat16()[:, None]
    pages = torch.arange(64).view(1, 1, 64)
    output = attend_pages(batch.tokens(query), batch.cache, pages, Softmax(0.125))
    arguments = query[0], batch.keys[0], batch.values[0], 0.125
    assert_as_accurate(output[0], dense_attention(*arguments), dense_attention(*arguments, dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_queries_of_other_dtypes(dtype):
    batch = make_batch([100], 1, 64)
    query, pages = torch.randn(1, 1, 4, 64).to(dtype), torch.arange(12).view(1, 1, 12)
    output = attend_pages(batch.tokens(query), batch.cache, pages, Softmax(0.125))
    assert output.dtype == dtype
    arguments = query[0], batch.keys[0], batch.values[0], 0.125
    assert_as_accurate(output[0], dense_attention(*arguments), dense_attention(*arguments, dtype=torch.float32))


def test_no_tokens():
    batch = make_batch([64], 1, 64)
    nothing = batch.tokens(torch.empty(1, 1, 4, 64))[:0]
    output = attend_pages(nothing, batch.cache, torch.empty(0, 1, 4).long(), Softmax(1.0))
    assert output.shape == (0, 4, 64)


def test_scales_of_an_eight_bit_cache_multiply():
    batch = make_batch([300], 2, 64)
    query, pages = torch.randn(1, 2, 4, 64), torch.arange(37).expand(1, 2, -1)
    two, half = torch.tensor([2.0]), torch.tensor([0.5])
    plain = attend_pages(batch.tokens(query), batch.cache, pages, Softmax(0.125))
    scaled = replace(batch.cache, key_scale=half, value_scale=two)
    torch.testing.assert_close(attend_pages(batch.tokens(query * 2), scaled, pages, Softmax(0.125)), plain * 2)


def test_mismatched_shapes_are_refused():
    batch, softmax = make_batch([64], 2, 64), Softmax(1.0)
    with pytest.raises(ValueError, match="query: got 1 KV heads"):
        attend_pages(batch.tokens(torch.zeros(1, 1, 2, 64)), batch.cache, torch.zeros(1, 1, 4).long(), softmax)
    tokens = batch.tokens(torch.zeros(1, 2, 2, 64))
    with pytest.raises(ValueError, match=r"pages: got \(1, 1, 4\)"):
        attend_pages(tokens, batch.cache, torch.zeros(1, 1, 4).long(), softmax)
    pages = torch.zeros(1, 2, 4).long()
    with pytest.raises(ValueError, match="sink_logits: got 3 logits, allowed: 4"):
        attend_pages(tokens, batch.cache, pages, Softmax(1.0, sink_logits=torch.zeros(3)))
    other = make_batch([64], 2, 64, page_size=16)
    with pytest.raises(ValueError, match="values: got pages of 16 tokens"):
        attend_pages(tokens, replace(batch.cache, values=other.paged_values), pages, softmax)


@pytest.mark.parametrize("attend", IMPLEMENTATIONS, ids=["compiled", "reference"])
def test_a_row_that_reads_nothing_has_a_zero_output(attend):
    """Like a decode step on a GPU. A policy that chooses pages in torch may choose none."""
    batch = make_batch([64, 72, 70], 2, 64)
    pages = torch.full((3, 2, 4), -1)
    pages[1, 0, 0] = 3
    query = torch.randn(3, 2, 4, 64).bfloat16()
    output = attend(batch.tokens(query), batch.cache, pages, Softmax(0.125)).unflatten(1, (2, 4))
    assert output.isfinite().all()
    assert (output.flatten(2) == 0).all(dim=2).tolist() == [[True, True], [False, True], [False, False]]
