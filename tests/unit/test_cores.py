import os
from types import SimpleNamespace

import pytest

from vllm_sparse_plugin.tools import cores
from vllm_sparse_plugin.tools.cli import vllm_commands
from vllm_sparse_plugin.tools.cores import BIND, bind_to_every_core, core_left_free
from vllm_sparse_plugin.tools.cpu_memory import SPACE


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes a machine with some CPUs available to this process; returns the folder that describes it."""

    def build(cores_of: list[list[int]], allowed: set[int], nodes: int = 1):
        for core in cores_of:
            for cpu in core:
                folder = tmp_path / f"cpu/cpu{cpu}/topology"
                folder.mkdir(parents=True)
                (folder / "thread_siblings_list").write_text(",".join(map(str, core)))
        for node in range(nodes):
            (tmp_path / f"node/node{node}").mkdir(parents=True)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
        return tmp_path

    monkeypatch.delenv(BIND, raising=False)
    monkeypatch.setattr(cores, "is_cpu_build", lambda: True)
    return build


def test_every_core_has_one_thread(machine):
    assert bind_to_every_core(machine([[0, 2], [1, 3]], {0, 1, 2, 3})) == {BIND: "0,1"}


def test_a_core_whose_first_thread_is_not_allowed_has_its_second(machine):
    assert bind_to_every_core(machine([[0, 2], [1, 3]], {1, 2})) == {BIND: "1,2"}


def test_a_machine_that_does_not_describe_itself_has_a_core_for_each_cpu(machine):
    assert bind_to_every_core(machine([], {4, 5})) == {BIND: "4,5"}


def test_what_the_user_said_stays(machine, monkeypatch):
    monkeypatch.setenv(BIND, "1")
    assert bind_to_every_core(machine([[0], [1]], {0, 1})) == {}


def test_vllm_chooses_among_numa_nodes(machine):
    assert bind_to_every_core(machine([[0], [1]], {0, 1}, nodes=2)) == {}


def test_a_gpu_needs_no_cores(machine, monkeypatch):
    monkeypatch.setattr(cores, "is_cpu_build", lambda: False)
    assert bind_to_every_core(machine([[0], [1]], {0, 1})) == {}


@pytest.mark.parametrize(("allowed", "says"), [({0}, False), ({0, 1}, True), (set(range(64)), False)])
def test_serve_says_on_small_machines_that_a_core_is_left_free(machine, monkeypatch, capsys, allowed, says):
    system = machine([], allowed)
    monkeypatch.setattr(cores, "_SYSTEM", system)
    monkeypatch.setattr(bind_to_every_core, "__defaults__", (system,))
    monkeypatch.setattr(vllm_commands, "_run", lambda *_: None)
    monkeypatch.setenv(SPACE, "2")
    vllm_commands.serve(SimpleNamespace(args=["MODEL"]))
    expected = f"vllm-sparse: vLLM leaves one of 2 cores to its scheduler; {BIND}=0,1 gives the model all of them.\n"
    assert capsys.readouterr().err == (expected if says else "")
    assert (core_left_free() is not None) == says
