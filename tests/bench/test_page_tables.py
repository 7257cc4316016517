"""Tables of the generated pages: specifications, the renderer, and labels that follow from the settings of a run."""

from functools import cache

import pytest
from support.bench.pages import ABOUT, write_run

from bench.common.results import RESULTS
from bench.pages import labels, numbers, render
from bench.pages.claims import CLAIMS
from bench.pages.labels import describe
from bench.pages.numbers import FILE, MACHINE, answered, beside, changed, items, last, mean, ratio, rows_of, score
from bench.pages.render import INTERVAL, PERCENT, Cell, Line, Lines, Table, line_text, named, paths_of
from bench.pages.tables import TABLES

SPECS = {name: spec for name, spec in TABLES.items() if isinstance(spec, Table | Lines)}


@cache
def rendered(name: str) -> str:
    return render.render(SPECS[name]).text


@pytest.fixture
def results(tmp_path, monkeypatch):
    for module in (numbers, render):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", SPECS)
def test_every_file_of_a_block_is_there(name):
    spec = SPECS[name]
    patterns = spec.files if isinstance(spec, Table) else [file for line in spec.lines for file in line.files]
    assert [pattern for pattern in patterns if not paths_of([pattern])] == []


@pytest.mark.parametrize("name", SPECS)
def test_every_column_of_a_block_has_a_value(name):
    text = rendered(name)
    if isinstance(SPECS[name], Table):
        lines = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
        assert all(any(cell != "-" for cell in column) for column in zip(*lines, strict=True))
    assert "nan" not in text


def test_a_table_has_a_line_for_each_name_and_the_later_value_counts(results):
    row = {"variant": "flash_attn", "batch": 1, "ms": 10.0}
    sparse = row | {"variant": "unique", "ms": 4.0}
    write_run(results / "h200" / "s" / "a.jsonl", row | {"ms": 99.0}, row, sparse, row | {"batch": 2})
    dense, ours = last("ms", variant="flash_attn"), last("ms", variant="unique")
    block = render.render(
        Table(
            ["h200/s/*"], {"GPU": named(MACHINE), "requests": named("batch")},
            {"ms": Cell(dense), "ours": (Cell(ours), Cell(ratio(dense, ours), "({v:.1f}x)"))},
            order=lambda names: -int(names[1]),
        )
    )  # fmt: skip
    assert block.text.splitlines() == [
        "| GPU | requests | ms | ours |", "|---|---|---|---|", "| H200 | 2 | 10.00 | - |",
        "| H200 | 1 | 10.00 | 4.00 (2.5x) |",
    ]  # fmt: skip
    assert block.sources == [results / "h200" / "s" / "a.jsonl"]


def test_rows_without_a_name_have_no_line_but_others_are_compared_with_them(results):
    rows = [{"variant": name, "load": load, "rate": rate} for name, load, rate in
            (("dense", 1, 2.0), ("dense", 2, 4.0), ("h2o", 1, 6.0), ("h2o", 2, 8.0))]  # fmt: skip
    write_run(results / "cpu" / "s" / "a.jsonl", *rows)
    gain = ratio(last("rate"), beside(last("rate"), ("load",), variant="dense"))
    spec = Table(["*/s/a"], {"it": named("variant", {"h2o": "H"}), "load": named("load")}, {"gain": Cell(gain)})
    assert render.render(spec).text.splitlines()[2:] == ["| H | 1 | 3.00 |", "| H | 2 | 2.00 |"]


def test_changed_tokens_are_those_beyond_dense_attention_in_other_batches(results):
    found = {"dense-again": (1.0, 0.9), "unique-512": (0.9, 0.9)}
    rows = [{"setting": setting, "id": f"{place}", "agreement": agreement}
            for setting, shares in found.items() for place, agreement in enumerate(shares)]  # fmt: skip
    rows = rows_of([write_run(results / "h200" / "s" / "a.jsonl", *rows)])
    assert changed(setting="unique-512")(rows, rows).value == pytest.approx(0.05)
    assert Cell(changed(setting="quest"), PERCENT).text(rows, rows) == "-"


def test_an_answer_that_files_repeat_counts_once_and_is_compared_by_item(results):
    found = ("dense", 0, 1.0), ("dense", 1, 1.0), ("dense", 2, 1.0), ("art", 0, 0.0), ("art", 0, 1.0), ("art", 1, 0.0)
    rows = [{"setting": setting, "id": f"{item}", "score": value} for setting, item, value in found]
    rows = rows_of([write_run(results / "h200" / "s" / "a.jsonl", *rows)])
    assert score(setting="art")(rows, rows).count == 2
    assert answered(setting="art")(rows, rows).value == pytest.approx(0.5)
    assert Cell(score(setting="art"), INTERVAL).text(rows, rows).startswith("0.50 [")


