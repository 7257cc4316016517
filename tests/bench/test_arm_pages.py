"""The blocks and the figure about the arms of a training study, from drawn rows."""

import json

import pytest
from support.bench.pages import ABOUT

from bench.common.arms import Cell, changes, losses, questions
from bench.pages import arms, figures, longer, selection

SCORES = {
    ("before", None): (1.0, 1.0, 0.5, 0.5), ("before", 512): (0.5, 0.5, 0.5, 0.25),
    ("before", 64): (0.0, 0.0, 0.0, 0.0),
    ("dense", None): (1.0, 1.0, 1.0, 0.9), ("dense", 64): (0.1, 0.2, 0.1, 0.2),
    ("soft", None): (0.9, 0.9, 0.9, 0.9), ("soft", 64): (0.4, 0.5, 0.4, 0.5),
    ("hard", None): (0.9, 0.9, 0.9, 0.9), ("hard", 64): (0.8, 0.9, 0.8, 1.0),
}  # fmt: skip


def rows_of(arm, seed, shift=0.0):
    own = {"arm": arm, "seed": seed, "lora_rank": 0}
    for (name, budget), scores in SCORES.items():
        if name == arm:
            for task, values in (("b", scores[2:]), ("a", scores[:2])):
                about = {"part": "questions", "task": task, "context_tokens": 4096, "budget_tokens": budget}
                yield own | about | {"scores": [value + shift for value in values]}
            loss = 2.0 if budget is None else 2.5
            same = [0.95, 0.97] if budget is None else [0.85, 0.89]
            text = {"part": "text", "text": "code", "budget_tokens": budget, "losses": [loss, loss + shift]}
            yield own | text | {"same_as_before": same, "same_as_dense": same}
    for step in (0, 2):
        yield own | {"step": step, "dense_loss": 2.0, "served_loss": 3.0 - step, "agreement": 0.5}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    monkeypatch.setattr(arms, "FOLDER", tmp_path)
    noise = {
        "arm": "before",
        "seed": 0,
        "lora_rank": 0,
        "part": "noise",
        "text": "code",
        "same_as_before": [0.97, 0.99],
    }
    files = {
        "one": [noise, *rows_of("before", 0), *rows_of("dense", 0), *rows_of("soft", 0)],
        "two": [*rows_of("hard", 0), *rows_of("hard", 1, 0.1)],
    }
    for name, rows in files.items():
        about = ABOUT | {"budget_tokens": 64, "settings": {}}
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, [about, *rows])))
    return [row for rows in files.values() for row in rows]


def test_without_results_nothing_is_claimed(tmp_path, monkeypatch):
    monkeypatch.setattr(arms, "FOLDER", tmp_path)
    assert arms.arms().text == "Nothing has been measured on a GPU yet."
    assert not arms.claims().text


def test_items_are_joined_by_task_and_averaged_over_seeds(measured):
    assert questions(measured)[Cell("hard", 0, 64)] == pytest.approx([0.85, 0.95, 0.85, 1.05])
    assert losses(measured)[Cell("hard", 0, 64)] == pytest.approx([0.5, 0.55])
    assert changes(measured)[Cell("soft", 0, 64)] == pytest.approx([0.12, 0.10])


def test_arms_are_shown_dense_and_at_two_budgets(measured):
    lines = arms.arms().text.splitlines()
    assert lines[0].startswith("| arm | weights | RULER, dense | 512 tokens | 64 tokens | nats of text, dense |")
    assert lines[-1] == "![Training curves, and quality by budget](repository:docs/figures/training.svg)"
    before, _, soft, hard = (line.split(" | ") for line in lines[2:6])
    assert before[0].endswith("before")
    assert before[2].startswith("0.750 [")
    assert before[5].startswith("+0.000 [")
    assert soft[1] == "all"
    assert soft[3] == ""
    assert hard[4].startswith("0.925 [")
    assert hard[7].startswith("+11.0%")


def test_claims_are_confirmed_refuted_or_open(measured):
    found = {}
    for line in arms.claims().text.splitlines()[2:]:
        claim, _, _, answered, _, read = line.strip("| ").split(" | ")
        found[claim] = answered, read
    assert found == {
        "the soft mask is better than the hard mask": ("refuted", "open"),
        "the mask `soft` is better than training without": ("confirmed", "open"),
        "the mask `hard` is better than training without": ("confirmed", "open"),
        "`soft` with 64 tokens is better than 512 before": ("open", "open"),
        "`hard` with 64 tokens is better than 512 before": ("confirmed", "open"),
    }


def test_the_figure_has_a_curve_and_a_line_for_each_arm(measured):
    assert figures.draw(arms.draw_arms).startswith(b"<?xml")
    steps, scores, texts = arms.draw_arms().axes
    assert [line.get_label() for line in steps.lines] == ["before", "dense", "soft", "hard"]
    assert len(scores.containers) == len(texts.containers) == 4


def test_arms_without_questions_are_shown_and_judged_by_their_texts(measured, monkeypatch):
    rows = [row for row in measured if row["arm"] == "before" or row.get("part") != "questions"]
    monkeypatch.setattr(arms, "read_rows", lambda files: rows)
    shown = [line.split(" | ") for line in arms.arms().text.splitlines()[2:6]]
    assert [line[2] != "" for line in shown] == [True, False, False, False]
    judged = {line.split(" | ")[3] for line in arms.claims().text.splitlines()[2:]}
    assert judged == {"open"}


