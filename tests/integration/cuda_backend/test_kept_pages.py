"""Steps of a draft that read the pages of an earlier step."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from support.cuda_layer import (
    BLOCK,
    GROUP,
    HEADS,
    SCALE,
    SCALES,
    SIZE,
    common_metadata,
    plan_of,
    run,
    start_builder,
)
from support.paged import dense_attention

from vllm_sparse_plugin.attention.cuda import SparseCUDAMetadataBuilder
from vllm_sparse_plugin.attention.cuda import builder as builder_module
from vllm_sparse_plugin.config import resolve

LENGTHS = [300, 501, 407]
"""Contexts that complete a page within the draft: the first in the last step, the others in earlier steps."""
STEPS = 5
PLACES = 9
"""A budget of eight pages, and the page that a context completes next."""


@pytest.fixture
def keeping(builder):
    """A builder that keeps pages for up to four requests, in a buffer of stale pages."""
    builder.answers_sparsely = False
    builder.kept_pages = {"layer": torch.full((4, HEADS, PLACES), 3, dtype=torch.int32)}
    return builder


def drafted(layer, builder, change=None, name="layer"):
    """A draft of `STEPS` tokens.

    Returns:
        The outputs of the steps, those of attention to the kept pages, to the pages completed since and to the
        incomplete page, and the chosen pages.
    """
    outputs, expected, seen = [], [], []
    of_layer = SimpleNamespace(**{**vars(SCALES), "layer_name": name})

    def attended(query, cache, lengths, table):
        rows = torch.empty_like(query)
        pages = seen[0]
        for request, length in enumerate(lengths):
            tokens = cache[table[request].long()][:, :, :BLOCK].transpose(1, 2).flatten(0, 1)[:length]
            visible = torch.zeros(HEADS, length, dtype=torch.bool)
            visible[:, length // 8 * 8 :] = visible[:, LENGTHS[request] // 8 * 8 :] = True
            for head, listed in enumerate(pages[request, :, : PLACES - 1].tolist()):
                for page in listed:
                    visible[head, 8 * page : 8 * page + 8] = True
            heads = query[request].unflatten(0, (HEADS, GROUP))
            rows[request] = dense_attention(heads, tokens[..., :SIZE], tokens[..., SIZE:], SCALE, visible)
        return rows

    def then(query, new, cache, metadata):
        generator = torch.Generator().manual_seed(1)
        seen.append(builder.kept_pages["layer"].clone())
        expected.append(attended(query, cache, LENGTHS, metadata.block_table))
        for index in range(1, STEPS):
            lengths = [length + index for length in LENGTHS]
            common = common_metadata([1] * 3, lengths, [False] * 3)
            key, value = (torch.randn(3, HEADS, SIZE, generator=generator).bfloat16() for _ in range(2))
            layer.do_kv_cache_update(SCALES, key, value, cache, common.slot_mapping)
            # No step after the first reads statistics.
            cache[:, :, BLOCK:] = torch.nan
            built = builder.build_for_drafting(common, 0).of_reading_steps()
            if change is not None:
                change(built)
            query = torch.randn(3, HEADS * GROUP, SIZE, generator=generator).bfloat16()
            outputs.append(torch.full_like(query, torch.nan))
            layer.forward(of_layer, query, key, value, cache, built, outputs[-1])
            expected.append(attended(query, cache, lengths, common.block_table_tensor))

    first, _, _ = run(layer, builder, common_metadata([1] * 3, LENGTHS, [False] * 3), drafts=True, then=then)
    return torch.stack([first.bfloat16(), *outputs]), torch.stack(expected), seen[0]


@pytest.mark.parametrize("layer", ["unique", "quest"], indirect=True)
def test_steps_after_the_first_read_its_pages_and_those_completed_since(layer, keeping):
    outputs, expected, kept = drafted(layer, keeping)
    torch.testing.assert_close(outputs, expected, atol=1e-2, rtol=1e-2)
    for request, length in enumerate(LENGTHS):
        assert (kept[request, :, :-1] < length // 8).all()
        assert (kept[request, :, :-1] == length // 8 - 1).any(dim=-1).all()
        assert (kept[request, :, -1] == length // 8).all()
    assert (kept[3] == 3).all()


def test_without_the_next_page_its_tokens_are_not_read(layer, keeping):
    """The comparison notices it."""

    def forget(metadata):
        metadata.kept.of_layers["layer"][..., -1] = -1

    outputs, expected, _ = drafted(layer, keeping, forget)
    assert not torch.allclose(outputs[-1], expected[-1], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(outputs[0], expected[0], atol=1e-2, rtol=1e-2)


def test_each_step_may_choose(layer, builder):
    builder.answers_sparsely = False
    _, _, metadata = run(layer, builder, common_metadata([1, 1], [300, 500], [False, False]), drafts=True)
    assert metadata.kept is None


def test_steps_of_a_draft_share_all_but_what_they_do_with_kept_pages(layer, keeping):
    common = common_metadata([1] * 3, LENGTHS, [False] * 3)
    choosing = keeping.build_for_drafting(common, 0)
    reading = choosing.of_reading_steps()
    assert (choosing.kept.are_read, reading.kept.are_read) == (False, True)
    assert reading.kept.of_layers is choosing.kept.of_layers
    assert all(
        getattr(reading, item.name) is getattr(choosing, item.name) for item in fields(choosing) if item.name != "kept"
    )
    assert keeping.build(0, common).kept is None


def test_a_layer_with_an_anchor_reads_what_the_anchor_kept(layer, keeping):
    own, _, _ = drafted(layer, keeping)

    def follow(metadata):
        layer.bind(replace(layer.plan, anchor="layer", anchor_heads=torch.tensor([1, 0])))

    other, _, _ = drafted(layer, keeping, follow, name="follower")
    assert not torch.allclose(other[1:], own[1:], atol=1e-2)
    pages = keeping.kept_pages["layer"]
    assert (pages[:3, 0] != pages[:3, 1]).any()

    def follow_same(metadata):
        layer.bind(replace(layer.plan, anchor="layer", anchor_heads=None))

    layer.bind(replace(layer.plan, anchor=None, anchor_heads=None))
    same, _, _ = drafted(layer, keeping, follow_same, name="follower")
    assert torch.equal(same, own)


@pytest.mark.parametrize(("score_every", "places"), [(1, None), (8, 66), (16, 67)])
def test_the_builder_makes_room_for_the_layers_that_choose(monkeypatch, score_every, places):
    config = resolve({"lossless": {"draft_tokens": 16, "score_every": score_every}}, "unique")
    choosing = plan_of(resolve({"selection": {"budget_tokens": 520}}, "unique"))
    plans = {"a": choosing, "b": replace(choosing, anchor="a"), "c": plan_of(resolve(None, "dense"))}
    _, layers, others = start_builder(monkeypatch, plans)
    monkeypatch.setattr(builder_module, "report_memory", lambda *_: None)
    for each in layers.values():
        each.attn_backend.config = lambda: config
    spec = SimpleNamespace(dtype=torch.bfloat16)
    made = SparseCUDAMetadataBuilder(spec, list(layers), *others[1:])
    if places is None:
        assert made.kept_pages is None
        return
    assert {name: tuple(pages.shape) for name, pages in made.kept_pages.items()} == {"a": (16, HEADS, places)}
    assert (made.kept_pages["a"] == -1).all()
