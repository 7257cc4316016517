import itertools
import json
import math
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from bench.common.models import NEEDLE_8M
from bench.common.results import ResultFile
from research.witness import __main__ as commands
from research.witness import training
from research.witness.card import LOG, MEASUREMENTS, PAGE, render
from research.witness.data import (
    ANSWER,
    ASKED_TASKS,
    BOS,
    DOCUMENT,
    EOS,
    DocumentPool,
    build_document,
    collect_text,
    cut,
    encode,
    stretches,
)
from research.witness.measure import measure, newest_mass
from research.witness.model import Forward, build_model, save_model
from research.witness.training import (
    Batch,
    Recipe,
    Stage,
    Trainer,
    head_price,
    learning_rate,
    source_weights,
    stage_at,
)
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.diagnostics.forward import LayerInputs
from vllm_sparse_plugin.tools.needles import library_text

TEXT = library_text(0, 60_000)
RECIPE = Recipe((Stage(256, 0.5), Stage(512, 0.5)), 1024, 512, 0.5, 0.3, 0.1, 0.4, 2e-3, 2, 0.1, 0)


def toy(seed: int = 0, layers: int = 2):
    return build_model(layers, 64, 96, 4, 2, seed)


def attentive_toy(layers: int):
    """Its heads attend to some tokens more than to others."""
    model = toy(layers=layers)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(20)
            layer.self_attn.k_proj.weight.mul_(20)
    return model


