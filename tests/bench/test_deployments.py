"""The outcomes of deployments, and the cause of a failure."""

import json
import math

import pytest

from bench.common.continuations import Continuation
from bench.pages.deployments import FILES, deployments, read_cells
from bench.robustness.deployments import cells
from bench.robustness.deployments.cells import (
    EQUAL,
    NOT_HERE,
    OUTCOMES,
    TIE,
    answers_of,
    before_the_end,
    compare,
    unavailable,
)
from bench.robustness.deployments.table import DENSE, DEPLOYMENTS, NIXL, PIECEWISE, PLAIN, TENSOR_PARALLEL, Deployment
from bench.robustness.deployments.trials import TRIALS, IdleError
from bench.robustness.families.cells import FAILED, REFUSED
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.server import ServerError

ANSWER = Continuation([5, 6, 7], [{5: -0.1, 9: -3.0}, {6: -0.7, 8: -0.72}, {7: -0.2, 1: -2.0}])
AT_A_TIE = Continuation([5, 8, 1], [{5: -0.12, 9: -3.0}, {8: -0.69, 6: -0.73}, {1: -0.5, 7: -1.0}])
WRONG = Continuation([9, 6, 7], [{9: -0.1, 5: -3.0}, {6: -0.7}, {7: -0.2}])


def test_answers_are_equal_or_part_at_a_tie_or_are_wrong():
    equal = compare("x", [ANSWER], [ANSWER, ANSWER])
    assert (equal.outcome, equal.asked, equal.parted, equal.gap, equal.logprob_error) == (EQUAL, 2, 0, None, 0)
    tie = compare("x", [ANSWER, ANSWER], [ANSWER, AT_A_TIE])
    assert (tie.outcome, tie.asked, tie.parted, tie.gap) == (TIE, 2, 1, 0.02)
    wrong = compare("x", [ANSWER], [WRONG])
    assert (wrong.outcome, wrong.gap) == (FAILED, 2.9)
    assert compare("x", [ANSWER], [Continuation([4], [{4: -0.1}])]).gap == math.inf


def test_answers_survive_a_result_file():
    row = json.loads(json.dumps(compare("x", [ANSWER], [ANSWER]).with_answers([ANSWER, AT_A_TIE]).as_row()))
    assert answers_of(row) == [ANSWER, AT_A_TIE]
    assert "gap" not in row


def test_what_follows_the_end_of_an_answer_is_left_out():
    assert [each.tokens for each in before_the_end([ANSWER, WRONG], 6)] == [[5, 6], [9, 6]]
    assert before_the_end([ANSWER], 4) == [ANSWER]


def test_a_cpu_has_no_graphs_and_a_package_may_be_missing(monkeypatch):
    assert unavailable(DEPLOYMENTS[PIECEWISE]) == "a CPU has no CUDA graphs"
    assert unavailable(DEPLOYMENTS[TENSOR_PARALLEL]) == ""
    assert unavailable(Deployment("", package="no_such_package")) == "the package no_such_package is not installed"


@pytest.mark.parametrize(
    ("error", "densely", "outcome", "reason"),
    [
        (ConfigurationError("field: got a cat, allowed: a dog"), None, REFUSED, "field: got a cat, allowed: a dog"),
        (ValueError("ours\nmore"), None, FAILED, "ValueError: ours"),
        (ValueError("ours"), KeyError("theirs"), NOT_HERE, "ValueError: ours"),
        (IdleError("nothing was drafted"), KeyError("theirs"), FAILED, "nothing was drafted"),
        (ServerError("the x server ended (E: no); its log is /tmp/x"), None, FAILED, "the x server ended (E: no)"),
    ],
)
def test_who_is_to_blame_for_an_exception(error, densely, outcome, reason):
    def serve_densely() -> None:
        if densely:
            raise densely

    cell = cells.blame("x", error, serve_densely)
    assert (cell.outcome, cell.reason) == (outcome, reason)


def test_every_trial_is_of_a_deployment_and_the_plain_ones_come_first():
    assert set(TRIALS) <= set(DEPLOYMENTS)
    assert list(DEPLOYMENTS)[:2] == [DENSE, PLAIN]
    assert DEPLOYMENTS[NIXL].package == "nixl"


@pytest.mark.parametrize("device", FILES)
def test_the_matrix_of_the_page_is_that_of_the_table(device):
    found = read_cells(FILES[device])
    if not found:
        pytest.skip("was not run there yet")
    assert {DENSE, PLAIN} <= set(found) <= set(DEPLOYMENTS)
    assert {row["outcome"] for row in found.values()} <= set(OUTCOMES) - {FAILED}
    assert all(row["reason"] for row in found.values() if row["outcome"] != EQUAL)


def test_the_page_shows_every_deployment():
    cells = [line.strip("| ").split(" | ")[0] for line in deployments().text.splitlines()[2:]]
    assert sorted(", ".join(cells).split(", ")) == sorted(set(DEPLOYMENTS) - {DENSE, PLAIN})
