"""The command `vllm-sparse anchors`: which layers choose pages, and which KV head reads whose."""

import json
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch
import yaml

from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.config.fingerprint import fingerprint_of
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.cli import main
from vllm_sparse_plugin.tools.diagnostics import anchors
from vllm_sparse_plugin.tools.diagnostics.anchors import Caught, Source
from vllm_sparse_plugin.tools.diagnostics.forward import LayerInputs, PagedLayer

GROUP, SIZE, QUERIES, TOKENS, PAGE = 2, 16, 5, 83, 8
SELECTION = resolve({"selection": {"budget_tokens": 32}}, "unique").selection


def layer(heads: int = 4) -> LayerInputs:
    keys, values = torch.randn(2, heads, TOKENS, SIZE)
    return LayerInputs(torch.randn(QUERIES, heads, GROUP, SIZE), keys, values, 1.0)


def caught(layers: list[int], heads: int = 4) -> Caught:
    return Caught(layers, torch.rand(len(layers), len(layers), heads, heads, dtype=torch.float64), QUERIES)


def test_caught_weight_is_what_a_loop_finds():
    layers = [layer(), layer(), layer()]
    (found,) = anchors.caught_in(layers, SELECTION, 0)
    assert (found.layers, found.queries) == ([0, 1, 2], QUERIES)
    read = [PagedLayer(inputs, SELECTION).read() for inputs in layers]
    for index, inputs in enumerate(layers):
        for anchor in range(3):
            for head, other in ((0, 0), (1, 3), (3, 1)):
                total = 0.0
                for query, context in enumerate(inputs.context_lens.tolist()):
                    logits = inputs.query[query, head].double() @ inputs.keys[head, :context].double().T
                    weights = logits.softmax(dim=-1).mean(dim=0)
                    pages = read[anchor][query, other].nonzero().flatten().tolist()
                    total += sum(float(weights[page * PAGE : (page + 1) * PAGE].sum()) for page in pages)
                expected = total / QUERIES if anchor <= index else 0.0
                assert float(found.weight[index, anchor, head, other]) == pytest.approx(expected, rel=1e-5)
    # A layer's own pages are those that `diagnose` measures.
    own = found.weight.diagonal(dim1=0, dim2=1).diagonal(dim1=0, dim2=1)
    expected = [PagedLayer(inputs, SELECTION).quality().mass.mean(dim=0) for inputs in layers]
    torch.testing.assert_close(own.float(), torch.stack(expected), atol=1e-5, rtol=0)


def test_layers_of_another_kind_and_dense_layers_are_left_out():
    layers = [layer(), None, layer(), layer(heads=2), layer()]
    four, two = anchors.caught_in(layers, SELECTION, 1)
    assert (four.layers, four.heads, two.layers, two.heads) == ([2, 4], 4, [3], 2)
    for few in ([None, layer()], [layer(), layer()]):
        with pytest.raises(ConfigurationError, match="model: got layers that select pages: 1, allowed: two or more"):
            anchors.caught_in(few, SELECTION, 1)


