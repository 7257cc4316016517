"""Runs that are killed and continue, and what they learn."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.training import CONFIG, SELECTION, SETTINGS, TOKENIZER, rows, run_of, weights

from vllm_sparse_plugin.config import read_trained_section, resolve, section_of
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.training.attention import ServedSelection
from vllm_sparse_plugin.tools.training.model import _dtype_of
from vllm_sparse_plugin.tools.training.settings import LOSS_OF_THE_TEXT, TrainingSettings
from vllm_sparse_plugin.tools.training.trainer import CURVES, LOG, Run, Trainer


def test_a_selection_loss_brings_scores_nearer_to_dense_attention(model, tmp_path):
    settings = TrainingSettings(
        steps=8, hard_steps=8, sequence_tokens=64, rows_per_step=1, learning_rate=3e-3, warmup_steps=0, lora_rank=0,
        distillation=1.0, dense_prompts=True, selection_loss=1.0, measure_every=8, save_every=8,
    )  # fmt: skip
    row = next(each for each in rows() if each.packing.lengths == (64,))._replace(prompts=(20,))
    losses = {}
    for weight in (0.0, 1.0):
        run = run_of(model, tmp_path / str(weight), settings.model_copy(update={"selection_loss": weight}))
        trainer = Trainer(run, [row], TOKENIZER, "cpu")
        steps = [trainer.step() for _ in range(8)]
        losses[weight] = [step.get("selection_loss") for step in steps]
    assert losses[0.0] == [None] * 8
    assert 0 < losses[1.0][-1] < 0.9 * losses[1.0][0]


@pytest.mark.parametrize("equal", [False, True])
def test_rows_count_by_their_learned_tokens_or_alike(model, tmp_path, equal):
    found = [each for each in rows() if each.packing.lengths == (64,)][:2]
    pair = [
        row._replace(learned=[place >= first for place in range(64)]) for row, first in zip(found, (60, 8), strict=True)
    ]
    settings = TrainingSettings(steps=1, sequence_tokens=64, equal_rows=equal, **LOSS_OF_THE_TEXT)

    def loss(name, some):
        chosen = settings.model_copy(update={"rows_per_step": len(some)})
        # The last row is measured.
        return Trainer(run_of(model, tmp_path / name, chosen), [*some, some[0]], TOKENIZER, "cpu").step()["objective"]

    few, many, both = loss("few", pair[:1]), loss("many", pair[1:]), loss("both", pair)
    assert both == pytest.approx((few + many) / 2 if equal else (4 * few + 56 * many) / 60, abs=1e-4)
    assert abs(few - many) > 0.01


@pytest.mark.parametrize("dense_prompts", [True, False])
def test_rows_at_once_change_only_the_number_of_passes(model, tmp_path, dense_prompts):
    """Three rows, two and one at a time. All losses are weighted."""
    chosen = [row._replace(prompts=tuple(length // 3 for length in row.packing.lengths)) for row in rows()]
    found = {}
    for at_once, passes in ((1, 3), (2, 2), (4, 1)):
        settings = TrainingSettings(
            steps=2, sequence_tokens=64, rows_per_step=3, rows_at_once=at_once, lora_rank=2, learning_rate=1e-2,
            distillation=0.5, dense_prompts=dense_prompts,
        )  # fmt: skip
        trainer = Trainer(run_of(model, tmp_path / str(at_once), settings), chosen, TOKENIZER, "cpu")
        calls: list[torch.Tensor] = []
        trainer._model.register_forward_hook(lambda *given, calls=calls: calls.append(given[-1]))
        steps = [trainer.step() for _ in range(2)]
        # The teacher is the model without its updates, so each pass calls it twice.
        assert len(calls) == 2 * 2 * passes
        names = (
            "objective",
            "loss",
            "divergence",
            "drift",
            "gradient_norm",
            *(["selection_loss"] if dense_prompts else []),
        )
        found[at_once] = [step[name] for step in steps for name in names]
    assert found[2] == pytest.approx(found[1], rel=1e-3, abs=2e-5)
    assert found[4] == pytest.approx(found[1], rel=1e-3, abs=2e-5)


class KilledError(Exception):
    pass


def half_of_a_run(model: Path, output: Path) -> None:
    def kill(row):
        if row.get("loss") and row["step"] == 3:
            raise KilledError

    with pytest.raises(KilledError):
        Trainer(run_of(model, output), rows(), TOKENIZER, "cpu").train(kill)


def test_a_killed_run_goes_on_where_it_was(model, tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    Trainer(run_of(model, straight), rows(), TOKENIZER, "cpu").train()
    half_of_a_run(model, killed)
    again = Trainer(run_of(model, killed), rows(), TOKENIZER, "cpu")
    assert again.steps == 2
    again.train()
    one, two = weights(straight), weights(killed)
    assert all(torch.equal(one[name], two[name]) for name in one)
    logs = [
        [json.loads(line) for line in (folder / LOG).read_text().splitlines()[1:]] for folder in (straight, killed)
    ]  # fmt: skip
    for log in logs:
        assert [(row["step"], "loss" in row) for row in log] == [
            (0, False), (1, True), (2, True), (3, True), (4, True), (4, False)
        ]  # fmt: skip
        for row in log:
            row.pop("tokens_per_second", None)
    assert logs[0] == logs[1]
    assert [row["temperature"] for row in logs[0] if "loss" in row] == pytest.approx([1.0, 0.5**0.5, 0.5, None])

    # What comes out is a model with the settings in its config.json, which has learned and nothing else.
    assert read_trained_section(straight) == section_of(CONFIG)
    assert (straight / CURVES).stat().st_size > 1000
    before = weights(model)
    assert before.keys() == one.keys()
    changed = {name for name in one if not torch.equal(one[name], before[name])}
    assert {name.split(".")[-2] for name in changed} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"^output: got .*, which has a run with other settings, allowed: "):
        Trainer(run_of(model, straight, SETTINGS.model_copy(update={"seed": 1})), rows(), TOKENIZER, "cpu")


def test_a_run_does_not_go_on_with_another_base_model(model, tmp_path):
    half_of_a_run(model, tmp_path / "out")
    log = (tmp_path / "out" / LOG).read_text()
    # The same name and the same shapes, and other weights: a folder elsewhere, or weights replaced in place.
    other = tmp_path / model.name
    shutil.copytree(model, other)
    assert Trainer(run_of(other, tmp_path / "out"), rows(), TOKENIZER, "cpu").steps == 2
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-2] ^= 1
    (other / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"^output: got .*, which has a run with another base model, allowed:"):
        Trainer(run_of(other, tmp_path / "out"), rows(), TOKENIZER, "cpu")
    assert (tmp_path / "out" / LOG).read_text().splitlines()[1:] == log.splitlines()[1:4]  # up to step 2


def test_a_log_that_was_left_half_written_does_not_end_a_run(model, tmp_path):
    half_of_a_run(model, tmp_path)
    log = (tmp_path / LOG).read_bytes()
    for damaged in (log[:-30], log + b"\xff\xfe", log[:-1]):
        (tmp_path / LOG).write_bytes(damaged)
        again = Trainer(run_of(model, tmp_path), rows(), TOKENIZER, "cpu")
        assert again.steps == 2
        assert [row["step"] for row in again.log] == [0, 1, 2]


def test_a_checkpoint_that_cannot_be_read_is_one_sentence(model, tmp_path):
    half_of_a_run(model, tmp_path)
    log = (tmp_path / LOG).read_text()
    last = tmp_path / "checkpoints" / "last.json"
    kept = last.read_text()
    for damage in (
        lambda: last.write_text(""),
        lambda: [last.write_text(kept), *(file.write_bytes(b"\0") for file in last.parent.glob("2/*.bin"))],
        lambda: shutil.rmtree(last.parent / "2"),
    ):
        damage()
        with pytest.raises(
            ConfigurationError, match=r"^output: got .*, whose checkpoints cannot be read \(.+\), allowe"
        ):
            Trainer(run_of(model, tmp_path), rows(), TOKENIZER, "cpu")
    assert (tmp_path / LOG).read_text() == log


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")])
def test_a_disk_that_fills_up_ends_a_run_in_one_sentence_and_keeps_the_last_state(model, tmp_path, monkeypatch, error):
    half_of_a_run(model, tmp_path)
    trainer = Trainer(run_of(model, tmp_path), rows(), TOKENIZER, "cpu")

    def save(folder: str, **_: object) -> None:
        Path(folder).mkdir(exist_ok=True)
        raise error

    monkeypatch.setattr(trainer._accelerator, "save_state", save)
    with pytest.raises(ConfigurationError, match=r"^output: got .* \(.*(space|failed).*\), allowed: a folder that can"):
        trainer.train()
    assert Trainer(run_of(model, tmp_path), rows(), TOKENIZER, "cpu").steps == 2


def test_whole_weights_learn_a_text(model, tmp_path):
    settings = SETTINGS.model_copy(update={"lora_rank": 0, "steps": 6, "learning_rate": 3e-3})
    trainer = Trainer(run_of(model, tmp_path / "out", settings), rows()[:1], TOKENIZER, "cpu")
    trainer.train()
    losses = [row["loss"] for row in trainer.log if "loss" in row]
    assert losses[-1] < losses[0] - 0.5
    # The teacher is the model before training: what diverges at first is only what the mask leaves out.
    divergences = [row["divergence"] for row in trainer.log if "divergence" in row]
    assert divergences[0] < 0.9 * max(divergences)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_share_of_the_weights_before_training_is_kept(model, tmp_path, lora_rank):
    settings = SETTINGS.model_copy(update={"lora_rank": lora_rank, "learning_rate": 3e-3})
    Trainer(run_of(model, tmp_path, settings), rows(), TOKENIZER, "cpu").train()
    before, trained = weights(model), weights(tmp_path)
    # The run is over: it writes its model again, and does no step.
    again = Trainer(run_of(model, tmp_path, settings.model_copy(update={"kept_share": 0.25})), rows(), TOKENIZER, "cpu")
    assert again.steps == settings.steps
    again.train(lambda row: pytest.fail(f"{row}"))
    kept = weights(tmp_path)
    changed = {name for name in kept if not torch.equal(trained[name], before[name])}
    assert len(changed) > 4
    for name, weight in kept.items():
        wanted = 0.75 * trained[name].float() + 0.25 * before[name].float()
        # Both sides were rounded to the dtype of the model.
        assert (weight.float() - wanted).abs().max() <= 2 * torch.finfo(weight.dtype).eps * wanted.abs().max(), name
    assert any(not torch.equal(kept[name], trained[name]) for name in changed)
    assert json.loads((tmp_path / LOG).read_text().splitlines()[0])["kept_share"] == 0.25
    # Without the state that it ended with it would begin again, over the model and its log.
    log = (tmp_path / LOG).read_text()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ConfigurationError, match=r"^output: got .*, which has a model already, allowed: a new folder$"):
        Trainer(run_of(model, tmp_path, settings), rows(), TOKENIZER, "cpu")
    assert (tmp_path / LOG).read_text() == log


def test_updates_leave_the_other_weights_of_a_model_as_they_were(model, tmp_path, monkeypatch):
    """On a GPU these weights are bfloat16 beside the updates, also those of a model that has more digits."""
    trainer = Trainer(run_of(model, tmp_path / "out"), rows(), TOKENIZER, "cpu")
    held = trainer._accelerator.get_state_dict(trainer._model)
    rounded = {name: weight if "lora_" in name else weight.bfloat16() for name, weight in held.items()}
    monkeypatch.setattr(trainer._accelerator, "get_state_dict", lambda _: rounded)
    trainer.write()
    before, after = weights(model), weights(tmp_path / "out")
    assert SETTINGS.lora_rank > 0
    assert {weight.dtype for weight in before.values()} == {torch.float32}
    assert before.keys() == after.keys()
    # Updates are zero before the first step.
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": None, "torch_dtype": "float32"}, torch.float32),
        ({"dtype": None}, torch.bfloat16),
    ],
)
def test_a_model_is_written_in_its_dtype_whatever_names_it(model, tmp_path, fields, dtype):
    source, output = tmp_path / "tiny", tmp_path / "out"
    shutil.copytree(model, source)
    config = json.loads((model / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config | fields))
    Trainer(run_of(source, output), rows(), TOKENIZER, "cpu").write()
    assert {weight.dtype for weight in weights(output).values()} == {dtype}
    # Images have a part of their own.
    (source / "config.json").write_text(json.dumps({"text_config": config | fields}))
    assert _dtype_of(source) == dtype


@pytest.mark.parametrize(("budget", "prompt"), [(24, 20), (512, 20), (24, 64)])
def test_a_model_is_held_to_the_dense_one_and_differs_from_it_by_the_mask_alone(model, tmp_path, budget, prompt):
    config = resolve({"selection": SELECTION | {"budget_tokens": budget}, "min_context_tokens": 0}, "unique")
    settings = TrainingSettings(
        steps=8, hard_steps=8, sequence_tokens=64, rows_per_step=1, learning_rate=1e-2, warmup_steps=0, lora_rank=0,
        distillation=0.0, retention=1e3, dense_prompts=True, measure_every=8, save_every=8,
    )  # fmt: skip
    run = Run(model, tmp_path / "out", ServedSelection.of(config), section_of(config), settings)
    row = next(each for each in rows() if each.packing.lengths == (64,))
    row = row._replace(prompts=(prompt,), learned=[position > 20 for position in range(64)])
    trainer = Trainer(run, [row], TOKENIZER, "cpu")
    first, *_, last = [trainer.step() for _ in range(8)]
    # What fits the budget and what belongs to the prompt is attended whole.
    if budget == 512 or prompt == 64:
        assert first["divergence"] == first["drift"] == 0
        return
    # The prompt is read densely and cannot differ at first; drift is a mean over its tokens, too.
    assert 0 < first["drift"] < first["divergence"]
    assert last["drift"] < 0.7 * first["drift"]
