"""The study of coverage: what its rules read, where that can be said without a model."""

import json
import math
from pathlib import Path

import pytest
import torch
from sparse_kernels.batch import QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.page_coverage import Coverage
from sparse_kernels.page_coverage.reference import count_pages
from sparse_kernels.page_score.reference import score_pages
from sparse_kernels.page_statistics import codes
from sparse_kernels.page_statistics.reference import update_page_statistics
from support.llama import HEAD_SIZE, KV_HEADS, LAYERS, save_llama

from bench.common.models import NEEDLE_8M
from bench.common.results import RESULTS
from research.coverage import answers, report
from research.coverage.measure import FIXED, LEAST_PAGES, QUARTERS, TARGETS, measure
from research.study import scores
from research.study.pipeline import Decoder
from research.study.plan import PAIRS
from research.study.settings import Setting
from vllm_sparse_plugin.tools.diagnostics import forward
from vllm_sparse_plugin.tools.diagnostics.forward import LayerInputs, PagedLayer

DOCUMENT = 403
TAILS = (37, 21)


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
    about = json.loads((RESULTS / "h200/coverage/needle-8m.jsonl").read_text(encoding="utf-8").splitlines()[0])
    rows = [
        {"context_tokens": 4096, "document": f"d{n // 2}", "what": "text", "rule": "largest", "target": 0.9}
        | {"mass": [share, share], "pages": [10.0, 30.0], "below": [0.0, 0.5]}
        for n, share in enumerate((0.88, 0.9, 0.92, 0.94))
    ]

    drawn = tmp_path / "drawn.jsonl"
    drawn.write_text("\n".join(map(json.dumps, [about, *rows])), encoding="utf-8")
    monkeypatch.setattr(report, "source_line", lambda sources: f"from {sources[0].name}")
    text = report._results(drawn)

    # Two documents of means .89 and .93.
    (line,) = [line for line in text.splitlines() if "largest" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:4] == ["text", "4K", "largest", "0.9"]
    assert cells[4].startswith("0.910 (")
    assert cells[5:] == ["+0.010", "25.0%", "20"]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Decoder:
    return Decoder(save_llama(tmp_path_factory.mktemp("model"), longest=512))


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("share", [0.6, 0.8, 0.95, 1.0])
def test_a_coverage_reads_as_many_pages_as_the_product_does(decoder, monkeypatch, share):
    setting = Setting(PAIRS, budget_tokens=320, least_tokens=32, coverage=share)
    counted, attended = [], []
    # Where two codes would not be a finite word, either clears a lowest bit, and not in the same places.
    for module in (scores, codes):
        monkeypatch.setattr(module, "finite_words", lambda packed: packed)
    monkeypatch.setattr(forward, "update_page_statistics", update_page_statistics)
    select, attend = Decoder._select, Decoder._attend

    def selecting(*args):
        counted.append(args[3])
        chosen = select(*args)
        assert torch.equal((chosen >= 0).sum(dim=-1), counted[-1])
        return chosen

    def attending(self, *args):
        attended.append(args)
        return attend(self, *args)

    monkeypatch.setattr(Decoder, "_select", staticmethod(selecting))
    monkeypatch.setattr(Decoder, "_attend", attending)
    prefix = decoder.prefill(tokens(DOCUMENT, 0))
    tails = [tokens(length, 7 + length) for length in TAILS]
    decoder.decode(prefix, tails, setting)

    off = []
    for layer, query, key, value in attended:
        for i, tail in enumerate(tails):
            new = [part[i, :, : len(tail)].bfloat16() for part in (key, value)]
            keys, values = (
                torch.cat(parts, dim=1) for parts in zip((prefix.keys[layer], prefix.values[layer]), new, strict=True)
            )
            rows = query[i, :, : len(tail)].unflatten(0, (KV_HEADS, -1)).permute(2, 0, 1, 3).contiguous()
            paged = PagedLayer(LayerInputs(rows, keys, values, HEAD_SIZE**-0.5), QUARTERS)
            batch = QueryTokens(rows, paged.block_table, paged.layer.context_lens)
            scored = score_pages(rows, paged.statistics, paged.block_table, batch.num_pages(8), 0.0)
            limits = [torch.full((len(tail),), pages) for pages in (4, 40)]
            expected = count_pages(
                batch,
                KVCache(paged.paged_keys, paged.paged_values, paged.statistics),
                scored,
                QUARTERS.page_selection(),
                Softmax(HEAD_SIZE**-0.5),
                Coverage(torch.full((len(tail),), share), *limits),
            )
            ours = counted[layer].unflatten(0, (len(tails), -1))[i, : len(tail)]
            off.append((ours - expected).abs().flatten())
            assert share == 1 or (expected.unique().numel() > 2 and expected.float().mean() < 40)
    # Sums that are rounded in another order may differ at the target itself.
    assert torch.cat(off).max() <= 1
    assert torch.cat(off).float().mean() < 0.005
    assert len(counted) == LAYERS