def test_items_are_means_over_seeds_minus_those_of_another_arm(results):
    rows = [{"arm": arm, "seed": seed, "text": "code", "losses": losses} for arm, seed, losses in
            (("before", 0, [1.0, 2.0]), ("hard", 0, [2.0, 2.0]), ("hard", 1, [4.0, 2.0]))]  # fmt: skip
    rows = rows_of([write_run(results / "h200" / "s" / "a.jsonl", *rows)])
    assert items("losses", {"arm": "before"}, arm="hard")(rows, rows).value == pytest.approx(1.0)


def test_a_line_of_a_list_says_what_was_run(results):
    row = {"variant": "unique", "context_tokens": 32768, "noise_cache": True, "weights": "drawn", "ms": 3.0}
    about = {"command": "python -m bench.serving decode --skip-ratio 0.6", "date": "2026-11-26T10:00:00"}
    write_run(results / "h200" / "s" / "a.jsonl", row, **about)
    line = Line(["h200/s/a"], ("step", "{ms.value:.1f}", "{setting}"), {"ms": mean("ms")})
    assert line_text(line) == ["step", "3.0", "L, 32K tokens, budget 1,024, random keys, groups forced, H200"]


def row_of(about=None, **columns) -> dict:
    return {numbers.ABOUT: ABOUT | (about or {}), MACHINE: "H200", FILE: "a", **columns}


DATE, TUNED = {"date": "2026-11-21"}, {"sparse_attention": {"selection": {"budget_tokens": 2048}}}
EVALUATED = {"settings": {"engine": {"attention_backend": "quest"}}}


@pytest.mark.parametrize(
    ("row", "budget"),
    [
        (row_of(variant="unique"), "512 tokens"),  # the day of the run decides
        (row_of({"date": "2026-11-26"}, variant="unique:fp8"), "1,024 tokens"),
        (row_of(variant="unique", additional_config=TUNED), "2,048 tokens"),
        (row_of(variant="unique", budget_tokens=4096, additional_config=TUNED), "4,096 tokens"),
        (row_of(setting="unique_paper-1024"), "1,024 tokens"),
        (row_of(setting="unique-2048-placed15"), "2,048 tokens"),
        (row_of(setting="unique-int8-1/p8/b512"), "512 tokens"),
        (row_of(setting="snapkv+compaction.budget_ratio=0.2"), "20% kept"),
        (row_of(setting="art+stopping.scale_tolerance=1e-3"), ""),
        (row_of(study="answers", arm="h2o", ratio=0.25), "25% kept"),
        (row_of(study="adaptive", arm="zero_0.99"), "tau 0.99"),
        (row_of(study="prefill", arm="rows_local64_90"), "tau 0.90"),
        (row_of(EVALUATED, id="single/4096/0"), "512 tokens"),
        (row_of({"geometry": {"k": 128, "page_size": 8}}, op="decode", provider="unique"), "1,024 tokens"),
        (row_of(setting="dense-again"), ""),
        (row_of(variant="flash_attn", additional_config=None), ""),
    ],
)
def test_the_budget_is_that_of_the_settings(row, budget):
    assert labels.budget_of(row) == budget


@pytest.mark.parametrize(
    ("rows", "label"),
    [
        ([row_of(text="essay_7700", context_tokens=7699, setting=f"unique-{tokens}") for tokens in (512, 1024)],
         "L, 7,699 tokens, budget 1,024 / 512, essays, H200"),
        ([row_of({"model": "needle-8m"}, task="single", context_tokens=size) for size in (1024, 4096, 8192)],
         "N, 1K to 8K tokens, needle questions, H200"),
        ([row_of({"model": "model"}, task="niah_single_1", context_tokens=4096, setting="h2o+accept=not_recommended")],
         "S, 4K tokens, budget 1,024, RULER*, routing forced, H200"),
        ([row_of({"model": None}, op="stop", provider="art", case={"context": 8192})],
         "one layer, 8K tokens, drawn data, H200"),
    ],
)  # fmt: skip
def test_a_label_names_model_length_budget_text_and_what_is_forced(rows, label):
    assert describe(rows) == label


CLAIMED = [(name, place) for name, spec in CLAIMS.items() for place in range(len(spec.lines))]


@pytest.mark.parametrize(("name", "place"), CLAIMED)
def test_a_row_of_a_paper_is_labelled_by_its_files_alone(name, place):
    line = CLAIMS[name].lines[place]
    _, _, here, setting, verdict = rendered(name).splitlines()[2 + place].removeprefix("| ")[:-2].split(" | ")
    assert line.cells[3] == ("{setting}" if line.files else "")
    assert verdict
    assert bool(setting) == bool(line.files) == (here != "not measured")
    if line.files:
        machines = {paths.relative_to(RESULTS).parts[0] for paths in paths_of(line.files)}
        assert {"h200": "H200", "h100": "H100", "cpu-2core": "CPU"}[machines.pop()] in setting
