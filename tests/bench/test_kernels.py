import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse_kernels.batch import QueryTokens
from sparse_kernels.page_score import score_pages
from sparse_kernels.page_statistics import reference as statistics_reference
from sparse_kernels.page_topk import select_pages
from sparse_kernels.sparse_attention import attend_pages
from typer.testing import CliRunner

from bench.common.options import parse_sizes, size_text
from bench.common.results import ResultFile
from bench.kernels import checks, prefill, report, runner, timing, traffic
from bench.kernels.__main__ import main
from bench.kernels.calls import fused, imported, split
from bench.kernels.cases import OPS, QUICK, DecodeCase, Geometry, Grid, PrefillCase, TopKCase
from bench.kernels.cli import app, cache_blocks, grid_of
from bench.kernels.providers import PROVIDERS, Op, Provider
from bench.kernels.workload import Workload, needles
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.provenance import describe_run

ROOT = Path(__file__).parents[2]
SMALL = Geometry(num_kv_heads=2, head_size=32, k=8, dense_tokens=512)
CPU = torch.device("cpu")


@pytest.fixture
def workload() -> Workload:
    return Workload(SMALL, CPU, max_blocks=64)


@pytest.fixture
def decode_inputs(workload):
    return workload.decode_inputs(DecodeCase(batch=4, context=768, group=2))


@pytest.fixture
def topk_inputs(workload):
    return workload.topk_inputs(TopKCase(rows=8, pages=256))


class FakeTimer:
    """Call n takes 10 * n microseconds: 10, 20, 30, ..."""

    def record(self, call: Callable[[], Any]) -> Any:
        call()

        class Recording:
            replay = staticmethod(call)

        return Recording()

    def measure(self, recordings: Mapping[str, Any]) -> dict[str, timing.Timing]:
        found = {}
        for age, name in enumerate(recordings, start=1):
            cold = timing.Spread(10.0 * age, 9.0 * age, 11.0 * age, 40)
            found[name] = timing.Timing(cold, dataclasses.replace(cold, median_us=5.0 * age), 20)
        return found


def run(ops, plan, workload, seconds_left=lambda: 1.0):
    emitted: list[dict[str, Any]] = []
    rows = runner.Runner(ops, workload, FakeTimer(), 1e12, emitted.append, seconds_left).run(plan)
    assert emitted == rows
    return rows


def provider(name, prepare, check=lambda inputs, calls: [call() for call in calls.values()], load=lambda: None):
    return Provider(name, load, lambda loaded, inputs: prepare(inputs), check, lambda case, geometry: 10_000_000)


def scoring(inputs):
    return lambda: score(inputs)


def op_of(*providers):
    return {"score": Op(Workload.decode_inputs, providers)}


PLAN = [("score", DecodeCase(1, 512, 2)), ("score", DecodeCase(2, 512, 2))]


# Cases


def test_sizes_are_read_and_written_as_people_do():
    assert parse_sizes("batch", ["1, 8,32K", "8"]) == (1, 8, 32768)
    assert [size_text(size) for size in (1, 2048, 524288, 1000)] == ["1", "2K", "512K", "1000"]


