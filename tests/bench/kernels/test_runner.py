"""Rows of a run."""

from itertools import count

from support.bench.kernels import PLAN, FakeTimer, loads, op_of, provider, run, scoring

from bench.kernels import checks, runner
from bench.kernels.calls import imported
from bench.kernels.cases import OPS, DecodeCase, PrefillCase, TopKCase
from bench.kernels.providers import PROVIDERS, Op


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
    ours, rival = run(ops, PLAN[:1], workload)
    assert ours["status"] == "measured"
    assert (rival["status"], rival["reason"]) == ("wrong", "replayed graph: a score of request 0 is off by inf")


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
        assert op.subject in ("unique", "sinkrouter", "unique, routed", "art", "unique, density 0.1", "zipvl")
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
    # ZipVL's kernels need a GPU, or the interpreter: see test_token_prefill.
    plan = [(name, others.get(name, DecodeCase(2, 768, 2))) for name in PROVIDERS if name != "tokens"]
    rows = run(ours, plan, workload)
    for row in rows:
        (each,) = [each for each in ours[row["op"]].providers if each.name == row["provider"]]
        assert row["status"] == ("measured" if loads(each) else "unavailable"), row
    measured = ("topk", "score", "attend", "route", "route_unique", "stop", "verify")
    assert [row["status"] for row in rows if row["op"] in measured] == ["measured"] * 14
