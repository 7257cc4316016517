"""Numbers of papers beside those measured here."""

import inspect
import json

import pytest
from support.bench.pages import ABOUT

from bench.common.results import RESULTS, ROOT
from bench.pages import measured, reproduction, sinks
from bench.pages.measured import Found
from bench.pages.reproduction import Claim

CLAIMS = [claim for claims in reproduction.CLAIMS.values() for claim in claims]
FILE = RESULTS / "cpu-2core" / "real" / "pages.jsonl"


def test_every_measured_value_stands_beside_a_claim():
    public = {
        name for name, found in inspect.getmembers(measured, inspect.isfunction)
        if found.__module__ == measured.__name__ and not name.startswith("_")
    }  # fmt: skip
    assert {claim.here.__name__ for claim in CLAIMS if claim.here} == public


def test_a_claim_that_is_not_measured_says_so(monkeypatch):
    claims = [Claim("Table 1", "2.0", "no data"), Claim("Table 2", "3.0", "GPU", lambda: Found("4.0", [FILE]))]
    monkeypatch.setitem(reproduction.CLAIMS, "art", claims)
    found = reproduction.art()
    assert found.text.splitlines()[2:] == [
        "| Table 1 | 2.0 | not measured |  | no data |",
        "| Table 2 | 3.0 | 4.0 | CPU | GPU |",
    ]
    assert found.sources == [FILE]


def test_the_page_stays_short():
    assert len((ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8").split()) <= 1500


@pytest.fixture
def rows(tmp_path, monkeypatch):
    about = {"text": "prose/8/0", "kind": "prose", "context_tokens": 8}
    rows = [
        *(about | {"arm": "layer", "layer": layer, "mass": 0.1 * layer, "query_cosine": 0.5} for layer in range(3)),
        about | {"arm": "layer", "layer": 0, "mass": 0.9, "context_tokens": 4},
        about | {"arm": "level", "level": 0.8, "queries": 3, "ratio": 10.0},
        about | {"arm": "level", "level": 0.8, "queries": 1, "ratio": 2.0},
        *(about | {"arm": arm, "nats": 1.0} for arm in sinks.WINDOWS),
        about | {"text": "prose/8/1", "arm": "dense", "nats": 9.0},
    ]
    path = tmp_path / "sinks.jsonl"
    path.write_text("\n".join(map(json.dumps, [ABOUT, *rows])))
    monkeypatch.setattr(sinks, "SINKS", path)


@pytest.mark.usefixtures("rows")
def test_layers_are_shown_in_three_parts():
    lines = sinks.layers().text.splitlines()[2:]
    assert [line.split(" | ")[:2] for line in lines] == [
        ["| 0 to 0", "0.00"], ["| 1 to 1", "0.100"], ["| 2 to 2", "0.200"],
    ]  # fmt: skip
    assert lines[0].endswith("| - / - | - / - | 0.500 | - / - | - / - |")


@pytest.mark.usefixtures("rows")
def test_levels_weigh_each_query_the_same():
    assert sinks.level_mean(0.8, 8, "ratio") == pytest.approx(8.0)
    assert sinks.perplexity("window", 8) == pytest.approx(2.71828, rel=1e-4)
    heading, _, *lines = sinks.windows().text.splitlines()
    assert heading == "| each token reads | essays, 8 tokens |"
    assert all(line.endswith(" | 1.00 (2.7) |") for line in lines)
