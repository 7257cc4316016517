import json
import math
import sys
from pathlib import Path

import pytest
import torch
import yaml

from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.config.fingerprint import fingerprint_of
from vllm_sparse_plugin.config.routing import Routing
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.cli import main
from vllm_sparse_plugin.tools.cli.calibrate import _lengths
from vllm_sparse_plugin.tools.diagnostics import calibration
from vllm_sparse_plugin.tools.diagnostics.calibration import Accuracy, Detection, Observed
from vllm_sparse_plugin.tools.diagnostics.forward import CapturingModel, LayerInputs
from vllm_sparse_plugin.tools.diagnostics.texts import (
    Documents,
    build_documents,
    cut_texts,
)

HEADS, GROUP, SIZE = 2, 3, 8


def layer(tokens: int = 40, queries: int = 3) -> LayerInputs:
    keys, values = torch.randn(2, HEADS, tokens, SIZE)
    return LayerInputs(torch.randn(queries, HEADS, GROUP, SIZE), keys, values, 0.5)


def test_what_is_observed_is_what_a_loop_finds():
    inputs = layer()
    observed = Observed.of([inputs, layer()], "mean")
    assert observed.scores.shape == observed.mass.shape == (2, 3, HEADS)
    for query, context in enumerate(inputs.context_lens.tolist()):
        for head in range(HEADS):
            keys, rows = inputs.keys[head, :context].double(), inputs.query[query, head].double()
            weights = (rows @ keys.T * 0.5).softmax(dim=-1)
            assert float(observed.mass[0, query, head]) == pytest.approx(float(weights[:, 0].mean()), rel=1e-5)
            cosine = torch.nn.functional.cosine_similarity(rows, keys[:1]).mean()
            assert float(observed.scores[0, query, head]) == pytest.approx(float(cosine), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("ratio", [0.01, 0.25, 0.6, 1.0])
def test_a_threshold_skips_the_share_that_was_asked_for(ratio):
    scores = torch.randn(4, 25, 3)
    threshold = calibration.threshold_for(scores, ratio)
    assert int((scores >= threshold).sum()) == math.ceil(ratio * 300)


def test_a_fit_of_four_lengths_goes_through_all_of_them_and_one_of_two_is_a_line():
    lengths, thresholds = [4096, 6502, 10321, 16384], [0.25, 0.4, 0.375, 0.125]
    for count in (4, 2):
        cubic = calibration.fit(lengths[:count], thresholds[:count])
        routing = Routing(cubic=cubic, shortest=lengths[0], longest=lengths[count - 1]).of_layer(0, range(1), "cpu")
        found = routing.thresholds(torch.tensor(lengths[:count]))[:, 0]
        torch.testing.assert_close(found, torch.tensor(thresholds[:count]), atol=1e-4, rtol=0)
    assert cubic[2:] == (0, 0)
    # More of them than a cubic can meet: their curve.
    x = torch.linspace(0, 1, 9)
    many = calibration.fit([int(4096 * 4 ** float(each)) for each in x], (0.5 - x + 2 * x**2 - x**3).tolist())
    assert many == pytest.approx((0.5, -1, 2, -1), abs=0.02)


def observed(scores: list[float], sinks: list[bool]) -> Observed:
    mass = torch.tensor([0.75 if sink else 0.25 for sink in sinks])
    return Observed(torch.tensor(scores).view(1, -1, 1), mass.view(1, -1, 1))


def test_precision_and_recall():
    seen = observed([0.9, 0.8, 0.7, 0.6], [True, False, True, True])
    assert calibration.detect(seen, seen.scores >= 0.7) == Detection(0.75, pytest.approx(2 / 3), pytest.approx(2 / 3))
    none = calibration.detect(seen, seen.scores >= 2)
    assert (none.skipped, none.recall) == (0, 0)
    assert math.isnan(none.precision)


def test_average_precision_is_the_sum_over_recall():
    assert calibration.average_precision(observed([0.9, 0.8, 0.7], [True, True, False])) == 1
    found = calibration.average_precision(observed([0.6, 0.9, 0.8, 0.7], [True, True, False, True]))
    assert found == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)
    # Of equal scores none comes first: the share of sinks among them, in any order.
    for sinks in ([True, False], [False, True]):
        assert calibration.average_precision(observed([0.5, 0.5], sinks)) == 0.5
    assert math.isnan(calibration.average_precision(observed([0.5], [False])))


