"""The pipeline that compares page statistics, on random keys and on a tiny model with random weights."""

import json

import pytest
import torch
from sparse_kernels.batch import QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.page_coverage import Limits
from sparse_kernels.page_coverage.reference import count_pages
from support.llama import LAYERS, save_llama
from typer.testing import CliRunner

from bench.common.models import NEEDLE_8M
from bench.common.results import read_run
from research.selection.__main__ import app
from research.selection.evaluate import LEAST_PAGES, Grid, count_coverage, measure_layer
from research.selection.report import table
from research.selection.statistics import STATISTICS, Pages
from vllm_sparse_plugin.policies import UniqueSelection
from vllm_sparse_plugin.tools.diagnostics.forward import CapturingModel, LayerInputs, PagedLayer

QUERIES, SIZES = 32, (8, 16)


@pytest.fixture(scope="module")
def layer() -> LayerInputs:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(QUERIES, 2, 4, 64, generator=generator).mul(2).bfloat16()
    keys, values = (torch.randn(2, 507, 64, generator=generator).bfloat16() for _ in range(2))
    return LayerInputs(query, keys, values, 0.125)


@pytest.fixture(scope="module")
def rows(layer) -> dict:
    grid = Grid(SIZES, (24, 64, 256), (0.6, 0.9, 1.0))
    found = measure_layer(layer, STATISTICS, grid)
    return {(row["statistics"], row["page_size"], row["rule"], row["target"]): row for row in found}


@pytest.mark.parametrize("size", SIZES)
def test_weights_of_pages_are_those_of_their_tokens(layer, size):
    weights = Pages.of(layer, size).log_weights.softmax(dim=-1)
    expected = torch.nn.functional.pad(layer.weights(), (0, -507 % size)).unflatten(-1, (-1, size)).sum(dim=-1)
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize(
    "name", ["quarters", "leveled", "sketch", "unique-int8", "unique-bf16-2.0", "mean", "quest", "infllm"]
)
def test_stored_statistics_choose_what_their_policy_does(layer, rows, name):
    policy = STATISTICS[name].policy(8)
    quality = PagedLayer(layer, policy).quality(policy.model_copy(update={"budget_tokens": 64}))
    row = rows[name, 8, "budget", 64]
    assert row["mass"] == pytest.approx(quality.mass.mean().item(), abs=1e-5)
    assert row["recall"] == pytest.approx(quality.recall.mean().item(), abs=1e-5)
    assert row["pages"] == 8


def test_a_larger_lambda_prefers_pages_with_a_large_deviation(layer):
    pages = Pages.of(layer, 8)
    low, high = (STATISTICS[f"unique-bf16-{weight}"].score(pages).scores[-1] for weight in (0.5, 2.0))
    assert (low < high).all()


def test_the_oracle_is_the_best_and_a_budget_that_leaves_no_choice_is_not_measured(rows):
    for size in SIZES:
        for budget in (64, 256):
            of = {name: rows[name, size, "budget", budget] for name in STATISTICS}
            assert max(row["mass"] for row in of.values()) == of["oracle"]["mass"]
            assert of["oracle"]["mass"] > of["quarters"]["mass"] > of["newest"]["mass"]
    assert ("oracle", 8, "budget", 24) in rows
    assert ("oracle", 16, "budget", 24) not in rows


def test_the_newest_pages_are_read_whatever_the_query(layer):
    scored = STATISTICS["newest"].score(Pages.of(layer, 8))
    assert (scored.scores.diff(dim=-1) > 0).all()


def test_a_true_coverage_gets_what_was_asked_for_with_the_fewest_pages(layer):
    pages = Pages.of(layer, 8)
    scored = STATISTICS["oracle"].score(pages)
    counts = count_coverage(pages, scored, 0.8)
    shares = pages.log_weights.softmax(dim=-1).mean(dim=2)
    for query, context in enumerate(layer.context_lens.tolist()):
        complete = context // 8
        order = shares[query, :, 1 : complete - 1].sort(dim=-1, descending=True).values
        known = shares[query][:, [0, complete - 1]].sum(dim=-1)
        known += shares[query, :, complete] if complete < shares.shape[-1] else 0
        reached = known[:, None] + order.cumsum(dim=-1)
        expected = ((reached < 0.8).sum(dim=-1) + 3).clamp(min=16)
        # Weights are ranked in bfloat16.
        assert (counts[query] - expected).abs().max() <= 1