def test_a_coverage_of_1_reads_all_pages_and_answers_as_dense_attention_does(decoder):
    prefix = decoder.prefill(tokens(DOCUMENT, 0))
    tails = [tokens(length, length) for length in TAILS]
    whole = decoder.decode(prefix, tails, Setting(PAIRS, budget_tokens=8192, coverage=1.0))
    half = decoder.decode(prefix, tails, Setting(PAIRS, budget_tokens=8192, least_tokens=32, coverage=0.5))
    dense = decoder.decode(prefix, tails, Setting())
    for i, tail in enumerate(tails):
        ours, theirs, fewer = (each.log_probability[i, : len(tail) - 1] for each in (whole, dense, half))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
        assert (fewer - theirs).abs().max() > 1e-2
    lengths = [(DOCUMENT + 1 + i) // 8 for tail in tails for i in range(len(tail))]
    assert whole.pages_read == pytest.approx(sum(lengths) / len(lengths))
    assert half.pages_read < whole.pages_read


def test_answers_are_asked_under_every_setting_and_go_on_where_time_ended_them(tmp_path, monkeypatch):
    every = answers.settings_of_rules()
    assert [key for key in every if key[0] == answers.FIXED] == [(answers.FIXED, budget) for budget in answers.BUDGETS]
    assert [key for key in every if key[0] == answers.COVERAGE] == [
        (answers.COVERAGE, share) for share in answers.TARGETS
    ]
    assert len({setting.name for setting in every.values()}) == len(every) == 13
    chosen = [(answers.DENSE, 1.0), (answers.FIXED, 64), (answers.FIXED, 512), (answers.COVERAGE, 0.5)]
    monkeypatch.setattr(answers, "TASKS_ASKED", ("kv",))
    output = tmp_path / "answers_needle-8m.jsonl"

    def ask(keys, time_limit=1e6):
        monkeypatch.setattr(answers, "settings_of_rules", lambda targets: {key: every[key] for key in keys})
        finished = answers.measure(output, NEEDLE_8M, [4096], answers.TARGETS, 1, 0, "cpu", time_limit, None)
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        return finished, [line for line in lines if "setting" in line]

    assert ask(chosen, 0) == (False, [])
    finished, begun = ask(chosen[:2])
    assert finished
    finished, rows = ask(chosen)
    assert finished
    assert rows[:2] == begun
    assert [(row["rule"], row["target"]) for row in rows] == chosen
    assert all(row["task"] == "kv" and row["asked"] == len(row["right"]) == 8 for row in rows)
    dense, few, more, covering = (row["pages_read"] for row in rows)
    assert (few, more) == (8, 64)
    assert 500 < dense < 512
    assert 16 < covering < dense
    assert rows[0]["right"].count("1") >= 7


def answer_file(path: Path) -> Path:
    about = json.loads((RESULTS / "h200/coverage/needle-8m.jsonl").read_text(encoding="utf-8").splitlines()[0])
    found = {
        ("dense", 1.0): (500.0, {"kv-0": "1111", "multikey-0": "1111"}),
        ("fixed", 64): (8.0, {"kv-0": "0000", "multikey-0": "1000"}),
        ("fixed", 512): (64.0, {"kv-0": "1110", "multikey-0": "1111"}),
        ("coverage", 0.5): (36.0, {"kv-0": "1111", "multikey-0": "1100"}),
        ("coverage", 0.1): (4.0, {"kv-0": "0001", "multikey-0": "0000"}),
    }
    rows = [
        {"task": name.split("-")[0], "context_tokens": 4096, "document": name, "rule": rule, "target": target}
        | {"setting": f"{rule}{target}", "asked": 4, "right": bits, "pages_read": pages}
        for (rule, target), (pages, right) in found.items()
        for name, bits in right.items()
    ]
    # Time ended this document after one setting: it is asked of none.
    rows.append(rows[0] | {"document": "kv-1", "right": "0000"})
    path.write_text("\n".join(map(json.dumps, [about, *rows])), encoding="utf-8")
    return path


def test_fixed_budgets_are_read_off_at_the_pages_of_a_coverage(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "source_line", lambda sources: f"from {sources[0].name}")
    folder = tmp_path / "machine" / "coverage"
    folder.mkdir(parents=True)
    text = "\n\n".join(report._equal_pages([answer_file(folder / "answers_needle-8m.jsonl")]))
    assert text.startswith("## At equal pages read")
    assert "from answers_needle-8m.jsonl" in text
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    cells = {(line[0], line[2]): line[3:] for line in lines}
    assert [task for task, name in cells if name == "dense"] == ["kv", "multikey", "all"]
    assert cells["kv", "dense"][:2] == ["500.0", "4"]
    # 36 pages lie in the middle between 8 and 64, and 4 pages below all budgets.
    assert cells["kv", "coverage 0.5"][3] == f"{(0 + 0.75) / 2:.3f}"
    assert cells["all", "coverage 0.5"][3] == f"{(1 / 8 + 7 / 8) / 2:.3f}"
    assert cells["all", "coverage 0.1"][3] == cells["all", "512 tokens"][3] == ""
    # Wilson's interval of 6 of 8.
    z, share, count = 1.959964, 0.75, 8
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    assert cells["all", "coverage 0.5"][2] == f"0.750 ({middle - reach:.3f}-{middle + reach:.3f})"
    assert not report._equal_pages([])
