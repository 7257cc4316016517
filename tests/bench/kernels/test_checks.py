"""Results that pass or fail their check."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from sparse_kernels.page_score.reference import score_pages
from sparse_kernels.page_topk import select_pages
from support.bench.kernels import CPU, SMALL, attend, decode, run, score, write

from bench.kernels import checks
from bench.kernels.calls import fused, split
from bench.kernels.cases import DecodeCase, Geometry, TopKCase
from bench.kernels.providers import PROVIDERS, Op
from bench.kernels.workload import Workload

ROOT = Path(__file__).parents[3]


def test_scores_pass(decode_inputs):
    checks.scores(decode_inputs, {"call": lambda: score(decode_inputs)})


@pytest.mark.parametrize("value", [0.0, 400.0, torch.nan])
def test_a_wrong_score_fails(decode_inputs, value):
    scores = score(decode_inputs)
    scores[3, 1, 17] = value
    with pytest.raises(checks.CheckError, match="call: a score of request 3"):
        checks.scores(decode_inputs, {"call": lambda: scores})


@pytest.mark.parametrize("context", [768, 20480])
def test_pages_without_a_score_fail_where_they_should_be_refined(context):
    geometry = Geometry(num_kv_heads=1, head_size=32, k=8)
    inputs = Workload(geometry, CPU, context // 64).decode_inputs(DecodeCase(1, context, 2, "leveled"))

    def leveled():
        return score_pages(
            inputs.grouped_query, inputs.statistics, inputs.block_table.long(), inputs.num_pages, 0.75, geometry.refined
        )

    checks.scores(inputs, {"call": leveled})
    scores = leveled()
    scores[0, 0, scores[0, 0].topk(50).indices] = -torch.inf
    for wrong in (scores, torch.full_like(scores, -torch.inf)):
        with pytest.raises(checks.CheckError, match=r"call: request 0 has fewer than \d+ refined pages"):
            checks.scores(inputs, {"call": lambda wrong=wrong: wrong})


def test_sparse_decode_passes_twice_in_a_row(decode_inputs):
    calls = {"call": lambda: decode(decode_inputs), "again": lambda: decode(decode_inputs)}
    checks.sparse_decode(decode_inputs, calls)


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


def test_attention_over_given_pages(decode_inputs):
    checks.attended(decode_inputs, {"call": lambda: attend(decode_inputs)})
    wrong = decode_inputs.pages.clone()
    wrong[2, 1, 0] = -1
    with pytest.raises(checks.CheckError):
        checks.attended(decode_inputs, {"call": lambda: attend(decode_inputs, wrong)})


def test_dense_attention_is_all_pages(decode_inputs):
    count = int(decode_inputs.num_pages.max())
    every = torch.arange(count).expand(4, 2, -1)
    every = torch.where(every < decode_inputs.num_pages[:, None, None], every, -1)
    checks.dense(decode_inputs, {"call": lambda: attend(decode_inputs, every)})
    with pytest.raises(checks.CheckError):
        checks.dense(decode_inputs, {"call": lambda: attend(decode_inputs)})


def test_an_output_that_was_never_written_fails(decode_inputs):
    def unwritten():
        with checks.poisoned_allocations():
            return torch.empty(4, 4, 32)

    with pytest.raises(checks.CheckError):
        checks.attended(decode_inputs, {"call": unwritten})
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_selection_has_to_be_exact(topk_inputs):
    def selected():
        return select_pages(topk_inputs.scores, topk_inputs.num_pages, 8).int()

    checks.exact_selection(topk_inputs, {"call": selected})
    checks.exact_selection(topk_inputs, {"call": lambda: selected().flip(-1)})
    with pytest.raises(checks.CheckError):
        checks.exact_selection(topk_inputs, {"call": lambda: selected() + 1})


def test_a_rival_may_order_as_it_likes(topk_inputs):
    def selected():
        return topk_inputs.rows.float().topk(8).indices.flip(-1)

    checks.equal_scores(topk_inputs, {"call": selected})
    missing, twice = selected(), selected()
    missing[5, 0] = topk_inputs.rows[5].float().argmin()
    twice[5, 0] = twice[5, 1]
    for wrong, reason in ((missing, "misses"), (twice, "twice"), (selected() - 1000, "positions")):
        with pytest.raises(checks.CheckError, match=reason):
            checks.equal_scores(topk_inputs, {"call": lambda wrong=wrong: wrong})


def test_a_rival_may_map_pages_through_the_block_table(topk_inputs):
    pages = topk_inputs.rows.float().topk(8).indices
    table = topk_inputs.block_table.repeat_interleave(2, dim=0)
    physical = table.gather(1, pages // 8) * 8 + pages % 8
    checks.mapped_pages(topk_inputs, {"call": lambda: physical.int()})
    with pytest.raises(checks.CheckError):
        checks.mapped_pages(topk_inputs, {"call": lambda: pages.int()})


def test_a_write_passes_and_leaves_the_cache_as_it_was(workload, decode_inputs):
    before = workload._cache.view(torch.int16).clone()
    checks.written(decode_inputs, {"call": lambda: write(decode_inputs)})
    checks.copied(decode_inputs, {"call": lambda: write(decode_inputs, statistics=False)})
    assert torch.equal(workload._cache.view(torch.int16), before)


def test_incomplete_and_excessive_writes_fail(decode_inputs):
    def careless():
        write(decode_inputs)
        decode_inputs.statistics.scales[decode_inputs.slots[1] // 64, 0, 2] = 7.0

    def next_to_it():
        write(decode_inputs)
        decode_inputs.token_rows[decode_inputs.slots[1] // 64, 0, 2] = 7.0

    for wrong, reason in (
        (lambda: None, "does not hold the new tokens"),
        (next_to_it, "does not hold the new tokens"),
        (lambda: write(decode_inputs, statistics=False), "completed page"),
        (careless, "another page"),
    ):
        with pytest.raises(checks.CheckError, match=reason):
            checks.written(decode_inputs, {"call": wrong})


@pytest.mark.parametrize("op", ["route", "route_unique"])
def test_routing_that_skips_another_group_fails(op, decode_inputs):
    subject, *_ = PROVIDERS[op].providers
    loaded, groups = subject.load(), decode_inputs.case.skipped_groups(SMALL)
    assert groups == 5
    subject.check(decode_inputs, {"call": subject.prepare(loaded, decode_inputs)})
    make = split if op == "route" else fused
    for wrong in (groups - 1, groups + 1):
        with pytest.raises(checks.CheckError):
            subject.check(decode_inputs, {"call": make(loaded, decode_inputs, wrong)})


def test_torch_topk_is_a_rival_that_passes(workload):
    op = PROVIDERS["topk"]
    chosen = [each for each in op.providers if each.name == "torch.topk"]
    (row,) = run({"topk": Op(op.inputs, chosen)}, [("topk", TopKCase(8, 256))], workload)
    assert row["status"] == "measured"


def test_three_launches_equal_the_reference():
    code = """
        import torch
        from bench.kernels import checks
        from bench.kernels.cases import DecodeCase, Geometry
        from bench.kernels.unfused import score_pages
        from bench.kernels.workload import Workload

        workload = Workload(Geometry(num_kv_heads=2, head_size=32, k=8), torch.device("cpu"), 64)
        for group, statistics in ((1, "int8"), (4, "fp8"), (2, "bf16")):
            inputs = workload.decode_inputs(DecodeCase(2, 768, group, statistics))
            call = lambda: score_pages(
                inputs.grouped_query, inputs.statistics, inputs.block_table, inputs.num_pages, 0.75
            )
            checks.scores(inputs, {"call": call})
        print("equal")
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(["kernels", "."])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
