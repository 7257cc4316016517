"""Data, schedules, settings and losses of training, and what is refused."""

import itertools
from pathlib import Path

import pytest
import torch
from support.training import CONFIG, TOKENIZER
from typer.testing import CliRunner

from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.cli.app import app
from vllm_sparse_plugin.tools.training.attention import PackedAttention, ServedSelection
from vllm_sparse_plugin.tools.training.data import Document, pack, read_documents
from vllm_sparse_plugin.tools.training.loss import row_loss
from vllm_sparse_plugin.tools.training.settings import TrainingSettings, parse_settings, step_at


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
    assert steps[0].rate == pytest.approx(settings.peak_rate / 2)
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
            "settings.straight_through: got True, allowed: with dense_prompts",
        ),
        (
            {"dense_prompts": False, "selection_loss": 0.5},
            "settings.selection_loss: got 0.5, allowed: with dense_prompts",
        ),
        ({"equal_rows": True, "rows_at_once": 2}, "settings.rows_at_once: got 2, allowed: 1 with equal_rows"),
        ({"gradient_checkpointing": 1}, "settings.gradient_checkpointing: got 1, allowed: true or false"),
    ],
)
def test_bad_settings_end_in_a_sentence(values, sentence):
    with pytest.raises(ConfigurationError) as error:
        parse_settings(values)
    assert str(error.value).startswith(sentence)


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ConfigurationError, match=r"^sparse_attention\.selection\.policy: got 'quest', allowed: "):
        ServedSelection.of(resolve(None, "quest"))
    with pytest.raises(ConfigurationError, match=r"^sparse_attention\.selection\.statistics: got 'sketch', allowed "):
        ServedSelection.of(resolve({"selection": {"statistics": "sketch"}}, "unique"))
    with pytest.raises(ConfigurationError, match=r"statistics: got 'leveled_quarters', allowed for training: quarters"):
        ServedSelection.of(resolve({"selection": {"statistics": "leveled_quarters"}}, "unique"))
    attention = PackedAttention(ServedSelection.of(CONFIG), "tiny")
    with pytest.raises(ConfigurationError, match=r"^model: got 'tiny' with learned attention sinks, capped logits, "):
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
        # The held-out loss "as served" would be that of another selection.
        (
            ["--additional-config", '{"sparse_attention": {"compaction": {"method": "snapkv"}}}'],
            "sparse_attention.compaction: got snapkv, allowed: null for training",
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
            "data: got documents of up to 900 tokens, allowed: some of more than 1031, because ",
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
