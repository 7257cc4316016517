"""Evictions in all layers at once, compared with loops, in torch and in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from sparse_kernels.batch import Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.compaction import (
    CompactionRule,
    HeldBlocks,
    LayerCaches,
    QueryRing,
    add_votes_of_layers,
    keep_tokens,
    reference,
)
from sparse_kernels.page_statistics import KINDS, StatisticsLayout, update_page_statistics
from support.snapkv import votes_of

BLOCK, HEADS, LAYERS = 32, 2, 3
RULE = CompactionRule(window_tokens=8, pool_tokens=5, sink_tokens=4)


def layers_of(blocks: int, size: int = 16, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple:
    """Caches of some layers, and a block table without order whose first entry is odd in memory."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(LAYERS, blocks + 3, HEADS, BLOCK, 2 * size, generator=generator)
    # Keys have a common direction, and some of them are alike.
    rows[..., :size] += 2 * torch.randn(LAYERS, 1, HEADS, 1, size, generator=generator)
    rows = rows.to(dtype)
    table = torch.randperm(blocks + 3, generator=generator)[: blocks + 1].int()
    return rows, table[1:]


def caches_of(rows: torch.Tensor, scale: float | None = None) -> LayerCaches:
    scales = None if scale is None else torch.tensor(scale)
    return LayerCaches(tuple(KVCache.from_rows(of_layer, 8, None, scales, scales) for of_layer in rows))


def tokens_of(rows: torch.Tensor, table: torch.Tensor, count: int) -> torch.Tensor:
    """Keys and values in text order, `[layers, count, heads, 2 * size]`."""
    return rows[:, table.long()].transpose(2, 3).flatten(1, 2)[:, :count]


@pytest.fixture(params=["torch", "triton"])
def kernels(request, monkeypatch):
    """Runs the operations in torch, or in Triton's interpreter."""
    if request.param == "torch":
        return request.param
    request.getfixturevalue("interpreted")
    from sparse_kernels.compaction import held, held_triton

    def add(votes, query, first, table, caches, softmax, scales=None):
        stacked = None if scales is None else torch.stack(list(scales))
        held_triton.add_votes(votes, query, first, table, caches, softmax, stacked)

    monkeypatch.setitem(globals(), "add_votes_of_layers", add)
    monkeypatch.setattr(
        held.reference, "move_tokens",
        lambda kept, table, first, cache: held_triton.move_in_place(kept[None], table, first, LayerCaches((cache,))),
    )  # fmt: skip
    return request.param


