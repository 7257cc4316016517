"""Attention under a page mask: the reference against plain definitions, and the kernels (interpreted) against it."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_kernels.batch import PageSelection, Softmax
from sparse_kernels.masked_attention import (
    TRAINABLE,
    Packing,
    PageMask,
    PageRecords,
    dense_shares,
    gathered,
    masked_attention,
    newest_attention,
    page_records,
    reference,
    selection_loss,
)
from sparse_kernels.page_score import reference as served_scores
from sparse_kernels.page_statistics import KINDS
from sparse_kernels.page_topk import reference as served_pages
from sparse_kernels.sparse_attention import reference as served_attention
from support.paged import assert_as_accurate, make_batch

HAS_GPU = torch.cuda.is_available()
NO_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
ON_CPU = pytest.param(
    "cpu", marks=[NO_TRITON, pytest.mark.skipif(HAS_GPU, reason="beside a GPU Triton compiles its kernels")]
)
ON_GPU = pytest.param("cuda", marks=[NO_TRITON, pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")])
FORMATS = [(name, record_format) for name in TRAINABLE for record_format in KINDS[name].formats]
SOFT = PageMask(PageSelection(3, 1, 1, 0.7), 4, temperature=0.5)
SIZE = 16


@pytest.fixture(autouse=True)
def _interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, modules that Triton imports at the first launch must be interpreted too."""
    if not HAS_GPU and find_spec("triton") is not None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def draw(tokens: int, heads: int, group: int, dtype: torch.dtype = torch.float64, size: int = SIZE) -> list:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, heads * group, size), (tokens, heads, size), (tokens, heads, size)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def results(function, inputs, packing, mask, kind, record_format):
    """The output, and the gradients of queries, keys and values for random gradients of the output."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    records = page_records(leaves[1], packing, mask.page_size, KINDS[kind], record_format)
    output = function(*leaves, records, packing, mask, leaves[0].shape[2] ** -0.5)
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


@pytest.mark.parametrize(("kind", "record_format"), FORMATS)
def test_records_are_what_serving_writes(kind, record_format):
    paged = make_batch([64], num_kv_heads=2, head_size=32, statistics=record_format, kind=kind)
    vectors, scales, spread = paged.statistics.records(paged.block_table[0, :1])
    if scales is not None:
        vectors = vectors * scales[..., None]
    records = page_records(paged.keys[0].double(), Packing((64,)), 8, KINDS[kind], record_format)
    assert torch.equal(records.vectors.transpose(0, 1).float(), vectors)
    assert (spread is None) == (records.spread is None)
    if spread is not None:
        assert torch.equal(records.spread.T.float(), spread)
    # Training computes in float32, so that a number may be rounded to its neighbour.
    single = page_records(paged.keys[0], Packing((64,)), 8, KINDS[kind], record_format)
    step = records.vectors.abs().amax(dim=-1) * 2**-6
    assert ((single.vectors - records.vectors).abs().amax(dim=-1) <= step).all()


@pytest.mark.parametrize("kind", TRAINABLE)
def test_rounding_is_straight_through(kind):
    key = torch.randn(24, 2, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    packing = Packing((24,))
    gradients = []
    for record_format in (None, KINDS[kind].formats[0]):
        leaf = key.clone().requires_grad_()
        records = page_records(leaf, packing, 8, KINDS[kind], record_format)
        parts = [records.vectors] if records.spread is None else [records.vectors, records.spread]
        gradients += torch.autograd.grad(parts, leaf, [torch.ones_like(part) for part in parts])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("kind", TRAINABLE)
@pytest.mark.parametrize("mask", [SOFT, replace(SOFT, temperature=None)], ids=["soft", "hard"])
def test_gradients_are_those_of_differences(kind, mask, monkeypatch):
    packing, inputs = Packing((22, 3)), [x.requires_grad_() for x in draw(25, heads=1, group=2, size=4)]
    constants: list[torch.Tensor] = []

    def attend(query, key, value):
        # Tensors without gradient in the paper stay unchanged.
        kept = iter(list(constants))

        def stop(x):
            if len(constants) < calls:
                constants.append(x.detach())
            return next(kept, x.detach())

        monkeypatch.setattr(reference, "stop_gradient", stop)
        records = page_records(key, packing, mask.page_size, KINDS[kind], None)
        return masked_attention(query, key, value, records, packing, mask, 0.5)

    calls = 100
    attend(*inputs)
    calls = len(constants)
    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)


@pytest.mark.parametrize("kind", TRAINABLE)
@pytest.mark.parametrize(("dense_tokens", "recent_pages"), [(0, 1), (0, 0), (33, 1), (60, 0)])
def test_pages_that_are_gathered_are_those_of_the_reference(kind, dense_tokens, recent_pages):
    """Some contexts are read whole, some end with an incomplete page and some with none, and some scores are equal."""
    mask = PageMask(PageSelection(4, 1, recent_pages, 0.7), 4, None, dense_tokens)
    query, key, value = draw(47, heads=2, group=2)
    key[8:28] = key[8:12].repeat(5, 1, 1)
    records = page_records(key, Packing((47,)), 4, KINDS[kind], None)
    results = []
    for attend in (gathered.newest_attention, reference.newest_attention):
        leaves = [x.clone().requires_grad_() for x in (query[-33:], key, value)]
        output = attend(*leaves, records, mask, 0.4)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        results.append([output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("tokens", "temperature", "gathers"), [(639, None, False), (640, None, True), (640, 0.5, False)]
)
def test_pages_are_gathered_where_that_takes_less_memory_than_all_logits(monkeypatch, tokens, temperature, gathers):
    """Five pages of four tokens, keys and values of 32 elements, for two query heads to a KV head."""
    found = []
    for module in (gathered, reference):
        monkeypatch.setattr(module, "newest_attention", lambda *_, module=module: found.append(module))
    query, key, value = torch.zeros(1, 4, 32), torch.zeros(tokens, 2, 32), torch.zeros(tokens, 2, 32)
    records = page_records(key, Packing((tokens,)), 4, KINDS["mean_and_spread"], None)
    newest_attention(query, key, value, records, PageMask(PageSelection(4, 1, 1, 0.7), 4, temperature), 0.4)
    assert found == [gathered if gathers else reference]


@pytest.mark.parametrize("kind", TRAINABLE)
def test_the_selection_loss_is_the_divergence_from_what_each_token_reads_densely(kind):
    """Compared with a loop over tokens and heads. The first tokens read everything and choose no page."""
    query, key, _ = draw(26, heads=2, group=3)
    records = page_records(key, Packing((26,)), SOFT.page_size, KINDS[kind], None)
    newest, scale, total = 17, 0.3, 0.0
    for position in range(26 - newest, 26):
        complete = (position + 1) // 4
        pages = list(range(1, complete - 1)) if complete > SOFT.selection.k else []
        for head in range(2):
            group = query[position, 3 * head : 3 * head + 3]
            dense = torch.stack([(q @ key[: position + 1, head].T * scale).softmax(0) for q in group]).mean(0)
            scores = []
            for page in pages:
                each = (group @ records.vectors[page, head].T).amax(dim=1)
                if records.spread is not None:
                    each = each + SOFT.selection.std_weight * group.norm(dim=1) * records.spread[page, head]
                scores.append(each.max() * scale)
            read = [dense[4 * page : 4 * page + 4].sum() for page in pages]
            for part, score in zip(read, scores, strict=True):
                likely = score - torch.stack(scores).logsumexp(0)
                total += part * ((part / sum(read)).log() - likely)
    shares = dense_shares(query[-newest:], key, SOFT.page_size, scale)
    got = selection_loss(query[-newest:], 26, records, shares, SOFT, scale)
    torch.testing.assert_close(got, torch.as_tensor(total), rtol=1e-12, atol=1e-12)


def test_the_selection_loss_brings_up_the_page_that_dense_attention_reads():
    """The hard mask gives an unread page no gradient. The loss alone brings it into the selection."""
    mask = replace(SOFT, temperature=None, selection=PageSelection(3, 1, 1, 1.0))
    query, key, value = draw(40, heads=1, group=1)
    query = query[-1:]
    # Only one key of page 5 matches the query. Pages 3 and 7 have a large deviation, so they are read.
    along = query[0] / query[0].norm()
    key -= (key * along).sum(dim=-1, keepdim=True) * along
    key[20] += 3 * along
    for begin in (12, 28):
        key[begin : begin + 4] *= 4
    leaves = [query.clone().requires_grad_(), key.clone().requires_grad_()]

    def records() -> PageRecords:
        return page_records(leaves[1], Packing((40,)), mask.page_size, KINDS["mean_and_spread"], None)

    def rank() -> int:
        grouped, found = leaves[0][None].transpose(1, 2), records()
        scores = reference.page_scores(grouped, found.vectors, found.spread, mask.selection.std_weight)[0, 0]
        return int((scores[1:9] > scores[5]).sum())

    before = rank()
    masked = newest_attention(leaves[0], leaves[1], value, records(), mask, 1.0)
    (hidden,) = torch.autograd.grad(masked.square().sum(), leaves[1])
    assert hidden[20:24].abs().max() == 0
    shares = dense_shares(query, key, mask.page_size, 1.0)
    for _ in range(40):
        loss = selection_loss(leaves[0], 40, records(), shares, mask, 1.0)
        for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
            leaf.data -= 0.05 * gradient
    assert (before, rank()) == (2, 0)


@pytest.mark.parametrize("kind", TRAINABLE)
def test_a_budget_of_all_pages_is_dense_attention(kind):
    inputs, packing = draw(40, heads=2, group=2), Packing((25, 15))
    leaves = [x.clone().requires_grad_() for x in inputs]
    parts = [
        [x.transpose(0, 1) for x in part] for part in zip(*(x.split(packing.lengths) for x in leaves), strict=True)
    ]
    dense = torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True).transpose(0, 1)
            for part in parts
        ]
    )
    weights = torch.randn(dense.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    wanted = [dense.detach(), *torch.autograd.grad((dense * weights).sum(), leaves)]
    for mask in (
        replace(SOFT, selection=PageSelection(6, 1, 1, 1.0)),
        replace(SOFT, temperature=None, selection=PageSelection(6, 1, 1, 1.0)),
        replace(SOFT, dense_tokens=25),
    ):
        for got, exact in zip(results(masked_attention, inputs, packing, mask, kind, None), wanted, strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "record_format"), FORMATS)
def test_the_hard_mask_is_a_served_decode_step(kind, record_format):
    context, heads, group, size = 150, 2, 2, 32
    paged = make_batch([context], heads, size, statistics=record_format, kind=kind)
    selection, scale = PageSelection(5, 1, 1, 0.8), size**-0.5
    query = torch.randn(context, heads * group, size, generator=torch.Generator().manual_seed(3)).bfloat16()
    records = page_records(paged.keys[0].double(), Packing((context,)), 8, KINDS[kind], record_format)
    records = PageRecords(
        records.vectors.float(), None if records.spread is None else records.spread.float(),
        records.stored, records.scales,
    )  # fmt: skip
    mask = PageMask(selection, 8, dense_tokens=60)
    got = masked_attention(query, paged.keys[0], paged.values[0], records, Packing((context,)), mask, scale)
    for position in (47, 60, 61, 95, 96, 127, 148):
        # Position 47 has 6 pages. Only the shortest sparse context makes it dense.
        token = paged.tokens(query[position].view(1, heads, group, size))
        token = replace(token, context_lens=torch.tensor([position + 1]))
        pages = token.context_lens // 8
        scores = served_scores.score_pages(token.query, paged.statistics, token.block_table, pages, 0.8)
        k = 5 if position + 1 > mask.dense_tokens else int(pages)
        chosen = served_pages.select_pages(scores, pages, k, 1, 1)
        wanted = served_attention.attend_pages(token, paged.cache, chosen, Softmax(scale))
        torch.testing.assert_close(got[position], wanted[0], rtol=2e-2, atol=2e-3)


def test_of_equal_scores_the_first_pages_are_read():
    mask = replace(SOFT, temperature=None)
    always = reference.always_read(33, 8, mask, torch.device("cpu"))
    read = reference.log_mask(torch.zeros(1, 33, 8), always, mask, 1.0)[0] == 0
    assert read[32].tolist() == [True, True, False, False, False, False, False, True]
    assert read[11].all()


def test_only_the_threshold_and_the_temperature_make_the_soft_mask():
    scores = torch.tensor([9.0, 4.0, 3.0, 1.0, 2.0, -5.0, 0.0, 8.0]).expand(1, 32, 8)
    always = reference.always_read(32, 8, SOFT, torch.device("cpu"))
    # One page of three is chosen: tau lies between the best scores, 4 and 3.
    logs = reference.log_mask(scores, always, SOFT, 0.25)[0, 31]
    wanted = torch.nn.functional.logsigmoid((scores[0, 31] - 3.5) * 0.5)
    wanted[[0, 7]] = 0
    torch.testing.assert_close(logs, wanted)


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (2, 3)]),
    kind=st.sampled_from(TRAINABLE),
    temperature=st.sampled_from([None, 1e-3, 1.0]),
    equal=st.booleans(),
)
def test_results_are_finite(lengths, heads, kind, temperature, equal):
    inputs, packing = draw(sum(lengths), *heads, torch.float32), Packing(tuple(lengths))
    if equal:
        inputs = [torch.ones_like(x) for x in inputs]
    mask = replace(SOFT, temperature=temperature)
    for result in results(masked_attention, inputs, packing, mask, kind, KINDS[kind].formats[0]):
        assert result.isfinite().all()


def assert_kernels_are_accurate(device, inputs, packing, mask, kind) -> list[torch.Tensor]:
    """Compares the kernels with the reference in float32 and returns their results."""
    from sparse_kernels.masked_attention import triton

    record_format = KINDS[kind].formats[0]
    exact, single = (
        results(reference.masked_attention, [x.to(dtype) for x in inputs], packing, mask, kind, record_format)
        for dtype in (torch.float64, torch.float32)
    )
    on_device = [x.float().to(device) for x in inputs]
    got = [x.cpu() for x in results(triton.masked_attention, on_device, packing, mask, kind, record_format)]
    for actual, wanted, low in zip(got, exact, single, strict=True):
        # A weight is 2 to the power of a logit plus log m minus a log-sum, all rounded; softmax rounds only the logit.
        assert_as_accurate(actual, wanted, low, roundings=3)
    return got


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
@pytest.mark.parametrize(
    ("kind", "group", "temperature"),
    [("mean_and_spread", 3, 0.5), ("quarters", 2, 0.5), ("mean_and_spread", 3, None), ("quarters", 2, None)],
)
def test_kernels_are_as_accurate_as_the_reference(device, kind, group, temperature):
    mask = PageMask(PageSelection(3, 1, 1, 0.7), 8, temperature)
    assert_kernels_are_accurate(device, draw(51, heads=1, group=group), Packing((46, 5)), mask, kind)


CASES = {
    "a context that is attended whole": ((38,), PageMask(PageSelection(3, 1, 1, 0.7), 4, dense_tokens=21), 2, 2, 16),
    "no page but those of the scores": ((33,), PageMask(PageSelection(4, 0, 0, 0.7), 2), 1, 1, 16),
    "many heads of a size that is padded": ((23, 1, 7), PageMask(PageSelection(3, 1, 1, 0.7), 4), 1, 16, 24),
    "several pages by their scores": ((45,), PageMask(PageSelection(6, 1, 1, 0.7), 4), 1, 2, 16),
    "larger pages": ((67,), PageMask(PageSelection(3, 1, 1, 0.7), 16), 1, 4, 16),
    "sequences without a complete page": ((3, 7), PageMask(PageSelection(3, 1, 1, 0.7), 8), 1, 2, 16),
}
"""Lengths of sequences, the mask, KV heads, query heads of a group, and the head size."""


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
@pytest.mark.parametrize("name", CASES)
def test_kernels_of_the_hard_mask_in_many_parts(device, name, monkeypatch):
    from sparse_kernels.masked_attention.triton import listed, lists, scores

    # Scores are computed for one piece at a time. Every page has several parts. One head's pages are in memory.
    monkeypatch.setattr(scores, "_BYTES_AT_ONCE", 1)
    for module in (scores, lists):
        monkeypatch.setattr(module, "PIECE", 32)
    for module in (lists, listed):
        monkeypatch.setattr(module, "PART_READERS", 4)
    monkeypatch.setattr(listed, "_JOINED_BYTES", 1)
    lengths, mask, heads, group, size = CASES[name]
    inputs = draw(sum(lengths), heads, group, size=size)
    assert_kernels_are_accurate(device, inputs, Packing(lengths), mask, "mean_and_spread")


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
@pytest.mark.parametrize("name", CASES)
def test_kernels_of_the_soft_mask_in_many_parts(device, name, monkeypatch):
    from sparse_kernels.masked_attention.triton import backward, forward, launches, score_gradients, scores
    from sparse_kernels.masked_attention.triton import mask as masks

    # A part is a piece, a piece has several tiles, and a tile has the smallest shape of a product.
    monkeypatch.setattr(scores, "_BYTES_AT_ONCE", 1)
    for module in (backward, forward, launches, masks, score_gradients, scores):
        monkeypatch.setattr(module, "PIECE", 32)
    for module, launch in (
        (forward, "_FORWARD"), (backward, "_QUERY_GRADIENT"), (backward, "_KEY_GRADIENT"),
        (score_gradients, "_SCORED_QUERIES"), (score_gradients, "_SCORED_RECORDS"),
    ):  # fmt: skip
        monkeypatch.setattr(module, launch, launches.Launch(rows=32, columns=16, num_warps=4, num_stages=1))
    lengths, mask, heads, group, size = CASES[name]
    inputs, mask = draw(sum(lengths), heads, group, size=size), replace(mask, temperature=0.5)
    assert_kernels_are_accurate(device, inputs, Packing(lengths), mask, "mean_and_spread")


@NO_TRITON
def test_more_pairs_than_are_numbered_are_refused():
    from sparse_kernels.masked_attention.triton import listed, scores

    tokens = 1 << 27
    query, key = (torch.empty(tokens, heads, 16, device="meta") for heads in (2, 1))
    call = scores.Call(Packing((tokens,)), PageMask(PageSelection(16, 1, 1, 1.0), 8), 1.0, 1, 2, 1, 16)
    with pytest.raises(ValueError, match=r"got 134217728 tokens that read up to 17 pages.*fewer than 2\^31"):
        listed.listed_attention(query, key, key, (key, None, None), call)


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
@pytest.mark.parametrize("temperature", [None, 0.5])
def test_kernels_read_the_first_of_equal_pages(device, temperature):
    query, key, value = draw(36, heads=1, group=2)
    # Equal keys and heads: gradients go to the first vector of the first head. Scores are exact.
    inputs = [query[:, :1].round().expand(-1, 2, -1), torch.ones_like(key), value]
    mask = PageMask(PageSelection(4, 1, 1, 0.7), 4, temperature)
    assert_kernels_are_accurate(device, inputs, Packing((36,)), mask, "quarters")


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
def test_a_page_that_nobody_reads_has_no_gradient(device):
    query, key, value = draw(24, heads=1, group=2)
    # Pages of one token. The fourth scores lowest, and is also not read as the newest.
    query[..., 0], key[..., 0] = 8.0, 1.0
    key[3, :, 0] = -8.0
    mask = PageMask(PageSelection(2, 1, 0, 0.0), 1)
    *_, of_key, of_value = assert_kernels_are_accurate(
        device, [query, key, value], Packing((24,)), mask, "mean_and_spread"
    )
    unread = (of_value == 0).all(dim=(1, 2))
    assert unread[3]
    assert not unread[0]
    assert (of_key[unread] == 0).all()


@pytest.mark.parametrize("device", [ON_CPU])
@pytest.mark.parametrize("temperature", [None, 0.5])
def test_kernels_read_nothing_that_they_did_not_write(device, temperature):
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN and the largest integers
    try:
        mask = PageMask(PageSelection(3, 1, 1, 0.7), 4, temperature, dense_tokens=15)
        inputs = draw(29, heads=2, group=3, size=24)
        assert_kernels_are_accurate(device, inputs, Packing((24, 5)), mask, "quarters")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("temperature", [0.5, None])
@pytest.mark.parametrize("kind", TRAINABLE)
def test_kernels_keep_to_the_reference_in_bfloat16(kind, temperature):
    packing, mask = Packing((1500, 37, 800)), PageMask(PageSelection(16, 1, 1, 1.0), 8, temperature, 64)
    inputs = [x.bfloat16().cuda() for x in draw(packing.num_tokens, heads=2, group=4, size=128)]
    record_format = KINDS[kind].formats[0]
    got = results(masked_attention, inputs, packing, mask, kind, record_format)
    again = results(masked_attention, inputs, packing, mask, kind, record_format)
    assert all(torch.equal(*pair) for pair in zip(got, again, strict=True))
    wanted = results(reference.masked_attention, inputs, packing, mask, kind, record_format)
    for actual, low in zip(got, wanted, strict=True):
        error = (actual.double() - low.double()).norm() / low.double().norm()
        assert error < 0.02
