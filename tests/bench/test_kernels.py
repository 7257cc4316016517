"""The kernel benchmark: a wrong result fails its check and is not timed."""

from itertools import count

import pytest
import torch
from sparse_kernels.page_topk import select_pages
from support.bench.kernels import (
    CPU,
    PLAN,
    SMALL,
    attend,
    decode,
    flash_attention,
    loads,
    op_of,
    provider,
    run,
    score,
    scoring,
)

from bench.kernels import checks, runner
from bench.kernels.cases import OPS, DecodeCase, Grid, PrefillCase, TopKCase
from bench.kernels.providers import PROVIDERS, Op
from bench.kernels.rivals import imported
from bench.kernels.workload import Workload


@pytest.fixture
def workload() -> Workload:
    return Workload(SMALL, CPU, max_blocks=64)


@pytest.fixture
def decode_inputs(workload):
    return workload.decode_inputs(DecodeCase(batch=4, context=768, group=2))


@pytest.fixture
def topk_inputs(workload):
    return workload.topk_inputs(TopKCase(rows=8, pages=256))


def test_a_wrong_score_fails(decode_inputs):
    scores = score(decode_inputs)
    scores[3, 1, 17] = torch.nan
    with pytest.raises(checks.CheckError, match="call: a score of request 3"):
        checks.scores(decode_inputs, {"call": lambda: scores})


def test_sparse_decode_that_misses_a_page_fails(decode_inputs):
    with pytest.raises(checks.CheckError, match="relative error"):
        checks.sparse_decode(decode_inputs, {"call": lambda: decode(decode_inputs, drop=1)})


@pytest.mark.parametrize("op", ["decode", "whole"])
def test_a_request_that_is_not_compared_has_to_be_written(decode_inputs, op):
    check = checks.sparse_decode if op == "decode" else checks.dense
    every = torch.arange(int(decode_inputs.num_pages.max())).expand(4, 2, -1)
    every = torch.where(every < decode_inputs.num_pages[:, None, None], every, -1)

    def call():
        return decode(decode_inputs) if op == "decode" else attend(decode_inputs, every)

    def careless():
        output = call()
        output[2, 1] = torch.nan
        return output

    check(decode_inputs, {"call": call})
    with pytest.raises(checks.CheckError, match="call: an output is not finite"):
        check(decode_inputs, {"call": careless})


def test_an_output_that_was_never_written_fails(decode_inputs):
    def unwritten():
        with checks.poisoned_allocations():
            return torch.empty(4, 4, 32)

    with pytest.raises(checks.CheckError):
        checks.dense(decode_inputs, {"call": unwritten})
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_selection_has_to_be_exact_in_any_order(topk_inputs):
    def selected():
        return select_pages(topk_inputs.scores, topk_inputs.num_pages, 8).int()

    checks.exact_selection(topk_inputs, {"call": lambda: selected().flip(-1)})
    with pytest.raises(checks.CheckError):
        checks.exact_selection(topk_inputs, {"call": lambda: selected() + 1})
    best = topk_inputs.rows.float().topk(8).indices.flip(-1)
    checks.equal_scores(topk_inputs, {"call": lambda: best})
    missing, twice = best.clone(), best.clone()
    missing[5, 0] = topk_inputs.rows[5].float().argmin()
    twice[5, 0] = twice[5, 1]
    for wrong, reason in ((missing, "misses"), (twice, "twice"), (best - 1000, "positions")):
        with pytest.raises(checks.CheckError, match=reason):
            checks.equal_scores(topk_inputs, {"call": lambda wrong=wrong: wrong})


LONG = PrefillCase(1600, 128, 2)
"""Its tiles have 23 and 24 past blocks and read 16 of them."""


PREFILL = {each.name: each for each in PROVIDERS["prefill"].providers}


@pytest.fixture
def prefill_inputs(interpreted):
    return Workload(SMALL, CPU, max_blocks=64).prefill_inputs(LONG)


@pytest.mark.parametrize("name", PREFILL)
def test_prefill_pass(prefill_inputs, name):
    each = PREFILL[name]
    each.check(prefill_inputs, {"call": each.prepare([flash_attention, None], prefill_inputs)})


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        ("unique, density 0.1", lambda output: output[0, 0].mul_(1.1), "tile 0: relative error 0"),
        ("FlashAttention 3", lambda output: output[-1, 0].mul_(1.1), "relative error 0"),
        ("unique, density 0.05", lambda output: output[70, 2].zero_(), "tile 1: relative error 1"),
    ],
)
def test_prefill_that_is_wrong_fails(prefill_inputs, name, spoil, reason):
    output = PREFILL[name].prepare([flash_attention, None], prefill_inputs)()
    spoil(output)
    with pytest.raises(checks.CheckError, match=reason):
        PREFILL[name].check(prefill_inputs, {"call": lambda: output})


TOKENS = {each.name: each for each in PROVIDERS["tokens"].providers if each.name != "FlashAttention 3"}


@pytest.fixture
def prompt(interpreted):
    return Workload(SMALL, CPU, max_blocks=64).prefill_inputs(PrefillCase(512, 512, 2))