@pytest.mark.parametrize(
    ("prevalence", "precision", "accuracy", "route", "reason"),
    [
        (0.55, 0.8, (1.0, 0.97), True, "80.0% of the skipped groups are sink groups"),
        (0.02, 0.8, (1.0, 0.97), False, "2.0% of the groups are sink groups"),
        (0.55, 0.3, (1.0, 0.97), False, "30.0% of the skipped groups are sink groups"),
        (0.55, math.nan, (1.0, 0.97), False, "none of the skipped groups are sink groups"),
        (0.55, 0.8, (1.0, 0.9), False, "90.0% of the tokens asked for are right"),
        # No loss could be seen.
        (0.55, 0.8, (0.0, 0.0), False, "0.0% of the tokens asked for are right, 0.0% with"),
    ],
)
def test_the_verdict_follows_from_what_was_measured(prevalence, precision, accuracy, route, reason):
    found = prevalence, Detection(0.6, precision, 0.9), 0.6, Accuracy(*accuracy), {}
    verdict = calibration.judge(*found, fitted=50, lengths=4)
    assert verdict.route == route
    assert verdict.reason.startswith(reason)


@pytest.mark.parametrize(("fitted", "lengths"), [(49, 4), (500, 3)])
def test_thresholds_of_few_samples_or_lengths_are_not_recommended(fitted, lengths):
    """A server serves what is recommended, and the report asks for more samples before that."""
    found = 0.55, Detection(0.6, 0.8, 0.9), 0.6, Accuracy(1.0, 0.97), {}
    verdict = calibration.judge(*found, fitted=fitted, lengths=lengths)
    assert verdict == (
        False, f"the thresholds are fitted to {fitted} samples of {lengths} lengths, and need 50 or more of 4 or more"
    )  # fmt: skip


def test_one_length_or_task_that_loses_answers_speaks_against_routing():
    """The mean over lengths hid that the longest one lost nearly all answers."""
    parts = {"for kv": Accuracy(0.9, 0.9), "in contexts of 16384 tokens": Accuracy(0.8, 0.7)}
    found = 0.55, Detection(0.6, 0.8, 0.9), 0.6, Accuracy(0.96, 0.92)
    lost = "in contexts of 16384 tokens 70.0% of the tokens asked for are right, 80.0% with dense attention"
    assert calibration.judge(*found, parts, fitted=64, lengths=4) == (False, lost)
    assert calibration.judge(*found, {"for kv": parts["for kv"]}, fitted=64, lengths=4).route


@pytest.fixture(scope="module")
def captured() -> CapturingModel:
    return CapturingModel(Path(__file__).parents[2] / "models" / "needle-8m", "cpu")


def test_a_skipped_group_has_no_part_in_what_follows(captured):
    tokens = torch.randint(3, 4096, (120,)).tolist()
    cache = captured.prefill(tokens[:100])
    plain = captured.decode(cache, tokens[100:])

    def same(skip) -> list[bool]:
        layers = captured.decode(cache, tokens[100:], skip).layers
        return [torch.equal(ours.query, theirs.query) for ours, theirs in zip(layers, plain.layers, strict=True)]

    nothing = torch.zeros(20, 2, dtype=torch.bool)
    assert all(same(lambda index, inputs: nothing))
    # The output of layer 3 is visible from layer 4 on.
    assert same(lambda index, inputs: nothing if index != 3 else ~nothing) == [True] * 4 + [False] * 4
    routing = Routing(threshold=[2, 2, 2, -2, 2, 2, 2, 2], dense_layers=3)
    assert same(lambda *seen: calibration.skipped_by(routing, *seen)) == [True] * 4 + [False] * 4
    exempt = Routing(threshold=[2, 2, 2, -2, 2, 2, 2, 2], dense_layers=4)
    assert all(same(lambda *seen: calibration.skipped_by(exempt, *seen)))


def test_lengths_and_texts():
    assert _lengths(None, 16384, 4096) == [4096, 6502, 10321, 16384]
    assert _lengths(None, 8192, 4096)[-1] == 8192
    assert _lengths(None, 1 << 20, 4096)[-1] == 1 << 20
    assert _lengths([9000, 5000], 32768, 4096) == [5000, 9000]
    first, second = cut_texts([list(range(500))], [100, 400])
    assert first.document + first.rest[0] == list(range(100))
    assert second.document + second.rest[0] == list(range(400))
    assert (len(first.rest[0]), first.asked) == (50, [49])
    with pytest.raises(
        ConfigurationError, match="prompts: got a text of 99 tokens, allowed: the longest context's 100"
    ):
        list(cut_texts([list(range(99))], [50, 100]))