@pytest.mark.parametrize("text", ["", "1,,2", "-1", "0", "K", "1M", "1.5"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ConfigurationError, match=r"^batch: got .*, allowed: positive integers"):
        parse_sizes("batch", [text])


def test_one_request_of_eight_completes_a_page():
    lengths = DecodeCase(32, 2048, 4).lengths(Geometry())
    assert max(lengths) == 2048 == lengths[0]
    assert sum(length % 8 == 0 for length in lengths) == 4


def test_names_follow_the_grammar_of_vllm():
    assert DecodeCase(8, 32768, 4).name == "8q1s32K g4"
    assert DecodeCase(8, 32768, 4, tokens=9).name == "8q9s32K g4"
    assert DecodeCase(8, 32768, 4, "fp8").name == "8q1s32K g4 fp8"
    assert PrefillCase(131072, 8192, 4).name == "1q8Ks128K g4"


def test_the_plan_starts_with_the_first_group_and_ends_with_other_formats():
    plan = Grid().plan()
    assert len(plan) == len(set(plan))
    assert {op for op, _ in plan} == set(OPS)
    assert plan[0] == ("decode", DecodeCase(1, 2048, 4))
    decodes = [case for _, case in plan if isinstance(case, DecodeCase)]
    assert sum(op == "topk" for op, _ in plan) == 15
    prefills = [case for op, case in plan if op == "prefill"]
    assert prefills == [PrefillCase(c, q, 4) for c in (131072, 32768) for q in (8192, 2048)]
    assert [case.format for case in decodes] == sorted(
        (c.format for c in decodes), key=["int4", "int8", "int2", "fp8", "bf16"].index
    )
    assert {op for op, case in plan if getattr(case, "format", "int4") == "int8"} == {"decode", "score"}
    assert {op for op, case in plan if getattr(case, "format", "int4") not in ("int4", "int8")} == {"score"}
    first_other_group = next(index for index, (_, case) in enumerate(plan) if getattr(case, "group", 4) != 4)
    assert {op for op, _ in plan[:first_other_group]} == set(OPS)


def test_the_cache_is_as_large_as_the_largest_case_that_fits():
    geometry, plan = Geometry(), Grid().plan()
    # In bf16 the record of a page has 130 bytes more: a block has five rows of statistics instead of four.
    block_bytes = 8 * 69 * 256 * 2
    assert cache_blocks(plan, geometry, 10**12) == 32 * 524288 // 64
    assert cache_blocks(plan, geometry, 65536 * block_bytes) == 32 * 131072 // 64
    assert cache_blocks([("topk", TopKCase(8, 1024))], geometry, 10**12) == 1


# Bytes


def test_bytes_of_one_request():
    case, geometry = DecodeCase(1, 2048, 4, "int8"), Geometry()
    query = 8 * 4 * 128 * 2
    record = 8 * (128 + 4)
    token = 8 * 2 * 128 * 2
    assert traffic.dense(case, geometry) == 2048 * token + 2 * query
    assert traffic.score(case, geometry) == 256 * (record + 8 * 2) + query
    assert traffic.attend(case, geometry) == 64 * 8 * token + 2 * query + 8 * 64 * 4
    assert traffic.copy(case, geometry) == 2 * token
    assert traffic.write(case, geometry) == 2 * token + 8 * token // 2 + record
    assert traffic.decode(case, geometry) == (traffic.write(case, geometry) + 256 * record + 64 * 8 * token + 2 * query)
    assert traffic.topk(TopKCase(64, 4096), geometry) == 64 * (4096 * 2 + 64 * 4)
    # Five groups of eight are skipped.
    assert traffic.routed(case, geometry) == 2048 * token * 3 // 8 + 2 * query
    assert traffic.routed_sparse(case, geometry) == (256 * record + 64 * 8 * token) * 3 // 8 + 2 * query


def test_bytes_follow_the_format_and_the_incomplete_page():
    geometry = Geometry()
    assert traffic.score(DecodeCase(1, 2048, 4, "bf16"), geometry) - traffic.score(
        DecodeCase(1, 2048, 4, "fp8"), geometry
    ) == 256 * 8 * (258 - 132)
    # The second request is one token shorter: 255 complete pages and 7 tokens.
    both, first = (traffic.selected_tokens(DecodeCase(batch, 2048, 1), geometry) for batch in (2, 1))
    assert both - first == (64 * 8 + 7) * 8 * 2 * 128 * 2 + 2 * 8 * 128 * 2


def test_bytes_of_a_step_of_a_prompt():
    case, geometry = PrefillCase(1024, 128, 4), Geometry()
    chunk = 128 * 32 * 128 * 2
    tokens = 1024 * 8 * 2 * 128 * 2
    # A page has four vectors with half a byte per element.
    records = 128 * 8 * 4 * 64
    # Two tiles, with 14 and 15 blocks before them.
    scores = (14 + 15) * 8 * 4
    assert traffic.dense_prefill(case, geometry) == tokens + 2 * chunk
    assert traffic.sparse_prefill(case, geometry) == tokens + 2 * chunk + records
    assert traffic.prefill_summaries(case, geometry) == records + 128 * 8 * 4 * 128 * 2
    assert traffic.prefill_scores(case, geometry) == records + chunk + scores
    assert traffic.prefill_choice(case, geometry) == scores
    assert traffic.prefill_regrouping(case, geometry) == 4 * chunk


# Inputs


def test_rewriting_the_new_tokens_leaves_the_cache_as_it_is(decode_inputs):
    before = decode_inputs.token_rows.clone()
    block, offset = decode_inputs.slots // 64, decode_inputs.slots % 64
    both = torch.cat([decode_inputs.new_keys, decode_inputs.new_values], dim=-1)
    decode_inputs.token_rows[block, :, offset] = both
    assert torch.equal(decode_inputs.token_rows, before)
    assert not decode_inputs.query.is_contiguous()


def test_requests_have_blocks_of_their_own_scattered_over_the_cache(decode_inputs):
    blocks = decode_inputs.block_table.flatten()
    assert decode_inputs.block_table.dtype == torch.int32
    assert len(blocks.unique()) == len(blocks) == 4 * 12
    assert not torch.equal(blocks, blocks.sort().values)


def test_random_pages_are_distinct_complete_and_ascending(decode_inputs):
    pages = decode_inputs.pages
    assert pages.shape == (4, 2, 8)
    assert bool((pages.diff(dim=-1) > 0).all())
    assert bool((pages < decode_inputs.num_pages[:, None, None]).all())


def test_short_contexts_have_fewer_pages_than_the_selection_holds(workload):
    pages = workload.decode_inputs(DecodeCase(1, 40, 1)).pages
    assert pages[0, 0].tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


@pytest.mark.parametrize("statistics", ["int4", "int2", "int8", "fp8", "bf16"])
def test_needles_are_selected_and_gone_afterwards(workload, statistics):
    inputs = workload.decode_inputs(DecodeCase(3, 768, 2, statistics))
    before = [workload._cache.view(torch.int16).clone(), inputs.token_rows.clone()]

    def gap():
        scores = statistics_scores(inputs)[2].float().sort(dim=-1, descending=True).values
        # Six needles, and the first and the newest page, which are always read.
        return float((scores[:, 5] - scores[:, 6]).min())

    random_gap = gap()
    with needles(inputs, [0, 2]):
        assert gap() > 10 > random_gap
    assert torch.equal(workload._cache.view(torch.int16), before[0])


def statistics_scores(inputs):
    from sparse_kernels.page_score import reference

    table = inputs.block_table.long()
    return reference.score_pages(inputs.grouped_query, inputs.statistics, table, inputs.num_pages, 0.75)


# The gate


def score(inputs):
    return score_pages(inputs.grouped_query, inputs.statistics, inputs.block_table, inputs.num_pages, 0.75)


def decode(inputs, drop=0):
    pages = select_pages(score(inputs), inputs.num_pages, 8, 1, 1)
    pages[..., 3 : 3 + drop] = -1
    return attend(inputs, pages)


def attend(inputs, pages=None):
    pages = inputs.pages if pages is None else pages
    table, lens = inputs.block_table.long(), inputs.seq_lens.long()
    return attend_pages(QueryTokens(inputs.grouped_query, table, lens), inputs.cache, pages.long(), inputs.softmax)


def write(inputs, statistics=True):
    block, offset = inputs.slots // 64, inputs.slots % 64
    inputs.token_rows[block, :, offset] = torch.cat([inputs.new_keys, inputs.new_values], dim=-1)
    done = offset % 8 == 7
    if statistics:
        statistics_reference.update_page_statistics(inputs.keys, inputs.statistics, block[done], offset[done] // 8)


def test_scores_pass(decode_inputs):
    checks.scores(decode_inputs, {"call": lambda: score(decode_inputs)})


@pytest.mark.parametrize("value", [0.0, 400.0, torch.nan])
def test_a_wrong_score_fails(decode_inputs, value):
    scores = score(decode_inputs)
    scores[3, 1, 17] = value
    with pytest.raises(checks.CheckError, match="call: a score of request 3"):
        checks.scores(decode_inputs, {"call": lambda: scores})


def test_sparse_decode_passes_twice_in_a_row(decode_inputs):
    calls = {"call": lambda: decode(decode_inputs), "again": lambda: decode(decode_inputs)}
    checks.sparse_decode(decode_inputs, calls)


def test_sparse_decode_that_misses_a_page_fails(decode_inputs):
    with pytest.raises(checks.CheckError, match="relative error"):
        checks.sparse_decode(decode_inputs, {"call": lambda: decode(decode_inputs, drop=1)})


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
        (lambda: None, "tokens in the cache"),
        (next_to_it, "tokens in the cache"),
        (lambda: write(decode_inputs, statistics=False), "completed page"),
        (careless, "another page"),
    ):
        with pytest.raises(checks.CheckError, match=reason):
            checks.written(decode_inputs, {"call": wrong})


# Rows


def test_a_measured_case_has_times_share_and_speed_ups(workload):
    rows = run(op_of(provider("ours", scoring), provider("rival", scoring)), PLAN, workload)
    assert [(row["provider"], row["case"]["batch"]) for row in rows] == [
        ("ours", 1), ("rival", 1), ("ours", 2), ("rival", 2)
    ]  # fmt: skip
    assert rows[0] == {
        "op": "score",
        "provider": "ours",
        "case": {"batch": 1, "context": 512, "group": 2, "format": "int4", "tokens": 1},
        "case_name": "1q1s512 g2",
        "bytes": 10_000_000,
        "status": "measured",
        "cold": {"median_us": 10.0, "p20_us": 9.0, "p80_us": 11.0, "repeats": 40},
        "warm": {"median_us": 5.0, "p20_us": 9.0, "p80_us": 11.0, "repeats": 40, "copies": 20},
        "share_of_read_bandwidth": {"cold": 1.0, "warm": 2.0},
        "speed_up": {"rival": {"cold": 2.0, "warm": 2.0}},
    }
    assert "speed_up" not in rows[1]


def test_what_fails_its_check_is_not_timed(workload):
    def refuse(inputs, calls):
        assert list(calls) == ["call", "replayed graph"]
        raise checks.CheckError("call: relative error 0.5")

    ops = op_of(provider("ours", scoring), provider("rival", scoring, refuse))
    rows = run(ops, PLAN[:1], workload)
    assert (rows[1]["status"], rows[1]["reason"]) == ("wrong", "call: relative error 0.5")
    assert "cold" not in rows[1]
    assert rows[0]["speed_up"] == {}
    assert [runner.is_broken(row, ops) for row in rows] == [False, True]


def test_a_rival_that_is_not_installed_is_a_row_with_the_reason(workload):
    loads = []

    def load():
        loads.append(1)
        return imported("no_such_package.topk:top_k")()

    ops = op_of(provider("ours", scoring), provider("rival", scoring, load=load))
    rows = run(ops, PLAN, workload)
    assert [row["status"] for row in rows] == ["measured", "unavailable"] * 2
    assert rows[3]["reason"] == "ModuleNotFoundError: No module named 'no_such_package'"
    assert len(loads) == 1
    assert not any(runner.is_broken(row, ops) for row in rows)


def test_a_missing_subject_breaks_the_run(workload):
    ops = op_of(provider("ours", scoring, load=imported("no_such_package:x")), provider("rival", scoring))
    rows = run(ops, PLAN[:1], workload)
    assert [runner.is_broken(row, ops) for row in rows] == [True, False]


def test_a_crash_is_a_row_without_paths_and_does_not_end_the_run(workload):
    def crash(inputs):
        raise RuntimeError("\ncannot open /home/me/.cache/x-1/kernel.so: bad\nand more")

    rows = run(op_of(provider("ours", scoring), provider("rival", crash)), PLAN, workload)
    assert [row["status"] for row in rows] == ["measured", "failed"] * 2
    assert rows[1]["reason"] == "RuntimeError: cannot open kernel.so: bad"


def test_time_and_memory_that_run_out_are_recorded(workload):
    left = iter([1.0, 0.0, 0.0])
    plan = [*PLAN, ("score", DecodeCase(32, 8192, 2))]
    rows = run(op_of(provider("ours", scoring)), plan, workload, lambda: next(left))
    assert [row["status"] for row in rows] == ["measured", "left out", "left out"]
    assert rows[1]["reason"] == "the time limit was reached"
    assert rows[2]["reason"] == "its cache takes 0.1 GB, more than the device has free"


def test_a_lost_device_ends_the_run(workload):
    class Lost(FakeTimer):
        def measure(self, recordings):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    ops = op_of(provider("ours", scoring))
    rows = runner.Runner(ops, workload, Lost(), 1e12, lambda row: None, lambda: 1.0).run(PLAN)
    assert [row["status"] for row in rows] == ["failed", "left out"]
    assert "illegal memory access" in rows[0]["reason"]
    assert "illegal memory access" in rows[1]["reason"]


def test_the_table_of_providers():
    assert tuple(PROVIDERS) == OPS
    for op in PROVIDERS.values():
        assert op.subject in ("unique", "sinkrouter", "unique, routed", "art", "unique, density 0.1")
        names = [each.name for each in op.providers]
        assert len(set(names)) == len(names) > 1


def test_everything_that_is_ours_runs_on_a_cpu(workload):
    ours = {
        name: Op(
            op.inputs,
            [each for each in op.providers if each.name.startswith(("unique", "sinkrouter", "art", "our"))],
        )
        for name, op in PROVIDERS.items()
    }
    others = {"topk": TopKCase(8, 256), "prefill": PrefillCase(768, 128, 2)}
    others["verify"] = DecodeCase(2, 768, 2, tokens=5)
    plan = [(name, others.get(name, DecodeCase(2, 768, 2))) for name in PROVIDERS]
    rows = run(ours, plan, workload)
    for row in rows:
        (each,) = [each for each in ours[row["op"]].providers if each.name == row["provider"]]
        assert row["status"] == ("measured" if loads(each) else "unavailable"), row
    measured = ("topk", "score", "attend", "route", "route_unique", "stop", "verify")
    assert [row["status"] for row in rows if row["op"] in measured] == ["measured"] * 14


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


def loads(each):
    try:
        each.load()
    except (ImportError, AttributeError):
        return False
    return True


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


LONG = PrefillCase(1600, 128, 2)
"""Its tiles have 23 and 24 past blocks and read 16 of them."""


@pytest.fixture
def prefill_inputs(interpreted):
    return Workload(SMALL, CPU, max_blocks=64).prefill_inputs(LONG)


def flash_attention(
    q, k, v, out, cu_seqlens_q, seqused_k, softmax_scale, block_table, return_softmax_lse=False, **others
):
    """The parts of vLLM's FlashAttention that prefill uses."""
    assert (others["causal"], others["fa_version"], return_softmax_lse) == (True, 3, False)
    for index, length in enumerate(seqused_k.tolist()):
        first, last = cu_seqlens_q[index : index + 2].tolist()
        if first == last:
            continue
        blocks = block_table[index, : -(-length // k.shape[1])].long()
        keys, values = (x[blocks].flatten(0, 1)[:length].float() for x in (k, v))
        group = q.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        logits = torch.einsum("qhd,khd->hqk", q[first:last].float(), keys) * softmax_scale
        position = torch.arange(length - (last - first), length)
        logits = logits.masked_fill(torch.arange(length) > position[:, None], -torch.inf)
        out[first:last] = torch.einsum("hqk,khd->qhd", logits.softmax(dim=-1), values).to(out.dtype)
    return out


PREFILL = {each.name: each for each in PROVIDERS["prefill"].providers}


@pytest.mark.parametrize("name", PREFILL)
def test_prefill_and_its_parts_pass(prefill_inputs, name):
    each = PREFILL[name]
    each.check(prefill_inputs, {"call": each.prepare([flash_attention, None], prefill_inputs)})


def test_prefill_that_leaves_out_one_good_block_fails(prefill_inputs, monkeypatch):
    find = prefill.Launches.choice

    def worse(plan, scores):
        # The best block that is not always read gets the lowest score.
        for tile in plan.checked_tiles():
            free = scores[tile.index, :, 1 : tile.past_blocks - 1]
            free.scatter_(1, free.argmax(dim=1, keepdim=True), -1.0)
        return find(plan, scores)

    monkeypatch.setattr(prefill.Launches, "choice", worse)
    with pytest.raises(checks.CheckError, match="of the best blocks' scores"):
        PREFILL["unique, density 0.1"].check(prefill_inputs, {})


def spoiled(each, inputs, spoil):
    output = each.prepare([flash_attention, None], inputs)()
    found = [part.clone() for part in output] if isinstance(output, tuple) else output.clone()
    spoil(found)
    return {"call": lambda: found}


def swap_blocks(choice):
    pages, lengths = choice
    pages[:, [1, 2]] = pages[:, [2, 1]]
    assert int(lengths[0]) > 128


def leave_a_block_out(choice):
    choice[0][0, 1:-1] = choice[0][0, 2:].clone()
    choice[1][0] -= 64


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        ("unique, density 0.1", lambda output: output[0, 0].mul_(1.1), "tile 0: relative error 0"),
        ("unique, density 0.1", lambda output: output[-1, 3].fill_(torch.nan), "tile 1: relative error inf"),
        ("FlashAttention 3", lambda output: output[-1, 0].mul_(1.1), "relative error 0"),
        ("unique, density 0.05", lambda output: output[70, 2].zero_(), "tile 1: relative error 1"),
        ("part: keys from statistics", lambda keys: keys[1, 77, 3].mul_(1.02), "a key is off"),
        ("part: scores, keys included", lambda scores: scores[1, 1, 10].mul_(1.05), "a score of tile 1 is off"),
        ("part: choice", swap_blocks, "not those of blocks in order"),
        ("part: choice", leave_a_block_out, "tile 0 reads other blocks than the best"),
        ("part: attention", lambda rows: rows[0].mul_(1.1), "tile 0: relative error 0"),
        ("part: regrouping", lambda output: output[5, 1, 3].add_(1), "differ from themselves"),
    ],
)
def test_prefill_that_is_wrong_fails(prefill_inputs, name, spoil, reason):
    each = PREFILL[name]
    calls = spoiled(each, prefill_inputs, spoil)
    with pytest.raises(checks.CheckError, match=reason):
        each.check(prefill_inputs, calls)


# Times


def test_a_spread_is_median_and_percentiles():
    spread = timing.Spread.of([5.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    assert (spread.median_us, spread.p20_us, spread.p80_us, spread.repeats) == (3.5, 2.0, 5.0, 6)
    assert timing.Spread.of([7.0]).p80_us == 7.0


def test_long_calls_are_copied_less_often():
    assert [timing.warm_copies(us) for us in (0.0, 5.0, 150.0, 4000.0)] == [20, 20, 13, 1]


# Files, tables, figures, command line


RUN = {
    "versions": {},
    "hardware": {"gpu": "a GPU"},
    "read_bandwidth_gb_s": 4000.0,
    "launch_floor": timing.Timing(timing.Spread.of([2.0]), timing.Spread.of([1.0]), 20).fields(),
}


@pytest.fixture
def results(tmp_path):
    """A result file of the quick grid with all measurements except those of one rival."""

    class NoInputs(Workload):
        def decode_inputs(self, case):
            return case

        topk_inputs = decode_inputs

    ops = {
        name: Op(
            lambda workload, case: case,
            [
                dataclasses.replace(
                    each,
                    load=imported("no_such:x") if each.name == "FlashInfer" else lambda: None,
                    prepare=lambda loaded, inputs: lambda: None,
                    check=lambda inputs, calls: None,
                )
                for each in op.providers
            ],
        )
        for name, op in PROVIDERS.items()
    }
    path = tmp_path / "results.jsonl"
    workload = NoInputs(Geometry(), CPU, max_blocks=10**6)
    with ResultFile(path, RUN) as file:
        runner.Runner(ops, workload, FakeTimer(), 1e12, file.write, lambda: 1.0).run(QUICK.plan())
    return path


def test_results_are_read_as_they_were_written(results):
    found = report.read_results(results)
    assert found.about == json.loads(json.dumps(RUN))
    assert len(found.rows) == sum(
        provider.serves(case) for op, case in QUICK.plan() for provider in PROVIDERS[op].providers
    )


def test_the_table_shows_times_ratios_and_what_is_missing(results):
    done = CliRunner().invoke(app, ["table", str(results)])
    assert done.exit_code == 0, done.output
    assert "32q1s128K g4" in done.output
    assert "20.0 / 10.0  2.00x" in done.output
    assert "unavailable, 8 rows: FlashInfer: ModuleNotFoundError: No module named 'no_such'" in done.output


def test_figures_are_drawn_without_a_gpu(results, tmp_path):
    pytest.importorskip("matplotlib")
    done = CliRunner().invoke(app, ["plot", str(results), "--folder", str(tmp_path / "figures"), "--formats", "svg"])
    assert done.exit_code == 0, done.output
    files = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert files == [
        "attend_group4.svg",
        "decode_group4.svg",
        "prefill_group4.svg",
        "score_group4.svg",
        "speed_up_flashattention_3.svg",
        "topk.svg",
        "write_group4.svg",
    ]
    assert all((tmp_path / "figures" / name).stat().st_size > 5000 for name in files)


def test_options_replace_parts_of_the_grid():
    grid = grid_of(quick=True, only=["decode,topk"], grid=None, groups=["8"])
    assert (grid.ops, grid.steps, grid.groups) == (("decode", "topk"), QUICK.steps, (8,))
    steps = grid_of(True, ["attend"], ["8K,2K=2", "32K=4,1"], ["8"]).plan()
    assert [(case.batch, case.context) for _, case in steps if case.format == "int4"] == [
        (1, 32768), (2, 2048), (2, 8192), (4, 32768)
    ]  # fmt: skip
    assert grid_of(False, None, None, None) == Grid()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--output", "x", "--only", "decode,sort"], "got 'sort', allowed: decode, route, route_unique, topk"),
        (["run", "--output", "x", "--grid", "2M=1"], "got '2M=1', allowed: CONTEXT=BATCH,..."),
        (["run", "--output", "x", "--grid", "2K=max"], "got '2K=max', allowed: CONTEXT=BATCH,..."),
        (["run", "--output", "x", "--groups", "2M"], "got '2M', allowed: positive integers"),
        (["run", "--output", "x", "--time-limit", "0"], "Invalid value for '--time-limit'"),
        (["run", "--output", "x"], "no CUDA device"),
        (["run"], "--output"),
        (["table", "no-such-file"], "no-such-file"),
        (["plot", __file__, "--folder", "x"], "test_kernels.py"),
        (["plot", __file__, "--folder", "x", "--formats", "gif"], "got 'gif', allowed: svg, png"),
    ],
)
def test_bad_input_ends_in_one_message(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("program", "module", "command"),
    [
        ("/checkout/bench/kernels/__main__.py", "bench.kernels.__main__", "python -m bench.kernels"),
        ("/checkout/bench/decode_cpu.py", None, "python bench/decode_cpu.py"),
        ("/environment/bin/vllm-sparse", None, "vllm-sparse"),
    ],
)
def test_the_recorded_command_has_no_paths_of_the_machine(program, module, command, monkeypatch):
    spec = ModuleSpec(module, None) if module else None
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(sys, "argv", [program, "run", "--output", "/somewhere/out.jsonl", "--only", "topk,score"])
    described = describe_run(packages=["rich", "no-such"])
    assert described["command"] == f"{command} run --output out.jsonl --only topk,score"
    assert "model" not in described
    assert "rich" in described["versions"]
    assert "no-such" not in described["versions"]