@pytest.mark.parametrize(("queries", "group"), [(1, 2), (8, 3), (50, 4)])
@pytest.mark.parametrize("count", [64, 65, 190])
@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, False), (2.0, False), (0.0, True)])
def test_votes_are_the_attention_of_the_queries_in_every_layer(kernels, queries, group, count, softcap, sinks):
    rows, table = layers_of(6)
    query = torch.randn(LAYERS, queries, HEADS * group, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    softmax, votes = [Softmax(0.25, softcap)] * LAYERS, torch.ones(LAYERS, HEADS, count + 5)
    if sinks:
        logits = 8 + 4 * torch.rand(LAYERS, HEADS * group, generator=torch.Generator().manual_seed(2)).bfloat16()
        softmax = [Softmax(0.25, softcap, of_layer) for of_layer in logits]
    add_votes_of_layers(votes, query, count - queries, table, caches_of(rows), softmax)
    keys = tokens_of(rows, table, count)[..., :16]
    for layer in range(LAYERS):
        for head in range(HEADS):
            of_head = query[layer][:, head * group : (head + 1) * group]
            expected = torch.tensor(votes_of(of_head, keys[layer, :, head], count - 1, softmax[layer], head * group))
            assert (votes[layer, head, :count] - 1 - expected).abs().max() < 1e-4 * queries * group
            assert (expected.sum() < 0.99 * queries * group) == sinks
    assert (votes[..., count:] == 1).all()


def test_votes_over_8_bit_keys_and_queries_count_their_scales(kernels):
    rows, table = layers_of(4, dtype=torch.float8_e4m3fn)
    query = torch.randn(LAYERS, 8, 4, 16, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    votes = torch.zeros(2, LAYERS, HEADS, 100)
    scales = [torch.tensor(0.5)] * LAYERS
    add_votes_of_layers(votes[0], query, 92, table, caches_of(rows, 2.0), [Softmax(0.25)] * LAYERS, scales)
    plain = caches_of(rows.bfloat16())
    add_votes_of_layers(votes[1], query.bfloat16(), 92, table, plain, [Softmax(0.25)] * LAYERS)
    assert (votes[0] - votes[1]).abs().max() < 1e-4


def test_votes_follow_a_scale_that_reloaded_weights_bring(kernels):
    """vLLM writes the new scale of a layer's keys where the old one was. An engine makes its caches once."""
    rows, table = layers_of(4, dtype=torch.float8_e4m3fn)
    query = torch.randn(LAYERS, 8, 4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    votes, caches = torch.zeros(3, LAYERS, HEADS, 100), caches_of(rows, 2.0)
    add_votes_of_layers(votes[0], query, 92, table, caches, [Softmax(0.25)] * LAYERS)
    for cache in caches.caches:
        cache.key_scale.fill_(6.0)
    add_votes_of_layers(votes[1], query, 92, table, caches, [Softmax(0.25)] * LAYERS)
    add_votes_of_layers(votes[2], query, 92, table, caches_of(rows, 6.0), [Softmax(0.25)] * LAYERS)
    assert not torch.equal(votes[0], votes[2])
    assert torch.equal(votes[1], votes[2])


@pytest.mark.parametrize(("first", "end", "count"), [(1, 2, 64), (1, 5, 160), (3, 5, 175), (2, 4, 160), (4, 5, 161)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("protects", [False, True])
def test_tokens_move_to_their_places_in_every_layer_and_nothing_else_changes(
    kernels, first, end, count, dtype, protects
):
    rows, table = layers_of(6, dtype=dtype)
    before = rows.clone()
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(LAYERS, HEADS, count, generator=generator)
    protected = torch.rand(LAYERS, HEADS, count, generator=generator) < 0.1 if protects else None
    held = HeldBlocks(table, count, first, end, protected)
    kept = keep_tokens(scores, held, caches_of(rows), RULE)
    assert kept.shape == (LAYERS, HEADS, (end - first) * BLOCK)
    old, new = (tokens_of(each.view(torch.int8), table, count) for each in (before, rows))
    for layer in range(LAYERS):
        for head in range(HEADS):
            here = None if protected is None else protected[layer, head]
            chosen = reference.choose_tokens(
                scores[layer, head][None], kept.shape[2], end * BLOCK, count - 8, RULE, here
            )
            assert torch.equal(kept[layer, head], chosen[0])
            assert torch.equal(new[layer, first * BLOCK : end * BLOCK, head], old[layer, chosen[0], head])
    assert torch.equal(new[:, : first * BLOCK], old[:, : first * BLOCK])
    assert torch.equal(new[:, end * BLOCK :], old[:, end * BLOCK :])
    others = torch.ones(rows.shape[1], dtype=torch.bool)
    others[table.long()] = False
    assert torch.equal(rows[:, others].view(torch.int8), before[:, others].view(torch.int8))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("moved", [32, 96, 160])
def test_tokens_move_in_place_however_far_they_move(moved):
    """All targets may be sources, and a tile's targets may be its own sources."""
    from sparse_kernels.compaction import held_triton

    rows, table = layers_of(7)
    expected, generator = rows.clone(), torch.Generator().manual_seed(3)
    count = 7 * BLOCK
    for most in (count, moved, moved + 1):
        kept = torch.stack([torch.randperm(most, generator=generator)[:moved].sort().values for _ in range(6)])
        kept = (kept + (count - most)).view(LAYERS, HEADS, moved)
        first = 7 - moved // BLOCK
        held_triton.move_in_place(kept, table, first, caches_of(rows))
        for layer in range(LAYERS):
            reference.move_tokens(kept[layer], table, first, caches_of(expected).caches[layer])
        assert torch.equal(rows, expected)


def test_statistics_are_those_of_the_keys_after_every_eviction():
    layout = StatisticsLayout(8, 16, "int4", kind=KINDS["quarters"])
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(LAYERS, 9, HEADS, BLOCK + layout.rows(BLOCK), 32, generator=generator).bfloat16()
    caches = LayerCaches(
        tuple(KVCache.from_rows(each[:, :, :BLOCK], 8, layout.views(each[:, :, BLOCK:], BLOCK)) for each in memory)
    )
    table, scores = torch.randperm(9, generator=generator).int(), torch.rand(LAYERS, HEADS, 250, generator=generator)
    for held in (HeldBlocks(table, 150, 2, 4), HeldBlocks(table[2:], 100, 1, 3)):
        keep_tokens(scores[..., : held.num_tokens], held, caches, RULE)
        blocks = held.block_table[held.first_block : held.end_block].long()
        for cache in caches.caches:
            written = [part[blocks].clone() for part in cache.statistics.parts]
            pages = torch.arange(BLOCK // 8)
            update_page_statistics(
                cache.keys, cache.statistics, blocks.repeat_interleave(len(pages)), pages.repeat(len(blocks))
            )
            assert all(
                torch.equal(part[blocks], was) for part, was in zip(cache.statistics.parts, written, strict=True)
            )


@pytest.mark.parametrize("form", ["torch", "triton"])
def test_a_ring_keeps_the_newest_queries_of_each_request(request, form):
    ring = QueryRing(2, 3, 4, (2, 16), 20, torch.bfloat16, torch.device("cpu"))
    seen: dict[int, list[torch.Tensor]] = {0: [], 2: []}
    generator = torch.Generator().manual_seed(0)
    if form == "triton":
        request.getfixturevalue("interpreted")
        from sparse_kernels.compaction import held_triton
    for counts in ({0: 1, 2: 9}, {2: 3, 0: 1}, {0: 2}, {0: 1, 2: 1}, {2: 4}):
        places, parts = [], []
        for slot, count in counts.items():
            begin = len(seen[slot])
            # Only the newest queries of a chunk have a place.
            newest = [position >= begin + count - 4 for position in range(begin, begin + count)]
            places += [ring.place(slot, begin + index, 4) if kept else -1 for index, kept in enumerate(newest)]
            parts.append(torch.randn(2, count, 6, 16, generator=generator).bfloat16()[:, :, 2:4])
            seen[slot] += parts[-1].unbind(dim=1)
        ring.begin_step(torch.tensor(places, dtype=torch.int32).numpy())
        query = torch.cat([*parts, torch.full((2, 3, 2, 16), torch.nan)], dim=1).bfloat16()
        for layer in range(2):
            if form == "triton":
                held_triton.write_queries(query[layer], ring._places[: query.shape[1]], ring._queries[layer])
            else:
                ring.write(layer, query[layer])
    for slot, queries in seen.items():
        for count in range(1, min(4, len(queries)) + 1):
            assert torch.equal(ring.newest(slot, len(queries), count), torch.stack(queries[-count:], dim=1))
    assert not ring._queries[:, 1].any()


def test_what_does_not_fit_is_refused():
    rows, table = layers_of(6)
    caches, scores = caches_of(rows), torch.zeros(LAYERS, HEADS, 160)
    for first, end in ((0, 4), (4, 4), (2, 6)):
        with pytest.raises(ValueError, match=f"first_block and end_block: got {first} to {end} of 160 tokens, allowed"):
            keep_tokens(scores, HeldBlocks(table, 160, first, end), caches, RULE)
    with pytest.raises(ValueError, match="in_order_of_votes: got true, allowed: false"):
        keep_tokens(scores, HeldBlocks(table, 160, 2, 4), caches, replace(RULE, in_order_of_votes=True))
    with pytest.raises(ValueError, match=r"scores: got \[3, 2, 160\], allowed: \[3, 2, 161\]"):
        keep_tokens(scores, HeldBlocks(table, 161, 2, 4), caches, RULE)
    with pytest.raises(ValueError, match=r"votes: got \[3, 2, 160\], allowed: at least \[3, 2, 161\]"):
        add_votes_of_layers(scores, torch.zeros(LAYERS, 1, 4, 16), 160, table, caches, [Softmax(1.0)] * LAYERS)
    for softmax in ([Softmax(1.0)] * 2, [*[Softmax(1.0)] * 2, Softmax(1.0, 0.0, torch.zeros(4))]):
        with pytest.raises(ValueError, match=r"softmax: got \d of \d forms, allowed: 3 of one form"):
            add_votes_of_layers(scores, torch.zeros(LAYERS, 1, 4, 16), 100, table, caches, softmax)
    with pytest.raises(ValueError, match="caches: got 2 shapes, allowed: 1"):
        LayerCaches((caches.first, KVCache.from_rows(rows[0][:, :1], 8)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("size", "count"), [(64, 160), (128, 175), (256, 190)])
def test_a_gpu_evicts_what_a_cpu_does(dtype, size, count):
    rows, table = layers_of(-(-count // BLOCK), size, dtype)
    query = torch.randn(LAYERS, 20, 4 * HEADS, size, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = []
    for device in ("cpu", "cuda"):
        here, blocks = rows.to(device, copy=True), table.to(device)
        scale = torch.tensor(2.0, device=device) if dtype.itemsize == 1 else None
        caches = LayerCaches(tuple(KVCache.from_rows(each, 8, None, scale, scale) for each in here))
        votes = torch.zeros(LAYERS, HEADS, count, device=device)
        sinks = torch.linspace(0, 4, LAYERS * 4 * HEADS, device=device).view(LAYERS, -1)
        softmax = [Softmax(size**-0.5, 0.0, sink) for sink in sinks]
        add_votes_of_layers(votes, query.to(device), count - 20, blocks, caches, softmax)
        found.append((votes.cpu(), caches, here, blocks))
    assert (found[0][0] - found[1][0]).abs().max() < 1e-3
    protected = torch.zeros(LAYERS, HEADS, count, dtype=torch.bool)
    protected[..., 40:60] = True
    for _, caches, _, blocks in found:
        held = HeldBlocks(blocks, count, 2, 5, protected.to(blocks.device))
        keep_tokens(found[0][0].to(blocks.device), held, caches, RULE)
    assert torch.equal(found[0][2].view(torch.int8), found[1][2].cpu().view(torch.int8))