class Words:
    """A tokenizer of words, which are numbers."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


def test_no_text_both_fits_and_judges():
    def build(*firsts: int) -> Documents:
        given = [" ".join([*["7"] * 4, *[str(first)] * 6]) for first in firsts]
        return build_documents(Words(), given, Path("a.jsonl"), [], [8, 10], 50, 0)

    assert len(build(1, 2, 1, 2).fitting) == 4
    sentence = "prompts: got texts with the same first 8 tokens, of which one fits and one judges, allowed: texts that "
    for repeated in ((1, 1), (1, 2, 3, 1)):
        with pytest.raises(ConfigurationError, match=sentence):
            build(*repeated)
    with pytest.raises(ConfigurationError, match="prompts: got texts with the same first 4 tokens"):
        build_documents(Words(), ["7 7 7 7 1 1", "7 7 7 7 2 2"], Path("a.jsonl"), [], [4, 6], 50, 0)


def run(monkeypatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["vllm-sparse", "calibrate", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


REFUSED = {
    "skip ratio": (["--skip-ratio", "1"], "skip_ratio: got 1.0, allowed: more than 0 and less than 1"),
    "layers": (["--dense-layers", "8"], "dense_layers: got 8, allowed: 0 to 7"),
    "task": (
        ["--task", "riddle"],
        "task: got 'riddle', allowed: single, multikey, manykeys, multiquery, kv or denseneedle",
    ),
    "one context": (
        ["--context", "8192"],
        "context: got 8192 tokens, allowed: two or more lengths from 4096 to the model's 32768",
    ),
    "long context": (["--context", "4096", "--context", "32769"], "context: got 4096, 32769 tokens, allowed: two or "),
    "context of too few words": (
        ["--context", "3", "--context", "8", "--prompts", "any.jsonl"],
        "context: got 3, 8 tokens, allowed: two or more lengths from 4 to the model's 32768",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_calibrate_refuses(case, monkeypatch, capsys, tmp_path):
    arguments, sentence = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.removeprefix("error: ").startswith(sentence)


def test_calibrate_writes_a_preset_that_skips_what_it_says(monkeypatch, capsys, tmp_path, model, captured):
    prompts, preset, report = (tmp_path / name for name in ("prompts.jsonl", "preset.yaml", "report.jsonl"))
    texts = [" ".join(f"line {i}: return value_{i * step % 101}" for i in range(60)) for step in (37, 41, 43, 47)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    arguments = ["--prompts", str(prompts), "--context", "128", "--context", "300", "--skip-ratio", "0.25"]
    arguments += ["--score", "max", "--dense-layers", "3", "--output", str(preset), "--json", str(report)]
    assert not run(monkeypatch, *arguments)
    written = yaml.safe_load(preset.read_text())
    resolved = resolve({"config": str(preset)}, "sinkrouter")
    routing = resolved.routing
    assert written["selection"] == {"policy": "dense"}
    assert (routing.score, routing.dense_layers, routing.shortest, routing.longest) == ("max", 3, 128, 300)
    assert (routing.model, routing.fingerprint) == (Path(model).name, fingerprint_of(model))
    assert (routing.recommended, routing.objection) == (False, "not_recommended")
    assert routing.data == "prompts.jsonl, 4 texts to fit to, 4 to judge by, contexts of 128, 300 tokens"
    described, found = map(json.loads, report.read_text().splitlines())
    assert described["model"] == "needle-8m"
    assert [row["layer"] for row in found["layers"]] == [3, 4, 5, 6, 7]
    assert all(0 < row["first_value"] <= row["first_value_largest"] for row in found["layers"])
    tokens, rows = sum(row["tokens"] for row in found["rows"]), found["rows"]
    assert found["detection"][0] == pytest.approx(
        sum(row["skipped"] * row["tokens"] for row in rows) / tokens, abs=0.02
    )
    assert [(row["context_tokens"], row["task"]) for row in found["rows"]] == [(128, "text"), (300, "text")]
    # The share of the training texts that its thresholds skip.
    for length in (128, 300):
        skips = []
        for text in cut_texts([captured_tokens(model, text) for text in texts[::2]], [length]):
            layers = captured.decode(captured.prefill(text.document), text.rest[0]).layers
            skips += [
                calibration.skipped_by(routing, index, inputs) for index, inputs in enumerate(layers) if index > 2
            ]
        assert float(torch.stack(skips).float().mean()) == pytest.approx(0.25, abs=0.03)
    out = capsys.readouterr().out
    assert "Routing is NOT recommended for needle-8m" in out
    assert "Fitted to 4 samples of 2 lengths; take 50 samples and 4 lengths or more before you serve with it." in out
    assert "Routing is not recommended" in preset.read_text()


def captured_tokens(model: str, text: str) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model).encode(text)