def test_anchors_are_placed_where_the_least_weight_is_lost():
    for layers in range(1, 7):
        loss = torch.rand(layers, layers)
        for count in range(1, layers + 1):
            placed = anchors.place_anchors(loss, count)
            plans = []
            for others in combinations(range(1, layers), count - 1):
                chosen = (0, *others)
                plans.append([max(anchor for anchor in chosen if anchor <= index) for index in range(layers)])
            lost = [sum(float(loss[pair]) for pair in enumerate(plan)) for plan in plans]
            assert placed in plans
            assert sum(float(loss[pair]) for pair in enumerate(placed)) == pytest.approx(min(lost))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_heads_are_paired_within_a_rank(ranks):
    weight = torch.rand(4, 4)
    heads = anchors.pair_heads(weight, ranks)[1].tolist()
    for head, found in enumerate(heads):
        allowed = [other for other in range(4) if other * ranks // 4 == head * ranks // 4]
        assert found == max(allowed, key=lambda other: float(weight[head, other]))


def test_an_anchor_is_placed_before_the_layer_that_loses_most():
    group = Caught([0, 1, 2, 3], torch.full((4, 4, 2, 2), 0.9, dtype=torch.float64), 1)
    group.weight[2:, :2] = 0.1
    assert [source.anchor for source in anchors.sources_of_anchors([group], 2, 1).values()] == [0, 0, 2, 2]
    group.weight[2, 0] = torch.tensor([[0.1, 0.8], [0.7, 0.1]])
    assert anchors.sources_of_anchors([group], 4, 1)[2] == Source(0, [1, 0])
    assert anchors.sources_of_anchors([group], 4, 2)[2] == Source(0, [0, 1])


def test_every_nth_layer_is_an_anchor_as_a_server_counts():
    groups = [caught([1, 2, 6]), caught([3, 4], heads=2)]
    anchor = {index: source.anchor for index, source in anchors.sources_by_stride(groups, 4).items()}
    assert anchor == {1: 1, 2: 1, 3: 3, 4: 3, 6: 6}
    assert all(source.anchor == index for index, source in anchors.sources_by_stride(groups, 1).items())


def test_the_weight_read_is_that_of_the_pairs():
    group = caught([3, 7])
    read = anchors.weight_read([group], {3: Source(3, [0, 1, 2, 3]), 7: Source(3, [2, 2, 0, 1])})
    assert read[3] == pytest.approx(float(group.weight[0, 0].diagonal().mean()))
    pairs = [group.weight[1, 0, head, other] for head, other in enumerate([2, 2, 0, 1])]
    assert read[7] == pytest.approx(float(sum(pairs)) / 4)


def run(monkeypatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["vllm-sparse", "anchors", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


REFUSED = {
    "share": (["--share", "1"], "share: got 1, allowed: 2 to 16"),
    "budget": (
        ["--budget", "2047"],
        "sparse_attention.selection.budget_tokens: got 2047, allowed: a multiple of page_size",
    ),
    "ranks": (
        ["--tensor-parallel-size", "3"],
        "tensor_parallel_size: got 3, allowed: a divisor or a multiple of the model's 2 KV heads",
    ),
    "backend": (
        ["--attention-backend", "snapkv"],
        "attention_backend: got 'snapkv', allowed: unique, quest",
    ),
    "short context": (
        ["--context", "2048"],
        "context: got 2048 tokens, allowed: more than the budget, from 4096 to the model's 32768",
    ),
    "long context": (["--context", "32769"], "context: got 32769 tokens, allowed: more than the budget, from 4096 to "),
    "large budget": (
        ["--budget", "32768"],
        "context: got 32768 tokens, allowed: more than the budget, from 32769 to the model's 32768",
    ),
    "one prompt": (["--prompts", "one.jsonl"], "prompts: got one in 'one.jsonl', allowed: two or more"),
    "short prompts": (["--prompts", "short.jsonl"], "prompts: got a text of 3 tokens, allowed: the longest context's "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_anchors_refuses(case, monkeypatch, capsys, tmp_path):
    arguments, sentence = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    for name, lines in (("one.jsonl", 1), ("short.jsonl", 2)):
        Path(name).write_text('{"prompt": "a b"}\n' * lines)
    assert run(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert out in ("", "Writing the documents\n")
    assert len(err.splitlines()) == 1
    assert err.removeprefix("error: ").startswith(sentence)


def test_anchors_writes_a_preset_that_reads_what_it_says(monkeypatch, capsys, tmp_path, model):
    prompts, preset, report = (tmp_path / name for name in ("prompts.jsonl", "preset.yaml", "report.jsonl"))
    texts = [" ".join(f"line {i}: return value_{i * step % 101}" for i in range(60)) for step in (37, 41, 43, 47)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    arguments = ["--prompts", str(prompts), "--context", "300", "--budget", "64", "--share", "3"]
    arguments += ["--tensor-parallel-size", "2", "--output", str(preset), "--json", str(report)]
    assert not run(monkeypatch, *arguments)
    resolved = resolve({"config": str(preset)}, "unique")
    selection = resolved.selection
    assert (selection.name(), selection.budget_tokens, selection.fingerprint) == ("unique", 64, fingerprint_of(model))
    assert len(resolved.anchor_layers) == 3
    assert len(resolved.anchor_heads) == 8
    for index, heads in enumerate(resolved.anchor_heads):
        # With as many ranks as KV heads, a head reads the pages of the same head.
        assert heads == (() if index in resolved.anchor_layers else (0, 1))
    described, found = map(json.loads, report.read_text().splitlines())
    assert described["model"] == "needle-8m"
    assert found["data"] == "prompts.jsonl, 2 texts to fit to, 2 to judge by, a context of 300 tokens"
    assert tuple(found["anchor_layers"]) == resolved.anchor_layers
    assert [row["layer"] for row in found["rows"]] == list(range(8))
    for row in found["rows"]:
        if row["layer"] in resolved.anchor_layers:
            assert row["anchor"] == row["layer"]
            assert row["anchors"] == row["each"]
    for name, weight in found["weight"].items():
        assert weight == pytest.approx(sum(row[name] for row in found["rows"]) / 8)
        assert 0 < weight < 1
    section = yaml.safe_load(preset.read_text())["selection"]
    assert list(section) == ["policy", "budget_tokens", "anchor_layers", "anchor_heads", "fingerprint"]
    assert preset.read_text().startswith("# Anchor layers of needle-8m, written by vllm-sparse anchors.\n")
    assert "Share of the attention weight on the pages read" in capsys.readouterr().out
