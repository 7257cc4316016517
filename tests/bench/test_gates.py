"""Gates that learn page scores, on random keys and on a tiny Llama."""

import json

import pytest
import torch
from sparse_kernels.masked_attention import Packing
from support.llama import save_llama
from typer.testing import CliRunner

from bench.common.results import read_run
from research.real.model import Llama
from research.selection.__main__ import app, by_turns
from research.selection.gates import FORMS, Distillation, Form, Gate, capture, divergence, rounded, turn_of
from research.selection.report import table
from research.selection.statistics import Pages
from research.selection.texts import Text as SelectionText
from research.training.data import Data, Question, Text, write_data
from vllm_sparse_plugin.tools.diagnostics.forward import CapturingModel, LayerInputs
from vllm_sparse_plugin.tools.training.data import Row

HEADS, GROUP, SIZE = 2, 2, 32


def _tokens(seed: int, count: int) -> list[int]:
    return torch.randint(6, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"), 512)


@pytest.fixture(scope="module")
def model(folder) -> Llama:
    return Llama.load(folder, "cpu", torch.float32)


@pytest.fixture(scope="module")
def layer(model) -> LayerInputs:
    return capture(model, _tokens(0, 203), 16)[1]


def _gate(model: Llama, form: Form) -> Gate:
    return Gate(form, HEADS, GROUP, SIZE, turn_of(model, 1), "cpu")


def test_captured_inputs_are_those_of_transformers(folder):
    tokens = _tokens(0, 100)
    ours = capture(Llama.load(folder, "cpu", torch.bfloat16), tokens, 5)
    theirs = CapturingModel(folder, "cpu").run(tokens, 5)
    assert list(ours) == [0, 1]
    for index, inputs in ours.items():
        assert inputs.scale == theirs[index].scale
        for name in ("query", "keys", "values"):
            torch.testing.assert_close(getattr(inputs, name), getattr(theirs[index], name), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", FORMS)
def test_a_gate_begins_as_the_product_of_means(model, layer, name):
    # The turn to the first token of a page of one token is that of the key.
    size = 1 if FORMS[name].is_turned else 8
    if name == "gate64":  # heads of 32 have no 64 dimensions
        assert FORMS[name].size(SIZE) == 64
    pages = Pages.of(layer, size)
    scores = _gate(model, FORMS[name])(pages)
    keys = layer.keys[:, : pages.count * size].unflatten(1, (-1, size)).mean(dim=2)
    query = layer.query.mean(dim=2)
    expected = torch.einsum("qhd,hpd->qhp", query, keys) * layer.scale
    step = keys.abs().amax(dim=-1) / ((1 << (FORMS[name].bits - 1)) - 1)
    # Each element of a record is off by half a step; the step has an error of bfloat16.
    bound = query.abs().sum(dim=-1)[..., None] * step * 0.6 * layer.scale + 1e-4
    assert ((scores - expected).abs() <= bound).all()
    assert scores.std() > 10 * (scores - expected).std() / (127 / ((1 << (FORMS[name].bits - 1)) - 1))


def test_equal_bytes_are_those_of_quarters():
    assert {name: (form.size(64), form.record_bytes(64)) for name, form in FORMS.items()} == {
        "gate64": (64, 66), "gate-int8": (126, 128), "gate-int4": (252, 128), "gate-cached": (126, 128)
    }  # fmt: skip


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_keeps_integers_of_a_step_and_passes_gradients(bits):
    rows = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).requires_grad_()
    stored = rounded(rows, bits)
    most = (1 << (bits - 1)) - 1
    step = (rows.detach().abs().amax(dim=-1, keepdim=True) / most).bfloat16().float()
    integers = stored.detach() / step
    torch.testing.assert_close(integers, integers.round(), atol=1e-3, rtol=0)
    assert integers.abs().max() == pytest.approx(most, abs=1e-3)
    assert ((stored - rows).abs() <= 0.51 * step + 0.01 * rows.abs()).all()
    (stored * torch.arange(40)).sum().backward()
    assert torch.equal(rows.grad, torch.arange(40.0).expand(5, 40))


def test_a_divergence_counts_the_pages_that_scores_decide_about(layer):
    pages = Pages.of(layer, 8)
    scores = torch.randn(16, HEADS, pages.count, generator=torch.Generator().manual_seed(1))
    expected = 0.0
    weights = layer.page_weights(8)
    for query, head in ((q, h) for q in range(16) for h in range(HEADS)):
        decided = slice(1, int(layer.context_lens[query]) // 8 - 1)
        wanted, logs = weights[query, head, decided], scores[query, head, decided].log_softmax(dim=-1)
        expected += float((wanted * ((wanted / wanted.sum()).log() - logs)).sum()) / (16 * HEADS)
    assert divergence(scores, pages).item() == pytest.approx(expected, rel=1e-4)
    assert divergence(weights[..., : pages.count].log(), pages).item() == pytest.approx(0, abs=1e-5)


def test_gates_learn_what_a_text_reads(model):
    training = Distillation(model, 8, steps=12, rate=2e-2, forms=FORMS)
    losses = list(training.train(iter([_tokens(0, 203)] * 20), 32))
    assert len(losses) == 12
    assert losses[0].keys() == FORMS.keys()
    for name in FORMS:
        assert losses[-1][name] < 0.9 * losses[0][name]
    assert set(training.statistics(1)) == set(FORMS)


def test_kinds_of_documents_take_turns():
    texts = [SelectionText(f"{kind}-{place}", [], 1) for kind in ("code", "prose", "vt") for place in range(3)]
    found = [text.document for text in by_turns(texts)]
    assert found == [f"{kind}-{place}" for place in range(3) for kind in ("code", "prose", "vt")]


def test_a_run_measures_gates_beside_statistics(folder, tmp_path):
    rows = [Row(_tokens(i, 200), [True] * 200, Packing((200,)), (100,)) for i in range(3)]
    texts = [Text("code", _tokens(10, 220)), Text("prose", _tokens(11, 220))]
    asked = [Question("vt", 200, _tokens(12 + i, 150), _tokens(20, 5), ("a",), 4) for i in range(4)]
    write_data(tmp_path / "data.xz", Data(rows, texts, asked))
    output = tmp_path / "gates.jsonl"
    command = [
        "gates", "--model", str(folder), "--data", str(tmp_path / "data.xz"), "--output", str(output), "--steps", "4",
        "--form", "gate64,gate-cached", "--pages", "4,8", "--queries", "32", "--measured", "8", "--documents", "2",
    ]  # fmt: skip
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    run = read_run(output)
    found = [row for row in run.rows if "statistics" in row]
    assert [row["step"] for row in run.rows if "step" in row] == [4]
    # Four documents and two layers; two budgets of six kinds.
    assert len(found) == 4 * 2 * 2 * 6
    assert {row["document"] for row in found} == {"code-0", "prose-1", "vt-0", "vt-1"}
    by_name = {row["statistics"]: row for row in found}
    assert by_name["gate64"]["record_bytes"] == 66
    assert by_name["gate-cached"]["record_bytes"] == by_name["quarters"]["record_bytes"] == 64
    shown = table([run])
    columns = {column.header: list(column.cells) for column in shown.columns}
    compared = dict(zip(columns["statistics"], columns["minus quarters, 95 %"], strict=True))
    assert compared["quarters"] == "-"
    assert " to " in compared["oracle"]
    assert compared["oracle"].startswith("+")

    late = CliRunner().invoke(app, [*command, "--time-limit", "1", "--steps", "100000"])
    assert late.exit_code == 3
    assert json.loads(output.read_text().splitlines()[0])["gates"]["steps"] == 100000
