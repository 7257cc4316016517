"""Which layers choose pages, and which layers read the pages of another."""

from types import SimpleNamespace

import pytest
import torch

from vllm_sparse_plugin.attention.anchors import anchors_of, expect_selecting, heads_of_anchors
from vllm_sparse_plugin.config import ResolvedConfig, resolve
from vllm_sparse_plugin.errors import ConfigurationError


def layers(*indices: int, heads: int = 8) -> dict[str, SimpleNamespace]:
    return {f"model.layers.{index}.attn": SimpleNamespace(num_kv_heads=heads) for index in indices}


def anchors(found: dict[str, SimpleNamespace], anchor_layers: int | tuple[int, ...], everywhere=None) -> dict[int, int]:
    """The anchor of each layer that has one, by index."""
    of = anchors_of(found, anchor_layers, everywhere or found)
    return {int(name.split(".")[2]): int(anchor.split(".")[2]) for name, anchor in of.items()}


def test_every_how_manyth_layer_chooses():
    assert anchors(layers(*range(5)), 1) == {}
    assert anchors(layers(*range(5)), 2) == {1: 0, 3: 2}
    assert anchors(layers(*range(5)), 4) == {1: 0, 2: 0, 3: 0}


def test_a_number_counts_the_layers_that_select_pages_in_the_order_of_the_model():
    assert anchors(layers(23, 5, 11, 17), 2) == {11: 5, 23: 17}


def test_listed_layers_choose_and_so_does_the_first():
    assert anchors(layers(2, 3, 4, 5), (3, 5)) == {4: 3}


def test_layers_with_other_heads_have_other_anchors():
    found = layers(0, 1, 4) | layers(2, 3, heads=4)
    assert anchors(found, 4) == {1: 0, 3: 2}


@pytest.mark.parametrize("value", [0, 65, True, 2.0, "2", None, [], [1, 1], [3, 2], [-1], [1024], [True], {}, [[1]]])
def test_other_values_are_refused(value):
    with pytest.raises(ConfigurationError) as caught:
        resolve({"selection": {"anchor_layers": value}}, "unique")
    allowed = "an integer from 1 to 64, or ascending layers"
    assert str(caught.value) == f"sparse_attention.selection.anchor_layers: got {value!r}, allowed: {allowed}"


def test_settings_are_read():
    assert resolve({}, "unique").anchor_layers == 1
    assert resolve({"selection": {"anchor_layers": 3}}, "quest").anchor_layers == 3
    assert resolve({"selection": {"anchor_layers": [0, 4, 9]}}, "unique").anchor_layers == (0, 4, 9)
    assert resolve({}, "dense").anchor_layers == 1


@pytest.mark.parametrize("section", ["routing", "stopping", "compaction"])
def test_settings_beside_which_each_layer_chooses(section):
    preset = {"routing": "sinkrouter", "stopping": "art", "compaction": "snapkv"}[section]
    policy = {"selection": {"policy": "unique", "anchor_layers": 2}}
    with pytest.raises(ConfigurationError, match=f"anchor_layers: got a value with {section}, allowed: none"):
        resolve(policy, preset)
    assert resolve({"selection": {"policy": "unique"}}, preset).anchor_layers == 1


def test_listed_layers_must_select_pages():
    found = layers(0, 1, 2)
    selecting = {name: layer for name, layer in found.items() if not name.startswith("model.layers.1.")}
    expect_selecting(found, selecting, (0, 2))
    expect_selecting(found, selecting, 2)
    with pytest.raises(ConfigurationError, match="got layer 1, allowed: layers that attend to their whole context"):
        expect_selecting(found, selecting, (0, 1))


def config(anchor_layers, anchor_heads) -> ResolvedConfig:
    return resolve({"selection": {"anchor_layers": anchor_layers, "anchor_heads": anchor_heads}}, "unique")


def heads(found, settings: ResolvedConfig, first: int = 0, everywhere=None) -> dict[int, list[int]]:
    of_layers = anchors_of(found, settings.anchor_layers, everywhere or found)
    of = heads_of_anchors(of_layers, found, settings, first, torch.device("cpu"))
    return {int(name.split(".")[2]): chosen.tolist() for name, chosen in of.items()}


def test_heads_read_the_pages_of_the_heads_that_they_are_paired_with():
    settings = config([0, 2], [[], [1, 0], [], [0, 0], []])
    assert heads(layers(*range(5), heads=2), settings) == {1: [1, 0], 3: [0, 0]}


def test_a_worker_takes_its_own_heads():
    settings = config([0], [[], [1, 0, 3, 2]])
    assert heads(layers(0, 1, heads=2), settings) == {1: [1, 0]}
    assert heads(layers(0, 1, heads=2), settings, first=2) == {1: [1, 0]}
    across = config([0], [[], [1, 2, 3, 0]])
    with pytest.raises(ConfigurationError, match=r"anchor_heads: got \[1, 2, 3, 0\] for layer 1, allowed: as many as"):
        heads(layers(0, 1, heads=2), across)
    with pytest.raises(ConfigurationError, match=r"got \[1, 0, 3, 2\] for layer 1"):
        heads(layers(0, 1, heads=8), settings)


def test_layers_behind_an_anchor_that_is_not_listed_read_the_same_heads():
    """The first layer of a pipeline stage chooses, though its heads were paired with those of another anchor."""
    settings = config([0, 6], [[], [1, 0], [1, 0], [1, 0], [1, 0], [1, 0], [], [1, 0]])
    assert heads(layers(3, 4, 5, 6, 7, heads=2), settings) == {7: [1, 0]}


def test_layers_whose_anchor_has_another_block_table_choose():
    """vLLM divides layers of one kind among several block tables, each with its own metadata."""
    settings = config([0, 3], [[], [1, 0], [1, 0], [], [0, 0], [1, 1], [0, 0]])
    model = layers(*range(7), heads=2)
    even = {name: layer for place, (name, layer) in enumerate(model.items()) if place % 2 == 0}
    odd = {name: layer for place, (name, layer) in enumerate(model.items()) if place % 2}
    assert anchors(even, (0, 3), model) == {2: 0}
    assert heads(even, settings, everywhere=model) == {2: [1, 0]}
    assert heads(odd, settings, everywhere=model) == {5: [1, 1]}


@pytest.mark.parametrize("value", [1, [], "a", [0], [[-1]], [["a"]], [[True]], [[1024]], {}])
def test_other_heads_are_refused(value):
    with pytest.raises(ConfigurationError) as caught:
        config([0], value)
    allowed = "null, or a list of KV heads for each layer"
    assert str(caught.value) == f"sparse_attention.selection.anchor_heads: got {value!r}, allowed: {allowed}"


def test_heads_need_listed_anchors():
    with pytest.raises(
        ConfigurationError, match="anchor_heads: got heads with anchor_layers 2, allowed: null, or with"
    ):
        config(2, [[], [0]])
