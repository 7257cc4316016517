"""Training: data, schedules, the attention of a whole model, and a run that is killed and goes on."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sparse_kernels.masked_attention import Packing
from sparse_kernels.masked_attention.reference import always_read
from support.llama import save_llama
from support.training import SETTINGS, TOKENIZER, rows
from typer.testing import CliRunner

from vllm_sparse_plugin.config import read_trained_section, resolve, section_of
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.cli.app import app
from vllm_sparse_plugin.tools.training.attention import PackedAttention, ServedSelection, _attend_densely
from vllm_sparse_plugin.tools.training.data import Document, pack, read_documents
from vllm_sparse_plugin.tools.training.loss import row_loss
from vllm_sparse_plugin.tools.training.model import load_model
from vllm_sparse_plugin.tools.training.settings import TrainingSettings, parse_settings, step_at
from vllm_sparse_plugin.tools.training.trainer import CURVES, LOG, Run, Trainer

SELECTION = {"page_size": 8, "budget_tokens": 24, "statistics": "int8"}
CONFIG = resolve({"selection": SELECTION, "min_context_tokens": 0}, "unique")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "tiny", longest=256)


def run_of(model: Path, output: Path, settings: TrainingSettings = SETTINGS) -> Run:
    return Run(model, output, ServedSelection.of(CONFIG), section_of(CONFIG), settings)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_documents_are_cut_and_packed_and_nothing_is_lost():
    documents = [Document(list(range(begin, begin + 25)), 10) for begin in (0, 100, 200)] + [Document([7], 0)]
    packed = pack(documents, 10, seed=3)
    assert all(len(row.tokens) == row.packing.num_tokens <= 10 for row in packed)
    learned = [token for row in packed for token, is_learned in zip(row.tokens, row.learned, strict=True) if is_learned]
    # The first token of a piece has nothing before it.
    assert sorted(learned) == sorted(t + b for b in (0, 100, 200) for t in (*range(11, 20), *range(21, 25)))
    assert pack(documents, 10, seed=3) == packed


def test_every_piece_of_a_document_begins_as_a_text_does():
    text = Document([0, *range(1, 41)], 18)
    rows = sorted(pack([text], 16, seed=0, begin=[0]), key=lambda row: row.tokens[1])
    # The first piece is all prompt.
    assert [row.tokens for row in rows] == [[0, *range(16, 31)], [0, *range(31, 41)]]
    assert [row.learned.index(True) for row in rows] == [3, 2]
    assert all(all(row.learned[3:]) for row in rows)


def test_the_end_of_a_text_follows_what_counts_as_its_prompt():
    # What does not begin with a prompt in its piece belongs to a completion, all of it.
    (*_, tail) = sorted(pack([Document(list(range(40)), 10)], 16, seed=0, decoded_tokens=8), key=lambda row: row.tokens)
    assert (tail.tokens, tail.prompts, sum(tail.learned)) == (list(range(32, 40)), (0,), 7)
    documents = [Document(list(range(50)), 0), Document(list(range(100, 130)), 20), Document(list(range(200, 205)), 0)]
    rows = pack(documents, 100, seed=0, decoded_tokens=8)
    (row,) = rows
    begins = [sequence.begin for sequence in row.packing.sequences(8)]
    by_first = {row.tokens[begin]: prompt for begin, prompt in zip(begins, row.prompts, strict=True)}
    assert by_first == {0: 42, 100: 20, 200: 3}
    learned = {token for token, is_learned in zip(row.tokens, row.learned, strict=True) if is_learned}
    assert learned == {*range(42, 50), *range(120, 130), 203, 204}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("no json", "data: got 'no json' in line 1, allowed: a JSON object with a `text`, or with a `prompt` and a"),
        ('{"text": "a"}\n[1]', "data: got '[1]' in line 2, allowed: a JSON object"),
        ('{"text": "a", "prompt": "b", "completion": "c"}', 'data: got \'{"text"'),
        ('{"prompt": "b"}', 'data: got \'{"prompt"'),
        ("", "data: got "),
    ],
)
def test_bad_data_ends_in_a_sentence(tmp_path, text, sentence):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as error:
        read_documents(path, TOKENIZER)
    assert str(error.value).startswith(sentence)


def test_only_completions_are_learned(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "ab", "completion": "c"}\n\n{"text": "xy"}\n')
    assert read_documents(path, TOKENIZER) == [Document([0, 1, 2, 1], 2), Document([23, 24, 1], 0)]


def test_steps_are_soft_and_ever_harder_and_then_hard():
    settings = TrainingSettings(
        steps=10, hard_steps=3, temperature=2.0, final_temperature=0.5, warmup_steps=1, first_budget_tokens=256
    )
    steps = [step_at(settings, number, 64, 8) for number in range(10)]
    assert [step.temperature is None for step in steps] == [False] * 7 + [True] * 3
    assert [steps[0].temperature, steps[3].temperature] == pytest.approx([2.0, 1.0])
    assert steps[6].temperature == pytest.approx(0.5)
    assert [step.budget_tokens for step in steps] == [256, 200, 160, 128, 104, 80, 64, 64, 64, 64]
    assert steps[0].rate == pytest.approx(settings.learning_rate / 2)
    assert all(later.rate < step.rate for step, later in itertools.pairwise(steps[1:]))
    assert step_at(TrainingSettings(steps=3), 0, 64, 8).temperature is None


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"steps": 0}, "settings.steps: got 0, allowed: an integer from 1 to 10000000"),
        ({"stps": 1}, "settings.stps: got unknown key, allowed: steps, hard_steps, "),
        ({"steps": 5, "hard_steps": 6}, "settings.hard_steps: got 6, allowed: up to the 5 steps"),
        (
            {"straight_through": True, "dense_prompts": False},
            "settings.straight_through: got true, allowed: with dense_prompts",
        ),
        (
            {"dense_prompts": False, "selection_loss": 0.5},
            "settings.selection_loss: got 0.5, allowed: with dense_prompts",
        ),
        ({"gradient_checkpointing": 1}, "settings.gradient_checkpointing: got 1, allowed: true or false"),
    ],
)
def test_bad_settings_end_in_a_sentence(values, sentence):
    with pytest.raises(ConfigurationError) as error:
        parse_settings(values)
    assert str(error.value).startswith(sentence)


def test_scores_have_a_loss_of_their_own_where_prompts_are_dense():
    assert parse_settings({}).selection_loss > 0
    assert parse_settings({"dense_prompts": False}).selection_loss == 0


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ConfigurationError, match=r"^sparse_attention\.selection\.policy: got 'quest', allowed: "):
        ServedSelection.of(resolve(None, "quest"))
    with pytest.raises(ConfigurationError, match=r"^sparse_attention\.selection\.statistics: got 'sketch', allowed "):
        ServedSelection.of(resolve({"selection": {"statistics": "sketch"}}, "unique"))
    attention = PackedAttention(ServedSelection.of(CONFIG), "tiny")
    with pytest.raises(ConfigurationError, match=r"^model: got 'tiny' with learned attention sinks, capped logits or "):
        attention._attend(None, torch.zeros(1), torch.zeros(1), torch.zeros(1), None, sliding_window=8)


def test_the_command_says_what_is_wrong(tmp_path):
    (tmp_path / "data.jsonl").write_text("{}\n")
    arguments = ["train", "--data", str(tmp_path / "data.jsonl"), "--output", str(tmp_path / "out")]
    for more, sentence in (
        ([], "data: got '{}' in line 1, allowed: "),
        (["--settings", "[]"], "settings: got '[]', allowed: a JSON object"),
        (["--budget-tokens", "7"], "sparse_attention.selection.budget_tokens: got 7, allowed: "),
        (["--settings", '{"sequence_tokens": 65536}'], "settings.sequence_tokens: got 65536, allowed: the model's "),
        (
            ["--additional-config", '{"sparse_attention": {"first_dense_layers": 8}}'],
            "sparse_attention.first_dense_layers: got 8, allowed for training: less than the model's 8 layers",
        ),
    ):
        done = CliRunner().invoke(app, arguments + more)
        assert isinstance(done.exception, ConfigurationError)
        assert str(done.exception).startswith(sentence)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (
            Document(list(range(900)), 0),
            "data: got documents of up to 900 tokens, allowed: some of more than 1023, because ",
        ),
        # The first token of a row is not predicted, and the rest is prompt.
        (
            Document(list(range(8193)), 8192),
            "data: got 'data.jsonl', whose prompts fill rows of 8192 tokens, allowed: ",
        ),
    ],
)
def test_data_that_teaches_nothing_is_refused(tmp_path, monkeypatch, document, sentence):
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text("")
    monkeypatch.setattr("vllm_sparse_plugin.tools.training.data.read_documents", lambda path, tokenizer: [document])
    done = CliRunner().invoke(app, ["train", "--data", "data.jsonl", "--output", "out"])
    assert isinstance(done.exception, ConfigurationError)
    assert str(done.exception).startswith(sentence)
    assert not Path("out").exists()


def test_a_packed_row_is_its_documents_and_a_large_budget_is_dense(model):
    from transformers import AutoModelForCausalLM

    served = replace(ServedSelection.of(CONFIG), selection=CONFIG.selection.model_copy(update={"budget_tokens": 512}))
    attention = PackedAttention(served, "tiny")
    loaded = load_model(model, attention, torch.float32).eval()
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    (row,) = pack([Document(list(range(2, 52)), 0), Document(list(range(60, 90)), 0)], 100, seed=0)
    positions = torch.cat([torch.arange(length) for length in row.packing.lengths])[None]
    with torch.no_grad():
        parts = torch.tensor(row.tokens).split(row.packing.lengths)
        wanted = torch.cat([plain(part[None]).logits[0] for part in parts])
        got = {}
        for name, mask in (("dense", None), ("hard", served.mask(None)), ("soft", served.mask(1.0)),
                           ("sparse", served.mask(None, 24))):  # fmt: skip
            with attention.using(row.packing, mask):
                got[name] = loaded(torch.tensor(row.tokens)[None], position_ids=positions).logits[0]
    for name in ("dense", "hard", "soft"):
        torch.testing.assert_close(got[name], wanted, rtol=1e-3, atol=1e-3)
    assert (got["sparse"] - wanted).abs().max() > 0.1


@pytest.mark.parametrize("budget", [24, 96])
def test_under_autocast_all_is_attended_in_16_bits(monkeypatch, budget):
    """Positions leave queries and keys in float32 there; a server has them, as values, in 16 bits."""
    attention, seen = PackedAttention(ServedSelection.of(CONFIG), "tiny"), []
    for name in ("masked_attention", "_attend_densely"):
        monkeypatch.setattr(
            f"vllm_sparse_plugin.tools.training.attention.{name}",
            lambda *given, of=name: seen.append((of, given)) or given[0],
        )
    query, key = torch.zeros(1, 4, 100, 32), torch.zeros(1, 2, 100, 32)
    value, mask = torch.zeros(1, 2, 100, 32, dtype=torch.bfloat16), ServedSelection.of(CONFIG).mask(1.0, budget)
    with attention.using(Packing((100,)), mask):
        attention._attend(SimpleNamespace(layer_idx=1), query, key, value, None)
    ((name, given),) = seen
    # What a mask leaves whole is attended without it.
    assert name == ("masked_attention" if budget == 24 else "_attend_densely")
    assert [x.dtype for x in given[:3]] == [torch.bfloat16] * 3


@pytest.mark.parametrize("multiple", [8, 64])
def test_sequences_that_are_lengthened_for_a_gpu_attend_as_before(multiple):
    torch.manual_seed(0)
    lengths = (1, 63, 64, 65)
    inputs = [torch.randn(sum(lengths), heads, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    weights = torch.randn(sum(lengths), 4, 16, dtype=torch.float64)
    results = []
    for each in (1, multiple):
        output = _attend_densely(*inputs, Packing(lengths), 0.25, each)
        results.append((output, *torch.autograd.grad((output * weights).sum(), inputs)))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_a_mask_knows_what_it_leaves_whole():
    for budget, context, whole in ((24, 31, True), (24, 32, False), (96, 103, True), (96, 104, False)):
        mask = ServedSelection.of(CONFIG).mask(1.0, budget)
        assert mask.reads_all(context) == whole
        pages = context // 8
        always = always_read(context, pages, mask, torch.device("cpu"))
        assert always.all() == whole
    assert replace(mask, dense_tokens=200).reads_all(200)


@pytest.mark.parametrize("temperature", [None, 0.5])
def test_prompts_attend_densely_and_what_follows_under_the_mask(model, monkeypatch, temperature):
    """Held to a mask that leaves contexts whole up to the end of the prompt, one sequence at a time."""
    monkeypatch.setattr("vllm_sparse_plugin.tools.training.attention._LOGITS_AT_ONCE", 17 * 4 * 90)
    attention = PackedAttention(ServedSelection.of(CONFIG), "tiny")
    loaded, mask = load_model(model, attention, torch.float32).eval(), ServedSelection.of(CONFIG).mask(temperature)
    lengths, prompts = (90, 77), (50, 0)
    tokens = torch.randint(2, 97, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    weight = torch.randn(sum(lengths), 97, generator=torch.Generator().manual_seed(2))

    def pass_of(part, weight, packing, mask, prompts=None):
        positions = torch.cat([torch.arange(length) for length in packing.lengths])[None]
        loaded.zero_grad()
        with attention.using(packing, mask, prompts):
            logits = loaded(part[None], position_ids=positions).logits[0]
            (logits * weight).sum().backward()
        return logits.detach(), [parameter.grad.clone() for parameter in loaded.parameters()]

    got, gradients = pass_of(tokens, weight, Packing(lengths), mask, prompts)
    alone = [
        pass_of(part, own, Packing((length,)), replace(mask, dense_tokens=prompt))
        for part, own, length, prompt in zip(
            tokens.split(lengths), weight.split(lengths), lengths, prompts, strict=True
        )
    ]
    torch.testing.assert_close(got, torch.cat([logits for logits, _ in alone]), rtol=1e-4, atol=1e-4)
    for gradient, *parts in zip(gradients, *(each for _, each in alone), strict=True):
        torch.testing.assert_close(gradient, sum(parts), rtol=1e-3, atol=1e-3 * float(gradient.abs().max()))
    whole, _ = pass_of(tokens, weight, Packing(lengths), None)
    torch.testing.assert_close(got[:50], whole[:50], rtol=1e-4, atol=1e-4)
    assert (got[50:90] - whole[50:90]).abs().max() > 0.1


def test_straight_through_says_what_is_served_with_the_gradients_of_the_soft_mask():
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, heads, 90, 32, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    soft = ServedSelection.of(CONFIG).mask(0.5)
    attention = PackedAttention(ServedSelection.of(CONFIG), "tiny")

    def pass_of(mask, is_exact):
        with attention.using(Packing((90,)), mask, (40,), is_exact):
            output, _ = attention._attend(SimpleNamespace(layer_idx=1), *inputs, None)
            return output.detach(), torch.autograd.grad(output.square().sum() if mask.is_hard else output.sum(), inputs)

    served, _ = pass_of(replace(soft, temperature=None), False)
    softly, wanted = pass_of(soft, False)
    got, gradients = pass_of(soft, True)
    # The difference to the soft one is added, which rounds once more.
    torch.testing.assert_close(got, served, rtol=1e-6, atol=1e-6)
    assert (got - softly).abs().max() > 0.1
    for gradient, expected in zip(gradients, wanted, strict=True):
        assert torch.equal(gradient, expected)


def test_scores_learn_from_what_is_decoded_and_the_same_where_activations_are_computed_again(model, monkeypatch):
    """In parts and packed, held to one sequence at a time, whole; prompts give no loss."""
    attention, mask = PackedAttention(ServedSelection.of(CONFIG), "tiny"), ServedSelection.of(CONFIG).mask(None)
    loaded = load_model(model, attention, torch.float32)
    tokens = torch.randint(2, 97, (160,), generator=torch.Generator().manual_seed(1))

    def loss_of(part, lengths, prompts):
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        loaded.zero_grad()
        shares = {}
        with torch.no_grad(), attention.using(Packing(lengths), None, prompts, shares=shares):
            loaded(part[None], position_ids=positions)
        with attention.using(Packing(lengths), mask, prompts, shares=shares):
            loaded(part[None], position_ids=positions)
            loss = attention.selection_loss(part.device)
            loss.backward()
        return loss.detach(), {name: weight.grad for name, weight in loaded.named_parameters()}

    alone = [loss_of(*each) for each in ((tokens[:90], (90,), (50,)), (tokens[90:], (70,), (0,)))]
    monkeypatch.setattr("vllm_sparse_plugin.tools.training.attention._LOGITS_AT_ONCE", 17 * 4 * 90)
    packed = loss_of(tokens, (90, 70), (50, 0))
    loaded.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loaded.train()
    for loss, gradients in (packed, loss_of(tokens, (90, 70), (50, 0))):
        torch.testing.assert_close(loss, alone[0][0] + alone[1][0], rtol=1e-5, atol=0)
        for name, gradient in gradients.items():
            parts = [each[name] for _, each in alone if each[name] is not None]
            # Values and what follows the last layer's attention are not in it.
            assert (gradient is None) == (not parts), name
            if parts:
                torch.testing.assert_close(gradient, sum(parts), rtol=1e-3, atol=1e-4 * float(sum(parts).abs().max()))
    assert packed[1]["model.layers.0.self_attn.k_proj.weight"].abs().max() > 0
    assert loss_of(tokens[:90], (90,), (89,))[0] > 0
    assert attention.selection_loss(tokens.device) == 0


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


def test_what_is_decoded_is_computed_again_only_where_activations_are(model, tmp_path, monkeypatch):
    from vllm_sparse_plugin.tools.training import attention

    row = next(each for each in rows() if each.packing.lengths == (64,))._replace(prompts=(20,))
    calls, attend = [], attention._attend_decoded
    monkeypatch.setattr(attention, "_attend_decoded", lambda *part: calls.append(1) or attend(*part))
    found = {}
    for again in (False, True):
        settings = TrainingSettings(steps=1, sequence_tokens=64, rows_per_step=1, gradient_checkpointing=again)
        calls.clear()
        step = Trainer(run_of(model, tmp_path / str(again), settings), [row], TOKENIZER, "cpu").step()
        found[again] = len(calls), {name: step[name] for name in ("divergence", "selection_loss", "gradient_norm")}
        weighted = step["divergence"] + 4 * step["drift"] + 4 * step["selection_loss"]
        assert step["objective"] == pytest.approx(weighted, rel=1e-3, abs=1e-4)
    once, twice = found.values()
    assert once[1] == twice[1]
    assert once[1]["gradient_norm"] > 0
    assert 0 < once[0] < twice[0]


def test_the_loss_is_that_of_the_learned_tokens():
    logits, other = (torch.randn(9, 5, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    tokens, learned = torch.arange(9) % 5, torch.arange(9) % 3 == 1
    loss = row_loss(logits, tokens, learned, other)
    places = [1, 4, 7]
    logs, wanted = logits.log_softmax(-1), other.log_softmax(-1)
    torch.testing.assert_close(loss.text, -sum(logs[i - 1, tokens[i]] for i in places))
    expected = sum((wanted[i - 1].exp() * (wanted[i - 1] - logs[i - 1])).sum() for i in places)
    torch.testing.assert_close(loss.divergence, expected)
    torch.testing.assert_close(loss.drift, (wanted.exp() * (wanted - logs)).sum())
    assert row_loss(logits, tokens, learned, None).divergence == 0


class KilledError(Exception):
    pass


def test_a_killed_run_goes_on_where_it_was(model, tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    Trainer(run_of(model, straight), rows(), TOKENIZER, "cpu").train()

    def kill(row):
        if row.get("loss") and row["step"] == 3:
            raise KilledError

    with pytest.raises(KilledError):
        Trainer(run_of(model, killed), rows(), TOKENIZER, "cpu").train(kill)
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


def half_of_a_run(model: Path, output: Path) -> None:
    def kill(row):
        if row.get("loss") and row["step"] == 3:
            raise KilledError

    with pytest.raises(KilledError):
        Trainer(run_of(model, output), rows(), TOKENIZER, "cpu").train(kill)


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


@pytest.mark.parametrize("damage", ["half of the last line", "bytes that are no text", "no line break"])
def test_a_log_that_was_left_half_written_does_not_end_a_run(model, tmp_path, damage):
    half_of_a_run(model, tmp_path)
    log = (tmp_path / LOG).read_bytes()
    damaged = {
        "half of the last line": log[:-30],
        "bytes that are no text": log + b"\xff\xfe",
        "no line break": log[:-1],
    }
    (tmp_path / LOG).write_bytes(damaged[damage])
    again = Trainer(run_of(model, tmp_path), rows(), TOKENIZER, "cpu")
    assert again.steps == 2
    assert [row["step"] for row in again.log] == [0, 1, 2]


@pytest.mark.parametrize("content", ["", "\n", "{", '{"date": "2026', "[]"])
def test_a_log_without_its_first_line(model, tmp_path, content):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / LOG).write_text(content)
    # Nothing was trained yet: the run begins.
    assert Trainer(run_of(model, tmp_path / "new"), rows(), TOKENIZER, "cpu").steps == 0
    half_of_a_run(model, tmp_path / "old")
    (tmp_path / "old" / LOG).write_text(content)
    with pytest.raises(
        ConfigurationError, match=r"^output: got .*, which has checkpoints without the beginning of tra"
    ):
        Trainer(run_of(model, tmp_path / "old"), rows(), TOKENIZER, "cpu")
    assert (tmp_path / "old" / LOG).read_text() == content


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


def test_a_folder_with_a_model_of_another_origin_is_not_written_over(model, tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(model, folder)
    with pytest.raises(ConfigurationError, match=r"^output: got .*, which has a model already, allowed: a new folder$"):
        Trainer(run_of(model, folder), rows(), TOKENIZER, "cpu")


def test_a_disk_that_fills_up_ends_a_run_in_one_sentence_and_keeps_the_last_state(model, tmp_path, monkeypatch):
    half_of_a_run(model, tmp_path)
    trainer = Trainer(run_of(model, tmp_path), rows(), TOKENIZER, "cpu")
    for error in (OSError(28, "No space left on device"), RuntimeError("[enforce fail] PytorchStreamWriter failed")):

        def save(folder: str, error=error, **_: object) -> None:
            Path(folder).mkdir(exist_ok=True)
            raise error

        monkeypatch.setattr(trainer._accelerator, "save_state", save)
        with pytest.raises(
            ConfigurationError, match=r"^output: got .* \(.*(space|failed).*\), allowed: a folder that can"
        ):
            trainer._save()
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
    with pytest.raises(ConfigurationError, match=r"^output: got .* without its checkpoints, allowed: a new folder$"):
        Trainer(run_of(model, tmp_path, settings), rows(), TOKENIZER, "cpu")
    assert (tmp_path / LOG).read_text() == log


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
