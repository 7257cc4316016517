"""The study of coverage: what its rules read, where that can be said without a model."""

import json

import pytest
import torch

from bench.common.results import RESULTS
from research.coverage import report
from research.coverage.measure import FIXED, LEAST_PAGES, TARGETS, measure
from vllm_sparse_plugin.diagnostics.forward import LayerInputs


@pytest.fixture(scope="module")
def layer() -> LayerInputs:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 2, 4, 64, generator=generator).mul(2).bfloat16()
    keys, values = (torch.randn(2, 507, 64, generator=generator).bfloat16() for _ in range(2))
    return LayerInputs(query, keys, values, 0.125)


def test_what_a_rule_reads_has_the_weight_that_it_is_said_to_have(layer):
    found = measure(layer)
    weights = layer.weights()
    for target in TARGETS:
        true = found["true", target]
        # One page fewer would not reach the target; what is read does.
        assert true.mass.ge(target - 1e-5).all()
        assert true.pages.ge(LEAST_PAGES).all()
        for rule in ("largest", "quarters", "nothing known", "deviation", "as read"):
            # More of the same pages have more weight.
            more = found[rule, target].pages >= true.pages
            assert found[rule, target].mass[more].ge(true.mass[more] - 1e-5).all()
    # A context of 63 pages is within the budget: everything is read.
    for budget in FIXED:
        assert torch.allclose(found["fixed", budget].mass, weights.sum(dim=-1).mean(dim=-1), atol=1e-4)


def test_the_page_is_up_to_date_and_shows_an_interval_over_documents(tmp_path, monkeypatch):
    assert report.PAGE.read_text(encoding="utf-8") == report.render()
    about = json.loads((RESULTS / "cpu-2core/coverage/needle-8m.jsonl").read_text(encoding="utf-8").splitlines()[0])
    rows = [
        {"context_tokens": 4096, "document": f"d{n // 2}", "what": "text", "rule": "largest", "target": 0.9}
        | {"mass": [share, share], "pages": [10.0, 30.0], "below": [0.0, 0.5]}
        for n, share in enumerate((0.88, 0.9, 0.92, 0.94))
    ]

    drawn = tmp_path / "drawn.jsonl"
    drawn.write_text("\n".join(map(json.dumps, [about, *rows])), encoding="utf-8")
    monkeypatch.setattr(report, "footnote", lambda name, sources: f"from {name}")
    text = report._results(drawn)

    # Two documents of means .89 and .93.
    (line,) = [line for line in text.splitlines() if "largest" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:4] == ["text", "4K", "largest", "0.9"]
    assert cells[4].startswith("0.910 (")
    assert cells[5:] == ["+0.010", "25.0%", "20"]