def document(task: str, length: int = 1024, questions: int = 4):
    rng = random.Random(task)
    found = None
    while found is None:
        found = build_document(rng, cut(TEXT, rng.randrange(len(TEXT)), length), length, task, questions)
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(20):
        (folder / f"{i:02}.py").write_text(library_text(70_000 * i, 60_000), encoding="utf-8")
    (folder / "special.py").write_text(f"{'word ' * 100}\n<|bos|>\n", encoding="utf-8")
    (folder / "table.txt").write_text("7 " * 1000, encoding="utf-8")
    (folder / "copy.py").write_text((folder / "00.py").read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def test_text_is_whole_files_in_a_drawn_order(corpus):
    first = collect_text([corpus], 10_000_000, 0)
    assert first == collect_text([corpus, corpus], 10_000_000, 0)
    assert first.files != collect_text([corpus], 10_000_000, 1).files
    assert not any("<|bos|>" in text or "7 7 7" in text for text in first.files)
    # 2 % of 1.2 MB are less than a file; the copy counts once.
    assert len(first.files) == 19
    assert all(first.held_out != text for text in first.files)
    assert sum(map(len, collect_text([corpus], 1_100_000, 0).files)) < 1_100_000


def test_sequences_begin_with_bos_and_have_no_other():
    stream = np.array(encode(TEXT[:20_000]), dtype=np.uint16)
    rows = stretches(stream, 257, 8, np.random.default_rng(0))
    assert (rows[:, 0] == BOS).all()
    assert (rows[:, 1:] != BOS).all()
    starts = [next(i for i in range(len(stream)) if (stream[i : i + 256] == row[1:]).all()) for row in rows]
    assert len(set(starts)) > 1
    for task in ("mixed", "multikey", "kv", "single"):
        tokens = document(task).tokens
        assert (len(tokens), tokens[0], BOS in tokens[1:]) == (1024, BOS, False)


@pytest.mark.parametrize("task", [*ASKED_TASKS, "mixed"])
def test_documents_hold_what_they_ask_for(task):
    tokenizer = AutoTokenizer.from_pretrained(NEEDLE_8M)
    found = document(task)
    kinds = np.array(found.kinds)
    begins = [i for i in range(1, len(kinds)) if kinds[i] == ANSWER and kinds[i - 1] == DOCUMENT]
    assert 1 <= len(begins) <= (1 if task == "single" else 4)
    text = tokenizer.decode(found.tokens[: begins[0]])
    for begin in begins:
        end = found.tokens.index(EOS, begin)
        assert (kinds[begin : end + 1] == ANSWER).all()
        answer = tokenizer.decode(found.tokens[begin:end])
        assert answer[0] == " "
        assert answer[1:] in text
    # As a prompt would be tokenised; what the cut has left of the first line aside.
    line = found.tokens.index(encode("\n")[0])
    assert encode(tokenizer.decode(found.tokens[line : begins[0]])) == found.tokens[line : begins[0]]


def test_documents_are_used_again_when_none_is_new():
    with ThreadPoolExecutor(1) as workers:
        pool = DocumentPool([TEXT], [257], 2_000, 0, workers)
        tokens, kinds = pool.take(257, 40)
    assert tokens.shape == kinds.shape == (40, 257)
    assert 1 < len({row.tobytes() for row in tokens}) < 40


def test_the_forward_pass_is_transformers_own():
    model = toy()
    tokens = torch.randint(3, 4096, (2, 40))
    with torch.no_grad():
        assert torch.allclose(Forward(model, False).logits(tokens), model(tokens).logits, atol=1e-5)


def test_losses_are_summed_by_source():
    model = toy()
    tokens, kinds = torch.randint(3, 4096, (2, 21)), torch.randint(0, 3, (2, 20))
    with torch.no_grad():
        sums = Forward(model, False).loss(tokens[:, :-1], tokens[:, 1:], kinds).sums
        logits = model(tokens[:, :-1]).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    assert torch.allclose(sums, torch.stack([losses[kinds == kind].sum() for kind in range(3)]), rtol=1e-4)


def test_speech_is_the_attention_off_token_0():
    model = attentive_toy(4)
    model.set_attn_implementation("eager")
    tokens = torch.randint(3, 4096, (2, 40))
    with torch.no_grad():
        found = Forward(model, False).loss(tokens, tokens, tokens % 3).speech
        weights = model(tokens, output_attentions=True).attentions
    expected = [1 - layer[:, :, 1:, 0].mean().item() for layer in weights]
    assert found.item() == pytest.approx((expected[2] + expected[3]) / 2, abs=1e-5)
    assert len({round(share, 3) for share in expected}) == 4


def test_speech_has_its_price():
    tokens = np.random.default_rng(0).integers(3, 4096, size=(4, 257), dtype=np.uint16)
    batch = Batch(tokens, np.random.default_rng(1).integers(0, 3, size=(4, 257), dtype=np.uint8))
    ids, kinds = (torch.from_numpy(part.astype(np.int64)) for part in batch)
    weights = torch.tensor(source_weights(batch.counts, 0.3))

    def query_gradients(trainer):
        return [layer.self_attn.q_proj.weight.grad for layer in trainer.model.model.layers]

    def halves(trainer):
        return [trainer.forward.loss(ids[i : i + 2, :-1], ids[i : i + 2, 1:], kinds[i : i + 2, 1:]) for i in (0, 2)]

    speaking, predicting = (Trainer(attentive_toy(3), RECIPE, "cpu", False) for _ in range(2))
    spoken = sum(half.speech for half in halves(speaking)) / 2
    spoken.backward()
    sum((half.sums * weights).sum() for half in halves(predicting)).backward()
    assert all(gradient.abs().max() > 1e-4 for gradient in query_gradients(speaking))
    for price, free_share, paid in ((0.0, 0.4, 0.0), (2.0, 0.4, 2.0), (2.0, 1.0, 0.0)):
        recipe = RECIPE.__class__(**{**vars(RECIPE), "free_share": free_share})
        trainer = Trainer(attentive_toy(3), recipe, "cpu", False)
        assert trainer._backward(batch, price).speech.item() == pytest.approx(spoken.item(), rel=1e-5)
        parts = zip(*map(query_gradients, (trainer, predicting, speaking)), strict=True)
        assert all(torch.allclose(found, first + paid * second, atol=1e-6) for found, first, second in parts)


def test_the_first_layers_speak_for_free():
    ids = torch.randint(3, 4096, (2, 20))
    assert Forward(toy(), False).loss(ids, ids, ids % 3).speech.item() == 0
    assert [head_price(RECIPE, progress) for progress in (0, 0.1, 0.2, 1)] == [0, 0.05, 0.1, 0.1]


def test_answers_weigh_what_they_should():
    weights = source_weights([600, 380, 20], 0.3)
    assert weights[0] == weights[1]
    assert (round(980 * weights[0], 9), round(20 * weights[2], 9)) == (0.7, 0.3)
    assert source_weights([100, 0, 0], 0.3)[0] == 0.01
    assert source_weights([0, 0, 10], 0.3)[2] == 0.1


def test_a_step_in_parts_is_the_step():
    tokens = np.random.default_rng(0).integers(3, 4096, size=(4, 257), dtype=np.uint16)
    kinds = np.random.default_rng(1).integers(0, 3, size=(4, 257), dtype=np.uint8)
    gradients = []
    for at_once in (1024, 256):
        trainer = Trainer(toy(), RECIPE.__class__(**{**vars(RECIPE), "tokens_at_once": at_once}), "cpu", False)
        trainer.step(Batch(tokens, kinds), 0.0, 0.0)
        gradients.append(trainer.model.model.layers[0].self_attn.q_proj.weight.grad)
    assert gradients[0].abs().max() > 0
    assert torch.allclose(*gradients, atol=1e-6)


def test_what_cannot_be_compiled_runs_uncompiled(capsys):
    trainer = Trainer(toy(), RECIPE, "cpu", False)

    def broken(*_):
        raise RuntimeError("no compiler")

    trainer.forward.compiled, trainer.forward._layer = True, broken
    tokens = np.full((2, 65), 5, dtype=np.uint16)
    trainer.step(Batch(tokens, np.zeros_like(tokens, dtype=np.uint8)), 1e-3, 0.0)
    assert (trainer.steps, trainer.forward.compiled) == (1, False)
    assert "no compiler" in capsys.readouterr().out


def test_a_gradient_that_is_not_finite_changes_nothing():
    model = toy()
    trainer = Trainer(model, RECIPE, "cpu", False)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.inf
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    tokens = np.full((2, 65), 5, dtype=np.uint16)
    trainer.step(Batch(tokens, np.zeros_like(tokens, dtype=np.uint8)), 1e-3, 0.0)
    assert trainer.skipped_steps == 1
    assert torch.equal(before, model.model.layers[0].mlp.up_proj.weight)


def test_the_schedule_follows_the_clock():
    stages = (Stage(1024, 0.3), Stage(2048, 0.7))
    assert [stage_at(stages, progress) for progress in (0, 0.29, 0.31, 1)] == [1024, 1024, 2048, 2048]
    assert learning_rate(RECIPE, 0, 0) == 1e-3
    assert learning_rate(RECIPE, 9, 0) == 2e-3
    assert learning_rate(RECIPE, 9, 0.5) == pytest.approx(2e-3 * 0.505)
    assert learning_rate(RECIPE, 9, 1) == pytest.approx(2e-5)


def test_training_learns_and_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_LOG_SECONDS", 0.0)
    # A clock that shows a second more whenever it is read: at the beginning, and twice a step.
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    trainer = Trainer(toy(), RECIPE, "cpu", False)
    stream = np.array(encode(TEXT[:20_000]), dtype=np.uint16)
    with ThreadPoolExecutor(1) as workers, ResultFile(tmp_path / LOG) as log:
        pool = DocumentPool([TEXT], [257, 513], 4_000, 0, workers)
        training.train(trainer, RECIPE, stream, pool, 14, tmp_path, log)
    rows = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert rows[-1]["steps"] == rows[-2]["step"] == 7
    assert [row["length"] for row in rows if "length" in row] == sorted(row["length"] for row in rows[:-1])
    assert rows[-2]["length"] == 512
    for source in ("text", "document", "answer"):
        assert rows[-2]["loss"][source] < rows[0]["loss"][source] - 0.1
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    tokens = torch.randint(3, 4096, (1, 40))
    with torch.no_grad():
        expected = Forward(trainer.model.to(torch.bfloat16).float(), False).logits(tokens)
        assert torch.allclose(loaded.float()(tokens).logits, expected, atol=1e-4)
    assert loaded.config.tie_word_embeddings
    assert AutoTokenizer.from_pretrained(tmp_path).encode("a")[0] == BOS


def test_an_interrupted_run_is_saved(tmp_path):
    trainer = Trainer(toy(), RECIPE, "cpu", False)
    with ResultFile(tmp_path / LOG) as log, pytest.raises(ValueError, match="high"):
        training.train(trainer, RECIPE, np.zeros(10, dtype=np.uint16), None, math.inf, tmp_path, log)
    assert (tmp_path / "model.safetensors").exists()


def test_newest_mass_is_of_the_newest():
    layer = LayerInputs(torch.zeros(3, 1, 2, 64), torch.zeros(1, 20, 64), torch.zeros(1, 20, 64), 1.0)
    mass = newest_mass(layer, 5)
    assert torch.allclose(mass, torch.tensor([5 / 18, 5 / 19, 5 / 20])[:, None, None].expand(3, 1, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An untrained model with the log and the measurements of a run."""
    folder = tmp_path_factory.mktemp("model") / "toy"
    folder.mkdir()
    model = toy()
    save_model(model, folder)
    about = {
        "date": "2026-01-02T00:00:00+00:00", "command": "python -m research.witness train",
        "versions": {"torch": "2.11"},
        "hardware": {"gpu": "GPU X", "cores": 16}, "parameters": 6_320_000,
        "recipe": {**vars(RECIPE), "stages": [list(stage) for stage in RECIPE.stages]},
        "data": {"files": 7, "tokens": 3_000_000, "held_out_characters": 1234, "held_out": "x", "text_bytes": 1},
    }  # fmt: skip
    end = {"trained_seconds": 400.0, "steps": 2345, "tokens": 987_600_000, "skipped_steps": 1, "compiled": True}
    rows = [about, {"loss": {"text": 2.125, "document": 3.0}}, end]
    (folder / LOG).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return folder


def test_the_card_states_what_was_measured(folder):
    attention = {"measure": "attention", "context_tokens": 4096, "queries": 64, "newest": [0.61, 0.5]}
    rows = [
        {"versions": {}, "hardware": {}, "command": "python -m x", "date": "2026", "held_out": True, "newest": 9},
        {**attention, "layer": 0, "first": [0.73, 0.2], "sink_groups": 0.25, "newest_groups": 1.0},
        {**attention, "layer": 1, "first": [0.1, 0.2], "sink_groups": 0.5, "newest_groups": 0.5},
        {"measure": "perplexity", "context_tokens": 4096, "tokens": 5000, "perplexity": 6.789},
        {"measure": "answers", "task": "kv", "context_tokens": 1024, "questions": 8, "right": 7},
        {"measure": "answers", "task": "kv", "context_tokens": 1024, "questions": 8, "right": 4},
    ]  # fmt: skip
    assert "Perplexity" not in render(folder)
    (folder / MEASUREMENTS).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    page = " ".join(render(folder).split())
    (folder / MEASUREMENTS).unlink()
    for fact in ("6.3 M", "2,345 steps, 987.6 M tokens in 400 s", "1 steps skipped", "text 2.125", "GPU X", "6.79",
                 "costs up to 0.1 nats", "| 1,024 | - | - | 11/16 |", "37.5% of the groups", "75.0% have",
                 "newest 9 tokens", "| 0 | 0.73 0.20 | 25.0% | 0.61 0.50 |"):  # fmt: skip
        assert fact in page
    assert "not the one" not in page


def test_the_card_of_the_committed_model_is_what_its_files_say():
    committed = NEEDLE_8M.parent / "witness-6m"
    assert render(committed) == (committed / PAGE).read_text(encoding="utf-8")


def test_measuring_gives_all_its_rows(folder, monkeypatch):
    monkeypatch.setattr("research.witness.measure.CONTEXTS", (256,))
    rows = list(measure(folder, TEXT, "cpu", 1, 600))
    assert [row["measure"] for row in rows] == ["attention", "attention", "perplexity", "answers", "answers", "answers"]
    assert 2000 < rows[2]["perplexity"] < 8000  # an untrained model's of 4,096 tokens
    assert all(0 <= value <= 1 for row in rows[:2] for value in (*row["first"], *row["newest"]))
    early = list(measure(folder, TEXT, "cpu", 1, 0))
    assert [row["measure"] for row in early] == ["attention", "attention", "perplexity"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--seconds", "0"], "seconds: got 0, allowed: more than 0"),
        (["--seconds", "nan"], "seconds: got nan"),
        (["--stage", "1024"], "stage: got '1024', allowed: LENGTH:SHARE"),
        (["--stage", "1024:0.5"], "stage: got shares of 0.5"),
        (["--stage", "16384:1"], "stage: got 16384 tokens"),
        (["--kv-heads", "3"], "kv_heads: got 3, allowed: a divisor of 8"),
        (["--text", "missing"], "text: got 'missing', allowed: folders"),
        (["--text", "."], "text: got 0 bytes"),
        (["--output", "."], "output: got '.', which is there"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="allowed") as error:
        commands.app(["train", "--output", "new", "--seconds", "1", *arguments], standalone_mode=False)
    assert str(error.value).startswith(sentence)
    assert not Path("new").exists()


def test_bad_input_is_exit_code_2(tmp_path):
    command = [sys.executable, "-m", "research.witness", "train", "--output", str(tmp_path), "--seconds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: output: got ")
    assert done.stderr.count("\n") == 1


def test_card_and_measure_need_a_log(tmp_path):
    for command in ("card", "measure"):
        with pytest.raises(ConfigurationError, match="results: got"):
            commands.app([command, "--model", str(tmp_path)], standalone_mode=False)
