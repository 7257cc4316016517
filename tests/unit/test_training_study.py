"""The study of training: its rows, its measurements that go on, and its page."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.llama import save_llama

from bench.common.models import NEEDLE_8M, load_tokenizer
from research.study.documents import Document, Tail
from research.training import report
from research.training.data import RowOrder, build_row, read_rows, write_rows
from research.training.measure import ARMS, DENSE, HARD, SOFT_HARD, Recipe, measure, settings
from research.witness.data import EOS, TOGETHER, build_document, encode
from vllm_sparse_plugin.tools.needles import library_text
from vllm_sparse_plugin.tools.training.attention import ServedSelection


def drawn(count: int, seed: int) -> list[int]:
    return torch.randint(97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_row_is_documents_whose_answers_are_learned():
    tokenizer = load_tokenizer(NEEDLE_8M)
    row = build_row(RowOrder(library_text(0, 40_000), 2048, 2, False, "3"))
    assert row.packing.lengths == (1024, 1024)
    assert row.tokens[0] == row.tokens[1024] == tokenizer.bos_token_id
    assert not row.learned[0]
    assert not row.learned[1024]
    for begin in (0, 1024):
        document = row.tokens[begin : begin + 1024]
        asked = max(tokenizer.decode(document).rfind(form) for form in ("has the value:", "Answer:"))
        answer = tokenizer.decode(document)[asked:].split(":")[1].split("<|eos|>")[0].strip()
        # The answer stands in the document and is learned to its end.
        assert all(value in tokenizer.decode(document)[:asked] for value in answer.split(", "))
        learned = row.learned[begin : begin + 1024]
        assert all(learned[-len(encode(f" {answer}")) - 1 :])
        assert 10 < sum(learned) < 600
        assert not any(learned[: row.prompts[begin // 1024]])
    text = build_row(RowOrder(library_text(0, 40_000), 2048, 1, True, "4"))
    assert EOS not in text.tokens
    assert 30 < sum(text.learned) < 230
    assert not any(text.learned[: text.prompts[0]])
    assert build_row(RowOrder(library_text(0, 40_000), 2048, 2, False, "3")) == row


def test_a_share_of_what_is_no_answer_is_learned():
    orders = [RowOrder(library_text(0, 40_000), 2048, 1, False, "3", share) for share in (0.0, 0.25, 1.0)]
    answers, some, every = map(build_row, orders)
    assert answers.tokens == some.tokens == every.tokens
    assert sum(every.learned) == 2048 - 1 - every.prompts[0]
    assert sum(answers.learned) < sum(some.learned) < sum(every.learned)
    assert all(each for each, answer in zip(some.learned, answers.learned, strict=True) if answer)


def test_a_stretch_of_few_tokens_is_drawn_again():
    """Half of this text is one long ruler, of which a tokenizer makes few tokens."""
    text = "=" * 40_000 + library_text(0, 40_000)
    rows = [build_row(RowOrder(text, 1024, 1, True, str(seed))) for seed in range(8)]
    assert {len(row.tokens) for row in rows} == {1024}
    with pytest.raises(RuntimeError, match="a stretch of text has"):
        build_row(RowOrder("=" * 40_000, 1024, 1, True, "0"))


def test_prompts_end_before_the_question_and_rows_are_kept(tmp_path):
    tokenizer = load_tokenizer(NEEDLE_8M)
    made = [build_row(RowOrder(library_text(0, 40_000), 2048, 2, is_text, "3")) for is_text in (False, True)]
    for begin, prompt in zip((0, 1024), made[0].prompts, strict=True):
        document = made[0].tokens[begin : begin + 1024]
        assert prompt > 0
        assert not any(form in tokenizer.decode(document[:prompt]) for form in ("has the value:", "Answer:"))
    assert all(1024 - 768 < prompt <= 1024 - 256 for prompt in made[1].prompts)
    write_rows(made, tmp_path / "rows")
    assert read_rows(tmp_path / "rows") == made


def test_three_needles_are_asked_for_at_once():
    document = build_document(random.Random(1), library_text(0, 9000), 2000, "multiquery", 4)
    text = load_tokenizer(NEEDLE_8M).decode(document.tokens)
    question = text[text.rindex("\nWhat are the special magic numbers for ") :]
    keys, answers = question.split(" for ")[1].split("?")[0], question.split("Answer: ")[1].removesuffix("<|eos|>")
    pairs = list(zip(keys.split(", "), answers.split(", "), strict=True))
    assert len(pairs) == TOGETHER["multiquery"]
    for key, value in pairs:
        assert f"The special magic number for {key} is: {value}." in text


def test_the_control_is_trained_without_a_mask_and_steps_are_hard_in_two_arms():
    recipes = {arm: Recipe(arm, 64, 50, 4096, {"rows_per_step": 2}) for arm in ARMS}
    assert {arm: recipe.settings(0).hard_steps for arm, recipe in recipes.items()} == dict.fromkeys(ARMS, 0) | {
        HARD: 50, SOFT_HARD: 10
    }  # fmt: skip
    assert {arm for arm, recipe in recipes.items() if recipe.settings(0).dense_prompts} == {HARD}
    assert all(recipe.settings(0).rows_per_step == 2 for recipe in recipes.values())
    masks = {arm: ServedSelection.of(recipe.config()).mask(1.0) for arm, recipe in recipes.items()}
    assert {arm for arm, mask in masks.items() if mask.reads_all(4096)} == {DENSE}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "tiny", longest=1024)


def test_a_measurement_goes_on_where_it_was(model, tmp_path):
    documents = [
        Document(f"kv-700-0-{seed}", drawn(700, seed), [Tail(drawn(20, 10 + seed + i), 4, "a") for i in range(2)])
        for seed in range(2)
    ]
    path, about = tmp_path / "results.jsonl", {"versions": {}, "arm": "before"}
    assert not measure(path, about, model, documents, "cpu", -1)
    assert measure(path, about, model, documents[:1], "cpu", 60)
    assert measure(path, about, model, documents, "cpu", 60)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if "document" in row]
    names = [name for document in documents for name in (document.name, f"text-{document.name}")]
    assert sorted((row["document"], row["setting"]) for row in rows) == sorted(
        (name, setting.name) for name in names for setting in settings()
    )
    by = {(row["document"], row["setting"]): row for row in rows}
    losses = [by[names[1], setting.name]["loss"] for setting in settings()]
    # What reads less of a model of drawn weights says something else.
    assert len(set(losses)) == len(losses)
    assert [by[names[0], setting.name]["pages_read"] for setting in settings()] == [0, 64, 32, 16, 8]


def test_labels_say_what_differs_between_arms_of_one_name():
    def trained(arm: str, **training: float) -> report.Trained:
        about = {"arm": arm, "budget_tokens": 64} | ({"training": training} if training else {})
        return report.Trained(Path(), SimpleNamespace(about=about), {})

    files = [
        trained("before"),
        trained("soft-hard", steps=300, hard_steps=60, learning_rate=3e-4),
        trained("hard", steps=300, hard_steps=300, learning_rate=3e-4),
        trained("hard", steps=300, hard_steps=300, learning_rate=3e-4, selection_loss=0.5),
        trained("hard", steps=300, hard_steps=300, learning_rate=1e-3, lora_rank=16),
    ]
    assert report.labels(files[:3]) == ["before", "soft, then hard, 64 tokens", "hard mask, 64 tokens"]
    # A file that is older than a setting was trained without it.
    assert report.labels(files)[2:] == [
        "hard mask, 64 tokens, `selection_loss` 0.0", "hard mask, 64 tokens, `selection_loss` 0.5",
        "hard mask, 64 tokens, updates of rank 16",
    ]  # fmt: skip


def test_the_page_is_up_to_date_and_compares_with_dense_attention_before(tmp_path, monkeypatch):
    assert report.PAGE.read_text(encoding="utf-8") == report.render()
    about = {"versions": {}, "model": "needle-8m", "arm": "before"}
    answers = {"before": ["1111", "1110", "1100", "1000", "0000"], "soft": ["1111", "1111", "1111", "1110", "1100"]}
    files = []
    for arm, bits in answers.items():
        rows = [about | {"arm": arm, "budget_tokens": 64}]
        for setting, right in zip(settings(), bits, strict=True):
            for document in ("a", "b", "c"):
                rows.append({"document": document, "setting": setting.name, "right": right, "pages_read": 1})
                rows.append({"document": f"text-{document}", "setting": setting.name, "loss": 1.5})
        files.append(tmp_path / f"{arm}.jsonl")
        files[-1].write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(report, "RESULT_FILES", files)
    monkeypatch.setattr(report, "source_line", lambda sources: f"from {sources[0].name}")
    lines = [[cell.strip() for cell in line.split("|")] for line in report.tables().splitlines()]
    (before, shares), (soft, after) = ((line, lines[i + 1]) for i, line in enumerate(lines) if "right" in line)
    assert [cell.split()[0] for cell in before[3:-1]] == ["1.000", "0.750", "0.500", "0.250", "0.000"]
    assert [cell.split()[0] for cell in after[3:-1]] == ["1.000", "1.000", "1.000", "0.750", "0.500"]
    assert soft[1] == "soft mask, 64 tokens"
    assert shares[2] == "of dense before"
    text = [line for line in lines if line[1:2] == ["before"]][-1]
    assert text[2:-1] == ["4.482 (+0.000 to +0.000)"] * 5


def test_a_share_that_is_kept_stands_beside_the_others_of_its_run(tmp_path, monkeypatch):
    def written(name: str, loss: float, **training: float) -> Path:
        about = {"versions": {}, "model": "needle-8m", "arm": "hard" if training else "before", "budget_tokens": 64}
        rows: list[dict] = [about | ({"training": {"steps": 9} | training} if training else {})]
        for setting in settings():
            for document in "ab":
                rows.append({"document": document, "setting": setting.name, "right": "1101", "pages_read": 1})
                rows.append({"document": f"text-{document}", "setting": setting.name, "loss": loss})
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return path

    others = [written("before", 1.5), written("tenth", 1.6, learning_rate=1e-3, kept_share=0.1),
              written("another", 1.9, learning_rate=2e-3, kept_share=0.1)]  # fmt: skip
    own = [written("none", 1.75, learning_rate=1e-3, kept_share=0.0)]
    monkeypatch.setattr(report, "RESULT_FILES", others)
    monkeypatch.setattr(report, "KEPT_FILES", own)
    block = report.kept()
    assert set(block.sources) == {*own, others[1]}
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.text.splitlines()[2:]]
    assert [line[:3] + line[-1].split()[:1] for line in lines] == [
        ["0.001", "9", "0", "+0.2500"], ["0.001", "9", "0.1", "+0.1000"]
    ]  # fmt: skip
    assert all(line[3:-1] == ["6"] * 5 for line in lines)
