"""The study of training with the mask, on a tiny Llama with random weights and the tokenizer of needle-8m."""

import dataclasses
import json
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from sparse_kernels.masked_attention import Packing, newest_attention, page_records
from support.llama import save_llama
from typer.testing import CliRunner

from bench.common.arms import Cell, changes, losses, questions
from bench.common.models import NEEDLE_8M, TOKENIZER_FILES, load_tokenizer
from bench.common.results import read_run, read_runs
from research.real.model import Cache, Llama, read
from research.training import arms, evaluate, longer
from research.training.__main__ import app
from research.training.arms import ARMS, settings_of
from research.training.data import Amounts, Data, Question, Text, joined, prepare, read_data, write_data
from research.training.grid import parse_numbers
from research.training.report import tables
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.training.attention import PackedAttention, ServedSelection
from vllm_sparse_plugin.tools.training.data import Row
from vllm_sparse_plugin.tools.training.loss import row_loss
from vllm_sparse_plugin.tools.training.model import load_model

BUDGET, TOKENS, ANSWER = 64, 1100, 11
END = frozenset({3, 5})
BOOK = "It was the second year of the long winter, and nobody spoke of spring. "


def _tokens(seed: int, count: int) -> list[int]:
    return torch.randint(6, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _served(preset: str) -> ServedSelection:
    return ServedSelection.of(resolve({"selection": {"budget_tokens": BUDGET}}, preset))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = save_llama(tmp_path_factory.mktemp("llama"), 2048)
    for file in TOKENIZER_FILES:
        shutil.copy(NEEDLE_8M / file, folder)
    return folder


@pytest.fixture(scope="module")
def model(folder) -> Llama:
    return Llama.load(folder, "cpu", torch.float32)


@pytest.fixture(scope="module")
def asked() -> list[Question]:
    # Prompts end at several places of a page, and questions have several lengths.
    return [
        Question(
            f"task{i % 2}",
            TOKENS,
            _tokens(i, TOKENS + 3 * i),
            _tokens(50 + i, 1 + 3 * i),
            ("a", "b"),
            ANSWER - i,
        )
        for i in range(4)
    ]


@pytest.fixture(scope="module")
def data(asked) -> Data:
    drawn = [_tokens(100 + i, TOKENS) for i in range(5)]
    # Contexts of 1,024 tokens and more are under the mask, prompts among them in the training of the paper.
    rows = [Row(row, [i >= 1060 for i in range(TOKENS)], Packing((TOKENS,)), (1060,)) for row in drawn]
    texts = [Text(kind, _tokens(200 + i, TOKENS)) for i, kind in enumerate(("code", "prose"))]
    return Data(rows, texts, asked[:3])


def _one_by_one(model: Llama, question: Question, served: ServedSelection, budget: int | None) -> list[int]:
    """The answer of a question, decoded alone with the training kernels' reference."""
    layout = served.layout(model.head_size)
    cache = Cache(model, TOKENS * 2)
    read(model, torch.tensor(question.context), cache)
    mask = None if budget is None else served.mask(None, budget)

    def attend(layer, query, key, value):
        keys, values = (part.transpose(0, 1) for part in cache.put(layer, key, value))
        records = page_records(keys, Packing((len(keys),)), mask.page_size, layout.kind, layout.format)
        return newest_attention(query[0].transpose(0, 1), keys, values, records, mask, model.scale).transpose(0, 1)[
            None
        ]

    tokens, said = list(question.question), []
    while len(said) < question.answer_tokens:
        token = torch.tensor([tokens.pop(0)])
        if mask is None:
            hidden = read(model, token, cache)[-1:]
        else:
            hidden = model.hidden(token[None], torch.tensor([cache.length]), attend)[0]
            cache.length += 1
        if not tokens:
            tokens.append(int(model.logits(hidden).argmax()))
            if tokens[0] in END:
                break
            said.append(tokens[0])
    return said


@pytest.mark.parametrize("preset", ["unique_paper", "unique"])
def test_answers_are_those_of_questions_decoded_alone(model, asked, preset):
    served = _served(preset)
    answering = evaluate.Answering(model, asked, served.layout(model.head_size), served.selection.page_size)
    for budget in (None, 4 * BUDGET, BUDGET):  # an answer leaves nothing behind for the next budget
        mask = None if budget is None else served.mask(None, budget)
        found = answering.answer(mask, END, 64)
        assert found == [_one_by_one(model, each, served, budget) for each in asked]
        assert len({len(each) for each in found}) > 1


def test_answers_have_at_most_the_longest_tokens(model, asked):
    served = _served("unique_paper")
    answering = evaluate.Answering(model, asked, served.layout(model.head_size), served.selection.page_size)
    whole, cut = (answering.answer(None, END, longest) for longest in (64, 4))
    assert cut == [each[:4] for each in whole]


def test_texts_are_read_as_the_trainer_reads_its_held_out_row(folder, model):
    served, text = _served("unique"), Text("prose", _tokens(7, TOKENS))
    attention = PackedAttention(served, "tiny")
    trained = load_model(folder, attention, torch.float32)
    tokens = torch.tensor(text.tokens)
    prompt = TOKENS - evaluate.SCORED
    learned = torch.arange(TOKENS) > prompt
    reading = evaluate.ReadText(model, text)
    for mask in (None, served.mask(None), served.mask(None, 512)):
        with torch.no_grad(), attention.using(Packing((TOKENS,)), mask, (prompt,)):
            logits = trained(input_ids=tokens[None]).logits[0]
        said = reading.predict(mask, served.layout(model.head_size))
        expected = row_loss(logits, tokens, learned, None).text / int(learned.sum())
        assert said.loss == pytest.approx(expected.item(), abs=1e-4)
        assert (said.best == logits[prompt:-1].argmax(dim=-1)).float().mean() > 0.99


def test_budgets_that_read_whole_prompts_are_refused(asked):
    evaluate.check_budgets(asked, _served("unique"), (None, 1024))
    with pytest.raises(ConfigurationError, match="budgets: got 2048, allowed: below the prompts of 1100 tokens"):
        evaluate.check_budgets(asked, _served("unique"), (1024, 2048))


def test_arms_differ_in_mask_and_loss_alone():
    shared = {"steps": 50, "learning_rate": 3e-4, "rows_per_step": 3}
    found = {name: settings_of(arm, shared) for name, arm in ARMS.items()}
    assert [each.hard_steps for each in found.values()] == [50, 0, 50, 10, 50, 0]
    assert {(each.steps, each.rows_per_step, each.learning_rate, each.seed) for each in found.values()} == {
        (50, 3, 3e-4, 0)
    }
    assert {name: each.needs_teacher for name, each in found.items()} == {name: "taught" in name for name in ARMS}


def test_every_arm_is_trained_and_measured(folder, data, tmp_path):
    write_data(tmp_path / "data.xz", data)
    output, names = tmp_path / "arms.jsonl", ["before", *ARMS]
    settings = {"steps": 4, "rows_per_step": 1, "measure_every": 4, "warmup_steps": 0, "learning_rate": 1e-2}
    result = CliRunner().invoke(
        app,
        [
            "run", "--model", str(folder), "--data", str(tmp_path / "data.xz"), "--output", str(output),
            "--arm", ",".join(names), "--settings", json.dumps(settings), "--budget-tokens", "64",
            "--budgets", "512,64", "--longest", "4", "--device", "cpu",
        ],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = read_run(output).rows
    assert [(row["arm"], row["seed"]) for row in rows if row.get("part") == "noise"] == [("before", 0)] * 2
    scores, nats, changed = questions(rows), losses(rows), changes(rows)
    assert set(scores) == {Cell(name, 0, budget) for name in names for budget in (None, 512, 64)} == set(nats)
    assert {len(values) for values in scores.values()} == {3}
    assert nats[Cell("before", 0, None)] == [0.0] * 2
    assert changed[Cell("before", 0, None)] == pytest.approx([0.0] * 2, abs=0.01)  # float32 beside float32
    assert len({tuple(nats[Cell(name, 0, 64)]) for name in names}) == len(names)
    steps = [row for row in rows if "objective" in row]
    temperatures = {name: [row["temperature"] for row in steps if row["arm"] == name] for name in ARMS}
    assert temperatures["soft"][:3] == pytest.approx([1.0, 0.5 ** (1 / 3), 0.5 ** (2 / 3)])
    assert [each is None for each in temperatures["soft-hard"]] == [False, False, False, True]
    assert temperatures["dense"] == temperatures["hard"] == [None] * 4
    curves = {
        name: [row["served_loss"] for row in rows if row["arm"] == name and "served_loss" in row] for name in ARMS
    }
    assert {len(curve) for curve in curves.values()} == {2}
    assert len({curve[0] for curve in curves.values()}) == 1
    assert len({curve[1] for curve in curves.values()}) == len(ARMS)
    assert curves["dense"][0] != next(row["dense_loss"] for row in rows if "dense_loss" in row)
    # The first step of an arm has the same rows and weights, so the loss differs by the mask alone.
    first = {row["arm"]: row for row in steps if row["step"] == 1}
    assert len({first[name]["loss"] for name in ("dense", "soft", "hard")}) == 3


def test_a_grid_trains_each_recipe_once(folder, data, tmp_path):
    write_data(tmp_path / "data.xz", data)
    output = tmp_path / "grid.jsonl"

    def run(ranks: str, rates: str) -> list[tuple]:
        command = [
            "grid", "--model", str(folder), "--data", str(tmp_path / "data.xz"), "--output", str(output),
            "--lora-ranks", ranks, "--rates", rates, "--steps", "2", "--budget-tokens", "64", "--budgets", "64",
            "--settings", '{"rows_per_step": 1, "warmup_steps": 0}', "--longest", "2", "--device", "cpu",
            "--questions", "1",
        ]  # fmt: skip
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        rows = read_runs(output)[-1].rows
        assert {len(row["scores"]) for row in rows if row.get("part") == "questions"} <= {1}
        return list(
            dict.fromkeys((row["arm"], row["lora_rank"], row.get("learning_rate")) for row in rows if "part" in row)
        )

    assert run("0,2", "1e-3") == [("before", 0, None), ("taught-hard", 0, 1e-3), ("taught-hard", 2, 1e-3)]
    assert run("2", "1e-3,1e-2") == [("taught-hard", 2, 1e-2)]
    # On a GPU, low-rank updates and all weights have different precisions.
    Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)
    (shown,) = tables(read_run(output).rows)
    columns = {column.header: list(column.cells) for column in shown.columns}
    assert columns["rank"] == ["before"] * 2 + ["0"] * 2 + ["2"] * 4
    assert columns["rate"][2::2] == ["0.001", "0.001", "0.01"]
    assert len(set(columns["nats of text, minus dense before"])) == 8
    with pytest.raises(ConfigurationError, match="rates: got 'fast', allowed: numbers separated by commas"):
        parse_numbers("rates", "fast", float)


def test_seeds_change_the_order_of_rows(folder, data, tmp_path):
    write_data(tmp_path / "data.xz", data)
    result = CliRunner().invoke(
        app,
        [
            "run", "--model", str(folder), "--data", str(tmp_path / "data.xz"),
            "--output", str(tmp_path / "arms.jsonl"), "--arm", "before,dense", "--budgets", "64", "--longest", "2",
            "--settings", '{"steps": 1, "rows_per_step": 1}', "--device", "cpu", "--seeds", "0,1",
            "--models", str(tmp_path / "models"),
        ],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = read_run(tmp_path / "arms.jsonl").rows
    assert list(dict.fromkeys((row["arm"], row["seed"]) for row in rows)) == [("before", 0), ("dense", 0), ("dense", 1)]
    first, second = (row["loss"] for row in rows if "objective" in row)
    assert first != second
    assert (tmp_path / "models" / "dense-0-1" / "model.safetensors").exists()
    assert CliRunner().invoke(app, ["table", str(tmp_path / "arms.jsonl")]).exit_code == 0


def test_a_run_ends_when_its_time_is_up(folder, data, tmp_path):
    write_data(tmp_path / "data.xz", data)
    result = CliRunner().invoke(
        app,
        [
            "run", "--model", str(folder), "--data", str(tmp_path / "data.xz"),
            "--output", str(tmp_path / "arms.jsonl"), "--arm", "hard", "--budgets", "64",
            "--settings", '{"steps": 1000000}', "--device", "cpu", "--time-limit", "1",
        ],
    )  # fmt: skip
    assert result.exit_code == 3
    assert "time is up in hard, seed 0" in result.output


def test_a_training_that_ran_out_of_time_goes_on(folder, data, tmp_path, monkeypatch):
    selection = resolve({"selection": {"budget_tokens": BUDGET}}, "unique")
    settings = settings_of(ARMS["hard"], {"steps": 3, "rows_per_step": 1, "lora_rank": 2, "warmup_steps": 0})

    def losses_of(name: str, deadline: float) -> list[float]:
        trainer = arms.open_trainer(folder, tmp_path / name, data, settings, selection, None, "cpu")
        monkeypatch.setattr(trainer, "write", lambda: None)
        found = []
        with suppress(arms.OutOfTimeError):
            for row in arms.train(trainer, BUDGET, deadline):
                found += [row["loss"]] if "loss" in row else []
        return found

    clock = iter(range(100))  # it is read before each step
    monkeypatch.setattr(arms, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    straight = losses_of("straight", 50)
    assert len(straight) == 3
    assert losses_of("cut", 4) == straight[:2]
    assert losses_of("cut", 50) == straight[2:]


def test_data_are_read_as_they_were_written(data, tmp_path):
    write_data(tmp_path / "data.xz", data)
    assert read_data(tmp_path / "data.xz") == data
    (tmp_path / "other.xz").write_bytes(b"{}")
    with pytest.raises(ConfigurationError, match="allowed: a file of `prepare`"):
        read_data(tmp_path / "other.xz")


def test_joined_data_have_all_rows_and_the_texts_of_the_first(data):
    other = Data(data.rows[:2], [], [dataclasses.replace(data.questions[0], context_tokens=9)] * 3)
    found = joined([data, other], 2)
    assert found.rows == [*data.rows[:4], data.rows[0], data.rows[4]]
    assert found.texts == data.texts
    assert [(each.task, each.context_tokens) for each in found.questions] == [
        ("task0", TOKENS), ("task0", TOKENS), ("task1", TOKENS), ("task0", 9), ("task0", 9)
    ]  # fmt: skip


def test_prepared_rows_are_learned_at_their_ends_and_answers():
    tokenizer = load_tokenizer(NEEDLE_8M)
    prose = "\n".join(f"Sentence number {i} of a held-out story." for i in range(3000))
    found = prepare(tokenizer, Amounts(5000, 12, 300, 200, (4096,), 1, 2), prose, [BOOK * 900, BOOK])
    assert len(found.rows) == 13
    lengths = [len(row.tokens) for row in found.rows]
    assert max(lengths) <= 5000
    assert min(lengths) > 4500
    kinds = []
    for row in found.rows:
        assert len(row.learned) == len(row.tokens) == row.packing.num_tokens
        learned = [place for place, is_learned in enumerate(row.learned) if is_learned]
        if row is found.rows[-1]:
            assert row.packing.lengths == (2500, 2500)
            assert learned == [*range(2300, 2500), *range(4800, 5000)]
        elif row.tokens[learned[-1]] == tokenizer.eos_token_id:
            kinds.append("question")
            assert len(learned) < 300
            assert learned[0] > row.prompts[0]
        else:
            kinds.append("book" if BOOK in tokenizer.decode(row.tokens) else "text")
            assert learned == [*range(4700, 5000)]
            assert row.prompts == (4800,)
    assert {kind: kinds.count(kind) for kind in kinds} == {"question": 6, "text": 5, "book": 1}
    assert [text.kind for text in found.texts] == ["code", "code", "prose", "prose"]
    assert len(found.questions) == 8
    held_out = {answer for question in found.questions for answer in question.answers}
    texts = [tokenizer.decode(row.tokens) for row in found.rows]
    assert not [answer for answer in held_out for text in texts if answer in text]
    for question in found.questions:
        assert len(question.context) + len(question.question) + question.answer_tokens <= 4096
        if question.task != "vt":
            assert all(answer in tokenizer.decode(question.context) for answer in question.answers)


def test_rows_that_are_too_short_for_questions_are_refused():
    with pytest.raises(ConfigurationError, match="row_tokens: got 4096, allowed: 4992 or more"):
        prepare(load_tokenizer(NEEDLE_8M), Amounts(4096, 8, 200, 200, (4096,), 1, 2), "")


def test_the_loss_by_position_is_that_of_each_token(model):
    text = Text("code", _tokens(3, 700))
    (row,) = evaluate.measure_positions(model, [text], 256)
    tokens = torch.tensor(text.tokens)
    cache = Cache(model, 700)
    logits = model.logits(read(model, tokens, cache)[:-1])
    losses = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
    assert row["losses"] == pytest.approx([part.mean().item() for part in losses.split(256)], abs=1e-4)
    assert len(row["losses"]) == 3


def test_a_smallest_base_turns_the_slowest_frequency_as_far_as_before():
    config = {
        "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}, "head_dim": 64, "max_position_embeddings": 8192
    }  # fmt: skip
    forms = longer.positions(config, 32768, 5e5)
    assert list(forms) == list(longer.FORMS)
    smallest = forms["ntk"]["rope_parameters"]["rope_theta"]
    assert smallest ** (-62 / 64) * 32768 == pytest.approx(1e5 ** (-62 / 64) * 8192)
    assert forms["yarn"]["rope_parameters"]["factor"] == 4
    assert {name: form.get("max_position_embeddings") for name, form in forms.items()} == {
        name: None if name == "before" else 32768 for name in longer.FORMS
    }
    with pytest.raises(ConfigurationError, match="context: got 8192, allowed: above the model's 8192 tokens"):
        longer.positions(config, 8192, 5e5)
    with pytest.raises(ConfigurationError, match="got scaled positions"):
        longer.positions(config | {"rope_parameters": forms["yarn"]["rope_parameters"]}, 32768, 5e5)


def test_a_longer_context_is_trained_and_made_from_its_update(folder, data, tmp_path):
    write_data(tmp_path / "data.xz", data)
    models, settings = tmp_path / "models", {"steps": 2, "rows_per_step": 1, "warmup_steps": 0, "learning_rate": 1e-2}

    def run(output: str, arms: str) -> list[dict]:
        result = CliRunner().invoke(
            app,
            [
                "longer", "--model", str(folder), "--data", str(tmp_path / "data.xz"), "--arm", arms,
                "--output", str(tmp_path / output), "--models", str(models), "--context", "4K", "--lora-rank", "2",
                "--settings", json.dumps(settings), "--budget-tokens", "64", "--budgets", "64", "--longest", "2",
                "--device", "cpu",
            ],
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        return read_run(tmp_path / output).rows

    rows = run("longer.jsonl", ",".join(longer.FORMS))
    losses = {
        name: [row["losses"] for row in rows if row["arm"] == name and row.get("part") == "positions"]
        for name in longer.FORMS
    }
    assert {len(each) for each in losses.values()} == {2}
    assert len({str(each) for each in losses.values()}) == len(longer.FORMS)
    assert [row["step"] for row in rows if "objective" in row] == [1, 2]
    config = json.loads((models / "made-2" / "config.json").read_text())
    assert config["max_position_embeddings"] == 4096
    assert config["rope_parameters"] == {"rope_theta": 500_000, "rope_type": "default"}
    assert config["sparse_attention"]["selection"]["budget_tokens"] == 64

    before, trained, made = (
        load_file(each / "model.safetensors") for each in (folder, models / "trained-2", models / "made-2")
    )
    assert before.keys() == made.keys()
    for name, weight in before.items():
        moved = (trained[name] - weight).abs().max()
        assert (moved > 0) == ("_proj" in name)
        # Two factors of rank 2 are rounded to bfloat16.
        assert (made[name] - trained[name]).abs().max() <= moved * 2**-6
    update = models / "update-2.safetensors"
    assert [row["bytes"] for row in rows if row.get("part") == "update"] == [update.stat().st_size]
    assert CliRunner().invoke(
        app, ["apply", "--model", str(folder), "--update", str(update), "--output", str(tmp_path / "again")]
    ).exit_code == 0  # fmt: skip
    for file in (models / "made-2").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    with pytest.raises(ConfigurationError, match="allowed: the model that the update was trained on"):
        longer.apply_update(models / "yarn", update, tmp_path / "other")

    again = run("again.jsonl", "trained")
    assert not [row for row in again if "objective" in row]
    assert [row["losses"] for row in again if row.get("part") == "positions"] == losses["trained"]
    shown = CliRunner().invoke(app, ["table", str(tmp_path / "longer.jsonl")])
    assert shown.exit_code == 0
    assert "trained, rank 2" in shown.output