@pytest.mark.parametrize("share", [0.6, 0.9, 0.99])
def test_a_coverage_counts_as_many_pages_as_the_product_does(layer, share):
    pages = Pages.of(layer, 8)
    ours = count_coverage(pages, STATISTICS["quarters"].score(pages), share)
    policy = UniqueSelection(statistics="quarters")
    paged = PagedLayer(layer, policy)
    tokens = QueryTokens(layer.query.float(), paged.block_table, layer.context_lens)
    limits = [torch.full((QUERIES,), pages) for pages in (16, 1024)]
    expected = count_pages(
        tokens, KVCache(paged.paged_keys, paged.paged_values, paged.statistics),
        STATISTICS["quarters"].score(pages).scores, policy.page_selection(), Softmax(layer.scale),
        Limits(torch.full((QUERIES,), share), *limits),
    )  # fmt: skip
    assert (ours - expected).abs().max() <= 1
    assert (ours > 16).any()


def test_quarters_by_share_rank_the_mean_of_a_group(layer, rows):
    pages = Pages.of(layer, 8)
    scored, by_share = (STATISTICS[name].score(pages) for name in ("quarters", "quarters-by-share"))
    complete = int(pages.complete[0])
    expected = scored.log_weights[0, ..., :complete].softmax(dim=-1).mean(dim=1).bfloat16()
    assert torch.equal(by_share.scores[0, :, :complete], expected)
    assert not by_share.scores[0, :, complete:].any()
    masses = {name: rows[name, 8, "budget", 64]["mass"] for name in ("quarters", "quarters-by-share", "oracle")}
    assert masses["quarters"] < masses["quarters-by-share"] < masses["oracle"]


def test_coverages_are_measured_of_statistics_with_an_estimate(rows):
    covered = {name for name, _, rule, _ in rows if rule == "coverage"}
    assert {name for name in covered if not name.startswith("unique")} == {"quarters", "sketch", "oracle"}
    assert {name for name in STATISTICS if name.startswith("unique")} <= covered
    assert rows["quarters", 8, "coverage", 1.0]["mass"] == pytest.approx(1)
    assert rows["oracle", 8, "coverage", 0.9]["below"] == 0
    assert rows["quarters", 8, "coverage", 0.6]["pages"] < rows["quarters", 8, "coverage", 0.9]["pages"]


def test_a_context_that_is_shorter_than_a_budget_is_read_whole(tmp_path):
    layers = CapturingModel(save_llama(tmp_path, longest=512), "cpu").run(list(range(40)), 3)
    assert len(layers) == LAYERS
    for row in measure_layer(layers[0], STATISTICS, Grid((8,), (64,), (0.5,))):
        assert row["mass"] == pytest.approx(1, abs=1e-5)
        assert LEAST_PAGES <= row["pages"] <= 5


def test_a_run_writes_a_row_for_each_selection_and_a_table(tmp_path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "def f(x):\n" * 60, "completion": " return x"}, {"prompt": "import os\n" * 80}]
    prompts.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    arguments = ["--statistics", "quarters,newest", "--budget", "64,128", "--coverage", "0.9", "--queries", "2"]
    command = ["run", "--output", str(output), "--prompts", str(prompts), "--commit", "abc", *arguments]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    run = read_run(output)
    assert (run.about["model"], run.commit) == (NEEDLE_8M.name, "abc")
    # Two texts, eight layers; two budgets of both statistics and a coverage of one.
    assert len(run.rows) == 2 * 8 * (2 * 2 + 1)
    assert {row["document"] for row in run.rows} == {"line 1", "line 2"}
    assert [len(table([run], by_layer).rows) for by_layer in (False, True)] == [5, 40]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--statistics", "median"], "statistics: got 'median', allowed: quarters, "),
        (["--page-size", "4"], "page_size: got 4, allowed: 8, 16, 32"),
        (["--coverage", "1.5"], "coverage: got '1.5', allowed: numbers above 0"),
        (["--context", "1K"], "context: got 1024 tokens, allowed: 4096 or more"),
        (["--task", "poem"], "task: got 'poem', allowed: single"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(tmp_path, arguments, message):
    result = CliRunner().invoke(app, ["run", "--output", str(tmp_path / "out.jsonl"), *arguments])
    assert str(result.exception).startswith(message)