@pytest.mark.parametrize("name", TOKENS)
def test_zipvl_and_its_parts_pass(prompt, name):
    each = TOKENS[name]
    each.check(prompt, {"call": each.prepare(None, prompt)})


def keep_another(kept):
    """Leaves out a token that is kept for its attention, and keeps one that is not."""
    free = torch.arange(512)[4:-1]
    kept.mask[0, free[kept.mask[0, 4:-1]][0]] = False
    kept.mask[0, free[~kept.mask[0, 4:-1]][-1]] = True


def keep_fewer(kept):
    kept.mask[0, 4:40] = False


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        ("zipvl", lambda output: output[300, 1].mul_(1.1), "relative error 0"),
        ("zipvl_paper", lambda output: output.add_(1e-3), "tokens that are not important have outputs"),
        ("part: probe", lambda sums: sums[0, 9].add_(0.02 * sums.max()), "a sum is off"),
        ("part: choice", lambda kept: kept.mask[0, 2:3].zero_(), "a token that is always kept is not"),
        ("part: choice", keep_fewer, "tokens by attention, not 216"),
        ("part: choice", keep_another, "has more attention than one that is kept"),
    ],
)
def test_zipvl_that_is_wrong_fails(prompt, name, spoil, reason):
    each = TOKENS[name]
    output = each.prepare(None, prompt)()
    found = output.clone() if isinstance(output, torch.Tensor) else output
    spoil(found)
    with pytest.raises(checks.CheckError, match=reason):
        each.check(prompt, {"call": lambda: found})


def test_what_fails_its_check_is_not_timed(workload):
    def refuse(inputs, calls):
        assert list(calls) == ["call", "replayed graph"]
        raise checks.CheckError("call: relative error 0.5")

    ops = op_of(provider("ours", scoring), provider("rival", scoring, refuse))
    rows = run(ops, PLAN, workload)
    assert (rows[1]["status"], rows[1]["reason"]) == ("wrong", "call: relative error 0.5")
    assert "cold" not in rows[1]
    assert rows[0]["speed_up"] == {}
    assert [runner.is_broken(row, ops) for row in rows] == [False, True]


def test_a_graph_that_does_nothing_is_not_timed_for_what_an_earlier_run_has_left(workload):
    def prepare(inputs):
        kept, calls = scoring(inputs)(), count()

        def call():
            # The first two calls warm up and are checked directly; the others are replays.
            if next(calls) < 2:
                kept.copy_(scoring(inputs)())
            return kept

        return call

    ops = op_of(provider("ours", scoring, checks.scores), provider("rival", prepare, checks.scores))
    ours, rival = run(ops, PLAN, workload)
    assert ours["status"] == "measured"
    assert (rival["status"], rival["reason"]) == ("wrong", "replayed graph: a score of request 0 is off by inf")


def test_everything_that_is_ours_runs_on_a_cpu(workload):
    ours = {
        name: Op(
            op.inputs,
            [each for each in op.providers if each.name.startswith(("unique", "sinkrouter", "art"))],
        )
        for name, op in PROVIDERS.items()
    }
    others = {"topk": TopKCase(8, 256), "prefill": PrefillCase(768, 128, 2)}
    # ZipVL's kernels need a GPU, or the interpreter: see test_token_prefill.
    plan = [(name, others.get(name, DecodeCase(2, 768, 2))) for name in PROVIDERS if name != "tokens"]
    rows = run(ours, plan, workload)
    for row in rows:
        (each,) = [each for each in ours[row["op"]].providers if each.name == row["provider"]]
        assert row["status"] == ("measured" if loads(each) else "unavailable"), row
    measured = ("topk", "score", "stop", "budgets")
    assert [row["status"] for row in rows if row["op"] in measured] == ["measured"] * 7


def test_the_plan_starts_with_the_first_group_and_ends_with_other_formats():
    plan = Grid().plan()
    assert len(plan) == len(set(plan))
    assert plan[0] == ("decode", DecodeCase(1, 2048, 4))
    assert {op: sum(name == op for name, _ in plan) for op in OPS} == {
        "decode": 80, "topk": 15, "score": 300, "stop": 60, "budgets": 20, "whole": 20, "prefill": 4, "tokens": 2,
    }  # fmt: skip
    formats = [case.format for _, case in plan if isinstance(case, DecodeCase)]
    assert formats == sorted(formats, key=["int4", "int8", "int2", "fp8", "bf16"].index)


def test_a_row_has_times_and_speed_ups_and_a_missing_rival_its_reason(workload):
    missing = provider("missing", scoring, load=imported("no_such_package.topk:top_k"))
    rows = run(op_of(provider("ours", scoring), provider("rival", scoring), missing), PLAN, workload)
    assert rows[0] == {
        "op": "score",
        "provider": "ours",
        "case": {"batch": 1, "context": 512, "group": 2, "format": "int4"},
        "case_name": "1q1s512 g2",
        "status": "measured",
        "cold": {"median_us": 10.0},
        "warm": {"median_us": 5.0},
        "speed_up": {"rival": {"cold": 2.0, "warm": 2.0}},
    }
    assert rows[2]["reason"] == "ModuleNotFoundError: No module named 'no_such_package'"