def test_a_longer_context_is_shown_by_arm(tmp_path, monkeypatch):
    monkeypatch.setattr(longer, "FOLDER", tmp_path)
    assert longer.longer().text == "Nothing has been measured on a GPU yet."

    def of(arm, rank, score):
        own = {"arm": arm, "seed": 0, "lora_rank": rank}
        yield own | {
            "part": "questions",
            "context_tokens": 16384,
            "task": "a",
            "budget_tokens": None,
            "scores": [score],
        }
        yield own | {"part": "questions", "context_tokens": 16384, "task": "b", "budget_tokens": None, "scores": [0.0]}
        yield own | {"part": "positions", "text": "code", "part_tokens": 2048, "losses": [2.0, 3.0 - score]}

    rows = [*of("yarn", None, 0.5), {"part": "update", "bytes": 9_800_000, "arm": "trained", "lora_rank": 16}]
    for name, some in (("one", rows), ("two", list(of("trained", 16, 1.0)))):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, [ABOUT, *some])))
    lines = longer.longer().text.splitlines()
    assert lines[0] == "|  | `yarn` | `trained, rank 16` |"
    assert lines[2].startswith("| RULER, 16K dense | 0.250 [")
    assert "| 0.500 [" in lines[2]
    assert [line.split(" [")[0] for line in lines[3:5]] == ["| nats, code to 2K | 2.000", "| nats, code to 4K | 2.500"]
    assert lines[-1] == "The update has 9.8 MB."


def test_gates_are_compared_by_document(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "GATES", tmp_path)
    assert selection.gates().text == "Nothing has been measured on a GPU yet."
    masses = {"quarters": (0.5, 0.7), "oracle": (0.8, 0.9), "gate64": (0.6, 0.8)}
    rows = [
        {
            "document": f"code-{place}", "layer": layer, "statistics": name, "page_size": 8, "target": 128,
            "record_bytes": 128, "mass": mass + (layer - 0.5) / 10,
        }
        for name, values in masses.items() for place, mass in enumerate(values) for layer in (0, 1)
    ]  # fmt: skip
    (tmp_path / "one.jsonl").write_text("\n".join(map(json.dumps, [ABOUT, {"step": 1}, *rows])))
    assert selection.gates().text.splitlines() == [
        "| model | pages by | bytes | 16 pages |",
        "|---|---|---|---|",
        f"| {ABOUT['model']} | `quarters` | 128 | 0.600 |",
        f"| {ABOUT['model']} | true weight (a bound) | 128 | 0.850 |",
        f"| {ABOUT['model']} | `gate64`, minus `quarters` | 128 | +0.100 [+0.100, +0.100] |",
        "",
        # A run that is out of time has read fewer texts than it was asked for.
        f"Held-out texts and questions: {ABOUT['model']} read 2 of code.",
    ]


def test_recipes_that_differ_in_one_setting_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(arms, "RECIPES", tmp_path)
    recipes = None, (16, 3e-4, 25), (16, 1e-3, 25), (64, 1e-3, 50)
    rows = []
    for place, recipe in enumerate(recipes):
        about = {"arm": "before" if recipe is None else "hard", "seed": 0, "lora_rank": 0}
        if recipe is not None:
            about |= dict(zip(("lora_rank", "learning_rate", "steps"), recipe, strict=True))
        for budget in (None, 64):
            losses_of = [2.0 - place / 4, 3.0 - place / 4] if budget else [1.0, 2.0]
            rows += [
                about | {"part": "text", "text": "code", "budget_tokens": budget, "losses": losses_of},
                about
                | {"part": "questions", "task": "a", "context_tokens": 4096, "budget_tokens": budget, "scores": [1.0]},
            ]
        rows.append(about | {"step": 0, "served_loss": 9.0})
    (tmp_path / "model.jsonl").write_text("\n".join(map(json.dumps, [ABOUT | {"budget_tokens": 64}, *rows])))
    first, _, second = arms.recipes().text.split("\n\n")
    lines = [[cell.strip().partition(" [")[0] for cell in line.split("|")[1:-1]] for line in first.splitlines()[2:]]
    assert lines[:3] == [
        ["before", "", "", "dense", "1.000", "+0.000"], ["before", "", "", "64", "1.000", "+1.000"],
        ["16", "0.0003", "25", "dense", "1.000", "+0.000"],
    ]  # fmt: skip
    assert [line[-1] for line in lines[3::2]] == ["+0.750", "+0.500", "+0.250"]
    (line,) = second.splitlines()[2:]
    cells = [cell.strip().partition(" [")[0] for cell in line.split("|")[1:-1]]
    assert cells == ["16", "0.0003 to 0.001", "25", "+0.000", "-0.250"]


def test_drafts_before_and_after_a_training_are_shares_of_the_drafted(tmp_path, monkeypatch):
    paths = tuple(tmp_path / f"{name}.jsonl" for name in ("before", "after"))
    monkeypatch.setattr(arms, "DRAFTS", paths)
    for path, accepted in zip(paths, (60, 75), strict=True):
        about = {"kind": "code", "context_tokens": 4096}
        rows = [
            about | {"budget_tokens": None, "drafted": 0, "accepted": 0},
            about | {"budget_tokens": 128, "drafted": 100, "accepted": accepted},
        ]
        path.write_text("\n".join(map(json.dumps, [ABOUT, *rows])))
    assert arms.drafts().text.splitlines()[2:] == ["| 128 | code | 4K | 0.600 | 0.750 |"]
